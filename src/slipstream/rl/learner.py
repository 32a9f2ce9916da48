"""The trainer's half of a step, which no engine takes part in: from rewards to new weights.

A step is one update of the weights, or `epochs` times `minibatches` of them. Each has its share of the completions; what the
policy thought of them before the first (`Batch.old`) is what a correction compares with in all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path

import jax
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.layers import Params
from slipstream.rl import experience, sharding, state
from slipstream.rl.batch import Batch, chosen
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.loss import Metrics
from slipstream.rl.packing import learned_lengths, pack
from slipstream.rl.prompts import SHUFFLE_STREAM
from slipstream.rl.train_step import TrainState, init_state, make_train_step


class Learner:
    """Weights and optimiser state, and how they move."""

    def __init__(
        self, config: AlgorithmConfig, model: ModelConfig, params: Params, seed: int, num_devices: int = 1
    ) -> None:
        """`params` is where training starts, and the policy that KL pulls towards, unless engines hold that. With several
        devices (0: all of this host) all arrays are cut over them."""
        self._config, self._model, self._seed, self._mesh = config, model, seed, sharding.mesh_over(num_devices)
        self._num_devices = 1 if self._mesh is None else self._mesh.size
        config.check_shares(self._num_devices)
        self._train_step = make_train_step(model, config, self._mesh)
        self.state = init_state(params, model, config, self._mesh)
        self._reference = self.state.policy if config.kl.weight and not config.kl.by_engine else None

    @property
    def policy(self) -> Params:
        """What engines are synced with."""
        return self.state.policy

    def load(self, checkpoint: Path) -> state.Facts:
        """Goes on with the weights and the optimiser state of a checkpoint. What it says besides."""
        saved = state.load(checkpoint, self.state.weights, self.state.opt_state)
        self.state = TrainState(saved.params, saved.opt_state)
        return saved.facts

    def prepare(self, batch: Batch, rewards: np.ndarray, bonus: np.ndarray | None = None) -> Batch:
        """`experience.prepare`, with these weights."""
        weights, model, config = self.state.weights, self._model, self._config
        return experience.prepare(batch, rewards, weights, model, config, self._reference, bonus, self._over)

    def logprobs(self, batch: Batch, temperature: float) -> np.ndarray:
        """[B, T − 1]: what the policy gives to a batch's tokens."""
        return self._over(partial(experience.scorer(self._model, temperature), self.policy), batch)

    def learn(self, step: int, batch: Batch) -> Metrics:
        """Moves the weights by what a prepared batch teaches; the metrics are means over the updates. Returns once the new
        weights are computed."""
        if self._config.num_updates > 1 and self._config.correction.kind != "none":
            batch = batch._replace(old=self.logprobs(batch, self._config.temperature) * batch.mask)
        found = []
        for rows in shares(self._config, len(batch.tokens), (self._seed, SHUFFLE_STREAM, step)):
            self.state, metrics = self._train_step(self.state, self._packed(chosen(batch, rows)))
            found.append(metrics)
        jax.block_until_ready(self.state)
        # Added up from the first, not from 0: the mean of one −0.0 is that.
        return Metrics(**jax.tree.map(lambda *each: reduce(operator.add, map(float, each)) / len(each), *found))

    def _over(self, score: Callable[[Batch], jax.Array], batch: Batch) -> np.ndarray:
        """See `experience.Over`: all rows at once, or, where memory is short, as many as a micro-batch of an update has."""
        config, num_rows = self._config, len(batch.tokens)
        num_parts = config.minibatches * config.micro_batches if config.micro_batches > 1 else 1
        parts = np.array_split(np.arange(num_rows), min(num_parts, num_rows))
        return np.concatenate([np.asarray(score(self._placed(chosen(batch, rows)))) for rows in parts])

    def _placed(self, batch: Batch) -> Batch:
        """Each device with its rows, where they can be shared out; packed ones need not be equally many before."""
        if self._mesh is None or len(batch.tokens) % self._num_devices:
            return batch
        return sharding.shard_rows(batch, self._mesh)

    def _packed(self, batch: Batch) -> Batch:
        """In rows of `row_tokens`, where there are any; sequences that nothing is learned from are left out."""
        if not self._config.row_tokens:
            return batch
        lengths = learned_lengths(batch)
        rows = np.flatnonzero(lengths)
        lengths = [lengths[row] for row in rows]
        return pack(
            chosen(batch, rows), lengths, self._config.row_tokens, self._config.micro_batches * self._num_devices
        )


def shares(config: AlgorithmConfig, num_rows: int, seed: Sequence[int]) -> Iterator[np.ndarray]:
    """Which rows each update of a step learns from: in every epoch each row once. One minibatch has them in their order."""
    for epoch in range(config.epochs):
        rows = np.arange(num_rows)
        if config.minibatches > 1:
            np.random.default_rng([*seed, epoch]).shuffle(rows)
        yield from np.split(rows, config.minibatches)
