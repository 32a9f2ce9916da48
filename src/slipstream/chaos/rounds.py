"""Faults over as many training runs as it takes, and their report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.chaos.injection import ChaosRun, Injection
from slipstream.chaos.report import recovery, table

FINISH_SECONDS = 600.0


def run_rounds(
    config: Path,
    overrides: Sequence[str],
    max_staleness: int,
    plan: Callable[[int, int], Sequence[Injection]],
    total: int,
    seed: int,
    out: Path,
    minutes: float = float("inf"),
    pause: float = 0.0,
) -> int:
    """Inject `total` faults, starting another training run whenever one has finished or is stuck. `plan` returns the faults for
    a run, given its number and how many faults are done. Prints and writes a report; returns the exit code."""
    started, done, problems, rounds, restarts = time.monotonic(), list[Injection](), list[str](), 0, 0
    until = started + 60 * minutes
    while len(done) < total and time.monotonic() < until:
        run = ChaosRun(config, out.resolve() / f"round-{rounds}", seed + rounds, overrides)
        try:
            found = run.run(plan(rounds, len(done)), _show, until, pause)
            broken = [f"{i.step}: {i.kind}: no groups after {i.seconds:.0f} s" for i in found if i.outcome == "stuck"]
            if not broken and not run.finish(time.monotonic() + FINISH_SECONDS):
                broken.append(f"the run did not finish within {FINISH_SECONDS:g} s after its last fault")
        finally:
            run.close()
        broken += run.problems(max_staleness)
        problems += [f"run {rounds} (seed {seed + rounds}, {len(found)} faults): {problem}" for problem in broken]
        restarts, rounds, done = restarts + run.restarts, rounds + 1, done + found
        if not found and time.monotonic() < until:
            problems.append(f"run {rounds - 1} ended before a fault could be injected; give it more steps")
            break
    report = "\n".join(
        [
            f"{len(done)} faults, seeds {seed} to {seed + rounds - 1}, {rounds} runs, {restarts} trainer restarts, "
            f"{time.monotonic() - started:.0f} s on {platform.node()} ({platform.machine()})",
            "",
            table(done),
            "",
            recovery(done),
            "",
            *(
                [f"BROKEN: {problem}" for problem in problems]
                or ["Every promise was kept, and nothing was left behind."]
            ),
            "",
            f"Run `slipstream chaos {config.name} --seed SEED --faults COUNT` injects the faults of one run again.",
            "",
        ]
    )
    (out / "report.md").write_text(report)
    print(report)
    return bool(problems)


def _show(injection: Injection) -> None:
    print(f"{injection.step:20} {injection.kind:14} {injection.outcome} {injection.seconds:6.2f} s", flush=True)
