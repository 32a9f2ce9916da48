"""A completion told bit by bit: what a client has been told is never taken back, so it is only ever told more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.http.answers import HttpError
from slipstream.http.words import Words
from slipstream.types import Completion, Progress, TopLogprobs

UNFINISHED = "\ufffd"
"""What a tokenizer makes of the first bytes of a character."""


@dataclass(frozen=True)
class Part:
    """Of a completion, behind what was told before."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    """Where they are known already."""
    top_logprobs: tuple[TopLogprobs, ...]


class Telling:
    """Of one choice. Text that may turn out to be the beginning of a stop text, or of a character, is held back."""

    def __init__(self, words: Words, stops: Sequence[str]) -> None:
        self._words, self._stops = words, stops
        self._tokens: list[int] = []
        self._text = ""
        """Told."""
        self._held = ""
        self._from = self._read = 0
        """Tokens whose text is known go up to `_read`; a few before it are decoded again with the next, because a token's text
        may depend on its neighbour."""

    def more(self, progress: Progress) -> Part | None:
        """What is new in it; None if nothing is."""
        new = self._new(progress.start, progress.token_ids)
        if not new:
            return None
        skip = len(progress.token_ids) - len(new)
        text = self._reading()
        self._text += text
        return Part(text, new, progress.logprobs[skip:], (), progress.top_logprobs[skip:])

    def rest(self, completion: Completion) -> Part:
        """All that was not told. The completion's own text counts: it ends before a stop text."""
        told = len(self._tokens)
        new = self._new(0, completion.token_ids)
        if len(completion.token_ids) < told:
            raise _other()
        return Part(
            completion.text[len(self._text) :],
            new,
            completion.logprobs[told:],
            completion.raw_logprobs[told:],
            completion.top_logprobs[told:],
        )

    def _new(self, start: int, tokens: Sequence[int]) -> tuple[int, ...]:
        overlap = self._tokens[start : start + len(tokens)]
        if start > len(self._tokens) or list(tokens[: len(overlap)]) != overlap:
            raise _other()
        new = tuple(tokens[len(overlap) :])
        self._tokens += new
        return new

    def _reading(self) -> str:
        before = self._words.decode(self._tokens[self._from : self._read])
        now = self._words.decode(self._tokens[self._from :])
        if len(now) > len(before) and not now.endswith(UNFINISHED):
            self._held += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        keep = _may_be_stop(self._held, self._stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _may_be_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop text."""
    longest = max(map(len, stops), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


def _other() -> HttpError:
    return HttpError(
        409,
        "the completion began anew with other tokens, because an engine was lost or the weights changed; what was told does "
        "not hold. Ask again",
        "began_anew",
    )
