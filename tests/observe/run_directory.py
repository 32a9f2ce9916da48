"""Run directories as training runs leave them, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from slipstream.rl.reporting.records import (
    Evaluation,
    PhaseSeconds,
    Record,
    Saved,
    StepRecord,
    UpdateMetrics,
    json_lines,
)
from slipstream.types import CommitReport, EngineSync, StageReport, SyncReport

ENGINES = ("engine-0", "engine-1")


def step_record(step: int, reward: float) -> StepRecord:
    engines = tuple(EngineSync(e, "shm", StageReport(10**6, 0.002), CommitReport(0.0004, 0.001)) for e in ENGINES)
    sync = SyncReport(step, 2 * 10**6, 0.001, 0.012, 0.003, 0.004, 0.02, engines)
    metrics = UpdateMetrics(-0.1, 1.0, 0.0, 0.0012, 1.75, 1e-6, 0.9)
    return StepRecord(
        step,
        step - 1,
        reward,
        reward,
        1234,
        metrics,
        PhaseSeconds(0.01, 0.2, 0.01, 0.3, 0.02),
        sync,
        staleness={"0": 900, "1": 334},
    )


def write_run(directory: Path, rewards: Iterable[float], is_finished: bool = False) -> Path:
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"steps": 400}))
    (directory / "gateway.log").write_text(
        "2026-05-01 12:00:01,100 INFO slipstream.gateway.server: gateway listening on 127.0.0.1:1\n"
        "2026-05-01 12:00:09,100 WARNING slipstream.gateway.service: engine engine-1 lost: its connection broke\n"
    )
    for name in ENGINES:
        (directory / f"{name}.log").write_text(
            "2026-05-01 12:00:02,100 INFO slipstream.gateway.engine_stream: registered with the gateway at 127.0.0.1:1\n"
            '{"time": "2026-05-01T12:00:03.000+00:00", "level": "INFO", "message": "compiled \\u001b[31mdecode 64"}\n'
            f"{'a very long line ' * 40}\n"
        )
    records: list[Record] = [step_record(step, reward) for step, reward in enumerate(rewards, 1)]
    with json_lines(directory / "metrics.jsonl") as log:
        for record in [Evaluation(0, 0, 0.1, 0.2, None, None), *records]:
            log(record)
        if is_finished:
            log(Saved("checkpoint"))
    return directory
