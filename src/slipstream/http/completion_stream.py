"""The chunks of a streamed completion, for both of OpenAI's endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from slipstream import types
from slipstream.bridge.incremental_text import IncrementalDetokenizer, TextDelta
from slipstream.gateway.admission import Ticket
from slipstream.http import openai_choices as choices
from slipstream.http.errors import HttpError
from slipstream.http.generation import stream_results
from slipstream.http.request_models import JsonModel
from slipstream.http.state import Front
from slipstream.types import Completion, Progress


class StreamOptions(JsonModel):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: chunks are never padded."""


async def stream_chunks(
    front: Front,
    ticket: Ticket,
    head: dict[str, Any],
    requests: Sequence[types.Request],
    options: StreamOptions,
    to_chunk: Callable[[int, TextDelta, Completion | None], dict[str, Any]],
    opening: dict[str, Any] | None = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield tokens as they are generated. The last chunk of a choice says how it ended and under which policy version;
    `opening` is sent before the first. `to_chunk` gets the completion with its last delta."""
    params = requests[0].sampling
    detokenizers: dict[int, IncrementalDetokenizer] = {}
    completions: list[Completion] = []

    def to_choices(result: Completion | Progress) -> Iterator[dict[str, Any]]:
        index = result.prompt_index * params.n + result.sample_index
        if index not in detokenizers:
            detokenizers[index] = IncrementalDetokenizer(front.tokenizer, params.stop)
            if opening is not None:
                yield {"index": index, **opening}
        detokenizer, end = detokenizers[index], dict[str, Any](finish_reason=None)
        completion = result if isinstance(result, Completion) else None
        if completion is not None:
            completions.append(completion)
            end = {"finish_reason": completion.finish_reason, **choices.choice_additions(completion)}
        delta = detokenizer.finish(result) if isinstance(result, Completion) else detokenizer.add(result)
        if delta is None:
            return
        if delta.restarted:
            raise HttpError(
                409,
                "the completion restarted with other tokens, because an engine was lost or the weights changed; discard the "
                "streamed text and retry",
                "began_anew",
            )
        yield {"index": index, **end, **to_chunk(index, delta, completion), "token_ids": list(delta.token_ids)}

    results = stream_results(front, ticket, head["id"], requests)
    async with contextlib.aclosing(results):
        async for result in results:
            for choice in to_choices(result):
                yield {**head, "choices": [choice]}
    if options.include_usage:
        yield {**head, "choices": [], "usage": choices.usage(completions)}
