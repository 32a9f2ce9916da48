"""How many batches of prompts each step has taken, where that depends on what they are worth.

A run that goes on from a checkpoint takes again what it had taken, and each step must take what was that step's: what followed
was made by other weights. Rewards need not be the same the second time. So a step writes down what it takes, before it takes
it."""

from __future__ import annotations

import json
from pathlib import Path

FILE = "batches.jsonl"


class Ledger:
    """In a run's directory; None keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE
        self._known: dict[int, int] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    step, batches = json.loads(line)
                except ValueError:  # cut off, by a process that was killed
                    continue
                self._known[step] = batches

    def known(self, step: int) -> int:
        """Batches that the step had begun to take; 0 if it had not begun."""
        return self._known.get(step, 0)

    def is_over(self, step: int) -> bool:
        """A later step had begun."""
        return max(self._known, default=0) > step

    def note(self, step: int, batches: int) -> None:
        if self._path is None or batches <= self.known(step):
            return
        self._known[step] = batches
        with self._path.open("a") as file:
            file.write(f"\n{json.dumps([step, batches])}\n")  # behind whatever was cut off
