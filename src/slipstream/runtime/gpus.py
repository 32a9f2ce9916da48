"""The NVIDIA GPUs of this machine, found without JAX or torch: by NVML, by `nvidia-smi`, or by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile

from slipstream.config import Device

PRETENDED = "SLIPSTREAM_PRETEND_GPUS"
"""Number of GPUs to pretend that this machine has, for tests."""
SMI_SECONDS = 30.0
_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine."""

    id: Device
    """Its number in `nvidia-smi`."""
    uuid: str = ""
    name: str = ""


def installed() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, in the order of `nvidia-smi`."""
    if count := os.environ.get(PRETENDED, ""):
        return tuple(Gpu(index, f"GPU-{index:08}", "pretended") for index in range(int(count)))
    return _from_nvml() or _from_smi() or tuple(Gpu(device) for device in visible())


def allocated() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or else all."""
    found = installed()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return found
    by_name = {name: gpu for gpu in found for name in (gpu.id, gpu.uuid)}
    return tuple(by_name.get(device, Gpu(device)) for device in visible())


def are_visible(ordinals: Collection[int], names: Collection[str]) -> bool:
    """Return whether another process of this machine sees GPUs of this one. `ordinals` count those that this process sees;
    `names` are those of the other (`EngineInfo.devices`). Without names, and with names that are not known here, it may."""
    by_name = {name: gpu for gpu in installed() for name in (str(gpu.id), gpu.uuid)}
    if not names or not by_name.keys() >= set(names):
        return True
    own = allocated()
    return {own[ordinal] for ordinal in ordinals if ordinal < len(own)} <= {by_name[name] for name in names}


def visible() -> tuple[Device, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists: those before the first that cannot be one, as CUDA reads it."""
    listed = map(str.strip, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    valid = takewhile(lambda word: word not in ("", "-1", "NoDevFiles"), listed)
    return tuple(int(word) if word.isdecimal() else word for word in valid)


def _from_nvml() -> tuple[Gpu, ...]:
    with contextlib.suppress(OSError), _nvml() as nvml:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        return tuple(
            Gpu(index, _text(nvml, "nvmlDeviceGetUUID", index), _text(nvml, "nvmlDeviceGetName", index))
            for index in range(count.value)
        )
    return ()


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        raise OSError("NVML does not start")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _text(nvml: ctypes.CDLL, call: str, index: int) -> str:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) or getattr(nvml, call)(
        handle, text, _NAME_BYTES
    )
    return "" if failed else text.value.decode(errors="replace")


def _from_smi() -> tuple[Gpu, ...]:
    if (smi := shutil.which("nvidia-smi")) is None:
        return ()
    query = [smi, "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(", ", 2) for line in done.stdout.splitlines()]
    return tuple(Gpu(int(index), uuid, name) for index, uuid, name in rows)
