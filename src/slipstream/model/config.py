"""The shape of a model, read from an HF `config.json`. No JAX here: the planner and the gateway read it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
_SAME_AS = {"mistral": "llama"}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind. The family decides what differs: Qwen2 has biases on q, k and v; Qwen3 normalises
    q and k per head."""

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
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"model family {self.family!r} is not known; known: {', '.join(FAMILIES)}")
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
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def fingerprint(self) -> str:
        """Equal on two peers whose weights are interchangeable. Token ids and context length do not matter to that."""
        facts = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings"):
            del facts[name]
        return f"{self.family}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`, as transformers 4 or 5 writes it."""
        model_type = hf.get("model_type")
        family = _SAME_AS.get(str(model_type), str(model_type))
        if family not in FAMILIES:
            known = ", ".join((*FAMILIES, *_SAME_AS))
            raise ConfigError(f"config.json: model_type is {model_type!r}; Slipstream's own decoder knows {known}")
        _refuse_what_would_be_wrong(hf, family)
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        try:
            heads, hidden = int(hf["num_attention_heads"]), int(hf["hidden_size"])
            return cls(
                family=family,
                vocab_size=int(hf["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(hf["intermediate_size"]),
                num_layers=int(hf["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(hf.get("num_key_value_heads") or heads),
                head_dim=int(hf.get("head_dim") or hidden // heads),
                max_position_embeddings=int(hf.get("max_position_embeddings", 2048)),
                rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
                rope_scaling=_rope_scaling(rope),
                rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
                eos_token_ids=_ids(hf.get("eos_token_id")),
                bos_token_id=hf.get("bos_token_id"),
                pad_token_id=hf.get("pad_token_id"),
            )
        except KeyError as missing:
            raise ConfigError(f"config.json lacks {missing}, which a {family} model needs") from None

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that transformers 4 and 5 and vLLM read."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling:
            rope = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return {
            "architectures": [names[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope if self.rope_scaling else None,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": False,
            "hidden_act": "silu",
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) > 1
            else next(iter(self.eos_token_ids), None),
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }

    @classmethod
    def read(cls, directory: str | Path) -> ModelConfig:
        """From a model directory. Chat models name further end-of-sequence tokens in `generation_config.json`."""
        path = Path(directory) / "config.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; a model is a directory with an HF config.json")
        config = cls.from_hf(_read_json(path))
        generation = Path(directory) / "generation_config.json"
        more = _ids(_read_json(generation).get("eos_token_id")) if generation.exists() else ()
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; supported: default, llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _refuse_what_would_be_wrong(hf: Mapping[str, Any], family: str) -> None:
    """A setting we would silently compute differently is an error, not a surprise in the logits."""
    act = hf.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {act!r}; only silu is supported")
    if family != "qwen2" and hf.get("attention_bias"):
        raise ConfigError(f"config.json: attention_bias is set, which {family} models here do not have")
    if hf.get("mlp_bias"):
        raise ConfigError("config.json: mlp_bias is set; biases in the MLP are not supported")
    sliding = hf.get("use_sliding_window") if family.startswith("qwen") else hf.get("sliding_window")
    if sliding:
        raise ConfigError("config.json: sliding-window attention is not supported")
    if hf.get("quantization_config"):
        raise ConfigError("config.json: the checkpoint is quantised; use an unquantised one")
