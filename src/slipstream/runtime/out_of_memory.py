"""Ends the process when memory ran out where Python cannot raise an error: as a thread begins, or in a callback from C++.

What was to happen there never will, and whoever waits for it would wait forever. `Thread.start` does, and so does a checkpoint
that TensorStore writes."""

from __future__ import annotations

import os
import queue
import sys
import threading


def exit_when_out_of_memory() -> None:
    """Watch the exceptions that cannot be raised. Whoever watches the process sees it end, and can restart it.

    A thread without memory cannot call a Python function, so another thread does. `SimpleQueue.put` is written in C."""
    found: queue.SimpleQueue[sys.UnraisableHookArgs] = queue.SimpleQueue()
    sys.unraisablehook = found.put
    threading.Thread(target=_watch, args=(found,), name="slipstream-unraisable", daemon=True).start()


def _watch(found: queue.SimpleQueue[sys.UnraisableHookArgs]) -> None:
    while True:
        unraisable = found.get()
        if unraisable.exc_type is MemoryError:
            os.write(2, b"slipstream: MemoryError: a thread or a callback could not run, so this process ends\n")
            os._exit(1)
        sys.__unraisablehook__(unraisable)
        del unraisable
