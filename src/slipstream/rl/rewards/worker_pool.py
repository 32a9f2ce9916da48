"""Reward functions in worker processes: the trainer's side. `worker.py` is the process.

Messages are those of `worker_process.py`. The process is started with the function's name:

    worker    {"ready": true}                       or {"refused": why}, then exit
    trainer   {"prompt": …, "completion": …, …}     one call
    worker    {"began": true}                       a death after this is the function's fault
    worker    {"value": 0.5, "parts": {…}}          or {"what": …, "fix": …, "detail": …}"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from slipstream.errors import RewardFailed
from slipstream.rl.rewards.callbacks import Returned, TimedOut
from slipstream.rl.rewards.functions import Reward, RewardOutcome, RewardProblem, RewardRequest, to_reward
from slipstream.rl.rewards.worker_process import WorkerProcess

MAX_STARTS = 3
"""Attempts of a call whose worker was dead before the call began."""


class RewardWorker(WorkerProcess):
    """One process that runs one call at a time."""

    def __init__(self, function: str, start_timeout: float, memory_limit: int = 0) -> None:
        settings = {"function": function, "memory_limit": memory_limit}
        super().__init__("slipstream.rl.rewards.worker", f"reward {function!r}", settings, start_timeout)
        self._function = function

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
                    reply = await asyncio.wait_for(self._call(self._process, line), timeout)
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

    async def _call(self, process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
        """The worker's reply; empty if it died before the call; `{"died": true}` if it died during the call."""
        if not await self._send(process, line):
            return {}
        began = await self._receive(process)
        if "began" not in began:
            return began
        return await self._receive(process) or {"died": True}


def parse_reply(reply: dict[str, Any]) -> Reward | RewardProblem | None:
    """None if the reply is invalid."""
    if reply.keys() == {"value", "parts"} and isinstance(reply["parts"], dict):
        reward = to_reward(Returned(reply["parts"] or reply["value"]))
        return reward if isinstance(reward, Reward) else None
    if reply.keys() == {"what", "fix", "detail"} and all(isinstance(text, str) for text in reply.values()):
        return RewardProblem(**reply)
    return None


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
