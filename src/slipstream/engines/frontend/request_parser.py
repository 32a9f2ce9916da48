"""Requests to engine requests: validation and tokenization."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.engines.frontend.sequence import EngineRequest, ResultSink
from slipstream.errors import InvalidPrompt, InvalidSampling, OutOfPages, SlipstreamError, Unsupported
from slipstream.model.checkpoints.served_model import ServedModel
from slipstream.model.config import ModelConfig
from slipstream.types import MAX_STOPS, MAX_TOP_LOGPROBS, Failure, Request, SamplingParams

MIN_THREADED_BATCH, MIN_THREADED_CHARACTERS = 32, 1 << 14
"""Batches from this size on, or with this much text, use threads: tokenizing them on the event loop would hold up heartbeats.
Smaller ones finish before a busy machine has woken a thread."""


class SequenceLimits(NamedTuple):
    """The longest sequence an engine takes, and the size of its KV cache."""

    max_length: int
    page_size: int
    num_pages: int


class RequestParser:
    def __init__(self, model: ModelConfig | ServedModel, tokenizer: Any, limits: SequenceLimits, engine: str) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` or None."""
        self.tokenizer, self.engine = tokenizer, engine
        self._model, self._limits = model, limits
        self._max_characters = 0 if tokenizer is None else limits.max_length * longest_token(tokenizer)

    def parse(self, requests: Sequence[Request], sink: ResultSink) -> tuple[list[EngineRequest], list[Failure]]:
        """Return an engine request for every valid request and a failure for every invalid one."""
        accepted: list[EngineRequest] = []
        failures: list[Failure] = []
        texts = [r.prompt for r in requests if isinstance(r.prompt, str)]
        encoded = self._encode([text for text in texts if len(text) <= self._max_characters])
        for request in requests:
            try:
                prompt = self._prompt(request.prompt, encoded) if isinstance(request.prompt, str) else request.prompt
                accepted.append(self._parse(request, prompt, sink))
            except SlipstreamError as error:
                failures.append(Failure(request.id, error))
        return accepted, failures

    def parse_scoring(
        self, sequences: Sequence[Sequence[int]], top_k: int, adapter: str, sink: ResultSink
    ) -> list[EngineRequest]:
        """Return one engine request per sequence. Raises if any sequence is invalid."""
        num_labels = self._model.num_labels
        if top_k and num_labels:
            raise Unsupported("a model for sequence classification has no likely tokens; score with top_k = 0")
        self._check_num_top(top_k, "top_k of a score")
        max_length = self._limits.max_length
        for index, tokens in enumerate(sequences):
            if not 2 <= len(tokens) <= max_length:
                raise InvalidPrompt(
                    f"sequence {index} has {len(tokens)} tokens; a score takes 2 to {max_length} (max_model_len)"
                )
            self._check_tokens(tokens, f"sequence {index}")
            if num_labels and tokens[-1] >= num_labels:
                raise InvalidPrompt(
                    f"sequence {index} ends with {tokens[-1]}, the label to score; this model has labels 0 to {num_labels - 1}"
                )
            self._check_pages(len(tokens), f"sequence {index}, of {len(tokens)} tokens,")
        sampling = SamplingParams(max_tokens=1, top_logprobs=top_k)
        return [
            EngineRequest(
                str(i), tuple(row), sampling, seed=0, max_new_tokens=0, stop_ids=(), sink=sink, adapter=adapter
            )
            for i, row in enumerate(sequences)
        ]

    def _encode(self, texts: list[str]) -> Iterator[tuple[int, ...]]:
        if not texts:
            return iter(())
        return (tuple(encoding.ids) for encoding in self.tokenizer.encode_batch(texts))

    def _prompt(self, text: str, encoded: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the next of `encoded`, which are the tokens of the texts that can be encoded, in order."""
        if self.tokenizer is None:
            raise InvalidPrompt(
                f"engine {self.engine!r} has no tokenizer; send token ids, or put tokenizer.json next to its config.json"
            )
        if len(text) > self._max_characters:
            raise too_many_characters(len(text), self._limits.max_length)
        if not (tokens := next(encoded)):
            raise InvalidPrompt(f"the prompt {text[:100]!r} has no tokens")
        return tokens

    def _parse(self, request: Request, prompt: tuple[int, ...], sink: ResultSink) -> EngineRequest:
        max_length = self._limits.max_length
        if self._model.num_labels:
            raise Unsupported(
                f"engine {self.engine!r} serves a model for sequence classification, which generates nothing; use bridge.score"
            )
        if len(prompt) >= max_length:
            raise InvalidPrompt(
                f"the prompt has {len(prompt)} tokens, which leaves no room for a completion in "
                f"max_model_len={max_length}; shorten it, or raise max_model_len if the model allows"
            )
        self._check_tokens(prompt, "the prompt")
        sampling = request.sampling
        self._check_num_top(sampling.top_logprobs, "top_logprobs")
        if (highest := max((token for token, _ in sampling.logit_bias), default=0)) >= self._model.vocab_size:
            raise InvalidSampling(
                f"logit_bias names token id {highest}; this model has ids 0 to {self._model.vocab_size - 1}"
            )
        max_new_tokens = min(sampling.max_tokens, max_length - len(prompt))
        total = len(prompt) + max_new_tokens
        self._check_pages(total, f"a prompt of {len(prompt)} tokens with a completion of up to {max_new_tokens}")
        eos_ids = () if sampling.ignore_eos else self._model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_ids)))
        check_stop_ids(stop_ids)
        return EngineRequest(
            request_id=request.id,
            prompt=prompt,
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sink=sink,
            priority=request.priority,
            find_stop_string=self._stop_string_finder(sampling) if sampling.stop else None,
            streams=request.progress,
            adapter=request.adapter,
        )

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= self._model.vocab_size:
            raise InvalidPrompt(
                f"{what} has token id {low if low < 0 else high}; this model has ids 0 to {self._model.vocab_size - 1}. "
                "Was it encoded with another model's tokenizer?"
            )

    def _check_num_top(self, count: int, what: str) -> None:
        most = min(MAX_TOP_LOGPROBS, self._model.vocab_size)
        if not 0 <= count <= most:
            raise InvalidSampling(f"{what} must be 0 to {most}, got {count}")

    def _check_pages(self, length: int, what: str) -> None:
        limits = self._limits
        needed = -(-length // limits.page_size)
        if needed > limits.num_pages:
            raise OutOfPages(
                f"{what} needs {needed} pages of KV cache, but engine {self.engine!r} has {limits.num_pages} pages of "
                f"{limits.page_size} tokens; ask for fewer tokens, or raise kv_cache_tokens"
            )

    def _stop_string_finder(self, sampling: SamplingParams) -> Callable[[Sequence[int]], int | None]:
        if self.tokenizer is None:
            raise InvalidSampling(
                f"engine {self.engine!r} has no tokenizer, so it cannot search for the stop strings {sampling.stop!r}; "
                "use stop_token_ids, or put tokenizer.json next to its config.json"
            )

        def has_stop_string(tokens: Sequence[int]) -> bool:
            text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
            return any(stop in text for stop in sampling.stop)

        def find(tokens: Sequence[int]) -> int | None:
            if len(tokens) < sampling.min_tokens or not has_stop_string(tokens):
                return None
            counts = range(max(sampling.min_tokens, 1), len(tokens) + 1)
            return next(count for count in counts if has_stop_string(tokens[:count]))

        return find


def longest_token(tokenizer: Any) -> int:
    """Return how many characters a token stands for at most. A text of more than `max_model_len` times this need not be
    encoded."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def too_many_characters(num_characters: int, max_length: int) -> InvalidPrompt:
    return InvalidPrompt(
        f"the prompt has {num_characters} characters, which cannot fit into max_model_len={max_length}; shorten it, or raise "
        "max_model_len if the model allows"
    )


def check_stop_ids(stop_ids: Collection[int]) -> None:
    """Checked when a request arrives, so that it fails alone; inside a batch it would fail the whole step."""
    if len(stop_ids) > MAX_STOPS:
        raise InvalidSampling(
            f"at most {MAX_STOPS} stop tokens are supported, including the model's own; got {len(stop_ids)}. Use fewer "
            "stop_token_ids, or set ignore_eos"
        )


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer of an HF directory, or None if it has none."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
