"""LoRA adapters on the devices: for each projection a stack of the matrices A of all slots, and one of B.

Each row of a batch computes with the matrices of its own slot, so that no adapter changes what another row computes. A row
without an adapter has a slot of zeros, the last one. When an adapter arrives, its matrices are padded with zeros to the largest
rank and to all targets, and transposed, which XLA would otherwise do in every step; B is multiplied by `alpha / rank`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from slipstream.config import AdapterConfig
from slipstream.engines.embedded.compute.placement import Placement
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.families import family_tensors, tensors
from slipstream.model.lora import A, B, adapter_support, projections, target_of
from slipstream.model.transformer.layers import LowRank, Params
from slipstream.types import Lora
from slipstream.weights.adapters import unpack

Stacks: TypeAlias = dict[str, LowRank]
"""By projection within a layer, such as `self_attn.q_proj`. A is `[layers, slots + 1, in, rank]`, B is
`[layers, slots + 1, rank, out]`."""

RANKS = 8
"""The largest rank is padded to a multiple of this. With one column, XLA's product adds in another order (`layers.py`)."""


class StagedAdapter(NamedTuple):
    """An adapter that has arrived: arrays as in `Stacks`, on the devices, without the slots."""

    lora: Lora
    matrices: Mapping[str, LowRank]


class AdapterSlots:
    """Changed on the compute thread only."""

    def __init__(self, model: ModelConfig, placement: Placement, config: AdapterConfig) -> None:
        self._tensors = tensors(model)
        self.support = adapter_support(config, self._tensors)
        self._dtype, self._num_layers = placement.dtype, model.num_layers
        self._rank = -(-config.rank // RANKS) * RANKS
        self._slots: dict[str, int] = {}
        """By name of the adapter. Replaced, never changed: other threads read it."""
        self._shapes = self._projections(model)
        self._shardings = self._make_shardings(model, placement, num_leading=2)
        arranged = self._make_shardings(model, placement, num_leading=1)
        self._arrange = jax.jit(self._arranged, static_argnums=(2, 3), out_shardings=arranged)
        self._install = jax.jit(_install, donate_argnums=0, out_shardings=self._shardings)
        self.stacks = self._zeros()
        """In host memory while the engine's weights are asleep."""

    def _projections(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """Return `(out, in)` by projection within a layer."""
        shapes: dict[str, tuple[int, int]] = {}
        for name, shape in projections(tensors(model)).items():
            *_, within = name.split(".", 3)
            if target_of(within) in self.support.targets and shapes.setdefault(within, shape) != shape:
                raise ConfigError(
                    f"adapters need layers of equal shapes: {name} is {shape}, others are {shapes[within]}"
                )
        return shapes

    def _make_shardings(self, model: ModelConfig, placement: Placement, num_leading: int) -> dict[str, LowRank]:
        """B is sharded where its projection's outputs are, and A where its inputs are. Before a matrix's own dimensions come
        `num_leading`: layers and slots, or layers alone."""
        dims = {}
        for tensor in family_tensors(model):
            *_, within = tensor.name.removesuffix(".weight").split(".", 3)
            dims[within] = tensor.split(len(placement.devices))
        return {
            name: LowRank(
                placement.sharding(num_leading if dims[name] == 1 else None),
                placement.sharding(num_leading + 1 if dims[name] == 0 else None),
            )
            for name in self._shapes
        }

    def _zeros(self) -> Stacks:
        num = self._num_layers, self.support.slots + 1

        def stack(rows: int, columns: int, sharding: NamedSharding) -> jax.Array:
            return jnp.zeros((*num, rows, columns), self._dtype, device=sharding)

        return {
            name: LowRank(stack(num_in, self._rank, sharding.a), stack(self._rank, num_out, sharding.b))
            for (name, (num_out, num_in)), sharding in zip(self._shapes.items(), self._shardings.values())
        }

    # --- called by any thread ---

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def prepare(self, lora: Lora, packed: np.ndarray) -> StagedAdapter:
        """Arrange an adapter for its slot. `packed` are its tensors in receive memory (`weights/adapters.py`), which may change
        afterwards."""
        arranged = self._arrange(packed, np.float32(lora.scale), lora.rank, lora.targets)
        return StagedAdapter(lora, jax.block_until_ready(arranged))

    def _arranged(self, packed: jax.Array, scale: jax.Array, rank: int, targets: tuple[str, ...]) -> Stacks:
        """In a compiled program, of which there is one for each rank and choice of targets."""
        arrived = unpack(self._tensors, Lora("any", rank, rank, targets), packed)
        spare = (0, self._rank - rank)

        def stacked(name: str, kind: str, shape: tuple[int, int]) -> jax.Array:
            missing = jnp.zeros(shape, packed.dtype)
            layers = (f"model.layers.{layer}.{name}{kind}" for layer in range(self._num_layers))
            return jnp.stack([arrived.get(layer, missing) for layer in layers])

        matrices = {}
        for name, (num_out, num_in) in self._shapes.items():
            a, b = stacked(name, A, (rank, num_in)), stacked(name, B, (num_out, rank))
            b = (b.astype(jnp.float32) * scale).astype(b.dtype)
            matrices[name] = LowRank(
                jnp.pad(a, ((0, 0), spare, (0, 0))).swapaxes(1, 2), jnp.pad(b, ((0, 0), (0, 0), spare)).swapaxes(1, 2)
            )
        return matrices

    # --- called by the compute thread ---

    def load(self, staged: StagedAdapter) -> None:
        """Put an adapter into its slot, in place, and wait until it is there."""
        name = staged.lora.name
        free = set(range(self.support.slots)) - set(self._slots.values())
        slot = self._slots[name] if name in self._slots else min(free)
        if self.is_asleep:
            for stack, new in zip(jax.tree.leaves(self.stacks), jax.tree.leaves(staged.matrices)):
                stack[:, slot] = new
        else:
            self.stacks = jax.block_until_ready(self._install(self.stacks, dict(staged.matrices), np.int32(slot)))
        self._slots = {**self._slots, name: slot}

    def unload(self, name: str) -> None:
        self._slots = {other: slot for other, slot in self._slots.items() if other != name}

    def rows(self, names: Sequence[str], count: int) -> np.ndarray:
        """Return the slot of each of `count` rows, of which the first have these adapters."""
        slots = np.full(count, self.support.slots, np.int32)
        slots[: len(names)] = [self._slots[name] if name else self.support.slots for name in names]
        return slots

    @property
    def is_asleep(self) -> bool:
        return not all(isinstance(stack, jax.Array) for stack in jax.tree.leaves(self.stacks))

    def sleep(self) -> None:
        """Move the adapters to host memory."""
        self.stacks = jax.tree.map(np.array, self.stacks)

    def wake(self) -> None:
        if self.is_asleep:
            self.stacks = jax.block_until_ready(jax.device_put(self.stacks, self._shardings))


def _install(stacks: Stacks, new: Stacks, slot: jax.Array) -> Stacks:
    return jax.tree.map(lambda stack, own: stack.at[:, slot].set(own), stacks, new)


def with_adapters(params: Params, stacks: Stacks, slots: jax.Array) -> Params:
    """Return the tree of a model in which each row has the adapter of its slot `[rows]`; in a compiled program."""
    layers = []
    for index, layer in enumerate(params["model"]["layers"]):
        for name, stack in stacks.items():
            layer = _with(layer, name.split("."), LowRank(stack.a[index, slots], stack.b[index, slots]))
        layers.append(layer)
    return {**params, "model": {**params["model"], "layers": layers}}


def _with(node: Params, path: Sequence[str], low_rank: LowRank) -> Params:
    """Return a tree with a low-rank change of the projection at `path`, if it has one there."""
    if not path:
        return {**node, "lora": low_rank}
    name, *rest = path
    return {**node, name: _with(node[name], rest, low_rank)} if name in node else node
