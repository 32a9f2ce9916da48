"""Which rows each prompt batch has: epoch after epoch, without prompts that the policy always or never solves.

Pass rates arrive while later batches are already submitted, and a resumed run must submit the same prompts under the same
ids. So a batch is written to `curriculum.jsonl` before it is submitted, and so are the pass rates of each step."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from slipstream.rl.data.data_task import DataTask

log = logging.getLogger(__name__)

FILE = "curriculum.jsonl"


class Curriculum:
    """Without pass rates a batch depends only on the seed and its number, and nothing is written."""

    def __init__(
        self, task: DataTask, seed: int, batch_size: int, directory: Path | None = None, step: int = 0
    ) -> None:
        """A run resumed after `step` continues from the file in `directory`."""
        self._task, self._seed, self._batch_size = task, seed, batch_size
        is_kept = directory is not None and task.config.uses_pass_rates
        self._path = directory / FILE if directory is not None and is_kept else None
        self._rates = task.known_rates()
        """By prompt: the share of its samples that were solved the last time."""
        self._seen: dict[str, int] = {}
        """By prompt: the epoch of its last pass rate; a rate from a column counts as of epoch 0."""
        self._batches: dict[int, list[str]] = {}
        self._epoch, self._left = -1, deque[str]()
        """The current epoch, and those of its prompts that are not yet in a batch."""
        self._recorded = 0
        self._read(step)

    def batch(self, number: int) -> list[str]:
        """The prompts of a batch, counted from 1."""
        if self._path is None:
            return [self._at((number - 1) * self._batch_size + index) for index in range(self._batch_size)]
        while len(self._batches) < number:
            self._add(self._next())
        return self._batches[number]

    def record(self, step: int, rates: Mapping[str, float]) -> None:
        """Record the pass rates of a step's prompts. A step that is repeated after a crash counts once."""
        if self._path is None or step <= self._recorded:
            return
        self._apply(step, rates)
        self._write({"step": step, "rates": rates})

    def _at(self, position: int) -> str:
        """The prompt at a position of the endless sequence of epochs."""
        epoch, index = divmod(position, len(self._task.splits["train"]))
        if epoch != self._epoch:
            self._epoch, self._left = epoch, deque(self._task.epoch(epoch, self._seed, {}))
        return self._left[index]

    def _next(self) -> list[str]:
        chosen: list[str] = []
        while len(chosen) < self._batch_size:
            if not self._left:
                self._epoch += 1
                self._left = deque(self._task.epoch(self._epoch, self._seed, self._rates))
            size = len(chosen)
            while self._left and len(chosen) < self._batch_size:
                prompt = self._left.popleft()
                if not self._is_skipped(prompt):
                    chosen.append(prompt)
            if not self._left and len(chosen) == size and not self._has_active():
                log.warning("every prompt of %s is always or never solved; none is skipped", self._task.name)
                self._seen.clear()
                self._rates.clear()
        return chosen

    def _is_skipped(self, prompt: str) -> bool:
        config, rate = self._task.config, self._rates.get(prompt)
        if rate is None or self._epoch - self._seen.get(prompt, 0) >= config.recheck:
            return False
        return (config.skip_solved and rate >= 1) or (config.skip_unsolved and rate <= 0)

    def _has_active(self) -> bool:
        return not all(map(self._is_skipped, self._task.splits["train"]))

    def _add(self, prompts: list[str]) -> None:
        number = len(self._batches) + 1
        self._batches[number] = prompts
        self._write({"batch": number, "epoch": self._epoch, "prompts": prompts, "left": len(self._left)})

    def _apply(self, step: int, rates: Mapping[str, float]) -> None:
        self._recorded = step
        self._rates.update(rates)
        self._seen.update(dict.fromkeys(rates, max(0, self._epoch)))

    def _write(self, line: Mapping[str, object]) -> None:
        assert self._path is not None
        with self._path.open("a") as file:
            file.write(f"\n{json.dumps(line)}\n")  # the newline first: the last line may be cut off

    def _read(self, last_step: int) -> None:
        if self._path is None or not self._path.exists():
            return
        for text in self._path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # empty, or cut off when the process was killed
                continue
            if "batch" in line:
                if line["epoch"] != self._epoch:
                    self._epoch = line["epoch"]
                    self._left = deque(self._task.epoch(self._epoch, self._seed, self._rates))
                while len(self._left) > line["left"]:
                    self._left.popleft()
                self._batches[line["batch"]] = line["prompts"]
            elif self._recorded < line["step"] <= last_step:
                self._apply(line["step"], line["rates"])
