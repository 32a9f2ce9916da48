"""`sglang-gloo`: to an SGLang server that somebody else started, in the words of its update from distributed.

SGLang's workers meet the trainer in a process group of torch's: rank 0, the trainer, keeps the store at which they meet. Where
it listens reaches the engine in the offer (`invitation`), and the server over HTTP. Gloo moves bytes through host memory, to
workers on GPUs as well, so that this process needs torch, and no CUDA. A version travels in buckets, each one broadcast of the
bytes of its tensors one after the other (SGLang's `flattened_bucket`), and each asked for by the engine.

Neither the store nor gloo knows a key, or encrypts: they listen on loopback, unless SLIPSTREAM_RENDEZVOUS names an address of
this host on a network of your own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import ConfigError, TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.transports.base import fact, pack_link, unpack_link
from slipstream.weights.transports.gathering import BroadcastSender

NAME = "sglang-gloo"
BUCKET_BYTES = 256 << 20
"""A worker needs as much memory once more while it receives."""
ADDRESS = "SLIPSTREAM_RENDEZVOUS"
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 120.0
BROADCAST_SECONDS = 600.0
"""Of one bucket: the first one waits until the fleet commits."""
POLL_SECONDS = 500e-6


class Meeting(NamedTuple):
    """Where the workers find the trainer."""

    host: str
    port: int
    group: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.group}"


_stores: dict[str, tuple[float, Any]] = {}
"""Those that wait to be joined, by group: since when, and the store."""


def is_possible() -> bool:
    return importlib.util.find_spec("torch") is not None


# --- what both ends say -----------------------------------------------------------------------------------------------


def invitation() -> str:
    """The transport as an offer names it: with the place of a meeting, which is open from now on."""
    import torch.distributed as dist

    now = time.monotonic()
    for group, (since, _) in list(_stores.items()):
        if now - since > JOIN_SECONDS:  # of an update that never came so far
            del _stores[group]
    host, group = os.environ.get(ADDRESS, "") or LOOPBACK, f"slipstream-{secrets.token_hex(8)}"
    try:
        listening = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(f"{ADDRESS} is {host!r}, which is no address of this host: {error}") from None
    meeting = Meeting(host, listening.getsockname()[1], group)
    with _explained("opening a store"):
        store = dist.TCPStore(
            *(host, meeting.port),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    _stores[group] = (now, store)
    return f"{NAME}:{meeting}"


def invited(transport: str) -> Meeting:
    """Raises `TransferError` for another offer."""
    found = re.fullmatch(rf"{NAME}:([\w.-]+):(\d{{1,5}}):(slipstream-[0-9a-f]{{16}})", transport)
    if found is None:
        raise TransferError(
            f"the trainer offers {transport[:80]!r}; an SGLang server takes weights over {NAME!r}, with the place of a "
            "meeting, or from 'disk:/directory'"
        )
    return Meeting(found[1], int(found[2]), found[3])


def withdraw(transport: str) -> None:
    """Workers that wait for us find the store gone, and give up."""
    _stores.pop(invited(transport).group, None)


def make_link(meeting: Meeting, world_size: int, server: str) -> bytes:
    """`server` is for messages."""
    return pack_link(NAME, meeting=str(meeting), world_size=world_size, bucket_bytes=BUCKET_BYTES, server=server)


# --- the trainer's half -----------------------------------------------------------------------------------------------


class SglangGlooSender(BroadcastSender):
    """Made while the server's workers wait to be joined."""

    def __init__(self, link: bytes, image: Image, moves: Mapping[int, Move]) -> None:
        facts = unpack_link(link)
        meeting, server = invited(f"{NAME}:{fact(facts, 'meeting', str)}"), fact(facts, "server", str)
        world_size, limit = fact(facts, "world_size", int), fact(facts, "bucket_bytes", int)
        if world_size < 2 or limit < 1:
            raise TransferError(f"the {NAME} link speaks of {world_size} ranks and buckets of {limit} bytes")
        super().__init__(NAME, server, _Group(meeting, world_size), image, moves, limit)


class _Group:
    """Rank 0, under the names that torch gives a group's keys in a store."""

    def __init__(self, meeting: Meeting, world_size: int) -> None:
        import torch.distributed as dist

        _, store = _stores.pop(meeting.group, (0.0, None))
        if store is None:
            raise TransferError(f"{NAME}: nobody listens at {meeting} any more; sync again")
        with _explained("meeting the server's workers"):
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=meeting.host)]
            options._timeout = timedelta(seconds=JOIN_SECONDS)
            for prefix in (meeting.group, f"{meeting.group}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            self._made = gloo(store, 0, world_size, options)

    def broadcast(self, buffer: np.ndarray) -> None:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=BROADCAST_SECONDS)
        with _explained("broadcasting to the server's workers"):
            if (made := self._made) is None:
                raise _given_up()
            work = made.broadcast([torch.from_numpy(buffer)], options)
            while not work.is_completed():
                if self._made is None:
                    _outlast(made, work)
                    raise _given_up()
                time.sleep(POLL_SECONDS)
            work.wait()  # raises what went wrong

    def abort(self) -> None:
        self._made = None  # the last to hold it hangs up

    close = abort  # the workers' group is of no use without us


def _outlast(group: Any, work: Any) -> None:
    """What is under way in a group goes on until its deadline, and whoever drops the group waits for that: a thread, for which
    no process waits."""

    def wait(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    threading.Thread(target=wait, args=(group,), name=f"{NAME}-given-up", daemon=True).start()


def _given_up() -> TransferError:
    return TransferError(f"{NAME}: given up on this side")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """torch's errors as ours."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"{NAME}, {what}: {str(error).splitlines()[0]}") from None
