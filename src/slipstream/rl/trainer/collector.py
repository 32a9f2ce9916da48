"""The first half of a step: prompts → completions → rewards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from slipstream.bridge.rollouts import Rollouts
from slipstream.errors import RewardError
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.prompts import PromptSource
from slipstream.rl.reporting.records import Stopwatch
from slipstream.rl.rewards.scoring import Scored, Scorer, group_rewards
from slipstream.rl.trainer.batch_log import BatchLog
from slipstream.rl.trainer.evaluation import require_versions
from slipstream.rl.trainer.recovery import RecoveringBridge
from slipstream.rl.trainer.step_batch import StepBatch
from slipstream.runtime import tracing
from slipstream.types import RolloutGroup


class RolloutCollector:
    def __init__(
        self,
        config: TrainConfig,
        fleet: RecoveringBridge,
        rollouts: Rollouts,
        prompts: PromptSource,
        score: Scorer,
        batch_log: BatchLog,
        cursor: int,
    ) -> None:
        """`cursor` is the number of prompt batches taken before this process."""
        self._config, self._fleet, self._rollouts, self._prompts = config, fleet, rollouts, prompts
        self._score, self._batch_log = score, batch_log
        self.cursor = cursor
        """Prompt batches taken so far."""
        self._first = cursor + 1 - config.bound * (1 + config.algorithm.recipe.resample)
        """The first prompt batch that may have groups the previous process did not take."""

    def collect(self, step: int, steps_left: int, clock: Stopwatch) -> StepBatch:
        """Take a batch of groups and score it. With `resample`, take more batches until enough groups are informative; a
        resumed step takes the batches that it had before the interruption."""
        algorithm, log = self._config.algorithm, self._batch_log
        log.record(step, 1)
        groups = self._take(steps_left, clock)
        collected, num_batches = StepBatch(groups, *self._rewards(groups, clock)), 1
        while num_batches <= algorithm.recipe.resample:
            is_enough = np.count_nonzero(collected.informative) >= algorithm.prompts
            if log.num_batches(step) <= num_batches and (is_enough or log.is_complete(step)):
                break
            self._fleet.finish_sync()  # the next groups count as taken at the version that this sync makes
            clock.lap("sync")
            num_batches += 1
            log.record(step, num_batches)
            groups = self._take(steps_left, clock, more=True)
            try:
                scored = self._rewards(groups, clock)
            except RewardError:
                if self._config.reward.on_error == "raise":
                    raise
                rewards = np.full((len(groups), algorithm.group), np.nan, np.float32)  # earlier batches have rewards
                scored = Scored(rewards, (None,) * rewards.size)
            collected += StepBatch(groups, *scored)
        return collected

    def _take(self, steps_left: int, clock: Stopwatch, more: bool = False) -> list[RolloutGroup]:
        """Submit prompts as far ahead as the mode allows, then wait for one batch of groups. `more`: not the step's first."""
        config = self._config
        # Prompts that the previous process submitted are known to the gateway, which ignores them the second time.
        last = self.cursor + min(1 + config.steps_ahead, steps_left)
        self._fleet.retry(partial(self._prompts.submit, self._rollouts, self._first, last))
        clock.lap("prepare")
        groups = self._fleet.take(self._rollouts, config.generate_timeout, more=more)
        self.cursor += 1
        if not config.bound:
            for group in groups:
                require_versions(group.completions, [group.version] * len(group.completions))
        clock.lap("generate")
        return groups

    def texts(self, groups: Sequence[RolloutGroup]) -> list[str]:
        """The task's prompts of groups."""
        return [self._prompts.text(group.id) for group in groups]

    def _rewards(self, groups: list[RolloutGroup], clock: Stopwatch) -> Scored:
        with tracing.span_each("train.reward", [group.traceparent for group in groups]):
            scored = group_rewards(self._score, groups, self.texts(groups))
        clock.lap("reward")
        return scored
