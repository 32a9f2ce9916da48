"""A child process ends when its owner does, however the owner dies.

Polling the parent's pid survives what a pipe or a death signal does not: a pipe's other end may be inherited by the
owner's other children, and PR_SET_PDEATHSIG fires when the thread that forked ends, not the process."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from slipstream.weights.transports import shm

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0


def follow(owner: int, stop: asyncio.Event) -> None:
    """Watches `owner`, this process's parent; when it is gone, sets `stop` on the running loop, and after a grace
    period ends the process. 0 follows nobody."""
    if owner:
        loop = asyncio.get_running_loop()
        threading.Thread(target=_watch, args=(owner, loop, stop), name="lifeline", daemon=True).start()


def _watch(owner: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_SECONDS)
    loop.call_soon_threadsafe(stop.set)
    time.sleep(GRACE_SECONDS)
    shm.sweep()
    os._exit(1)
