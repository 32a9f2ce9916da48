"""Syncs into vLLM of models that our decoder does not know. Runs in vLLM's environment, with vLLM in this process, so that it
is imported once for all of them:

    python -m tests.vllm.architectures FOLDER

Prints one line of JSON per architecture."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
from safetensors.torch import load_file

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import VllmConfig
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.worker_extension import WorkerExtension
from slipstream.errors import EngineFailure, MappingError
from slipstream.model.checkpoints.served_model import served_model
from slipstream.plugins.torch_trainer import update_weights
from slipstream.runtime import event_loop
from tests.tiny import hf_greedy, served
from tests.vllm import one_process  # noqa: F401  # replaces `AsyncLLM`
from tests.vllm.random_models import GROUPED, PROMPT, SHAPE, new_weights

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "Granite": GROUPED | {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "StableLm": GROUPED | {"use_qkv_bias": True},
    "GPTNeoX": SHAPE | {"rotary_pct": 0.5},
    "Cohere": GROUPED | {"logit_scale": 0.5},
}
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


def error_of(call: Any) -> str:
    try:
        call()
    except (EngineFailure, MappingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run(name: str, folder: Path) -> dict[str, Any]:
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = []
    for seed in range(
        SYNCS + 2
    ):  # now, as vLLM changes the classes of transformers for models that it has not written anew
        new_weights(model, seed)
        expected.append(hf_greedy(model, PROMPT, COUNT))
    new_weights(model, 0)
    model.save_pretrained(folder / name)
    config.save_pretrained(folder / f"{name} without weights")
    weightless = served_model(folder / f"{name} without weights")
    engine = event_loop.run(VllmEngine.start(folder / name, options=VllmConfig(max_num_seqs=2, max_model_len=64)))
    bridge = Bridge(event_loop.run(_fleet(engine)))
    info = engine.describe()

    def greedy() -> tuple[int, ...]:
        return served(bridge, [PROMPT], COUNT)[0]

    tokens = [greedy()]
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
    bridge.close()
    return {
        "architecture": config.model_type,
        "model": info.model,
        "tokens": tokens,
        "expected": expected,
        "errors": errors,
        "kept": kept,
        "refused": refused,
        "first": first,
        "same_tensors": {t.name: t.shape for t in weightless.tensors} == {t.name: t.shape for t in info.tensors},
    }


async def _fleet(engine: VllmEngine) -> LocalFleet:
    return LocalFleet(engine)


def main() -> None:
    for name in sys.argv[2:] or ARCHITECTURES:
        print(json.dumps(run(name, Path(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
