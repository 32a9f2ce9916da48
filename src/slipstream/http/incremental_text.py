"""Incremental detokenization for streaming. Emitted text is never retracted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.http.errors import HttpError
from slipstream.http.tokenizer import ChatTokenizer
from slipstream.types import Completion, Progress, TopLogprobs

INCOMPLETE = "\ufffd"
"""How a tokenizer decodes the first bytes of a character."""


@dataclass(frozen=True)
class TextDelta:
    """What a completion adds to the text and tokens emitted before."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    """Empty while the completion is unfinished."""
    top_logprobs: tuple[TopLogprobs, ...]


class IncrementalDetokenizer:
    """Decodes one choice. Text that may be the start of a stop string, or an incomplete character, is held back."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._emitted = ""
        self._held = ""
        self._start = self._end = 0
        """Tokens up to `_end` are decoded. Those from `_start` are decoded again with the next ones, because a token's text may
        depend on its neighbors."""

    def add(self, progress: Progress) -> TextDelta | None:
        """Return what is new in `progress`, or None."""
        new = self._append(progress.start, progress.token_ids)
        if not new:
            return None
        skip = len(progress.token_ids) - len(new)
        text = self._decode()
        self._emitted += text
        return TextDelta(text, new, progress.logprobs[skip:], (), progress.top_logprobs[skip:])

    def finish(self, completion: Completion) -> TextDelta:
        """Return everything not emitted yet. The text is the completion's, which ends before a stop string."""
        num_emitted = len(self._tokens)
        new = self._append(0, completion.token_ids)
        if len(completion.token_ids) < num_emitted:
            raise _restarted()
        return TextDelta(
            completion.text[len(self._emitted) :],
            new,
            completion.logprobs[num_emitted:],
            completion.raw_logprobs[num_emitted:],
            completion.top_logprobs[num_emitted:],
        )

    def _append(self, start: int, tokens: Sequence[int]) -> tuple[int, ...]:
        overlap = self._tokens[start : start + len(tokens)]
        if start > len(self._tokens) or list(tokens[: len(overlap)]) != overlap:
            raise _restarted()
        new = tuple(tokens[len(overlap) :])
        self._tokens += new
        return new

    def _decode(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._start : self._end])
        after = self._tokenizer.decode(self._tokens[self._start :])
        if len(after) > len(before) and not after.endswith(INCOMPLETE):
            self._held += after[len(before) :]
            self._start, self._end = self._end, len(self._tokens)
        split = len(self._held) - _stop_prefix_length(self._held, self._stop)
        text, self._held = self._held[:split], self._held[split:]
        return text


def _stop_prefix_length(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the start of a stop string."""
    longest = max(map(len, stop), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)


def _restarted() -> HttpError:
    return HttpError(
        409,
        "the completion restarted with other tokens, because an engine was lost or the weights changed; discard the streamed "
        "text and retry",
        "began_anew",
    )
