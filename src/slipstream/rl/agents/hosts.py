"""Where environments run: in worker processes, each with many episodes, or in the trainer's process.

A worker process (`worker_process.py`, `environment_worker.py`) is started with the environment's name:

    worker    {"ready": true}                                             or {"refused": why}, then exit
    trainer   {"call": 7, "episode": 3, "method": "step", "argument": …}  methods are reset, step, end and ping
    worker    {"call": 7, "returned": …}                                  or {"what": …, "trace": …} or {"invalid": …}

An environment that hangs or kills its process costs its own episode only. A process that is lost with several episodes does
not say whose fault it was, so that each of them is played again in a process of its own (`Interrupted`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from slipstream.errors import EnvironmentFailed, SlipstreamError
from slipstream.rl.agents.environments import Environment, Observation
from slipstream.rl.agents.named import EnvironmentFactory, environment_named, prepare
from slipstream.rl.config import EnvironmentConfig
from slipstream.rl.rewards import callbacks
from slipstream.rl.rewards.callbacks import Outcome, Raised, Returned, TimedOut
from slipstream.rl.rewards.worker_process import WorkerProcess

PING_SECONDS = 5.0
"""A process that does not answer within this time is lost: code in it holds Python's lock."""
END_SECONDS = 5.0


class Interrupted(SlipstreamError):
    """The process of several episodes was lost. Never leaves this package: the episode is played again."""


class Host(Protocol):
    """The environment of one episode."""

    async def call(self, method: str, argument: Any, timeout: float) -> Outcome:
        """Call `reset` or `step`. Raises `EnvironmentFailed` for a value that is not valid and for a process that died."""
        ...


class InProcessHost:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def call(self, method: str, argument: Any, timeout: float) -> Outcome:
        function = getattr(self._environment, method, None)
        if not callable(function):
            raise EnvironmentFailed(f"no method {method}; an environment has reset(seed) and step(action)")
        return await callbacks.shared().call(function, (argument,), timeout=timeout)


class EnvironmentHosts:
    """Hosts for episodes: in worker processes as many at once as the config allows, in the trainer's process any number."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._factory: EnvironmentFactory | None = None
        self._workers: list[EnvironmentWorker] = []
        self._free = asyncio.Condition()
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Import the environment, so that a wrong name is reported early."""
        if self._config.workers:
            self._workers.append(await self._started())
        else:
            self._factory = environment_named(*_named(self._config).values())
            await prepare(self._factory, self._config.name, callbacks.shared())

    @contextlib.asynccontextmanager
    async def host(self, alone: bool = False) -> AsyncIterator[Host]:
        """The environment of a new episode, with `alone` in a process of its own."""
        if self._factory is not None:
            made = await callbacks.shared().call(self._factory, timeout=self._config.step_timeout)
            if not isinstance(made, Returned):
                why = f"raised {made.what}\n{made.trace}" if isinstance(made, Raised) else "did not return in time"
                raise EnvironmentFailed(f"environment {self._config.name!r}: making it {why}")
            try:
                yield InProcessHost(made.value)
            finally:
                if callable(close := getattr(made.value, "close", None)):
                    await asyncio.shield(callbacks.shared().call(close, timeout=END_SECONDS))
            return
        worker = await self._started() if alone else await self._worker()
        episode = WorkerHost(worker, next(self._numbers), alone)
        try:
            yield episode
        finally:
            await asyncio.shield(self._end(worker, episode))

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _worker(self) -> EnvironmentWorker:
        async with self._free:
            while True:
                self._workers = [worker for worker in self._workers if not worker.is_retired]
                worker = min(self._workers, key=lambda worker: worker.num_episodes, default=None)
                is_full = worker is not None and worker.num_episodes >= self._config.episodes_per_worker
                if len(self._workers) < self._config.workers and (worker is None or worker.num_episodes):
                    worker, is_full = await self._started(), False
                    self._workers.append(worker)
                if worker is not None and not is_full:
                    worker.num_episodes += 1
                    return worker
                await self._free.wait()

    async def _started(self) -> EnvironmentWorker:
        worker = EnvironmentWorker(self._config)
        await worker.start()
        return worker

    async def _end(self, worker: EnvironmentWorker, episode: WorkerHost) -> None:
        await episode.end()
        async with self._free:
            worker.num_episodes -= 1
            if worker.num_episodes <= 0 and (worker.is_retired or worker not in self._workers):
                await worker.close()
            self._free.notify_all()


class WorkerHost:
    def __init__(self, worker: EnvironmentWorker, episode: int, alone: bool) -> None:
        self._worker, self._episode, self._alone = worker, episode, alone

    async def call(self, method: str, argument: Any, timeout: float) -> Outcome:
        reply = await self._worker.call(self._episode, method, argument, timeout)
        if reply is None:
            # A thread that hangs cannot be stopped: no further episode starts in its process.
            self._worker.is_retired = True
            if await self._worker.call(0, "ping", None, PING_SECONDS) is not None:
                return TimedOut()
            await self._worker.kill()
            reply = {}
        if not reply:
            if not self._alone:
                raise Interrupted(self._worker.ended)
            raise EnvironmentFailed(f"its process {self._worker.ended}")
        if "invalid" in reply:
            raise EnvironmentFailed(reply["invalid"])
        if "what" in reply:
            return Raised(reply["what"], reply["trace"])
        value = reply["returned"]
        if method == "reset":
            return Returned(_observation(value))
        return Returned((_observation(value[0]), value[1], value[2]))

    async def end(self) -> None:
        await self._worker.call(self._episode, "end", None, END_SECONDS)


class EnvironmentWorker(WorkerProcess):
    """One process with several episodes."""

    def __init__(self, config: EnvironmentConfig) -> None:
        settings = _named(config)
        module, subject = "slipstream.rl.agents.environment_worker", f"environment {config.name!r}"
        super().__init__(module, subject, settings, config.start_timeout, config.python)
        self.num_episodes = 0
        self.is_retired = False
        """Whether no further episode may start in it."""
        self.ended = ""
        """How the process ended, with the end of its output."""
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._replies: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._replies = asyncio.create_task(self._read_replies())

    async def call(self, episode: int, method: str, argument: Any, timeout: float) -> dict[str, Any] | None:
        """The reply; empty if the process is gone, None if there was none in time."""
        number, process = next(self._numbers), self._process
        if process is None or self.ended:
            return {}
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        message = {"call": number, "episode": episode, "method": method, "argument": argument}
        try:
            await self._send(process, json.dumps(message).encode() + b"\n")
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return None
        finally:
            del self._calls[number]

    async def _read_replies(self) -> None:
        assert self._process is not None
        while reply := await self._receive(self._process):
            future = self._calls.get(reply.get("call", 0))
            if future is not None and not future.done():
                future.set_result(reply)
        self.is_retired = True
        ended = await self.kill(patience=1.0)
        self.ended = f"{ended}\n{self._output_tail()}".strip()
        for future in self._calls.values():
            if not future.done():
                future.set_result({})


def _named(config: EnvironmentConfig) -> dict[str, Any]:
    """The arguments of `environment_named`."""
    return {"name": config.name, "options": config.options, "tools": config.tools, "max_turns": config.max_turns}


def _observation(value: dict[str, Any]) -> Observation:
    return Observation(value["text"], tuple(value["messages"]), tuple(value["tools"]))
