"""Data planes, by name. `choose` picks the fastest that both ends can use."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.image import Image
from slipstream.weights.plan import Move
from slipstream.weights.transports import checkpoint, sglang_gloo, vllm_nccl
from slipstream.weights.transports.base import Landing, Sender, unpack_link
from slipstream.weights.transports.disk import DiskLanding, DiskSender
from slipstream.weights.transports.memory import MemoryLanding, memory_sender
from slipstream.weights.transports.shared import shared_landing
from slipstream.weights.transports.shm import ShmLanding, shm_sender
from slipstream.weights.transports.tcp import Listen, TcpLanding, TcpSender

TRANSPORTS = ("memory", "shm", "tcp", "disk")
"""Those with two halves of ours. `vllm-nccl` and `sglang-gloo` have one: at the other end is somebody else's server. `shared`
brings nothing, and is never chosen: a trainer asks for it (`bridge.share`)."""

SMALL_BYTES = 8 << 20


def is_quick(transport: str, num_bytes: int) -> bool:
    """Whether moving this much takes no longer than handing it to a thread: then an event loop may do it itself."""
    return transport == "cuda" or (transport in ("memory", "shm") and num_bytes <= SMALL_BYTES)


def invitation(transport: str) -> str:
    """A chosen transport as an offer names it: where the trainer has something to say first, with that."""
    match transport:
        case vllm_nccl.NAME:
            return vllm_nccl.invitation()
        case sglang_gloo.NAME:
            return sglang_gloo.invitation()
    return transport


def withdraw(invited: str) -> None:
    """Whoever took the invitation and has not been joined need not wait any longer."""
    if invited.startswith(f"{sglang_gloo.NAME}:"):
        sglang_gloo.withdraw(invited)


def takes_all(transport: str) -> bool:
    """Whether the other end takes every tensor or none, so that what did not change must be sent, too."""
    return transport == vllm_nccl.NAME


def make_landing(transport: str, size: int, num_pieces: int, listen: Listen | None = None) -> Landing:
    """The engine's half. `transport` is a name, for `disk` with its directory (`disk:/path`), for memory that a trainer shares
    with where that is."""
    name, _, where = transport.partition(":")
    match name:
        case "memory":
            return MemoryLanding(size, num_pieces)
        case "shm":
            return ShmLanding(size, num_pieces)
        case "tcp":
            return TcpLanding(size, listen)
        case "disk":
            return DiskLanding(size, Path(where))
        case "shared":
            return shared_landing(where, size)
        case "shared-cuda":
            from slipstream.weights.transports.shared_cuda import device_landing

            return device_landing(where, size)
    raise TransferError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")


def open_sender(link: bytes, image: Image, moves: dict[int, Move], hashed: bool = True) -> Sender:
    """The trainer's half: `moves` are those it will send over this link, by index."""
    name = unpack_link(link)["transport"]

    def pieces(buffer: np.ndarray) -> dict[int, np.ndarray]:
        if buffer.size < image.num_bytes:
            raise TransferError(f"the landing holds {buffer.size} bytes, the rank's image has {image.num_bytes}")
        return {index: image.piece(buffer, move.parameter, move.local_box) for index, move in moves.items()}

    match name:
        case "memory":
            return memory_sender(link, pieces, hashed)
        case "shm":
            return shm_sender(link, pieces, hashed)
        case "tcp":
            return TcpSender(link, dict.fromkeys(moves, image.dtype), hashed)
        case "disk":
            return DiskSender(link, dict.fromkeys(moves, image.dtype), hashed)
        case vllm_nccl.NAME:
            return vllm_nccl.VllmNcclSender(link, image, moves)
        case sglang_gloo.NAME:
            return sglang_gloo.SglangGlooSender(link, image, moves)
        case checkpoint.LINK:
            return checkpoint.CheckpointSender(link, image, moves)
    raise TransferError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")


@cache
def host_identity() -> str:
    """Equal in two processes that can share memory: same boot of the same kernel, same mount of shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/dev/shm').stat().st_dev}"
    except OSError:
        return platform.node()


def choose(
    engine: str,
    offered: Sequence[str],
    engine_host: str,
    engine_pid: int,
    forced: str | None = None,
    on_gpu: bool = False,
) -> str:
    """`memory` in one process, on one host `cuda` from GPU to GPU or else `shm`, between hosts `nccl` from GPU to GPU or else
    `tcp`, to somebody else's server what it knows. `forced` insists on one (`disk:/path` is never chosen by itself), and says
    so when it cannot work."""
    here = engine_host == host_identity()
    possible = [
        ("memory", engine_pid == os.getpid()),
        ("cuda", here and on_gpu),
        ("shm", here),
        ("nccl", on_gpu),
        ("tcp", True),
        ("disk", True),
        (vllm_nccl.NAME, True),
        (sglang_gloo.NAME, sglang_gloo.is_possible()),
    ]
    usable = [name for name, works in possible if works and name in offered]
    if forced is not None:
        name, _, where = forced.partition(":")
        if name not in usable:
            on = "on a GPU" if on_gpu else "not all on a GPU"
            raise TransferError(
                f"transport {name!r} cannot reach engine {engine!r}: usable are {usable or 'none'} "
                f"(the engine offers {list(offered)}; the trainer's weights are {on})"
            )
        if (name == "disk") != bool(where):
            raise TransferError("say where: transport='disk:/directory/that/both/sides/see'; others take no directory")
        return forced
    usable = [name for name in usable if name != "disk"]
    if not usable:
        needs = "shm needs both on one host"
        if sglang_gloo.NAME in offered:
            needs = f"{sglang_gloo.NAME} needs torch here (pip install 'slipstream-rl[sglang]')"
        where = "; disk works where you say where: transport='disk:/directory'" if "disk" in offered else ""
        raise TransferError(
            f"no transport reaches engine {engine!r} (it offers {list(offered)}) from here: {needs}{where}"
        )
    return usable[0]
