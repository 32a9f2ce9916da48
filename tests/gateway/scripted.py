"""A scripted engine for gateway tests: it counts instead of computing, and fails on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os

from slipstream.errors import EngineFailure, TransferError, Unsupported, VersionError
from slipstream.gateway.engine_stream import serve_engine
from slipstream.runtime.tls import ANONYMOUS
from slipstream.types import (
    Checksums,
    CommitReport,
    Completion,
    Destinations,
    EngineInfo,
    MemoryReport,
    Parameter,
    ParameterChecksums,
    ParameterPart,
    Progress,
    Score,
    StageReport,
    TensorSpec,
    TopLogprobs,
    VersionSpan,
)

BOX = ((0, 2),)


class ScriptedEngine:
    adapters = ()

    def __init__(self, name="e0", version=0):
        self.name, self.version, self.begun, self.staged = name, version, None, None
        self.history = []
        self.seen = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        """Cleared, generation waits before its last completion."""
        self.gate.set()
        self.fail_stage = self.hang_stage = self.hang_commit = self.fail_commit = self.fail_after_commit = False
        self.hangs = False
        self.requests = []
        self.policies = []
        self.asleep = ()
        self.paused = False
        self.fail_control = self.hang_control = False

    def describe(self):
        return EngineInfo(
            name=self.name, kind="scripted", model="m", dtype="float32", num_ranks=1, tensors=(TensorSpec("w", (2,)),),
            parameters=(Parameter("w", 0, (2,), (ParameterPart("w", BOX, BOX),)),), transports=("memory",), host="h",
            max_model_len=64, max_num_seqs=8, version=self.version, pid=os.getpid(),
        )  # fmt: skip

    async def generate(self, requests):
        self.seen += [r.id for r in requests]
        self.requests += requests
        rows = [
            Completion(
                r.id,
                i,
                (1,),
                (r.sampling.seed % 97, i),
                "",
                (-1.0, -2.0),
                (-1.0, -2.0),
                "length",
                (VersionSpan(self.version, 0, 2),),
                self.name,
                top_logprobs=likeliest(r.sampling.top_logprobs, 2),
            )
            for r in requests
            for i in range(r.sampling.n)
        ]
        try:
            for row in rows:
                if any(r.progress for r in requests if r.id == row.request_id):
                    yield [Progress(row.request_id, row.sample_index, 0, row.token_ids[:1], row.logprobs[:1])]
            for row in rows[:-1]:
                yield [row]
                await asyncio.sleep(0)
            await self.gate.wait()
            yield rows[-1:]
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def score(self, sequences, top_k=0, adapter=""):
        return [
            Score(tuple(s), (-0.5,) * (len(s) - 1), self.version, self.name, likeliest(top_k, len(s) - 1))
            for s in sequences
        ]

    async def begin(self, version, offer):
        if version <= self.version:
            raise VersionError("old")
        self.history.append(("begin", version))
        self.begun = version
        return Destinations(((b"link", b""),), b"\x00")

    async def stage(self, version, manifests):
        while self.hang_stage:
            await asyncio.sleep(0.01)
        if self.fail_stage:
            raise TransferError(f"engine {self.name!r}: tensor w is torn")
        self.history.append(("stage", version))
        self.staged = version
        return StageReport(8, 0.002)

    async def commit(self, version, in_flight="keep"):
        if self.hang_commit:
            self.hangs = True
            await asyncio.sleep(60)
        if self.fail_commit:
            raise Unsupported("requests are running, and the engine is paused")
        self.history.append(("commit", version))
        self.policies.append(in_flight)
        self.version = version
        self.asleep = tuple(tag for tag in self.asleep if tag != "weights")
        if self.fail_after_commit:
            raise EngineFailure("the report of a commit is lost")
        return CommitReport(0.0, 0.0)

    async def rollback(self, version):
        while self.hang_stage:
            await asyncio.sleep(0.01)
        self.history.append(("rollback", version))
        self.begun = self.staged = None

    async def release(self):
        self.history.append(("release",))

    async def reset_prefix_cache(self):
        await self._control("forget")

    async def pause(self):
        await self._control("pause")
        self.paused = True

    async def resume(self):
        await self._control("resume")
        self.paused = False

    async def sleep(self, level=1):
        await self._control("sleep", level)
        self.asleep = ("weights", "kv_cache")
        return await self.memory()

    async def wake(self, tags=None):
        await self._control("wake", tags)
        self.asleep = tuple(tag for tag in self.asleep if tags is not None and tag not in tags)
        return await self.memory()

    async def memory(self):
        held = [0 if tag in self.asleep else size for tag, size in (("weights", 80), ("kv_cache", 20))]
        return MemoryReport(*held, sum(held), self.asleep)

    async def checksums(self):
        await self._control("checksums")
        return Checksums(self.version, (ParameterChecksums("w", 0, (2**64 - 1 - self.version,)),))

    async def _control(self, *verb):
        self.history.append(verb)
        if self.hang_control:
            await asyncio.sleep(60)
        if self.fail_control:
            raise Unsupported("this engine cannot")

    async def close(self):
        pass


def likeliest(width, positions):
    return (TopLogprobs(tuple(range(width)), (-0.25,) * width),) * positions if width else ()


@contextlib.asynccontextmanager
async def attached(engine, address, token, patience=0.5, ca="", identity=ANONYMOUS):
    """The engine, serving over a real gRPC connection; leaving breaks the connection as a crash would."""
    registered = asyncio.Event()
    task = asyncio.create_task(serve_engine(engine, address, token, patience, 1 << 20, registered.set, ca, identity))
    waiting = asyncio.create_task(registered.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    waiting.cancel()  # of an engine that was refused
    if task.done():
        task.result()
    assert registered.is_set()
    try:
        yield task
    finally:
        engine.hang_stage = False  # what it was doing ends first
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
