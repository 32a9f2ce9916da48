"""The embedded JAX engine: the asynchronous face of the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig
from slipstream.engines.embedded.placement import Placement
from slipstream.engines.embedded.programs import Programs
from slipstream.engines.embedded.scheduler import Failed, Running, Ticket, plan_scoring
from slipstream.engines.embedded.worker import Policy, Worker
from slipstream.errors import ConfigError, EngineLost, InvalidPrompt, NotReady, SlipstreamError, UnknownVersion
from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.decoder import Params
from slipstream.types import (
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    InFlight,
    Offer,
    Request,
    Score,
    StageReport,
)
from slipstream.weights import families
from slipstream.weights.transfer import Inbox
from slipstream.weights.transports import host_identity

MAX_SCORE_TOKENS = 8192


class EmbeddedEngine:
    """See `engines.base.Engine`. `params` are copied; without them the engine waits for its first update.

    engine = EmbeddedEngine.from_directory("my-model", options=EngineConfig(max_concurrency=64))
    async for batch in engine.generate(requests): ...
    await engine.close()
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params | None,
        *,
        name: str = "engine",
        tokenizer: Any = None,
        options: EngineConfig | None = None,
        version: int | None = None,
    ) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`, needed for prompts and completions as text only. `version` is that of
        `params` (0 unless given)."""
        options = options or EngineConfig()
        if (params is None) != (version is None or version < 0) and version is not None:
            raise ConfigError(f"version {version} was given {'with' if params is not None else 'without'} params")
        self._model, self._name, self._tokenizer, self._options = model, name, tokenizer, options
        self._max_length = _max_length(model, options)
        self._placement = Placement(model, options.tp, options.dtype)
        self._tensors = families.tensors(model)
        self._parameters = families.parameters(model, options.tp)
        self._inbox = Inbox(self._parameters, options.dtype, name)
        self._shadow: Policy | None = None
        """A version that is staged and not committed."""
        policy = None if params is None else Policy(self._placement.place(params), version or 0)
        programs = Programs(model, self._placement, options.max_concurrency, self._max_length)
        self._worker = Worker(programs, options.max_concurrency, policy, name)

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, name: str = "engine", options: EngineConfig | None = None
    ) -> EmbeddedEngine:
        """From an HF directory: `config.json`, and `tokenizer.json` and weights where they are there."""
        directory = Path(directory)
        model, tokenizer = ModelConfig.read(directory), None
        if (directory / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        params = None
        if checkpoint.has_weights(directory):
            params = checkpoint.unflatten(checkpoint.read_arrays(directory, model))
        return cls(model, params, name=name, tokenizer=tokenizer, options=options)

    def describe(self) -> EngineInfo:
        return EngineInfo(
            name=self._name,
            kind="embedded",
            model=self._model.fingerprint(),
            dtype=self._options.dtype,
            num_ranks=self._options.tp,
            tensors=self._tensors,
            parameters=self._parameters,
            transports=("memory", "shm"),
            host=host_identity(),
            max_model_len=self._max_length,
            max_concurrency=self._options.max_concurrency,
            version=self._worker.version,
            pid=os.getpid(),
        )

    # --- rollouts ---

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[list[Completion | Failure]]:
        job = _Job()
        tickets, failures = await self._accept(requests, job)
        if failures:
            yield failures
        remaining = {ticket: ticket.sampling.n for ticket in tickets}
        try:
            while remaining:
                yield self._answers(await job.outcomes(), remaining)
        finally:
            if remaining:
                with contextlib.suppress(EngineLost):
                    self._worker.cancel(job)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        if self._worker.version < 0:
            raise self._not_ready()
        for index, tokens in enumerate(sequences):
            self._check_tokens(tokens, f"sequence {index}")
            if not 2 <= len(tokens) <= self._max_length:
                raise InvalidPrompt(
                    f"sequence {index} has {len(tokens)} tokens; a score takes 2 to {self._max_length} (max_model_len)"
                )
        scores: list[Score | None] = [None] * len(sequences)
        chunks = plan_scoring([len(tokens) for tokens in sequences], MAX_SCORE_TOKENS)
        futures = [asyncio.wrap_future(self._worker.score([sequences[i] for i in chunk])) for chunk in chunks]
        for chunk, (rows, version) in zip(chunks, await asyncio.gather(*futures)):
            for i, row in zip(chunk, rows):
                scores[i] = Score(tuple(sequences[i]), tuple(row.tolist()), version, self._name)
        return [score for score in scores if score is not None]

    async def _accept(self, requests: Sequence[Request], job: _Job) -> tuple[list[Ticket], list[Completion | Failure]]:
        """Hands what is valid to the worker; what is not, or comes when the engine cannot serve, is a failure each."""
        tickets: list[Ticket] = []
        failures: list[Completion | Failure] = []
        prompts = await self._encode(requests)
        for request, prompt in zip(requests, prompts):
            try:
                tickets.append(self._ticket(request, prompt, job))
            except SlipstreamError as error:
                failures.append(Failure(request.id, error))
        if tickets:
            try:
                self._worker.add(tickets)
            except EngineLost as error:
                return [], failures + [Failure(ticket.request_id, error) for ticket in tickets]
        return tickets, failures

    async def _encode(self, requests: Sequence[Request]) -> list[tuple[int, ...] | None]:
        """Token ids; None for text that there is no tokenizer for."""
        texts = [request.prompt for request in requests if isinstance(request.prompt, str)]
        encoded: list[Any] = []
        if texts and self._tokenizer is not None:
            encoded = await asyncio.to_thread(self._tokenizer.encode_batch, texts)
        ids = iter(encoded)
        return [
            request.prompt if isinstance(request.prompt, tuple) else tuple(next(ids).ids) if encoded else None
            for request in requests
        ]

    def _ticket(self, request: Request, prompt: tuple[int, ...] | None, job: _Job) -> Ticket:
        if self._worker.version < 0:
            raise self._not_ready()
        if prompt is None:
            raise InvalidPrompt(
                f"engine {self._name!r} has no tokenizer: send token ids, or put tokenizer.json in the model's directory"
            )
        if not prompt:
            raise InvalidPrompt(f"the tokenizer makes no tokens of the prompt {request.prompt!r}")
        self._check_tokens(prompt, "the prompt")
        if len(prompt) >= self._max_length:
            raise InvalidPrompt(
                f"the prompt has {len(prompt)} tokens, which leaves no room in max_model_len={self._max_length}; "
                "shorten it, or raise max_model_len if the model allows"
            )
        sampling = request.sampling
        return Ticket(
            request_id=request.id,
            prompt=prompt,
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            limit=min(sampling.max_tokens, self._max_length - len(prompt)),
            stop=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._model.eos_token_ids),
            job=job,
        )

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        if tokens and (min(tokens) < 0 or max(tokens) >= self._model.vocab_size):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise InvalidPrompt(
                f"{what} holds token id {wrong}; this model has ids 0 to {self._model.vocab_size - 1}. "
                "Was it made with another model's tokenizer?"
            )

    def _answers(
        self, outcomes: Sequence[Running | Failed], remaining: dict[Ticket, int]
    ) -> list[Completion | Failure]:
        """Completions and failures, counted off from `remaining`."""
        answers: list[Completion | Failure] = []
        done = [outcome for outcome in outcomes if isinstance(outcome, Running)]
        for sequence, text in zip(done, self._decode_texts(done)):
            ticket = sequence.ticket
            remaining[ticket] -= 1
            if not remaining[ticket]:
                del remaining[ticket]
            answers.append(_completion(sequence, text, self._name))
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                del remaining[outcome.ticket]
                answers.append(Failure(outcome.ticket.request_id, outcome.error))
        return answers

    def _decode_texts(self, sequences: Sequence[Running]) -> list[str]:
        if self._tokenizer is None:
            return [""] * len(sequences)
        bare = [s.tokens[:-1] if s.finish_reason == "stop" else s.tokens for s in sequences]
        return self._tokenizer.decode_batch(bare, skip_special_tokens=True)

    def _not_ready(self) -> NotReady:
        return NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> None:
        await asyncio.to_thread(self._inbox.begin, self._worker.version, version, offer)

    async def stage(self, version: int, manifests: Sequence[bytes]) -> StageReport:
        arrays, report = await asyncio.to_thread(self._inbox.receive, version, manifests)
        params = await asyncio.to_thread(self._placement.assemble, arrays)
        self._inbox.check(version)  # a rollback may have come meanwhile
        self._shadow = Policy(params, version)
        return report

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        if version == self._worker.version:
            return CommitReport(0.0, 0.0)
        if self._shadow is None or self._shadow.version != version:
            raise UnknownVersion(f"engine {self._name!r} has not staged version {version}: begin and stage it first")
        report = await asyncio.wrap_future(self._worker.swap(self._shadow, in_flight))
        self._shadow = None
        with contextlib.suppress(UnknownVersion):  # a rollback that came too late has ended it already
            self._inbox.finish(version)
        return report

    async def rollback(self, version: int) -> None:
        with contextlib.suppress(EngineLost):
            await asyncio.wrap_future(self._worker.forget_swap(version))
        if self._shadow is not None and self._shadow.version == version:
            self._shadow = None
        self._inbox.rollback(version)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)
        self._inbox.close()


class _Job:
    """The mailbox of one `generate` call, filled by the compute thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[Running | Failed]] = asyncio.Queue()

    def deliver(self, outcomes: list[Running | Failed]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, outcomes)

    async def outcomes(self) -> list[Running | Failed]:
        """All that has come; waits until there is something."""
        found = await self._queue.get()
        while not self._queue.empty():
            found = found + self._queue.get_nowait()
        return found


def _completion(sequence: Running, text: str, engine: str) -> Completion:
    reason = sequence.finish_reason
    assert reason is not None, "only finished sequences are delivered"
    return Completion(
        request_id=sequence.ticket.request_id,
        sample_index=sequence.sample_index,
        prompt_token_ids=sequence.ticket.prompt,
        token_ids=tuple(sequence.tokens),
        text=text,
        logprobs=tuple(sequence.logprobs),
        raw_logprobs=tuple(sequence.raw_logprobs),
        finish_reason=reason,
        spans=sequence.spans,
        engine=engine,
    )


def _max_length(model: ModelConfig, options: EngineConfig) -> int:
    if options.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model knows {model.max_position_embeddings} positions "
            "(max_position_embeddings in config.json); 0 takes the model's limit"
        )
    return options.max_model_len or model.max_position_embeddings
