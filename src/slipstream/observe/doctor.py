"""`slipstream doctor`: check this machine or a running fleet, and say how to fix what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from slipstream.config import VllmConfig
from slipstream.deploy.processes.vllm_environment import interpreter
from slipstream.errors import ConfigError, UnknownArchitecture
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.families.vllm_parameters import has_layout
from slipstream.types import FleetStatus
from slipstream.weights.transports.host import shm


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of one check."""

    subject: str
    verdict: Literal["ok", "note", "wrong"]
    result: str
    fix: str = ""
    """What to do about it; empty if nothing."""


def examine(model: Path | None = None, dtype: str = "") -> Iterator[Diagnosis]:
    """Run all checks. A check that raises is reported as well. `model` is the directory of a model for vLLM."""
    checks = {c.__name__: c for c in (_python, _packages, _devices, _shared_memory, _cores, _vllm, _remote)}
    if model is not None:
        checks["mapping"] = partial(_mapping, model, dtype)
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Diagnosis(name.strip("_"), "wrong", f"{type(error).__name__}: {error}", "please report this")


def examine_fleet(status: FleetStatus) -> Iterator[Diagnosis]:
    """Check a running fleet."""
    version = f"policy version {status.version}" if status.version >= 0 else "no weights yet"
    ready = sum(e.state == "ready" for e in status.engines)
    fix = "" if ready else "start an engine, sync weights or wake the fleet, as the rows below say"
    yield Diagnosis(
        "fleet", "ok" if ready else "wrong", f"{ready} of {len(status.engines)} engines ready, {version}", fix
    )
    for engine in status.engines:
        name = f"engine {engine.info.name}"
        for promise in engine.info.not_held:
            yield Diagnosis(
                name,
                "note",
                f"does not hold {promise}",
                "leave out that argument of vLLM, or accept this",
            )
        if engine.state == "quarantined":
            yield Diagnosis(name, "wrong", engine.note, "sync again, or restart it if it does not pass its probe")
        elif engine.state != "ready":
            fix = "its process ended or is unreachable; see its log" if engine.state == "lost" else ""
            yield Diagnosis(name, "note", f"{engine.state}: {engine.note}", fix)
        elif engine.circuit != "closed":
            yield Diagnosis(name, "wrong", engine.note, "its calls fail; see its log, or restart it")
        elif engine.note:
            yield Diagnosis(name, "note", engine.note, "is its machine busy with something else?")
        elif engine.num_faults:
            yield Diagnosis(name, "note", f"{engine.num_faults} calls failed in the engine so far", "see its log")


def _python() -> Iterator[Diagnosis]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Diagnosis("Python", "ok" if good else "wrong", version, "" if good else "use Python 3.11, 3.12 or 3.13")


def _packages() -> Iterator[Diagnosis]:
    jax = ("jax", "jaxlib", "optax", "numpy", "safetensors", "tokenizers")
    for name in (*jax, "grpcio", "protobuf", "pydantic", "cryptography", "xxhash"):
        try:
            yield Diagnosis(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Diagnosis(name, "wrong", "not installed", f"pip install {name}")
    try:
        import slipstream.gateway.slipstream_pb2_grpc  # noqa: F401  # refuses runtimes older than its generator
    except Exception as error:
        yield Diagnosis("gRPC code", "wrong", str(error), "pip install -U 'grpcio>=1.72.2' 'protobuf>=6.33.5'")


def _devices() -> Iterator[Diagnosis]:
    """List JAX's devices in a subprocess: JAX reserves most of a GPU's memory, and a broken driver can crash it."""
    script = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep='|')"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Diagnosis("JAX devices", "wrong", "no answer within 120 s", "check the accelerator's driver")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Diagnosis("JAX devices", "wrong", last, "reinstall jax for this machine, or set JAX_PLATFORMS=cpu")
        return
    count, platform, kind = done.stdout.strip().splitlines()[-1].split("|")
    yield Diagnosis("JAX devices", "ok", f"{count} × {platform} ({kind})")
    if platform == "cpu" and shutil.which("nvidia-smi"):
        yield Diagnosis("GPU", "note", "JAX does not use this machine's GPU", "pip install 'jax[cuda13]'")


def _shared_memory() -> Iterator[Diagnosis]:
    directory = shm.directory()
    free = shutil.disk_usage(directory).free
    fix = ""
    if free <= 1 << 30:
        fix = f"larger models cannot be synced over shm; enlarge {directory} (containers: --shm-size)"
    yield Diagnosis("shared memory", "note" if fix else "ok", f"{free / 2**30:.1f} GiB free in {directory}", fix)
    if removed := shm.sweep():
        yield Diagnosis("shared memory", "note", f"removed {len(removed)} segment(s) of dead processes")


def _cores() -> Iterator[Diagnosis]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Diagnosis(
        "CPU cores", "ok" if cores > 1 else "note", str(cores), "" if cores > 1 else "trainer and engine share it"
    )


def _vllm() -> Iterator[Diagnosis]:
    """Find the environment of vLLM engines, and check its version of vLLM."""
    try:
        python = interpreter(VllmConfig())
    except ConfigError as error:
        yield Diagnosis("vLLM", "note", "not found; only the embedded JAX engine is available", str(error))
        return
    script = "from slipstream.engines.vllm import compat; print(compat.check())"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        yield Diagnosis("vLLM", "ok", f"{done.stdout.split()[-1]}, run by {python}")
    else:
        why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        fix = "slipstream setup vllm --cpu, or name another interpreter with SLIPSTREAM_VLLM_PYTHON"
        yield Diagnosis("vLLM", "wrong", f"{python}: {why}", fix)


def _mapping(model: Path, dtype: str) -> Iterator[Diagnosis]:
    """Check which parameters of a model in vLLM receive the trainer's weights directly on a GPU."""
    try:
        model = model_directory(model, weights=False)
    except ConfigError as error:
        yield Diagnosis("live parameters", "wrong", str(error), "name a model of the Hub, or a directory")
        return
    if not (model / "config.json").exists():  # vLLM takes long to find out
        yield Diagnosis("live parameters", "wrong", f"{model} has no config.json", "name the directory of a model")
        return
    try:
        is_known = has_layout(read_config(model))
    except UnknownArchitecture:
        is_known = False
    except ConfigError as error:
        yield Diagnosis("live parameters", "wrong", str(error), "use another checkpoint")
        return
    if not is_known:
        fix = "none needed: vLLM's own loader takes its weights, which is slower"
        yield Diagnosis("live parameters", "note", f"vLLM's layout of {model.name} is not known", fix)
        return
    done = subprocess.run(mapping_command(dtype, model), capture_output=True, text=True, timeout=600)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Diagnosis(
            "live parameters", "wrong", f"vLLM cannot load {model.name}: {why}", "check the model's directory"
        )
        return
    (answer,) = answers
    yield from _judged(model, answer)


def mapping_command(dtype: str, *models: Path) -> list[str]:
    options = ["--dtype", dtype] if dtype else []
    return [interpreter(VllmConfig()), "-m", "slipstream.engines.vllm.mapping_check", *options, *map(str, models)]


def _judged(model: Path, answer: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """`answer` is what `mapping_check` says of a model."""
    good = len(answer["parameters"]) - len(answer["failed"])
    yield Diagnosis(
        "live parameters", "ok", f"{good} of {len(answer['parameters'])} of {model.name} receive weights directly"
    )
    for name, why in answer["failed"].items():
        yield Diagnosis(name, "note", why, "none needed: its module is loaded by vLLM's own loader, which is slower")


def _remote() -> Iterator[Diagnosis]:
    """Check what a running `vllm serve` needs: an HTTP client in the engine's process, NCCL in the trainer's."""
    servers = (("httpx", "remote", "the engine"), ("nccl4py", "nccl", "the trainer, which needs a GPU"))
    for package, extra, whose in servers:
        try:
            yield Diagnosis("vLLM servers", "ok", f"{package} {importlib.metadata.version(package)}, for {whose}")
        except importlib.metadata.PackageNotFoundError:
            fix = f"pip install 'slipstream-rl[{extra}]'"
            yield Diagnosis("vLLM servers", "note", f"{package} is not installed, for {whose}", fix)
