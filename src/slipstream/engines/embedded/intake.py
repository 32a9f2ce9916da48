"""From requests to tickets, and from finished samples to completions: checks, tokenising, and decoding to text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from slipstream.engines.embedded.scheduler import Job, Sample, Ticket
from slipstream.errors import InvalidPrompt, SlipstreamError
from slipstream.model.config import ModelConfig
from slipstream.types import Completion, Failure, Request


class Intake:
    def __init__(self, model: ModelConfig, tokenizer: Any, max_length: int, engine: str) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self._model, self._tokenizer, self._max_length, self._engine = model, tokenizer, max_length, engine

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

    def check_tokens(self, tokens: Sequence[int], what: str) -> None:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= self._model.vocab_size:
            raise InvalidPrompt(
                f"{what} holds token id {low if low < 0 else high}; this model has 0 to {self._model.vocab_size - 1}. "
                "Was it made with another model's tokenizer?"
            )

    def check_scorable(self, sequences: Sequence[Sequence[int]]) -> None:
        for index, tokens in enumerate(sequences):
            self.check_tokens(tokens, f"sequence {index}")
            if not 2 <= len(tokens) <= self._max_length:
                raise InvalidPrompt(
                    f"sequence {index} has {len(tokens)} tokens; a score takes 2 to {self._max_length} (max_model_len)"
                )

    def completions(self, samples: Sequence[Sample]) -> list[Completion | Failure]:
        """Of finished samples."""
        texts = [""] * len(samples)
        if self._tokenizer is not None:
            bare = [s.tokens[:-1] if s.finish_reason == "stop" else s.tokens for s in samples]
            texts = self._tokenizer.decode_batch(bare, skip_special_tokens=True)
        return [self._completion(sample, text) for sample, text in zip(samples, texts)]

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
        self.check_tokens(prompt, "the prompt")
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
        )
