"""Checks and errors that all engines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from slipstream.errors import (
    NoAdapterSlot,
    NotReady,
    UnknownAdapter,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
)
from slipstream.types import EngineInfo, InFlight, MemoryTag, Offer
from slipstream.weights.adapters import check_supported


def check_in_flight(in_flight: str) -> None:
    if in_flight not in get_args(InFlight):
        raise Unsupported(f"in_flight must be one of {', '.join(get_args(InFlight))}; got {in_flight!r}")


def check_sleep(engine: str, level: int, is_updating: bool) -> None:
    if level not in (1, 2):
        raise Unsupported(f"sleep level must be 1 (weights to host memory) or 2 (weights dropped), got {level!r}")
    if is_updating:
        raise UpdateInProgress(f"engine {engine!r} is being updated; commit the update or roll it back first")


def check_tags(tags: Sequence[MemoryTag] | None) -> None:
    known = get_args(MemoryTag)
    for tag in tags or ():
        if tag not in known:
            raise Unsupported(f"unknown memory tag {tag!r}; wake takes {' and '.join(known)}")


def weights_dropped(engine: str) -> NotReady:
    return NotReady(f"engine {engine!r} has dropped its weights (sleep level 2); a sync brings new ones and wakes them")


def weights_asleep(engine: str) -> NotReady:
    return NotReady(f"the weights of engine {engine!r} are asleep and cannot be read; bridge.wake restores them")


def half_written(engine: str, version: int) -> NotReady:
    """The error of an engine whose trainer stopped while overwriting the serving weights in shared memory."""
    return NotReady(
        f"engine {engine!r} has no weights: the update to version {version} was aborted, or its trainer died, while it was "
        "overwriting the serving weights in shared memory; the next update brings new ones"
    )


def not_staged(engine: str, version: int) -> UnknownVersion:
    return UnknownVersion(f"engine {engine!r} has not staged version {version}; begin and stage it first")


def check_adapters(info: EngineInfo, offer: Offer, loaded: Sequence[str]) -> None:
    """Raise unless an engine that has `loaded` these adapters can take those of an update."""
    for lora in offer.adapters:
        check_supported(info, lora)
    assert info.adapters is not None, "checked above"
    if offer.only_adapters and info.version < 0:
        raise NotReady(f"engine {info.name!r} has no base model yet for an adapter; sync that first")
    new = [lora.name for lora in offer.adapters if lora.name not in loaded]
    if len(loaded) + len(new) > info.adapters.slots:
        raise NoAdapterSlot(
            f"engine {info.name!r} has {info.adapters.slots} slot(s) for adapters, which hold {', '.join(sorted(loaded))}; "
            f"there is none for {', '.join(new)}: unload one (bridge.unload_adapter), or start the engine with more"
        )


def unknown_adapter(engine: str, name: str, loaded: Sequence[str]) -> UnknownAdapter:
    known = f"it has {', '.join(sorted(loaded))}" if loaded else "it has none"
    return UnknownAdapter(
        f"engine {engine!r} has no adapter {name!r}: {known}; load it with bridge.sync(tree, adapter=Lora({name!r}, …))"
    )


def unloaded_adapter(engine: str, name: str) -> UnknownAdapter:
    return UnknownAdapter(f"engine {engine!r} has unloaded adapter {name!r}; sync it again to use it")


def never_finish(engine: str, is_paused: bool) -> Unsupported:
    """The error of `in_flight="finish"` on an engine that does not step and has running requests."""
    state, fix = ("paused", "resume") if is_paused else ("asleep", "wake")
    return Unsupported(
        f'engine {engine!r} is {state}, so its requests would never finish; {fix} it, or commit with in_flight="keep"'
    )
