"""A reward function in a process of its own: the process. `rl/reward_processes.py` starts it and says what is spoken.

It has its two pipes to itself: the function's own stdin is empty, and what it prints goes to stderr, of which the trainer
keeps the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from slipstream.errors import ConfigError
from slipstream.rl.callbacks import Raised, Returned, raised
from slipstream.rl.reward_functions import RewardRequest, accepted, judged, reward_from


def main(about: dict[str, Any]) -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    _follow(about["owner"])
    _limit(about["memory_limit"])
    try:
        function = reward_from(about["function"])
    except ConfigError as error:
        _say(answers, {"refused": str(error)})
        os._exit(1)
    _say(answers, {"ready": True})
    loop = asyncio.new_event_loop()  # one for all calls, so that the function can keep what it opened
    for line in requests:
        request = RewardRequest(**json.loads(line))
        _say(answers, {"began": True})
        outcome: Returned | Raised
        try:
            value = function(request.prompt, request.completion, **accepted(function, request))
            outcome = Returned(loop.run_until_complete(_finish(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # SystemExit too: it ends the call, not the worker
            outcome = raised(error)
        _say(answers, dataclasses.asdict(judged(outcome)))
    os._exit(0)  # threads that the function left behind are not waited for


async def _finish(value: Any) -> Any:
    return await value


def _say(answers: BinaryIO, what: dict[str, Any]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    answers.write(json.dumps(what).encode() + b"\n")
    answers.flush()


def _follow(owner: int) -> None:
    """Ends with the trainer, however that dies: the kernel sees to it on Linux, also while the function holds the GIL; the
    loop that starts workers lives as long as its process."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _limit(num_bytes: int) -> None:
    """If memory runs out, the kernel is to end this process and not the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if num_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
