"""`slipstream fanout`: a file of prompts to a fleet, completions to a file, as fast as the fleet takes them.

Prompts are read and sent as earlier ones are finished, so a file may be larger than memory. One that cannot be completed has an
error in its place and stops nobody. A run that is stopped, killed or cut off is gone on with by starting it again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from slipstream.errors import DeadlineExceeded, NotReady, PeerError, RequestError, SlipstreamError
from slipstream.topology.prompt_file import CompletionFile, PromptRow
from slipstream.types import Completion, Failure, FleetStatus, Prompt, SamplingParams

CHUNK = 16
"""Prompts in a call."""
AGAIN_SECONDS = 0.5
"""Between two attempts to reach a fleet that is gone."""


class Generates(Protocol):
    """What is needed of a `Bridge`."""

    def astream(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], /
    ) -> AsyncGenerator[Completion | Failure, None]: ...

    def status(self) -> FleetStatus: ...


@dataclass
class Tally:
    """What a run has come to."""

    num_rows: int = 0
    """Prompts that have their completions now, by this run."""
    num_skipped: int = 0
    """And by one before."""
    failed: Counter[str] = field(default_factory=Counter)
    """Prompts by the error that is in their place."""
    prompt_tokens: int = 0
    samples: Counter[str] = field(default_factory=Counter)
    """Completions by engine."""
    tokens: Counter[str] = field(default_factory=Counter)
    """That engines have generated, by engine."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens.total() / max(self.seconds, 1e-9)


class FanOut:
    """One run. `on_row` hears of every line that is finished."""

    def __init__(
        self,
        bridge: Generates,
        output: CompletionFile,
        *,
        in_flight: int = 0,
        patience: float = 60.0,
        on_row: Callable[[Tally], None] | None = None,
    ) -> None:
        """`in_flight` is how many samples may be asked for at once; 0 keeps every engine's batch full, twice over.
        `patience` is how long a fleet may be gone, or without an engine that can take requests."""
        self._bridge, self._output, self._patience, self._on_row = bridge, output, patience, on_row
        self._limit = in_flight or 2 * sum(e.info.max_concurrency for e in bridge.status().present)
        self._in_flight = 0
        self._freed = asyncio.Event()
        self.tally = Tally()

    async def run(self, rows: Iterator[PromptRow]) -> Tally:
        """Until all are done. Raises when the fleet is gone for too long; what is finished is written."""
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
                    tasks.create_task(self._follow(chunk))
                    await asyncio.sleep(0)
        except ExceptionGroup as errors:  # of one cause, as a rule: the fleet is gone for all
            raise errors.exceptions[0] from None
        finally:
            self.tally.seconds, self.tally.num_skipped = time.monotonic() - started, self._output.num_skipped
        return self.tally

    async def _follow(self, chunk: list[PromptRow]) -> None:
        """Sends until every row has its outcome. Time counts from the last one that came."""
        owed = {row.index: row for row in chunk}
        for row in chunk:
            if row.error is not None:
                self._finish(owed.pop(row.index), row.error)
        until = time.monotonic() + self._patience
        while owed:
            num_owed = len(owed)
            try:
                await self._send(list(owed.values()), owed)
            except (PeerError, NotReady, DeadlineExceeded):
                until = until if len(owed) == num_owed else time.monotonic() + self._patience
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
            except RequestError as error:
                if len(owed) == 1:
                    self._finish(owed.popitem()[1], error)
                else:  # one of them spoils the call for all: each by itself
                    await asyncio.gather(*(self._follow([row]) for row in owed.values()))
                    owed.clear()

    async def _send(self, rows: Sequence[PromptRow], owed: dict[int, PromptRow]) -> None:
        """One call; rows that have their outcome are owed no more."""
        found: defaultdict[int, list[Completion]] = defaultdict(list)
        stream = self._bridge.astream([row.prompt for row in rows], [row.sampling for row in rows])
        async with contextlib.aclosing(stream) as results:
            async for result in results:
                row = rows[result.prompt_index]
                if isinstance(result, Failure):
                    self._finish(owed.pop(row.index), result.error)
                    continue
                found[row.index].append(result)
                if len(found[row.index]) == row.sampling.n:
                    self._finish(owed.pop(row.index), sorted(found[row.index], key=lambda c: c.sample_index))

    def _finish(self, row: PromptRow, outcome: Sequence[Completion] | SlipstreamError) -> None:
        self._output.write(row, outcome)
        if isinstance(outcome, SlipstreamError):
            self.tally.failed[type(outcome).__name__] += 1
        else:
            self.tally.num_rows += 1
            self.tally.prompt_tokens += len(outcome[0].prompt_token_ids)
            for completion in outcome:
                self.tally.samples[completion.engine] += 1
                self.tally.tokens[completion.engine] += len(completion.token_ids)
        self._in_flight -= row.sampling.n
        self._freed.set()
        self.tally.num_skipped = self._output.num_skipped
        if self._on_row is not None:
            self._on_row(self.tally)
