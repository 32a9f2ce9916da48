"""The front half that all engines share: requests in, completions and scores out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from slipstream.engines.frontend.completions import make_completions, make_score
from slipstream.engines.frontend.request_parser import MIN_THREADED_BATCH, RequestParser
from slipstream.engines.frontend.sequence import (
    EngineRequest,
    EngineResult,
    FailedRequest,
    ResultSink,
    Sample,
    StreamedTokens,
)
from slipstream.errors import EngineLost, NotReady
from slipstream.types import Completion, Failure, Progress, Request, Score


class EngineFrontend:
    """Implements `generate` and `score` of an engine over three callbacks.

    `submit` starts requests; their results arrive at each request's sink. `cancel` drops the unfinished requests of a sink.
    `check_ready` raises while the engine cannot take requests."""

    def __init__(
        self,
        parser: RequestParser,
        submit: Callable[[Sequence[EngineRequest]], None],
        cancel: Callable[[ResultSink], None],
        check_ready: Callable[[], None],
    ) -> None:
        self._parser, self._submit, self._cancel, self._check_ready = parser, submit, cancel, check_ready

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        sink = ResultSink()
        try:
            self._check_ready()
            if len(requests) < MIN_THREADED_BATCH:
                accepted, failures = self._parser.parse(requests, sink)
            else:
                accepted, failures = await asyncio.to_thread(self._parser.parse, requests, sink)
            self._submit(accepted)
        except (NotReady, EngineLost) as error:
            yield [Failure(request.id, error) for request in requests]
            return
        unfinished = {request: request.sampling.n for request in accepted}
        try:
            if failures:
                yield [*failures]
            while unfinished:
                if answers := self._answers(await sink.receive(), unfinished):
                    yield answers
        finally:
            if unfinished:
                with contextlib.suppress(EngineLost):
                    self._cancel(sink)

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        self._check_ready()
        sink = ResultSink()
        requests = await asyncio.to_thread(self._parser.parse_scoring, sequences, top_k, sink)
        self._submit(requests)
        scores: dict[EngineRequest, Score] = {}
        try:
            while len(scores) < len(requests):
                for result in await sink.receive():
                    if isinstance(result, FailedRequest):
                        raise result.error
                    assert isinstance(result, Sample), "scores are not streamed"
                    scores[result.request] = make_score(result, self._parser.engine)
        finally:
            if len(scores) < len(requests):
                with contextlib.suppress(EngineLost):
                    self._cancel(sink)
        return [scores[request] for request in requests]

    def _answers(
        self, results: Sequence[EngineResult], unfinished: dict[EngineRequest, int]
    ) -> list[Completion | Failure | Progress]:
        """Convert results to answers. Updates `unfinished`, the samples left per request; a failed request has none left."""
        finished: list[Sample] = []
        failures: list[Failure] = []
        progress: list[Progress] = []
        for result in results:
            request = result.request
            if request not in unfinished:
                continue
            if isinstance(result, StreamedTokens):
                progress.append(result.progress)
            elif isinstance(result, FailedRequest):
                failures.append(Failure(request.request_id, result.error))
                del unfinished[request]
            else:
                finished.append(result)
                unfinished[request] -= 1
                if not unfinished[request]:
                    del unfinished[request]
        return [*progress, *make_completions(finished, self._parser.tokenizer, self._parser.engine), *failures]
