"""A training run. `TrainingRun.take_step` is one step: prompts → completions → rewards → advantages → update → sync."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from slipstream.bridge.bridge import Bridge
from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.errors import ConfigError, SlipstreamError, UpdateNotFinite
from slipstream.model.checkpoints.peft import load_adapter
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.model.transformer.adapters import init_adapter
from slipstream.observe.mismatch import TOLERANCE, disagreeing_engines, engine_logprobs, kl_per_token
from slipstream.observe.mismatch_watch import MismatchWatch
from slipstream.rl.agents.player import EpisodePlayer
from slipstream.rl.algorithm.batch import Batch, make_batch
from slipstream.rl.algorithm.utilization import mfu
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.curriculum import Curriculum
from slipstream.rl.data.data_task import DataTask
from slipstream.rl.data.prompts import PromptSource
from slipstream.rl.data.tasks import DigitTask, ReasoningGymTask, Task
from slipstream.rl.data.tokens import Codec
from slipstream.rl.reporting.records import Evaluation, PhaseSeconds, StepRecord, Stopwatch, UpdateMetrics
from slipstream.rl.rewards.scoring import Scorer
from slipstream.rl.trainer import checkpoint, resume
from slipstream.rl.trainer.batch_log import BatchLog
from slipstream.rl.trainer.collector import RolloutCollector
from slipstream.rl.trainer.evaluation import evaluate
from slipstream.rl.trainer.learner import Learner
from slipstream.rl.trainer.recording import Recording
from slipstream.rl.trainer.recovery import RecoveringBridge
from slipstream.rl.trainer.reference import Reference
from slipstream.rl.trainer.step_batch import StepBatch
from slipstream.runtime import failpoints, tracing
from slipstream.runtime.private_files import private_file
from slipstream.runtime.waiting import waiting_for
from slipstream.types import Lora, MemoryReport, SyncReport

log = logging.getLogger(__name__)

MAX_STEPS_LOST = 10
"""Steps in a row without a finite update after which a run ends."""
EPISODE_JOURNAL = "episodes.sqlite"
"""File of the run directory: the rollout journal of episodes, whose queue is in the trainer's process."""
WORST = 3
"""Completions that are named when an update is not finite."""


class TrainingRun:
    def __init__(
        self,
        config: TrainConfig,
        bridge: Bridge,
        model: ModelConfig,
        codec: Codec,
        task: Task,
        score: Scorer,
        params: decoder.Params,
        start: resume.ResumePoint,
        run_dir: Path,
        reference: Reference | None = None,
        player: EpisodePlayer | None = None,
        recording: Recording | None = None,
    ) -> None:
        """`params` is the policy after the warm-up, and the KL reference; with LoRA, the frozen model. A resumed run loads its
        weights from the checkpoint; its KL reference is still `params`. `player` plays the episodes of an environment."""
        self._score, self._player = score, player
        self._config, self._bridge, self._codec, self._task, self._model = config, bridge, codec, task, model
        self._reference, self._recording = reference, recording or Recording(None)
        exact = None
        if config.deterministic:
            assert config.engine.kind == "embedded", "TrainConfig checks it"
            exact = SequenceLogprobs(model, config.engine)
        lora = config.lora.adapter
        adapter = None if lora is None else (lora, initial_adapter(config, model, lora))
        self.learner = Learner(config.algorithm, model, params, config.seed, config.devices, exact, adapter)
        self.step = start.step
        """Steps done."""
        self._last = config.steps
        """The last step to do."""
        self._recent: deque[float] = deque(maxlen=resume.RECENT_STEPS)
        self._steps_lost = 0
        """Steps in a row without an update."""
        cursor, self._evaluated, position = 0, -1, 0
        if start.checkpoint:
            progress = self.learner.load(start.checkpoint)
            cursor, self._evaluated, position = progress.cursor, progress.evaluated, progress.journal
            self._recent.extend(progress.recent)
            if resume.finished(config, start.step, self._recent):
                self._last = start.step
        self._fleet = RecoveringBridge(bridge, config.patience, config.in_flight, lora)
        self._rollouts = bridge.rollouts(
            config.bound,
            config.algorithm.prompts,
            late=config.late,
            surplus=config.surplus,
            position=position,
            patience=0.0,  # `_fleet` waits instead, and repairs the fleet meanwhile
            generate=None if player is None else player.generate,
            journal=None if player is None else private_file(run_dir / EPISODE_JOURNAL),
            adapter=config.adapter,
        )
        max_prompt_tokens = _max_prompt_tokens(config, model)
        self._curriculum = None
        if isinstance(task, DataTask):
            task.fit(codec.prompts, max_prompt_tokens)
            self._curriculum = Curriculum(task, config.seed, config.algorithm.prompts, run_dir, start.step)
        self._prompts = prompts = PromptSource(config, task, codec, max_prompt_tokens, self._curriculum)
        batch_log = BatchLog(run_dir if config.algorithm.recipe.resample else None)
        self._collector = RolloutCollector(config, self._fleet, self._rollouts, prompts, score, batch_log, cursor)
        self._saved: deque[int] = deque(maxlen=config.keep_checkpoints)
        """Journal positions of the checkpoints on disk."""
        statuses = self._fleet.retry(bridge.status).engines
        engine_dtype = next((engine.info.dtype for engine in statuses), model.dtype)
        self._dtype = max((engine_dtype, self.learner.dtype), key=TOLERANCE.__getitem__)
        """The coarser of engines' and trainer's, for diagnoses."""
        self._watch = MismatchWatch(lambda: bridge.verify(self.learner.model_weights), dtype=self._dtype)

    @property
    def done(self) -> bool:
        return self.step >= self._last

    @property
    def evaluation_missing(self) -> bool:
        """Whether the first or the last policy of the run has not been evaluated."""
        return self._evaluated < 0 or (self.done and self._evaluated != self._last)

    def begin(self) -> None:
        """Sync the policy to the fleet, as its next version; the number in the checkpoint does not matter."""
        if self.learner.base is not None:
            self._recording.sync(self._fleet.sync_base(self.learner.base), self.step)
        self._fleet.sync(self.learner.policy)
        self._recording.sync(self._fleet.last_sync, self.step)

    def take_step(self) -> StepRecord:
        """Prompts → completions → rewards → advantages → update → sync."""
        step, clock, config = self.step + 1, Stopwatch(), self._config.algorithm

        collected = self._collector.collect(step, self._last - self.step, clock)  # prompts → completions → rewards
        chosen = collected.choose(config.prompts)

        batch = make_batch(
            chosen.completions,
            version=chosen.versions,
            max_tokens=self._config.max_completion,
            vocab_size=self._model.vocab_size,
            replay_routes=self._config.replay_routes,
        )
        if self._reference is not None:
            batch = self._reference.add_logprobs(batch)
        batch = self.learner.prepare(batch, chosen.rewards, chosen.overlong_penalty(config))  # advantages
        clock.lap("reward")

        mismatch, kl_without_replay, batch = self._diagnose(step, batch, chosen, clock)
        rewards = collected.known_rewards
        accuracy = float((rewards >= self._config.reward.solved).mean())
        if self._curriculum is not None:
            self._curriculum.record(step, self._pass_rates(collected))
        self._recent.append(accuracy)
        if resume.finished(self._config, step, self._recent):
            self._last = step

        memory = self._sleep_engines(clock)
        failpoints.step("train.update", train_step=step, ids=[group.id for group in chosen.groups])
        traces = [group.traceparent for group in chosen.groups]
        hint = "a shape's first update compiles its programs"
        with (
            waiting_for(f"the update of step {step}", lambda: hint),
            tracing.span_each("train.update", traces, step=step),
        ):
            metrics = self.learner.update(step, batch)
        self._check_finite(step, metrics, batch, chosen)
        failpoints.step("train.updated", train_step=step)
        clock.lap("train")
        sync = self._sync(step, memory, traces, clock)

        self.step = step
        record = StepRecord(
            step=step,
            version=max(chosen.versions),
            reward=float(rewards.mean()),
            accuracy=accuracy,
            num_tokens=int(collected.lengths.sum()),
            metrics=metrics,
            seconds=PhaseSeconds(**clock.laps),
            sync=sync,
            staleness=_tokens_by_age(batch),
            mismatch=mismatch,
            kl_without_replay=kl_without_replay,
            memory=memory,
            num_dropped=collected.rewards.size - rewards.size,
            num_resampled=len(collected.groups) - len(chosen.groups),
            mfu=mfu(self._model, batch, config.epochs, clock.laps["train"], self.learner.num_devices),
        )
        prompts = self._collector.texts(collected.groups)
        self._recording.step(record, clock, collected, chosen, prompts, batch, self.learner.logprobs_in_update)
        return record

    def evaluate(self) -> Evaluation:
        self._fleet.finish_sync()
        self._evaluated = self.step
        score = None if isinstance(self._task, DigitTask | ReasoningGymTask) else self._score
        sample = None if self._player is None else self._player.sample
        work = partial(evaluate, self._config, self._bridge, self._task, self._codec, self.step, score, sample)
        with self._recording.phase("evaluate", self.step):
            record = self._fleet.retry(work)
        self._recording.evaluation(record)
        return record

    def _pass_rates(self, collected: StepBatch) -> dict[str, float]:
        """By prompt: the share of the samples that are solved, of those that have a reward."""
        rates = {}
        for group, rewards in zip(collected.groups, collected.rewards):
            if (known := rewards[~np.isnan(rewards)]).size:
                rates[self._prompts.text(group.id)] = float((known >= self._config.reward.solved).mean())
        return rates

    def state(self) -> checkpoint.RunState:
        self._fleet.finish_sync()
        progress = checkpoint.RunProgress(
            step=self.step,
            cursor=self._collector.cursor,
            seed=self._config.seed,
            version=self._bridge.version,
            journal=self._rollouts.position,
            recent=tuple(self._recent),
            evaluated=self._evaluated,
        )
        return checkpoint.RunState(self.learner.state.params, self.learner.state.opt_state, progress)

    @property
    def position(self) -> int:
        """Position of the last group taken."""
        return self._rollouts.position

    def saved(self) -> None:
        """Call after `state` is on disk. The gateway may then forget rollouts taken before the oldest checkpoint kept."""
        self._saved.append(self._rollouts.position)
        if len(self._saved) == self._saved.maxlen:
            self._rollouts.saved(self._saved[0])

    def _check_finite(self, step: int, metrics: UpdateMetrics, batch: Batch, chosen: StepBatch) -> None:
        """Stop, or warn of, updates whose loss or gradient is not finite. The weights are what they were before them."""
        is_lost = metrics.num_skipped == self._config.algorithm.num_updates
        self._steps_lost = self._steps_lost + 1 if is_lost else 0
        if not metrics.num_skipped:
            return
        text = (
            f"step {step}: loss or gradient is not finite in {metrics.num_skipped} of "
            f"{self._config.algorithm.num_updates} updates (loss {metrics.loss:.3g}, gradient norm "
            f"{metrics.gradient_norm:.3g}); the weights did not change. {self._worst(batch, chosen)}"
        )
        if self._config.on_nonfinite == "stop" or self._steps_lost >= MAX_STEPS_LOST:
            raise UpdateNotFinite(
                f"{text} Lower the learning rate, or resume with on_nonfinite = 'skip' to leave such updates out"
            )
        log.warning("%s", text)

    def _worst(self, batch: Batch, chosen: StepBatch) -> str:
        """Name the completions that trainer and engines disagree about most."""
        gaps = np.abs(self.learner.logprobs(batch, self._config.algorithm.temperature) - batch.logprobs)
        gaps = np.where(np.asarray(batch.mask) > 0, np.nan_to_num(gaps, nan=np.inf), 0.0).max(axis=1)
        ids = [group.id for group in chosen.groups for _ in group.completions]
        rows = [
            f"prompt {ids[row]!r}, sample {completion.sample_index}, engine {completion.engine!r} ({gaps[row]:.3g} nats)"
            for row in np.argsort(-gaps)[:WORST]
            for completion in [chosen.completions[row]]
        ]
        return f"Trainer and engine differ most about {'; '.join(rows)}."

    def _diagnose(
        self, step: int, batch: Batch, chosen: StepBatch, clock: Stopwatch
    ) -> tuple[str, float | None, Batch]:
        """Compare the trainer's logprobs with the engines', every `diagnose_every` steps; empty in the others. Return the KL
        without routing replay, too. Have engines that stand out quarantined, and return the batch without their completions."""
        if not self._config.diagnose_every or step % self._config.diagnose_every:
            return "", None, batch
        self._fleet.finish_sync()
        trainer = self.learner.logprobs(batch, temperature=1.0)
        engine = engine_logprobs(chosen.completions, max(chosen.versions), trainer.shape[1])
        names = [completion.engine for completion in chosen.completions]
        for name, reason in disagreeing_engines(trainer, engine, names, dtype=self._dtype).items():
            self._report(name, reason, since=max(chosen.versions))
            is_kept = np.array([[other != name] for other in names], np.float32)
            batch = batch._replace(mask=batch.mask * is_kept, advantages=batch.advantages * is_kept)
        diagnosis = self._watch.see(trainer, engine.processed, engine.raw, np.asarray(batch.ages), engine.mask)
        if self._config.deterministic and diagnosis.evidence.baseline:
            log.warning(
                "step %d: deterministic is set, but the trainer's logprobs of tokens of its own version differ from the "
                "engines' by %.1e nats on average; docs/on-policy.md says what must be equal on both sides",
                step,
                diagnosis.evidence.baseline,
            )
        sentence, kl_without = diagnosis.sentence, None
        if batch.routes is not None:
            own = self.learner.logprobs(batch._replace(routes=None), temperature=1.0)
            kl, kl_without = (kl_per_token(each, engine.raw, engine.mask) for each in (trainer, own))
            sentence += f" KL with routing replay {kl:.2g}, without {kl_without:.2g} nats per token."
        clock.lap("diagnose")
        return sentence, kl_without, batch

    def _report(self, engine: str, reason: str, since: int) -> None:
        """Have an engine quarantined. Best effort: its completions of this step are left out in any case."""
        try:
            self._bridge.quarantine(engine, f"its logprobs differ from the trainer's. {reason}", since)
        except SlipstreamError as error:
            log.warning("engine %s disagrees with the trainer (%s) and stays in use: %s", engine, reason, error)

    def _sleep_engines(self, clock: Stopwatch) -> dict[str, int]:
        """With `take_turns`, free the engines' memory for the update. Returns the bytes in use before and after."""
        if not self._config.take_turns:
            return {}
        memory = {"generating": _in_use(self._bridge.memory()), "training": _in_use(self._bridge.sleep())}
        clock.lap("sleep")
        return memory

    def _sync(self, step: int, memory: dict[str, int], traces: list[str], clock: Stopwatch) -> SyncReport:
        """Send the new weights to every engine. Sleeping engines wake for it, their KV cache last. Modes that run ahead do
        not wait for the sync to finish; the report is then of the sync before."""
        config, has_next = self._config, step < self._last
        if config.take_turns:
            memory["syncing"] = _in_use(self._bridge.wake("weights"))
            clock.lap("wake")
        self._fleet.finish_sync()
        if config.syncs_meanwhile:
            self._recording.sync(self._fleet.last_sync, step - 1, meanwhile=True)
        if config.steps_ahead and has_next:
            self._rollouts.expect(self._bridge.version + 1)
        spans = tracing.begin_each("train.sync", traces, step=step)
        if config.syncs_meanwhile and has_next:
            self._fleet.start_sync(self.learner.policy).add_done_callback(partial(_end_spans, spans))
        else:
            tracing.end_each(spans, version=self._fleet.sync(self.learner.policy).version)
        clock.lap("sync")
        if config.take_turns:
            memory["woken"] = _in_use(self._bridge.wake())
            clock.lap("wake")
        return self._fleet.last_sync


def initial_adapter(config: TrainConfig, model: ModelConfig, lora: Lora) -> decoder.Params:
    """Return the weights that training an adapter starts from."""
    if not config.lora.path:
        return init_adapter(model, lora, jax.random.key(config.seed))
    weights, stored = load_adapter(config.lora.path, model, lora.name)
    if stored != lora:
        raise ConfigError(
            f"lora.path has an adapter of rank {stored.rank}, alpha {stored.alpha:g} and targets {', '.join(stored.targets)}; "
            f"the config says rank {lora.rank}, alpha {lora.alpha:g} and targets {', '.join(lora.targets)}"
        )
    return jax.tree.map(jnp.asarray, weights)


def _end_spans(spans: list[tracing.TraceSpan], sync: Future[SyncReport]) -> None:
    has_result = not sync.cancelled() and sync.exception() is None
    tracing.end_each(spans, **({"version": sync.result().version} if has_result else {"failed": True}))


def _max_prompt_tokens(config: TrainConfig, model: ModelConfig) -> int:
    """The longest prompt for which model, engine and packed row have room."""
    limits = (model.max_position_embeddings, config.engine.max_model_len, config.algorithm.row_tokens)
    return min(limit for limit in limits if limit) - config.algorithm.max_tokens


def _tokens_by_age(batch: Batch) -> dict[str, int]:
    ages, counts = np.unique(np.asarray(batch.ages)[np.asarray(batch.mask) > 0], return_counts=True)
    return {str(age): int(count) for age, count in zip(ages, counts)}


def _in_use(engines: Mapping[str, MemoryReport]) -> int:
    return sum(report.in_use for report in engines.values())
