"""Faults over as many training runs as it takes, and their report."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.chaos.injection import ChaosRun, Injection
from slipstream.chaos.report import recovery, table

FINISH_SECONDS = 600.0


def run_rounds(
    config: Path, overrides: Sequence[str], max_staleness: int, injections: Sequence[Injection], seed: int, out: Path
) -> int:
    """Inject the faults, starting another training run whenever one has finished. Prints and writes a report; returns the
    exit code."""
    started, done, problems, rounds, restarts = time.monotonic(), list[Injection](), list[str](), 0, 0
    while len(done) < len(injections) and not problems:
        directory = out.resolve() / f"round-{rounds}"
        run = ChaosRun(config, directory, seed + rounds, overrides)
        try:
            found = run.run(injections[len(done) :], lambda injection: _show(injection, len(injections)))
            done += found
            problems += [
                f"{i.step}: {i.kind}: no groups after {i.seconds:.0f} s" for i in found if i.outcome == "stuck"
            ]
            if not problems and not run.finish(time.monotonic() + FINISH_SECONDS):
                problems.append(f"the run did not finish within {FINISH_SECONDS:g} s after its last fault")
        finally:
            run.close()
        restarts += run.restarts
        problems += [f"round {rounds}: {problem}" for problem in run.problems(max_staleness)]
        rounds += 1
        if not found:
            problems.append(f"round {rounds - 1}: the run ended before a fault could be injected; give it more steps")
    report = "\n".join(
        [
            f"{len(done)} faults, seed {seed}, {rounds} runs, {restarts} trainer restarts, "
            f"{time.monotonic() - started:.0f} s on {platform.node()} ({platform.machine()})",
            "",
            table(done),
            "",
            recovery(done),
            "",
            *([f"BROKEN: {problem}" for problem in problems] or ["every promise was kept"]),
            "",
        ]
    )
    (out / "report.md").write_text(report)
    print(report)
    return bool(problems)


def _show(injection: Injection, total: int) -> None:
    print(f"{injection.step:20} {injection.kind:10} {injection.outcome} {injection.seconds:6.2f} s", flush=True)
