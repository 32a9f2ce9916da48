"""The transports by name: which one to use for an engine (`choose`), and how to open both halves."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from slipstream.config import LOOPBACK
from slipstream.errors import TransferError
from slipstream.types import Destinations
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import RankImage
from slipstream.weights.transports.contract import HostReceiver, HostSender, link_field, unpack_link
from slipstream.weights.transports.device import LOCAL
from slipstream.weights.transports.host.disk import DiskReceiver, DiskSender
from slipstream.weights.transports.host.memory import MemoryReceiver, memory_sender
from slipstream.weights.transports.host.shm import ShmReceiver, shm_sender
from slipstream.weights.transports.host.tcp import ListenConfig, TcpReceiver, TcpSender
from slipstream.weights.transports.servers import checkpoint_dir, sglang_gloo, vllm_nccl
from slipstream.weights.transports.shared.host_memory import shared_receiver

TRANSPORTS = ("memory", "shm", "tcp", "disk")
"""Transports through host memory with both halves in this package. `vllm-nccl` and `sglang-gloo` have only the sending half: a
foreign server receives. `shared` moves no bytes and is never chosen: a trainer asks for it with `bridge.share`."""

SMALL_BYTES = 8 << 20

DELTA_TRANSPORTS = ("tcp", "disk")
"""Transports that carry deltas."""


def is_quick(transport: str, num_bytes: int) -> bool:
    """Whether the trainer's half takes no longer than handing it to a thread, so that the event loop may do it."""
    limit = SMALL_BYTES if transport in ("memory", "shm") else 0
    is_small = transport.partition(":")[0] in TRANSPORTS and num_bytes <= limit
    return transport in ("cuda", LOCAL) or is_small


def offered_transport(transport: str) -> str:
    """Return a transport as an offer names it, with the trainer's address where the engine must connect to it."""
    servers = {vllm_nccl.NAME: vllm_nccl.offered_transport, sglang_gloo.NAME: sglang_gloo.offered_transport}
    return servers[transport]() if transport in servers else transport


def withdraw(offered: str) -> None:
    """Withdraw an offered transport: an engine that waits for the trainer to connect stops waiting."""
    if offered.startswith(f"{sglang_gloo.NAME}:"):
        sglang_gloo.withdraw(offered)


def network_of(transport: str, host: str, destinations: Destinations) -> str | None:
    """Return a name that engines have in common if they can get the same bytes together; None if an engine gets its own from
    the trainer. `host` is the engine's `host_identity`: what listens on loopback cannot be reached from other hosts."""
    if transport == "nccl":
        return "nccl"
    if transport != "tcp" or not (link := next(filter(None, destinations.links[0]), b"")):
        return None
    return f"loopback of {host}" if link_field(unpack_link(link), "host", str) in LOOPBACK else "tcp"


def takes_deltas(transport: str) -> bool:
    return transport.partition(":")[0] in DELTA_TRANSPORTS


def takes_all(transport: str) -> bool:
    """Whether the receiver takes all tensors or none, so that unchanged tensors must be sent too."""
    return transport == vllm_nccl.NAME


def make_receiver(transport: str, size: int, num_pieces: int, listen: ListenConfig | None = None) -> HostReceiver:
    """Make the engine's half of `transport`: a name, for `disk` and `shared` with a place (`disk:/path`)."""
    name, _, where = transport.partition(":")
    match name:
        case "memory":
            return MemoryReceiver(size, num_pieces)
        case "shm":
            return ShmReceiver(size, num_pieces)
        case "tcp":
            return TcpReceiver(size, listen)
        case "disk":
            return DiskReceiver(size, Path(where))
        case "shared":
            return shared_receiver(where, size)
        case "shared-cuda":
            from slipstream.weights.transports.shared.cuda_memory import shared_cuda_receiver

            return shared_cuda_receiver(where, size)
    raise TransferError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")


def open_sender(
    link: bytes, image: RankImage, moves: dict[int, Move], options: ScanOptions, path: Sequence[bytes] = ()
) -> HostSender:
    """Open the trainer's half. `moves` are the moves it will send over this link, by index. Over `tcp`, `path` has the links of
    the engines that the bytes are passed on to."""
    name = unpack_link(link)["transport"]

    def pieces(buffer: np.ndarray) -> dict[int, np.ndarray]:
        if buffer.size < image.num_bytes:
            raise TransferError(f"the receiver holds {buffer.size} bytes, the rank's image has {image.num_bytes}")
        return image.pieces(buffer, moves)

    match name:
        case "memory":
            return memory_sender(link, pieces, options)
        case "shm":
            return shm_sender(link, pieces, options)
        case "tcp":
            return TcpSender(link, image.dtype, options, path)
        case "disk":
            return DiskSender(link, image.dtype, options)
        case vllm_nccl.NAME:
            return vllm_nccl.VllmNcclSender(link, image, moves, options)
        case sglang_gloo.NAME:
            return sglang_gloo.SglangGlooSender(link, image, moves, options)
        case checkpoint_dir.LINK:
            return checkpoint_dir.CheckpointSender(link, image, moves, options)
    raise TransferError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")


def check_links(engine: str, destinations: Destinations, transport: str) -> None:
    """Raise `TransferError` unless an engine's links are for the transport that it was offered. A link names files that the
    trainer writes, or an address that it connects to, and an engine must not choose those."""
    name, _, where = transport.partition(":")
    for fields in (unpack_link(link) for links in destinations.links for link in links if link):
        if fields["transport"] not in (name, checkpoint_dir.LINK if name == "disk" else name):
            raise TransferError(f"engine {engine!r} was offered {transport!r} and answers with {fields['transport']!r}")
        if where and Path(str(fields.get("directory"))) != Path(where):
            raise TransferError(f"engine {engine!r} was offered {transport!r} and names {fields.get('directory')!r}")


@cache
def host_identity() -> str:
    """Return a string that is equal in two processes that can share memory: same boot of the kernel, same mount of /dev/shm."""
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
    sees_trainer: bool = True,
) -> str:
    """Return the fastest transport that reaches an engine. `sees_trainer`: the engine sees the GPUs of the trainer.

    In one process `device` between GPUs, otherwise `memory`; on one host `cuda` on GPUs that both see, `nccl` between others,
    if it is installed, otherwise `shm`; between hosts `nccl` between GPUs, otherwise `tcp`; to a foreign server what it
    supports. `forced` names one instead (`disk:/path` is used only this way); raises `TransferError` if it cannot work."""
    same_host = engine_host == host_identity()
    possible = [
        (LOCAL, engine_pid == os.getpid() and (on_gpu or forced == LOCAL)),
        ("memory", engine_pid == os.getpid()),
        ("cuda", same_host and on_gpu and sees_trainer),
        ("nccl", same_host and on_gpu and not sees_trainer and importlib.util.find_spec("nccl") is not None),
        ("shm", same_host),
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
            on = (
                "not all on a GPU"
                if not on_gpu
                else "on a GPU"
                if sees_trainer
                else "on a GPU that the engine does not see"
            )
            raise TransferError(
                f"transport {name!r} cannot reach engine {engine!r}: usable are {usable or 'none'} "
                f"(the engine offers {list(offered)}; the trainer's weights are {on})"
            )
        if (name == "disk") != bool(where):
            raise TransferError(
                "transport 'disk' needs a directory that both sides see, as in transport='disk:/directory'; other transports "
                "take none"
            )
        return forced
    usable = [name for name in usable if name != "disk"]
    if not usable:
        needs = "shm needs trainer and engine on one host"
        if sglang_gloo.NAME in offered:
            needs = f"{sglang_gloo.NAME} needs torch here (pip install 'slipstream-rl[sglang]')"
        disk = "; disk works with a directory: transport='disk:/directory'" if "disk" in offered else ""
        raise TransferError(f"no transport reaches engine {engine!r} (it offers {list(offered)}): {needs}{disk}")
    return usable[0]
