"""The KL reference policy, served by a fleet of its own.

The trainer's devices then hold one policy less and make one forward pass less per batch. The bridge keeps a copy of the
weights in host memory, for engines that restart (`rl/trainer/session.py`)."""

from __future__ import annotations

from functools import partial

import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.model.transformer.layers import Params
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.algorithm.packing import learned_lengths
from slipstream.rl.trainer.recovery import RecoveringBridge


class Reference:
    """Engines that serve one fixed policy. Engines that die are waited for and get their weights again."""

    def __init__(self, bridge: Bridge, policy: Params | None, patience: float) -> None:
        """`policy` is None for engines that serve it already: as the base model of the adapter that is trained."""
        self._bridge, self._fleet = bridge, RecoveringBridge(bridge, patience)
        if policy is not None:
            self._fleet.sync(policy)

    def add_logprobs(self, batch: Batch) -> Batch:
        """Set `reference` of an unpacked batch to the engines' raw logprobs (temperature 1)."""
        lengths = learned_lengths(batch)
        rows = np.flatnonzero(lengths)
        sequences = [batch.tokens[row, : lengths[row]].tolist() for row in rows]
        logprobs = np.zeros(batch.mask.shape, np.float32)
        for row, score in zip(rows, self._fleet.retry(partial(self._bridge.score, sequences)), strict=True):
            logprobs[row, : len(score.logprobs)] = score.logprobs
        return batch._replace(reference=logprobs * batch.mask)
