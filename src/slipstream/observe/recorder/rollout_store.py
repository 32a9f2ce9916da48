"""The files with completions: one per range of steps, so that old steps are dropped by deleting files."""

from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

from slipstream.config import RecordConfig
from slipstream.observe.recorder import rollouts as encoding
from slipstream.observe.recorder.files import (
    ROLLOUT_TABLES,
    finish,
    insert,
    open_for_writing,
    rollout_file,
    rollout_files,
    transaction,
)
from slipstream.observe.recorder.mismatch import StepMismatch
from slipstream.observe.recorder.rollouts import StepRollouts

STEPS_PER_FILE = 64
BYTES_PER_FILE = 256 << 20
"""A file of this size is not continued. A step is never split."""
FILES_KEPT = 8
"""With a limit on size, the least number of files that it is divided into."""


class RolloutStore:
    """For one thread at a time."""

    def __init__(self, directory: Path, config: RecordConfig) -> None:
        self._directory, self._config = directory, config
        # Whole files are dropped, so they must be shorter than what is kept.
        self._steps_per_file = min(
            STEPS_PER_FILE, max(1, config.keep_steps // 4) if config.keep_steps else STEPS_PER_FILE
        )
        self._bytes_per_file = min(BYTES_PER_FILE, config.max_bytes // FILES_KEPT)
        self._db: sqlite3.Connection | None = None
        self._path = Path()
        self._first = 0

    def resume(self, step: int) -> None:
        """Forget the completions of steps after this one; the run takes them again."""
        files = rollout_files(self._directory)
        for first in [first for first in files if first > step]:
            _remove(files.pop(first))
        if files:  # of the others only the last one can have such steps
            db = open_for_writing(files[max(files)], ROLLOUT_TABLES)
            with transaction(db):
                for table in ("groups", "samples", "chunks"):
                    db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            finish(db)

    def add(self, step: int, rollouts: StepRollouts) -> StepMismatch:
        """Store the completions of a step; return how far its logprobs differ."""
        db = self._file_for(step)
        zero_variance = encoding.zero_variance(rollouts.rewards)
        kept = [number for number in range(len(rollouts.groups)) if self._is_kept(number)]
        mismatch = StepMismatch()
        with transaction(db):
            insert(db, "groups", encoding.group_rows(step, rollouts, kept, zero_variance))
            for number, chunk in enumerate(encoding.chunks(rollouts, kept)):
                insert(db, "chunks", [encoding.chunk_row(step, number, chunk)])
                insert(db, "samples", encoding.sample_rows(step, number, chunk, rollouts, zero_variance))
                mismatch.add(chunk)
        return mismatch

    def close(self) -> None:
        if self._db is not None:
            finish(self._db)
            self._db = None

    def _is_kept(self, group: int) -> bool:
        """Whether a group belongs to the share that is recorded: evenly spread, and the same groups in each step."""
        share = self._config.share
        return int((group + 1) * share) > int(group * share)

    def _file_for(self, step: int) -> sqlite3.Connection:
        is_full = step >= self._first + self._steps_per_file or self._size() >= self._bytes_per_file
        if self._db is None or is_full:
            self.close()
            self._first, self._path = step, self._directory / rollout_file(step)
            self._db = open_for_writing(self._path, ROLLOUT_TABLES)
            self._prune(step)
        return self._db

    def _size(self) -> int:
        """Size of the file that is written to, once its log is part of it."""
        if self._db is None:
            return 0
        pages, page_bytes = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return int(pages * page_bytes)

    def _prune(self, step: int) -> None:
        """Delete the oldest files beyond the limits of the config. The file that is written to stays."""
        files = rollout_files(self._directory)
        starts = list(files)
        sizes = {first: path.stat().st_size for first, path in files.items()}
        total = sum(sizes.values()) + self._bytes_per_file  # what the new file may grow to
        for first, following in pairwise(starts):
            is_old = self._config.keep_steps and following <= step - self._config.keep_steps
            if not is_old and total <= self._config.max_bytes:
                break
            _remove(files[first])
            total -= sizes[first]


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
