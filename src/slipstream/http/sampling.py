"""What calls say about sampling, in OpenAI's and vLLM's words, and the requests that come of it."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from slipstream.errors import InvalidPrompt, InvalidSampling
from slipstream.fleet import Fleet
from slipstream.http.answers import HttpError
from slipstream.http.shapes import Limits
from slipstream.types import MAX_SAMPLES, MAX_TOP_LOGPROBS, Completion, Failure, Progress, Request, SamplingParams

MAX_INT = 2**31 - 1
MAX_REQUESTS = 4096
MAX_CHOICES = 4096

Token: TypeAlias = Annotated[int, Limits(0, MAX_INT)]
Tokens: TypeAlias = Annotated[int, Limits(1, MAX_INT)]
"""A number of them."""
Prompts: TypeAlias = (
    str | list[str] | Annotated[list[Token], Limits(min_items=1)] | list[Annotated[list[Token], Limits(min_items=1)]]
)
"""One or several, as text or as token ids."""
Top: TypeAlias = Annotated[int, Limits(0, MAX_TOP_LOGPROBS)]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Fields that calls for completions share. Ranges that are not here are `SamplingParams`'s."""

    model: str = ""
    n: Annotated[int, Limits(1, MAX_SAMPLES)] = 1
    temperature: Annotated[float, Limits(0, 1e6)] = 1.0
    top_p: Annotated[float, Limits(0, 1)] = 1.0
    top_k: Annotated[int, Limits(-1, MAX_INT)] = 0
    """-1 and 0 keep all."""
    min_p: Annotated[float, Limits(0, 1)] = 0.0
    seed: Annotated[int, Limits(0, 2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Limits(0, MAX_INT)] = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    priority: Annotated[int, Limits(-(2**31), MAX_INT)] = 0
    request_id: Annotated[str, Limits(max_length=200)] | None = None
    """The end of the answer's `id`, by which others can abort it; drawn if not given."""
    return_token_ids: bool = False
    """Also the prompt's, and both kinds of logprobs."""
    return_tokens_as_token_ids: bool = False
    # What vLLM's clients say by default, and the engines do not do otherwise.
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    structured_outputs: None = None

    def name(self, kind: str) -> str:
        return f"{kind}-{self.request_id or secrets.token_hex(12)}"

    def sampling(self, max_tokens: int, top_logprobs: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            n=self.n,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_bias(self.logit_bias or {}),
            top_logprobs=top_logprobs,
        )


def requests(
    prompts: Sequence[str | Sequence[int]], sampling: SamplingParams, name: str, priority: int, progress: bool = False
) -> list[Request]:
    """Seeds are drawn here, so that whoever runs a request draws the same tokens. With a seed, equal prompts differ by it
    not at all: they give equal samples, as everywhere in Slipstream."""
    if not 1 <= len(prompts) <= MAX_REQUESTS or len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidPrompt(
            f"a call takes 1 to {MAX_REQUESTS} prompts and gives at most {MAX_CHOICES} choices; {len(prompts)} prompts with "
            f"n = {sampling.n} came. Send several calls"
        )
    found = []
    for index, prompt in enumerate(prompts):
        drawn = sampling if sampling.seed is not None else sampling.with_seed(secrets.randbits(63))
        tokens = prompt if isinstance(prompt, str) else tuple(prompt)
        found.append(Request(f"{name}/{index}", tokens, drawn, priority, progress))
    return found


async def completions(fleet: Fleet, asked: Sequence[Request]) -> AsyncGenerator[Completion, None]:
    """As they finish, each with the index of its prompt. Raises the first failure, and cancels the rest when closed."""
    async with contextlib.aclosing(streamed(fleet, asked)) as results:
        async for result in results:
            if isinstance(result, Completion):
                yield result


async def streamed(fleet: Fleet, asked: Sequence[Request]) -> AsyncGenerator[Completion | Progress, None]:
    """As `completions`, with the progress of those that ask for it."""
    async with contextlib.aclosing(fleet.stream(asked)) as batches:
        async for batch in batches:
            for result in batch:
                if isinstance(result, Failure):
                    where = f"prompt {prompt_index(result)} of {len(asked)}: " if len(asked) > 1 else ""
                    raise type(result.error)(f"{where}{result.error}")
                if isinstance(result, Completion):
                    result = dataclasses.replace(result, prompt_index=prompt_index(result))
                yield result


def prompt_index(result: Completion | Failure | Progress) -> int:
    return int(result.request_id.rpartition("/")[2])


def prompts_of(value: Any) -> list[str | list[int]]:
    """OpenAI's four ways to give prompts: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if value and all(type(item) is int for item in value):
        return [value]
    return list(value)


def _bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        found = {int(token): value for token, value in given.items()}
    except ValueError:
        raise HttpError(400, "logit_bias maps token ids, as texts, to numbers", "invalid_value", "logit_bias") from None
    if any(not 0 <= token <= MAX_INT for token in found):
        raise InvalidSampling(f"logit_bias names a token id that no model has; ids are 0 to {MAX_INT}")
    return tuple(found.items())
