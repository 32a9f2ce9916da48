"""`ModelConfig`: the architecture of a model, without JAX. `checkpoints/hf_config.py` reads it from `config.json`."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from slipstream.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"
"""Types of layers: attention to the last `sliding_window` tokens, or to all."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Linear scaling (`rope_type: linear`): every wavelength is stretched by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: a router sends each token to `experts_per_token` of `num_experts` MLPs."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner size of one expert."""
    normalize: bool = True
    """Scale the weights of the chosen experts to sum to one."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense MLP instead of experts."""

    @property
    def route_size(self) -> int:
        """Bytes of the number of an expert in `ExpertRoutes`; one number more stands for none."""
        return 1 if self.num_experts < 256 else 2

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"moe.{name} must be positive, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"moe.experts_per_token ({self.experts_per_token}) must be at most moe.num_experts ({self.num_experts})"
            )


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention settings of a layer."""

    scale: float
    """Factor of the attention scores."""
    window: int | None
    """Sliding window: a token attends to itself and the `window - 1` tokens before it; None means to all before it."""
    softcap: float | None
    """Limit scores to (-softcap, softcap) with tanh; None means no limit."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and settings of a decoder-only transformer. `families.family_of(config)` gives its `Family`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearRopeScaling | None = None
    rope_local_theta: float | None = None
    """Rotary base of sliding-window layers, if it differs; never scaled."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    """`SLIDING` or `FULL` for each layer. Empty means that all layers are sliding if `sliding_window` is set."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are divided by its square root; None means `head_dim`."""
    attn_softcap: float | None = None
    """Soft cap on attention scores."""
    final_softcap: float | None = None
    """Soft cap on logits."""
    moe: MoeConfig | None = None
    num_labels: int = 0
    """Outputs of a model for sequence classification, such as a reward model; 0 for a language model."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "float32"
    """Dtype of the checkpoint's weights, by `config.json`. What engines hold them in is `dtype` of their config."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("sliding_window", "query_pre_attn_scalar", "attn_softcap", "final_softcap", "rope_local_theta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive or None, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ConfigError(f"layer_types has {len(self.layer_types)} entries, but num_layers is {self.num_layers}")
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise ConfigError(f"layer_types has {sorted(unknown)}; supported: {SLIDING}, {FULL}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ConfigError(f"layer_types has {SLIDING}, but sliding_window is not set")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        dense = range(self.num_layers) if self.moe is None else self.moe.dense_layers
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    def slides(self, layer: int) -> bool:
        """Return whether this layer attends only to the last `sliding_window` tokens."""
        return self.layer_types[layer] == SLIDING if self.layer_types else self.sliding_window is not None

    def attention(self, layer: int) -> LayerAttention:
        scale = 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)
        return LayerAttention(scale, self.sliding_window if self.slides(layer) else None, self.attn_softcap)

    def has_local_rope(self, layer: int) -> bool:
        return self.rope_local_theta is not None and self.slides(layer)

    def fingerprint(self) -> str:
        """Return a hash of all fields but token ids, context length and dtype: equal if weights are interchangeable."""
        facts = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings", "dtype"):
            del facts[name]
        if not self.num_labels:
            del facts["num_labels"]
        return f"{self.family}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"
