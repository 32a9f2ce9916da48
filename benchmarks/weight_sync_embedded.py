"""The embedded half of `weight_sync.py --gpu`: a JAX trainer's weights into an embedded engine on the same GPU, which runs
in another process (`cuda`) or in the trainer's (`device`).

Each shape is measured in one run beside a plain copy of the same bytes on the device. `sync` is all of `bridge.sync`,
`pause` the time during which the engine could not generate; medians over the rounds. Then `bridge.verify` compares the
checksums of all tensors in the engine with the trainer's. `--tiny` runs the same code with a small model on CPU, over
shared memory: a check of this command, whose times say nothing.

That a killed trainer leaves the old version serving is tested, not measured: at every phase of an update by
`test_a_trainer_killed_at_every_phase_boundary` in tests/deploy/test_faults.py, and that memory which it had shared stays
readable by `test_a_killed_trainers_memory_stays_readable_and_is_then_unmapped` in tests/weights/test_cuda.py."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from machine import describe_device
from rich.console import Console
from rich.table import Table
from weight_sync_gpu import MAIN, SHAPES, attempt, busy, make, median, raw_copy, sync_rounds
from weight_sync_load import TINY

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import to_hf

LANES = {
    "process": "another process",
    "process, unchecked": "another process, no checksums, no check for NaN",
    "process, while it generates": "another process, while it generates",
    "in-process": "the trainer's process",
    "copy": "raw device copy",
}
GOALS = {
    (MAIN, "process", "sync"): 6.0,
    (MAIN, "process", "pause"): 1.0,
    (MAIN, "in-process", "sync"): 3.0,
    ("8B", "process", "sync"): 16.0,
    ("8B", "process", "pause"): 1.0,
}
"""In milliseconds, by shape, lane and what is measured."""


def run(shapes: list[str], rounds: int, is_tiny: bool) -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # trainer and engine share the GPU
    console = Console(width=150)
    found: dict[str, Any] = {"machine": describe_device(), "rounds": rounds, "shapes": {}}
    for name in ["tiny"] if is_tiny else shapes:
        found["shapes"][name] = measure(name, rounds, console)
        console.print(table(name, found["shapes"][name], found["machine"]["device"]))
    found["goals"] = goals(found["shapes"])
    for what, value, limit in found["goals"]:
        console.print(f"{'PASS' if value <= limit else 'FAIL'}  {what}: {value:.2f} ms (goal ≤ {limit:g})")
    return found


def measure(name: str, rounds: int, console: Console) -> dict[str, Any]:
    is_tiny = name == "tiny"
    config = TINY if is_tiny else SHAPES[name]
    dtype: Literal["float32", "bfloat16"] = "float32" if is_tiny else "bfloat16"
    specs = families.tensors(config)
    result: dict[str, Any] = {"tensors": len(specs), "seconds": {}, "verified": {}, "failed": {}}
    options = EmbeddedConfig(dtype=dtype, max_num_seqs=16, max_model_len=512, kv_cache_tokens=8192)
    versions = [make(specs, dtype, seed) for seed in range(2)]
    result["num_bytes"] = sum(array.nbytes for array in versions[0].values())
    copy = host_copy(versions) if is_tiny else raw_copy(versions)
    result["seconds"]["copy"] = [{"sync": copy()} for _ in range(rounds + 2)][2:]
    del copy  # the memory that it writes to

    def take(lane: str, bridge: slipstream.Bridge) -> None:
        result["seconds"][lane] = list(sync_rounds(bridge, versions, rounds))
        result.setdefault("transports", {})[lane] = bridge.sync(versions[0]).engines[0].transport
        checked = bridge.verify(versions[0])
        assert checked.num_parts >= len(specs) and not checked.unchecked, checked
        result["verified"][lane] = checked.is_same

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        run_dir, transport = root / "run", "shm" if is_tiny else "cuda"
        with (
            attempt(result, "another process", console),
            slipstream.launch(root, engine=options, run_dir=run_dir, start_timeout=400),
        ):
            for lane, checked in (("process", True), ("process, unchecked", False)):
                with slipstream.connect(
                    run_dir, transport=transport, checksums=checked, check_finite=checked
                ) as bridge:
                    take(lane, bridge)
            with busy(run_dir), slipstream.connect(run_dir, transport=transport) as bridge:
                take("process, while it generates", bridge)
        with (
            attempt(result, "the trainer's process", console),
            slipstream.inprocess(root, engine=options, transport="device") as bridge,
        ):
            take("in-process", bridge)
    return result


def host_copy(versions: list[dict[str, Any]]) -> Callable[[], float]:
    from weight_sync import memcpy_reference

    return memcpy_reference([np.asarray(array) for array in versions[0].values()])


def goals(shapes: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [
        (f"{name}, {LANES[lane]}: {what}", 1e3 * median(shapes[name]["seconds"][lane], what), limit)
        for (name, lane, what), limit in GOALS.items()
        if name in shapes and lane in shapes[name]["seconds"]
    ]


def table(name: str, shape: dict[str, Any], device: str) -> Table:
    size, columns = shape["num_bytes"], ("sync", "pause", "plan", "send", "stage", "commit")
    title = f"{name}: {size / 1e9:.3g} GB in {shape['tensors']} tensors, on one {device}; ms"
    found = Table("engine in", "", *columns, "of copy", "bits", title=title)
    for lane, label in LANES.items():
        if rows := shape["seconds"].get(lane):
            cells = [f"{1e3 * median(rows, key):.2f}" if key in rows[0] else "" for key in columns]
            ratio = median(rows, "sync") / median(shape["seconds"]["copy"], "sync")
            bits = {True: "equal", False: "DIFFERENT", None: ""}[shape["verified"].get(lane)]
            found.add_row(label, shape.get("transports", {}).get(lane, ""), *cells, f"{ratio:.2f} ×", bits)
    for what, why in shape["failed"].items():
        found.add_row(f"{what} failed", why)
    return found


def is_well(results: dict[str, Any]) -> bool:
    """Whether everything was measured, and all bits were equal. Goals may be missed."""
    shapes = results["shapes"].values()
    return all(not s["failed"] and len(s["verified"]) == len(LANES) - 1 and all(s["verified"].values()) for s in shapes)
