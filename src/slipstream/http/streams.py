"""Completions as OpenAI's events: tokens as they are drawn, then how each choice ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from slipstream.http import choices
from slipstream.http.answers import Events, HttpError
from slipstream.http.front import Front
from slipstream.http.sampling import prompt_index, streamed
from slipstream.http.telling import Part, Telling
from slipstream.types import Completion, Progress, Request


def stream_events(
    front: Front,
    head: dict[str, Any],
    asked: Sequence[Request],
    options: dict[str, bool] | None,
    chunk: Callable[[Part, int], dict[str, Any]],
    opening: dict[str, Any] | None = None,
) -> Events:
    """Tokens as they are drawn, where the engine tells; the last chunk of a choice says how it ended, and under which policy.
    `opening` is said before the first."""
    if unknown := (options or {}).keys() - {"include_usage", "include_obfuscation"}:
        raise HttpError(
            400, f"stream_options knows include_usage, not {min(unknown)!r}", "unknown_field", "stream_options"
        )
    tellings: dict[int, Telling] = {}

    def chunks(result: Completion | Progress) -> Iterator[dict[str, Any]]:
        index = prompt_index(result) * asked[0].sampling.n + result.sample_index
        if index not in tellings:
            tellings[index] = Telling(front.words, asked[0].sampling.stop)
            if opening is not None:
                yield {"index": index, **opening}
        if isinstance(result, Progress):
            if part := tellings[index].more(result):
                yield {**chunk(part, index), "finish_reason": None, "token_ids": list(part.token_ids)}
            return
        part = tellings[index].rest(result)
        last = choices.additions(result, False) | {"token_ids": list(part.token_ids)}
        yield {**chunk(part, index), "finish_reason": result.finish_reason, **last}

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        found: list[Completion] = []
        async with contextlib.aclosing(front.flights.watch(head["id"], streamed(front.fleet, asked))) as arriving:
            async for result in arriving:
                if isinstance(result, Completion):
                    found.append(result)
                for choice in chunks(result):
                    yield {**head, "choices": [choice]}
        front.metrics.generated(found)
        if options and options.get("include_usage"):
            total = choices.usage(choices.prompt_tokens(found), sum(len(c.token_ids) for c in found))
            yield {**head, "choices": [], "usage": total}

    return events()
