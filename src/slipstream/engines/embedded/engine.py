"""The embedded JAX engine: the asynchronous face of the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import EngineConfig
from slipstream.engines.embedded.intake import Intake
from slipstream.engines.embedded.programs import programs_for
from slipstream.engines.embedded.scheduler import Failed, Sample, Ticket, plan_scoring
from slipstream.engines.embedded.worker import Policy, Worker
from slipstream.errors import ConfigError, EngineLost, NotReady, UnknownVersion
from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.decoder import Params
from slipstream.types import (
    Berths,
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
from slipstream.weights.image import numpy_dtype
from slipstream.weights.transfer import Inbox
from slipstream.weights.transports import TRANSPORTS, host_identity, is_quick
from slipstream.weights.transports.tcp import Listen

MAX_SCORE_TOKENS = 8192

T = TypeVar("T")


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
        """`tokenizer` is a `tokenizers.Tokenizer`, needed for prompts and completions as text only. `version` is the
        version of `params`, 0 unless given."""
        if params is None and version is not None:
            raise ConfigError(f"version {version} was given without params: an engine without weights has no version")
        if version is not None and version < 0:
            raise ConfigError(f"version must be 0 or more, got {version}")
        options = options or EngineConfig()
        self._model, self._name, self._options = model, name, options
        self._max_length = _max_length(model, options)
        slots = options.max_concurrency
        programs = programs_for(model, options.tp, options.dtype, slots, self._max_length)
        self._placement = programs.placement
        self._tensors = families.tensors(model)
        self._parameters = families.parameters(model, options.tp)
        self._intake = Intake(model, tokenizer, self._max_length, name)
        listen = Listen(options.listen, options.certificate, options.key)
        self._inbox = Inbox(self._parameters, options.dtype, name, listen)
        self._num_bytes = numpy_dtype(options.dtype).itemsize * sum(math.prod(p.shape) for p in self._parameters)
        self._quick = False
        """The update under way is too small for a thread to be worth it."""
        self._shadow: Policy | None = None
        """A version that is staged and not committed."""
        policy = None if params is None else Policy(self._placement.place(params), version or 0)
        self._worker = Worker(programs, slots, policy, name)

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, name: str = "engine", options: EngineConfig | None = None
    ) -> EmbeddedEngine:
        """From an HF directory: `config.json`, and `tokenizer.json` and weights where they are there."""
        directory = Path(directory)
        model, tokenizer, params = ModelConfig.read(directory), None, None
        if (directory / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
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
            transports=TRANSPORTS,
            host=host_identity(),
            max_model_len=self._max_length,
            max_concurrency=self._options.max_concurrency,
            version=self._worker.version,
            pid=os.getpid(),
        )

    # --- rollouts ---

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion | Failure], None]:
        try:
            self._check_ready()
            job = _Job()
            tickets, failures = await asyncio.to_thread(self._intake.tickets, requests, job)
            self._worker.add(tickets)
        except (NotReady, EngineLost) as error:
            yield [Failure(request.id, error) for request in requests]
            return
        remaining = {ticket: ticket.sampling.n for ticket in tickets}
        try:
            if failures:
                yield failures
            while remaining:
                yield self._answers(await job.outcomes(), remaining)
        finally:
            if remaining:
                with contextlib.suppress(EngineLost):
                    self._worker.cancel(job)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        self._check_ready()
        self._intake.check_scorable(sequences)
        chunks = plan_scoring([len(tokens) for tokens in sequences], MAX_SCORE_TOKENS)
        futures = [asyncio.wrap_future(self._worker.score([sequences[i] for i in chunk])) for chunk in chunks]
        scores: dict[int, Score] = {}
        for chunk, (rows, version) in zip(chunks, await asyncio.gather(*futures)):
            for i, row in zip(chunk, rows):
                scores[i] = Score(tuple(sequences[i]), tuple(row.tolist()), version, self._name)
        return [scores[i] for i in range(len(sequences))]

    def _answers(self, outcomes: Sequence[Sample | Failed], remaining: dict[Ticket, int]) -> list[Completion | Failure]:
        """Completions and failures, counted off from `remaining`."""
        answers = self._intake.completions([outcome for outcome in outcomes if isinstance(outcome, Sample)])
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                answers.append(Failure(outcome.ticket.request_id, outcome.error))
                del remaining[outcome.ticket]
            elif remaining[outcome.ticket] > 1:
                remaining[outcome.ticket] -= 1
            else:
                del remaining[outcome.ticket]
        return answers

    def _check_ready(self) -> None:
        if self._worker.version < 0:
            raise NotReady(f"engine {self._name!r} has no weights yet; sync a policy to it first")

    # --- weights ---

    async def begin(self, version: int, offer: Offer) -> Berths:
        self._quick = is_quick(offer.transport, self._num_bytes)
        return await self._do(partial(self._inbox.begin, self._worker.version, version, offer))

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> StageReport:
        def receive() -> tuple[Params, StageReport]:
            arrays, report = self._inbox.receive(version, manifests)
            return self._placement.assemble(arrays, self._worker.params), report

        params, report = await self._do(receive)
        self._inbox.check(version)  # a rollback may have come meanwhile
        self._shadow = Policy(params, version)
        return report

    async def _do(self, work: Callable[[], T]) -> T:
        """In a thread, unless that would take longer than the work."""
        return work() if self._quick else await asyncio.to_thread(work)

    async def commit(self, version: int, in_flight: InFlight = "keep") -> CommitReport:
        report = CommitReport(0.0, 0.0)
        if version != self._worker.version:
            if self._shadow is None or self._shadow.version != version:
                raise UnknownVersion(
                    f"engine {self._name!r} has not staged version {version}: begin and stage it first"
                )
            report = await asyncio.wrap_future(self._worker.swap(self._shadow, in_flight))
        self._drop_shadow(version)
        with contextlib.suppress(UnknownVersion):  # committed before, or a rollback came too late and ended it
            self._inbox.finish(version)
        return report

    async def rollback(self, version: int) -> None:
        with contextlib.suppress(EngineLost):
            await asyncio.wrap_future(self._worker.forget_swap(version))
        self._drop_shadow(version)
        self._inbox.rollback(version)

    def _drop_shadow(self, version: int) -> None:
        if self._shadow is not None and self._shadow.version == version:
            self._shadow = None

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)
        self._inbox.close()


class _Job:
    """The mailbox of one `generate` call, filled by the compute thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[Sample | Failed]] = asyncio.Queue()

    def deliver(self, outcomes: list[Sample | Failed]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, outcomes)

    async def outcomes(self) -> list[Sample | Failed]:
        """All that has come; waits until there is something."""
        found = await self._queue.get()
        while not self._queue.empty():
            found = found + self._queue.get_nowait()
        return found


def _max_length(model: ModelConfig, options: EngineConfig) -> int:
    if options.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model knows {model.max_position_embeddings} positions "
            "(max_position_embeddings in config.json); 0 takes the model's limit"
        )
    return options.max_model_len or model.max_position_embeddings
