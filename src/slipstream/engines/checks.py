"""What every engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from slipstream.errors import NotReady, UnknownVersion, Unsupported, UpdateInProgress
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


def check_not_dropped(engine: str, tags: Sequence[MemoryTag] | None, asleep: Mapping[MemoryTag, int]) -> None:
    """Weights that sleep level 2 has dropped cannot be woken by name. `asleep` has the level of what sleeps."""
    if asleep.get("weights") == 2 and tags is not None and "weights" in tags:
        raise weights_dropped(engine)


def weights_dropped(engine: str) -> NotReady:
    return NotReady(f"engine {engine!r} dropped its weights (sleep level 2); a sync brings new ones and wakes them")


def weights_asleep(engine: str) -> NotReady:
    return NotReady(f"the weights of engine {engine!r} are asleep, and cannot be read; bridge.wake brings them back")


def half_written(engine: str, version: int) -> NotReady:
    """For an engine that served from memory that its trainer shares."""
    return NotReady(
        f"engine {engine!r} has no weights: version {version} was being written over the one before, in memory that the "
        "trainer shares, when that was called off or the trainer died; the next update brings new ones"
    )


def not_staged(engine: str, version: int) -> UnknownVersion:
    return UnknownVersion(f"engine {engine!r} has not staged version {version}: begin and stage it first")


def never_finish(engine: str, is_paused: bool) -> Unsupported:
    """For `in_flight="finish"` on an engine that does not step and has requests running."""
    return Unsupported(
        f"engine {engine!r} is {'paused' if is_paused else 'asleep'}, so its requests would never finish; resume it, or "
        'commit with in_flight="keep"'
    )
