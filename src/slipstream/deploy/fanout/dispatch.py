"""`slipstream fanout`: send a file of prompts to a fleet and write the completions to a file.

Prompts are read as earlier ones finish, so the file may be larger than memory. A prompt that cannot be completed gets an error
in its place; the others continue. To resume an interrupted run, start it again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from slipstream.bridge.bridge import Bridge
from slipstream.deploy.fanout.prompt_file import CompletionFile, PromptRow
from slipstream.errors import DeadlineExceeded, NotReady, PeerError, RequestError, SlipstreamError
from slipstream.types import Completion, Failure

CHUNK = 16
"""Prompts per call."""
RETRY_SECONDS = 0.5
"""Time between two attempts to reach a lost fleet."""


@dataclass
class FanOutStats:
    num_rows: int = 0
    """Prompts completed by this run."""
    num_skipped: int = 0
    """Prompts completed by an earlier run."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed prompts by type of error."""
    samples: Counter[str] = field(default_factory=Counter)
    """Completions by engine."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Generated tokens by engine."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens.total() / max(self.seconds, 1e-9)


class FanOut:
    """One run. `on_row` is called for every finished prompt."""

    def __init__(
        self,
        bridge: Bridge,
        output: CompletionFile,
        *,
        in_flight: int = 0,
        patience: float = 60.0,
        on_row: Callable[[FanOutStats], None] | None = None,
    ) -> None:
        """`in_flight` limits the number of concurrent samples; 0 is twice the capacity of all engines. `patience` is how long
        the fleet may be unreachable, or without a ready engine."""
        self._bridge, self._output, self._patience, self._on_row = bridge, output, patience, on_row
        self._limit = in_flight or 2 * sum(e.info.max_num_seqs for e in bridge.status().present)
        self._in_flight = 0
        self._freed = asyncio.Event()
        self.stats = FanOutStats()

    async def run(self, rows: Iterator[PromptRow]) -> FanOutStats:
        """Run to the end. Raise if the fleet is gone for too long; finished prompts are written by then."""
        started = time.monotonic()
        missing = self._output.missing(rows)
        try:
            async with asyncio.TaskGroup() as tasks:
                while chunk := list(islice(missing, CHUNK)):
                    work = sum(row.sampling.n for row in chunk)
                    while self._in_flight and self._in_flight + work > self._limit:
                        self._freed.clear()
                        await self._freed.wait()
                    self._in_flight += work
                    for row in chunk:
                        self._output.expect(row)
                    tasks.create_task(self._complete(chunk))
                    await asyncio.sleep(0)
        except ExceptionGroup as errors:  # usually all have one cause: the fleet is gone
            raise errors.exceptions[0] from None
        finally:
            self.stats.seconds, self.stats.num_skipped = time.monotonic() - started, self._output.num_skipped
        return self.stats

    async def _complete(self, chunk: list[PromptRow]) -> None:
        """Send rows until all have an outcome. The time limit restarts with each outcome."""
        pending = {row.index: row for row in chunk}
        for row in chunk:
            if row.error is not None:
                self._finish(pending.pop(row.index), row.error)
        until = time.monotonic() + self._patience
        while pending:
            num_pending = len(pending)
            try:
                await self._send(list(pending.values()), pending)
            except (PeerError, NotReady, DeadlineExceeded):
                until = until if len(pending) == num_pending else time.monotonic() + self._patience
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            except RequestError as error:
                if len(pending) == 1:
                    self._finish(pending.popitem()[1], error)
                else:  # one bad row fails the whole call, so send each row alone
                    await asyncio.gather(*(self._complete([row]) for row in pending.values()))
                    pending.clear()

    async def _send(self, rows: Sequence[PromptRow], pending: dict[int, PromptRow]) -> None:
        """Make one call; remove rows from `pending` as they finish."""
        completions: defaultdict[int, list[Completion]] = defaultdict(list)
        stream = self._bridge.astream([row.prompt for row in rows], [row.sampling for row in rows])
        async with contextlib.aclosing(stream) as results:
            async for result in results:
                row = rows[result.prompt_index]
                if isinstance(result, Failure):
                    self._finish(pending.pop(row.index), result.error)
                    continue
                completions[row.index].append(result)
                if len(completions[row.index]) == row.sampling.n:
                    self._finish(pending.pop(row.index), sorted(completions[row.index], key=lambda c: c.sample_index))

    def _finish(self, row: PromptRow, outcome: Sequence[Completion] | SlipstreamError) -> None:
        self._output.write(row, outcome)
        if isinstance(outcome, SlipstreamError):
            self.stats.failed[type(outcome).__name__] += 1
        else:
            self.stats.num_rows += 1
            for completion in outcome:
                self.stats.samples[completion.engine] += 1
                self.stats.tokens[completion.engine] += len(completion.token_ids)
        self._in_flight -= row.sampling.n
        self._freed.set()
        self.stats.num_skipped = self._output.num_skipped
        if self._on_row is not None:
            self._on_row(self.stats)
