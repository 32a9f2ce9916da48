"""The contract of transports through host memory: two halves that move weights into the image of one engine rank.

The engine makes a `HostReceiver`: memory the size of the rank's image, and a link, a short JSON description that
reaches the trainer through the gateway. Each trainer rank opens the link as a `HostSender`. Then, in every update:

    engine    receiver.expect(version, pieces)
    trainer   sender.begin(version), sender.send(index, array) → checksum and more   …   sender.flush()
              or sender.send_delta(index, data, encoding), if transport and engine take it
    engine    receiver.checksums(expected)                  waits for the pieces and returns their checksums

A piece is a box of a parameter; its index is its position among the plan's moves to this rank. Each half is used by one
thread at a time. `close` may be called twice, and the other half may close or die at any moment."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights import delta
from slipstream.weights.checksum import PieceScan
from slipstream.weights.delta import DeltaError, Encoding

REFUSED = -1
"""Takes the place of a checksum that no piece has."""


class HostReceiver:
    """The engine's half."""

    link = b""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        """The image as bytes."""
        self._pieces: Mapping[int, np.ndarray] = {}
        self._version, self._hashed = -1, True
        self.bases: Mapping[int, np.ndarray] = {}
        """By index, the values that serve, which deltas are applied to. Set before `expect`."""
        self.deltas: dict[int, str] = {}
        """By index, the pieces of this version that came as deltas; with the reason, if it could not be applied."""

    def expect(self, version: int, pieces: Mapping[int, np.ndarray], hashed: bool) -> None:
        """Begin an update. `pieces` are views of `buffer`, by index. Unless `hashed`, all checksums are 0. Bytes of
        this version may have arrived already, since a sender with an open link does not wait."""
        self._version, self._pieces, self._hashed, self.deltas = version, pieces, hashed, {}

    def _apply(self, index: int, data: bytes | bytearray, encoding: Encoding) -> int:
        """Write a piece that came as a delta; return its checksum, `REFUSED` if that is impossible."""
        self.deltas[index] = ""
        try:
            if index not in self.bases:
                raise DeltaError("the engine holds no earlier version of it")
            return delta.apply(data, self.bases[index], self._pieces[index], encoding)
        except DeltaError as error:
            self.deltas[index] = str(error)
            return REFUSED

    def checksums(self, expected: Mapping[int, int]) -> dict[int, int]:
        """Wait for the pieces that were sent and return their checksums. `expected` has the sender's checksums. Raise
        `TransferError` if pieces do not arrive."""
        raise NotImplementedError

    def senders_opened(self) -> None:
        """Called once every sender has opened the link; it need not be reachable any longer."""

    def close(self) -> None:
        """Make the link unusable. Views of the buffer stay valid."""


class HostSender:
    """The trainer's half."""

    _version = -1

    def begin(self, version: int) -> None:
        """Assign everything sent from now on to this version."""
        self._version = version

    def send(self, index: int, array: np.ndarray) -> PieceScan:
        """Transfer a piece, cast to the engine's dtype, and return what a scan of the bytes has shown."""
        raise NotImplementedError

    def send_delta(self, index: int, data: bytes, encoding: Encoding) -> None:
        """Transfer a piece as its difference to the version that serves, if the transport can."""
        raise NotImplementedError

    def flush(self) -> None:
        """Return once everything sent so far has left the trainer's arrays."""

    def close(self) -> None: ...


class StallTimer:
    """A timeout that starts again whenever progress is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._progress = seconds, time.monotonic(), -1

    def is_stalled(self, progress: int) -> bool:
        """Whether `progress` has stayed the same for longer than the timeout."""
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
        return now - self._since > self._seconds


RANDOM_NAME = r"slipstream-[0-9a-f]{16}"


def random_name() -> str:
    """Return a unique name, matching `RANDOM_NAME`, for files or groups that a link refers to."""
    return f"slipstream-{secrets.token_hex(8)}"


def pack_link(transport: str, **fields: Any) -> bytes:
    return json.dumps({"transport": transport, **fields}).encode()


def unpack_link(link: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(link)
        if not isinstance(fields["transport"], str):
            raise TypeError("transport")
        return fields
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TransferError(f"malformed transport link: {link[:80]!r}") from None


def link_field(link: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of an unpacked link after checking its type."""
    value = link.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TransferError(f"the {link['transport']} link's field {name!r} should be {kind.__name__}, got {value!r}")
    return value


def link_name(link: dict[str, Any]) -> str:
    """Return the field `name` of a link, which becomes part of a path, after checking that `random_name` made it."""
    name = link_field(link, "name", str)
    if not re.fullmatch(RANDOM_NAME, name):
        raise TransferError(f"the {link['transport']} link's field 'name' should match {RANDOM_NAME}, got {name!r}")
    return name
