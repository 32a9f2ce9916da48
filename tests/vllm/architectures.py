"""Syncs into vLLM of models that our decoder does not know, one of them with a draft model, and what an engine refuses to start.
Runs in vLLM's environment, with vLLM in this process, so that it is imported once for all of them:

    python -m tests.vllm.architectures FOLDER [ARCHITECTURE…]

Prints one line of JSON per architecture and, unless some are named, one of the refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import AdapterConfig, VllmConfig
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.worker_extension import WorkerExtension
from slipstream.model.checkpoints.served_model import as_stored, served_model
from slipstream.model.lora import adapter_tensors, targets
from slipstream.model.tree import unflatten
from slipstream.plugins.torch_trainer import update_weights
from slipstream.runtime import event_loop
from slipstream.types import Lora, SamplingParams, TensorSpec
from tests.adapters import adapted
from tests.tiny import hf_greedy, served, tiny_config, write_config
from tests.vllm import one_process  # noqa: F401  # replaces `AsyncLLM`
from tests.vllm.draft_syncs import check_syncs, error_of, speculation
from tests.vllm.random_models import GROUPED, PROMPT, SHAPE, new_weights

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "Granite": GROUPED | {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "StableLm": GROUPED | {"use_qkv_bias": True},
    "GPTNeoX": SHAPE | {"rotary_pct": 0.5},
    "Cohere": GROUPED | {"logit_scale": 0.5},
}
ADAPTED = ("Phi3", "Granite", "Cohere")
"""Architectures of which vLLM serves LoRA adapters. The second has its projections apart, the first has them fused in the checkpoint, too."""
SYNCS = 10
COUNT = 6


@contextlib.contextmanager
def failing_at(index: int) -> Iterator[None]:
    """The next load fails before its tensor `index`; what comes after it does not."""
    weights = WorkerExtension._slipstream_weights

    def fail(self: Any, *args: Any) -> Any:
        WorkerExtension._slipstream_weights = weights
        for at, pair in enumerate(weights(self, *args)):
            if at == index:
                raise MemoryError(f"no room for {pair[0]}")
            yield pair

    WorkerExtension._slipstream_weights = fail
    try:
        yield
    finally:
        WorkerExtension._slipstream_weights = weights


def run(name: str, folder: Path) -> dict[str, Any]:
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = []
    for seed in range(
        SYNCS + 2
    ):  # now, as vLLM changes the classes of transformers for models that it has not written anew
        new_weights(model, seed)
        expected.append(hf_greedy(model, PROMPT, COUNT))
    adapters, lora, weights = None, Lora("a", 3, 6.0, ("o_proj",)), dict[str, Any]()
    if name in ADAPTED:
        stored = as_stored(model, dict(model.named_parameters()))
        specs = [TensorSpec(stored_name, tuple(parameter.shape)) for stored_name, parameter in stored.items()]
        lora = dataclasses.replace(lora, targets=targets(specs))
        rng = np.random.default_rng(0)
        weights = {s.name: 0.3 * rng.standard_normal(s.shape, np.float32) for s in adapter_tensors(specs, lora)}
        adapters = AdapterConfig(slots=1, rank=3)
        with adapted(model, unflatten(weights), lora):
            expected_adapted = hf_greedy(model, PROMPT, COUNT)
    new_weights(model, 0)
    model.save_pretrained(folder / name)
    config.save_pretrained(folder / f"{name} without weights")
    weightless = served_model(folder / f"{name} without weights")
    bridge = start(folder / name, adapters=adapters)
    (info,) = (engine.info for engine in bridge.status().engines)

    def greedy() -> tuple[int, ...]:
        return served(bridge, [PROMPT], COUNT)[0]

    tokens = [greedy()]
    if adapters is not None:
        bridge.sync(weights, adapter=lora)
    for seed in range(1, SYNCS + 1):
        new_weights(model, seed)
        update_weights(bridge, model)
        tokens.append(greedy())

    new_weights(model, SYNCS + 1)
    version, errors, kept, refused = bridge.version, [], [], {}
    for index in range(1, len(info.tensors)) if name == "Granite" else [len(info.tensors) // 2]:
        with failing_at(index):
            errors.append(error_of(lambda: update_weights(bridge, model)))
        kept.append((greedy(), bridge.version) == (expected[SYNCS], version))
    model.save_pretrained(folder / name)
    state = load_file(folder / name / "model.safetensors")
    first = next(iter(state))
    for what, wrong in {
        "missing": {n: t for n, t in state.items() if n != first},
        "unknown": state | {"extra.weight": torch.zeros(3)},
        "shape": state | {first: torch.zeros(3, 5)},
    }.items():
        refused[what] = error_of(lambda wrong=wrong: bridge.sync(wrong))
    bridge.sync(folder / name)
    tokens.append(greedy())
    of_adapter = []
    if adapters is not None:
        sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
        (found,) = bridge.generate([PROMPT], sampling, adapter="a")
        of_adapter = [found.token_ids, expected_adapted]
    bridge.close()
    return {
        "architecture": config.model_type,
        "model": info.model,
        "tokens": tokens,
        "expected": expected,
        "of_adapter": of_adapter,
        "errors": errors,
        "kept": kept,
        "refused": refused,
        "first": first,
        "same_tensors": {t.name: t.shape for t in weightless.tensors} == {t.name: t.shape for t in info.tensors},
    }


def start(model: Path, draft: Path | None = None, adapters: AdapterConfig | None = None) -> Bridge:
    async def started() -> LocalFleet:
        return LocalFleet(await VllmEngine.start(model, options=options))

    arguments = speculation(draft) if draft else {}
    options = VllmConfig(max_num_seqs=2, max_model_len=64, vllm=arguments, adapters=adapters)
    return Bridge(event_loop.run(started()))


def refusals(folder: Path) -> dict[str, str]:
    weightless = write_config(folder / "weightless", tiny_config("llama", hidden_size=128, head_dim=32))
    small_heads = write_config(folder / "small heads", tiny_config("llama"))
    return {
        "small heads": error_of(lambda: start(small_heads)),
        "a draft without weights": error_of(lambda: start(weightless, weightless)),
    }


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names or ARCHITECTURES:
        print(json.dumps(run(name, Path(folder))), flush=True)
    if not names:
        config = transformers.StableLmConfig(**GROUPED, architectures=["StableLmForCausalLM"])
        check_syncs(start, Path(folder) / "draft", config)
        print(json.dumps(refusals(Path(folder))), flush=True)


if __name__ == "__main__":
    main()
