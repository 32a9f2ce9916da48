"""Hands what a training run does to the recorder (`observe/recorder`), if it is on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.observe.recorder.rollouts import StepRollouts, TrainedTokens
from slipstream.observe.recorder.run_recorder import Phase, RecordedStep, RunRecorder
from slipstream.rl.algorithm.batch import Batch
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.loggers import scalars
from slipstream.rl.reporting.records import Evaluation, StepRecord, Stopwatch
from slipstream.rl.trainer.learner import UpdateLogprobs
from slipstream.rl.trainer.step_batch import StepBatch
from slipstream.runtime.clock import now
from slipstream.types import SyncReport


@contextmanager
def open_recording(config: TrainConfig, run_dir: Path, model_dir: Path, step: int) -> Iterator[Recording]:
    """The record of a run that continues after `step`."""
    if not config.record.enabled:
        yield Recording(None)
        return
    with RunRecorder(run_dir, config.record, step, config.model_dump(), model_dir / "tokenizer.json") as recorder:
        yield Recording(recorder)


class Recording:
    def __init__(self, recorder: RunRecorder | None) -> None:
        self._recorder = recorder

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Record how long something takes that is not part of a step."""
        start = now()
        try:
            yield
        finally:
            if self._recorder is not None:
                self._recorder.phases([Phase(name, start, now())], step)

    def step(
        self,
        record: StepRecord,
        clock: Stopwatch,
        collected: StepBatch,
        chosen: StepBatch,
        prompts: Sequence[str],
        batch: Batch,
        logprobs: UpdateLogprobs | None,
    ) -> None:
        """Record a step. `prompts` are the texts of the groups that were collected, and `batch` is what the chosen ones became,
        before packing."""
        if self._recorder is None:
            return
        rows, first = {}, 0
        for group in chosen.groups:
            rows[id(group)] = first
            first += len(group.completions)
        trained = TrainedTokens(
            *(batch.tokens, batch.mask, batch.logprobs, batch.advantages, batch.ages),
            trainer_logprobs=None if logprobs is None else logprobs.rows,
        )
        groups = collected.groups
        rollouts = StepRollouts(
            groups, prompts, collected.rewards, collected.parts, [rows.get(id(group), -1) for group in groups], trained
        )
        self._recorder.step(
            RecordedStep(
                step=record.step,
                at=now(),
                scalars={name.replace("/", "_"): value for name, value in scalars(record).items()},
                phases=clock.phases,
                sync=record.sync,
                rollouts=rollouts,
                diagnosis=record.mismatch,
            )
        )

    def evaluation(self, record: Evaluation) -> None:
        if self._recorder is not None:
            splits = (record.sampled_train, record.greedy_train, record.sampled_heldout, record.greedy_heldout)
            self._recorder.evaluation(record.step, now(), record.version, splits)

    def sync(self, report: SyncReport, step: int, meanwhile: bool = False) -> None:
        """Record a sync that is no phase of a step. `meanwhile`: the trainer did not wait for it."""
        if self._recorder is not None:
            self._recorder.sync(report, step, meanwhile)
