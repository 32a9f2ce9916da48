"""Records of runs that never took place."""

import threading
import time

import numpy as np

from slipstream.config import RecordConfig
from slipstream.observe.recorder.fleet_recorder import FleetRecorder
from slipstream.observe.recorder.rollouts import StepRollouts, TrainedTokens
from slipstream.observe.recorder.run_recorder import Phase, RecordedStep, RunRecorder
from slipstream.rl.algorithm.batch import make_batch
from slipstream.types import (
    CommitReport,
    Completion,
    EngineInfo,
    EngineStatus,
    EngineSync,
    Parameter,
    RolloutGroup,
    StageReport,
    SyncReport,
    VersionSpan,
)

START = 1_700_000_000.0
SETTINGS = {"steps": 8, "task": {"name": "reverse"}, "algorithm": {"kind": "grpo", "group": 3}, "engines": 2, "seed": 5}


def completion(rng, group, sample, length, version, text, engine="engine-0"):
    """One whose weights changed in the middle, if it is long enough."""
    half = length // 2
    spans = (
        (VersionSpan(version, 0, half), VersionSpan(version + 1, half, length))
        if half
        else (VersionSpan(version, 0, length),)
    )
    logprobs = tuple((-rng.exponential(1, length)).astype(np.float32).tolist())
    return Completion(
        request_id=f"{group}",
        sample_index=sample,
        prompt_token_ids=tuple(rng.integers(3, 60, 4 + group).tolist()),
        token_ids=tuple(rng.integers(3, 60, length).tolist()),
        text=text,
        logprobs=logprobs,
        raw_logprobs=logprobs,
        finish_reason="length" if sample == 0 else "stop",
        spans=spans,
        engine=engine,
    )


def rollouts(step, lengths=((5, 1, 7), (3, 2, 4)), texts=None, left_out=(), parts=False, seed=0):
    """Groups with completions of these lengths. Those in `left_out` are not trained on."""
    rng = np.random.default_rng([seed, step])
    groups = []
    for group, row in enumerate(lengths):
        completions = tuple(
            completion(
                rng,
                group,
                sample,
                length,
                step - 1,
                texts[group][sample] if texts else f"{step} {group} {sample}",
                f"engine-{sample % 2}",
            )
            for sample, length in enumerate(row)
        )
        groups.append(RolloutGroup(f"{step}/{group}", step * 10 + group, step, 1, completions))
    rewards = np.array(
        [[float(sample == 1 and group == 0) for sample in range(len(row))] for group, row in enumerate(lengths)],
        np.float32,
    )
    chosen = [group for number, group in enumerate(groups) if number not in left_out]
    batch = make_batch(
        [c for group in chosen for c in group.completions],
        version=step,
        max_tokens=max(map(max, lengths)),
        advantages=np.arange(sum(len(g.completions) for g in chosen)) / 4,
    )
    trainer = (batch.logprobs + rng.normal(0, 0.01, batch.logprobs.shape)).astype(np.float32)
    rows, first = [], 0
    for number, group in enumerate(groups):
        rows.append(-1 if number in left_out else first)
        first += 0 if number in left_out else len(group.completions)
    trained = TrainedTokens(batch.tokens, batch.mask, batch.logprobs, batch.advantages, batch.ages, lambda: trainer)
    own = [{"exact": float(n), "exact.part": 0.5} for n in range(rewards.size)] if parts else ()
    return StepRollouts(groups, [f"prompt {n} of {step}" for n in range(len(groups))], rewards, own, rows, trained)


def sync(version, at=START):
    engines = tuple(
        EngineSync(
            f"engine-{n}", "shm", StageReport(1000, 0.002, 0.001), CommitReport(0.0005, 0.0002, 0.0, 1000.0, n), True
        )
        for n in range(2)
    )
    return SyncReport(version, 2000, 0.001, 0.002, 0.003, 0.004, 0.01, engines, started=at)


def recorded_step(step, taken=None, **scalars):
    at = START + step
    phases = [Phase("generate", at - 1, at - 0.6), Phase("train", at - 0.6, at - 0.1), Phase("sync", at - 0.1, at)]
    values = {"rollout_reward": step / 10, "train_kl": 1 / step, "seconds_step": 1.0, **scalars}
    return RecordedStep(step, at, values, phases, sync(step, at - 0.1), taken, "They agree." if step == 2 else "")


def write_run(run_dir, steps=4, after=0, config=None, finish=True, tokenizer=None, **how):
    """Record steps `after` + 1 to `steps`; `how` is as for `rollouts`."""
    recorder = RunRecorder(run_dir, config or RecordConfig(), after, SETTINGS, tokenizer)
    for step in range(after + 1, steps + 1):
        recorder.step(recorded_step(step, rollouts(step, **how)))
        drain(recorder)
    recorder.evaluation(after, START + after, after, (0.1, 0.2, None, None))
    recorder.__exit__(None if finish else KeyboardInterrupt)
    assert not recorder.stopped, recorder.stopped
    return run_dir


def drain(recorder):
    """Wait until everything that was submitted is written, or the recorder has stopped."""
    done = threading.Event()
    recorder._writer.submit(done.set)
    while not done.wait(0.01) and not recorder.stopped:
        pass


def engine_status(name, state="ready", **more):
    parameter = Parameter("w", 0, (2, 2), ())
    info = EngineInfo(
        name,
        "embedded",
        "model",
        "float32",
        1,
        (),
        (parameter,),
        ("shm",),
        "host",
        64,
        8,
        more.pop("version", 1),
        pid=1,
    )
    return EngineStatus(info, state, more.pop("num_requests", 0), 0.1, **more)


def write_fleet(run_dir):
    """Two engines, of which the second is lost and comes back."""
    recorder = FleetRecorder(run_dir)
    for name, version in (("engine-0", -1), ("engine-1", 1)):
        recorder.joined(engine_status(name, version=version).info)
    recorder.started("engine-0", 3)
    recorder.tokens("engine-0", 100)
    recorder.status([engine_status("engine-0", num_requests=3), engine_status("engine-1")], 1)
    recorder.ended("engine-0", 3)
    now = time.perf_counter()
    recorder.update(
        "engine-0",
        2,
        now - 0.01,
        [("stage", now - 0.005, {"receive": 0.002, "verify": 0.001}), ("commit", now, {"wait": 0.001, "pause": 0.002})],
    )
    recorder.committed(2, "engine-0")
    recorder.event("lost", "engine-1", "its connection broke", 1)
    recorder.event("retry", "engine-1", "1 request(s) sent to others")
    recorder.status([engine_status("engine-0", version=2), engine_status("engine-1", "lost")], 2)
    recorder.close()
    return run_dir
