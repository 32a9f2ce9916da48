"""The history of a run under faults: the steps that all of its processes reached, on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    """Seconds on the machine's monotonic clock."""
    pid: int
    step: str
    facts: Mapping[str, Any]

    @property
    def is_fault(self) -> bool:
        return "fault" in self.facts


class History(Sequence[Event]):
    """Events in order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = sorted(events, key=lambda event: event.at)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __len__(self) -> int:
        return len(self._events)

    def of(self, *steps: str) -> Iterator[Event]:
        """Yield the events of these steps, without the faults injected there."""
        return (event for event in self._events if event.step in steps and not event.is_fault)


class HistoryReader:
    """Reads what processes have appended since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "history"
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[Event]:
        events = []
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                facts = json.loads(line)
                events.append(Event(facts.pop("at"), facts.pop("pid"), facts.pop("step"), facts))
        return sorted(events, key=lambda event: event.at)


def read_history(directory: Path) -> History:
    return History(HistoryReader(directory).new())
