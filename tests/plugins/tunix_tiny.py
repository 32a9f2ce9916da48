"""Tiny Tunix models of all supported kinds, with random weights, and a tokenizer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.models.gemma import model as gemma2
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

_SHAPE: dict[str, Any] = dict(num_layers=1, embed_dim=32, hidden_dim=48, num_heads=4, num_kv_heads=2, head_dim=16)
_ROPE: dict[str, Any] = dict(vocab_size=96, rope_theta=5000, norm_eps=1e-5)
_LOCAL, _GLOBAL = gemma2.AttentionType.LOCAL_SLIDING, gemma2.AttentionType.GLOBAL


def make(kind: str, seed: int = 0, **over: Any) -> nnx.Module:
    # Shapes only: random weights replace them, and JAX would compile a program for each.
    kinds = {
        "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**(_SHAPE | _ROPE | over)), rngs=nnx.Rngs(0)),
        "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**(_SHAPE | _ROPE | over)), rngs=nnx.Rngs(0)),
        "qwen3": lambda: qwen3.Qwen3(qwen3.ModelConfig(**(_SHAPE | _ROPE | over)), rngs=nnx.Rngs(0)),
        "gemma2": lambda: gemma2.Gemma(gemma2_config(**over), rngs=nnx.Rngs(0)),
        "gemma3": lambda: gemma3.Gemma3(gemma3_config(**over), rngs=nnx.Rngs(0)),
    }
    model = nnx.eval_shape(kinds[kind])
    nnx.update(model, shaken(nnx.state(model, nnx.Param), seed))
    return model


def with_lora(model: nnx.Module, rank: int, alpha: float) -> nnx.Module:
    """Return the model with random adapters on every kernel except the embedding."""
    provider = qwix.LoraProvider(module_path=".*(proj|einsum)", rank=rank, alpha=alpha)

    @nnx.jit
    def apply(model: nnx.Module) -> nnx.Module:
        return qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))

    adapted = apply(model)
    nnx.update(adapted, shaken(nnx.state(adapted, nnx.LoRAParam), seed=2))
    return adapted


def gemma2_config(**over: Any) -> Any:
    own = dict(
        num_embed=96,
        num_layers=2,
        attention_types=(_LOCAL, _GLOBAL),
        sliding_window_size=5,
        attn_logits_soft_cap=3.0,
        final_logit_softcap=4.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
    )
    return gemma2.ModelConfig(**(_SHAPE | own | over))


def gemma3_config(**over: Any) -> Any:
    """Return a model whose sixth layer has full attention."""
    own = dict(
        num_embed=96,
        num_layers=6,
        sliding_window_size=5,
        local_base_frequency=100,
        global_base_frequency=5000,
        global_scale_factor=8.0,
        query_pre_attn_norm=gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        param_dtype=jnp.float32,
    )
    return gemma3.ModelConfig(**(_SHAPE | own | over))


def shaken(state: Any, seed: int) -> Any:
    """Draw random weights, including norms and biases, large enough for distinct logits."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape) + (x.ndim == 1), x.dtype), state)


class Words:
    """A tokenizer of numbers: "7 12" is the tokens 7 and 12. 0 pads, 1 ends, 2 begins."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2


def example() -> Any:
    """`examples/tunix_grpo.py` as a module."""
    path = Path(__file__).parents[2] / "examples" / "tunix_grpo.py"
    spec = importlib.util.spec_from_file_location("tunix_grpo", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["tunix_grpo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
