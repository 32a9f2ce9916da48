"""`Family`, the description of a kind of decoder, and `FamilyTensor`, that of one of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.model.config import ModelConfig
from slipstream.types import TensorSpec


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """A tensor and its tensor-parallel sharding.

    `FamilyTensor("model.layers.0.self_attn.k_proj.weight", (256, 1024), split_dim=0, units=4)`: the rows belong to 4 heads and
    are sharded between heads, never inside one."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None
    """Dimension that tensor parallelism shards; None means that every rank holds a replica."""
    units: int = 1
    """Number of indivisible groups along `split_dim`: attention heads, or single rows."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape)

    def split(self, tp: int) -> int | None:
        """Return the dimension that `tp` ranks shard, or None if the units do not divide evenly and all hold replicas."""
        return self.split_dim if tp > 1 and self.units % tp == 0 else None


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms by position; None if there is none. The same name has different positions in different
    families: `post_attention_layernorm` is before the MLP in Llama and directly after attention in Gemma."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Names in the feed-forward part of a layer. Experts, if any, are in `block.experts.N`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of decoder: its tensors, and how its forward pass and `config.json` differ from Llama's.

    `Family("llama", "LlamaForCausalLM", llama.tensors)` is Llama; see docs/add-a-family.md."""

    name: str
    """`model_type` in `config.json`."""
    architecture: str
    """Class in `transformers`, as in `config.json`."""
    tensors: Callable[[ModelConfig], Iterator[FamilyTensor]]
    """Yields all tensors with their checkpoint names. Biases and q/k norms are applied if present."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Norms = Norms()
    norm_offset: float = 0.0
    """Added to the weights of norms: 1 for Gemma, where zero weights are the identity."""
    scale_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    mlp: Mlp = Mlp()
    has_experts: bool = False
    """Whether layers have a router and experts, except those in `MoeConfig.dense_layers`."""
    settings: frozenset[str] = frozenset()
    """Settings of `config.json` that change the result and that this family supports; other families refuse them.
    `model/checkpoints/hf_config.py` lists them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the config class in `transformers` that differ from Llama's."""
    stored_name: Callable[[str], str | None] = lambda name: name
    """Maps a name in a checkpoint to ours; None for a tensor that is not part of the decoder."""
