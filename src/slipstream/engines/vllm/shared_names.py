"""Removes the names of vLLM's shared memory as soon as all of its processes have mapped it. So processes that are killed, one
by one or all at once, leave no hundreds of megabytes in `/dev/shm`.

vLLM itself relies on Python's resource tracker, a process that is killed along with the others."""

from __future__ import annotations

import contextlib
import gc
import os
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path


def remove_names() -> None:
    """Remove the names of what this process created: message queues, semaphores, and buffers of ranks on CPU. Call it once the
    workers are up."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    for buffer in [found for found in gc.get_objects() if type(found) is ShmRingBuffer]:
        if buffer.is_creator:
            buffer.is_creator = False  # otherwise it would remove the name when it is deleted
            with contextlib.suppress(FileNotFoundError):  # a forked worker also holds those of the core, which are gone
                buffer.shared_memory.unlink()
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
    if identifier := os.environ.get("VLLM_DIST_IDENT"):
        for file in Path("/dev/shm").glob(f"{identifier}-*-cpushm_*"):
            file.unlink(missing_ok=True)
