"""Samples in the server's hands: each a request of its own, under one version from its first token to its last.

A commit cuts off what runs, while the server is paused. What has come until then was drawn under the old version, to the token;
what was drawn and had not come yet is drawn anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from slipstream.engines.errands import Errands
from slipstream.engines.remote.dialect import Dialect, Scores, is_plain
from slipstream.engines.sequence import Failed, Sample
from slipstream.errors import EngineFailure, EngineLost, SlipstreamError


class Run:
    """One request to the server."""

    def __init__(self, sample: Sample, task: asyncio.Task[None], version: int) -> None:
        self.sample, self.task, self.version = sample, task, version
        self.cut: Literal["", "go on", "begin anew"] = ""

    def cut_off(self, keep: bool) -> None:
        """It is taken up again later; from where it is, if so asked and if that changes nothing."""
        ticket = self.sample.ticket
        goes_on = keep and not ticket.is_scoring and is_plain(ticket.sampling)
        self.cut = "go on" if goes_on else "begin anew"
        self.task.cancel()


class Runs(Errands):
    """`salt` names a version as nobody else would: a prompt that carries it finds nothing in the prefix cache that another
    version has put there. `verify` raises unless the server still has the weights that we think it has, by the label that its
    answer carried, if it did; `lose` hears of a server that is gone."""

    def __init__(
        self,
        dialect: Dialect,
        limit: int,
        salt: Callable[[int], str],
        verify: Callable[[str | None], Awaitable[None]],
        lose: Callable[[EngineLost], None],
    ) -> None:
        super().__init__()
        self._dialect, self._salt, self._verify, self._lose = dialect, salt, verify, lose
        self._slots = asyncio.Semaphore(limit)
        self.running: set[Run] = set()

    async def cut_off(self, keep: bool) -> None:
        """Returns when no request of ours is in the server's hands. The gate must be closed."""
        for run in self.running:
            run.cut_off(keep)
        while self.running:
            await asyncio.sleep(0.001)

    async def _run(self, sample: Sample) -> None:
        """From the first token to the last."""
        job = sample.ticket.job
        try:
            async with self._slots:
                while not await self._attempt(sample):
                    pass
            job.deliver([sample])
        except SlipstreamError as error:
            if isinstance(error, EngineLost):
                self._lose(error)
            job.deliver([Failed(sample.ticket, error)])
        except Exception as error:
            failure = EngineFailure(f"generating at {self._dialect.where} failed: {type(error).__name__}: {error}")
            job.deliver([Failed(sample.ticket, failure)])

    async def _attempt(self, sample: Sample) -> bool:
        """False when a commit cut it off."""
        await self.gate.wait()
        task = asyncio.current_task()
        assert task is not None
        run = Run(sample, task, self.version)
        self.running.add(run)
        try:
            await self._verify(await (self._score(run) if sample.ticket.is_scoring else self._draw(run)))
            return True
        except asyncio.CancelledError:
            if not run.cut or task.uncancel():  # what is left then is a real cancellation
                raise
            if run.cut == "begin anew":
                sample.restart()
            return False
        finally:
            self.running.discard(run)

    async def _draw(self, run: Run) -> str | None:
        sample, sampling, label = run.sample, run.sample.ticket.sampling, None
        scored = await self._dialect.needs_score(sampling)
        count = 0 if scored else sampling.top_logprobs
        if sample.finish_reason is None:
            label = await self._dialect.draw(sample, run.version, self._salt(run.version), count)
        if sample.finish_reason is None:
            raise EngineFailure(
                f"{self._dialect.where} ended a request after {len(sample.tokens)} of {sample.ticket.limit} tokens"
            )
        if scored:
            raw, tops, label = await self._scores(run, sample.ids, sampling.top_logprobs)
            count = len(sample.tokens)
            sample.raw_logprobs, sample.tops = raw[-count:], tops[-count:]
            if sampling.temperature == 0:
                sample.logprobs = raw[-count:]
        return label

    async def _score(self, run: Run) -> str | None:
        sample = run.sample
        raw, tops, label = await self._scores(run, sample.ticket.prompt, sample.ticket.sampling.top_logprobs)
        sample.raw_logprobs, sample.tops, sample.versions = raw, tops, [(run.version, 0)]
        return label

    async def _scores(self, run: Run, tokens: tuple[int, ...], top_k: int) -> Scores:
        return await self._dialect.scores(tokens, top_k, self._salt(run.version), run.sample.ticket.priority)
