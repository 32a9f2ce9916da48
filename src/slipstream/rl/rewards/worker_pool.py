"""Reward functions in worker processes: the trainer's side. `worker.py` is the process.

The protocol is JSON lines over two pipes; nothing is pickled (docs/decisions/0019-reward-workers.md). The process is started
with the function's name:

    worker    {"ready": true}                       or {"refused": why}, then exit
    trainer   {"prompt": …, "completion": …, …}     one call
    worker    {"began": true}                       a death after this is the function's fault
    worker    {"value": 0.5, "parts": {…}}          or {"what": …, "fix": …, "detail": …}

A worker leads a process group, so that processes started by the function are killed with it."""

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
from slipstream.rl.rewards.callbacks import Returned, TimedOut
from slipstream.rl.rewards.functions import Reward, RewardOutcome, RewardProblem, RewardRequest, to_reward

MAX_LINE = 8 << 20
MAX_OUTPUT = 4000
EXIT_SECONDS = 5.0
MAX_STARTS = 3
"""Attempts of a call whose worker was dead before the call began."""

_PROGRAM = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
    "from slipstream.rl.rewards.worker import main; main(a)"
)


class RewardWorker:
    """One process that runs one call at a time. Started when needed, and again after it was killed. Not thread-safe: use it on
    one event loop."""

    def __init__(self, function: str, start_timeout: float, memory_limit: int = 0) -> None:
        self._function, self._start_timeout, self._memory_limit = function, start_timeout, memory_limit
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False
        self._output = bytearray()
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. `ConfigError` if it cannot import the function, `DeadlineExceeded` if that takes too long."""
        if self._closed:
            raise RequestError(f"the rewarder of {self._function!r} is closed; create another")
        settings = {
            "function": self._function,
            "path": sys.path,
            "owner": os.getpid(),
            "memory_limit": self._memory_limit,
        }
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, json.dumps(settings)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_LINE,
            start_new_session=True,
            # A function that imports JAX must not reserve the trainer's GPU memory.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
        )
        self._output.clear()
        self._reading = asyncio.create_task(self._read_output(process))
        try:
            message = await asyncio.wait_for(_receive(process), self._start_timeout)
        except TimeoutError:
            await self.kill()
            raise DeadlineExceeded(
                f"a worker process did not import reward {self._function!r} within {self._start_timeout:g} s; does its "
                f"module do work when imported? Its output:\n{self._output_tail()}"
            ) from None
        except BaseException:
            await self.kill()
            raise
        if "ready" not in message:
            ended = await self.kill(patience=1.0)
            raise ConfigError(
                message.get("refused")
                or f"reward {self._function!r}: its worker process {ended} while importing it:\n{self._output_tail()}"
            )

    async def evaluate(self, request: RewardRequest, timeout: float) -> RewardOutcome:
        """Run one call. A process that times out or dies is killed with everything it started, and the next call starts a
        new one. So is a process whose caller is cancelled: its reply would be taken for that of the next call."""
        try:
            line = json.dumps(dataclasses.asdict(request)).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardFailed(
                f"reward {self._function!r}: sample {request.sample_index} of prompt {request.prompt_index} cannot be sent to "
                f"a worker process: {error}; `extra` must hold JSON values"
            ) from None
        try:
            for _ in range(MAX_STARTS):
                if self._process is None:
                    await self.start()
                assert self._process is not None
                try:
                    reply = await asyncio.wait_for(_call(self._process, line), timeout)
                except TimeoutError:
                    await self.kill()
                    return TimedOut()
                if reply:
                    return await self._outcome(reply)
                await self.kill()  # it was dead before this call: not the function's fault
        except BaseException:
            await self.kill()
            raise
        problem = f"could not run: {MAX_STARTS} worker processes died before the call"
        return RewardProblem(problem, "find out what kills them", self._output_tail())

    async def kill(self, patience: float = 0.0) -> str:
        """Kill the process group and return how the process ended. A dying process gets `patience` seconds to exit first, so
        that its own exit status is seen. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return "was not running"
        try:
            if patience:
                await _wait(process, patience)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await _wait(process, EXIT_SECONDS)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=0.2)
            self._reading.cancel()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()  # a child of the process may hold the descriptors open
        return _ended(process.returncode)

    async def close(self) -> None:
        self._closed = True
        await self.kill()

    async def _outcome(self, reply: dict[str, Any]) -> RewardOutcome:
        outcome = parse_reply(reply)
        if outcome is not None:
            return outcome
        ended = await self.kill(patience=1.0)
        if "died" not in reply:
            fix = "the function must not write to file descriptors that it did not open"
            return RewardProblem("sent an invalid reply", fix, self._output_tail())
        fix = (
            "it may have crashed in native code, called os._exit, or run out of memory (the kernel kills with SIGKILL)"
        )
        return RewardProblem(f"ended its worker process, which {ended}", fix, self._output_tail())

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            self._output += chunk
            del self._output[:-MAX_OUTPUT]

    def _output_tail(self) -> str:
        return self._output.decode(errors="replace").strip()


async def _call(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
    """The worker's reply; empty if it died before the call; `{"died": true}` if it died during the call."""
    assert process.stdin is not None
    try:
        process.stdin.write(line)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return {}
    began = await _receive(process)
    if "began" not in began:
        return began
    return await _receive(process) or {"died": True}


async def _receive(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The worker's next message; empty at the end of the stream."""
    assert process.stdout is not None
    try:
        message = json.loads(await process.stdout.readline() or b"{}")
    except (ValueError, RecursionError):
        message = None
    except ConnectionResetError:
        return {}
    return message if isinstance(message, dict) else {"invalid": True}


def parse_reply(reply: dict[str, Any]) -> Reward | RewardProblem | None:
    """None if the reply is invalid."""
    if reply.keys() == {"value", "parts"} and isinstance(reply["parts"], dict):
        reward = to_reward(Returned(reply["parts"] or reply["value"]))
        return reward if isinstance(reward, Reward) else None
    if reply.keys() == {"what", "fix", "detail"} and all(isinstance(text, str) for text in reply.values()):
        return RewardProblem(**reply)
    return None


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


def _ended(code: int | None) -> str:
    if code is None:
        return "could not be killed"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"


class WorkerPool:
    """The worker processes of one function. The first starts at once, so that a wrong name is reported early."""

    def __init__(self, function: str, count: int, start_timeout: float, memory_limit: int = 0) -> None:
        self.workers = [RewardWorker(function, start_timeout, memory_limit) for _ in range(count)]
        self._idle = asyncio.LifoQueue[RewardWorker]()  # last in, first out: the worker used last is running and warm
        for worker in reversed(self.workers):
            self._idle.put_nowait(worker)

    async def start(self) -> None:
        await self.workers[0].start()

    async def evaluate(self, request: RewardRequest, timeout: float) -> RewardOutcome:
        """Run one call. The timeout starts when a worker is free and running."""
        worker = await self._idle.get()
        try:
            return await worker.evaluate(request, timeout)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))
