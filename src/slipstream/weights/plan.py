"""The transfer plan: which box of which tensor goes from which trainer rank to which place on which engine rank.

Planning is pure: metadata in, `Plan` out. Every plan is checked before a byte moves: each element of each engine
parameter must be written exactly once. Trainer and engine compare fingerprints, so both follow the same plan."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from slipstream.errors import MappingError, PlanMismatch
from slipstream.tensors.boxes import (
    exact_cover,
    full_box,
    intersect,
    is_inside,
    shape_of,
    split_by_volume,
    translate,
    volume,
)
from slipstream.types import Box, Parameter, TensorSpec

BUCKET_BYTES = 256 << 20
"""Upper bound on the bytes of a move, and so on the memory a transport needs to stage one."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as the trainer holds it: its global shape, and which trainer rank can read which box."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """`tensor[tensor_box]` on trainer rank `sender` becomes `parameter[local_box]` on engine rank `receiver`."""

    tensor: str
    tensor_box: Box
    sender: int
    parameter: str
    local_box: Box
    receiver: int


def missing_tensor_error(move: Move) -> MappingError:
    """Return the error for a partial sync that lacks a tensor of a parameter it updates."""
    return MappingError(
        f"{move.tensor} is missing from this partial sync, which has other tensors of the engine's parameter "
        f"{move.parameter}; pass all tensors of a parameter, or none"
    )


@dataclass(frozen=True)
class Plan:
    """All moves of an update, and the dtype on the wire: the engine's, so the sender casts."""

    dtype: str
    moves: tuple[Move, ...]

    @cached_property
    def incoming(self) -> dict[int, tuple[Move, ...]]:
        """Moves by receiver. A move's index in its receiver's tuple identifies it on the wire and in manifests."""
        by_receiver: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            by_receiver[move.receiver].append(move)
        return {rank: tuple(moves) for rank, moves in by_receiver.items()}

    @cached_property
    def sizes(self) -> dict[int, tuple[int, ...]]:
        """Bytes of each move, by receiver, in the order of `incoming`."""
        return {rank: tuple(map(self.size_of, moves)) for rank, moves in self.incoming.items()}

    @cached_property
    def tensors_of(self) -> dict[str, frozenset[str]]:
        """Tensors that each parameter is built from."""
        by_parameter: dict[str, set[str]] = defaultdict(set)
        for move in self.moves:
            by_parameter[move.parameter].add(move.tensor)
        return {name: frozenset(tensors) for name, tensors in by_parameter.items()}

    def changed_parameters(self, unchanged: Set[str]) -> set[str]:
        """Return the parameters to send: all except those whose tensors are all in `unchanged`."""
        return {name for name, tensors in self.tensors_of.items() if not tensors <= unchanged}

    @cached_property
    def num_pieces(self) -> Counter[str]:
        """Number of moves into each parameter, over all ranks."""
        return Counter(move.parameter for move in self.moves)

    @cached_property
    def _bytes_of(self) -> Counter[str]:
        """Bytes of each parameter, over all ranks."""
        found = Counter[str]()
        for move in self.moves:
            found[move.parameter] += self.size_of(move)
        return found

    def changed_bytes(self, unchanged: Set[str]) -> int:
        """Return the size of the parameters to send."""
        return sum(self._bytes_of[name] for name in self.changed_parameters(unchanged))

    def stream(self, sender: int, receiver: int) -> dict[int, Move]:
        """Return the moves from one sender to one receiver, by index."""
        return {i: move for i, move in enumerate(self.incoming.get(receiver, ())) if move.sender == sender}

    def size_of(self, move: Move) -> int:
        return volume(move.tensor_box) * DTYPE_BYTES[self.dtype]

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.size_of(move) for move in self.moves)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        rows = [[m.tensor, m.tensor_box, m.sender, m.parameter, m.local_box, m.receiver] for m in self.moves]
        return json.dumps({"dtype": self.dtype, "moves": rows}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Parse the output of `to_bytes`. Raise `PlanMismatch` for anything else."""
        try:
            tree = json.loads(data)
            if tree["dtype"] not in DTYPE_BYTES:
                raise ValueError(f"dtype {tree['dtype']!r}")
            return cls(tree["dtype"], tuple(_move(row) for row in tree["moves"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PlanMismatch(f"the received plan is malformed ({type(error).__name__}: {error})") from None


def _move(row: Sequence[object]) -> Move:
    tensor, tensor_box, sender, parameter, local_box, receiver = row
    move = Move(str(tensor), _box(tensor_box), _count(sender), str(parameter), _box(local_box), _count(receiver))
    from_shape, to_shape = shape_of(move.tensor_box), shape_of(move.local_box)
    if to_shape[len(to_shape) - len(from_shape) :] != from_shape or volume(move.local_box) != volume(move.tensor_box):
        raise ValueError(f"the boxes of {tensor!r} have different shapes")
    return move


def _box(value: object) -> Box:
    return tuple((_count(start), _count(stop)) for start, stop in value)  # type: ignore[attr-defined]


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return value


def make_plan(
    sources: Mapping[str, SourceTensor],
    tensors: Sequence[TensorSpec],
    parameters: Sequence[Parameter],
    dtype: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Match the trainer's tensors with the parameters of the engine's ranks, or raise `MappingError`."""
    check_sources(sources, tensors)
    assigned: dict[int, int] = defaultdict(int)  # elements, by sender
    max_elements = max(1, bucket_bytes // DTYPE_BYTES[dtype])
    moves = []
    for parameter in parameters:
        for part in parameter.parts:
            for sender, box in _assign_senders(sources[part.tensor], part.tensor_box, assigned):
                assigned[sender] += volume(box)
                for piece in split_by_volume(box, max_elements):
                    local = translate(piece, part.tensor_box, part.local_box)
                    moves.append(Move(part.tensor, piece, sender, parameter.name, local, parameter.rank))
    plan = Plan(dtype, tuple(moves))
    check_cover(plan, parameters)
    return plan


def _assign_senders(source: SourceTensor, wanted: Box, assigned: Mapping[int, int]) -> list[tuple[int, Box]]:
    """Choose which rank sends which part of `wanted`. Shards are disjoint or replicas; among replicas, the rank with
    the least to send so far is chosen."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, shard in source.shards:
        if (common := intersect(shard, wanted)) is not None:
            holders[common].append(rank)
    return [(min(ranks, key=lambda rank: (assigned[rank], rank)), box) for box, ranks in sorted(holders.items())]


def check_sources(sources: Mapping[str, SourceTensor], tensors: Sequence[TensorSpec]) -> None:
    """Check names, shapes and dtypes before anything is sent."""
    wanted = {t.name: t.shape for t in tensors}
    problems = [f"missing: {name} {list(wanted[name])}" for name in wanted.keys() - sources.keys()]
    problems += [f"not in the model: {name} {list(sources[name].shape)}" for name in sources.keys() - wanted.keys()]
    for name in wanted.keys() & sources.keys():
        source = sources[name]
        if source.shape != wanted[name]:
            problems.append(
                f"{name}: the engine expects shape {list(wanted[name])}, the trainer has {list(source.shape)}"
            )
        elif source.dtype not in DTYPE_BYTES:
            problems.append(f"{name}: dtype {source.dtype} is not supported; known: {', '.join(DTYPE_BYTES)}")
    if problems:
        shown = "\n  ".join(sorted(problems)[:12])
        more = f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise MappingError(
            f"the trainer's tree does not match the engine's model, {len(problems)} tensor(s):\n  {shown}{more}\n"
            "Leaf paths joined by '.' must be the checkpoint's tensor names, with matrices in HF orientation ([out, in])."
        )


def check_cover(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Check that every element of every parameter is written exactly once. The receiver repeats the check."""
    written: dict[tuple[str, int], list[Box]] = defaultdict(list)
    for move in plan.moves:
        written[move.parameter, move.receiver].append(move.local_box)
    for parameter in parameters:
        boxes = [*written.pop((parameter.name, parameter.rank), []), *parameter.padding]
        frame = full_box(parameter.shape)
        outside = next((b for b in boxes if not is_inside(b, parameter.shape)), None)
        problem = f"{outside} is outside {frame}" if outside is not None else exact_cover(boxes, frame)
        if problem:
            raise MappingError(f"parameter {parameter.name} on rank {parameter.rank}: {problem}")
    for name, rank in written:
        raise MappingError(f"the plan writes parameter {name} on rank {rank}, but the engine has no such parameter")
