"""Completions and scores in OpenAI's words, with vLLM's additions and ours. Pure: data in, JSON values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.http.telling import Part
from slipstream.http.words import Words
from slipstream.types import Completion, Score, TopLogprobs

LEAST = -9999.0
"""For what is impossible: JSON knows no infinity. vLLM writes the same."""


def completion_choice(
    completion: Completion, index: int, text: str, logprobs: dict[str, Any] | None, prompt_too: bool = False
) -> dict[str, Any]:
    """A choice of /v1/completions."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}
    return choice | additions(completion, prompt_too)


def chat_choice(
    completion: Completion, index: int, logprobs: dict[str, Any] | None, prompt_too: bool
) -> dict[str, Any]:
    """A choice of /v1/chat/completions."""
    message = {"role": "assistant", "content": completion.text}
    choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}
    return choice | additions(completion, prompt_too)


def additions(completion: Completion, prompt_too: bool) -> dict[str, Any]:
    """What no OpenAI server says: the tokens, and which policy made them."""
    more = {
        "token_ids": list(completion.token_ids),
        "policy_version": completion.version,
        "version_spans": [{"version": s.version, "start": s.start, "stop": s.stop} for s in completion.spans],
        "engine": completion.engine,
    }
    if prompt_too:
        more |= {
            "prompt_token_ids": list(completion.prompt_token_ids),
            "raw_logprobs": [finite(value) for value in completion.raw_logprobs],
        }
    return more


def usage(prompts: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompts, "completion_tokens": completion, "total_tokens": prompts + completion}


def prompt_tokens(found: Sequence[Completion]) -> int:
    """Each prompt counts once, however many samples were drawn."""
    return sum({c.prompt_index: len(c.prompt_token_ids) for c in found}.values())


class Table:
    """`logprobs` of /v1/completions, position after position: of the prompt (echo), then of the completion."""

    def __init__(self, words: Words, top: int, as_ids: bool) -> None:
        self._words, self._top, self._as_ids = words, top, as_ids
        self._rows: list[tuple[str, float | None, dict[str, float] | None]] = []

    def add_prompt(self, tokens: Sequence[int], score: Score | None) -> None:
        """`score` is None for a prompt of a single token: nothing precedes it."""
        for position, token in enumerate(tokens):
            text = self._words.token(token, self._as_ids)
            if position == 0 or score is None:
                self._rows.append((text, None, None))
                continue
            tops = score.top_logprobs[position - 1] if score.top_logprobs else None
            self._add(token, score.logprobs[position - 1], score.logprobs[position - 1], tops)

    def add_completion(self, part: Completion | Part) -> None:
        for position, token in enumerate(part.token_ids):
            tops = part.top_logprobs[position] if part.top_logprobs else None
            logprob = part.logprobs[position]
            raw = part.raw_logprobs[position] if part.raw_logprobs else logprob
            self._add(token, logprob, raw, tops)

    def value(self) -> dict[str, Any]:
        offsets, at = [], 0
        for text, _, _ in self._rows:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": [text for text, _, _ in self._rows],
            "token_logprobs": [logprob for _, logprob, _ in self._rows],
            "top_logprobs": [tops for _, _, tops in self._rows],
            "text_offset": offsets,
        }

    def _add(self, token: int, logprob: float, raw: float, tops: TopLogprobs | None) -> None:
        """The likeliest are the model's own, and so is the token's among them; alone, it is as it was drawn. Of tokens with
        the same text the likelier is named."""
        likeliest = dict(_likeliest(tops, self._top))
        row: dict[str, float] = {}
        for other, value in (likeliest | {token: raw if likeliest else logprob}).items():
            text = self._words.token(other, self._as_ids)
            row[text] = max(finite(value), row.get(text, LEAST))
        self._rows.append((self._words.token(token, self._as_ids), finite(logprob), row))


def chat_logprobs(words: Words, completion: Completion | Part, top: int, as_ids: bool) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = words.token(token, as_ids)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    content = []
    for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs)):
        tops = completion.top_logprobs[position] if completion.top_logprobs else None
        likeliest = [entry(t, v) for t, v in _likeliest(tops, top)]
        content.append(entry(token, logprob) | {"top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def prompt_logprobs(words: Words, tokens: Sequence[int], score: Score | None, top: int) -> list[dict[str, Any] | None]:
    """As vLLM has them: by token id, the likeliest and the prompt's own. Of a token that is not among the likeliest only that
    is known of its rank: it is said to be the next one."""
    rows: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(tokens[1:]):
        assert score is not None
        tops = _likeliest(score.top_logprobs[position] if score.top_logprobs else None, top)
        own = {} if token in dict(tops) else {token: (score.logprobs[position], len(tops) + 1)}
        ranked = {t: (value, rank) for rank, (t, value) in enumerate(tops, 1)} | own
        rows.append(
            {
                str(t): {"logprob": finite(value), "rank": rank, "decoded_token": words.token(t)}
                for t, (value, rank) in ranked.items()
            }
        )
    return rows


def finite(value: float) -> float:
    return max(value, LEAST)


def _likeliest(tops: TopLogprobs | None, count: int) -> list[tuple[int, float]]:
    return [] if tops is None else list(zip(tops.token_ids, tops.logprobs))[:count]
