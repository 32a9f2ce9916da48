"""`vllm-nccl`: to a `vllm serve` that somebody else started, in the words of vLLM's own weight transfer.

The trainer is rank 0 of an NCCL communicator, the server's workers are the others. It makes the communicator's unique id,
which reaches the engine in the offer (`invitation`) and the server over HTTP; the engine's link says the rest. Weights go
as broadcasts of packed bytes: whole tensors in the order that the server was told, a chunk closed by the tensor that makes
it larger than the buffer.

There is no landing: the server overwrites the weights it serves. So nothing moves before the commit. `send` gathers a
version in the trainer's memory, `flush` leaves it to a thread, and the first broadcast waits for the server, whose engine
asks for it when every engine of the fleet has staged."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import DeadlineExceeded, TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.memory import anonymous

NAME = "vllm-nccl"
UNIQUE_ID_BYTES = 128
BUFFER_BYTES = 256 << 20
NUM_BUFFERS = 2
CLOSE_SECONDS = 30.0
"""A broadcast that was asked for ends within this, or is aborted."""


class Communicator(Protocol):
    """Of the trainer, rank 0. Each method blocks, has a deadline of its own and raises `TransferError`."""

    def all_reduce_one(self) -> None:
        """Of one float32: the workers begin with it, and so must we."""
        ...

    def broadcast(self, buffer: np.ndarray) -> None:
        """Bytes, from here to all; they may be overwritten once it returns."""
        ...

    def abort(self) -> None:
        """Ends what is under way in another thread, too. May be called twice."""
        ...

    def close(self) -> None: ...


class Library(Protocol):
    """What makes communicators: NCCL, or what a test puts in its place."""

    def unique_id(self) -> bytes: ...

    def version(self) -> str:
        """As `2.29.7`; empty where there is none to compare."""
        ...

    def join(self, unique_id: bytes, world_size: int) -> Communicator:
        """As rank 0; returns when all others have joined."""
        ...


library: Library | None = None
"""None takes NCCL, by nccl4py."""


def _library() -> Library:
    if library is not None:
        return library
    from slipstream.weights.transports.nccl_root import NcclLibrary

    return NcclLibrary()


# --- what both ends say -----------------------------------------------------------------------------------------------


def invitation() -> str:
    """The transport as an offer names it: with the id of a communicator that is to be."""
    return f"{NAME}:{base64.b64encode(_library().unique_id()).decode()}"


def invited(transport: str) -> str:
    """The unique id, in base64, of such an offer. Raises `TransferError` for another one."""
    name, _, text = transport.partition(":")
    if name != NAME:
        raise TransferError(f"a vLLM server takes weights over {NAME!r} only; the trainer offers {name!r}")
    try:
        if len(base64.b64decode(text, validate=True)) == UNIQUE_ID_BYTES:
            return text
    except (ValueError, binascii.Error):
        pass
    raise TransferError(f"the offer carries no NCCL unique id ({UNIQUE_ID_BYTES} bytes in base64): {text[:40]!r}")


def make_link(unique_id: str, world_size: int, server: str, nccl: str) -> bytes:
    """`server` is for messages; `nccl` is the server's version of it, empty where it does not say."""
    return pack_link(
        NAME, unique_id=unique_id, world_size=world_size, buffer_bytes=BUFFER_BYTES, server=server, nccl=nccl
    )


def chunks(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of the tensors that travel together."""
    chunk: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        chunk.append(index)
        total += size
        if total > limit:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


# --- the trainer's half -----------------------------------------------------------------------------------------------


class VllmNcclSender:
    """Made while the server's workers wait to be joined."""

    def __init__(self, link: bytes, image: Image, moves: Mapping[int, Move]) -> None:
        facts = unpack_link(link)
        self._server, world_size = fact(facts, "server", str), fact(facts, "world_size", int)
        self._limit, theirs = fact(facts, "buffer_bytes", int), fact(facts, "nccl", str)
        unique_id = base64.b64decode(invited(f"{NAME}:{fact(facts, 'unique_id', str)}"))
        if world_size < 2 or self._limit < 1:
            raise TransferError(f"the {NAME} link speaks of {world_size} ranks and buffers of {self._limit} bytes")
        self._image, self._moves = image, moves
        self._buffer = anonymous(image.num_bytes)
        self._pieces = {i: image.piece(self._buffer, move.parameter, move.local_box) for i, move in moves.items()}
        self._sent: set[int] = set()
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._communicator = self._join(unique_id, world_size, theirs)

    def _join(self, unique_id: bytes, world_size: int, theirs: str) -> Communicator:
        ours = _library()
        if theirs and (own := ours.version()) and own != theirs:
            raise TransferError(
                f"the vLLM server at {self._server} has NCCL {theirs}, this trainer {own}; NCCL refuses unequal versions: "
                f"install that one here (nvidia-nccl-cu12 or nvidia-nccl-cu13, {theirs})"
            )
        communicator = ours.join(unique_id, world_size)
        try:
            communicator.all_reduce_one()
        except BaseException:
            communicator.abort()
            raise
        return communicator

    def begin(self, version: int) -> None:
        self._wait()
        self._sent = set()

    def send(self, index: int, array: np.ndarray) -> int:
        np.copyto(self._pieces[index], array, casting="same_kind")
        self._sent.add(index)
        return 0  # nobody could compare it: vLLM does not tell the bytes that it got

    def flush(self) -> None:
        if missing := self._moves.keys() - self._sent:
            raise TransferError(
                f"{NAME}: {len(missing)} of {len(self._moves)} pieces are missing; the server takes all tensors or none"
            )
        self._thread = threading.Thread(target=self._broadcast, name=NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is under way is broken off: the server then reports a failed update."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None and thread.is_alive():
                self._communicator.abort()
                thread.join(CLOSE_SECONDS)
            elif self._problem is None:
                self._communicator.close()
        finally:
            self._pieces = {}

    def _broadcast(self) -> None:
        names = list(dict.fromkeys(move.parameter for move in self._moves.values()))
        arrays = [self._image.view(self._buffer, name) for name in names]
        try:
            for chunk in chunks([array.nbytes for array in arrays], self._limit):
                self._communicator.broadcast(_packed([arrays[i] for i in chunk]))
        except Exception as error:
            self._problem = error
            self._communicator.abort()

    def _wait(self) -> None:
        """For the version before: its broadcasts ended with the server's commit, or never will."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"{NAME}: the vLLM server at {self._server} has not taken the last version within {CLOSE_SECONDS:g} s"
                )
            self._thread = None
        if self._problem is not None:
            raise TransferError(
                f"{NAME}: the last broadcast to the vLLM server at {self._server} failed: {self._problem}"
            )


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
