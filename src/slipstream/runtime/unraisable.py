"""Handles errors where Python cannot raise them: as a thread begins, in a finalizer, in a callback from C++.

Out of memory, the process ends. What was to happen there never will, and whoever waits for it would wait forever:
`Thread.start` does, and so does a checkpoint that TensorStore writes. Ctrl-C is repeated: JAX has a callback in every garbage
collection, which would swallow it."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time

AGAIN_SECONDS = 0.1


def watch_unraisable() -> None:
    """Watch the errors that cannot be raised. Call once, in a process of ours.

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
        if unraisable.exc_type is KeyboardInterrupt:
            # A signal also ends a blocking call, if it does not come just before it; `interrupt_main` would wait for its end.
            time.sleep(AGAIN_SECONDS)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            sys.__unraisablehook__(unraisable)
        del unraisable
