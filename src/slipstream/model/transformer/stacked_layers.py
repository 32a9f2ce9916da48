"""Layers as a scan for training: compile time that does not grow with depth, and rematerialization.

Layers that repeat are stacked, and one program for the repeated part is scanned over them. With alternating windows
(Gemma 2 and 3) the repeated part is several layers. The tree of parameters keeps its list of layers (docs/decisions/
0002-tree-mirrors-checkpoint.md): a train step stacks them inside its program, where the copy is the cast to the compute dtype,
and unstacks the gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from slipstream.model.config import ModelConfig
from slipstream.model.transformer.attention import Attention
from slipstream.model.transformer.decoder import RotaryTables, apply_layer
from slipstream.model.transformer.layers import Params

Remat: TypeAlias = Literal["none", "selective", "full"]
"""What the backward pass computes again. `full`: everything inside a layer; only its input is kept. `selective`: all but matrix
products and cuDNN's attention. `none`: nothing."""

_Carry: TypeAlias = tuple[jax.Array, jax.Array]
"""Activations, and in how many layers the routes are the same."""


class LayerGroup(NamedTuple):
    """`repeats` times the same `period` layers, from layer `start`."""

    start: int
    period: int
    repeats: int

    def layers(self, offset: int) -> range:
        """The layers at one place of the period."""
        return range(self.start + offset, self.start + self.period * self.repeats, self.period)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedLayers:
    """`parts[g][p]` holds layers start + p, start + period + p, … of group g: with a leading dimension of `repeats`, or as they
    are if there is only one."""

    parts: list[list[Params]]
    groups: tuple[LayerGroup, ...] = field(metadata={"static": True})


def layer_groups(kinds: Sequence[Hashable]) -> tuple[LayerGroup, ...]:
    """Divide layers into groups, given what distinguishes each: from the first layer on, the repetition that covers most."""
    groups: list[LayerGroup] = []
    start = 0
    while start < len(kinds):
        best = LayerGroup(start, 1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            pattern, repeats = kinds[start : start + period], 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = LayerGroup(start, period, repeats)
        groups.append(best)
        start += best.repeats * best.period
    return tuple(groups)


def stack(layers: Sequence[Params], config: ModelConfig) -> StackedLayers:
    """Stack layers with the same tensors and attention settings."""
    groups = layer_groups([_kind(layer, config, index) for index, layer in enumerate(layers)])

    def part(group: LayerGroup, offset: int) -> Params:
        members = [layers[index] for index in group.layers(offset)]
        stacked: Params = members[0] if len(members) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
        return stacked

    return StackedLayers([[part(group, p) for p in range(group.period)] for group in groups], groups)


def unstack(stacked: StackedLayers) -> list[Params]:
    """Invert `stack`."""
    layers: list[Params] = []
    for group, parts in zip(stacked.groups, stacked.parts):
        for repeat in range(group.repeats):
            layers += parts if group.repeats == 1 else [jax.tree.map(lambda leaf, i=repeat: leaf[i], p) for p in parts]
    return layers


def apply_stacked(
    layers: StackedLayers | Sequence[Params],
    config: ModelConfig,
    x: jax.Array,
    angles: RotaryTables,
    attention: Attention,
    remat: Remat,
    routes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the output of the last layer, `[batch, time, hidden]`, and in how many layers each token's own choice of experts
    is that in `routes`, `[batch, time]`. Layers in a list are unrolled.

    `routes` `[layers with experts, batch, time, experts_per_token]` are as for `feed_forward`; None leaves the choice to the
    routers, and the second result is 0."""
    same = jnp.zeros(x.shape[:2], jnp.int32)
    if not isinstance(layers, StackedLayers):
        for index, layer in enumerate(layers):
            step = _rematerialized(index, config, angles, attention, remat, in_scan=False)
            x, same = step(x, same, layer, _routes_of(config, routes, [index]))
        return x, same
    for group, parts in zip(layers.groups, layers.parts):
        is_scan = group.repeats > 1
        steps = [
            _rematerialized(group.start + p, config, angles, attention, remat, in_scan=is_scan)
            for p in range(group.period)
        ]
        own = [_routes_of(config, routes, group.layers(p)) for p in range(group.period)]

        def body(carry: _Carry, parts: Any, steps: Any = steps) -> tuple[_Carry, None]:
            for step, layer, own in zip(steps, *parts):
                carry = step(*carry, layer, own)
            return carry, None

        (x, same), _ = jax.lax.scan(body, (x, same), (parts, own)) if is_scan else body((x, same), (parts, own))
    return x, same


def _routes_of(config: ModelConfig, routes: jax.Array | None, layers: Sequence[int]) -> jax.Array | None:
    """The routes of layers that are alike, stacked if they are several; None if they have no experts."""
    known = config.expert_layers
    if routes is None or layers[0] not in known:
        return None
    places = [known.index(layer) for layer in layers]
    return routes[places[0]] if len(places) == 1 else routes[jnp.array(places)]


def _kind(layer: Params, config: ModelConfig, index: int) -> Hashable:
    leaves, structure = jax.tree.flatten(layer)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return structure, shapes, config.attention(index), config.has_local_rope(index)


def _rematerialized(
    index: int, config: ModelConfig, angles: RotaryTables, attention: Attention, remat: Remat, *, in_scan: bool
) -> Callable[[jax.Array, jax.Array, Params, jax.Array | None], _Carry]:
    def step(x: jax.Array, same: jax.Array, layer: Params, routes: jax.Array | None) -> _Carry:
        x, _, chosen = apply_layer(layer, config, index, x, angles, attention, routes=routes)
        if routes is None or chosen is None:
            return x, same
        pair = (jnp.sort(each.astype(jnp.int32), axis=-1) for each in (chosen, routes))
        return x, same + jnp.all(jnp.equal(*pair), axis=-1)

    if remat == "none":
        return step
    policy = None if remat == "full" else _is_kept
    # In a scan nothing can be shared with the forward pass by mistake, and the barriers against it cost time.
    return jax.checkpoint(step, policy=policy, prevent_cse=not in_scan)


def _is_kept(primitive: Any, *args: Any, **params: Any) -> bool:
    """Matrix products of weights and activations, not those of attention; cuDNN's attention with its softmax statistics."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
    return bool(is_product) or primitive.name.startswith("dot_product_attention_fwd")
