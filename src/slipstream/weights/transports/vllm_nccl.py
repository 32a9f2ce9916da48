"""`vllm-nccl`: to a `vllm serve` that somebody else started, in the words of vLLM's own weight transfer.

The trainer is rank 0 of an NCCL communicator, the server's workers are the others. It makes the communicator's unique id,
which reaches the engine in the offer (`invitation`) and the server over HTTP; the engine's link says the rest. Weights go
as broadcasts of packed bytes (`gathering.py`): whole tensors in the order that the server was told."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Protocol

from slipstream.errors import TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.transports import gathering
from slipstream.weights.transports.base import fact, pack_link, unpack_link

NAME = "vllm-nccl"
UNIQUE_ID_BYTES = 128
BUFFER_BYTES = 256 << 20
NUM_BUFFERS = 2


class Communicator(gathering.Communicator, Protocol):
    def all_reduce_one(self) -> None:
        """Of one float32: the workers begin with it, and so must we."""
        ...


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


# --- the trainer's half -----------------------------------------------------------------------------------------------


class VllmNcclSender(gathering.BroadcastSender):
    """Made while the server's workers wait to be joined."""

    def __init__(self, link: bytes, image: Image, moves: Mapping[int, Move]) -> None:
        facts = unpack_link(link)
        server, world_size = fact(facts, "server", str), fact(facts, "world_size", int)
        limit, theirs = fact(facts, "buffer_bytes", int), fact(facts, "nccl", str)
        unique_id = base64.b64decode(invited(f"{NAME}:{fact(facts, 'unique_id', str)}"))
        if world_size < 2 or limit < 1:
            raise TransferError(f"the {NAME} link speaks of {world_size} ranks and buffers of {limit} bytes")
        super().__init__(NAME, server, _join(server, unique_id, world_size, theirs), image, moves, limit)

    def flush(self) -> None:
        if missing := self._moves.keys() - self._sent:
            raise TransferError(
                f"{NAME}: {len(missing)} of {len(self._moves)} pieces are missing; the server takes all tensors or none"
            )
        super().flush()


def _join(server: str, unique_id: bytes, world_size: int, theirs: str) -> Communicator:
    ours = _library()
    if theirs and (own := ours.version()) and own != theirs:
        raise TransferError(
            f"the vLLM server at {server} has NCCL {theirs}, this trainer {own}; NCCL refuses unequal versions: "
            f"install that one here (nvidia-nccl-cu12 or nvidia-nccl-cu13, {theirs})"
        )
    communicator = ours.join(unique_id, world_size)
    try:
        communicator.all_reduce_one()
    except BaseException:
        communicator.abort()
        raise
    return communicator
