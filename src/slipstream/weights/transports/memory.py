"""`memory`: trainer and engine in one process. One buffer, seen by both halves."""

from __future__ import annotations

import mmap
import secrets
import weakref

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.inplace import InPlaceLanding, InPlaceSender, Pieces

_open: weakref.WeakValueDictionary[str, MemoryLanding] = weakref.WeakValueDictionary()


def anonymous(size: int) -> np.ndarray:
    """Private memory that starts at a page, as engines like it; given back when its last view is gone."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


class MemoryLanding(InPlaceLanding):
    def __init__(self, size: int, num_pieces: int) -> None:
        super().__init__(anonymous(size), np.zeros(num_pieces, np.uint8))
        key = secrets.token_hex(8)
        self.link = pack_link("memory", key=key)
        _open[key] = self

    def close(self) -> None:
        super().close()
        _open.pop(unpack_link(self.link)["key"], None)


def memory_sender(link: bytes, pieces: Pieces, hashed: bool) -> InPlaceSender:
    landing = _open.get(fact(unpack_link(link), "key", str))
    if landing is None:
        raise TransferError("the memory link was made in another process or is closed; use shm between processes")
    return InPlaceSender(pieces(landing.buffer), landing.marks, hashed)
