"""What a family says: of itself (`Family`), and of each of its tensors (`FamilyTensor`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slipstream.types import TensorSpec

if TYPE_CHECKING:  # ModelConfig looks its family up here, so that an import at run time would go in a circle
    from slipstream.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """`FamilyTensor("model.layers.0.self_attn.k_proj.weight", (256, 1024), split_dim=0, units=4)`: rows belong to 4 heads
    and are split between heads, never inside one."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None
    """Dimension that tensor parallelism splits; None is held whole by every rank."""
    units: int = 1
    """Indivisible groups along `split_dim`: attention heads, or single rows."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape)

    def split(self, tp: int) -> int | None:
        """The dimension that `tp` ranks split; None when the units cannot be shared out evenly, and all hold the whole."""
        return self.split_dim if tp > 1 and self.units % tp == 0 else None


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms by where they stand; None where there is none. The same name stands in different places
    in different families: Llama's `post_attention_layernorm` comes before the MLP, Gemma's right after attention."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """Names in the feed-forward part of a layer. Experts, where there are some, lie in `block.experts.N`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of decoder: its tensors, and what its forward pass and its `config.json` do beyond a plain Llama's.

    `Family("llama", "LlamaForCausalLM", llama.tensors)` is Llama; see docs/add-a-family.md."""

    name: str
    """The `model_type` of its `config.json`."""
    architecture: str
    """The class in `transformers`, as `config.json` names it."""
    tensors: Callable[[ModelConfig], Iterator[FamilyTensor]]
    """All tensors under their checkpoint names. Biases and q/k norms are applied where they are there."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Norms = Norms()
    norm_offset: float = 0.0
    """Added to the weights of norms. With 1 (Gemma) a weight of zero changes nothing."""
    scale_embedding: bool = False
    """Multiply embeddings by the square root of the hidden size."""
    mlp: Mlp = Mlp()
    has_experts: bool = False
    """Layers have a router and experts, save those that the config leaves dense."""
    settings: frozenset[str] = frozenset()
    """Settings of `config.json` that would change the outcome and that only some families have; this one honours them.
    In other families they are refused. `model/hf_config.py` lists them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the config class in `transformers` assumes where `config.json` is silent, if it differs from Llama's."""
    stored_name: Callable[[str], str | None] = lambda name: name
    """From a name in a checkpoint to ours; None for a tensor that is no part of the decoder."""
