"""A thread that writes, so that the trainer and the gateway do not wait for a disk."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], None]

MAX_JOBS = 4096
"""Jobs that wait. Further ones are dropped."""
MAX_LARGE_JOBS = 4
"""Jobs with large data that wait. Each holds the completions of a step in memory."""
CLOSE_SECONDS = 30.0


class BackgroundWriter:
    """Runs jobs on one thread, in order. Never blocks the caller and never raises into it.

    A job that fails ends all writing: the disk is full or cannot be written to, and a record with holes is worth less than one
    that ends. The failure is logged once, and `stopped` has the reason."""

    def __init__(self, what: str, on_stop: Callable[[str], None]) -> None:
        """`what` names the writer in the log: "the recorder". `on_stop(reason)` is called on the thread after a failure."""
        self._what, self._on_stop = what, on_stop
        self._jobs: queue.SimpleQueue[tuple[Job, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_large = 0
        self._last: Job | None = None
        self.stopped = ""
        """Why nothing is written any more; empty while all is well."""
        self._thread = threading.Thread(target=self._run, name="slipstream-recorder", daemon=True)
        self._thread.start()

    def submit(self, job: Job, is_large: bool = False) -> bool:
        """Run a job soon. Return False if it was dropped, because too much is waiting or writing has ended."""
        if self.stopped:
            return False
        with self._lock:
            if self._jobs.qsize() >= MAX_JOBS or (is_large and self._num_large >= MAX_LARGE_JOBS):
                return False
            self._num_large += is_large
        self._jobs.put((job, is_large))
        return True

    def close(self, last: Job | None = None) -> None:
        """Finish the jobs that wait, then `last`, and end the thread. `last` runs even if writing has ended: the disk may have
        room again. Gives up after a while, if the disk hangs."""
        self._last = last
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._stop(f"its disk did not take the last data within {CLOSE_SECONDS:g} s")

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        log.warning("%s stopped, and the run goes on without it: %s", self._what, reason)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, is_large = entry
            if not self.stopped:
                self._attempt(job)
            del job, entry  # the data of the last step, while the next one is awaited
            if is_large:
                with self._lock:
                    self._num_large -= 1
        if self._last is not None:
            self._attempt(self._last)

    def _attempt(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # whatever it is, it must not end the run
            if self.stopped:
                return
            self._stop(_reason(error))
            with contextlib.suppress(Exception):  # the disk that failed may not take this, either
                self._on_stop(self.stopped)


def yield_to_caller() -> None:
    """Let the threads that the recorder serves run. A thread that computes in Python gives way only every few milliseconds."""
    time.sleep(0)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {text}"
