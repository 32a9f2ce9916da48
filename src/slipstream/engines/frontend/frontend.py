"""The front half that all engines share: requests in, completions and scores out, including detokenization."""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slipstream.engines.frontend.checks import unknown_adapter
from slipstream.engines.frontend.request_parser import (
    MIN_THREADED_BATCH,
    MIN_THREADED_CHARACTERS,
    RequestParser,
    SequenceLimits,
)
from slipstream.engines.frontend.sequence import (
    EngineRequest,
    EngineResult,
    FailedRequest,
    ResultSink,
    Sample,
    StreamedTokens,
)
from slipstream.errors import EngineLost, NotReady
from slipstream.model.checkpoints.served_model import ServedModel
from slipstream.model.config import ModelConfig
from slipstream.types import Completion, EngineInfo, Failure, Progress, Request, Score
from slipstream.weights.update.transport_choice import host_identity

NUM_THREADS = 2
"""Threads that tokenize long prompts and large batches."""


class EngineFrontend(ABC):
    """The base of all engines: `generate` and `score` over two callbacks.

    `submit` starts requests; their results arrive at each request's sink. `cancel` drops the unfinished requests of a sink."""

    def __init__(
        self,
        name: str,
        model: ModelConfig | ServedModel,
        tokenizer: Any,
        limits: SequenceLimits,
        submit: Callable[[Sequence[EngineRequest]], None],
        cancel: Callable[[ResultSink], None],
    ) -> None:
        self._name, self._model, self._max_length = name, model, limits.max_length
        self._parser = RequestParser(model, tokenizer, limits, name)
        self._submit, self._cancel = submit, cancel
        self._threads = ThreadPoolExecutor(NUM_THREADS, "slipstream-requests")
        """Not the event loop's own executor: long prompts must not hold up weight updates."""

    @abstractmethod
    def _check_ready(self) -> None:
        """Raise while the engine cannot take requests."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return ()

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot and fail its requests. An engine without adapters has nothing to do."""
        return None

    def _info(self, **fields: Any) -> EngineInfo:
        """`fields` are those of `EngineInfo` in which backends differ."""
        return EngineInfo(
            name=self._name,
            model=self._model.fingerprint(),
            host=host_identity(),
            max_model_len=self._max_length,
            pid=os.getpid(),
            vocab_size=self._model.vocab_size,
            **fields,
        )

    async def generate(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        sink = ResultSink()
        try:
            self._check_ready()
            if len(requests) < MIN_THREADED_BATCH and _num_characters(requests) < MIN_THREADED_CHARACTERS:
                accepted, failures = self._parser.parse(requests, sink)
            else:
                loop = asyncio.get_running_loop()
                accepted, failures = await loop.run_in_executor(self._threads, self._parser.parse, requests, sink)
            if unknown := {request for request in accepted if request.adapter not in ("", *self.adapters)}:
                failures += [
                    Failure(r.request_id, unknown_adapter(self._name, r.adapter, self.adapters)) for r in unknown
                ]
                accepted = [request for request in accepted if request not in unknown]
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

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, adapter: str = "") -> list[Score]:
        self._check_ready()
        if adapter not in ("", *self.adapters):
            raise unknown_adapter(self._name, adapter, self.adapters)
        sink = ResultSink()
        loop, parse = asyncio.get_running_loop(), self._parser.parse_scoring
        requests = await loop.run_in_executor(self._threads, parse, sequences, top_k, adapter, sink)
        self._submit(requests)
        scores: dict[EngineRequest, Score] = {}
        try:
            while len(scores) < len(requests):
                for result in await sink.receive():
                    if isinstance(result, FailedRequest):
                        raise result.error
                    assert isinstance(result, Sample), "scores are not streamed"
                    scores[result.request] = _score(result, self._name)
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
        return [*progress, *_completions(finished, self._parser.tokenizer, self._name), *failures]


def _num_characters(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt) for request in requests if isinstance(request.prompt, str))


def _completions(samples: Sequence[Sample], tokenizer: Any, engine: str) -> list[Completion]:
    texts = [""] * len(samples) if tokenizer is None else _decode([_visible_tokens(s) for s in samples], tokenizer)
    return [_completion(sample, text, engine) for sample, text in zip(samples, texts)]


def _score(sample: Sample, engine: str) -> Score:
    ((version, _),) = sample.versions
    return Score(
        token_ids=sample.request.prompt,
        logprobs=tuple(sample.raw_logprobs),
        version=version,
        engine=engine,
        top_logprobs=tuple(sample.top_logprobs),
    )


def _completion(sample: Sample, text: str, engine: str) -> Completion:
    reason = sample.finish_reason
    assert reason is not None, "only finished samples become completions"
    return Completion(
        request_id=sample.request.request_id,
        sample_index=sample.sample_index,
        prompt_token_ids=sample.request.prompt,
        token_ids=tuple(sample.tokens),
        text=_before_stop_string(text, sample) if sample.stopped else text,
        logprobs=tuple(sample.logprobs),
        raw_logprobs=tuple(sample.raw_logprobs),
        finish_reason=reason,
        spans=sample.spans,
        engine=engine,
        top_logprobs=tuple(sample.top_logprobs),
        adapter=sample.request.adapter,
        routes=sample.routes,
    )


def _visible_tokens(sample: Sample) -> list[int]:
    """The tokens without the stop token that ended the sample."""
    ends_with_stop = sample.stopped and sample.tokens[-1] in sample.request.stop_ids
    return sample.tokens[:-1] if ends_with_stop else sample.tokens


def _before_stop_string(text: str, sample: Sample) -> str:
    return text[: min((at for stop in sample.request.sampling.stop if (at := text.find(stop)) >= 0), default=len(text))]


def _decode(rows: list[list[int]], tokenizer: Any) -> list[str]:
    if len(rows) >= MIN_THREADED_BATCH:
        texts: list[str] = tokenizer.decode_batch(rows, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
