"""`memory`: trainer and engine in one process, with one buffer that both halves use."""

from __future__ import annotations

import mmap
import secrets
import weakref

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.host.in_place import InPlaceReceiver, InPlaceSender, MakePieces

_receivers: weakref.WeakValueDictionary[str, MemoryReceiver] = weakref.WeakValueDictionary()


def anonymous_memory(size: int) -> np.ndarray:
    """Return page-aligned private memory, which is freed with its last view."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


class MemoryReceiver(InPlaceReceiver):
    def __init__(self, size: int, num_pieces: int) -> None:
        super().__init__(anonymous_memory(size), np.zeros(num_pieces, np.uint8))
        key = secrets.token_hex(8)
        self.link = pack_link("memory", key=key)
        _receivers[key] = self

    def close(self) -> None:
        super().close()
        _receivers.pop(unpack_link(self.link)["key"], None)


def memory_sender(link: bytes, make_pieces: MakePieces, options: ScanOptions) -> InPlaceSender:
    receiver = _receivers.get(link_field(unpack_link(link), "key", str))
    if receiver is None:
        raise TransferError("the memory link belongs to another process or is closed; use shm between processes")
    return InPlaceSender(make_pieces(receiver.buffer), receiver.marks, options)
