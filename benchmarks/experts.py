"""A layer with experts: every expert for every token, grouped by expert, and `jax.lax.ragged_dot`, at the sizes of decoding,
prefill and training.

    python benchmarks/experts.py [--json benchmarks/results/experts_cpu.json]
    python benchmarks/experts.py --gpu [--json benchmarks/results/experts_gpu.json]      # bfloat16, Qwen3-30B-A3B's layer

`slipstream.model.transformer.experts.is_grouped` chooses between the first two. `ragged_dot` gets its weights
stacked beforehand, which an engine would have to do at each update. The ways alternate, so that a noisy machine slows all
equally; times are the best of several. Random weights route tokens almost evenly, which reads the most experts."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from machine import describe_device
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.transformer import decoder, experts
from slipstream.model.transformer.layers import PRECISION

CPU_LAYER, CPU_DTYPE = (512, MoeConfig(num_experts=64, experts_per_token=8, intermediate_size=192)), jnp.float32
GPU_LAYER, GPU_DTYPE = (2048, MoeConfig(num_experts=128, experts_per_token=8, intermediate_size=768)), jnp.bfloat16
FORWARD = (8, 16, 32, 64, 256, 1024)
"""Tokens: decoding with the engine's numbers of rows, and prefill."""
BACKWARD = (256, 1024)
MAX_RAGGED = 64
"""On CPU `ragged_dot` computes every expert and a mask for each; with more tokens it takes seconds and gigabytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="Qwen3-30B-A3B's layer in bfloat16, on a GPU")
    parser.add_argument("--repeat", type=int, default=5, help="measurements per size and way")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    (hidden, moe), dtype = (GPU_LAYER, GPU_DTYPE) if arguments.gpu else (CPU_LAYER, CPU_DTYPE)
    results = {
        "machine": describe_device(),
        "layer": {"hidden": hidden, "experts": moe.num_experts, "per_token": moe.experts_per_token,
                  "intermediate": moe.intermediate_size, "dtype": jnp.dtype(dtype).name},
        **measure(hidden, moe, dtype, arguments.repeat),
    }  # fmt: skip
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(hidden: int, moe: MoeConfig, dtype: Any, repeat: int) -> dict[str, Any]:
    config = ModelConfig(
        "qwen3_moe", vocab_size=8, hidden_size=hidden, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=8, moe=moe,
    )  # fmt: skip
    block = decoder.init(config, jax.random.key(0), dtype)["model"]["layers"][0]["mlp"]
    separate = block["experts"]
    stacked = jax.block_until_ready(jax.tree.map(lambda *leaves: jnp.stack(leaves).swapaxes(1, 2), *separate))
    ways: dict[str, tuple[Callable[..., jax.Array], Any]] = {
        "every expert": (experts.every_expert, separate),
        "grouped": (experts.grouped, separate),
        "ragged_dot": (ragged, stacked),
    }

    def layer(way: str, weights: Any, x: jax.Array, gate: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax((x @ gate.T).astype(jnp.float32))
        chosen = jax.lax.top_k(probabilities, moe.experts_per_token)[1]
        shares = experts.shares_of(probabilities, chosen, moe).astype(x.dtype)
        return ways[way][0](weights, config, x, chosen, shares)

    def loss(way: str, weights: Any, x: jax.Array, gate: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(layer(way, weights, x, gate).astype(jnp.float32)))

    programs = {
        "forward": {way: jax.jit(functools.partial(layer, way)) for way in ways},
        "forward and backward": {way: jax.jit(jax.grad(functools.partial(loss, way), (0, 1, 2))) for way in ways},
    }
    found: dict[str, Any] = {}
    for name, sizes in (("forward", FORWARD), ("forward and backward", BACKWARD)):
        found[name] = []
        for tokens in track(sizes, name):
            x = jax.random.normal(jax.random.key(tokens), (tokens, hidden), jnp.float32).astype(dtype)
            on_cpu = jax.default_backend() == "cpu"
            used = [way for way in ways if way != "ragged_dot" or not on_cpu or tokens <= MAX_RAGGED]
            seconds: dict[str, list[float]] = {way: [] for way in used}
            compile_seconds = {}
            for _ in range(repeat + 1):
                for way in used:
                    start = time.perf_counter()
                    jax.block_until_ready(programs[name][way](ways[way][1], x, block["gate"]["weight"]))
                    seconds[way].append(time.perf_counter() - start)
            for way, times in seconds.items():
                compile_seconds[way] = times.pop(0)
            found[name].append(
                {
                    "tokens": tokens,
                    "milliseconds": {way: 1e3 * min(times) for way, times in seconds.items()},
                    "compile_seconds": compile_seconds,
                }
            )
    return found


def ragged(weights: Any, config: ModelConfig, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
    """The grouped products of `jax.lax.ragged_dot`. `weights` are stacked, `[experts, in, out]`."""
    num_experts = len(weights["gate_proj"]["weight"])
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)
    rows = x[order // chosen.shape[1]]

    def product(rows: jax.Array, name: str) -> jax.Array:
        return jax.lax.ragged_dot(rows, weights[name]["weight"], sizes, precision=PRECISION)

    out = product(jax.nn.silu(product(rows, "gate_proj")) * product(rows, "up_proj"), "down_proj")
    out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return (out * shares[..., None]).sum(axis=1)


def show(results: dict[str, Any], console: Console) -> None:
    for name in ("forward", "forward and backward"):
        ways = list(results["forward"][0]["milliseconds"])
        table = Table("tokens", *(f"{way} (ms)" for way in ways), "grouped is faster by", title=name)
        for column in table.columns:
            column.justify = "right"
        for row in results[name]:
            times = row["milliseconds"]
            gain = times["every expert"] / times["grouped"]
            cells = (f"{times[way]:.1f}" if way in times else "–" for way in ways)
            table.add_row(str(row["tokens"]), *cells, f"{gain:.1f} ×")
        console.print(table)
    console.print(json.dumps(results["layer"]), json.dumps(results["machine"]))


if __name__ == "__main__":
    main()
