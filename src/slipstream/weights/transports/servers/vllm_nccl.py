"""`vllm-nccl`: the trainer's half of vLLM's own NCCL weight transfer, into an external `vllm serve`.

The trainer is rank 0 of an NCCL communicator; the server's workers are the other ranks. The trainer creates the
communicator's unique id, which reaches the engine in the offer (`offered_transport`) and the server over HTTP. The
engine's link has the rest. Weights are broadcast as packed bytes (`gather.py`): complete tensors in the order that the
engine announced to the server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from slipstream.errors import TransferError
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import RankImage
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.nccl.broadcast_root import BroadcastRootLibrary, NcclBroadcastRoot
from slipstream.weights.transports.nccl.communicator import UNIQUE_ID_BYTES, check_versions
from slipstream.weights.transports.servers.gather import BroadcastSender

NAME = "vllm-nccl"
BUFFER_BYTES = 256 << 20
NUM_BUFFERS = 2


library = BroadcastRootLibrary()
"""Tests replace it by sockets, whose version is empty: it is not to be compared."""


# --- both halves ------------------------------------------------------------------------------------------------------


def offered_transport() -> str:
    """Return the transport for an offer: its name and the unique id of a new communicator."""
    return f"{NAME}:{base64.b64encode(library.new_id()).decode()}"


def parse_offered(transport: str) -> str:
    """Return the unique id, in base64, of an offered transport. Raise `TransferError` for any other."""
    name, _, text = transport.partition(":")
    if name != NAME:
        raise TransferError(f"a vLLM server takes weights only over {NAME!r}; the trainer offers {name!r}")
    try:
        if len(base64.b64decode(text, validate=True)) == UNIQUE_ID_BYTES:
            return text
    except (ValueError, binascii.Error):
        pass
    raise TransferError(
        f"the offer should carry an NCCL unique id ({UNIQUE_ID_BYTES} bytes in base64), got {text[:40]!r}"
    )


def make_link(unique_id: str, world_size: int, server: str, nccl: str) -> bytes:
    """Return the link. `server` is for error messages; `nccl` is the server's NCCL version, empty if unknown."""
    return pack_link(
        NAME, unique_id=unique_id, world_size=world_size, buffer_bytes=BUFFER_BYTES, server=server, nccl=nccl
    )


# --- the trainer's half -----------------------------------------------------------------------------------------------


class VllmNcclSender(BroadcastSender):
    """Joins the communicator on construction, while the server's workers wait."""

    def __init__(self, link: bytes, image: RankImage, moves: Mapping[int, Move], options: ScanOptions) -> None:
        fields = unpack_link(link)
        server, world_size = link_field(fields, "server", str), link_field(fields, "world_size", int)
        limit, server_nccl = link_field(fields, "buffer_bytes", int), link_field(fields, "nccl", str)
        unique_id = base64.b64decode(parse_offered(f"{NAME}:{link_field(fields, 'unique_id', str)}"))
        if world_size < 2 or limit < 1:
            raise TransferError(
                f"the {NAME} link needs at least 2 ranks and 1 byte per buffer, got {world_size} and {limit}"
            )
        super().__init__(NAME, server, _join(server, unique_id, world_size, server_nccl), image, moves, options, limit)

    def flush(self) -> None:
        if missing := self._moves.keys() - self._sent:
            raise TransferError(
                f"{NAME}: {len(missing)} of {len(self._moves)} pieces are missing; the server takes all tensors or none"
            )
        super().flush()


def _join(server: str, unique_id: bytes, world_size: int, server_nccl: str) -> NcclBroadcastRoot:
    if server_nccl and (own_nccl := library.version()):
        check_versions(own_nccl, server_nccl, f"the vLLM server at {server}")
    communicator = library.join(unique_id, world_size)
    try:
        communicator.all_reduce_one()
    except BaseException:
        communicator.abort()
        raise
    return communicator
