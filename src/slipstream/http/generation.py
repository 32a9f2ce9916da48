"""Sampling fields of generation requests, in OpenAI's and vLLM's names, and how their completions are collected."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from slipstream.errors import InvalidPrompt
from slipstream.gateway.admission import Ticket
from slipstream.http.request_models import JsonModel
from slipstream.http.state import Front
from slipstream.types import (
    MAX_SAMPLES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    Completion,
    Failure,
    Progress,
    Request,
    SamplingParams,
)

MAX_INT = 2**31 - 1
MAX_REQUESTS = 4096
MAX_CHOICES = 4096

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
NumTokens: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT)]
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Prompts: TypeAlias = Annotated[
    str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)],
    Field(union_mode="left_to_right"),
]
"""One prompt or several, as text or as token ids."""


class SamplingFields(JsonModel):
    """Fields shared by all generation requests. `SamplingParams` checks ranges that are not given here."""

    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    """-1 and 0 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_TEXTS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, Field(strict=False, ge=0, le=MAX_INT)], float] | None = None
    """Added to the logits of these token ids."""
    priority: Annotated[int, Field(ge=-(2**31), le=MAX_INT)] = 0
    request_id: Annotated[str, Field(max_length=200)] | None = None
    """End of the answer's `id`, by which `/abort_requests` finds the request; random by default."""
    return_token_ids: bool = False
    """Also return the prompt's token ids, and the model's own logprobs."""
    return_tokens_as_token_ids: bool = False
    # vLLM's clients send these defaults. The engines support no other value.
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    structured_outputs: None = None

    def answer_id(self, prefix: str) -> str:
        return f"{prefix}-{self.request_id or secrets.token_hex(12)}"

    def sampling_params(self, max_tokens: int, top_logprobs: int) -> SamplingParams:
        names = (field.name for field in dataclasses.fields(SamplingParams))
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        return SamplingParams(**given | {"max_tokens": max_tokens, "top_logprobs": top_logprobs})


def list_prompts(prompts: Any) -> list[str | list[int]]:
    """Return a list of prompts from any form that `Prompts` allows."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_single else prompts


def make_requests(
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    answer_id: str,
    priority: int,
    progress: bool = False,
    adapter: str = "",
) -> list[Request]:
    """Seeds are drawn here, so that a retry on another engine draws the same tokens. With a seed, equal prompts give equal
    samples, as everywhere in Slipstream."""
    if not 1 <= len(prompts) <= MAX_REQUESTS or len(prompts) * params.n > MAX_CHOICES:
        raise InvalidPrompt(
            f"a call takes 1 to {MAX_REQUESTS} prompts and returns at most {MAX_CHOICES} choices, got {len(prompts)} prompts "
            f"with n={params.n}; send several calls"
        )
    requests = []
    for index, prompt in enumerate(prompts):
        seeded = params if params.seed is not None else params.with_seed(secrets.randbits(63))
        tokens = prompt if isinstance(prompt, str) else tuple(prompt)
        requests.append(Request(f"{answer_id}/{index}", tokens, seeded, priority, progress, adapter=adapter))
    return requests


async def stream_results(
    front: Front, ticket: Ticket, answer_id: str, requests: Sequence[Request]
) -> AsyncGenerator[Completion | Progress, None]:
    """Yield completions as they finish, with the index of their prompt, and progress if asked for. Raise the first failure.
    Closing this cancels the rest."""
    completions = []
    results = front.in_flight.track(answer_id, ticket, _run(front, requests))
    async with contextlib.aclosing(results):
        async for result in results:
            if isinstance(result, Completion):
                completions.append(result)
            yield result
    front.metrics.count_tokens(completions)


async def collect_completions(
    front: Front, ticket: Ticket, answer_id: str, requests: Sequence[Request]
) -> list[Completion]:
    """Return all completions: the samples of the first prompt, then those of the second, and so on."""
    results = stream_results(front, ticket, answer_id, requests)
    async with contextlib.aclosing(results):
        completions = [result async for result in results if isinstance(result, Completion)]
    return sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))


async def _run(front: Front, requests: Sequence[Request]) -> AsyncGenerator[Completion | Progress, None]:
    index_of = {request.id: index for index, request in enumerate(requests)}
    async with contextlib.aclosing(front.fleet.generate(requests)) as batches:
        async for batch in batches:
            for result in batch:
                index = index_of[result.request_id]
                if isinstance(result, Failure):
                    where = f"prompt {index} of {len(requests)}: " if len(requests) > 1 else ""
                    raise type(result.error)(f"{where}{result.error}")
                yield dataclasses.replace(result, prompt_index=index)
