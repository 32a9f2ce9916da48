"""What a data plane is: two halves that bring pieces of weights into the image of one engine rank.

The engine makes a `Landing`, a block of memory the size of the rank's image with a link, a short description (JSON) that
reaches the trainer through the gateway; each trainer rank opens the link as a `Sender`. Then, for every update:

    engine    landing.expect(version, pieces)
    trainer   sender.begin(version), sender.send(index, array) → checksum   …   sender.flush()
    engine    landing.checksums(expected)                   waits until these are there, and says what is there

A piece is a rectangle of a parameter; its index is its place among the plan's moves to this rank. A half is used by one
thread at a time. `close` may be called twice, and the other half may close, or die, at any moment."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.errors import TransferError

SILENCE_SECONDS = 30.0
"""A landing gives up when nothing has arrived for this long."""


class Landing(Protocol):
    link: bytes
    buffer: np.ndarray
    """The image, as bytes."""

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        """An update begins; `pieces` are views of `buffer`, by index. Unless `hashed`, checksums are all 0. Bytes of this
        version may have come already, since a sender that knows where to send does not wait."""
        ...

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        """What has landed in the pieces that were sent; `expected` is the sender's word on them. Raises `TransferError`
        when they do not come."""
        ...

    def settle(self) -> None:
        """Every sender has opened the link: nobody else needs to find it any more."""
        ...

    def close(self) -> None:
        """Nobody can open the link any more. Views of the buffer stay valid."""
        ...


class Sender(Protocol):
    def begin(self, version: int) -> None:
        """What is sent from now on belongs to this version."""
        ...

    def send(self, index: int, array: np.ndarray) -> int:
        """Brings a piece over, cast to the engine's dtype, and returns its checksum."""
        ...

    def flush(self) -> None:
        """Everything sent so far is on its way."""
        ...

    def close(self) -> None: ...


class Silence:
    """The clock of a wait that is fine as long as something moves."""

    def __init__(self, what: str) -> None:
        self._what, self._since = what, time.monotonic()

    def broken(self) -> None:
        self._since = time.monotonic()

    def check(self, missing: int) -> None:
        if time.monotonic() - self._since > SILENCE_SECONDS:
            raise TransferError(
                f"{self._what}: {missing} piece(s) did not arrive; nothing came for {SILENCE_SECONDS:g} s"
            )


def pack_link(transport: str, **facts: Any) -> bytes:
    return json.dumps({"transport": transport, **facts}).encode()


def unpack_link(link: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(link)
        if not isinstance(facts["transport"], str):
            raise TypeError("transport")
        return facts
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TransferError(f"a transport link cannot be read: {link[:80]!r}") from None


def fact(facts: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a link, of the type it must have."""
    value = facts.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TransferError(f"the {facts['transport']} link's field {name!r} should be {kind.__name__}, got {value!r}")
    return value
