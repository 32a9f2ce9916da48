r"""LoRA adapters on one engine in another process: how long the update of one takes, and what serving 64 costs.

    python benchmarks/lora.py [--engine embedded] [--layers 30] [--slots 64] [--rank 8] [--repeats 15] \
        [--json benchmarks/results/lora.json]

Where JAX has a GPU, trainer and engines share it. The model has the 135M shape (SmolLM2) in float32. Adapters change all four
projections of attention. The references, in the same rounds: a sync of all weights, and an engine without adapters, whose
tokens per second are compared with those of an engine with adapters: for the base model, for one adapter, and for as many
adapters as there are rows. Medians are printed."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from machine import describe_device
from rich.console import Console
from rich.progress import track
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import AdapterConfig, EmbeddedConfig, VllmConfig
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.model.transformer.adapters import init_adapter
from slipstream.types import Lora, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MAX_SECONDS = {"cpu": 0.010, "gpu": 0.005}
ROWS, TOKENS = 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vllm-python", default="", help="Python command of an environment with vLLM")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # on a GPU, trainer and engines share it
    results = measure(arguments)
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    layers, slots, rank = arguments.layers, arguments.slots, arguments.rank
    config = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=layers, num_heads=9,
        num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    versions = [decoder.init(config, jax.random.key(seed)) for seed in range(2)]
    loras = [Lora(f"adapter-{index}", rank, 2.0 * rank, TARGETS) for index in range(slots)]
    trees = [adapter(config, loras[0], seed) for seed in range(2)]
    seconds, pauses = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    rates = defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        shared: dict[str, Any] = dict(dtype="float32", max_num_seqs=ROWS, max_model_len=64, kv_cache_tokens=64 * ROWS)
        engine: EmbeddedConfig | VllmConfig
        if arguments.engine == "embedded":
            engine = EmbeddedConfig(**shared)
        else:
            engine = VllmConfig(python=arguments.vllm_python, **shared)
        room = AdapterConfig(slots=slots, rank=rank, targets=TARGETS)
        with_adapters, without = (
            stack.enter_context(
                slipstream.launch(
                    root,
                    engine=engine.replace(adapters=adapters),
                    run_dir=root / name,
                    share_gpus=True,
                    start_timeout=400,
                )
            )
            for name, adapters in (("with", room), ("without", None))
        )
        for params in (*versions, *versions):  # the first two syncs create the engine's two images
            without.sync(params)
            full = with_adapters.sync(params)
        for index, lora in enumerate(loras):
            small = with_adapters.sync(trees[index % 2], adapter=lora)
        lanes = {
            "engine without adapters": (without, [""] * ROWS),
            "base model": (with_adapters, [""] * ROWS),
            "one adapter": (with_adapters, [loras[0].name] * ROWS),
            f"{slots} adapters": (with_adapters, [loras[row % slots].name for row in range(ROWS)]),
        }
        for bridge, names in lanes.values():
            generate(bridge, names)
        for turn in track(range(arguments.repeats), "rounds"):
            for name, report in (
                ("all weights", with_adapters.sync(versions[turn % 2])),
                ("all weights, none changed", with_adapters.sync(versions[turn % 2])),
                ("one adapter", with_adapters.sync(trees[turn % 2], adapter=loras[turn % slots])),
                ("another adapter", with_adapters.sync(trees[turn % 2], adapter=loras[(turn + 1) % slots])),
            ):
                seconds[name].append(report.total_seconds)
                pauses[name].append(report.pause_seconds)
            if turn % 5 == 0:
                for name, (bridge, names) in lanes.items():
                    rates[name].append(generate(bridge, names))
    return {
        "machine": describe_device(),
        "engine": arguments.engine,
        "layers": layers,
        "slots": slots,
        "rank": rank,
        "targets": TARGETS,
        "num_bytes": {"all weights": full.num_bytes, "one adapter": small.num_bytes},
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "median_pause_seconds": {name: statistics.median(values) for name, values in pauses.items()},
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
    }


def adapter(config: ModelConfig, lora: Lora, seed: int) -> Any:
    fresh = init_adapter(config, lora, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(fresh))))
    return jax.tree.map(lambda leaf: 0.02 * jax.random.normal(next(keys), leaf.shape, jnp.float32), fresh)


def generate(bridge: Bridge, names: list[str]) -> float:
    """Return tokens per second, prefill included."""
    bridge.reset_prefix_cache()
    prompts = [[5 + row, 6, 7, 8] for row in range(len(names))]
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    start = time.perf_counter()
    completions = bridge.generate(prompts, sampling, adapter=names)
    return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start)


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("sync", "bytes", "whole sync", "pause")
    for name, value in results["median_seconds"].items():
        size = 0 if "none" in name else results["num_bytes"].get(name, results["num_bytes"]["one adapter"])
        pause = results["median_pause_seconds"][name]
        table.add_row(name, f"{size:,}", f"{value * 1e3:.1f} ms", f"{pause * 1e3:.2f} ms")
    console.print(table)
    table = Table("64 rows of", "tokens/s", "of the engine without adapters")
    reference = results["tokens_per_second"]["engine without adapters"]
    for name, value in results["tokens_per_second"].items():
        table.add_row(name, f"{value:.0f}", f"{value / reference:.2f}")
    console.print(table)
    slowest = max(value for name, value in results["median_seconds"].items() if "adapter" in name)
    goal = MAX_SECONDS["cpu" if results["machine"]["device"] == "cpu" else "gpu"]
    verdict = "reached" if slowest <= goal else "not reached"
    console.print(f"target of {goal * 1e3:.0f} ms for the update of one adapter: {verdict}")


if __name__ == "__main__":
    main()
