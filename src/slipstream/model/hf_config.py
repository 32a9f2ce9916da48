"""Between `ModelConfig` and the contents of an HF `config.json`, in the spellings of transformers 4 and 5.

A setting that we would compute differently is refused by name; one that `config.json` leaves out has the value that
the family's config class in transformers gives it (`Family.defaults`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slipstream.errors import ConfigError
from slipstream.model.config import FULL, SLIDING, LinearRopeScaling, ModelConfig, MoeConfig, RopeScaling
from slipstream.weights.families import Family, family_named, names

_SPECIAL = {
    "attention_bias": "biases in attention",
    "mlp_bias": "biases in the MLP",
    "sliding_window": "sliding-window attention",
    "use_sliding_window": "sliding-window attention",
    "use_bidirectional_attention": "attention in both directions",
    "query_pre_attn_scalar": "scale of attention scores of its own",
    "attn_logit_softcapping": "soft cap on attention scores",
    "final_logit_softcapping": "soft cap on logits",
    "rope_local_base_freq": "rotary base for local layers",
}
"""Settings that change the outcome, and that only families that list them in `Family.settings` may set."""

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def read(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("model_type") == "gemma3":
        hf = _text_part(hf)
    model_type = hf.get("model_type")
    if model_type not in names():
        known = ", ".join(names())
        raise ConfigError(f"config.json: model_type is {model_type!r}; Slipstream's own decoder knows {known}")
    family = family_named(str(model_type))
    _refuse_what_would_be_wrong(hf, family)
    hf = {**family.defaults, **hf}
    try:
        heads, hidden, num_layers = int(hf["num_attention_heads"]), int(hf["hidden_size"]), int(hf["num_hidden_layers"])
        theta, scaling, local_theta = _rope(hf, family)
        return ModelConfig(
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
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=hf.get("bos_token_id"),
            pad_token_id=hf.get("pad_token_id"),
        )
    except KeyError as missing:
        raise ConfigError(f"config.json lacks {missing}, which a {family.name} model needs") from None


def write(config: ModelConfig) -> dict[str, Any]:
    family = config.definition
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
        **_written_rope(config),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "hidden_act": activation,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": "float32",
    }
    if activation != "silu":
        hf["hidden_activation"] = activation
    scalar = config.query_pre_attn_scalar or config.head_dim
    special: dict[str, Any] = {
        "sliding_window": config.sliding_window,
        "layer_types": [SLIDING if config.slides(i) else FULL for i in range(config.num_layers)],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # transformers 5 insists on int
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if moe := config.moe:
        hf |= {"num_experts": moe.num_experts, "num_local_experts": moe.num_experts}
        hf["num_experts_per_tok"] = moe.experts_per_token
        special |= {"moe_intermediate_size": moe.intermediate_size, "norm_topk_prob": moe.normalise}
        special |= {"mlp_only_layers": list(moe.dense_layers), "decoder_sparse_step": 1}
    hf |= {name: value for name, value in special.items() if name in family.settings}
    return hf


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is one id, several, or none."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder of a model for text and images. What belongs to the whole stands above, and wins."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: a {hf['model_type']} needs a text_config, found {text!r}")
    whole = ("tie_word_embeddings", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
    return {"model_type": "gemma3_text", **text, **{name: hf[name] for name in whole if hf.get(name) is not None}}


def _refuse_what_would_be_wrong(hf: Mapping[str, Any], family: Family) -> None:
    """A setting we would silently compute differently is an error, not a surprise in the logits."""
    for name in ("hidden_act", "hidden_activation"):
        if (found := hf.get(name)) is not None and found not in _ACTIVATIONS[family.activation]:
            expected = _ACTIVATIONS[family.activation][0]
            raise ConfigError(f"config.json: {name} is {found!r}; a {family.name} model here has {expected}")
    # Qwen configs carry a window that only use_sliding_window would switch on.
    idle = {"sliding_window"} if "use_sliding_window" in hf else set()
    for name, what in _SPECIAL.items():
        if hf.get(name) and name not in family.settings | idle:
            raise ConfigError(f"config.json: {name} is {hf[name]!r}, but a {family.name} model here has no {what}")
    if hf.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError("config.json: partial_rotary_factor is set; only whole heads are rotated here")
    if hf.get("quantization_config"):
        raise ConfigError("config.json: the checkpoint is quantised; use an unquantised one")


def _number(hf: Mapping[str, Any], family: Family, name: str, kind: type) -> Any:
    return kind(hf[name]) if name in family.settings and hf.get(name) is not None else None


def _layer_types(hf: Mapping[str, Any], family: Family, num_layers: int) -> tuple[str, ...]:
    found = hf.get("layer_types")
    if "layer_types" in family.settings:
        # Older configs give the period: every so many layers, one sees everything.
        period = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or num_layers + 1)
        return tuple(found or (FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers)))
    window = "sliding_window" in family.settings and hf.get("sliding_window")
    if found and set(found) != {SLIDING if window else FULL}:
        raise ConfigError(
            f"config.json: layer_types is {found}, but the layers of a {family.name} model here are all alike"
        )
    return ()


def _moe(hf: Mapping[str, Any], family: Family, num_layers: int) -> MoeConfig:
    settings = {name: hf.get(name) for name in family.settings}
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step") or 1
    return MoeConfig(
        num_experts=int(hf["num_experts"] if hf.get("num_experts") is not None else hf["num_local_experts"]),
        experts_per_token=int(hf["num_experts_per_tok"]),
        intermediate_size=int(settings.get("moe_intermediate_size") or hf["intermediate_size"]),
        normalise=bool(settings["norm_topk_prob"]) if "norm_topk_prob" in settings else True,
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )


def _rope(hf: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | LinearRopeScaling | None, float | None]:
    """Base and scaling, and the base of local layers. Scaling in transformers 4: `rope_scaling`; in 5 all is in
    `rope_parameters`, one dict, or one for each type of layer."""
    found = hf.get("rope_parameters") or {}
    by_type = any(isinstance(value, Mapping) for value in found.values())
    has_local = "rope_local_base_freq" in family.settings
    if found and by_type != has_local:
        expected = f"one dict each for {FULL} and {SLIDING}" if has_local else "one dict for all layers"
        raise ConfigError(f"config.json: rope_parameters is {found}; a {family.name} model needs {expected}")
    rope = {**(hf.get("rope_scaling") or {}), **((found.get(FULL) or {}) if by_type else found)}
    local = (found.get(SLIDING) or {}) if by_type else {}
    if _rope_scaling(local) is not None:
        raise ConfigError(f"config.json: rope_parameters scales {SLIDING} layers, which is not supported")
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    local_theta = float(local.get("rope_theta") or hf["rope_local_base_freq"]) if has_local else None
    return theta, _rope_scaling(rope), local_theta


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | LinearRopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError("config.json: partial_rotary_factor is set; only whole heads are rotated here")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=float(rope["factor"]))
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; supported: default, linear, llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _written_rope(config: ModelConfig) -> dict[str, Any]:
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
