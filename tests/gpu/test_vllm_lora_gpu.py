"""LoRA adapters in real vLLM on a GPU, beside a base model that is written in place, with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.config import AdapterConfig
from slipstream.model.transformer.adapters import merged
from slipstream.types import Lora, SamplingParams
from tests.adapters import random_adapter
from tests.conformance.engines import Subject
from tests.gpu.vllm import engine_options, needs_vllm
from tests.tiny import random_params, tiny_config, write_config

pytestmark = [pytest.mark.gpu, needs_vllm]

CONFIG = tiny_config("qwen3", hidden_size=128, head_dim=32)
PROMPT = tuple(range(8, 48))
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LORAS = Lora("a", 6, 12.0, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")), Lora("b", 2, 5.0, ("gate_proj",))


def weights(seed: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), random_params(CONFIG, seed))


def tree(lora: Lora, seed: int = 0) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), random_adapter(CONFIG, lora, seed, size=0.1))


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write_config(tmp_path_factory.mktemp("model"), CONFIG)
    engine = engine_options(dtype="bfloat16", enforce_eager=False, adapters=AdapterConfig(slots=2, rank=6))
    run_dir = tmp_path_factory.mktemp("run") / "run"
    with slipstream.launch(directory, engine=engine, run_dir=run_dir, start_timeout=400) as bridge:
        yield bridge


def check(bridge: Any, params: Any, *adapters: tuple[Lora, int]) -> None:
    """The logprobs that vLLM reports are those of the merged weights, within what 16 bits round."""
    found = bridge.generate([PROMPT] * (1 + len(adapters)), GREEDY, adapter=("", *(lora.name for lora, _ in adapters)))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    for completion, brought in zip(found, (None, *adapters)):
        expected = wide if brought is None else merged(wide, tree(brought[0], brought[1]), brought[0])
        tokens = [*PROMPT, *completion.token_ids]
        rows = Subject(None, CONFIG, expected).logprobs(tokens)[len(PROMPT) - 1 : -1]  # type: ignore[arg-type]
        reference = rows[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.raw_logprobs, reference, atol=0.1)


def test_adapters_beside_a_base_model_that_is_written_in_place(bridge: Any) -> None:
    a, b = LORAS
    params = weights(0)
    assert bridge.sync(params).engines[0].transport == "cuda"
    verified = bridge.verify(params)
    assert verified.is_same and not verified.unchecked, "parameters are found below vLLM's wrappers"
    assert bridge.sync(tree(a), adapter=a).engines[0].transport == "shm"
    bridge.sync(tree(b), adapter=b)
    check(bridge, params, (a, 0), (b, 0))
    bridge.sync(tree(a, 1), adapter=a)
    check(bridge, params, (a, 1), (b, 0))
    params = weights(1)
    assert bridge.sync(params).engines[0].transport == "cuda"
    assert bridge.verify(params).is_same
    check(bridge, params, (a, 1), (b, 0))


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleep(bridge: Any, level: int) -> None:
    a, b = LORAS
    params = weights(2)
    bridge.sync(params)
    bridge.sync(tree(a), adapter=a)
    bridge.sync(tree(b), adapter=b)
    bridge.sleep(level)
    if level == 2:
        params = weights(3)
        bridge.sync(params)
    bridge.wake()
    check(bridge, params, (a, 0), (b, 0))
