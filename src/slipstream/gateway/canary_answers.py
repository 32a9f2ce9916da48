"""Asks engines the canary (`engines/canary.py`), and besides its fixed prompts one that each of them has served: an engine that
still uses keys and values of the last version for a prefix in its cache shows it there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from slipstream.engines import canary
from slipstream.errors import SlipstreamError
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.registry import Member

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0


async def compare(
    members: Sequence[Member], links: Mapping[str, EngineLink], version: int
) -> canary.CanaryVerdict | None:
    """Return what the answers of the engines say about each of them; None if fewer than two have answered."""
    names = [member.info.name for member in members]
    room = min(member.info.max_model_len for member in members) - 1
    served = {tuple(links[name].last_prompt[:room]) for name in names} - {()}
    asked = (*canary.prompts(members[0].info), *sorted(served))
    answers = zip(names, await asyncio.gather(*(_answer(links[name], version, asked) for name in names)))
    found = {name: answer for name, answer in answers if answer is not None}
    return canary.judge(found, {m.info.name: m.info.dtype for m in members}) if len(found) > 1 else None


async def _answer(link: EngineLink, version: int, asked: Sequence[Sequence[int]]) -> list[float] | None:
    """Return an engine's logprobs; None if it has no answer, or one of another version."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            # One by one: together they might need programs of another size.
            rows = [await _completion(link, prompt) for prompt in asked]
    except (SlipstreamError, TimeoutError) as error:  # who fails openly is found out by its requests
        log.info("engine %s did not answer the canary of version %d: %s", link.name, version, error)
        return None
    if {span.version for row in rows for span in row.spans} != {version}:
        return None
    return [sum(row.logprobs) for row in rows]


async def _completion(link: EngineLink, prompt: Sequence[int]) -> pb.Completion:
    request = pb.GenerateRequest(
        sampling=[pb.Sampling(max_tokens=1, temperature=0, top_p=1, n=1, ignore_eos=True)],
        requests=[pb.Request(id="canary", tokens=pb.TokenIds(ids=prompt))],
    )
    return await link.completion(request)
