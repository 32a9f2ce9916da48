"""Python's garbage collector, kept from stopping a process that serves.

A full collection looks at every object that there is, and a process that has imported vLLM or JAX has a million of them, which
stay: half a second in which nobody is answered, every few seconds under load."""

from __future__ import annotations

import gc


def leave_what_is_loaded() -> None:
    """What there is now stays until the process ends, and is not looked at again. For a role's process, once it has started."""
    gc.collect()
    gc.freeze()
