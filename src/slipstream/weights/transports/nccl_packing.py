"""Pieces of JAX arrays as messages: sent from where they lie, or packed first by compiled programs. JAX only, no torch.

A rectangle that is one run of its array's memory, and has the engine's dtype already, is sent as it is. Others are cut and
cast into a buffer. A bucket's program is compiled once, and shared by buckets that look alike; none keeps an array alive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slipstream.errors import MappingError, TransferError
from slipstream.weights.device import is_row_major
from slipstream.weights.image import numpy_dtype
from slipstream.weights.layout import run_start
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.nccl_wire import Bucket

if TYPE_CHECKING:
    import jax

MAX_PROGRAMS = 512
COMPILERS = 4


class DevicePiece(Protocol):
    """A rectangle of an array that lies on one device."""

    @property
    def array(self) -> jax.Array: ...

    def cut(self, array: jax.Array) -> jax.Array:
        """The rectangle; traceable. Its geometry is the same whenever a move is sent."""
        ...


@dataclass(frozen=True)
class _Cut:
    """What `DevicePiece.cut` does, without the piece, which would keep its array alive. Equal cuts do the same."""

    text: str
    shape: tuple[int, ...]
    """Of what goes in."""
    dtype: np.dtype
    program: Any = field(compare=False)
    """A closed jaxpr."""
    start: int | None = field(compare=False)
    """Where the rectangle begins in the array, in elements, if it is one run of its memory."""

    def __call__(self, array: jax.Array) -> jax.Array:
        from jax.extend.core import jaxpr_as_fun

        return jaxpr_as_fun(self.program)(array)[0]


@dataclass(slots=True)
class Source:
    """A piece at the time of an update."""

    array: jax.Array
    cut: _Cut
    is_home: bool
    """Whether it lies where messages are sent from."""
    is_straight: bool
    """Whether it can be sent from where it lies."""


@dataclass(frozen=True)
class _Program:
    """What a bucket needs computed: of each part, which of the inputs it is cut from, how, and whether that input is the
    whole array, or, brought from another device, the rectangle already. The first parts are messages of their own, the
    rest are one together."""

    num_alone: int
    parts: tuple[tuple[int, _Cut, bool], ...]


@dataclass(frozen=True)
class Message:
    pointer: int
    num_bytes: int


class Packer:
    """For the moves of one stream. `device` is where messages are sent from."""

    def __init__(self, plan: Plan, moves: Mapping[int, Move], device: jax.Device) -> None:
        import jax

        self._plan, self._moves, self._device = plan, moves, device
        self._dtype = numpy_dtype(plan.dtype)
        if jax.dtypes.canonicalize_dtype(self._dtype) != self._dtype:
            raise TransferError(f"the engine takes {plan.dtype}, which JAX makes only with jax_enable_x64; set it")
        self._makes: dict[int, tuple[tuple[object, ...], _Cut, bool, bool]] = {}
        """By index, of the array that a piece is in: what all arrays of its make have in common."""
        self._cutters: dict[_Cut, Any] = {}
        self._compiled: dict[_Program, Any] = {}

    def sources(self, pieces: Mapping[int, DevicePiece]) -> dict[int, Source]:
        """Raises `MappingError` for a piece that is not what was planned."""
        return {index: self._source(index, piece) for index, piece in pieces.items()}

    def prepare(self, buckets: Iterable[Bucket], sources: Mapping[int, Source]) -> None:
        """Compiles what packing these will need: better before a peer waits for it."""
        if len(self._compiled) > MAX_PROGRAMS:  # every sync sends another part of the tree
            self._compiled.clear()
        programs = {self._program(bucket, sources)[0] for bucket in buckets}
        if missing := [program for program in programs if program.parts and program not in self._compiled]:
            with ThreadPoolExecutor(COMPILERS) as pool:  # XLA lets go of the interpreter
                self._compiled.update(zip(missing, pool.map(self._compile, missing)))

    def pack(self, bucket: Bucket, sources: Mapping[int, Source]) -> tuple[list[Message], list[jax.Array]]:
        """A bucket's messages, ready to be sent, and the arrays in whose memory they are: hold them until they are sent.
        Only what was prepared can be packed."""
        import jax

        program, inputs = self._program(bucket, sources)
        arrays = [self._input(source) for source in inputs]
        packed = iter(jax.block_until_ready(self._compiled[program](arrays)) if arrays else ())
        messages: list[Message] = []
        held: list[jax.Array] = []
        for index in bucket.alone:
            source = sources[index]
            array, start = (source.array, source.cut.start or 0) if source.is_straight else (next(packed), 0)
            held.append(array)
            pointer = array.unsafe_buffer_pointer() + start * self._dtype.itemsize
            messages.append(Message(pointer, self._plan.size_of(self._moves[index])))
        for array in packed:
            held.append(array)
            messages.append(Message(array.unsafe_buffer_pointer(), array.nbytes))
        return messages, held

    def _source(self, index: int, piece: DevicePiece) -> Source:
        array = piece.array
        make = (array.shape, array.dtype, array.sharding)
        known = self._makes.get(index)
        if known is None or known[0] != make:
            is_home = array.devices() == {self._device} and array.sharding.memory_kind != "pinned_host"
            cut = self._cut(index, array, piece)
            is_straight = is_home and cut.start is not None and array.dtype == self._dtype and is_row_major(array)
            known = self._makes[index] = make, cut, is_home, is_straight
        return Source(array, *known[1:])

    def _program(self, bucket: Bucket, sources: Mapping[int, Source]) -> tuple[_Program, list[Source]]:
        alone = [index for index in bucket.alone if not sources[index].is_straight]
        inputs: dict[object, tuple[int, Source]] = {}
        parts = []
        for index in (*alone, *bucket.together):
            source = sources[index]
            name = id(source.array) if source.is_home else (index,)
            position, _ = inputs.setdefault(name, (len(inputs), source))
            parts.append((position, source.cut, source.is_home))
        return _Program(len(alone), tuple(parts)), [source for _, source in inputs.values()]

    def _compile(self, program: _Program) -> Any:
        import jax
        import jax.numpy as jnp

        def pack(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
            pieces = [cut(arrays[n]) if is_whole else arrays[n] for n, cut, is_whole in program.parts]
            flat = [piece.astype(self._dtype).reshape(-1) for piece in pieces]
            rest = flat[program.num_alone :]
            return (*flat[: program.num_alone], *([jnp.concatenate(rest)] if rest else []))

        here = jax.sharding.SingleDeviceSharding(self._device)
        inputs = {}
        for n, cut, is_whole in program.parts:
            shape = cut.shape if is_whole else cut.program.out_avals[0].shape
            inputs[n] = jax.ShapeDtypeStruct(shape, cut.dtype, sharding=here)
        return jax.jit(pack).lower([inputs[n] for n in range(len(inputs))]).compile()

    def _input(self, source: Source) -> jax.Array:
        import jax

        if source.is_home:
            return source.array
        if source.cut not in self._cutters:
            self._cutters[source.cut] = jax.jit(source.cut)
        return jax.device_put(self._cutters[source.cut](source.array), self._device)

    def _cut(self, index: int, array: jax.Array, piece: DevicePiece) -> _Cut:
        import jax

        move = self._moves[index]
        program = jax.make_jaxpr(piece.cut)(jax.ShapeDtypeStruct(array.shape, array.dtype))
        num_bytes = math.prod(program.out_avals[0].shape) * self._dtype.itemsize
        if num_bytes != self._plan.size_of(move):
            raise MappingError(
                f"the piece of {move.tensor} for {move.parameter} has {num_bytes} bytes as {self._plan.dtype}, the plan "
                f"says {self._plan.size_of(move)}"
            )
        text = str(program) if not program.consts else f"{index} {program}"
        return _Cut(text, array.shape, array.dtype, program, _start_of(program.jaxpr))


def _start_of(jaxpr: Any) -> int | None:
    """Where the result of slices and reshapes begins in the array that goes in, if it is one run of its memory."""
    (current,) = jaxpr.invars
    start = 0
    for equation in jaxpr.eqns:
        name, facts = equation.primitive.name, equation.params
        if len(equation.invars) != 1 or equation.invars[0] is not current:
            return None
        shape, result = current.aval.shape, equation.outvars[0]
        if name == "slice" and not facts["strides"]:
            box = tuple(zip(facts["start_indices"], facts["limit_indices"]))
            if (offset := run_start(box, shape)) is None:
                return None
            start += offset
        elif name in ("reshape", "squeeze"):
            if facts.get("dimensions") is not None and name == "reshape":
                return None
        elif name != "broadcast_in_dim" or math.prod(result.aval.shape) != math.prod(shape):
            return None
        current = result
    return start if jaxpr.outvars[0] is current else None
