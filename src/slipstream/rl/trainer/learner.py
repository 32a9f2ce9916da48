"""The trainer's half of a step, without engines: rewards → advantages → updated weights.

A step makes one update of the weights, or `epochs` × `minibatches` updates, each from its share of the completions. With a
correction, all of them compare with the policy before the first update (`Batch.old`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path

import jax
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm import experience, forward, sharding
from slipstream.rl.algorithm.batch import Batch, chosen
from slipstream.rl.algorithm.packing import learned_lengths, pack
from slipstream.rl.algorithm.train_step import TrainState, init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.data.prompts import SHUFFLE_STREAM
from slipstream.rl.reporting.records import UpdateMetrics
from slipstream.rl.trainer import checkpoint


class Learner:
    """The weights and optimizer state, and the updates that move them."""

    def __init__(
        self, config: AlgorithmConfig, model: ModelConfig, params: Params, seed: int, num_devices: int = 1
    ) -> None:
        """`params` is the initial policy and, unless engines score it, the KL reference. Arrays are sharded over
        `num_devices` (0: all devices of this host)."""
        self._config, self._model, self._seed, self._mesh = config, model, seed, sharding.mesh_over(num_devices)
        self._num_devices = 1 if self._mesh is None else self._mesh.size
        config.check_shares(self._num_devices)
        self._train_step = make_train_step(model, config, self._mesh)
        self.state = init_state(params, model, config, self._mesh)
        self._reference = self.state.policy if config.kl.weight and not config.kl.by_engine else None

    @property
    def policy(self) -> Params:
        return self.state.policy

    def load(self, path: Path) -> checkpoint.RunProgress:
        """Load weights and optimizer state from a checkpoint; return the rest of it."""
        saved = checkpoint.load(path, self.state.params, self.state.opt_state)
        self.state = TrainState(saved.params, saved.opt_state)
        return saved.progress

    def prepare(self, batch: Batch, rewards: np.ndarray, bonus: np.ndarray | None = None) -> Batch:
        """Add advantages and all else that the update needs: `experience.prepare` with these weights."""
        params, model, config = self.state.params, self._model, self._config
        return experience.prepare(batch, rewards, params, model, config, self._reference, bonus, self._score_in_parts)

    def logprobs(self, batch: Batch, temperature: float) -> np.ndarray:
        """[B, T − 1]: the policy's logprobs of a batch's tokens."""
        return self._score_in_parts(partial(forward.logprob_fn(self._model, temperature), self.policy), batch)

    def update(self, step: int, batch: Batch) -> UpdateMetrics:
        """Update the weights from a prepared batch and wait until they are computed. Metrics are means over the updates. An
        update whose loss or gradient is not finite changes nothing, and is left out of the means unless there is no other."""
        if self._config.num_updates > 1 and self._config.correction.kind != "none":
            batch = batch._replace(old=self.logprobs(batch, self._config.temperature) * batch.mask)
        updates = []
        for rows in minibatches(self._config, len(batch.tokens), (self._seed, SHUFFLE_STREAM, step)):
            self.state, metrics = self._train_step(self.state, self._packed(chosen(batch, rows)))
            updates.append(metrics)
        jax.block_until_ready(self.state)
        values = [{name: float(value) for name, value in metrics.items()} for metrics in updates]
        finite = [v for v in values if math.isfinite(v["loss"]) and math.isfinite(v["gradient_norm"])]
        # Summed from the first value, not from 0: the mean of a single −0.0 stays −0.0.
        kept = finite or values
        means = {name: reduce(operator.add, (v[name] for v in kept)) / len(kept) for name in kept[0]}
        return UpdateMetrics(**means, num_skipped=len(values) - len(finite))

    def _score_in_parts(self, score: Callable[[Batch], jax.Array], batch: Batch) -> np.ndarray:
        """`experience.ApplyScore`: score all rows at once, or with micro-batches as many rows as a micro-batch has."""
        config, num_rows = self._config, len(batch.tokens)
        num_parts = config.minibatches * config.micro_batches if config.micro_batches > 1 else 1
        parts = np.array_split(np.arange(num_rows), min(num_parts, num_rows))
        return np.concatenate([np.asarray(score(self._placed(chosen(batch, rows)))) for rows in parts])

    def _placed(self, batch: Batch) -> Batch:
        """The rows sharded over the devices, where their number is divisible; before packing it need not be."""
        if self._mesh is None or len(batch.tokens) % self._num_devices:
            return batch
        return sharding.shard_rows(batch, self._mesh)

    def _packed(self, batch: Batch) -> Batch:
        """The batch in rows of `row_tokens`, if set. Sequences without a token to learn from are left out."""
        if not self._config.row_tokens:
            return batch
        lengths = learned_lengths(batch)
        rows = np.flatnonzero(lengths)
        lengths = [lengths[row] for row in rows]
        return pack(
            chosen(batch, rows), lengths, self._config.row_tokens, self._config.micro_batches * self._num_devices
        )


def minibatches(config: AlgorithmConfig, num_rows: int, seed: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the rows of each update of a step: every row once per epoch, shuffled if there are several minibatches."""
    for epoch in range(config.epochs):
        rows = np.arange(num_rows)
        if config.minibatches > 1:
            np.random.default_rng([*seed, epoch]).shuffle(rows)
        yield from np.split(rows, config.minibatches)
