"""Samples in vLLM's hands: each a request of its own, begun as often as a commit says that it must begin anew."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.engines.errands import Errands
from slipstream.engines.sequence import Failed, Sample
from slipstream.engines.vllm import compat, words
from slipstream.errors import EngineFailure, SlipstreamError


@dataclass(eq=False)
class Run:
    """One try at a sample."""

    sample: Sample
    task: asyncio.Task[None]
    id: str
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(version, first token)`: who draws what."""
    again: bool = False
    """It is to begin anew."""

    def restart(self) -> None:
        self.again = True
        self.task.cancel()


class Runs(Errands):
    """`explain` makes one of our errors of one of vLLM's."""

    def __init__(self, llm: Any, explain: Callable[[str, Exception], SlipstreamError]) -> None:
        super().__init__()
        self._llm, self._explain = llm, explain
        self.running: dict[str, Run] = {}
        """What vLLM has, by the ids that it knows them by."""
        self._booked = asyncio.Event()
        """While it is cleared, it is being found out which version drew what: nothing is taken from vLLM's answers."""
        self._booked.set()
        self._ids = itertools.count()

    @contextlib.asynccontextmanager
    async def held_back(self) -> AsyncIterator[None]:
        """Answers of vLLM's wait, until their versions are known."""
        self._booked.clear()
        try:
            yield
        finally:
            self._booked.set()

    async def _run(self, sample: Sample) -> None:
        """From the first token to the last."""
        task, job = asyncio.current_task(), sample.ticket.job
        assert task is not None
        while True:
            await self.gate.wait()
            run = Run(sample, task, f"s{next(self._ids)}", [(self.version, 0)])
            self.running[run.id] = run
            try:
                await self._draw(run)
                return job.deliver([sample])
            except asyncio.CancelledError:
                if not run.again or task.uncancel():  # what is left then is a real cancellation
                    raise
                sample.restart()
            except SlipstreamError as error:
                return job.deliver([Failed(sample.ticket, error)])
            except Exception as error:
                return job.deliver([Failed(sample.ticket, self._explain("generating", error))])
            finally:
                del self.running[run.id]

    async def _draw(self, run: Run) -> None:
        sample = run.sample
        prompt = compat.token_prompt(sample.ticket.prompt, f"version {self.version}")
        if sample.ticket.is_scoring:
            params = words.scoring_params(sample)
        else:
            params = words.sampling_params(sample)
        outputs = self._llm.generate(prompt, params, run.id, priority=sample.ticket.priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await self._booked.wait()
                if sample.ticket.is_scoring:
                    words.take_scores(sample, output, run.versions[0][0])
                else:
                    words.take_tokens(sample, output.outputs[0], run.versions)
                if sample.stopped:
                    return
        if not sample.ticket.is_scoring and sample.finish_reason is None:
            raise EngineFailure(f"vLLM ended a request after {len(sample.tokens)} of {sample.ticket.limit} tokens")
