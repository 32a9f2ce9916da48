"""Lossless deltas: how large they are in training, and how long a sync takes over a slow link, with and without them.

    python benchmarks/delta.py [--steps 200] [--gbit 1] [--layers 30] [--json benchmarks/results/delta.json]

Payload: a small Llama shape is trained with Adam at a learning rate of 3e-6 to predict tokens of a bigram language, and its
bf16 values are encoded after each step, and once after all of them. "bf16 weights" has no float32 master copy: small updates
are rounded away.

Link: gateway and engine are on one machine made of a network namespace, the trainer on another; `tc` shapes both ends to the
speed. Weights have the 135M shape (SmolLM2), bf16 in trainer and engine; connections use TLS. Each step moves the float32
master copy by noise with the root mean square of the updates that the payload part has seen at its end."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import psutil
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import DeltaMode
from slipstream.deploy.processes import certificates
from slipstream.model.checkpoints.hf_config import read_config, to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.weights import delta

LEARNING_RATE = 3e-6
MAX_SHARE, MIN_SPEEDUP = 0.05, 15.0
BF16 = ml_dtypes.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gbit", type=float, default=1.0, help="speed of the link; 0 leaves that part out")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--payload", type=Path, help="take the payload part from this file of an earlier run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trainer", nargs=3, metavar=("MODEL", "TARGET", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--rms", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        model, target, out = arguments.trainer
        return train_over_link(model, target, out, arguments.rms, arguments.repeats)
    results: dict[str, Any] = {
        "machine": {
            "system": platform.platform(),
            "cpus": psutil.cpu_count(),
            "jax": jax.__version__,
            "load": psutil.getloadavg()[0],
        }
    }
    if arguments.payload:
        results["payload"] = json.loads(arguments.payload.read_text())["payload"]
    else:
        kinds = {"float32": np.float32, "bf16": BF16}
        results["payload"] = {name: measure_payload(arguments.steps, dtype) for name, dtype in kinds.items()}
    show_payload(results["payload"], Console())
    if arguments.gbit:
        rms = results["payload"]["float32"]["update_rms"]
        results["link"] = measure_link(arguments.layers, arguments.gbit, rms, arguments.repeats)
        show_link(results["link"], Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


# --- payload ---


def measure_payload(steps: int, dtype: Any) -> dict[str, float]:
    config = ModelConfig(
        "llama", vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    params = jax.tree.map(lambda x: x.astype(dtype), decoder.init(config, jax.random.key(0)))
    optimizer = optax.adam(LEARNING_RATE)
    successors = np.random.default_rng(0).integers(0, config.vocab_size, (config.vocab_size, 4))

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return -decoder.logprobs(params, config, tokens).mean()

        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        updates, state = optimizer.update(jax.grad(loss)(wide), state)
        moved = jax.tree.map(lambda x, u: (x + u).astype(dtype), wide, updates)
        squares = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates))
        return moved, state, jnp.sqrt(squares / sum(u.size for u in jax.tree.leaves(updates)))

    state = optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))
    first = base = bits_of(params)
    shares, changed = [], []
    for number in range(steps):
        params, state, rms = step(params, state, bigrams(successors, number))
        new = bits_of(params)
        changed.append(float(np.mean(base != new)))
        shares.append(encoded_size(base, new) / new.nbytes)
        base = new
    return {
        "parameters": first.size,
        "steps": steps,
        "changed_each_step": statistics.mean(changed),
        "changed_last_step": changed[-1],
        "share_each_step": statistics.mean(shares),
        "share_largest": max(shares),
        "share_last_step": shares[-1],
        "changed_after_all": float(np.mean(first != base)),
        "share_after_all": encoded_size(first, base) / base.nbytes,
        "update_rms": float(rms),
    }


def bigrams(successors: np.ndarray, seed: int, count: int = 8, length: int = 64) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = np.empty((count, length), np.int32)
    tokens[:, 0] = rng.integers(0, len(successors), count)
    for position in range(1, length):
        tokens[:, position] = successors[tokens[:, position - 1], rng.integers(0, successors.shape[1], count)]
    return tokens


def bits_of(params: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x).astype(BF16).reshape(-1) for x in jax.tree.leaves(params)]).view(np.uint16)


def encoded_size(base: np.ndarray, new: np.ndarray) -> int:
    base = base.copy()
    parts = (slice(start, start + delta.CHUNK) for start in range(0, base.size, delta.CHUNK))
    return sum(len(delta.encode_chunk(base[part], new[part])) for part in parts)


# --- link ---


def measure_link(layers: int, gbit: float, rms: float, repeats: int) -> dict[str, Any]:
    config = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=layers, num_heads=9,
        num_kv_heads=3, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parents[1]))
    lan = importlib.import_module("tests.deploy.lan").lan
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer, engine = stack.enter_context(lan(directory, "trainer", "engine"))
        for machine in (trainer, engine):
            shape = f"tc qdisc add dev eth0 root tbf rate {gbit}gbit burst 256kb latency 20ms"
            subprocess.run(machine.command(*shape.split()), check=True)
        (directory / "model").mkdir()
        (directory / "model/config.json").write_text(json.dumps(to_hf(config)))
        files, run_dir = certificates.make(directory / "certificates", ["trainer", "engine"]), directory / "run"
        certificate, key = files.of("engine")
        tls = ["--certificate", certificate, "--key", key, "--ca", files.ca]
        gateway = engine.slipstream("gateway", "--run-dir", str(run_dir), "--host", "engine", *tls)
        start(stack, engine, gateway, directory / "gateway.log")
        eventually((run_dir / "gateway.json").exists)
        listen = ["listen=engine", "dtype=bfloat16", "max_num_seqs=1", "max_model_len=64"]
        command = ["engine", "--run-dir", str(run_dir), "--model", str(directory / "model"), *listen]
        command += [f"certificate={certificate}", f"key={key}"]
        start(stack, engine, engine.slipstream(*command), directory / "engine.log")
        out = directory / "out.json"
        options = ["--rms", str(rms), "--repeats", str(repeats)]
        command = [sys.executable, __file__, "--trainer", str(directory / "model"), str(run_dir), str(out), *options]
        process = start(stack, trainer, trainer.command(*command), directory / "trainer.log")
        if process.wait(3600):
            sys.exit((directory / "trainer.log").read_text() + (directory / "engine.log").read_text())
        return {"gbit_per_second": gbit, **json.loads(out.read_text())}


def start(stack: ExitStack, machine: Any, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = machine.start(command, log)

    def end() -> None:
        process.terminate()
        process.wait(30)

    stack.callback(end)
    return process


def eventually(done: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            sys.exit("a process of the fleet did not start in time")
        time.sleep(0.05)


def train_over_link(model: str, target: str, out: str, rms: float, repeats: int) -> None:
    """The trainer's process."""
    config = read_config(model)
    params = decoder.init(config, jax.random.key(0))

    @jax.jit
    def step(params: Any, noise: Any) -> Any:
        """Return the float32 weights, and the bf16 copy that training computes with."""
        params = jax.tree.map(lambda x, n: x + rms * n, params, noise)
        return params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    rng, found = np.random.default_rng(0), dict[str, list[dict[str, Any]]]()
    modes: tuple[DeltaMode, ...] = ("never", "always")
    for name in modes:
        with slipstream.connect(target, delta=name, timeout=600) as bridge:
            eventually(lambda bridge=bridge: bool(bridge.status().engines))  # type: ignore[misc]
            for number in range(repeats + 3):
                noise = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
                params, computed = jax.block_until_ready(step(params, noise))
                report = bridge.sync(computed)
                row = {
                    "seconds": report.total_seconds,
                    "bytes": report.num_bytes,
                    "encoding": report.engines[0].encoding,
                    "send": report.send_seconds,
                    "stage": report.stage_seconds,
                }
                if number >= 3:  # the first create the engine's two images and the values to compare with
                    found.setdefault(name, []).append(row)
            assert bridge.verify(computed).is_same
    assert {row["encoding"] for row in found["always"]} == {"delta"}
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in ("seconds", "bytes", "send", "stage")}
        for name, rows in found.items()
    }
    Path(out).write_text(json.dumps({"whole": medians["never"], "delta": medians["always"]}))


def show_payload(payload: dict[str, Any], console: Console) -> None:
    table = Table("", "float32 master", "bf16 weights", "target", title="Size of a delta relative to bf16 weights")
    rows = {
        "changed elements, mean of all steps": "changed_each_step",
        "delta after each step, mean": "share_each_step",
        "delta after each step, largest": "share_largest",
        "delta after the last step": "share_last_step",
        "one delta after all steps": "share_after_all",
    }
    for title, key in rows.items():
        cells = [f"{payload[kind][key]:.2%}" for kind in ("float32", "bf16")]
        target = (
            f"≤ {MAX_SHARE:.0%} " + verdict(payload["float32"][key] <= MAX_SHARE) if key == "share_each_step" else ""
        )
        table.add_row(title, *cells, target)
    console.print(table)


def show_link(link: dict[str, Any], console: Console) -> None:
    whole, small = link["whole"], link["delta"]
    table = Table("", "ms", "MB", "", title=f"bridge.sync over {link['gbit_per_second']:g} Gbit/s")
    table.add_row("whole weights", f"{1e3 * whole['seconds']:.0f}", f"{whole['bytes'] / 1e6:.1f}", "")
    speedup = whole["seconds"] / small["seconds"]
    cell = f"{speedup:.1f} × faster, ≥ {MIN_SPEEDUP:g} {verdict(speedup >= MIN_SPEEDUP)}"
    table.add_row("delta", f"{1e3 * small['seconds']:.0f}", f"{small['bytes'] / 1e6:.1f}", cell)
    console.print(table)


def verdict(reached: bool) -> str:
    return "PASS" if reached else "FAIL"


if __name__ == "__main__":
    main()
