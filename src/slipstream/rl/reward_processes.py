"""Reward functions in processes of their own, the trainer's half. The other is `rl/reward_worker.py`.

They speak JSON, a line at a time, over two pipes; nothing is pickled. The process is started with the function's name:

    worker    {"ready": true}                       or {"refused": why}, and it ends
    trainer   {"prompt": …, "completion": …, …}     one call
    worker    {"began": true}                       from here on, a death is the function's doing
    worker    {"value": 0.5, "parts": {…}}          or {"what": …, "fix": …, "detail": …}

A worker leads a process group, so that what a function starts is killed with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from typing import Any

from slipstream.errors import ConfigError, DeadlineExceeded, RequestError, RewardFailed
from slipstream.rl.callbacks import Overdue, Returned
from slipstream.rl.reward_functions import Judged, Problem, RewardRequest, Verdict, judged

MAX_LINE = 8 << 20
MAX_OUTPUT = 4000
END_SECONDS = 5.0
MAX_STARTS = 3
"""A worker found dead before a call began is replaced this often."""

_RUN = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
    "from slipstream.rl.reward_worker import main; main(a)"
)


class Worker:
    """One process, one call at a time; started at need, and anew after it was killed. Lives on one event loop."""

    def __init__(self, function: str, start_timeout: float, memory_limit: int = 0) -> None:
        self._function, self._start_timeout, self._memory_limit = function, start_timeout, memory_limit
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False
        self._printed = bytearray()
        self._listening: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """`ConfigError` if the process cannot find the function, `DeadlineExceeded` if it takes too long to look."""
        if self._closed:
            raise RequestError(f"the rewarder of {self._function!r} is closed; make another")
        about = {
            "function": self._function,
            "path": sys.path,
            "owner": os.getpid(),
            "memory_limit": self._memory_limit,
        }
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _RUN, json.dumps(about)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_LINE,
            start_new_session=True,
            # A function that imports JAX must not take most of the trainer's GPU.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
        )
        self._printed.clear()
        self._listening = asyncio.create_task(self._listen(process))
        try:
            said = await asyncio.wait_for(_hear(process), self._start_timeout)
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded(
                f"waited {self._start_timeout:g} s for a worker process to import reward {self._function!r}; does its "
                f"module do work when imported? It printed:\n{self._tail()}"
            ) from None
        except BaseException:
            await self.kill()
            raise
        if "ready" not in said:
            ended = await self.kill(patience=1.0)
            why = said.get("refused") or f"its worker process {ended} while importing it:\n{self._tail()}"
            raise ConfigError(f"reward {self._function!r}: {why}" if "refused" not in said else str(why))

    async def ask(self, request: RewardRequest, timeout: float) -> Verdict:
        """A process that does not answer in time, or dies, is killed with all that it started; the next call gets a new
        one. So is one whose caller is cancelled: its answer would be taken for the next call's."""
        try:
            line = json.dumps(dataclasses.asdict(request)).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardFailed(
                f"reward {self._function!r}: the facts of sample {request.sample_index} of prompt {request.prompt_index} "
                f"cannot be sent to a worker process: {error}; `extra` takes JSON values"
            ) from None
        try:
            for _ in range(MAX_STARTS):
                if self._process is None:
                    await self.start()
                assert self._process is not None
                try:
                    said = await asyncio.wait_for(_call(self._process, line), timeout)
                except TimeoutError:
                    await self.kill()
                    return Overdue()
                if said:
                    return await self._verdict(said)
                await self.kill()  # it was dead before this call: nobody's fault
        except BaseException:
            await self.kill()
            raise
        return Problem(f"has worker processes that die at once, {MAX_STARTS} of them", "who kills them?", self._tail())

    async def kill(self, patience: float = 0.0) -> str:
        """Ends the process, and says how it ended: one that is dying gets `patience` seconds to do so for its own reason.
        May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return "was not there"
        try:
            if patience:
                await _reaped(process, patience)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await _reaped(process, END_SECONDS)
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=0.2)
            self._listening.cancel()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()  # descriptors that a child of it may hold open
        return _ended(process.returncode)

    async def close(self) -> None:
        self._closed = True
        await self.kill()

    async def _verdict(self, said: dict[str, Any]) -> Verdict:
        verdict = _read(said)
        if verdict is not None:
            return verdict
        ended = await self.kill(patience=1.0)
        if "died" not in said:
            fix = "the function must not write to pipes that are not its own"
            return Problem("answered with what is no verdict", fix, self._tail())
        fix = (
            "it may have crashed in native code, called os._exit, or run out of memory (the kernel kills with SIGKILL)"
        )
        return Problem(f"took its worker process along, which {ended}", fix, self._tail())

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while some := await process.stderr.read(1 << 16):
            self._printed += some
            del self._printed[:-MAX_OUTPUT]

    def _tail(self) -> str:
        return self._printed.decode(errors="replace").strip()


async def _call(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
    """What the worker answered; empty if it had died before; `{"died": true}` if it died of this call."""
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return {}
    began = await _hear(process)
    if "began" not in began:
        return began
    return await _hear(process) or {"died": True}


async def _hear(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The worker's next line; empty if there is none to come."""
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline() or b"{}")
    except (ValueError, RecursionError):
        said = None
    except ConnectionResetError:
        return {}
    return said if isinstance(said, dict) else {"nonsense": True}


def _read(said: dict[str, Any]) -> Judged | Problem | None:
    """None where it is neither."""
    if said.keys() == {"value", "parts"} and isinstance(said["parts"], dict):
        found = judged(Returned(said["parts"] or said["value"]))
        return found if isinstance(found, Judged) else None
    if said.keys() == {"what", "fix", "detail"} and all(isinstance(text, str) for text in said.values()):
        return Problem(**said)
    return None


async def _reaped(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


def _ended(code: int | None) -> str:
    if code is None:
        return "could not be ended"
    if code < 0:
        known = -code in [each.value for each in signal.Signals]
        return f"ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


class WorkerPool:
    """Several processes of one function. The first is started at once, so that a wrong name is found early."""

    def __init__(self, function: str, count: int, start_timeout: float, memory_limit: int = 0) -> None:
        self.workers = [Worker(function, start_timeout, memory_limit) for _ in range(count)]
        self._idle = asyncio.LifoQueue[Worker]()  # the one used last is up, and warm
        for worker in reversed(self.workers):
            self._idle.put_nowait(worker)

    async def start(self) -> None:
        await self.workers[0].start()

    async def judge(self, request: RewardRequest, timeout: float) -> Verdict:
        """The time-out begins when a worker is free and up."""
        worker = await self._idle.get()
        try:
            return await worker.ask(request, timeout)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))
