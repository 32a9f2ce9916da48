"""Ends the process when a thread could not begin for want of memory. CPython's `Thread.start` would wait for it forever."""

from __future__ import annotations

import os
import queue
import sys
import threading


def exit_on_lost_thread() -> None:
    """Watch the exceptions that nobody catches. Whoever watches the process sees it end, and can restart it.

    A thread without memory cannot call a Python function, so another thread does. `SimpleQueue.put` is written in C."""
    found: queue.SimpleQueue[sys.UnraisableHookArgs] = queue.SimpleQueue()
    sys.unraisablehook = found.put
    threading.Thread(target=_watch, args=(found,), name="slipstream-unraisable", daemon=True).start()


def _watch(found: queue.SimpleQueue[sys.UnraisableHookArgs]) -> None:
    while True:
        unraisable = found.get()
        if unraisable.exc_type is MemoryError and "in thread started by" in (unraisable.err_msg or ""):
            os.write(2, b"slipstream: MemoryError: a thread could not begin, so this process ends\n")
            os._exit(1)
        sys.__unraisablehook__(unraisable)
        del unraisable
