"""Sleep, wake and memory reports of vLLM's workers, on GPU and on CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.engines.vllm.weight_loading import CallWorkers
from slipstream.types import MemoryReport, MemoryTag


class WorkerMemory:
    """On a GPU, vLLM's sleep mode does the work. On CPU vLLM has none: the worker extension frees and allocates memory, and
    level 1, which moves weights to host memory, leaves them where they are.

    `workers` has the pid and the bytes of the KV cache of each worker."""

    def __init__(self, call_workers: CallWorkers, on_gpu: bool, workers: Sequence[Mapping[str, int]]) -> None:
        self._call_workers, self._on_gpu, self._workers = call_workers, on_gpu, workers

    async def sleep(self, level: int, asleep: Mapping[MemoryTag, int]) -> None:
        """Free the memory of `level`; `asleep` is what sleeps already."""
        if "kv_cache" in asleep and level <= asleep.get("weights", 0):
            return
        if self._on_gpu:
            await self._call_workers("slipstream_sleep", level)
        else:
            tags = ["kv_cache"] * ("kv_cache" not in asleep) + ["weights"] * (level == 2)
            await self._call_workers("slipstream_free_memory", tags)

    async def wake(self, tag: MemoryTag) -> None:
        if self._on_gpu:
            await self._call_workers("slipstream_wake", [tag])
        elif tag == "kv_cache":  # loading allocates the memory of weights
            await self._call_workers("slipstream_allocate_memory", tag)

    async def report(self, num_bytes: int, asleep: Mapping[MemoryTag, int]) -> MemoryReport:
        """`num_bytes` is the size of the weights."""
        gone = asleep.get("weights", 0) >= (1 if self._on_gpu else 2)
        weights = 0 if gone else num_bytes
        kv_cache = 0 if "kv_cache" in asleep else sum(worker["kv_cache"] for worker in self._workers)
        if self._on_gpu:
            in_use = sum(await self._call_workers("slipstream_memory_in_use"))
        else:
            in_use = sum(_resident_bytes(worker["pid"]) for worker in self._workers)
        return MemoryReport(weights, kv_cache, in_use, tuple(sorted(asleep)))


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
