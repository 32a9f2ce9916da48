"""`sglang-gloo`: the trainer's half of SGLang's update from a distributed group, into an external SGLang server.

SGLang's workers join a torch process group whose rank 0, the trainer, hosts the store. The store's address reaches the
engine in the offer (`offered_transport`) and the server over HTTP. Gloo moves bytes through host memory, also to
workers on GPUs, so the trainer needs torch but not its CUDA build. A version is sent in buckets. Each bucket is one
broadcast of the concatenated bytes of its tensors (SGLang's `flattened_bucket`), requested by the engine.

Neither the store nor gloo authenticates or encrypts. They listen on loopback unless SLIPSTREAM_RENDEZVOUS names an
address of this host on a private network."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import ConfigError, TransferError
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import RankImage
from slipstream.weights.transports.contract import RANDOM_NAME, link_field, pack_link, random_name, unpack_link
from slipstream.weights.transports.servers.gather import BroadcastSender

NAME = "sglang-gloo"
BUCKET_BYTES = 256 << 20
"""A worker needs this much extra memory while it receives."""
ADDRESS = "SLIPSTREAM_RENDEZVOUS"
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 600.0
"""Time limit for one bucket. The first one waits until the fleet commits."""
POLL_SECONDS = 500e-6


class Rendezvous(NamedTuple):
    """Where the server's workers meet the trainer."""

    host: str
    port: int
    group: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.group}"


_stores: dict[str, tuple[float, Any]] = {}
"""Stores that wait for workers, by group: when each was opened, and the store."""


def is_possible() -> bool:
    return importlib.util.find_spec("torch") is not None


# --- both halves ------------------------------------------------------------------------------------------------------


def offered_transport() -> str:
    """Open a store and return the transport for an offer: its name and the rendezvous."""
    import torch.distributed as dist

    now = time.monotonic()
    for group, (since, _) in list(_stores.items()):
        if now - since > JOIN_SECONDS:  # its update never got this far
            del _stores[group]
    host, group = os.environ.get(ADDRESS, "") or LOOPBACK, random_name()
    try:
        listening = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(f"{ADDRESS} is {host!r}, which is not an address of this host: {error}") from None
    rendezvous = Rendezvous(host, listening.getsockname()[1], group)
    with _torch_errors("opening the store"):
        store = dist.TCPStore(
            *(host, rendezvous.port),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    _stores[group] = (now, store)
    return f"{NAME}:{rendezvous}"


def parse_offered(transport: str) -> Rendezvous:
    """Return the rendezvous of an offered transport. Raise `TransferError` for any other."""
    match = re.fullmatch(rf"{NAME}:([\w.-]+):(\d{{1,5}}):({RANDOM_NAME})", transport)
    if match is None:
        raise TransferError(
            f"the trainer offers {transport[:80]!r}; an SGLang server takes weights over '{NAME}:host:port:group' or from "
            "'disk:/directory'"
        )
    return Rendezvous(match[1], int(match[2]), match[3])


def withdraw(transport: str) -> None:
    """Close the store of an offer that will not be used; workers waiting for it give up."""
    _stores.pop(parse_offered(transport).group, None)


def make_link(rendezvous: Rendezvous, world_size: int, server: str) -> bytes:
    """Return the link. `server` is for error messages."""
    return pack_link(NAME, rendezvous=str(rendezvous), world_size=world_size, bucket_bytes=BUCKET_BYTES, server=server)


# --- the trainer's half -----------------------------------------------------------------------------------------------


class SglangGlooSender(BroadcastSender):
    """Joins the group on construction, while the server's workers wait."""

    def __init__(self, link: bytes, image: RankImage, moves: Mapping[int, Move], options: ScanOptions) -> None:
        fields = unpack_link(link)
        rendezvous = parse_offered(f"{NAME}:{link_field(fields, 'rendezvous', str)}")
        server, world_size = link_field(fields, "server", str), link_field(fields, "world_size", int)
        limit = link_field(fields, "bucket_bytes", int)
        if world_size < 2 or limit < 1:
            raise TransferError(
                f"the {NAME} link needs at least 2 ranks and 1 byte per bucket, got {world_size} and {limit}"
            )
        super().__init__(NAME, server, _GlooGroup(rendezvous, world_size), image, moves, options, limit)


class _GlooGroup:
    """Rank 0 of a gloo group. It uses the store prefixes that torch's `init_process_group` would."""

    def __init__(self, rendezvous: Rendezvous, world_size: int) -> None:
        import torch.distributed as dist

        _, store = _stores.pop(rendezvous.group, (0.0, None))
        if store is None:
            raise TransferError(f"{NAME}: the store at {rendezvous} is closed; sync again")
        with _torch_errors("connecting to the server's workers"):
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=rendezvous.host)]
            options._timeout = timedelta(seconds=JOIN_SECONDS)
            for prefix in (rendezvous.group, f"{rendezvous.group}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            self._group: Any = gloo(store, 0, world_size, options)

    def broadcast(self, buffer: np.ndarray) -> None:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=BROADCAST_SECONDS)
        with _torch_errors("broadcasting to the server's workers"):
            if (group := self._group) is None:
                raise _aborted()
            work = group.broadcast([torch.from_numpy(buffer)], options)
            while not work.is_completed():
                if self._group is None:
                    _release_in_thread(group, work)
                    raise _aborted()
                time.sleep(POLL_SECONDS)
            work.wait()  # raises if the broadcast failed

    def abort(self) -> None:
        self._group = None  # dropping the last reference disconnects

    close = abort  # the group is useless to the workers without rank 0


def _release_in_thread(group: Any, work: Any) -> None:
    """Drop the last reference to a group in a daemon thread. Work in a gloo group cannot be cancelled: it runs until
    its deadline, and destroying the group waits for it."""

    def wait(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    threading.Thread(target=wait, args=(group,), name=f"{NAME}-aborted", daemon=True).start()


def _aborted() -> TransferError:
    return TransferError(f"{NAME}: aborted on this side")


@contextlib.contextmanager
def _torch_errors(what: str) -> Iterator[None]:
    """Convert torch's errors to `TransferError`."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{NAME}, {what}: {str(error).splitlines()[0]}") from None
