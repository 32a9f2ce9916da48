"""Capture `slipstream top`, `status` and `runs` from a terminal, for docs/operations.md: `python -m tools.terminal_captures`.

Runs the demo with two engines, kills one of them (it is restarted), and captures the views of the live and of the ended run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.terminal import terminal

ASSETS = Path(__file__).parents[1] / "docs/assets"
SIZES = ((80, 24), (160, 50))
STEPS = 60
LIVE_STEPS = 25
SECONDS = 900.0


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "runs/reverse"
        train = ["demo", "--steps", str(STEPS), "--engines", "2", "--mode", "async", "--out", "runs/reverse"]
        trainer = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", *train], cwd=place, stdout=subprocess.DEVNULL
        )
        try:
            wait_for_steps(run, LIVE_STEPS)
            os.kill(pid_of(run, "engine-1"), signal.SIGKILL)
            time.sleep(2)
            for columns, lines in SIZES:
                capture(place, f"status-{columns}x{lines}", columns, lines, "status", "--run-dir", "runs/reverse")
                capture(place, f"top-{columns}x{lines}", columns, lines, "top", "runs/reverse")
        finally:
            trainer.kill()  # gateway and engines notice, and exit
            trainer.wait()
        time.sleep(5)
        capture(place, "top-ended-80x24", 80, 24, "top", "runs/reverse")


def wait_for_steps(run: Path, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count('"StepRecord"') < count:
        assert time.monotonic() < deadline, f"{run} has not done {count} steps"
        time.sleep(0.5)


def pid_of(run: Path, engine: str) -> int:
    from slipstream.deploy.fleet import connect

    with connect(run) as bridge:
        return next(e.info.pid for e in bridge.status().engines if e.info.name == engine)


def capture(place: str, name: str, columns: int, lines: int, *command: str) -> None:
    here = Path.cwd()
    os.chdir(place)
    try:
        with terminal(*command, columns=columns, lines=lines) as found:
            if command[0] == "top":
                found.until(lambda text: "── log" in text)
                found.read(6)  # rates need two statuses
            else:
                assert found.wait() == 0, found.text
            (ASSETS / f"{name}.svg").write_text(found.svg(f"slipstream {command[0]}"))
            print(f"{name}:\n{found.text}\n")
    finally:
        os.chdir(here)


if __name__ == "__main__":
    main()
