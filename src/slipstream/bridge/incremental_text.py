"""Incremental detokenization for streaming. Emitted text is never retracted, unless the sample began anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.bridge.chat_tokenizer import ChatTokenizer
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
    restarted: bool = False
    """The sample began anew with other tokens: what was emitted before is void."""


class IncrementalDetokenizer:
    """Decodes one choice. Text that may be the start of a stop string, or an incomplete character, is held back."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._reset()

    def _reset(self) -> None:
        self._tokens: list[int] = []
        self._emitted = ""
        self._held = ""
        self._start = self._end = 0
        """Tokens up to `_end` are decoded. Those from `_start` are decoded again with the next ones, because a token's text may
        depend on its neighbors."""

    def add(self, progress: Progress) -> TextDelta | None:
        """Return what is new in `progress`, or None. Tokens after a gap are left to `finish`."""
        start, tokens = progress.start, progress.token_ids
        known = self._tokens[start : start + len(tokens)]
        if restarted := list(tokens[: len(known)]) != known:
            self._reset()
        is_gap = start > len(self._tokens)
        new = slice(len(tokens), None) if is_gap else slice(len(self._tokens) - start, None)
        if not tokens[new] and not restarted:
            return None
        self._tokens += tokens[new]
        text = self._decode()
        self._emitted += text
        return TextDelta(text, tokens[new], progress.logprobs[new], (), progress.top_logprobs[new], restarted)

    def finish(self, completion: Completion) -> TextDelta:
        """Return everything not emitted yet. The text is the completion's, which ends before a stop string."""
        if restarted := list(completion.token_ids[: len(self._tokens)]) != self._tokens:
            self._reset()
        new = slice(len(self._tokens), None)
        return TextDelta(
            completion.text[len(self._emitted) :],
            completion.token_ids[new],
            completion.logprobs[new],
            completion.raw_logprobs[new],
            completion.top_logprobs[new],
            restarted,
        )

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
