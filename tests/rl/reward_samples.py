"""Reward functions for tests."""

import asyncio
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CALLS = 0


def exact(prompt, completion, answer):
    return float(completion == answer)


def length(prompt, completion):
    return len(completion)


def parts(prompt, completion):
    return {"a": 1.0, "b": len(completion) / 2}


def facts(prompt, completion, **facts):
    assert facts["answer"] == "21" and facts["token_ids"] == (5, 6) and facts["finish_reason"] == "length"
    assert (
        facts["prompt_token_ids"] == (1, 2) and facts["hint"] == {"x": [1]} and (prompt, completion) == ("r12=", "12")
    )
    return facts["prompt_index"] * 10 + facts["sample_index"]


async def later(prompt, completion):
    await asyncio.sleep(0.01)
    return float(completion)


def returns_awaitable(prompt, completion):
    return later(prompt, completion)


class Callable:
    async def __call__(self, prompt, completion):
        return await later(prompt, completion)


an_object = Callable()

not_a_function = 3

ODD = {
    "nan": float("nan"),
    "inf": float("-inf"),
    "huge": 10**400,
    "none": None,
    "text": "1.0",
    "bool": True,
    "array": np.ones(2),
    "numpy bool": np.bool_(True),
    "empty": {},
    "bad part": {"good": 1.0, "bad": None},
    "bad name": {3: 1.0},
    "list": [1.0],
}


def odd(prompt, completion):
    return ODD[completion]


def numpy_scalar(prompt, completion):
    return np.float32(0.5)


def by_completion(prompt, completion):
    """Does what the completion says; a number is the reward."""
    match completion:
        case "raise":
            raise ValueError("no digits in it")
        case "timeout":
            raise TimeoutError("a server's own")
        case "cancelled":
            raise asyncio.CancelledError
        case "exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            print("about to go", flush=True)
            os.kill(os.getpid(), 9)
        case "hang":
            time.sleep(3600)
        case "regex":  # holds the GIL beyond any timeout
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "memory":
            return float(len(bytearray(64 << 30)))
        case "print":
            print("{" * 10 + "\n" * 5)
            os.write(1, b'{"value": 99.0}\n')
            os.system("echo '{\"value\": 98.0}'")
            assert sys.stdin.read() == ""
            return 0.25
        case "garble":
            for fd in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(fd, b"[1, 2\n")
            return 1.0
        case "pid":
            return os.getpid()
        case "count":
            global CALLS
            CALLS += 1
            return CALLS
        case _:
            return float(completion)


async def by_completion_async(prompt, completion):
    if completion == "hang":
        await asyncio.sleep(3600)
    return by_completion(prompt, completion)


def leaves_a_child(prompt, completion):
    """Starts a process, writes its pid to the file that the prompt names, and hangs."""
    child = subprocess.Popen(["sleep", "3600"])
    Path(prompt).write_text(f"{os.getpid()} {child.pid}\n")
    time.sleep(3600)
