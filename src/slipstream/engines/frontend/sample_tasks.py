"""Samples as asyncio tasks, for engines that delegate generation to another server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from slipstream.engines.frontend.sequence import EngineRequest, FailedRequest, ResultSink, Sample
from slipstream.engines.frontend.waiting_queue import FairQueue
from slipstream.errors import SlipstreamError
from slipstream.types import SamplingParams

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


def shared_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings that vLLM and SGLang know by our names."""
    return {name: getattr(sampling, name) for name in _SETTINGS}


def mixed_seed(*parts: int) -> int:
    """Hash `parts` into one seed, because a torch generator uses only 32 bits of its seed."""
    return xxhash.xxh3_64_intdigest(" ".join(map(str, parts)).encode()) >> 1


@dataclass(eq=False)
class Attempt:
    """One request to the other server. A sample takes several if commits interrupt it."""

    sample: Sample
    task: asyncio.Task[None]
    id: str
    """Unique in this engine."""
    versions: list[tuple[int, int]]
    """`(version, first token)`: the policy versions that generate it. The first is the one it started under."""
    interruption: Literal["", "resume", "restart"] = ""

    @property
    def version(self) -> int:
        return self.versions[0][0]

    def interrupt(self, keep_tokens: bool = False) -> None:
        """End this attempt. The sample is attempted again, from its tokens so far or from its prompt."""
        self.interruption = "resume" if keep_tokens else "restart"
        self.task.cancel()


class Slots:
    """Lets a limited number of samples into the other server. The others wait: by priority, then fair between callers.

    A commit need not touch a sample that waits here, while one that waits in the server must be taken back and sent again."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: FairQueue[Sample] = FairQueue()
        self._admitted: dict[Sample, asyncio.Future[None]] = {}
        self._held: Counter[ResultSink] = Counter()

    @contextlib.asynccontextmanager
    async def slot(self, sample: Sample) -> AsyncIterator[None]:
        sink = sample.request.sink
        self._waiting.push(sample, sample.request.priority, sink)
        admitted = self._admitted[sample] = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            await admitted
            yield
        finally:
            del self._admitted[sample]
            if sample in self._waiting:
                self._waiting.remove(sample)
            else:
                self._free += 1
                self._held -= Counter([sink])
                self._admit()

    def _admit(self) -> None:
        for sample in self._waiting.candidates(self._held) if self._free else ():
            self._waiting.remove(sample)
            self._free -= 1
            self._held[sample.request.sink] += 1
            if not self._admitted[sample].done():  # cancelled: its task is about to leave
                self._admitted[sample].set_result(None)
            if not self._free:
                return


class SampleTasks(ABC):
    """One task per sample, which makes attempts until one completes the sample. At most `limit` samples are in the server."""

    def __init__(self, limit: int) -> None:
        self._slots = Slots(limit)
        self.version = -1
        """Policy version under which new samples start."""
        self.gate = asyncio.Event()
        """Samples start only while this is set."""
        self.gate.set()
        self._tasks: dict[ResultSink, dict[asyncio.Task[None], Sample]] = {}
        """Unfinished tasks by sink."""
        self.running: set[Attempt] = set()
        self._ids = itertools.count()

    def start(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            tasks = self._tasks.setdefault(request.sink, {})
            for sample in request.samples():
                task = asyncio.create_task(self._run(sample))
                tasks[task] = sample
                task.add_done_callback(lambda task, sink=request.sink: self._forget(sink, task))  # type: ignore[misc]

    def cancel(self, sink: ResultSink) -> None:
        for task in list(self._tasks.get(sink, ())):
            task.cancel()

    def fail_all(self, error: SlipstreamError, of: Callable[[EngineRequest], bool] = lambda request: True) -> None:
        """End every unfinished sample with `error`, or those `of` certain requests."""
        for sink, tasks in list(self._tasks.items()):
            failed = {task: sample for task, sample in tasks.items() if of(sample.request)}
            sink.deliver([FailedRequest(sample.request, error) for sample in failed.values()])
            for task in failed:
                task.cancel()

    async def drain(self, check: Callable[[], object]) -> None:
        """Return once no attempt is running. `check` is called meanwhile, and may raise."""
        while self.running:
            await asyncio.wait([attempt.task for attempt in self.running], timeout=0.05)
            check()

    async def wait_finished(self, timeout: float) -> None:
        """Return once all tasks have ended, or after `timeout` seconds."""
        if tasks := [task for tasks in self._tasks.values() for task in tasks]:
            await asyncio.wait(tasks, timeout=timeout)

    async def _run(self, sample: Sample) -> None:
        sink = sample.request.sink
        try:
            async with self._slots.slot(sample):
                while not await self._attempt(sample):
                    pass
            sink.deliver([sample])
        except Exception as error:
            sink.deliver([FailedRequest(sample.request, self._failure(error))])

    async def _attempt(self, sample: Sample) -> bool:
        """Return False if the attempt was interrupted."""
        await self.gate.wait()
        task = asyncio.current_task()
        assert task is not None
        attempt = Attempt(sample, task, f"s{next(self._ids)}", [(self.version, 0)])
        self.running.add(attempt)
        try:
            await self._generate(attempt)
            return True
        except asyncio.CancelledError:
            if not attempt.interruption or task.uncancel():  # the caller has cancelled it, too
                raise
            if attempt.interruption == "restart":
                sample.restart()
            return False
        finally:
            self.running.discard(attempt)

    @abstractmethod
    async def _generate(self, attempt: Attempt) -> None:
        """Complete the sample."""

    @abstractmethod
    def _failure(self, error: Exception) -> SlipstreamError:
        """Return the error that ends the sample's request."""

    def _forget(self, sink: ResultSink, task: asyncio.Task[None]) -> None:
        self._tasks[sink].pop(task)
        if not self._tasks[sink]:
            del self._tasks[sink]
