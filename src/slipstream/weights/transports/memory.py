"""`memory`: trainer and engine in one process. One buffer, seen by both halves."""

from __future__ import annotations

import secrets
import weakref

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports.base import bounded, fact, pack_link, unpack_link

_open: weakref.WeakValueDictionary[str, MemorySender] = weakref.WeakValueDictionary()


class MemorySender:
    def __init__(self, size: int) -> None:
        self.buffer = np.empty(size, np.uint8)
        key = secrets.token_hex(8)
        self.link = pack_link("memory", key=key, size=size)
        _open[key] = self

    def region(self, offset: int, size: int) -> np.ndarray:
        return bounded(self.buffer, offset, size)

    def flush(self) -> None: ...

    def attached(self) -> None: ...

    def close(self) -> None:
        _open.pop(unpack_link(self.link)["key"], None)


class MemoryReceiver:
    def __init__(self, link: bytes) -> None:
        sender = _open.get(fact(unpack_link(link), "key", str))
        if sender is None:
            raise TransferError("the memory link was made in another process or is closed; use shm between processes")
        self._buffer = sender.buffer[:]
        self._buffer.flags.writeable = False

    def region(self, offset: int, size: int) -> np.ndarray:
        return bounded(self._buffer, offset, size)

    def close(self) -> None: ...
