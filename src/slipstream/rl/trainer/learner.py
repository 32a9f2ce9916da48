"""The trainer's half of a step, without engines: rewards → advantages → updated weights.

A step makes one update of the weights, or `epochs` × `minibatches` updates, each from its share of the completions. With a
correction, all of them compare with the policy before the first update (`Batch.old`).

With `SequenceLogprobs`, all logprobs of the policy are computed as engines do, so that they are equal to the engines' to the
bit. In an update they are the values of the loss, and the train step's own forward pass only provides the gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path

import jax
import numpy as np

from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.model.config import ModelConfig
from slipstream.model.transformer.adapters import with_adapter
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm import compute, experience, forward, sharding
from slipstream.rl.algorithm.batch import Batch, chosen
from slipstream.rl.algorithm.packing import learned_lengths, pack, unpack
from slipstream.rl.algorithm.train_step import TrainState, init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.data.prompts import SHUFFLE_STREAM
from slipstream.rl.reporting.records import UpdateMetrics
from slipstream.rl.trainer import checkpoint
from slipstream.types import Lora


class Learner:
    """The weights and optimizer state, and the updates that move them."""

    def __init__(
        self,
        config: AlgorithmConfig,
        model: ModelConfig,
        params: Params,
        seed: int,
        num_devices: int = 1,
        exact: SequenceLogprobs | None = None,
        adapter: tuple[Lora, Params] | None = None,
    ) -> None:
        """`params` is the initial policy and, unless engines score it, the KL reference. Arrays are sharded over
        `num_devices` (0: all devices of this host). With an `adapter`, its weights are trained, and `params` are frozen."""
        self._config, self._model, self._seed, self._mesh = config, model, seed, sharding.mesh_over(num_devices)
        self.num_devices = 1 if self._mesh is None else self._mesh.size
        self._exact = exact
        config.check_shares(self.num_devices)
        self._lora: Lora | None = None
        trained = params
        if adapter is not None:
            self._lora, trained = adapter
        self._train_step = make_train_step(model, config, self._mesh, self._lora)
        self.state = init_state(trained, model, config, self._mesh)
        dtype = compute.compute_dtype(config.compute, compute.platform())  # to which the forward pass would cast
        self.base: Params | None = None
        """The frozen model that the adapter belongs to; None without one."""
        if adapter is not None:
            self.base = compute.cast(params, dtype)
            if self._mesh is not None:
                self.base = sharding.shard(self.base, sharding.automatic(self._mesh))
        self._reference: Params | None = None
        if config.kl.weight and not config.kl.by_engine:
            self._reference = compute.cast(self.state.policy, dtype) if self.base is None else self.base
        self.logprobs_in_update: UpdateLogprobs | None = None
        """The policy's logprobs of the last update's tokens."""

    @property
    def policy(self) -> Params:
        """What engines are synced to after an update: the model's weights, or the adapter's."""
        return self.state.policy

    @property
    def model_weights(self) -> Params:
        """The weights of the model that engines serve, without an adapter."""
        return self.policy if self.base is None else self.base

    @property
    def _whole(self) -> Params:
        """The policy for a forward pass."""
        if self.base is None or self._lora is None:
            return self.policy
        return with_adapter(self.base, self.policy, self._lora)

    @property
    def dtype(self) -> str:
        """Data type in which the forward pass computes."""
        weights = jax.tree.leaves(self.policy)[0].dtype
        return compute.compute_dtype(self._config.compute, compute.platform()) or str(weights)

    def load(self, path: Path) -> checkpoint.RunProgress:
        """Load weights and optimizer state from a checkpoint; return the rest of it."""
        saved = checkpoint.load(path, self.state.params, self.state.opt_state)
        self.state = TrainState(saved.params, saved.opt_state)
        return saved.progress

    def prepare(self, batch: Batch, rewards: np.ndarray, bonus: np.ndarray | None = None) -> Batch:
        """Add advantages and all else that the update needs: `experience.prepare` with these weights."""
        params, model, config = self.state.params._replace(policy=self._whole), self._model, self._config
        if self._exact is not None and self._reference is not None:
            reference = self._exact(self._reference, batch.tokens, batch.mask > 0, config.temperature)
            batch = batch._replace(reference=reference)
        return experience.prepare(batch, rewards, params, model, config, self._reference, bonus, self._score_in_parts)

    def logprobs(self, batch: Batch, temperature: float) -> np.ndarray:
        """[B, T − 1]: the policy's logprobs of a batch's tokens; with `exact`, only of those that engines sampled."""
        if self._exact is not None:
            # Rows without a reward have mask 0. Where the engine's logprob is 0, too, nothing is lost.
            sampled = (batch.mask > 0) | (batch.logprobs != 0)
            return self._exact(self.policy, batch.tokens, sampled, temperature)
        score = forward.logprob_fn(self._model, temperature, self._config.compute)
        return self._score_in_parts(partial(score, self._whole), batch)

    def update(self, step: int, batch: Batch) -> UpdateMetrics:
        """Update the weights from a prepared batch and wait until they are computed. Metrics are means over the updates. An
        update whose loss or gradient is not finite changes nothing, and is left out of the means unless there is no other."""
        if self._config.num_updates > 1 and self._config.correction.kind != "none":
            batch = batch._replace(old=self.logprobs(batch, self._config.temperature) * batch.mask)
        updates, self.logprobs_in_update = [], UpdateLogprobs(batch, self._config.row_tokens)
        for rows in minibatches(self._config, len(batch.tokens), (self._seed, SHUFFLE_STREAM, step)):
            part = chosen(batch, rows)
            if self._exact is not None:
                exact = self._exact(self.policy, part.tokens, part.mask > 0, self._config.temperature)
                part = part._replace(exact=exact)
            self.state, metrics, logprobs = self._train_step.with_logprobs(self.state, self._packed(part), self.base)
            self.logprobs_in_update.parts.append((rows, logprobs))
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
        if self._mesh is None or len(batch.tokens) % self.num_devices:
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
            chosen(batch, rows), lengths, self._config.row_tokens, self._config.micro_batches * self.num_devices
        )


@dataclass(frozen=True, slots=True)
class UpdateLogprobs:
    """The logprobs of a step's tokens under the weights that the update of their row started from, as the loss computed them.
    Of several updates of a row, those of the first."""

    batch: Batch
    """Before packing."""
    row_tokens: int
    """Length of packed rows; 0 if they are not packed."""
    parts: list[tuple[np.ndarray, jax.Array]] = field(default_factory=list)
    """For each update, its rows of the batch and its logprobs, maybe packed."""

    def rows(self) -> np.ndarray:
        """[B, T − 1]; NaN where nothing is known. Waits for the devices."""
        whole: np.ndarray = np.full(self.batch.mask.shape, np.nan, np.float32)
        for rows, logprobs in reversed(self.parts):
            values: np.ndarray = np.asarray(logprobs, np.float32)
            if self.row_tokens:
                lengths = learned_lengths(chosen(self.batch, rows))
                filled = np.flatnonzero(lengths)
                values = unpack(values, [lengths[row] for row in filled], self.row_tokens)
                rows = rows[filled]
            width = min(whole.shape[1], values.shape[1])
            whole[rows, :width] = values[:, :width]
        return whole


def minibatches(config: AlgorithmConfig, num_rows: int, seed: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the rows of each update of a step: every row once per epoch, shuffled if there are several minibatches."""
    for epoch in range(config.epochs):
        rows = np.arange(num_rows)
        if config.minibatches > 1:
            np.random.default_rng([*seed, epoch]).shuffle(rows)
        yield from np.split(rows, config.minibatches)
