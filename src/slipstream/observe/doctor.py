"""`slipstream doctor`: what this machine has, what is wrong, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.topology.environments import interpreter
from slipstream.types import FleetStatus
from slipstream.weights.transports import shm


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Literal["ok", "note", "wrong"]
    found: str
    fix: str = ""


def examine(model: Path | None = None, dtype: str = "") -> Iterator[Finding]:
    """All checks in turn. A check that fails itself is a finding too. `model` is one that vLLM is to serve."""
    checks = {c.__name__: c for c in (_python, _packages, _devices, _shared_memory, _cores, _vllm, _remote)}
    if model is not None:
        checks["mapping"] = partial(_mapping, model, dtype)
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(name.strip("_"), "wrong", f"{type(error).__name__}: {error}", "please report this")


def examine_fleet(status: FleetStatus) -> Iterator[Finding]:
    """What is wrong with a fleet that is up."""
    version = f"policy version {status.version}" if status.version >= 0 else "no weights yet"
    ready = sum(e.state == "ready" for e in status.engines)
    fix = "" if ready else "start an engine, sync weights, or wake the fleet; the rows below say which"
    yield Finding(
        "fleet", "ok" if ready else "wrong", f"{ready} of {len(status.engines)} engines ready, {version}", fix
    )
    for engine in status.engines:
        name = f"engine {engine.info.name}"
        if engine.state != "ready":
            fix = "it ended or cannot be reached: its log says why" if engine.state == "lost" else ""
            yield Finding(name, "note", f"{engine.state}: {engine.note}", fix)
        elif engine.circuit != "closed":
            fix = "it answers, and fails: look at its log, or restart it"
            yield Finding(name, "wrong", engine.note, fix)
        elif engine.num_faults:
            yield Finding(name, "note", f"{engine.num_faults} calls failed by its own doing so far", "look at its log")


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python", "ok" if good else "wrong", version, "" if good else "use Python 3.11, 3.12 or 3.13")


def _packages() -> Iterator[Finding]:
    for name in ("jax", "jaxlib", "grpcio", "protobuf", "numpy", "optax", "safetensors", "tokenizers", "xxhash"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "wrong", "not installed", f"pip install {name}")
    try:
        import slipstream.gateway.slipstream_pb2_grpc  # noqa: F401  # refuses runtimes older than its generator
    except Exception as error:
        yield Finding("gRPC code", "wrong", str(error), "pip install -U 'grpcio>=1.72.2' 'protobuf>=6.30'")


def _devices() -> Iterator[Finding]:
    """In a process of its own: JAX takes most of a GPU's memory when it starts, and a broken driver can crash it."""
    script = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep='|')"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding("JAX devices", "wrong", "no answer within 120 s", "look at the accelerator's driver")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("JAX devices", "wrong", last, "reinstall jax for this machine, or set JAX_PLATFORMS=cpu")
        return
    count, platform, kind = done.stdout.strip().splitlines()[-1].split("|")
    yield Finding("JAX devices", "ok", f"{count} × {platform} ({kind})")
    if platform == "cpu" and shutil.which("nvidia-smi"):
        yield Finding("GPU", "note", "there is a GPU that JAX does not use", "pip install 'jax[cuda13]'")


def _shared_memory() -> Iterator[Finding]:
    directory = shm.directory()
    free = shutil.disk_usage(directory).free
    fix = (
        ""
        if free > 1 << 30
        else f"models larger than this cannot be synced over shm; enlarge {directory} (container: --shm-size)"
    )
    yield Finding("shared memory", "note" if fix else "ok", f"{free / 2**30:.1f} GiB free in {directory}", fix)
    if removed := shm.sweep():
        yield Finding("left-overs", "note", f"removed {len(removed)} segment(s) of dead processes")


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        "CPU cores", "ok" if cores > 1 else "note", str(cores), "" if cores > 1 else "trainer and engine will share it"
    )


def _vllm() -> Iterator[Finding]:
    """Whether an engine of kind `vllm` would find its environment, and what is in it."""
    try:
        python = interpreter(EngineConfig(kind="vllm"))
    except ConfigError as error:
        yield Finding("vLLM", "note", "no environment with it; the embedded JAX engine generates", str(error))
        return
    script = "from slipstream.engines.vllm import compat; print(compat.check())"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        yield Finding("vLLM", "ok", f"{done.stdout.split()[-1]}, in {python}")
    else:
        why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding("vLLM", "wrong", f"{python}: {why}", "slipstream setup vllm --cpu, or name another with python=…")


def _mapping(model: Path, dtype: str) -> Iterator[Finding]:
    """Which of the model's parameters a trainer's weights are written into directly, on a GPU."""
    python = interpreter(EngineConfig(kind="vllm"))
    command = [python, "-m", "slipstream.engines.vllm.proof", *(["--dtype", dtype] if dtype else []), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding(
            "live parameters", "wrong", f"vLLM cannot make {model.name}: {why}", "look at the model's directory"
        )
        return
    (answer,) = answers
    good = len(answer["parameters"]) - len(answer["failed"])
    yield Finding(
        "live parameters", "ok", f"{good} of {len(answer['parameters'])} of {model.name} are written to directly"
    )
    for name, why in answer["failed"].items():
        yield Finding(name, "note", why, "it goes through vLLM's own loader, with its module: slower, and as right")


def _remote() -> Iterator[Finding]:
    """What a fleet with a `vllm serve` needs: HTTP in the engine's process, NCCL in the trainer's."""
    for package, extra, whose in (
        ("httpx", "remote", "the engine"),
        ("nccl4py", "nccl", "the trainer, which needs a GPU"),
    ):
        try:
            found = f"{package} {importlib.metadata.version(package)}, for {whose}"
            yield Finding("vLLM servers", "ok", found)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("vLLM servers", "note", f"no {package}, for {whose}", f"pip install 'slipstream-rl[{extra}]'")
