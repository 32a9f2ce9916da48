"""Declarative mappings from a foreign parameter tree to HF tensors: which leaf holds which tensors, in which layout.

    mapping = TreeMapping((
        Rule("embedder.input_embedding", Target("model.embed_tokens.weight")),
        Rule("layers.{layer}.attn.q_proj.w",                            # [D, H, K]
             Target("model.layers.{layer}.self_attn.q_proj.weight", (Permute((1, 2, 0)), Merge(0)))),
        ...
    ), families.tensors(config))
    bridge.sync(mapping.tensors(params))

A placeholder in braces is a number. It comes from the leaf's path or from an `Unstack` transform. `TreeMapping.expand`
is pure: it maps a shard's box to boxes of HF tensors. `TreeMapping.tensors` pairs these with the arrays, which are read
when they are sent. `known_trees.py` has mappings for known libraries."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import MappingError
from slipstream.tensors.boxes import exact_cover, full_box
from slipstream.types import Box, TensorSpec
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.sources.named_tensors import Tensor, assemble, boxes, dtype_name, named_tensors, read
from slipstream.weights.sources.transforms import Shape, Transform, View, Within, expand


@dataclass(frozen=True, slots=True)
class Target:
    """An HF tensor, whose name may have placeholders, and the transforms that make it from the leaf."""

    name: str
    transforms: tuple[Transform, ...] = ()
    within: Within | None = None


class Rule:
    """Leaves whose path matches `leaf` hold the `targets`: several if fused, none if not sent (a buffer)."""

    def __init__(self, leaf: str, *targets: Target) -> None:
        self.leaf, self.targets = leaf, targets
        self._pattern = _pattern(leaf)

    def match(self, name: str) -> dict[str, int] | None:
        """Return the values of the placeholders, or None if the path does not match."""
        return _placeholders(self._pattern, name)

    def leaf_of(self, tensor: str) -> str | None:
        """Return the path of the leaf that should hold an HF tensor, or None if this rule does not make it."""
        for target in self.targets:
            if (placeholders := _placeholders(_pattern(target.name), tensor)) is not None:
                return _fill(self.leaf, placeholders)
        return None


@dataclass(frozen=True, slots=True)
class MappedBox:
    """A box of an HF tensor that a leaf's shard holds; `view(shard)` returns its content."""

    name: str
    shape: Shape
    """Shape of the full HF tensor."""
    box: Box
    view: View


@dataclass(frozen=True)
class TreeMapping:
    """Rules for all leaves of a tree."""

    rules: tuple[Rule, ...]
    expected: tuple[TensorSpec, ...] = ()
    """Tensors that the tree must make, checked by `check` and `tensors`; if empty, only the planner checks."""
    _expanded: dict[object, tuple[MappedBox, ...]] = field(default_factory=dict, compare=False, repr=False)
    _checked: set[object] = field(default_factory=set, compare=False, repr=False)

    def expand(self, leaf: str, shape: Shape, shard: Box | None = None) -> tuple[MappedBox, ...]:
        """Return the boxes of HF tensors that a shard of a leaf holds (the full leaf if `shard` is None). Pure and
        cached, since a trainer that syncs every step asks for the same shards every time."""
        shard = full_box(shape) if shard is None else shard
        key = leaf, shape, shard
        if key not in self._expanded:
            self._expanded[key] = tuple(self._expand(leaf, shape, shard))
        return self._expanded[key]

    def _expand(self, leaf: str, shape: Shape, shard: Box) -> list[MappedBox]:
        rule, placeholders = self._rule(leaf)
        mapped: list[MappedBox] = []
        for target in rule.targets:
            try:
                for made in expand((*target.transforms, *filter(None, [target.within])), shape, shard):
                    name = _fill(target.name, {**placeholders, **made.placeholders})
                    mapped.append(MappedBox(name, made.shape, made.box, made.view))
            except MappingError as error:
                raise MappingError(
                    f"leaf {leaf} {list(shape)} cannot be mapped to {target.name}: {error}. Check that the tree belongs to "
                    "this model and library version, or correct the rule's transforms"
                ) from None
        return mapped

    def _rule(self, leaf: str) -> tuple[Rule, dict[str, int]]:
        matches = [(rule, placeholders) for rule in self.rules if (placeholders := rule.match(leaf)) is not None]
        if not matches:
            raise MappingError(
                f"no rule matches the leaf {leaf!r}; rules: {_some([rule.leaf for rule in self.rules])}. Add a rule for it, "
                "without targets if it is not to be sent"
            )
        if len(matches) > 1:
            raise MappingError(f"the leaf {leaf!r} matches several rules: {_some([rule.leaf for rule, _ in matches])}")
        return matches[0]

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise `MappingError` unless leaves of these global shapes make exactly the expected tensors, each once."""
        if (key := tuple(shapes.items())) in self._checked:
            return
        expected = {spec.name: spec.shape for spec in self.expected}
        mapped: dict[str, list[tuple[str, MappedBox]]] = defaultdict(list)
        problems = []
        for leaf, shape in shapes.items():
            try:
                for box in self.expand(leaf, shape):
                    mapped[box.name].append((leaf, box))
            except MappingError as error:
                problems.append(str(error))
        for name, sources in mapped.items():
            leaves, shape = _some(sorted({leaf for leaf, _ in sources})), sources[0][1].shape
            if expected and name not in expected:
                problems.append(f"{name}, from {leaves}: not in the model (a tied head must not have a leaf)")
            elif expected and shape != expected[name]:
                problems.append(
                    f"{name}, from {leaves}: has shape {list(shape)}, the model expects {list(expected[name])}"
                )
            elif any(box.shape != shape for _, box in sources):
                problems.append(f"{name}, from {leaves}: the leaves disagree on its shape")
            elif problem := exact_cover([box.box for _, box in sources], full_box(shape)):
                problems.append(f"{name}, from {leaves}: {problem}")
        for name in expected.keys() - mapped.keys():
            path = next((path for rule in self.rules if (path := rule.leaf_of(name))), None)
            problems.append(f"{name}: missing; " + (f"expected a leaf {path}" if path else "no rule makes it"))
        if problems:
            listed = _some(sorted(problems), most=12, separator="\n  ")
            raise MappingError(f"the tree does not match its mapping, {len(problems)} problem(s):\n  {listed}")
        self._checked.add(key)

    def tensors(self, params: Any) -> dict[str, Tensor]:
        """Return the tree as HF tensors, for `bridge.sync` and other functions that take parameters. Nothing is read
        yet. For leaves sharded over processes, only this process's shards are included."""
        leaves = named_tensors(params)
        self.check({name: tuple(leaf.shape) for name, leaf in leaves.items()})
        parts: dict[str, list[Origin]] = defaultdict(list)
        for name, leaf in leaves.items():
            for shard in boxes(leaf):
                for mapped in self.expand(name, tuple(leaf.shape), shard):
                    parts[mapped.name].append(Origin(leaf, shard, mapped))
        return {name: MappedTensor(name, tuple(origins)) for name, origins in parts.items()}


@dataclass(frozen=True, slots=True)
class Origin:
    """The leaf and shard that a box of an HF tensor is read from."""

    leaf: Tensor
    shard: Box
    mapped: MappedBox

    def read(self) -> np.ndarray:
        return self.mapped.view(read(self.leaf, self.shard))


class MappedTensor:
    """An HF tensor held by leaves of a foreign tree. Reads only the shards it needs; `Rotary` and `Scale` copy them."""

    def __init__(self, name: str, origins: Sequence[Origin]) -> None:
        self.origins = tuple(origins)
        self.shape = origins[0].mapped.shape
        dtypes = {dtype_name(origin.leaf) for origin in origins}
        if len(dtypes) > 1:
            raise MappingError(f"{name}: its leaves have several dtypes: {', '.join(sorted(dtypes))}")
        self.dtype = numpy_dtype(dtypes.pop())

    @property
    def leaves(self) -> list[Tensor]:
        return [origin.leaf for origin in self.origins]

    def boxes(self) -> tuple[Box, ...]:
        return tuple(origin.mapped.box for origin in self.origins)

    def read_box(self, box: Box) -> np.ndarray:
        return assemble(box, ((origin.mapped.box, origin.read) for origin in self.origins))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read_box(full_box(self.shape)).astype(dtype or self.dtype, copy=bool(copy))


def _pattern(template: str) -> re.Pattern[str]:
    """Compile a template such as `layers.{layer}.w`. A placeholder matches digits; if repeated, the same digits."""
    seen: set[str] = set()
    parts = []
    for literal, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        parts.append(re.escape(literal))
        if name:
            parts.append(f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)")
            seen.add(name)
    return re.compile("".join(parts))


def _placeholders(pattern: re.Pattern[str], name: str) -> dict[str, int] | None:
    match = pattern.fullmatch(name)
    return None if match is None else {key: int(digits) for key, digits in match.groupdict().items()}


def _fill(template: str, placeholders: Mapping[str, int]) -> str:
    try:
        return template.format_map({key: str(number) for key, number in placeholders.items()})
    except KeyError as missing:
        raise MappingError(
            f"the placeholder {missing} of {template!r} has no value: neither the leaf's path nor an Unstack provides one"
        ) from None


def _some(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    more = f"{separator}… and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
