"""From requests to tickets, and from finished samples to completions: checks, tokenising, and decoding to text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.engines.sequence import Job, Sample, Ticket
from slipstream.errors import InvalidPrompt, InvalidSampling, OutOfPages, SlipstreamError
from slipstream.model.config import ModelConfig
from slipstream.types import MAX_STOPS, MAX_TOP_LOGPROBS, Completion, Failure, Request, SamplingParams, Score

MANY = 32
"""Rows from which on it pays to hand them to threads: fewer are done before a busy machine has woken one."""


class Room(NamedTuple):
    """What a sequence may take up in an engine."""

    max_length: int
    page_size: int
    num_pages: int


class Intake:
    """For every engine that gets its tokens from token ids."""

    def __init__(self, model: ModelConfig, tokenizer: Any, room: Room, engine: str) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self._model, self._tokenizer, self._room, self._engine = model, tokenizer, room, engine
        self._max_length = room.max_length

    def tickets(self, requests: Sequence[Request], job: Job) -> tuple[list[Ticket], list[Completion | Failure]]:
        """A ticket for each request that can be served, a failure for each that cannot."""
        tickets: list[Ticket] = []
        failures: list[Completion | Failure] = []
        encoded = self._encode([r.prompt for r in requests if isinstance(r.prompt, str)])
        for request in requests:
            try:
                prompt = next(encoded) if isinstance(request.prompt, str) else request.prompt
                tickets.append(self._ticket(request, prompt, job))
            except SlipstreamError as error:
                failures.append(Failure(request.id, error))
        return tickets, failures

    def scoring_tickets(self, sequences: Sequence[Sequence[int]], top_k: int, job: Job) -> list[Ticket]:
        self._check_top(top_k, "top_k of a score")
        for index, tokens in enumerate(sequences):
            self._check_tokens(tokens, f"sequence {index}")
            if not 2 <= len(tokens) <= self._max_length:
                raise InvalidPrompt(
                    f"sequence {index} has {len(tokens)} tokens; a score takes 2 to {self._max_length} (max_model_len)"
                )
            self._check_pages(len(tokens), f"sequence {index} has {len(tokens)} tokens")
        sampling = SamplingParams(max_tokens=1, top_logprobs=top_k)
        return [
            Ticket(str(index), tuple(tokens), sampling, seed=0, limit=0, stop=(), job=job)
            for index, tokens in enumerate(sequences)
        ]

    def score(self, sample: Sample) -> Score:
        """Of a sequence that was scored."""
        ((version, _),) = sample.versions
        return Score(
            token_ids=sample.ticket.prompt,
            logprobs=tuple(sample.raw_logprobs),
            version=version,
            engine=self._engine,
            top_logprobs=tuple(sample.tops),
        )

    def completions(self, samples: Sequence[Sample]) -> list[Completion | Failure]:
        """Of finished samples."""
        texts = [""] * len(samples)
        if self._tokenizer is not None:
            bare = [s.tokens[:-1] if s.tokens[-1] in s.ticket.stop and s.stopped else s.tokens for s in samples]
            texts = self._decode(bare)
        return [self._completion(sample, _before(text, sample)) for sample, text in zip(samples, texts)]

    def _decode(self, rows: list[list[int]]) -> list[str]:
        if len(rows) >= MANY:
            found: list[str] = self._tokenizer.decode_batch(rows, skip_special_tokens=True)
            return found
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def _encode(self, texts: list[str]) -> Any:
        """An iterator of token ids; of None where there is no tokenizer."""
        if self._tokenizer is None or not texts:
            return iter([None] * len(texts))
        return (tuple(encoding.ids) for encoding in self._tokenizer.encode_batch(texts))

    def _ticket(self, request: Request, prompt: tuple[int, ...] | None, job: Job) -> Ticket:
        if prompt is None:
            raise InvalidPrompt(
                f"engine {self._engine!r} has no tokenizer: send token ids, or put tokenizer.json beside its config"
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
        self._check_top(sampling.top_logprobs, "top_logprobs")
        if (highest := max((token for token, _ in sampling.logit_bias), default=0)) >= self._model.vocab_size:
            raise InvalidSampling(
                f"logit_bias names token id {highest}; this model has 0 to {self._model.vocab_size - 1}"
            )
        limit = min(sampling.max_tokens, self._max_length - len(prompt))
        self._check_pages(len(prompt) + limit, f"the prompt's {len(prompt)} tokens and {limit} more (max_tokens)")
        stop = dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._model.eos_token_ids)))
        check_stops(stop)
        return Ticket(
            request_id=request.id,
            prompt=prompt,
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            limit=limit,
            stop=tuple(stop),
            job=job,
            priority=request.priority,
            find_stop=self._stop_finder(sampling) if sampling.stop else None,
            tells=request.progress,
        )

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= self._model.vocab_size:
            raise InvalidPrompt(
                f"{what} holds token id {low if low < 0 else high}; this model has 0 to {self._model.vocab_size - 1}. "
                "Was it made with another model's tokenizer?"
            )

    def _check_top(self, count: int, what: str) -> None:
        most = min(MAX_TOP_LOGPROBS, self._model.vocab_size)
        if not 0 <= count <= most:
            raise InvalidSampling(f"{what} must be 0 to {most}, got {count}")

    def _check_pages(self, length: int, what: str) -> None:
        needed, room = -(-length // self._room.page_size), self._room
        if needed > room.num_pages:
            raise OutOfPages(
                f"{what} need {needed} pages of the KV cache, and engine {self._engine!r} has {room.num_pages} of "
                f"{room.page_size} tokens; ask for less, or raise kv_cache_tokens"
            )

    def _stop_finder(self, sampling: SamplingParams) -> Callable[[Sequence[int]], int | None]:
        if self._tokenizer is None:
            raise InvalidSampling(
                f"engine {self._engine!r} has no tokenizer, so it cannot look for the stop texts {sampling.stop!r}; "
                "use stop_token_ids, or put tokenizer.json beside its config"
            )

        def ends(tokens: Sequence[int]) -> bool:
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
            return any(stop in text for stop in sampling.stop)

        def find(tokens: Sequence[int]) -> int | None:
            if len(tokens) < sampling.min_tokens or not ends(tokens):
                return None
            return next(count for count in range(max(sampling.min_tokens, 1), len(tokens) + 1) if ends(tokens[:count]))

        return find

    def _completion(self, sample: Sample, text: str) -> Completion:
        reason = sample.finish_reason
        assert reason is not None, "only finished samples are delivered"
        return Completion(
            request_id=sample.ticket.request_id,
            sample_index=sample.sample_index,
            prompt_token_ids=sample.ticket.prompt,
            token_ids=tuple(sample.tokens),
            text=text,
            logprobs=tuple(sample.logprobs),
            raw_logprobs=tuple(sample.raw_logprobs),
            finish_reason=reason,
            spans=sample.spans,
            engine=self._engine,
            top_logprobs=tuple(sample.tops),
        )


def _before(text: str, sample: Sample) -> str:
    """Without the stop text that ended it and what came after."""
    if not sample.stopped:
        return text
    return text[: min((at for stop in sample.ticket.sampling.stop if (at := text.find(stop)) >= 0), default=len(text))]


def check_stops(stops: Collection[int]) -> None:
    """Where a request comes in, it alone is refused; later, whole steps would fail."""
    if len(stops) > MAX_STOPS:
        raise InvalidSampling(
            f"at most {MAX_STOPS} stop tokens, the model's own included; got {len(stops)}. Name fewer stop_token_ids, or set "
            "ignore_eos"
        )


def read_tokenizer(directory: Path) -> Any:
    """Of an HF directory; None where there is none."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
