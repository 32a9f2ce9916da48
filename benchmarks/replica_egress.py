"""Bytes that leave the trainer in a sync to 1, 2 and 4 engines, counted at its sockets, beside `slipstream plan`'s prediction.

    python benchmarks/weight_sync.py --replicas

`tcp`: engine processes on this machine. All TCP sockets of the trainer are counted (the kernel's `tcpi_bytes_sent`), also
those to the gateway. As a reference, the same syncs with `drop_failed=True`, which sends every engine its own copy.

`nccl`: both halves of the transport in this process, over the tests' stand-in for NCCL, which passes a broadcast on from rank
to rank as NCCL's ring does. What goes into the sockets of rank 0 is counted."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import socket
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import psutil
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.deploy.advice.sync_cost import FleetShape, SyncCost, TrainerMesh, estimate, kinds_of
from slipstream.deploy.advice.topology import SYNC
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.families import family_tensors
from slipstream.model.transformer import decoder
from slipstream.weights.transports.nccl.transport import NcclReceiver, NcclSender

FLEETS = (1, 2, 4)
NUM_SYNCS = 4
MAX_GROWTH = 1.1
BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`."""


def run(layers: int, console: Console) -> dict[str, Any]:
    config = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=layers, num_heads=9,
        num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    kinds = kinds_of(family_tensors(config))
    predicted = {count: estimate(kinds, TrainerMesh(), FleetShape(count), "float32") for count in FLEETS}
    rows = {count: over_tcp(config, count) | {"plan": prediction(predicted[count], "tcp")} for count in FLEETS}
    results = {
        "machine": {
            "system": platform.platform(),
            "cpus": psutil.cpu_count(),
            "jax": jax.__version__,
            "load": os.getloadavg()[0],
        },
        "model_bytes": predicted[1].model_bytes,
        "tcp": rows,
        "nccl stand-in": over_nccl(),
    }
    show(results, console)
    return json.loads(json.dumps(results))


def prediction(cost: SyncCost, transport: str) -> dict[str, Any]:
    fixed, speed = SYNC[transport]
    return {**asdict(cost), "seconds": fixed + cost.seconds(speed)}


def over_tcp(config: ModelConfig, count: int) -> dict[str, Any]:
    """Return bytes and seconds per sync, passed on and one by one."""
    versions = [decoder.init(config, jax.random.key(seed)) for seed in range(2)]
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        options = EmbeddedConfig(max_num_seqs=1, max_model_len=64)
        with slipstream.launch(
            root, engines=count, engine=options, run_dir=root / "run", transport="tcp", timeout=600
        ) as bridge:
            for name, alone in (("one by one", True), ("passed on", False)):
                for params in (*versions, *versions):  # connects
                    bridge.sync(params, drop_failed=alone)
                before, seconds = tcp_bytes_sent(), []
                for number in range(NUM_SYNCS):
                    report = bridge.sync(versions[number % 2], drop_failed=alone)
                    assert len(report.engines) == count and not report.lost
                    seconds.append(report.send_seconds + report.stage_seconds)
                found[name] = {
                    "bytes": round((tcp_bytes_sent() - before) / NUM_SYNCS),
                    "seconds": sorted(seconds)[NUM_SYNCS // 2],
                }
    return found


def tcp_bytes_sent() -> int:
    """Return the bytes that this process has sent over the TCP connections that it has open."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as found:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
                    total += struct.unpack_from("<Q", info, BYTES_SENT)[0]
    return total


def over_nccl() -> dict[int, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    by_hand, fake = (importlib.import_module(f"tests.weights.{name}") for name in ("nccl_by_hand", "fake_nccl"))
    tiny = importlib.import_module("tests.tiny")
    model = by_hand.Model(config=tiny.tiny_config("qwen2", vocab_size=4096, hidden_size=256, intermediate_size=512))
    kinds = kinds_of(family_tensors(model.config))
    found = {}
    for count in FLEETS:
        cost = estimate(kinds, TrainerMesh(), FleetShape(count), model.dtype)
        with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor() as pool:
            nccl = fake.FakeNccl(directory)
            facts = (model.plan, 0, [0], 0, model.parameters)
            receivers = [NcclReceiver(*facts, primitive="broadcast", library=nccl) for _ in range(count)]
            for receiver in receivers:
                receiver.start()
            links = [receiver.links[0] for receiver in receivers]
            senders = [NcclSender(link, model.plan, model.plan.stream(0, 0), "engine", library=nccl) for link in links]
            for version in range(2):
                pieces = model.pieces(model.weights(version), 0, 0)
                before = sum(pair.sent for pair in nccl.pairs if pair.rank == 0)
                for receiver in receivers:
                    receiver.expect(version)
                sending = pool.submit(senders[0].broadcast, version, pieces, senders[1:])
                for receiver in receivers:
                    receiver.wait(version, pieces)
                sending.result()
            sent = sum(pair.sent for pair in nccl.pairs if pair.rank == 0) - before
            for sender in senders:
                sender.close()
            for receiver in receivers:
                receiver.close()
        found[count] = {"broadcast": {"bytes": sent}, "plan": prediction(cost, "nccl")}
    return found


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(
        "engines", "sent, MB", "× one engine", "plan says, MB", "one by one, MB", "ms", "one by one, ms",
        title=f"a sync of {results['model_bytes'] / 1e6:.0f} MB over tcp: what leaves the trainer",
    )  # fmt: skip
    rows = results["tcp"]
    for count, row in rows.items():
        sent, alone = row["passed on"], row["one by one"]
        table.add_row(
            str(count),
            f"{sent['bytes'] / 1e6:.2f}",
            f"{sent['bytes'] / rows[1]['passed on']['bytes']:.3f}",
            f"{row['plan']['trainer_rank_bytes'] / 1e6:.2f}",
            f"{alone['bytes'] / 1e6:.2f}",
            f"{1e3 * sent['seconds']:.0f}",
            f"{1e3 * alone['seconds']:.0f}",
        )
    console.print(table)
    table = Table("engines", "sent, bytes", "× one engine", "plan says", title="over a stand-in for NCCL")
    rows = results["nccl stand-in"]
    for count, row in rows.items():
        sent, base = row["broadcast"]["bytes"], rows[1]["broadcast"]["bytes"]
        table.add_row(str(count), f"{sent:,}", f"{sent / base:.3f}", f"{row['plan']['trainer_rank_bytes']:,}")
    console.print(table)
    growth = max(
        rows[count][key]["bytes"] / rows[1][key]["bytes"]
        for rows, key in ((results["tcp"], "passed on"), (results["nccl stand-in"], "broadcast"))
        for count in FLEETS
    )
    verdict = "PASS" if growth <= MAX_GROWTH else "FAIL"
    console.print(f"largest growth {growth:.3f} (at most {MAX_GROWTH}): {verdict}; {results['machine']['system']}")
