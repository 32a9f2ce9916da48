"""The policy that KL pulls towards, held by a fleet of its own.

The trainer's devices then hold one policy less, and make one pass less over a batch. The host keeps a copy, for engines that
are started again."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from slipstream.bridge import Bridge
from slipstream.model.layers import Params
from slipstream.rl.batch import Batch
from slipstream.rl.packing import learned_lengths
from slipstream.rl.steady import Steady


class Reference:
    """Engines that serve one policy all along. What dies of them is waited for, and gets its weights again."""

    def __init__(self, bridge: Bridge, policy: Params, patience: float) -> None:
        self._bridge, self._steady = bridge, Steady(bridge, patience)
        self._steady.sync(policy, kept=jax.device_get(policy))

    def fill(self, batch: Batch) -> Batch:
        """The batch, which is not packed, with `reference`: raw logprobs, which are those of temperature 1."""
        lengths = learned_lengths(batch)
        rows = np.flatnonzero(lengths)
        sequences = [batch.tokens[row, : lengths[row]].tolist() for row in rows]
        found = np.zeros(batch.mask.shape, np.float32)
        for row, score in zip(rows, self._steady.run(partial(self._bridge.score, sequences)), strict=True):
            found[row, : len(score.logprobs)] = score.logprobs
        return batch._replace(reference=found * batch.mask)
