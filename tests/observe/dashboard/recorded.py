"""Runs for the browser tests: written by the recorder itself, with made-up data. `python -m` this module DIR records until it is
killed."""

import json
import math
import random
import sys
import time
from pathlib import Path

import numpy as np

from slipstream.config import RecordConfig
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.observe.recorder.rollouts import StepRollouts, TrainedTokens
from slipstream.observe.recorder.run_recorder import Phase, RecordedStep, RunRecorder
from slipstream.rl.algorithm.batch import make_batch
from slipstream.runtime import clock
from slipstream.types import (
    CommitReport,
    Completion,
    EngineInfo,
    EngineStatus,
    EngineSync,
    RolloutGroup,
    StageReport,
    SyncReport,
    VersionSpan,
)
from tests.observe.recorded import drain

HOSTILE = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
VOCABULARY = [*"0123456789= +", "\n", "\u202e", "\u2066", "\x07", "\x1b", "\u200b", "é", "日", HOSTILE]
GROUPS, SAMPLES, LONG = 6, 4, 36_000
ENGINES = ("engine-0", "engine-1")
SETTINGS = {"steps": 40, "task": {"name": "reverse"}, "algorithm": {"kind": "grpo"}, "mode": "async", "engines": 2}


def record_run(directory: Path, steps: int = 30, *, first: int = 1, long: bool = False, hostile: bool = False) -> None:
    """A run that finished, with a fleet. `hostile` puts control characters and markup into completions, `long` a completion of
    `LONG` tokens into the last step."""
    start = clock.now() - 0.25 * steps
    with open_recorder(directory, first - 1) as recorder:
        for step in range(first, first + steps):
            at = start + 0.25 * (step - first + 1)
            recorder.step(made_step(step, LONG if long and step == first + steps - 1 else 0, hostile, at))
            drain(recorder)
            if step % 10 == 0:
                recorder.evaluation(
                    step, clock.now(), step, (reward(step), reward(step), 0.9 * reward(step), reward(step))
                )
    record_fleet(directory, first + steps)


def open_recorder(directory: Path, step: int = 0) -> RunRecorder:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = directory / "tokenizer.json"
    vocabulary = {piece: token for token, piece in enumerate(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
    tokenizer.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return RunRecorder(directory, RecordConfig(), step, SETTINGS, tokenizer)


def reward(step: int) -> float:
    return 1 / (1 + math.exp(-(step - 15) / 5))


def made_step(step: int, num_long: int = 0, hostile: bool = False, now: float = 0.0) -> RecordedStep:
    rng, now = random.Random(step), now or clock.now()
    seconds = {"prepare": 0.002, "generate": 0.1, "reward": 0.01, "train": 0.07, "sync": 0.006}
    scalars = {f"seconds_{name}": value * rng.uniform(0.8, 1.2) for name, value in seconds.items()}
    scalars |= {
        "rollout_reward": reward(step),
        "rollout_accuracy": reward(step),
        "rollout_tokens_per_second": rng.gauss(9000, 300),
        "train_kl": abs(rng.gauss(0.002, 0.0005)),
        "train_entropy": 2 - reward(step),
        "train_clip_share": 0.02,
        "train_loss": rng.gauss(0, 0.01),
        "seconds_step": sum(seconds.values()),
        "sync_seconds": 0.004,
        "sync_pause_seconds": 0.0003,
    }
    phases, at = [], now - sum(seconds.values())
    for name, length in seconds.items():
        phases.append(Phase(name, at, at + length))
        at += length
    sync = made_sync(step + 1, now - 0.006)
    return RecordedStep(step, now, scalars, phases, sync, made_rollouts(step, num_long, hostile), "Numerics: rounding.")


def made_sync(version: int, started: float) -> SyncReport:
    engines = tuple(
        EngineSync(name, "shm", StageReport(123_456, 0.0011, 0.001), CommitReport(0.0003, 0.0002), True)
        for name in ENGINES
    )
    return SyncReport(version, 123_456, 0.0001, 0.002, 0.001, 0.0009, 0.004, engines, started=started)


def made_rollouts(step: int, num_long: int, hostile: bool) -> StepRollouts:
    """Group 0 has zero variance; the last sample of each group is cut off; group 1 is one version behind."""
    rng, prompt = random.Random(step), (1, 2, 10)
    groups, rewards = [], np.zeros((GROUPS, SAMPLES))
    for number in range(GROUPS):
        completions = []
        for index in range(SAMPLES):
            rewards[number, index] = 1.0 if number == 0 else float(index % 2)
            size = num_long if num_long and number == index == 0 else 3 + (number + index) % 4
            digits = [rng.randrange(10) for _ in range(size)]
            tokens = list(range(13, len(VOCABULARY))) if hostile and not index and size < LONG else digits
            old = step - 1 if number == 1 else step
            middle = len(tokens) // 2
            spans = (VersionSpan(old, 0, middle), VersionSpan(step, middle, len(tokens)))
            logprobs = tuple(-abs(rng.gauss(0, 0.5)) for _ in tokens)
            completions.append(
                Completion(
                    request_id=f"{step}-{number}",
                    sample_index=index,
                    prompt_token_ids=prompt,
                    token_ids=tuple(tokens),
                    text="".join(VOCABULARY[token] for token in tokens),
                    logprobs=logprobs,
                    raw_logprobs=logprobs,
                    finish_reason="length" if index == SAMPLES - 1 else "stop",
                    spans=spans,
                    engine=ENGINES[number % 2],
                )
            )
        groups.append(
            RolloutGroup(f"{step}-{number}", step * GROUPS + number, step, int(number == 1), tuple(completions))
        )
    return StepRollouts(
        groups,
        ["12="] * GROUPS,
        rewards,
        [{"exact": value} for value in rewards.ravel().tolist()],
        [number * SAMPLES for number in range(GROUPS)],
        trained_tokens(groups, rewards),
    )


def trained_tokens(groups: list[RolloutGroup], rewards: np.ndarray) -> TrainedTokens:
    """The trainer's logprobs differ by a rounding error, and by more at two tokens of each step, of which one may be hostile."""
    completions = [c for group in groups for c in group.completions]
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
    length = max(len(c.token_ids) for c in completions)
    batch = make_batch(completions, version=groups[0].version, max_tokens=length, advantages=advantages)
    gaps = np.where(batch.mask, 0.01 * np.sin(np.arange(batch.mask.shape[1])), 0).astype(np.float32)
    gaps[5, len(completions[5].prompt_token_ids)] = -2.0
    gaps[4, len(completions[4].prompt_token_ids) + len(completions[4].token_ids) - 2] = 1.5
    return TrainedTokens(
        batch.tokens, batch.mask, batch.logprobs, batch.advantages, batch.ages, lambda: batch.logprobs + gaps
    )


def record_fleet(directory: Path, version: int) -> None:
    recorder = FleetRecorder(directory)
    for number, name in enumerate(ENGINES):
        recorder.joined(info(name, version))
        recorder.started(name, 12)
        recorder.tokens(name, 4000 + number)
    for committed in range(max(0, version - 5), version + 1):
        for name in ENGINES:
            start = time.perf_counter()
            recorder.update(
                name,
                committed,
                start - 0.004,
                [("stage", start - 0.002, {"receive": 0.001}), ("commit", start, {"pause": 0.0003})],
            )
            recorder.committed(committed, name)
    recorder.event("quarantine", ENGINES[1], "mean gap 2.3 nats while others agree", version)
    recorder.status([status(ENGINES[0], "ready", version), status(ENGINES[1], "quarantined", version)], version)
    recorder.close()


def info(name: str, version: int) -> EngineInfo:
    return EngineInfo(name, "embedded", "model", "float32", 1, (), (), ("shm",), "node-1", 64, 32, version, pid=4711)


def status(name: str, state: str, version: int) -> EngineStatus:
    note = "" if state == "ready" else "mean gap 2.3 nats while others agree"
    return EngineStatus(
        info(name, version), state, 12 * (state == "ready"), 0.2, note, looked_up_tokens=100, hit_tokens=62
    )  # type: ignore[arg-type]


if __name__ == "__main__":
    run = Path(sys.argv[1])
    recorder = open_recorder(run)
    fleet = FleetRecorder(run)
    for name in ENGINES:
        fleet.joined(info(name, 0))
    for step in range(1, 10_000):
        recorder.step(made_step(step))
        fleet.committed(step, ENGINES[0])
        fleet.status([status(name, "ready", step) for name in ENGINES], step)
        print(step, flush=True)
        sys.stdin.readline()  # one step per line of the test
