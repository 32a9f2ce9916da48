"""Turns pieces of JAX arrays into messages: sent in place, or packed by compiled programs. JAX only, no torch.

A piece that is contiguous in its array and already has the engine's dtype is sent in place. Others are sliced and cast
into a buffer. A bucket's program is compiled once and shared by buckets of the same form; programs keep no array
alive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import MappingError, TransferError
from slipstream.tensors.boxes import contiguous_start
from slipstream.weights.plan import Move, Plan
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.device import DevicePiece, is_row_major
from slipstream.weights.transports.nccl.wire_format import Bucket

if TYPE_CHECKING:
    import jax

MAX_PROGRAMS = 512
COMPILE_THREADS = 4


@dataclass(frozen=True)
class _SliceProgram:
    """A traced `DevicePiece.slice`. Unlike the piece it keeps no array alive, and equal programs compare equal."""

    text: str
    shape: tuple[int, ...]
    """Shape of the input array."""
    dtype: np.dtype
    jaxpr: Any = field(compare=False)
    """The closed jaxpr."""
    start: int | None = field(compare=False)
    """Offset of the result in the input array, in elements, if it is contiguous there."""

    def __call__(self, array: jax.Array) -> jax.Array:
        from jax.extend.core import jaxpr_as_fun

        return jaxpr_as_fun(self.jaxpr)(array)[0]


@dataclass(slots=True)
class PackInput:
    """A piece during an update."""

    array: jax.Array
    slice: _SliceProgram
    is_on_send_device: bool
    """Whether the array is on the device that messages are sent from."""
    is_sent_in_place: bool


@dataclass(frozen=True)
class _BucketProgram:
    """What to compute for a bucket: the first `num_alone` parts are separate messages, the rest are one message."""

    num_alone: int
    parts: tuple[tuple[int, _SliceProgram, bool], ...]
    """For each part: the number of its input, its slice, and whether the input is the full array. If it is not, the
    slice was taken on another device and the input is already the piece."""


class Packer:
    """Packs the moves from one trainer rank to one engine rank. Messages are sent from `device`."""

    def __init__(self, plan: Plan, moves: Mapping[int, Move], device: jax.Device) -> None:
        import jax

        self._plan, self._moves, self._device = plan, moves, device
        self._dtype = numpy_dtype(plan.dtype)
        if jax.dtypes.canonicalize_dtype(self._dtype) != self._dtype:
            raise TransferError(
                f"the engine expects {plan.dtype}, which JAX supports only with jax_enable_x64; enable it"
            )
        self._by_layout: dict[int, tuple[tuple[object, ...], _SliceProgram, bool, bool]] = {}
        """By index: shape, dtype and sharding of the piece's array, and what follows from them."""
        self._compiled_slices: dict[_SliceProgram, Any] = {}
        self._compiled: dict[_BucketProgram, Any] = {}

    @property
    def ordinal(self) -> int:
        return self._device.local_hardware_id or 0

    def upload(self, data: bytes) -> tuple[int, Any]:
        """Return the address of a copy on the device, and what owns its memory."""
        import jax

        array = jax.device_put(np.frombuffer(data, np.uint8), self._device).block_until_ready()
        return array.unsafe_buffer_pointer(), array

    def wait(self, inputs: Mapping[int, PackInput]) -> None:
        """NCCL's stream does not wait for JAX's."""
        import jax

        jax.block_until_ready([source.array for source in inputs.values()])

    def inputs(self, pieces: Mapping[int, DevicePiece]) -> dict[int, PackInput]:
        """Raise `MappingError` for a piece whose size is not as planned."""
        return {index: self._input(index, piece) for index, piece in pieces.items()}

    def prepare(self, buckets: Iterable[Bucket], inputs: Mapping[int, PackInput]) -> None:
        """Compile the programs of these buckets, before a peer waits for them."""
        if len(self._compiled) > MAX_PROGRAMS:  # for example, if every sync sends another part of the tree
            self._compiled.clear()
        programs = {self._program(bucket, inputs)[0] for bucket in buckets}
        if missing := [program for program in programs if program.parts and program not in self._compiled]:
            with ThreadPoolExecutor(COMPILE_THREADS) as pool:  # XLA releases the GIL
                self._compiled.update(zip(missing, pool.map(self._compile, missing)))

    def pack(self, bucket: Bucket, inputs: Mapping[int, PackInput]) -> tuple[list[tuple[int, int]], list[jax.Array]]:
        """Return a prepared bucket's messages, as addresses and sizes, and the arrays that own their memory; hold these
        until the messages are sent."""
        import jax

        program, program_inputs = self._program(bucket, inputs)
        arrays = [self._on_send_device(source) for source in program_inputs]
        packed = iter(jax.block_until_ready(self._compiled[program](arrays)) if arrays else ())
        messages: list[tuple[int, int]] = []
        held: list[jax.Array] = []
        for index in bucket.alone:
            source = inputs[index]
            array, start = (source.array, source.slice.start or 0) if source.is_sent_in_place else (next(packed), 0)
            held.append(array)
            pointer = array.unsafe_buffer_pointer() + start * self._dtype.itemsize
            messages.append((pointer, self._plan.size_of(self._moves[index])))
        for array in packed:
            held.append(array)
            messages.append((array.unsafe_buffer_pointer(), array.nbytes))
        return messages, held

    def _input(self, index: int, piece: DevicePiece) -> PackInput:
        array = piece.array
        layout = (array.shape, array.dtype, array.sharding)
        known = self._by_layout.get(index)
        if known is None or known[0] != layout:
            is_on_send_device = array.devices() == {self._device} and array.sharding.memory_kind != "pinned_host"
            program = self._trace(index, array, piece)
            is_sent_in_place = (
                is_on_send_device and program.start is not None and array.dtype == self._dtype and is_row_major(array)
            )
            known = self._by_layout[index] = layout, program, is_on_send_device, is_sent_in_place
        return PackInput(array, *known[1:])

    def _program(self, bucket: Bucket, inputs: Mapping[int, PackInput]) -> tuple[_BucketProgram, list[PackInput]]:
        alone = [index for index in bucket.alone if not inputs[index].is_sent_in_place]
        program_inputs: dict[object, tuple[int, PackInput]] = {}
        parts = []
        for index in (*alone, *bucket.together):
            source = inputs[index]
            key = id(source.array) if source.is_on_send_device else (index,)
            position, _ = program_inputs.setdefault(key, (len(program_inputs), source))
            parts.append((position, source.slice, source.is_on_send_device))
        return _BucketProgram(len(alone), tuple(parts)), [source for _, source in program_inputs.values()]

    def _compile(self, program: _BucketProgram) -> Any:
        import jax
        import jax.numpy as jnp

        def pack(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
            pieces = [piece_of(arrays[n]) if is_full else arrays[n] for n, piece_of, is_full in program.parts]
            flat = [piece.astype(self._dtype).reshape(-1) for piece in pieces]
            rest = flat[program.num_alone :]
            return (*flat[: program.num_alone], *([jnp.concatenate(rest)] if rest else []))

        sharding = jax.sharding.SingleDeviceSharding(self._device)
        inputs = {}
        for n, piece_of, is_full in program.parts:
            shape = piece_of.shape if is_full else piece_of.jaxpr.out_avals[0].shape
            inputs[n] = jax.ShapeDtypeStruct(shape, piece_of.dtype, sharding=sharding)
        return jax.jit(pack).lower([inputs[n] for n in range(len(inputs))]).compile()

    def _on_send_device(self, source: PackInput) -> jax.Array:
        import jax

        if source.is_on_send_device:
            return source.array
        if source.slice not in self._compiled_slices:
            self._compiled_slices[source.slice] = jax.jit(source.slice)
        return jax.device_put(self._compiled_slices[source.slice](source.array), self._device)

    def _trace(self, index: int, array: jax.Array, piece: DevicePiece) -> _SliceProgram:
        import jax

        move = self._moves[index]
        jaxpr = jax.make_jaxpr(piece.slice)(jax.ShapeDtypeStruct(array.shape, array.dtype))
        num_bytes = math.prod(jaxpr.out_avals[0].shape) * self._dtype.itemsize
        if num_bytes != self._plan.size_of(move):
            raise MappingError(
                f"the piece of {move.tensor} for {move.parameter} has {num_bytes} bytes as {self._plan.dtype}, the plan "
                f"says {self._plan.size_of(move)}"
            )
        text = str(jaxpr) if not jaxpr.consts else f"{index} {jaxpr}"
        return _SliceProgram(text, array.shape, array.dtype, jaxpr, _contiguous_start(jaxpr.jaxpr))


def _contiguous_start(jaxpr: Any) -> int | None:
    """Return the offset of the result in the input array, in elements, if slices and reshapes keep it contiguous."""
    (current,) = jaxpr.invars
    start = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if len(equation.invars) != 1 or equation.invars[0] is not current:
            return None
        shape, result = current.aval.shape, equation.outvars[0]
        if name == "slice" and not params["strides"]:
            box = tuple(zip(params["start_indices"], params["limit_indices"]))
            if (offset := contiguous_start(box, shape)) is None:
                return None
            start += offset
        elif name in ("reshape", "squeeze"):
            if params.get("dimensions") is not None and name == "reshape":
                return None
        elif name != "broadcast_in_dim" or math.prod(result.aval.shape) != math.prod(shape):
            return None
        current = result
    return start if jaxpr.outvars[0] is current else None
