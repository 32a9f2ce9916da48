"""End a child process when its owner ends, however the owner dies.

The child polls its parent's pid. A pipe would not do, since its other end may be inherited by the owner's other children.
PR_SET_PDEATHSIG would not either: it fires when the forking thread ends, not the process."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from slipstream.weights.transports.host import shm

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0


def follow(owner: int, stop: asyncio.Event) -> None:
    """Watch `owner`, the parent of this process. When it is gone, set `stop` on the running loop, and exit after a grace
    period. 0 disables this."""
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
