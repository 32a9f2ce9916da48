"""A fleet as a table, for `slipstream status` and `slipstream top`."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from rich.text import Text

from slipstream.observe.terminal.columns import Column, fitted, rule, table
from slipstream.observe.terminal.run_files import age_in_words
from slipstream.runtime.log_lines import printable
from slipstream.types import Decision, EngineStatus, FleetStatus, RolloutStatus, UpdateRecord

SHOWN_DECISIONS = 8
WIDE, NOTE_WIDTH = 110, 44
STYLES = {"ready": "green", "lost": "red", "quarantined": "red", "stale": "yellow", "empty": "yellow", "asleep": "blue"}


class Throughput:
    """Tokens per second of each engine, over the last statuses. Tokens count when their completion has arrived."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=16)

    def see(self, now: float, status: FleetStatus) -> dict[str, float]:
        """Add a status; return the rates of the engines that were there before."""
        tokens = {engine.info.name: engine.num_tokens for engine in status.engines}
        self._seen.append((now, tokens))
        rates = {}
        for name, count in tokens.items():
            past = [(at, seen[name]) for at, seen in self._seen if name in seen]
            if any(a > b for (_, a), (_, b) in itertools.pairwise(past)):  # it was restarted
                continue
            (since, before), *_ = past
            if now > since:
                rates[name] = (count - before) / (now - since)
        return rates


def state_of(engine: EngineStatus) -> str:
    if engine.is_paused and engine.state == "ready":
        return "paused"
    return engine.state if engine.circuit == "closed" else f"{engine.state}, {engine.circuit}"


def note_of(engine: EngineStatus) -> str:
    return engine.activity or engine.note


def engine_rows(
    engines: Sequence[EngineStatus], width: int, rates: Mapping[str, float] | None = None, notes: bool = True
) -> list[Text]:
    """Return the heading and a line per engine. `rates` are tokens per second; without them the tokens so far are shown.
    `notes` are in the line only on a wide terminal."""
    hits = [f"{e.hit_tokens / e.looked_up_tokens:.0%}" if e.looked_up_tokens else "–" for e in engines]
    if rates is None:
        tokens = Column("tokens", [_short(e.num_tokens) for e in engines], 1)
    else:
        tokens = Column("tokens/s", [f"{rates.get(e.info.name, 0.0):,.0f}" for e in engines], 1)
    columns = [
        Column("engine", [e.info.name for e in engines], is_number=False),
        Column("state", list(map(state_of, engines)), 0, False, [STYLES.get(e.state, "") for e in engines]),
        Column("version", [_version(e.info.version) for e in engines]),
        Column("requests", [str(e.num_requests) for e in engines]),
        tokens,
        Column("KV", [f"{e.kv_use:.0%}" if e.kv_use else "–" for e in engines], 3),
        Column("hits", hits, 4),
        Column("heard", [age_in_words(e.seconds_since_heartbeat) for e in engines], 2),
        Column("speed", [f"{e.speed:.2f}" if e.speed else "–" for e in engines], 5),
        Column("faults", [str(e.num_faults) for e in engines], 6),
        Column("kind", [e.info.kind for e in engines], 7, False),
        Column("ranks", [str(e.info.num_ranks) for e in engines], 8),
        Column("GPUs", [",".join(e.info.devices) or "–" for e in engines], 9, False),
    ]
    if not notes or width < WIDE or not any(map(note_of, engines)):
        return table(columns, width, len(engines))
    lines = table(columns, width - NOTE_WIDTH, len(engines))
    place = max(line.cell_len for line in lines) + 2
    for line, note, style in zip(lines, ["note", *map(note_of, engines)], ["bold dim", *[""] * len(engines)]):
        line.pad_right(place - line.cell_len)
        line.append_text(Text(printable(note), style=style))
        fitted(line, width)
    return lines


def describe(fleet: FleetStatus, width: int, rates: Mapping[str, float] | None = None) -> list[Text]:
    """Return all that `slipstream status` says, in lines of at most `width` cells."""
    version = str(fleet.version) if fleet.version >= 0 else "none yet"
    head = f"policy version {version}, {fleet.num_completions:,} completions, up {age_in_words(fleet.uptime_seconds)}"
    lines = wrapped(head, width)
    if fleet.num_retried:
        lines += wrapped(f"{fleet.num_retried} requests were retried on another engine", width)
    for model in sorted({f"{e.info.model}, {e.info.dtype}, {e.info.num_ranks} rank(s)" for e in fleet.engines}):
        lines += wrapped(f"model {model}", width)
    if fleet.engines:
        lines += [Text(), *engine_rows(fleet.engines, width, rates, notes=False)]
    else:
        lines.append(Text("no engine has registered"))
    details = [
        f"{engine.info.name}: {text}"
        for engine in fleet.engines
        for text in (
            f"GPU {', '.join(engine.info.devices)}" if engine.info.devices else "",
            note_of(engine),
            *(f"does not hold {promise}" for promise in engine.info.not_held),
        )
        if text
    ]
    for title, texts in (
        ("notes", details),
        ("rollouts", [rollouts_in_words(fleet.rollouts)] if fleet.rollouts else []),
        ("decisions", list(map(_decision, fleet.decisions[-SHOWN_DECISIONS:]))),
    ):
        if texts:
            lines += [Text(), rule(title, "", width), *(line for text in texts for line in wrapped(text, width))]
    if fleet.updates:
        lines += [Text(), rule("syncs", "", width), *update_rows(fleet.updates[-4:], width)]
    return lines


def wrapped(text: str, width: int) -> list[Text]:
    """Return text in lines, the later ones indented. Breaks at words, and only those that are longer than a line anywhere."""
    return [Text(line) for line in textwrap.wrap(printable(text), max(20, width), subsequent_indent="    ")]


def rollouts_in_words(rollouts: RolloutStatus) -> str:
    text = (
        f"{rollouts.waiting:,} waiting, {rollouts.running:,} running, {rollouts.finished:,} finished, "
        f"{rollouts.taken:,} taken"
    )
    for count, what in ((rollouts.failed, "failed"), (rollouts.renewed, "generated again")):
        text += f", {count:,} {what}" if count else ""
    return text


def staleness_in_words(counts: Mapping[int, int]) -> str:
    """Return `staleness 0: 80 %, 1: 20 %`."""
    total = sum(counts.values())
    if not total:
        return ""
    return "staleness " + ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(counts.items()) if count)


def states_in_words(engines: Sequence[EngineStatus]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(e.state for e in engines).most_common())


def update_rows(updates: Sequence[UpdateRecord], width: int) -> list[Text]:
    """Return the heading and a line per update, newest first."""
    rows = list(reversed(updates))

    def seconds(name: str) -> list[str]:
        return [milliseconds(getattr(row.phases, name)) for row in rows]

    columns = [
        Column("version", [str(row.version) for row in rows]),
        Column("ago", [age_in_words(row.seconds_ago) for row in rows]),
        Column("engines", [str(row.num_engines) for row in rows], 2),
        Column("MB", [f"{row.num_bytes / 1e6:,.1f}" for row in rows], 1),
        *(Column(name, seconds(name), rank) for name, rank in (("total", 0), ("receive", 4), ("verify", 3))),
        *(Column(name, seconds(name), rank) for name, rank in (("wait", 5), ("load", 6), ("pause", 0))),
        Column(
            "result", [row.error or "committed" for row in rows], 0, False, ["red" if r.error else "" for r in rows]
        ),
    ]
    return table(columns, width, len(rows))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _version(version: int) -> str:
    return str(version) if version >= 0 else "–"


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= unit:
            return f"{count / (10**3 if name == 'k' else unit):,.1f}{name}"
    return f"{count:,}"


def _decision(decision: Decision) -> str:
    return f"{age_in_words(decision.seconds_ago)} ago, {decision.engine}, {decision.kind}: {decision.reason}"
