"""Someone else's tree of parameters, declared: which leaf holds which tensors of the HF checkpoint, and in which layout.

    mapping = TreeMapping((
        Rule("embedder.input_embedding", Target("model.embed_tokens.weight")),
        Rule("layers.{layer}.attn.q_proj.w",                            # [D, H, K]
             Target("model.layers.{layer}.self_attn.q_proj.weight", (Permute((1, 2, 0)), Merge(0)))),
        ...
    ), families.tensors(config))
    bridge.sync(mapping.tensors(params))

A placeholder in braces is a number: it comes from the leaf's path, or from an `Unstack` step. `expand` is pure and maps a
shard's rectangle to rectangles of HF tensors; `tensors` pairs these with the arrays, which are read when they are sent.
`weights/trainers.py` has the mappings of known libraries."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import MappingError
from slipstream.types import Box, TensorSpec
from slipstream.weights.layout import exact_cover, volume, whole
from slipstream.weights.source import Tensor, boxes, dtype_name, gather, named_tensors, read
from slipstream.weights.transforms import Expanded, Shape, Step, View, expand


@dataclass(frozen=True, slots=True)
class Within:
    """The leaf fills only `[start, start + n)` of a dimension of `size`: several leaves make one HF tensor."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Target:
    """An HF tensor (its name may have placeholders) and the steps that lead to it from the leaf."""

    name: str
    steps: tuple[Step, ...] = ()
    within: Within | None = None


class Rule:
    """Leaves whose path fits `leaf` hold the `targets`: several when the leaf is fused, none when it is not to be sent
    (a buffer)."""

    def __init__(self, leaf: str, *targets: Target) -> None:
        self.leaf, self.targets = leaf, targets
        self._pattern = _pattern(leaf)

    def match(self, name: str) -> dict[str, int] | None:
        """The placeholders' numbers, or None when the path does not fit."""
        found = self._pattern.fullmatch(name)
        return None if found is None else {key: int(number) for key, number in found.groupdict().items()}

    def leaf_of(self, tensor: str) -> str | None:
        """The path of the leaf that should hold an HF tensor; None when this rule does not."""
        for target in self.targets:
            if (found := _pattern(target.name).fullmatch(tensor)) is not None:
                return _fill(self.leaf, {key: int(number) for key, number in found.groupdict().items()})
        return None


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of an HF tensor that a leaf's shard holds; `view(array of the shard)` is its content."""

    name: str
    shape: Shape
    """Of the whole HF tensor."""
    box: Box
    view: View


@dataclass(frozen=True)
class TreeMapping:
    """Rules for all leaves of a tree, and, where they are known, the tensors that must come out."""

    rules: tuple[Rule, ...]
    expected: tuple[TensorSpec, ...] = ()
    """Checked by `check` and `tensors`; empty leaves it to the planner."""
    _known: dict[object, tuple[Held, ...]] = field(default_factory=dict, compare=False, repr=False)
    _checked: set[object] = field(default_factory=set, compare=False, repr=False)

    def expand(self, leaf: str, shape: Shape, shard: Box | None = None) -> tuple[Held, ...]:
        """The rectangles of HF tensors that a shard of a leaf holds (all of it, where `shard` is None). Pure; the same
        question is answered from memory, as a trainer that syncs every step asks it every step."""
        shard = whole(shape) if shard is None else shard
        key = leaf, shape, shard
        if key not in self._known:
            self._known[key] = tuple(self._expand(leaf, shape, shard))
        return self._known[key]

    def _expand(self, leaf: str, shape: Shape, shard: Box) -> list[Held]:
        rule, numbers = self._rule(leaf)
        found: list[Held] = []
        for target in rule.targets:
            try:
                found += [_held(target, numbers, piece) for piece in expand(target.steps, shape, shard)]
            except MappingError as error:
                raise MappingError(
                    f"leaf {leaf} {list(shape)} does not become {target.name}: {error}. Is the tree of this model and this "
                    "library's version? Otherwise correct the rule's steps"
                ) from None
        return found

    def _rule(self, leaf: str) -> tuple[Rule, dict[str, int]]:
        fitting = [(rule, numbers) for rule in self.rules if (numbers := rule.match(leaf)) is not None]
        if not fitting:
            raise MappingError(
                f"no rule fits the leaf {leaf!r}; rules: {_some([rule.leaf for rule in self.rules])}. Add a rule for it, "
                "with no target if it is not to be sent"
            )
        if len(fitting) > 1:
            raise MappingError(f"the leaf {leaf!r} fits several rules: {_some([rule.leaf for rule, _ in fitting])}")
        return fitting[0]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """`MappingError` unless leaves of these whole shapes make every expected tensor exactly once, and nothing else."""
        if (key := tuple(shapes.items())) in self._checked:
            return
        wanted = {spec.name: spec.shape for spec in self.expected}
        held: dict[str, list[tuple[str, Held]]] = defaultdict(list)
        problems = []
        for leaf, shape in shapes.items():
            try:
                for piece in self.expand(leaf, shape):
                    held[piece.name].append((leaf, piece))
            except MappingError as error:
                problems.append(str(error))
        for name, pieces in held.items():
            leaves, made = _some(sorted({leaf for leaf, _ in pieces})), pieces[0][1].shape
            if wanted and name not in wanted:
                problems.append(f"{name}, from {leaves}: not in the model (a tied head has no leaf of its own)")
            elif wanted and made != wanted[name]:
                problems.append(f"{name}, from {leaves}: comes out as {list(made)}, the model has {list(wanted[name])}")
            elif any(piece.shape != made for _, piece in pieces):
                problems.append(f"{name}, from {leaves}: the leaves disagree on its shape")
            elif problem := exact_cover([piece.box for _, piece in pieces], whole(made)):
                problems.append(f"{name}, from {leaves}: {problem}")
        for name in wanted.keys() - held.keys():
            origin = next((found for rule in self.rules if (found := rule.leaf_of(name))), None)
            problems.append(f"{name}: missing; " + (f"expected a leaf {origin}" if origin else "no rule leads to it"))
        if problems:
            listed = _some(sorted(problems), most=12, between="\n  ")
            raise MappingError(f"the tree does not fit its mapping, {len(problems)} problem(s):\n  {listed}")
        self._checked.add(key)

    def tensors(self, params: Any) -> dict[str, Tensor]:
        """The tree as HF tensors, to be passed where parameters are expected (`bridge.sync`). Nothing is read yet. Of
        leaves that are sharded over processes, this process's shards."""
        leaves = named_tensors(params)
        self.check({name: tuple(leaf.shape) for name, leaf in leaves.items()})
        parts: dict[str, list[Origin]] = defaultdict(list)
        for name, leaf in leaves.items():
            for shard in boxes(leaf):
                for held in self.expand(name, tuple(leaf.shape), shard):
                    parts[held.name].append(Origin(leaf, shard, held))
        return {name: MappedTensor(name, tuple(origins)) for name, origins in parts.items()}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a rectangle of an HF tensor comes from."""

    leaf: Tensor
    shard: Box
    held: Held

    def make(self) -> np.ndarray:
        return self.held.view(read(self.leaf, self.shard))


class MappedTensor:
    """An HF tensor that leaves of another tree hold. It reads only the shards that it needs; what comes is a view of them
    unless a step must copy (`Rotary`, `Scale`)."""

    def __init__(self, name: str, origins: Sequence[Origin]) -> None:
        self.origins = tuple(origins)
        self.shape = origins[0].held.shape
        dtypes = {dtype_name(origin.leaf) for origin in origins}
        if len(dtypes) > 1:
            raise MappingError(f"{name}: its leaves are of several dtypes: {', '.join(sorted(dtypes))}")
        import ml_dtypes

        (kind,) = dtypes
        self.dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)

    @property
    def leaves(self) -> list[Tensor]:
        return [origin.leaf for origin in self.origins]

    def boxes(self) -> tuple[Box, ...]:
        return tuple(origin.held.box for origin in self.origins)

    def read_box(self, box: Box) -> np.ndarray:
        return gather(box, ((origin.held.box, origin.make) for origin in self.origins))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read_box(whole(self.shape)).astype(dtype or self.dtype, copy=bool(copy))


def _held(target: Target, numbers: Mapping[str, int], piece: Expanded) -> Held:
    name = _fill(target.name, {**numbers, **piece.bound})
    if target.within is None:
        return Held(name, piece.shape, piece.box, piece.view)
    dim, start, size = target.within.dim, target.within.start, target.within.size
    if dim >= len(piece.shape) or start + piece.shape[dim] > size:
        raise MappingError(f"{list(piece.shape)} sticks out of {target.within}")
    shape = (*piece.shape[:dim], size, *piece.shape[dim + 1 :])
    low, high = piece.box[dim]
    box = (*piece.box[:dim], (low + start, high + start), *piece.box[dim + 1 :])
    assert volume(box) == volume(piece.box)
    return Held(name, shape, box, piece.view)


def _pattern(template: str) -> re.Pattern[str]:
    """`layers.{layer}.w` as a regular expression with a group of digits; the same placeholder twice is the same number."""
    seen: set[str] = set()
    parts = []
    for literal, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        parts.append(re.escape(literal))
        if name:
            parts.append(f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)")
            seen.add(name)
    return re.compile("".join(parts))


def _fill(template: str, numbers: Mapping[str, int]) -> str:
    try:
        return template.format_map({key: str(number) for key, number in numbers.items()})
    except KeyError as missing:
        raise MappingError(
            f"nothing gives a number for {missing} of {template!r}: neither the leaf nor an Unstack"
        ) from None


def _some(names: Sequence[str], most: int = 6, between: str = ", ") -> str:
    more = f"{between}… and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
