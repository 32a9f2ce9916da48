"""The trainer's half of a step, which no engine takes part in: from rewards to new weights."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from slipstream.model.config import ModelConfig
from slipstream.model.layers import Params
from slipstream.rl import experience, state
from slipstream.rl.batch import Batch
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.loss import Metrics
from slipstream.rl.train_step import TrainState, init_state, make_train_step


class Learner:
    """Weights and optimiser state, and how they move."""

    def __init__(self, config: AlgorithmConfig, model: ModelConfig, params: Params) -> None:
        """`params` is where training starts, and the policy that KL pulls towards."""
        self._config, self._model = config, model
        self._train_step = make_train_step(model, config)
        self.state = init_state(params, model, config)
        self._reference = self.state.policy if config.kl.weight else None

    @property
    def policy(self) -> Params:
        """What engines are synced with."""
        return self.state.policy

    def load(self, checkpoint: Path) -> state.Facts:
        """Goes on with the weights and the optimiser state of a checkpoint. What it says besides."""
        saved = state.load(checkpoint, self.state.weights, self.state.opt_state)
        self.state = TrainState(saved.params, saved.opt_state)
        return saved.facts

    def prepare(self, batch: Batch, rewards: np.ndarray) -> Batch:
        """`experience.prepare`, with these weights."""
        return experience.prepare(batch, rewards, self.state.weights, self._model, self._config, self._reference)

    def logprobs(self, batch: Batch, temperature: float) -> np.ndarray:
        """[B, T − 1]: what the policy gives to a batch's tokens."""
        return np.asarray(experience.scorer(self._model, temperature)(self.policy, batch))

    def learn(self, batch: Batch) -> Metrics:
        """Moves the weights by what a prepared batch teaches. Returns once the new ones are computed."""
        self.state, metrics = jax.block_until_ready(self._train_step(self.state, batch))
        return Metrics(**{name: float(value) for name, value in metrics.items()})
