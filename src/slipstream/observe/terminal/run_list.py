"""The run directories below some directories, and which of them may go."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from slipstream.observe.terminal.columns import Column, table
from slipstream.observe.terminal.run_files import (
    RunState,
    age_in_words,
    is_run,
    last_change,
    last_record,
    run_state,
    size_of,
)

QUIET_SECONDS = 300.0
"""A run that has written a file since then is not deleted, whatever else its files say."""
STYLES = {"live": "green", "dead": "red", "elsewhere": "yellow"}


@dataclass(frozen=True, slots=True)
class RunEntry:
    directory: Path
    state: RunState
    step: int
    """Training steps done."""
    reward: float | None
    """Reward of the last step."""
    seconds_old: float
    """Since it last wrote a file."""
    num_bytes: int

    @property
    def may_go(self) -> bool:
        return self.state not in ("live", "elsewhere") and self.seconds_old > QUIET_SECONDS


@dataclass(frozen=True, slots=True)
class Retention:
    """Which runs to keep; what is None or 0 does not matter."""

    seconds: float | None = None
    """Runs that have written within this time."""
    count: int | None = None
    """So many of the latest."""
    num_bytes: int | None = None
    """So many of the latest as fit into this."""


def find_runs(places: Sequence[Path], now: float) -> list[RunEntry]:
    """Return the runs that are one of these directories or lie in one, the latest first."""
    found: dict[Path, RunEntry] = {}
    for place in places:
        inside = [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()] if place.is_dir() else []
        for path in [place] if is_run(place) else filter(is_run, inside):
            found.setdefault(path.resolve(), _entry(path, now))
    return sorted(found.values(), key=lambda entry: entry.seconds_old)


def _entry(path: Path, now: float) -> RunEntry:
    last = last_record(path, "StepRecord")
    step, reward = (last.get(name) for name in ("step", "reward"))
    return RunEntry(
        path,
        run_state(path),
        step if isinstance(step, int) else 0,
        reward if isinstance(reward, float) else None,
        max(0.0, now - last_change(path)),
        size_of(path),
    )


def to_delete(runs: Sequence[RunEntry], keep: Retention) -> list[RunEntry]:
    """Return the runs, latest first, that at least one rule does not keep and that may go."""
    chosen, kept_bytes = [], 0
    for place, entry in enumerate(runs):
        kept_bytes += entry.num_bytes
        is_kept = (
            (keep.seconds is None or entry.seconds_old <= keep.seconds)
            and (keep.count is None or place < keep.count)
            and (keep.num_bytes is None or kept_bytes <= keep.num_bytes)
        )
        if not is_kept and entry.may_go:
            chosen.append(entry)
    return chosen


def delete(entry: RunEntry) -> bool:
    """Delete a run, unless it has come to life since it was listed. Return whether it did."""
    if run_state(entry.directory) in ("live", "elsewhere"):
        return False
    shutil.rmtree(entry.directory)
    return True


def rows(runs: Sequence[RunEntry], width: int) -> list[Text]:
    columns = [
        Column("run", [str(entry.directory) for entry in runs], is_number=False, keeps_end=True),
        Column("state", [entry.state for entry in runs], 0, False, [STYLES.get(e.state, "") for e in runs]),
        Column("steps", [f"{entry.step:,}" if entry.step else "–" for entry in runs]),
        Column("reward", ["–" if entry.reward is None else f"{entry.reward:.3f}" for entry in runs], 1),
        Column("age", [age_in_words(entry.seconds_old) for entry in runs]),
        Column("size", [size_in_words(entry.num_bytes) for entry in runs]),
    ]
    return table(columns, width, len(runs))


def size_in_words(num_bytes: int) -> str:
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1e3:.0f} kB"
