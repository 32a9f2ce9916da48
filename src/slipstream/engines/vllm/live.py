"""In a worker on a GPU: the live parameters, as vLLM's kernels and CUDA graphs see them, and how new weights get into them.

Each piece of an update is copied straight into its place in a live (fused) parameter. That the place is right is proved when
the engine starts: with weights that vLLM's own loader put there, every parameter must hold what the plan would write. One that
does not goes through vLLM's loader instead, with its whole module."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import xxhash

from slipstream.errors import TransferError
from slipstream.types import Box, Parameter, Part
from slipstream.weights.device import Receiver
from slipstream.weights.layout import shape_of, slices
from slipstream.weights.plan import Move, Plan
from slipstream.weights.strided import Strided
from slipstream.weights.transports.vmm import Driver

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

LARGE_BYTES = 16 << 20
"""Tensors from this size on are copied one by one, by the driver. A kernel for many tensors is launched again for every 40 MB
of them, which takes the host longer; and nobody hears of a commit before all is launched."""

_MOST_SORTED = 4

COPIED_BYTES = 64 << 20
"""Brought to host memory at a time, to be hashed."""

Reload = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""vLLM's own loader, with whole tensors under their Hugging Face names; modules of which nothing comes stay as they are."""


def prove(
    live: Mapping[str, torch.Tensor], parameters: Sequence[Parameter], tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Names of live parameters that do not hold what the plan would write, and why. `tensors` is what vLLM's loader has put
    into `live`; `parameters` is what we think one rank has."""
    failed = dict.fromkeys(live, "no tensor of the checkpoint is known to go there")
    parts: dict[str, list[tuple[str, Part]]] = defaultdict(list)
    owed: dict[str, set[Part]] = {}
    for parameter in parameters:
        failed.pop(parameter.name, None)
        if parameter.name not in live:
            failed[parameter.name] = "vLLM's model has no such parameter"
        elif tuple(live[parameter.name].shape) != parameter.shape:
            shape = list(live[parameter.name].shape)
            failed[parameter.name] = f"it has shape {shape}, the plan says {list(parameter.shape)}"
        else:
            owed[parameter.name] = set(parameter.parts)
            for part in parameter.parts:
                parts[part.tensor].append((parameter.name, part))
    for tensor_name, tensor in tensors:
        for name, part in parts.get(tensor_name, ()):
            found = live[name][slices(part.local_box)]
            wanted = tensor[slices(part.tensor_box)].to(found.device, found.dtype).reshape(found.shape)
            if not same_bits(found, wanted):
                failed.setdefault(
                    name, f"it does not hold {tensor_name}{list(part.tensor_box)} where the plan writes it"
                )
            owed[name].discard(part)
    for name, missing in owed.items():
        if missing:
            failed.setdefault(name, f"vLLM's loader was not given {min(part.tensor for part in missing)}")
    return failed


def with_their_modules(failed: Collection[str], names: Iterable[str]) -> set[str]:
    """vLLM's loader takes a module's parameters together."""
    modules = {name.rpartition(".")[0] for name in failed}
    return {name for name in names if name.rpartition(".")[0] in modules}


def invented(
    specs: Iterable[tuple[str, Sequence[int]]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with other values everywhere, the same each time: something for vLLM's loader to load."""
    for name, shape in specs:
        generator = torch.Generator(device).manual_seed(xxhash.xxh32_intdigest(name.encode()))
        yield name, torch.randn(tuple(shape), generator=generator, dtype=dtype, device=device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class NothingWritten(TransferError):
    """A version cannot be applied, and the live parameters are as they were."""


class NotYet(NothingWritten):
    """It may be possible later: what is to be written is not within reach."""


class DeviceMemory:
    """Mapped memory of another process as torch sees it."""

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


@dataclass
class _Staged:
    """What is within reach of a version, and where it goes."""

    version: int
    indices: set[int] = field(default_factory=set)
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    """Target, source and bytes, for the driver."""
    bulk: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    """Targets and sources, both one run of memory, by their dtypes."""
    singles: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Target and source, of any strides."""
    wholes: dict[str, list[tuple[Box, torch.Tensor]]] = field(default_factory=dict)
    """For vLLM's loader: a tensor's rectangles."""

    def copy(self) -> _Staged:
        bulk = {key: (list(targets), list(sources)) for key, (targets, sources) in self.bulk.items()}
        wholes = {name: list(pieces) for name, pieces in self.wholes.items()}
        return _Staged(self.version, set(self.indices), list(self.runs), bulk, list(self.singles), wholes)


class Live:
    """The parameters of one rank. `stage` may be called by a thread of its own; all else between two steps."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], reload: Reload, rank: int, device: torch.device) -> None:
        self._parameters, self._reload, self._rank, self._device = parameters, reload, rank, device
        self._receiver: Receiver | None = None
        self._driver: Driver | None = None
        """Where it knows the memory that pieces lie in."""
        self._moves: Sequence[Move] = ()
        self._shapes: list[tuple[int, ...]] = []
        self._targets: dict[int, torch.Tensor] = {}
        """By index: where a piece goes."""
        self._dense: set[int] = set()
        """Indices of targets that are one run of memory."""
        self._staged = _Staged(-1)
        self._sorted: list[tuple[Mapping[int, torch.Tensor], _Staged]] = []
        """What was staged of late, and what came of it: a trainer's arrays come back to the same few places."""

    def open(
        self, transport: str, plan: Plan, parameters: Sequence[Parameter], reloaded: Collection[str]
    ) -> list[bytes]:
        """Links, by trainer rank. `parameters` are those of the plan; `reloaded` are the tensors among them."""
        self.close()
        self._moves = plan.incoming.get(self._rank, ())
        self._shapes = [shape_of(move.tensor_box) for move in self._moves]
        self._targets = {
            index: self._parameters[move.parameter][slices(move.local_box)]
            for index, move in enumerate(self._moves)
            if move.parameter not in reloaded
        }
        self._dense = {index for index, target in self._targets.items() if target.is_contiguous()}
        senders = sorted({move.sender for move in self._moves})
        receiver = self._receiver = self._make(transport, plan, parameters, senders)
        receiver.start()
        return [receiver.links.get(sender, b"") for sender in range(max(senders, default=-1) + 1)]

    def _make(self, transport: str, plan: Plan, parameters: Sequence[Parameter], senders: Sequence[int]) -> Receiver:
        index = self._device.index or 0
        if transport == "cuda":
            from slipstream.weights.transports.cuda import CudaReceiver
            from slipstream.weights.transports.vmm import Vmm

            self._driver, wrap = Vmm(index), partial(DeviceMemory, device=self._device)
            return CudaReceiver(senders, wrap, self._driver, check=self.stage)
        if transport == "nccl":
            from slipstream.weights.transports.nccl import NcclReceiver

            return NcclReceiver(plan, self._rank, senders, index, parameters, how="broadcast")
        raise TransferError(f"{transport!r} is no transport between devices")

    def expect(self, version: int) -> None:
        assert self._receiver is not None
        self._receiver.expect(version)

    def receive(self, version: int, indices: Collection[int], patience: float) -> float | None:
        """Waits until these pieces are within reach, and stages them. What it took them to come; None if they are not here
        within `patience` seconds."""
        assert self._receiver is not None
        if self._receiver.wait(version, indices, patience) is None:
            return None
        if not self._is_staged(version, indices):
            self.stage(version, {index: self._receiver.source(index) for index in indices})
        return self._receiver.seconds

    def stage(self, version: int, pieces: Mapping[int, torch.Tensor]) -> None:
        """All that can go wrong goes wrong here, while the old version serves. Trainer ranks may come one by one."""
        known = next((found for before, found in self._sorted if before is pieces), None)
        if known is not None and self._staged.version != version:
            self._staged = replace(known, version=version)
            return
        for index, piece in pieces.items():
            if not 0 <= index < len(self._moves):
                raise TransferError(f"piece {index} is not in the plan, which has {len(self._moves)} for this rank")
            wanted = self._shapes[index]
            if piece.shape != wanted and piece.shape[piece.dim() - len(wanted) :] != wanted:
                tensor = self._moves[index].tensor
                raise TransferError(f"{tensor} came with shape {list(piece.shape)}, the plan says {list(wanted)}")
        # Who applies sees all of a rank's pieces or none.
        staged = self._staged.copy() if self._staged.version == version else _Staged(version)
        staged.indices.update(pieces)
        for index, piece in pieces.items():
            target = self._targets.get(index)
            if target is None:
                move = self._moves[index]
                staged.wholes.setdefault(move.parameter, []).append((move.local_box, piece))
            elif not (index in self._dense and piece.shape == target.shape and piece.is_contiguous()):
                staged.singles.append((target, piece))
            elif self._driver is not None and piece.dtype == target.dtype and target.nbytes >= LARGE_BYTES:
                staged.runs.append((target.data_ptr(), piece.data_ptr(), target.nbytes))
            else:
                targets, sources = staged.bulk.setdefault((target.dtype, piece.dtype), ([], []))
                targets.append(target)
                sources.append(piece)
        if staged.indices == pieces.keys():
            self._sorted = [(pieces, staged), *self._sorted[: _MOST_SORTED - 1]]
        self._staged = staged

    def apply(self, version: int, indices: Collection[int], patience: float) -> float:
        """Between two steps: every piece into its place, ahead of the next step's kernels in their stream. The seconds that it
        takes the device, or 0 where the receiver lets the trainer know. Raises `NothingWritten` unless exactly these
        pieces of this version are staged, now or within `patience` seconds."""
        assert self._receiver is not None
        if not self._is_staged(version, indices):
            self._wait(version, indices, patience)
        staged, self._staged = self._staged, _Staged(-1)
        start = self._moment()
        if staged.runs:
            assert self._driver is not None
            self._driver.copies(staged.runs, self._stream())
        for targets, sources in staged.bulk.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)  # a few kernels, instead of one for each
        for target, piece in staged.singles:
            target.copy_(piece, non_blocking=True)
        if staged.wholes:
            self._reload((name, _assembled(pieces)) for name, pieces in staged.wholes.items())
        end = self._moment()
        return self._receiver.done(version, lambda: _seconds(start, end))

    def _is_staged(self, version: int, indices: Collection[int]) -> bool:
        return self._staged.version == version and self._staged.indices == set(indices)

    def _wait(self, version: int, indices: Collection[int], patience: float) -> None:
        """The order to write may overtake the news of what."""
        assert self._receiver is not None
        kind, why = NothingWritten, ""
        try:
            if self._receiver.wait(version, indices, patience) is None:
                kind = NotYet
        except TransferError as error:
            why = f": {error}"
        if not self._is_staged(version, indices):
            found = f"{len(self._staged.indices)} piece(s) of version {self._staged.version}"
            raise kind(
                f"rank {self._rank} has {found} within reach, not the {len(indices)} of version {version} that are to be "
                f"written{why}"
            )

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def _moment(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], reloaded: Collection[str]) -> None:
        """As `apply`, for whole parameters in host memory."""
        again = []
        for name, tensor in tensors:
            if name in reloaded:
                again.append((name, tensor.to(self._device)))
            else:
                self._parameters[name].copy_(tensor, non_blocking=True)
        if again:
            self._reload(iter(again))
        self._wait_for_device()

    def checksums(self, parameters: Iterable[Parameter]) -> list[tuple[str, list[int]]]:
        """By name, of each part; between two steps."""
        return [
            (p.name, [_checksum(self._parameters[p.name][slices(part.local_box)]) for part in p.parts])
            for p in parameters
        ]

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def forget(self) -> None:
        self._staged = _Staged(-1)
        if self._receiver is not None:
            self._receiver.abandon()

    def close(self) -> None:
        self._staged, self._targets, self._sorted = _Staged(-1), {}, []
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = self._driver = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what was received into may be a whole model


def _seconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Between two moments of the device's; waits for the second."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def _checksum(tensor: torch.Tensor) -> int:
    """As `weights.checksum.checksum`, brought to host memory in runs of rows."""
    digest, kind = xxhash.xxh3_64(), _BITS[tensor.element_size()]
    rows = max(1, COPIED_BYTES * tensor.shape[0] // max(1, tensor.numel() * tensor.element_size()))
    for run in tensor.split(rows):
        digest.update(run.contiguous().view(kind).cpu().numpy().reshape(-1).view("uint8").data)
    return digest.intdigest()


def _assembled(pieces: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """A whole tensor from its rectangles."""
    if len(pieces) == 1:
        return pieces[0][1].clone()
    shape = tuple(max(box[dim][1] for box, _ in pieces) for dim in range(len(pieces[0][0])))
    whole = torch.empty(shape, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    for box, piece in pieces:
        whole[slices(box)] = piece
    return whole
