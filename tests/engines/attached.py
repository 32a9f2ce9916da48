"""`EngineBackend` for an engine process behind a real gateway, for the conformance suite.

The gateway runs in this process, on its event loop. Calls go directly over the engine's link, without routing; the gateway
learns which version they commit."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import GatewayConfig
from slipstream.gateway import convert, server
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.service import Service
from slipstream.runtime import event_loop
from slipstream.types import (
    Checksums,
    CommitReport,
    Completion,
    Destinations,
    EngineInfo,
    Failure,
    MemoryReport,
    Offer,
    Progress,
    Request,
    Score,
    StageReport,
    UpdateReports,
    UpdateSteps,
)

NAME = "attached"
START_SECONDS = 1500.0
SECONDS = 120.0


class AttachedEngine:
    adapters: tuple[str, ...] = ()

    def __init__(self, name: str, service: Service, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self._name, self._registry, self._link = name, service._registry, service._links[name]

    def describe(self) -> EngineInfo:
        return self._registry.get(self._name).info

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        async for results in event_loop.aiterate(self._link.results(convert.requests_to_pb(requests))):
            yield [*convert.progress_from_pb(results), *convert.results_from_pb(results)]

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, adapter: str = "") -> list[Score]:
        answer = await self._ask(pb.ToEngine(score=convert.sequences_to_pb(sequences, "", top_k, adapter)))
        return convert.scores_from_pb(answer.scores)

    async def begin(self, version: int, offer: Offer) -> Destinations:
        destinations = (await self._update(UpdateSteps(version, offer))).destinations
        assert destinations is not None
        return destinations

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        report = (await self._update(UpdateSteps(version, manifests=manifests))).stage
        assert report is not None
        return report

    async def commit(self, version: int, in_flight: Any = "keep") -> CommitReport:
        report = (await self._update(UpdateSteps(version, in_flight=in_flight))).commit
        assert report is not None
        self._registry.commit(version, [self._name])
        return report

    async def _update(self, steps: UpdateSteps) -> UpdateReports:
        return convert.reports_from_pb((await self._ask(pb.ToEngine(update=convert.steps_to_pb(steps)))).updated)

    async def rollback(self, version: int) -> None:
        await self._ask(pb.ToEngine(rollback=pb.Rollback(version=version)))

    async def release(self) -> None:
        await self._ask(pb.ToEngine(release=pb.Release()))

    async def pause(self) -> None:
        await self._control(pause=pb.Pause())

    async def resume(self) -> None:
        await self._control(resume=pb.Resume())

    async def sleep(self, level: int = 1) -> MemoryReport:
        return await self._control(sleep=pb.Sleep(level=level))

    async def wake(self, tags: Any = None) -> MemoryReport:
        return await self._control(wake=pb.Wake(tags=tags or ()))

    async def reset_prefix_cache(self) -> None:
        await self._ask(pb.ToEngine(control=pb.Control(reset_prefix_cache=pb.ResetPrefixCache())))

    async def memory(self) -> MemoryReport:
        return await self._control(memory=pb.Memory())

    async def checksums(self) -> Checksums:
        answer = await self._ask(pb.ToEngine(control=pb.Control(verify=pb.Verify())))
        return convert.checksums_from_pb(answer.checksums)

    async def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    async def _control(self, **verb: Any) -> MemoryReport:
        return convert.memory_from_pb((await self._ask(pb.ToEngine(control=pb.Control(**verb)))).memory)

    async def _ask(self, message: pb.ToEngine) -> pb.FromEngine:
        return await event_loop.arun(self._link.ask(message, SECONDS, "answer"))


@contextlib.contextmanager
def attached(
    python: str, model: Path, run_dir: Path, *options: str, preloaded: Any = None, **variables: str
) -> Iterator[AttachedEngine]:
    """Starts an engine process with `python`, and ends it. `variables` are of its environment. With `preloaded`, the process
    of tests/vllm/preloaded.py forks the engine."""
    token, service, stack = secrets.token_hex(16), Service(lease_seconds=30.0), contextlib.AsyncExitStack()

    async def serve() -> str:
        return await stack.enter_async_context(server.running(GatewayConfig(), token, service))

    async def is_registered() -> bool:
        return bool(service._registry.alive())

    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "gateway.json").write_text(json.dumps({"address": event_loop.run(serve())}))
    (run_dir / "token").write_text(token)
    command = [python, "-m", "slipstream.cli", "engine", "--run-dir", str(run_dir), "--model", str(model)]
    log = run_dir / "engine.log"
    with open(log, "wb") as file:
        popen, owner = (subprocess.Popen, os.getpid()) if preloaded is None else (preloaded.popen, preloaded.pid)
        process = popen(
            [*command, "--name", NAME, "--owner", str(owner), *options],
            stdout=file,
            stderr=file,
            env=os.environ | variables,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not event_loop.run(is_registered()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
        yield AttachedEngine(NAME, service, process, log)
    finally:
        process.kill()
        process.wait()
        event_loop.run(stack.aclose())
