"""`slipstream top`: one screen about a run that trains, serves, has ended or was killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from slipstream.bridge.bridge import Bridge
from slipstream.observe.terminal.columns import Column, end_of, fitted, rule, sparkline, table
from slipstream.observe.terminal.fleet_poller import FleetPoller
from slipstream.observe.terminal.fleet_table import (
    engine_rows,
    milliseconds,
    note_of,
    rollouts_in_words,
    staleness_in_words,
    states_in_words,
    update_rows,
)
from slipstream.observe.terminal.run_files import RunRecords, RunState, age_in_words, last_change, log_files, run_state
from slipstream.runtime.log_lines import LogLine, parse, tail
from slipstream.types import FleetStatus

STATE_SECONDS = 2.0
"""How often the state of the run is looked at."""
STATE_STYLES: Mapping[str, str] = {"live": "green", "finished": "blue", "dead": "red"}
LEVEL_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
MIN_LOG_LINES = 3


class RunView:
    def __init__(self, directory: Path, connect: Callable[[], Bridge]) -> None:
        self._directory, self._records = directory, RunRecords(directory)
        self.poller = FleetPoller(connect)
        self._log = ""
        """Process whose log is shown; empty for all of them."""
        self._state: tuple[float, RunState] = (0.0, "empty")

    def next_log(self) -> None:
        """Show the log of the next process; after the last one, of all."""
        names = ["", *log_files(self._directory)]
        self._log = names[(names.index(self._log) + 1) % len(names)] if self._log in names else ""

    def draw(self, width: int, height: int) -> list[Text]:
        self._records.read()
        if time.monotonic() - self._state[0] > STATE_SECONDS:
            self._state = (time.monotonic(), run_state(self._directory))
        state = self._state[1]
        status = self.poller.status if state == "live" else None
        lines = [*self._head(state, width), *self._curve(width, height)]
        lines += self._fleet(status, state, width, max(2, height // 6))
        lines += self._rollouts(status, width)
        lines += self._syncs(status, width, height // 8)
        room = height - len(lines) - 1
        if room < MIN_LOG_LINES:
            lines, room = lines[: height - 1 - MIN_LOG_LINES], MIN_LOG_LINES
        return [*lines, *self._logs(width, room)][:height]

    def _head(self, state: RunState, width: int) -> list[Text]:
        settings, records = self._records.settings(), self._records
        facts = Text("  ").append(state, STATE_STYLES.get(state, ""))
        total = settings.get("steps")
        if isinstance(total, int) and records.step:
            facts.append(f"  step {records.step:,}/{total:,}")
            left = (total - records.step) * records.step_seconds
            facts.append(f"  at most {age_in_words(left)} left" if state == "live" and left else "")
        elif records.warmup:
            facts.append(f"  warm-up {records.warmup.get('step')}")
        if state != "live" and (changed := last_change(self._directory)):
            facts.append(f"  last written {age_in_words(time.time() - changed)} ago")
        name = end_of(str(self._directory), max(12, width - facts.cell_len - 1))
        line = Text(" ").append(name, style="bold").append_text(facts)
        keys = "q quit  l log"
        if line.cell_len + len(keys) + 2 < width:
            line.pad_right(width - len(keys) - line.cell_len - 1)
            line.append(keys, style="dim")
        return [fitted(line, width)]

    def _curve(self, width: int, height: int) -> list[Text]:
        records = self._records
        if not records.steps:
            return [Text(" no training step is recorded", style="dim")]
        last: Mapping[str, Any] = records.steps[-1]
        metrics, seconds = last["metrics"], sum(last["seconds"].values())
        figures = [
            f"reward {last['reward']:.3f}",
            f"accuracy {last['accuracy']:.3f}",
            f"{milliseconds(records.step_seconds)}/step",
            f"{last['num_tokens'] / max(seconds, 1e-9):,.0f} tokens/s",
            f"KL {metrics['kl']:.4f}",
            f"entropy {metrics['entropy']:.2f}",
        ]
        while len(figures) > 1 and len("  ".join(figures)) >= width:
            figures.pop()
        curve = Text(" reward ", style="dim").append(sparkline(records.rewards, width - 24), style="green not dim")
        curve.append(f" {min(records.rewards):.2f}…{max(records.rewards):.2f}")
        lines = [Text(f" {'  '.join(figures)}"), curve]
        if height >= 40:
            lines += [_phases(last["seconds"], width)]
        if height >= 30 and (found := records.evaluation):
            accuracies = [
                f"{name} {found[name]:.3f}"
                for name in ("sampled_train", "sampled_heldout")
                if found.get(name) is not None
            ]
            lines.append(Text(f" evaluation after step {found.get('step')}: {', '.join(accuracies)}"))
        return [fitted(line, width) for line in lines]

    def _fleet(self, status: FleetStatus | None, state: RunState, width: int, most: int) -> list[Text]:
        if status is None:
            known = [name for name in log_files(self._directory) if name != "gateway"]
            names = f" engines of this run: {', '.join(known)}" if known else " no engine has a log here"
            is_asked = self.poller.asked.is_set()
            why = (self.poller.error if is_asked else "asking the gateway …") if state == "live" else "not running"
            return [rule("fleet", why, width), fitted(names, width)]
        rates, engines = self.poller.rates, status.engines
        total = f"{sum(rates.values()):,.0f} tokens/s"
        version = f"version {status.version}" if status.version >= 0 else "no weights yet"
        lines = [rule("fleet", f"{version}, {states_in_words(engines) or 'no engines'}, {total}", width)]
        # The engines that need a look first.
        shown = sorted(engines, key=lambda e: (e.state == "ready" and not note_of(e), e.state != "lost", e.info.name))[
            :most
        ]
        lines += engine_rows(shown, width, rates)
        if len(shown) < len(engines):
            lines.append(Text(f" and {len(engines) - len(shown)} more", style="dim"))
        return lines

    def _rollouts(self, status: FleetStatus | None, width: int) -> list[Text]:
        ages: Counter[int] = Counter()
        for record in self._records.steps[-10:]:
            ages.update({int(age): int(count) for age, count in record["staleness"].items()})
        what = ""
        if status is not None and (queue := status.rollouts) is not None:
            what = rollouts_in_words(queue)
            ages = ages or Counter(dict(enumerate(queue.taken_by_age)))
            if queue.max_staleness:
                what += f"; at most {queue.max_staleness} versions old"
        if not what and not ages:
            return []
        return [rule("rollouts", what, width), fitted(f" {staleness_in_words(ages) or 'nothing taken yet'}", width)]

    def _syncs(self, status: FleetStatus | None, width: int, most: int) -> list[Text]:
        if self._records.steps:
            return [rule("syncs", "", width), *_sync_rows(self._records.steps[-most:], width)]
        if status is not None and status.updates:
            return [rule("syncs", "", width), *update_rows(status.updates[-most:], width)]
        return []

    def _logs(self, width: int, count: int) -> list[Text]:
        files = {name: path for name, path in log_files(self._directory).items() if self._log in ("", name)}
        rows: list[tuple[LogLine, str]] = []
        for name, path in files.items():
            rows += [(parse(line), name) for line in tail(path, count) if line.strip()]
        if len(files) > 1:  # those without a time belong to what their process said before
            rows = sorted((row for row in rows if row[0].time), key=lambda row: row[0].time)
        size = max(map(len, files), default=0)
        lines = [rule("log", self._log or "all processes", width)]
        for line, name in rows[-count:]:
            text = Text(f" {name:<{size}} ", style="cyan").append(f"{line.time[11:]} ", style="dim not cyan")
            text.append(line.message, style=f"{LEVEL_STYLES.get(line.level, 'default')}")
            lines.append(fitted(text, width))
        return lines


def _phases(seconds: Mapping[str, float], width: int) -> Text:
    total = max(sum(seconds.values()), 1e-9)
    parts = sorted(((value, name) for name, value in seconds.items() if value > 0), reverse=True)
    return fitted(" step: " + ", ".join(f"{name} {value / total:.0%}" for value, name in parts), width)


def _sync_rows(steps: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    syncs = [record["sync"] for record in reversed(steps)]
    pauses = [max((e["commit"]["pause_seconds"] for e in sync["engines"]), default=0.0) for sync in syncs]
    names = (("total", 0), ("plan", 3), ("send", 1), ("stage", 2), ("commit", 2))
    columns = [
        Column("version", [str(sync["version"]) for sync in syncs]),
        *(Column(name, [milliseconds(sync[f"{name}_seconds"]) for sync in syncs], rank) for name, rank in names),
        Column("pause", list(map(milliseconds, pauses))),
        Column("MB", [f"{sync['num_bytes'] / 1e6:,.1f}" for sync in syncs], 1),
        Column("engines", [str(len(sync["engines"])) for sync in syncs], 4),
    ]
    if any(sync.get("lost") for sync in syncs):
        lost = [", ".join(sync.get("lost") or ()) for sync in syncs]
        columns.append(Column("lost", lost, 0, False, ["red"] * len(syncs)))
    return table(columns, width, len(syncs))
