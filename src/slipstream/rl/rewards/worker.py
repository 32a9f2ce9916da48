"""The worker process of a reward function. `worker_pool.py` starts it and documents the protocol.

The two pipes of the protocol are reserved: the function's stdin is empty, and its output goes to stderr, whose end the
trainer keeps for error messages."""

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
from slipstream.rl.rewards.callbacks import Raised, Returned, awaited, raised
from slipstream.rl.rewards.functions import RewardRequest, accepted_facts, import_function, to_reward


def main(settings: dict[str, Any]) -> None:
    requests, replies = open_pipes()
    die_with(settings["owner"])
    _limit_memory(settings["memory_limit"])
    try:
        function = import_function(settings["function"])
    except ConfigError as error:
        reply(replies, {"refused": str(error)})
        os._exit(1)
    reply(replies, {"ready": True})
    loop = asyncio.new_event_loop()  # one for all calls, so that the function can keep connections open
    for line in requests:
        request = RewardRequest(**json.loads(line))
        reply(replies, {"began": True})
        outcome: Returned | Raised
        try:
            value = function(request.prompt, request.completion, **accepted_facts(function, request))
            outcome = Returned(loop.run_until_complete(awaited(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # SystemExit too: it fails the call, and the worker continues
            outcome = raised(error)
        reply(replies, dataclasses.asdict(to_reward(outcome)))
    os._exit(0)  # do not wait for threads of the function


def open_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes of the protocol. Standard input and output are then the user's code's: empty, and the trainer's log."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def die_with(owner: int) -> None:
    """End this process with the trainer, however it dies. On Linux the kernel does so, even while the function holds the GIL:
    the death signal follows the thread that started the worker, the trainer's event loop, which lives as long as its
    process. A thread polls as well, for other systems."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space, and make the kernel's OOM killer prefer this process to the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if num_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
