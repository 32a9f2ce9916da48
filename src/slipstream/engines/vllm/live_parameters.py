"""The live parameters of a vLLM worker on a GPU, and how new weights are written into them.

Each piece of an update is copied straight to its place in a live (fused) parameter, which vLLM's kernels and CUDA graphs go on
using. `mapping_check` has verified these places when the engine started; parameters that failed it go through vLLM's own
loader instead, with their whole module."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import xxhash

from slipstream.engines.vllm.staged_copies import StagedCopies
from slipstream.engines.vllm.undoable_reload import NothingWritten, Weights
from slipstream.errors import TransferError
from slipstream.tensors.boxes import shape_of, slices
from slipstream.tensors.strided import Strided
from slipstream.types import Parameter
from slipstream.weights.device_checksum import torch_checksums
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.device import DeviceReceiver

MAX_CACHED = 4
"""Staged copies that are remembered: a trainer's arrays return to the same few addresses."""

HASH_CHUNK_BYTES = 64 << 20
"""Bytes copied to host memory at a time, for hashing."""


class NotYetReceived(NothingWritten):
    """The pieces of the version are not available yet; applying it may succeed later."""


class MappedTensorMemory:
    """Device memory of another process, mapped into this one, as torch tensors."""

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        memory = torch.as_tensor(self, device=device)
        self._typed = {
            name: memory.view(getattr(torch, name)) for name in ("float32", "bfloat16", "float16", "float64")
        }

    def view(self, dtype: str, geometry: Strided, offset: int) -> torch.Tensor:
        typed = self._typed[dtype]
        start = offset // typed.element_size() + geometry.offset
        return torch.as_strided(typed, geometry.shape, geometry.strides, start)


class LiveParameters:
    """The parameters of one rank. `stage` and `checksums_of` may be called from another thread; everything else is called
    between two steps."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        reload: Callable[[Weights], None],
        rank: int,
        device: torch.device,
    ) -> None:
        self._parameters, self._reload, self._rank, self._device = parameters, reload, rank, device
        self._receiver: DeviceReceiver | None = None
        self._driver: CudaDriver | None = None
        """Set if it knows the memory in which pieces arrive."""
        self._moves: Sequence[Move] = ()
        self._shapes: list[tuple[int, ...]] = []
        self._targets: dict[int, torch.Tensor] = {}
        """Where a piece goes, by its index in the plan."""
        self._contiguous: set[int] = set()
        """Indices of contiguous targets."""
        self._staged = StagedCopies(-1)
        self._cache: list[tuple[Mapping[int, torch.Tensor], StagedCopies]] = []
        """Recently staged pieces, with their copies."""
        self._reading: torch.cuda.Stream | None = None
        """Where checksums are computed, so that steps need not wait for them."""

    def connect(
        self, transport: str, plan: Plan, parameters: Sequence[Parameter], reloaded: Collection[str]
    ) -> list[bytes]:
        """Prepare to receive from a trainer. Return links by trainer rank. `parameters` are those of the plan; `reloaded` are
        the whole tensors among them that go through vLLM's loader."""
        self.close()
        self._moves = plan.incoming.get(self._rank, ())
        self._shapes = [shape_of(move.tensor_box) for move in self._moves]
        self._targets = {
            index: self._parameters[move.parameter][slices(move.local_box)]
            for index, move in enumerate(self._moves)
            if move.parameter not in reloaded
        }
        self._contiguous = {index for index, target in self._targets.items() if target.is_contiguous()}
        senders = sorted({move.sender for move in self._moves})
        receiver = self._receiver = self._make_receiver(transport, plan, parameters, senders)
        receiver.start()
        return [receiver.links.get(sender, b"") for sender in range(max(senders, default=-1) + 1)]

    def _make_receiver(
        self, transport: str, plan: Plan, parameters: Sequence[Parameter], senders: Sequence[int]
    ) -> DeviceReceiver:
        index = self._device.index or 0
        if transport == "cuda":
            from slipstream.weights.transports.cuda.mapped_memory import CudaReceiver

            self._driver, wrap = CudaDriver(index), partial(MappedTensorMemory, device=self._device)
            return CudaReceiver(
                senders,
                wrap,
                self._driver,
                check=self.stage,
                compute_checksums=self.checksums_of,
                name_of=self.tensor_of,
            )
        if transport == "nccl":
            from slipstream.weights.transports.nccl.transport import NcclReceiver

            return NcclReceiver(plan, self._rank, senders, index, parameters, primitive="broadcast")
        raise TransferError(f"{transport!r} is not a transport between devices; expected cuda or nccl")

    def expect(self, version: int) -> None:
        assert self._receiver is not None
        self._receiver.expect(version)

    def receive(self, version: int, indices: Collection[int], timeout: float) -> float | None:
        """Wait for these pieces and stage them. Return the seconds their transfer took, or None after `timeout` seconds."""
        assert self._receiver is not None
        if self._receiver.wait(version, indices, timeout) is None:
            return None
        if not self._is_staged(version, indices):
            self.stage(version, {index: self._receiver.source(index) for index in indices})
        return self._receiver.seconds

    def checksums_of(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Read pieces, while the old version serves."""
        on_stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._device.type == "cuda":
            self._reading = self._reading or torch.cuda.Stream(self._device)
            on_stream = torch.cuda.stream(self._reading)
        with torch.inference_mode(), on_stream:
            return dict(zip(pieces, torch_checksums(list(pieces.values()))))

    def tensor_of(self, index: int) -> str:
        return self._moves[index].tensor if 0 <= index < len(self._moves) else f"piece {index}"

    def stage(self, version: int, pieces: Mapping[int, torch.Tensor]) -> None:
        """Check the pieces and prepare their copies, while the old version serves. Several trainer ranks may call this, each
        with its own pieces."""
        cached = next((copies for known, copies in self._cache if known is pieces), None)
        if cached is not None and self._staged.version != version:
            self._staged = replace(cached, version=version)
            return
        for index, piece in pieces.items():
            if not 0 <= index < len(self._moves):
                raise TransferError(f"piece {index} is not in the plan, which has {len(self._moves)} for this rank")
            shape = self._shapes[index]
            if piece.shape != shape and piece.shape[piece.dim() - len(shape) :] != shape:
                tensor = self._moves[index].tensor
                raise TransferError(f"{tensor} arrived with shape {list(piece.shape)}; the plan says {list(shape)}")
        # Work on a copy: `apply` must see all pieces of a trainer rank or none.
        staged = self._staged.copy() if self._staged.version == version else StagedCopies(version)
        staged.indices.update(pieces)
        for index, piece in pieces.items():
            target = self._targets.get(index)
            if target is None:
                move = self._moves[index]
                staged.reloaded.setdefault(move.parameter, []).append((move.local_box, piece))
            else:
                staged.add(target, piece, index in self._contiguous, self._driver is not None)
        if staged.indices == pieces.keys():
            self._cache = [(pieces, staged), *self._cache[: MAX_CACHED - 1]]
        self._staged = staged

    def apply(self, version: int, indices: Collection[int], timeout: float) -> float:
        """Copy every staged piece to its place, on the stream of the next step's kernels. Return the seconds the device takes,
        or 0 if the receiver reports them to the trainer. Raise `NothingWritten` unless exactly these pieces of this
        version are staged within `timeout` seconds."""
        assert self._receiver is not None
        if not self._is_staged(version, indices):
            self._wait_staged(version, indices, timeout)
        staged, self._staged = self._staged, StagedCopies(-1)
        start = self._record_time()
        staged.run(self._driver, self._device, self._reload)
        end = self._record_time()
        return self._receiver.done(version, lambda: _elapsed(start, end))

    def _is_staged(self, version: int, indices: Collection[int]) -> bool:
        return self._staged.version == version and self._staged.indices == set(indices)

    def _wait_staged(self, version: int, indices: Collection[int], timeout: float) -> None:
        """The order to apply a version may arrive before its pieces."""
        assert self._receiver is not None
        kind, reason = NothingWritten, ""
        try:
            if self._receiver.wait(version, indices, timeout) is None:
                kind = NotYetReceived
        except TransferError as error:
            reason = f": {error}"
        if not self._is_staged(version, indices):
            raise kind(
                f"rank {self._rank} should write {len(indices)} piece(s) of version {version}, but has "
                f"{len(self._staged.indices)} of version {self._staged.version}{reason}"
            )

    def _record_time(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], reloaded: Collection[str]) -> None:
        """Write whole parameters from host memory; those in `reloaded` go through vLLM's loader. Raise `NothingWritten` if it
        fails."""
        by_name = dict(tensors)
        if to_reload := [name for name in by_name if name in reloaded]:
            self._reload((name, by_name.pop(name).to(self._device)) for name in to_reload)
        for name, tensor in by_name.items():
            self._parameters[name].copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def checksums(self, parameters: Iterable[Parameter]) -> list[tuple[str, list[int]]]:
        """Return a checksum for each part of these parameters."""
        return [
            (p.name, [_checksum(self._parameters[p.name][slices(part.local_box)]) for part in p.parts])
            for p in parameters
        ]

    def discard(self) -> None:
        """Drop what is staged, and abort the transfer."""
        self._staged = StagedCopies(-1)
        if self._receiver is not None:
            self._receiver.abandon()

    def close(self) -> None:
        self._staged, self._targets, self._cache = StagedCopies(-1), {}, []
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = self._driver = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # receive buffers may be as large as the model


def _elapsed(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Return the seconds between two recorded times; waits for the second."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def _checksum(tensor: torch.Tensor) -> int:
    """Same value as `weights.checksum.checksum`, copied to host memory a few rows at a time."""
    digest = xxhash.xxh3_64()
    rows = max(1, HASH_CHUNK_BYTES * tensor.shape[0] // max(1, tensor.numel() * tensor.element_size()))
    for chunk in tensor.split(rows):
        digest.update(chunk.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).data)
    return digest.intdigest()
