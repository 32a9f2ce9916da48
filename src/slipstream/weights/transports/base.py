"""What a data plane is: two halves that move one stream of bytes, from one trainer rank to one engine rank.

The sender makes its half and a link, a short description (JSON) that reaches the engine through the gateway; the receiver
opens the link. Both then see the stream as regions `[offset, offset + size)`:

    sender    region() → fill it → … → flush()          the trainer may reuse the stream once the engine has staged
    receiver  region() → read it; the bytes stay valid until the next update begins

A half is used by one thread at a time. `close` may be called twice, and from the other half's point of view at any
moment: what is mapped stays readable."""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np

from slipstream.errors import TransferError


class Sender(Protocol):
    link: bytes

    def region(self, offset: int, size: int) -> np.ndarray:
        """Writable bytes (uint8) of the stream."""
        ...

    def flush(self) -> None:
        """All regions are filled."""
        ...

    def attached(self) -> None:
        """Every receiver has opened the link: nobody else needs to find it any more."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    def region(self, offset: int, size: int) -> np.ndarray:
        """Read-only bytes (uint8) of the stream."""
        ...

    def close(self) -> None: ...


def pack_link(transport: str, **facts: Any) -> bytes:
    return json.dumps({"transport": transport, **facts}).encode()


def unpack_link(link: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(link)
        if not isinstance(facts["transport"], str):
            raise TypeError("transport")
        return facts
    except (ValueError, KeyError, TypeError):
        raise TransferError(f"a transport link cannot be read: {link[:80]!r}") from None


def fact(facts: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a link, of the type it must have."""
    value = facts.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TransferError(f"the {facts['transport']} link's field {name!r} should be {kind.__name__}, got {value!r}")
    return value


def bounded(buffer: np.ndarray, offset: int, size: int) -> np.ndarray:
    if offset < 0 or size < 0 or offset + size > buffer.size:
        raise TransferError(f"bytes {offset}–{offset + size} are outside a stream of {buffer.size} bytes")
    return buffer[offset : offset + size]
