"""Ends the process when a thread could not begin for want of memory. CPython's `Thread.start` would wait for it forever."""

from __future__ import annotations

import os
import sys


def exit_on_lost_thread() -> None:
    """Install the hook. Whoever watches the process sees it end, and can restart it."""
    default = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is MemoryError and "in thread started by" in (unraisable.err_msg or ""):
            os.write(2, b"slipstream: MemoryError: a thread could not begin, so this process ends\n")
            os._exit(1)
        default(unraisable)

    sys.unraisablehook = hook
