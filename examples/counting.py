"""Shared by the examples of model libraries: a small Llama config, a toy task (counting), and a check after every sync
that the engine computes the same as the model."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slipstream
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.model.tree import unflatten
from slipstream.weights.sources.named_tensors import Tensor

CONFIG = ModelConfig(
    family="llama",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
PROMPT, COUNT, LENGTH = (3, 4, 5), 8, 12
STEPS, LEARNING_RATE = 20, 3e-3
GREEDY = slipstream.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)

_reference = jax.jit(decoder.forward, static_argnums=1)

Logits = Callable[[jax.Array], jax.Array]
"""From token ids `[batch, time]` to logits `[batch, time, vocab]`."""


def batch(step: int) -> jax.Array:
    """Return sequences of consecutive numbers with random starts, modulo the vocabulary size."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (16, 1))
    return jnp.asarray((starts + np.arange(LENGTH)) % CONFIG.vocab_size, jnp.int32)


def loss_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


@contextlib.contextmanager
def engine() -> Iterator[slipstream.Bridge]:
    """Start an engine in this process, without weights until the first sync."""
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(to_hf(CONFIG)))
        with slipstream.inprocess(model, engine=slipstream.EmbeddedConfig(max_num_seqs=8)) as bridge:
            yield bridge


def compare(bridge: slipstream.Bridge, tensors: Mapping[str, Tensor], logits_of: Logits) -> None:
    """Sync a model, and compare its forward pass with Slipstream's decoder on the mapped tensors, and its greedy tokens
    with the engine's."""
    ids = batch(1000)
    params = unflatten({name: jnp.asarray(np.asarray(tensor)) for name, tensor in tensors.items()})
    gap = float(jnp.abs(logits_of(ids) - _reference(params, CONFIG, ids)).max())
    report = bridge.sync(tensors)
    (completion,) = bridge.generate([PROMPT], GREEDY)
    same = completion.token_ids == greedy(logits_of)
    shown = " ".join(map(str, completion.token_ids))
    print(f"version {report.version}: 3 4 5 → {shown}  max logit difference {gap:.1e}  same tokens: {same}")
    if gap > 1e-4 or not same:
        raise SystemExit("the engine does not compute the same as the model: is the mapping right?")


def greedy(logits_of: Logits) -> tuple[int, ...]:
    """Return the model's greedy tokens. Attention is causal, so that padding on the right keeps one compiled shape."""
    ids = jnp.zeros((1, len(PROMPT) + COUNT), jnp.int32).at[0, : len(PROMPT)].set(jnp.array(PROMPT))
    for end in range(len(PROMPT), ids.shape[1]):
        ids = ids.at[0, end].set(logits_of(ids)[0, end - 1].argmax())
    return tuple(ids[0, len(PROMPT) :].tolist())
