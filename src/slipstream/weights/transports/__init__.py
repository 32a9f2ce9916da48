"""Data planes, by name. `choose` picks the fastest that both ends can use."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from slipstream.errors import TransferError
from slipstream.weights.transports.base import Receiver, Sender, unpack_link
from slipstream.weights.transports.memory import MemoryReceiver, MemorySender
from slipstream.weights.transports.shm import ShmReceiver, ShmSender

SENDERS: dict[str, Callable[[int], Sender]] = {"memory": MemorySender, "shm": ShmSender}
RECEIVERS: dict[str, Callable[[bytes], Receiver]] = {"memory": MemoryReceiver, "shm": ShmReceiver}


@cache
def host_identity() -> str:
    """Equal in two processes that can share memory: same boot of the same kernel, same mount of shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/dev/shm').stat().st_dev}"
    except OSError:
        return platform.node()


def choose(engine: str, offered: Sequence[str], engine_host: str, engine_pid: int, forced: str | None = None) -> str:
    """`memory` in one process, `shm` on one host. `forced` insists on one, and says so when it cannot work."""
    possible = []
    if engine_pid == os.getpid():
        possible.append("memory")
    if engine_host == host_identity():
        possible.append("shm")
    usable = [name for name in possible if name in offered and name in SENDERS]
    if forced is not None:
        if forced not in usable:
            raise TransferError(
                f"transport {forced!r} cannot reach engine {engine!r}: usable are {usable or 'none'} "
                f"(the engine offers {list(offered)})"
            )
        return forced
    if not usable:
        raise TransferError(
            f"no transport reaches engine {engine!r} (it offers {list(offered)}) from here: shm needs both on one host"
        )
    return usable[0]


def open_receiver(link: bytes) -> Receiver:
    transport = unpack_link(link)["transport"]
    if transport not in RECEIVERS:
        raise TransferError(f"unknown transport {transport!r}; known: {', '.join(RECEIVERS)}")
    return RECEIVERS[transport](link)
