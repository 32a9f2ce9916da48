"""After a commit, the engines answer the canary (`engines/canary.py`) while they serve, and are compared with each other.

An engine that the others disagree with is quarantined until it has new weights. If no majority tells which is right, as with
two engines, all of them are reported as suspect and stay in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from slipstream.engines import canary
from slipstream.errors import SlipstreamError
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.engine_watch import EngineWatch
from slipstream.gateway.registry import Member, Registry

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
INTERVAL_SECONDS = 0.5
"""Least time between two canaries. Of versions that follow each other faster, the last is checked."""


class CommitCanary:
    def __init__(self, registry: Registry, links: Mapping[str, EngineLink], watch: EngineWatch) -> None:
        self._registry, self._links, self._watch = registry, links, watch
        self._checked: dict[str, tuple[EngineLink, int]] = {}
        """By engine: its connection, and the version for which it was asked last."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check the engines whose version is not checked yet, unless that is in progress. Cheap if there are none."""
        if self._is_due() and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def _members(self) -> list[Member]:
        """The engines that can answer at once. One that has generated nothing yet would first compile its programs, and hold up
        the next update meanwhile; it is asked after its first requests."""
        members = self._registry.answering()
        return [m for m in members if m.info.vocab_size and self._links[m.info.name].has_answered]

    def _is_due(self) -> bool:
        members, version = self._members(), self._registry.version
        return len(members) > 1 and any(
            self._checked.get(m.info.name) != (self._links[m.info.name], version) for m in members
        )

    async def _run(self) -> None:
        while self._is_due():
            await self._check(self._members(), self._registry.version)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _check(self, members: list[Member], version: int) -> None:
        names = [m.info.name for m in members]
        self._checked = {name: (self._links[name], version) for name in names}
        answers = dict(zip(names, await asyncio.gather(*(self._answer(m, version) for m in members))))
        found = {name: answer for name, answer in answers.items() if answer is not None}
        if self._registry.version != version or len(found) < 2:
            return
        verdict = canary.judge(found, {m.info.name: m.info.dtype for m in members})
        for member in members:
            name = member.info.name
            if self._registry.get(name) is not member or member.lost:
                continue
            if name in verdict.wrong:
                self._watch.quarantine(name, verdict.wrong[name], version, needs_weights=True)
            elif name in verdict.disputed:
                self._watch.suspect(name, verdict.disputed[name])

    async def _answer(self, member: Member, version: int) -> list[float] | None:
        """Return an engine's logprobs; None if it has no answer, or one of another version."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                # One by one: together they might need programs of another size.
                rows = [await self._completion(member.info.name, prompt) for prompt in canary.prompts(member.info)]
        except (SlipstreamError, TimeoutError) as error:  # who fails openly is found out by its requests
            log.info("engine %s did not answer the canary of version %d: %s", member.info.name, version, error)
            return None
        if {span.version for row in rows for span in row.spans} != {version}:
            return None
        return [sum(row.logprobs) for row in rows]

    async def _completion(self, engine: str, prompt: Sequence[int]) -> pb.Completion:
        request = pb.GenerateRequest(
            sampling=[pb.Sampling(max_tokens=1, temperature=0, top_p=1, n=1, ignore_eos=True)],
            requests=[pb.Request(id="canary", tokens=pb.TokenIds(ids=prompt))],
        )
        return await self._links[engine].completion(request)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
