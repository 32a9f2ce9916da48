"""The GPU half of `weight_sync.py`: a JAX trainer's weights into a vLLM process on the same GPU.

Measures for each shape in one run: (a) mapped memory, (b) NCCL, (c) vLLM's own NCCL weight transfer, for one shape, (d)
a plain device copy of the same bytes, (e) a raw NCCL broadcast of them, (f) mapped memory of a PyTorch trainer. Reports
medians over the rounds:

    sync      all of `bridge.sync` through the gateway, from the call until the new version serves
    transfer  moving the bytes, timed in vLLM's worker (for the raw broadcast, in its receiver)
    pause     time during which the engine could not generate"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import VllmConfig
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig

HERE = Path(__file__).resolve().parent

SHAPES = {
    "0.1B": ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048,
    ),
    "1.2B": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True, max_position_embeddings=2048,
    ),
    "8B": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rope_theta=500_000.0, max_position_embeddings=2048,
    ),
}  # fmt: skip
MAIN = "1.2B"
"""The shape to which the targets apply."""


def run(shapes: list[str], native: list[str], rounds: int, python: str) -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")  # for JAX; the rest is for vLLM
    console = Console(width=150)
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rounds": rounds,
        "shapes": {},
    }
    for name in shapes:
        console.print(f"[bold]{name}")
        shape = found["shapes"][name] = measure(SHAPES[name], name in native, rounds, python, console)
        console.print(table(name, shape, found["device"]))
    found["targets"] = targets(found["shapes"])
    for what, value, bound, passed in found["targets"]:
        console.print(f"{'PASS' if passed else 'FAIL'}  {what}: {value:.2f} (target {bound})")
    return found


def measure(config: ModelConfig, native: bool, rounds: int, python: str, console: Console) -> dict[str, Any]:
    specs = families.tensors(config)
    num_bytes = 2 * sum(math.prod(spec.shape) for spec in specs)
    result: dict[str, Any] = {"num_bytes": num_bytes, "tensors": len(specs), "seconds": {}, "failed": {}}
    take = result["seconds"].setdefault
    options = VllmConfig(
        python=python,
        dtype="bfloat16",
        max_num_seqs=16,
        max_model_len=512,
        kv_cache_tokens=8192,
        enforce_eager=True,
    )

    def syncs(
        run_dir: Path, transport: str, versions: list[dict[str, Any]], checked: bool = True
    ) -> Iterator[dict[str, float]]:
        with slipstream.connect(run_dir, transport=transport, checksums=checked, check_finite=checked) as bridge:
            yield from sync_rounds(bridge, versions, rounds)

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        with slipstream.launch(root, engine=options, run_dir=root / "run", start_timeout=400):
            console.print("  vLLM has started")
            versions = [make(specs, "bfloat16", seed) for seed in range(2)]
            copy = raw_copy(versions)
            for row in syncs(root / "run", "cuda", versions):
                take("cuda", []).append(row)
                take("copy", []).append({"transfer": copy()})
            del copy
            take("cuda, unchecked", []).extend(syncs(root / "run", "cuda", versions, checked=False))
            with busy(root / "run"):
                take("cuda, while it generates", []).extend(syncs(root / "run", "cuda", versions))
            with attempt(result, "NCCL", console):
                take("nccl", []).extend(syncs(root / "run", "nccl", versions))
                take("nccl, unchecked", []).extend(syncs(root / "run", "nccl", versions, checked=False))
            del versions  # weights of 8B in both dtypes would not leave enough memory for vLLM
            versions = [make(specs, "float32", seed) for seed in range(2)]
            take("cuda, float32 to bfloat16", []).extend(syncs(root / "run", "cuda", versions))
            del versions
            with attempt(result, "PyTorch", console):
                tensors = [make_torch(specs, seed) for seed in range(2)]
                take("torch", []).extend(syncs(root / "run", "cuda", tensors))
                take("torch, unchecked", []).extend(syncs(root / "run", "cuda", tensors, checked=False))
                take("torch, through the host", []).extend(syncs(root / "run", "shm", tensors))
                take("torch, nccl", []).extend(syncs(root / "run", "nccl", tensors))
                del tensors
    with attempt(result, "raw NCCL", console):
        from nccl_raw import OPERATIONS
        from nccl_raw import measure as raw_nccl

        # Raw sends within one GPU are slow: minutes at 8B.
        operations = OPERATIONS if config == SHAPES[MAIN] else OPERATIONS[:1]
        for operation, rate in raw_nccl(num_bytes, rounds, operations=operations).items():
            take(operation, []).append({"transfer": num_bytes / rate / 1e9})
    if native:
        with attempt(result, "vLLM's own NCCL transfer", console):
            for seconds in vllm_native(config, python, rounds):
                take("native", []).append({"sync": seconds, "transfer": seconds})
    return result


def sync_rounds(bridge: slipstream.Bridge, versions: list[dict[str, Any]], rounds: int) -> Iterator[dict[str, float]]:
    """Sync `rounds` times after two syncs of warm-up (connections, caches), and yield the timings."""
    for step in range(rounds + 2):
        start = time.perf_counter()
        report = bridge.sync(versions[step % 2])
        seconds = time.perf_counter() - start
        if step >= 2:
            yield {"sync": seconds} | timings(report)
    check(bridge)


@contextmanager
def busy(run_dir: Path) -> Iterator[None]:
    """Keep the engine generating in the background, 16 samples at a time."""
    stop = threading.Event()

    def generate() -> None:
        with slipstream.connect(run_dir) as bridge:
            while not stop.is_set():
                bridge.generate([[1, 2, 3]], slipstream.SamplingParams(n=16, max_tokens=64, ignore_eos=True))

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(2.0)  # for the engine to compile
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


@contextmanager
def attempt(result: dict[str, Any], what: str, console: Console) -> Iterator[None]:
    """Record a failure of one measurement in `result`, so that the others still run."""
    try:
        yield
        console.print(f"  {what}: measured")
    except Exception as error:
        result["failed"][what] = f"{type(error).__name__}: {error}"
        console.print(f"  {what} failed: {type(error).__name__}: {error}", markup=False)


def make(specs: Any, dtype: str, seed: int) -> dict[str, jax.Array]:
    key = jax.random.key(seed)
    arrays = {}
    for number, spec in enumerate(specs):
        scale = 0.02 * jax.random.normal(jax.random.fold_in(key, number), spec.shape, jnp.float32)
        arrays[spec.name] = (scale if len(spec.shape) > 1 else 1 + scale).astype(dtype)
    jax.block_until_ready(arrays)
    return arrays


def make_torch(specs: Any, seed: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    tensors = {}
    for spec in specs:
        scale = 0.02 * torch.randn(spec.shape, device="cuda")
        tensors[spec.name] = (scale if len(spec.shape) > 1 else 1 + scale).bfloat16()
    return tensors


def timings(report: slipstream.SyncReport) -> dict[str, float]:
    engine = report.engines[0]
    commit = engine.commit
    return {
        # Mapped memory is read during the commit; other transports receive before it.
        "transfer": commit.load_seconds if engine.transport.startswith("cuda") else engine.stage.receive_seconds,
        "pause": commit.pause_seconds,
        "plan": report.plan_seconds,
        "send": report.send_seconds,
        "stage": report.stage_seconds,
        "commit": report.commit_seconds,
        "load": commit.load_seconds,
    }


def check(bridge: slipstream.Bridge) -> None:
    """Check that the engine still serves after the syncs."""
    status = bridge.status()
    assert status.engines[0].state == "ready", status
    assert len(bridge.generate([[1, 2, 3]], slipstream.SamplingParams(max_tokens=4, ignore_eos=True))) == 1


def raw_copy(versions: list[dict[str, jax.Array]]) -> Callable[[], float]:
    """Return a function that times driver copies of the same tensors within device memory, one copy per tensor."""
    from cuda.bindings import driver as cu

    sources = [(a.unsafe_buffer_pointer(), a.nbytes) for a in versions[0].values()]
    blank = [jnp.zeros_like(a) for a in versions[0].values()]
    jax.block_until_ready(blank)
    targets = [a.unsafe_buffer_pointer() for a in blank]
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1])
    _, stream = cu.cuStreamCreate(1)

    def run(keep: Any = blank) -> float:
        cu.cuCtxSynchronize()
        start = time.perf_counter()
        for target, (source, size) in zip(targets, sources):
            cu.cuMemcpyDtoDAsync(target, source, size, stream)
        cu.cuStreamSynchronize(stream)
        return time.perf_counter() - start

    return run


def vllm_native(config: ModelConfig, python: str, rounds: int) -> list[float]:
    """Return the seconds of complete updates by vLLM's own weight transfer from a torch trainer on this GPU."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(to_hf(config)))
        shapes = json.dumps([[t.name, t.shape] for t in families.tensors(config)])
        (Path(root) / "shapes.json").write_text(shapes)
        command = [python, str(HERE / "weight_sync_vllm.py"), root, str(rounds)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("native> ")]
    if done.returncode or not lines:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-8:]}")
    return [float(line.split()[1]) for line in lines]


# --- targets and tables ---


def median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows if key in row)


def targets(shapes: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    if MAIN not in shapes:
        return []
    rows, found = shapes[MAIN]["seconds"], []

    def at_most(what: str, value: float, limit: float) -> None:
        found.append((what, value, f"≤ {limit:g}", value <= limit))

    def at_least(what: str, value: float, limit: float) -> None:
        found.append((what, value, f"≥ {limit:g}", value >= limit))

    if rows.get("cuda"):
        plain = median(rows["cuda, unchecked"], "sync")  # (c) checks nothing either
        at_most("(a) whole sync, ms", 1e3 * median(rows["cuda"], "sync"), 6)
        at_most("(a) whole sync, no checks, ms", 1e3 * plain, 6)
        at_most("(a) pause, ms", 1e3 * median(rows["cuda"], "pause"), 3)
        at_least("(a) transfer, of (d)", median(rows["copy"], "transfer") / median(rows["cuda"], "transfer"), 0.6)
        if rows.get("native"):
            at_least(
                "(a) whole sync, no checks, times faster than (c)",
                median(rows["native"], "sync") / plain,
                10,
            )
            at_least(
                "(a) transfer, times faster than (c)",
                median(rows["native"], "sync") / median(rows["cuda"], "transfer"),
                30,
            )
    for kind in ("", ", unchecked"):
        if rows.get(f"torch{kind}") and rows.get(f"cuda{kind}"):
            ratio = median(rows[f"torch{kind}"], "sync") / median(rows[f"cuda{kind}"], "sync")
            at_most(f"(f) whole sync{kind}, of (a)", ratio, 1.5)
    if rows.get("nccl") and rows.get("broadcast"):
        at_least("(b) transfer, of (e)", median(rows["broadcast"], "transfer") / median(rows["nccl"], "transfer"), 0.9)
        at_most("(b) pause, ms", 1e3 * median(rows["nccl"], "pause"), 3)
    return found


NAMES = {
    "cuda": "(a) mapped memory",
    "cuda, unchecked": "(a) mapped memory, no checksums, no check for NaN",
    "cuda, float32 to bfloat16": "(a) mapped memory, float32 → bfloat16",
    "cuda, while it generates": "(a) mapped memory, while vLLM generates",
    "nccl": "(b) NCCL",
    "nccl, unchecked": "(b) NCCL, no checksums, no check for NaN",
    "native": "(c) vLLM's own NCCL transfer",
    "copy": "(d) raw device copy",
    "broadcast": "(e) raw NCCL broadcast",
    "send": "    raw NCCL send and receive",
    "torch": "(f) mapped memory, from PyTorch",
    "torch, unchecked": "(f) mapped memory, from PyTorch, no checksums, no check for NaN",
    "torch, through the host": "    from PyTorch, through host memory",
    "torch, nccl": "    from PyTorch, NCCL",
}


def table(name: str, shape: dict[str, Any], device: str) -> Table:
    size = shape["num_bytes"]
    title = f"{name}: {size / 1e9:.2f} GB in {shape['tensors']} tensors, bfloat16, on one {device}; ms"
    found = Table("", "sync", "transfer", "GB/s", "pause", "plan", "send", "stage", "commit", title=title)
    for lane, label in NAMES.items():
        if rows := shape["seconds"].get(lane):

            def cell(key: str, rows: Any = rows) -> str:
                return f"{1e3 * median(rows, key):.2f}" if key in rows[0] else ""

            transfer = median(rows, "transfer")  # 0: it was not measured apart
            speed = f"{size / transfer / 1e9:,.0f}" if transfer else ""
            found.add_row(
                label, cell("sync"), cell("transfer"), speed, *map(cell, ("pause", "plan", "send", "stage", "commit"))
            )
    for what, why in shape["failed"].items():
        found.add_row(f"{what} failed", why)
    return found


if __name__ == "__main__":
    sys.exit("run this with `python benchmarks/weight_sync.py --gpu`")
