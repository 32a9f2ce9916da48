"""What every engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from slipstream.errors import Unsupported, UpdateInProgress
from slipstream.types import InFlight, MemoryTag


def check_in_flight(in_flight: str) -> None:
    if in_flight not in get_args(InFlight):
        raise Unsupported(f"in_flight must be one of {', '.join(get_args(InFlight))}; got {in_flight!r}")


def check_sleep(engine: str, level: int, is_updating: bool) -> None:
    if level not in (1, 2):
        raise Unsupported(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped), got {level!r}")
    if is_updating:
        raise UpdateInProgress(f"engine {engine!r} is in the midst of an update: commit it or roll it back first")


def check_tags(tags: Sequence[MemoryTag] | None) -> None:
    known = get_args(MemoryTag)
    for tag in tags or ():
        if tag not in known:
            raise Unsupported(f"nothing is named {tag!r}; wake takes {' and '.join(known)}")


def never_finish(engine: str, is_paused: bool) -> Unsupported:
    """For `in_flight="finish"` on an engine that does not step and has requests running."""
    return Unsupported(
        f"engine {engine!r} is {'paused' if is_paused else 'asleep'}, so its requests would never finish; resume it, or "
        'commit with in_flight="keep"'
    )
