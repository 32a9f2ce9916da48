"""A training run, step by step: what is between two of its records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from slipstream.bridge import Bridge
from slipstream.errors import RewardError
from slipstream.model import decoder
from slipstream.model.config import ModelConfig
from slipstream.observe.mismatch import tokens_of
from slipstream.observe.watch import Watch
from slipstream.rl import resume, state
from slipstream.rl.batch import Batch, make_batch
from slipstream.rl.config import TrainConfig
from slipstream.rl.evaluation import evaluate, require_versions
from slipstream.rl.experience import judged
from slipstream.rl.judge import Judge
from slipstream.rl.learner import Learner
from slipstream.rl.ledger import Ledger
from slipstream.rl.loss import Metrics
from slipstream.rl.prompts import Prompts
from slipstream.rl.records import Evaluation, PhaseSeconds, StepRecord, Stopwatch
from slipstream.rl.reference import Reference
from slipstream.rl.steady import Steady
from slipstream.rl.taken import Taken
from slipstream.rl.tasks import Task
from slipstream.rl.tokens import Codec
from slipstream.types import MemoryReport, RolloutGroup, SyncReport


class Run:
    """A step is `_collect`, `_learn`, `_publish`, all of them timed by its stopwatch."""

    def __init__(
        self,
        config: TrainConfig,
        bridge: Bridge,
        model: ModelConfig,
        codec: Codec,
        task: Task,
        params: decoder.Params,
        start: resume.Start,
        run_dir: Path,
        reference: Reference | None = None,
    ) -> None:
        """`params` is the policy after the warm-up. A run that goes on has its weights from the checkpoint instead; the
        policy that KL pulls towards is `params` all the same."""
        self._config, self._bridge, self._codec, self._task = config, bridge, codec, task
        self._reference = reference
        self.learner = Learner(config.algorithm, model, params, config.seed, config.devices)
        self.step, self._last = start.step, config.steps
        """Steps done, and the last to do."""
        self._cursor, self._evaluated, position = 0, -1, 0
        """Of the cursor: batches of prompts taken."""
        self._recent: deque[float] = deque(maxlen=resume.RECENT_STEPS)
        if start.checkpoint:
            facts = self.learner.load(start.checkpoint)
            self._cursor, self._evaluated, position = facts.cursor, facts.evaluated, facts.journal
            self._recent.extend(facts.recent)
            if resume.finished(config, start.step, self._recent):
                self._last = start.step
        self._first = self._cursor + 1 - config.bound * (1 + config.algorithm.recipe.resample)
        """Batch of prompts that the run before may not have taken all of."""
        self._ledger = Ledger(run_dir if config.algorithm.recipe.resample else None)
        self._steady = Steady(bridge, config.patience, config.in_flight)
        self._prompts = Prompts(config, task, codec, _room(config, model))
        self._rollouts = bridge.rollouts(
            config.bound,
            config.algorithm.prompts,
            late=config.late,
            surplus=config.surplus,
            position=position,
            patience=0.0,  # the patience is `_steady`'s, which also mends what it waits for
        )
        self._synced: SyncReport
        """The last update that has ended."""
        self._saved: deque[int] = deque(maxlen=config.keep_checkpoints)
        """Positions of the checkpoints that are kept."""
        self._watch = Watch(lambda: bridge.verify(self.learner.policy), dtype=config.engine.dtype)

    @property
    def done(self) -> bool:
        return self.step >= self._last

    @property
    def evaluation_missing(self) -> bool:
        """Nobody has said yet how good the policy is that the run begins with, or that it has ended with."""
        return self._evaluated < 0 or (self.done and self._evaluated != self._last)

    def begin(self) -> None:
        """The fleet's next version, whatever number the policy had when it was saved."""
        self._synced = self._steady.sync(self.learner.policy)

    def evaluate(self) -> Evaluation:
        self._finish_sync()
        self._evaluated = self.step
        return self._steady.run(partial(evaluate, self._config, self._bridge, self._task, self._codec, self.step))

    def state(self) -> state.TrainState:
        self._finish_sync()
        facts = state.Facts(
            step=self.step,
            cursor=self._cursor,
            seed=self._config.seed,
            version=self._bridge.version,
            journal=self._rollouts.position,
            recent=tuple(self._recent),
            evaluated=self._evaluated,
        )
        return state.TrainState(self.learner.state.weights, self.learner.state.opt_state, facts)

    def saved(self) -> None:
        """The state is on disk. What was taken before the oldest checkpoint that is kept need not be remembered."""
        self._saved.append(self._rollouts.position)
        if len(self._saved) == self._saved.maxlen:
            self._rollouts.saved(self._saved[0])

    def take_step(self, judge: Judge) -> StepRecord:
        step, clock = self.step + 1, Stopwatch()
        all_ = self._collect(step, judge, clock)
        taken = all_.chosen(self._config.algorithm.prompts)
        batch = make_batch(taken.completions, version=taken.versions, max_tokens=self._config.algorithm.max_tokens)
        if self._reference is not None:
            batch = self._reference.fill(batch)
        batch = self.learner.prepare(batch, taken.rewards, taken.overlong(self._config.algorithm))
        clock.lap("reward")
        mismatch = ""
        if self._config.diagnose_every and step % self._config.diagnose_every == 0:
            mismatch = self._diagnose(batch, taken)
            clock.lap("diagnose")
        known = all_.rewards[judged(all_.rewards)]
        accuracy = float((known >= 1).mean())
        self._recent.append(accuracy)
        if resume.finished(self._config, step, self._recent):
            self._last = step
        metrics, memory = self._learn(step, batch, clock)
        report = self._publish(step, clock, memory)
        self.step = step
        return StepRecord(
            step=step,
            version=max(taken.versions),
            reward=float(known.mean()),
            accuracy=accuracy,
            num_tokens=int(all_.lengths.sum()),
            metrics=metrics,
            seconds=PhaseSeconds(**clock.laps),
            sync=report,
            staleness=_ages(batch),
            mismatch=mismatch,
            memory=memory,
            num_dropped=all_.rewards.size - known.size,
            num_resampled=len(all_.groups) - len(taken.groups),
        )

    def _collect(self, step: int, judge: Judge, clock: Stopwatch) -> Taken:
        """A batch of groups, and others in place of those that teach nothing. What had been taken before the run was
        interrupted is taken again."""
        how, ledger = self._config.algorithm, self._ledger
        ledger.note(step, 1)
        groups = self._take(clock)
        taken, batches = Taken(groups, self._judged(groups, judge, clock)), 1
        while batches <= how.recipe.resample:
            had, enough = ledger.known(step), np.count_nonzero(taken.informative) >= how.prompts
            if had <= batches and (enough or ledger.is_over(step)):
                break
            self._finish_sync()  # what is taken now is for the version that it makes
            clock.lap("sync")
            batches += 1
            ledger.note(step, batches)
            groups = self._take(clock, more=True)
            try:
                rewards = self._judged(groups, judge, clock)
            except RewardError:
                if self._config.reward.on_error == "raise":
                    raise
                rewards = np.full((len(groups), how.group), np.nan, np.float32)  # others of the step were judged
            taken += Taken(groups, rewards)
        return taken

    def _take(self, clock: Stopwatch, more: bool = False) -> list[RolloutGroup]:
        """Submits prompts as far ahead as the mode wants, and waits for a batch of groups; `more` if it is not the step's
        first."""
        config = self._config
        # What the last run had submitted and not taken is known to the gateway; to submit it again changes nothing.
        last = self._cursor + min(1 + config.steps_ahead, self._last - self.step)
        self._steady.run(partial(self._prompts.submit, self._rollouts, self._first, last))
        clock.lap("prepare")
        groups = self._steady.take(self._rollouts, config.generate_timeout, more=more)
        self._cursor += 1
        if not config.bound:
            for group in groups:
                require_versions(group.completions, [group.version] * len(group.completions))
        clock.lap("generate")
        return groups

    def _judged(self, groups: Sequence[RolloutGroup], judge: Judge, clock: Stopwatch) -> np.ndarray:
        rewards = judge(groups, [self._prompts.text(group.id) for group in groups])
        clock.lap("reward")
        return rewards

    def _learn(self, step: int, batch: Batch, clock: Stopwatch) -> tuple[Metrics, dict[str, int]]:
        """Also what engines held before and during it, where they sleep meanwhile."""
        memory: dict[str, int] = {}
        if self._config.take_turns:
            memory["generating"] = _in_use(self._bridge.memory())
            memory["training"] = _in_use(self._bridge.sleep())
            clock.lap("sleep")
        metrics = self.learner.learn(step, batch)
        clock.lap("train")
        return metrics, memory

    def _publish(self, step: int, clock: Stopwatch, memory: dict[str, int]) -> SyncReport:
        """The new weights to every engine. Those that sleep wake up for it, the KV cache last. Where the next batch has been
        submitted already, it is asked for before."""
        if self._config.take_turns:
            memory["syncing"] = _in_use(self._bridge.wake("weights"))
            clock.lap("wake")
        self._finish_sync()
        if self._config.steps_ahead and step < self._last:
            self._rollouts.expect(self._bridge.version + 1)
        if self._config.syncs_meanwhile and step < self._last:
            self._steady.start_sync(self.learner.policy)
        else:
            self._synced = self._steady.sync(self.learner.policy)
        clock.lap("sync")
        if self._config.take_turns:
            memory["woken"] = _in_use(self._bridge.wake())
            clock.lap("wake")
        return self._synced

    def _finish_sync(self) -> None:
        self._synced = self._steady.finish_sync() or self._synced

    def _diagnose(self, batch: Batch, taken: Taken) -> str:
        self._finish_sync()
        trainer = self.learner.logprobs(batch, temperature=1.0)
        found = tokens_of(taken.completions, max(taken.versions), trainer.shape[1])
        return self._watch.see(trainer, found.processed, found.raw, np.asarray(batch.ages), found.mask).sentence


def _room(config: TrainConfig, model: ModelConfig) -> int:
    """Tokens that a prompt may have: as many as the model, the engine and a packed row have room for."""
    limits = (model.max_position_embeddings, config.engine.max_model_len, config.algorithm.row_tokens)
    return min(limit for limit in limits if limit) - config.algorithm.max_tokens


def _ages(batch: Batch) -> dict[str, int]:
    ages, counts = np.unique(np.asarray(batch.ages)[np.asarray(batch.mask) > 0], return_counts=True)
    return {str(age): int(count) for age, count in zip(ages, counts)}


def _in_use(engines: Mapping[str, MemoryReport]) -> int:
    return sum(report.in_use for report in engines.values())
