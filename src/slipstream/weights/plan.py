"""The plan: which rectangle of which tensor goes from which trainer rank to which place on which engine rank.

Pure: metadata in, `Plan` out. It touches no device, socket or engine, and is checked before a byte moves: every element
of every engine parameter is written exactly once. Both ends hold the same plan, or its fingerprint gives them away."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from slipstream.errors import MappingError, PlanMismatch
from slipstream.types import Box, Parameter, TensorSpec
from slipstream.weights.layout import cut, exact_cover, inside, intersect, land, shape_of, volume, whole

BUCKET_BYTES = 256 << 20
"""No move is larger: a transport that must stage bytes needs no more than a bucket or two for it."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor as the trainer holds it: the whole shape, and which rank can read which box of it."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One rectangle on its way: `tensor[tensor_box]` on `sender` becomes `parameter[local_box]` on `receiver`."""

    tensor: str
    tensor_box: Box
    sender: int
    parameter: str
    local_box: Box
    receiver: int


def lacks_tensor(move: Move) -> MappingError:
    """For a move whose tensor did not come, while others of its parameter did."""
    return MappingError(
        f"parameter {move.parameter} of the engine is made of {move.tensor} and others that came; a partial sync must bring "
        "all the tensors of a parameter, or none"
    )


@dataclass(frozen=True)
class Plan:
    """All moves of one update, and the dtype in which they travel (the engine's: the sender casts)."""

    dtype: str
    moves: tuple[Move, ...]

    @cached_property
    def incoming(self) -> dict[int, tuple[Move, ...]]:
        """Moves by receiver. A move's index there is its name on the wire and in manifests."""
        found: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            found[move.receiver].append(move)
        return {rank: tuple(moves) for rank, moves in found.items()}

    @cached_property
    def sizes(self) -> dict[int, tuple[int, ...]]:
        """The bytes of each of those moves."""
        return {rank: tuple(map(self.size_of, moves)) for rank, moves in self.incoming.items()}

    @cached_property
    def made_of(self) -> dict[str, frozenset[str]]:
        """The tensors that each parameter is made of."""
        found: dict[str, set[str]] = defaultdict(set)
        for move in self.moves:
            found[move.parameter].add(move.tensor)
        return {name: frozenset(tensors) for name, tensors in found.items()}

    def changed(self, unchanged: Set[str]) -> set[str]:
        """Parameters that are sent: all but those whose tensors are all unchanged."""
        return {name for name, tensors in self.made_of.items() if not tensors <= unchanged}

    @cached_property
    def num_pieces(self) -> Counter[str]:
        """Moves into each parameter, over all ranks."""
        return Counter(move.parameter for move in self.moves)

    def stream(self, sender: int, receiver: int) -> dict[int, Move]:
        """What one sender has for one receiver, by index."""
        return {i: move for i, move in enumerate(self.incoming.get(receiver, ())) if move.sender == sender}

    def buckets(self, sender: int, receiver: int, limit: int = BUCKET_BYTES) -> list[list[int]]:
        """A stream's indices in groups of at most `limit` bytes, for transports that send many moves as one."""
        groups: list[list[int]] = []
        room = 0
        for index, move in self.stream(sender, receiver).items():
            size = self.size_of(move)
            if not groups or size > room:
                groups.append([])
                room = limit
            groups[-1].append(index)
            room -= size
        return groups

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
        """Raises `PlanMismatch` for anything that `to_bytes` did not write."""
        try:
            tree = json.loads(data)
            if tree["dtype"] not in DTYPE_BYTES:
                raise ValueError(f"dtype {tree['dtype']!r}")
            return cls(tree["dtype"], tuple(_move(row) for row in tree["moves"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PlanMismatch(f"the plan that came cannot be read ({type(error).__name__}: {error})") from None


def _move(row: Sequence[object]) -> Move:
    tensor, tensor_box, sender, parameter, local_box, receiver = row
    origin = str(tensor), _box(tensor_box), _count(sender)
    target = str(parameter), _box(local_box), _count(receiver)
    move = Move(*origin, *target)
    from_shape, to_shape = shape_of(move.tensor_box), shape_of(move.local_box)
    if to_shape[len(to_shape) - len(from_shape) :] != from_shape or volume(move.local_box) != volume(move.tensor_box):
        raise ValueError(f"the boxes of {tensor!r} have different shapes")
    return move


def _box(value: object) -> Box:
    return tuple((_count(start), _count(stop)) for start, stop in value)  # type: ignore[attr-defined]


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def make_plan(
    sources: Mapping[str, Source],
    tensors: Sequence[TensorSpec],
    parameters: Sequence[Parameter],
    dtype: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Matches what the trainer has with what the engine's ranks hold. Raises `MappingError` naming what does not fit."""
    check_sources(sources, tensors)
    sent: dict[int, int] = defaultdict(int)
    most = max(1, bucket_bytes // DTYPE_BYTES[dtype])
    moves = []
    for parameter in parameters:
        for part in parameter.parts:
            for sender, box in _share_out(sources[part.tensor], part.tensor_box, sent):
                sent[sender] += volume(box)
                for piece in cut(box, most):
                    local = land(piece, part.tensor_box, part.local_box)
                    moves.append(Move(part.tensor, piece, sender, parameter.name, local, parameter.rank))
    plan = Plan(dtype, tuple(moves))
    check_cover(plan, parameters)
    return plan


def _share_out(source: Source, wanted: Box, sent: Mapping[int, int]) -> list[tuple[int, Box]]:
    """Who sends which part of `wanted`. Shards are disjoint or replicas of each other; of replicas, the rank that has
    the least to send so far takes the part."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, shard in source.shards:
        if (common := intersect(shard, wanted)) is not None:
            holders[common].append(rank)
    return [(min(ranks, key=lambda rank: (sent[rank], rank)), box) for box, ranks in sorted(holders.items())]


def check_sources(sources: Mapping[str, Source], tensors: Sequence[TensorSpec]) -> None:
    """Names, shapes and dtypes, before anything is sent."""
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
            problems.append(f"{name}: dtype {source.dtype} is not a floating-point type that can be sent")
    if problems:
        shown = "\n  ".join(sorted(problems)[:12])
        more = f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise MappingError(
            f"the trainer's tree does not fit the engine's model, {len(problems)} tensor(s):\n  {shown}{more}\n"
            "Leaf paths joined by '.' must be the checkpoint's names, in HF orientation ([out, in])."
        )


def check_cover(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Every element of every parameter is written exactly once. The receiver checks a plan that came with it as well."""
    written: dict[tuple[str, int], list[Box]] = defaultdict(list)
    for move in plan.moves:
        written[move.parameter, move.receiver].append(move.local_box)
    for parameter in parameters:
        boxes = [*written.pop((parameter.name, parameter.rank), []), *parameter.padding]
        frame = whole(parameter.shape)
        outside = next((b for b in boxes if not inside(b, parameter.shape)), None)
        problem = f"{outside} is outside {frame}" if outside is not None else exact_cover(boxes, frame)
        if problem:
            raise MappingError(f"parameter {parameter.name} on rank {parameter.rank}: {problem}")
    for name, rank in written:
        raise MappingError(f"the plan writes parameter {name} on rank {rank}, which the engine does not have")
