"""Supervised warm-up: a few steps of imitation, so that a random model solves the task occasionally.

RL needs rewards that vary: a model that is never right gets no gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.rl.algorithm.batch import padded_length
from slipstream.rl.data.tasks import Task
from slipstream.rl.data.tokens import Codec

BATCH = 64
LEARNING_RATE = 3e-3


def cross_entropy(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """−mean log π_θ over the answer tokens; prompt and padding have mask 0."""
    return -jnp.sum(logprobs * mask) / jnp.sum(mask)


def make_examples(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], eos_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Padded `tokens` [B, T] and the `mask` [B, T − 1] of the answers, including the end-of-sequence token."""
    length = padded_length(max(len(p) + len(a) + 1 for p, a in zip(prompts, answers)))
    tokens = np.zeros((len(prompts), length), np.int32)
    mask = np.zeros((len(prompts), length - 1), np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        sequence = [*prompt, *answer, eos_id]
        tokens[row, : len(sequence)] = sequence
        mask[row, len(prompt) - 1 : len(sequence) - 1] = 1
    return tokens, mask


def warm_up(
    params: decoder.Params, model: ModelConfig, task: Task, codec: Codec, *, steps: int, seed: Sequence[int]
) -> Iterator[tuple[decoder.Params, float]]:
    """Yield parameters and cross-entropy after each Adam step; each step uses new training prompts."""
    step, state = _make_step(model), _optimizer().init(params)
    for index in range(steps):
        prompts = task.prompts(np.random.default_rng([*seed, index]), BATCH)
        answers = [task.answer(prompt) for prompt in prompts]
        end, *_ = (*codec.stops, *model.eos_token_ids)
        tokens, mask = make_examples(codec.prompts(prompts), codec.answers(answers), end)
        params, state, loss = step(params, state, tokens, mask)
        yield params, float(loss)


def _optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))


@functools.cache
def _make_step(model: ModelConfig) -> Callable[..., tuple[decoder.Params, optax.OptState, jax.Array]]:
    adam = _optimizer()

    def loss(params: decoder.Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return cross_entropy(decoder.logprobs(params, model, tokens), mask)

    def step(
        params: decoder.Params, state: optax.OptState, tokens: jax.Array, mask: jax.Array
    ) -> tuple[decoder.Params, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens, mask)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step)
