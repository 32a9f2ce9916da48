"""The shape of a model, read from an HF `config.json`. No JAX here: the planner and the gateway read it too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.weights.families import Family, family_named

SLIDING, FULL = "sliding_attention", "full_attention"
"""What a layer may look at: the last `sliding_window` tokens, or all."""

_SETTINGS = {
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "rope_local_theta": "rope_local_base_freq",
}
"""Fields that only some families may set (`Family.settings`), and their names in `config.json`."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Every wavelength is stretched by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A router sends each token through `experts_per_token` of `num_experts` small MLPs."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalise: bool = True
    """The weights of the chosen experts are scaled to sum to one."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense MLP instead."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"moe.{name} must be positive, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"a token cannot go to {self.experts_per_token} of {self.num_experts} experts")


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How the layers of one kind attend."""

    scale: float
    """Of the products of q and k."""
    window: int | None
    """A token sees itself and `window - 1` before it; None: all before it."""
    softcap: float | None
    """Scores are squeezed into (-softcap, softcap)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind: the numbers. What is no number (names, activation, norms) its `Family` knows."""

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
    """Rotary base of layers with a sliding window (unscaled), where it is another."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    """`SLIDING` or `FULL` for each layer. Empty: all slide if there is a window."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are divided by its root; None means `head_dim`."""
    attn_softcap: float | None = None
    final_softcap: float | None = None
    """Of the logits."""
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        family = family_named(self.family)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("sliding_window", "query_pre_attn_scalar", "attn_softcap", "final_softcap", "rope_local_theta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, or None for none, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers, but there are {self.num_layers}")
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise ConfigError(f"layer_types has {sorted(unknown)}; supported: {SLIDING}, {FULL}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ConfigError(f"layer_types has {SLIDING}, but sliding_window is not set")
        for name, setting in _SETTINGS.items():
            if getattr(self, name) and setting not in family.settings:
                raise ConfigError(f"{name} is set, but the config.json of a {self.family} model could not say so")
        if "rope_local_base_freq" in family.settings and self.rope_local_theta is None:
            raise ConfigError(f"a {self.family} model needs rope_local_theta, the rotary base of its local layers")
        if family.has_experts != (self.moe is not None):
            needs = "needs" if family.has_experts else "cannot have"
            raise ConfigError(f"a {self.family} model {needs} experts, but moe is {self.moe}")

    @property
    def definition(self) -> Family:
        return family_named(self.family)

    def slides(self, layer: int) -> bool:
        """Whether this layer sees only the last `sliding_window` tokens."""
        return self.layer_types[layer] == SLIDING if self.layer_types else self.sliding_window is not None

    def attention(self, layer: int) -> LayerAttention:
        scale = 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)
        return LayerAttention(scale, self.sliding_window if self.slides(layer) else None, self.attn_softcap)

    def has_local_rope(self, layer: int) -> bool:
        return self.rope_local_theta is not None and self.slides(layer)

    def fingerprint(self) -> str:
        """Equal on two peers whose weights are interchangeable. Token ids and context length do not matter to that."""
        facts = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings"):
            del facts[name]
        return f"{self.family}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`, as transformers 4 or 5 writes it."""
        from slipstream.model import hf_config

        return hf_config.read(hf)

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that transformers 4 and 5 and vLLM read."""
        from slipstream.model import hf_config

        return hf_config.write(self)

    @classmethod
    def read(cls, directory: str | Path) -> ModelConfig:
        """From a model directory. Chat models name further end-of-sequence tokens in `generation_config.json`."""
        from slipstream.model.hf_config import token_ids

        path = Path(directory) / "config.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; a model is a directory with an HF config.json")
        config = cls.from_hf(_read_json(path))
        generation = Path(directory) / "generation_config.json"
        more = token_ids(_read_json(generation).get("eos_token_id")) if generation.exists() else ()
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found
