"""The `--load` part of `weight_sync.py`: what syncs cost an engine that has more requests than it can run.

Another process keeps `running` requests running and `waiting` requests behind them; a request that ends is replaced by
another. Blocks with and without syncs alternate. In a block with syncs one starts every 50 ms, or when the previous one has
ended. The weights were computed beforehand, and differ in every element, so that the trainer has nothing else to do. A step
is the time in which every running request draws a token, without syncs:

    throughput   tokens per second in blocks with syncs, relative to that in blocks without
    sync         all of `bridge.sync`
    lost tokens  `SyncReport.lost_tokens`: what the engine says that the commit cost"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_device
from rich.console import Console
from rich.progress import track
from rich.table import Table
from weight_sync_gpu import MAIN, SHAPES, make

import slipstream
from slipstream.config import EmbeddedConfig, VllmConfig
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig

TINY = ModelConfig(
    "llama", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip
INTERVAL = 0.05
NUM_PAIRS = 4
"""Blocks with syncs, and as many without."""
MIN_THROUGHPUT, SYNC_MS, MAX_P50_STEPS, MAX_P99_STEPS = 0.97, 10.0, 1, 3
PATIENCE = 120.0


def run(engine: str, on_gpu: bool, num_syncs: int, running: int, waiting: int, python: str) -> dict[str, Any]:
    """`engine` is `embedded` or `vllm`; `python` is the interpreter of vLLM."""
    config, dtype, tokens = (SHAPES[MAIN], "bfloat16", 64) if on_gpu else (TINY, "float32", 8)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # trainer and engine share the GPU
    shared: dict[str, Any] = dict(
        dtype=dtype, max_num_seqs=running, max_model_len=8 * tokens, kv_cache_tokens=running * 8 * tokens
    )
    options = VllmConfig(python=python, **shared) if engine == "vllm" else EmbeddedConfig(**shared)
    specs = families.tensors(config)
    versions = [make(specs, dtype, seed) for seed in range(2)]
    turns = itertools.cycle(versions)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        with slipstream.launch(root, engine=options, run_dir=root / "run", start_timeout=400) as bridge:
            for _ in range(4):  # the first ones connect, and create the engine's memory
                report = bridge.sync(next(turns))
            with load(root, running + waiting, tokens, config.vocab_size) as drawn:
                blocks = measure(bridge, turns, num_syncs // NUM_PAIRS)
            ends, counts = drawn()
    return {
        "machine": describe_device(),
        "on_gpu": on_gpu,
        "engine": engine,
        "transport": report.engines[0].transport,
        "num_bytes": sum(array.nbytes for array in versions[0].values()),
        "running": running,
        "waiting": waiting,
        **evaluate(blocks, ends, counts, running),
    }


def measure(bridge: slipstream.Bridge, turns: Iterator[dict[str, Any]], num_syncs: int) -> list[dict[str, Any]]:
    """Run the blocks; return when each began and ended, and its syncs."""
    for _ in range(num_syncs):  # a warm-up, in which programs are compiled and ticks get their length
        timed_sync(bridge, next(turns))
    blocks = []
    for number in track(range(2 * NUM_PAIRS), "blocks"):
        start = time.monotonic()
        syncs: list[dict[str, float]] = []
        if number % 4 in (1, 2):  # without, with, with, without: a drift affects both alike
            for step in range(num_syncs):
                time.sleep(max(0.0, start + step * INTERVAL - time.monotonic()))
                syncs.append(timed_sync(bridge, next(turns)))
        time.sleep(max(0.0, start + num_syncs * INTERVAL - time.monotonic()))
        blocks.append({"start": start, "end": time.monotonic(), "syncs": syncs})
    return blocks


def timed_sync(bridge: slipstream.Bridge, params: dict[str, Any]) -> dict[str, float]:
    start = time.perf_counter()
    report = bridge.sync(params)
    seconds, commit = time.perf_counter() - start, report.engines[0].commit
    assert report.num_bytes, "the versions should differ"
    return {
        "seconds": seconds,
        "pause": commit.pause_seconds,
        "wait": commit.wait_seconds,
        "lost_tokens": report.lost_tokens,
        "tokens_per_second": commit.tokens_per_second,
    }


def evaluate(blocks: list[dict[str, Any]], ends: np.ndarray, counts: np.ndarray, running: int) -> dict[str, Any]:
    """`ends` and `counts`: when each request ended, and its tokens."""
    throughput = {}
    for has_syncs in (False, True):
        of_kind = [block for block in blocks if bool(block["syncs"]) == has_syncs]
        tokens = sum(counts[(ends >= b["start"]) & (ends < b["end"])].sum() for b in of_kind)
        throughput[has_syncs] = float(tokens) / sum(b["end"] - b["start"] for b in of_kind)
    syncs = [sync for block in blocks for sync in block["syncs"]]
    seconds = [sync["seconds"] for sync in syncs]
    return {
        "num_syncs": len(syncs),
        "syncs_per_second": len(syncs) / sum(b["end"] - b["start"] for b in blocks if b["syncs"]),
        "tokens_per_second": {"without": throughput[False], "with": throughput[True]},
        "throughput_ratio": throughput[True] / throughput[False],
        "step_seconds": running / throughput[False],
        "sync_seconds": {"p50": float(np.percentile(seconds, 50)), "p99": float(np.percentile(seconds, 99))},
        **{
            f"median_{key}": statistics.median(sync[key] for sync in syncs)
            for key in ("pause", "wait", "tokens_per_second")
        },
        "lost_tokens_per_sync": statistics.fmean(sync["lost_tokens"] for sync in syncs),
    }


def show(results: dict[str, Any], console: Console) -> None:
    step, sync = 1e3 * results["step_seconds"], results["sync_seconds"]
    p50, p99, ratio = 1e3 * sync["p50"], 1e3 * sync["p99"], results["throughput_ratio"]
    goals = [
        ("throughput with syncs, of that without", f"{ratio:.3f}", f"≥ {MIN_THROUGHPUT}", ratio >= MIN_THROUGHPUT),
        *(
            (f"bridge.sync, {name}", f"{value:.1f} ms", f"≤ {limit:.1f} ms: {SYNC_MS:g} ms + {n} steps", value <= limit)
            for name, value, n in (("p50", p50, MAX_P50_STEPS), ("p99", p99, MAX_P99_STEPS))
            for limit in (SYNC_MS + n * step,)
        ),
    ]
    requests = f"{results['running']} requests running and {results['waiting']} waiting"
    title = (
        f"{results['num_syncs']} syncs of {results['num_bytes'] / 1e6:,.1f} MB over {results['transport']} to "
        f"{results['engine']}, {requests}, on {results['machine']['device']}"
    )
    table = Table("", "measured", "goal on a GPU", "", title=title)
    for what, measured, goal, is_reached in goals:
        table.add_row(what, measured, goal, ("PASS" if is_reached else "FAIL") if results["on_gpu"] else "")
    table.add_section()
    table.add_row("one decode step, without syncs", f"{step:.2f} ms")
    for name, rate in results["tokens_per_second"].items():
        table.add_row(f"tokens per second, {name} syncs", f"{rate:,.0f}")
    table.add_row("lost tokens per sync, as the engine reports", f"{results['lost_tokens_per_sync']:,.1f}")
    table.add_row("pause, median", f"{1e3 * results['median_pause']:.2f} ms")
    table.add_row("syncs per second", f"{results['syncs_per_second']:.1f}")
    console.print(table)


# --- the requests, in a process of their own ---


@contextlib.contextmanager
def load(root: Path, count: int, tokens: int, vocab_size: int) -> Iterator[Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """Keep `count` requests at the engine. The function that is yielded returns, afterwards, when each request ended and
    how many tokens it had."""
    drawn = root / "drawn"
    command = [sys.executable, __file__, str(root / "run"), str(count), str(tokens), str(vocab_size)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with drawn.open("w") as file, subprocess.Popen(command, stdout=file, env=environment) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while drawn.read_text().count("\n") < count:  # until the first ones were replaced
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} does not get {count} completions")
                time.sleep(0.1)
            yield lambda: _read(drawn)
            assert process.poll() is None, "the requests ended early; its output is above"
        finally:
            process.kill()


def _read(drawn: Path) -> tuple[np.ndarray, np.ndarray]:
    lines = drawn.read_text().splitlines(keepends=True)
    rows = np.array([line.split() for line in lines if line.endswith("\n")], float)
    return rows[:, 0], rows[:, 1]


async def keep_generating(run_dir: str, count: int, tokens: int, vocab_size: int) -> None:
    """Print a line for each request: when it ended, and how many tokens it had. `tokens` is the length of a prompt;
    completions are once to three times as long."""
    source = random.Random(0)
    with slipstream.connect(run_dir) as bridge:

        async def one_after_another() -> None:
            while True:
                prompt = [source.randrange(8, vocab_size) for _ in range(tokens)]
                sampling = slipstream.SamplingParams(max_tokens=source.randint(tokens, 3 * tokens), ignore_eos=True)
                (completion,) = await bridge.agenerate([prompt], sampling)
                print(time.monotonic(), len(completion.token_ids), flush=True)

        await asyncio.gather(*(one_after_another() for _ in range(count)))


if __name__ == "__main__":
    asyncio.run(keep_generating(sys.argv[1], *map(int, sys.argv[2:])))
