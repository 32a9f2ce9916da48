"""Convert between `ModelConfig` and an HF `config.json`, as written by transformers 4 and 5.

Settings that the decoder does not support are refused by name. Missing ones have the default of the family's config class in
transformers (`Family.defaults`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, UnknownArchitecture
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.config import FULL, SLIDING, LinearRopeScaling, ModelConfig, MoeConfig, RopeScaling
from slipstream.model.families import Family, family_named, family_of, is_known, names

_SPECIAL = {
    "attention_bias": "biases in attention",
    "mlp_bias": "biases in the MLP",
    "sliding_window": "sliding-window attention",
    "use_sliding_window": "sliding-window attention",
    "use_bidirectional_attention": "attention in both directions",
    "query_pre_attn_scalar": "separate scale of attention scores",
    "attn_logit_softcapping": "soft cap on attention scores",
    "final_logit_softcapping": "soft cap on logits",
    "rope_local_base_freq": "rotary base for local layers",
}
"""Settings that change the result, allowed only for families that list them in `Family.settings`."""

_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
"""Ends of the names of classes in `transformers`."""
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def read_config(model: str | Path) -> ModelConfig:
    """Read the config of a model directory or a model of the Hub. `generation_config.json` may add end-of-sequence tokens."""
    directory = model_directory(model, weights=False)
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; a model is a directory with an HF config.json, or org/name on the Hub"
        )
    config = from_hf(read_json(path))
    return replace(config, eos_token_ids=with_generation_ends(directory, config.eos_token_ids))


def with_generation_ends(directory: Path, ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return end-of-sequence tokens with those of `generation_config.json`."""
    generation = directory / "generation_config.json"
    more = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
    return tuple(dict.fromkeys((*ends, *more)))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object."""
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(found).__name__}")
    return found


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Parse the contents of a `config.json` written by transformers 4 or 5."""
    if hf.get("model_type") == "gemma3":
        hf = _text_config(hf)
    model_type = hf.get("model_type")
    if not is_known(str(model_type)):
        known = ", ".join(names())
        raise UnknownArchitecture(
            f"config.json: model_type {model_type!r} is not supported; supported: {known}. Engines of kind 'vllm' serve "
            "every model that vLLM does"
        )
    family = family_named(str(model_type))
    _check_supported(hf, family)
    hf = {**family.defaults, **hf}
    try:
        heads, hidden, num_layers = int(hf["num_attention_heads"]), int(hf["hidden_size"]), int(hf["num_hidden_layers"])
        theta, scaling, local_theta = _rope(hf, family)
        config = ModelConfig(
            family=family.name,
            vocab_size=int(hf["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(hf.get("head_dim") or hidden // heads),
            max_position_embeddings=int(hf.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_local_theta=local_theta,
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            sliding_window=_number(hf, family, "sliding_window", int),
            layer_types=_layer_types(hf, family, num_layers),
            query_pre_attn_scalar=_number(hf, family, "query_pre_attn_scalar", float),
            attn_softcap=_number(hf, family, "attn_logit_softcapping", float),
            final_softcap=_number(hf, family, "final_logit_softcapping", float),
            moe=_moe(hf, family, num_layers) if family.has_experts else None,
            num_labels=num_labels(hf),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=hf.get("bos_token_id"),
            pad_token_id=hf.get("pad_token_id"),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        )
        family_of(config)  # refuse settings that the family does not have
        return config
    except KeyError as missing:
        raise ConfigError(f"config.json has no {missing}, which a {family.name} model needs") from None


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of a `config.json` for transformers 4 and 5 and vLLM."""
    family = family_of(config)
    activation = _ACTIVATIONS[family.activation][0]
    ends = list(config.eos_token_ids)
    hf: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        **_rope_to_hf(config),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "hidden_act": activation,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.dtype,
    }
    if config.num_labels:
        hf["architectures"] = [family.architecture.replace(_LANGUAGE_MODEL, _CLASSIFIER)]
        hf["id2label"] = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    if activation != "silu":
        hf["hidden_activation"] = activation
    scalar = config.query_pre_attn_scalar or config.head_dim
    special: dict[str, Any] = {
        "sliding_window": config.sliding_window,
        "layer_types": [SLIDING if config.slides(i) else FULL for i in range(config.num_layers)],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # transformers 5 requires int
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if moe := config.moe:
        hf |= {"num_experts": moe.num_experts, "num_local_experts": moe.num_experts}
        hf["num_experts_per_tok"] = moe.experts_per_token
        special |= {"moe_intermediate_size": moe.intermediate_size, "norm_topk_prob": moe.normalize}
        special |= {"mlp_only_layers": list(moe.dense_layers), "decoder_sparse_step": 1}
    hf |= {name: value for name, value in special.items() if name in family.settings}
    return hf


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of `generation_config.json`: the special tokens that generation needs."""
    hf = to_hf(config)
    return {name: hf[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hf[name] is not None}


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in `eos_token_id`: one, several or none."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder of a text-and-image model. Settings of the whole model win."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: a {hf['model_type']} needs a text_config, found {text!r}")
    tokens = ("eos_token_id", "bos_token_id", "pad_token_id")
    shared = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", *tokens)
    return {"model_type": "gemma3_text", **text, **{name: hf[name] for name in shared if hf.get(name) is not None}}


def _check_supported(hf: Mapping[str, Any], family: Family) -> None:
    """Raise for settings that the decoder would silently ignore, which would give wrong logits."""
    for name in ("hidden_act", "hidden_activation"):
        if (found := hf.get(name)) is not None and found not in _ACTIVATIONS[family.activation]:
            expected = _ACTIVATIONS[family.activation][0]
            raise UnknownArchitecture(
                f"config.json: {name} is {found!r}; for {family.name} models only {expected} is supported"
            )
    # Qwen configs have a window that only use_sliding_window would enable.
    idle = {"sliding_window"} if "use_sliding_window" in hf else set()
    for name, what in _SPECIAL.items():
        if hf.get(name) and name not in family.settings | idle:
            raise UnknownArchitecture(
                f"config.json: {name} is {hf[name]!r} ({what}), which is not supported for {family.name} models"
            )
    if hf.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnknownArchitecture("config.json: partial_rotary_factor is not supported; only whole heads are rotated")
    if hf.get("quantization_config"):
        raise ConfigError("config.json: quantized checkpoints are not supported; use an unquantized one")


def _number(hf: Mapping[str, Any], family: Family, name: str, kind: type) -> Any:
    return kind(hf[name]) if name in family.settings and hf.get(name) is not None else None


def _layer_types(hf: Mapping[str, Any], family: Family, num_layers: int) -> tuple[str, ...]:
    found = hf.get("layer_types")
    if "layer_types" in family.settings:
        # Older configs give the period of layers with full attention.
        period = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or num_layers + 1)
        return tuple(found or (FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers)))
    window = "sliding_window" in family.settings and hf.get("sliding_window")
    if found and set(found) != {SLIDING if window else FULL}:
        raise UnknownArchitecture(
            f"config.json: layer_types is {found}, but all layers of a {family.name} model must have the same type"
        )
    return ()


def num_labels(hf: Mapping[str, Any]) -> int:
    """Return the outputs of a `…ForSequenceClassification`, 0 of other architectures."""
    if not any(str(name).endswith(_CLASSIFIER) for name in hf.get("architectures") or ()):
        return 0
    return int(hf.get("num_labels") or len(hf.get("id2label") or (0, 1)))


def _moe(hf: Mapping[str, Any], family: Family, num_layers: int) -> MoeConfig:
    settings = {name: hf.get(name) for name in family.settings}
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step") or 1
    return MoeConfig(
        num_experts=int(hf["num_experts"] if hf.get("num_experts") is not None else hf["num_local_experts"]),
        experts_per_token=int(hf["num_experts_per_tok"]),
        intermediate_size=int(settings.get("moe_intermediate_size") or hf["intermediate_size"]),
        normalize=bool(settings["norm_topk_prob"]) if "norm_topk_prob" in settings else True,
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )


def _rope(hf: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | LinearRopeScaling | None, float | None]:
    """Return rotary base, scaling, and the base of local layers. transformers 4 has `rope_scaling`; transformers 5 has
    `rope_parameters`, one dict, or one per type of layer."""
    found = hf.get("rope_parameters") or {}
    by_type = any(isinstance(value, Mapping) for value in found.values())
    has_local = "rope_local_base_freq" in family.settings
    if found and by_type != has_local:
        expected = f"one dict each for {FULL} and {SLIDING}" if has_local else "one dict for all layers"
        raise UnknownArchitecture(f"config.json: rope_parameters is {found}; a {family.name} model needs {expected}")
    rope = {**(hf.get("rope_scaling") or {}), **((found.get(FULL) or {}) if by_type else found)}
    local = (found.get(SLIDING) or {}) if by_type else {}
    if _rope_scaling(local) is not None:
        raise UnknownArchitecture(f"config.json: rope_parameters scales {SLIDING} layers, which is not supported")
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    local_theta = float(local.get("rope_theta") or hf["rope_local_base_freq"]) if has_local else None
    return theta, _rope_scaling(rope), local_theta


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | LinearRopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnknownArchitecture("config.json: partial_rotary_factor is not supported; only whole heads are rotated")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=float(rope["factor"]))
    if kind != "llama3":
        raise UnknownArchitecture(
            f"config.json: rope_type {kind!r} is not supported; supported: default, linear, llama3"
        )
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling:
        kind = "llama3" if isinstance(config.rope_scaling, RopeScaling) else "linear"
        scaling = {"rope_type": kind, **asdict(config.rope_scaling)}
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta}
    hf = {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": rope}
    if (theta := config.rope_local_theta) is not None:
        local = {"rope_type": "default", "rope_theta": theta}
        hf |= {"rope_local_base_freq": theta, "rope_parameters": {FULL: rope, SLIDING: local}}
    return hf
