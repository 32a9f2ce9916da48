"""After a commit, the engines answer the canary (`canary_answers.py`) while they serve, and are compared with each other.

An engine that the others disagree with is quarantined until it has new weights. If no majority tells which is right, as with
two engines, all of them are reported as suspect and stay in use. Until the answers are there, for a few seconds at most, no
group with tokens of that version is taken: the trainer does not learn from an engine that is about to be quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from slipstream.gateway import canary_answers
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.engine_watch import EngineWatch
from slipstream.gateway.registry import Member, Registry

INTERVAL_SECONDS = 0.1
"""Least time between two canaries. Of versions that follow each other faster, the last is checked."""
HOLD_SECONDS = 5.0
"""How long groups wait for the answers at most."""


class CommitCanary:
    def __init__(
        self,
        registry: Registry,
        links: Mapping[str, EngineLink],
        watch: EngineWatch,
        hold: Callable[[int | None], None] = lambda version: None,
    ) -> None:
        """`hold(version)` keeps groups with tokens of this version or later from being taken, `hold(None)` none."""
        self._registry, self._links, self._watch, self._hold = registry, links, watch, hold
        self._checked: dict[str, tuple[EngineLink, int]] = {}
        """By engine: its connection, and the version for which it was asked last."""
        self._task: asyncio.Task[None] | None = None
        self._releasing: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check the engines whose version is not checked yet, unless that is in progress. Cheap if there are none."""
        if not self._is_due():
            return
        self._release()
        self._hold(self._registry.version)
        self._releasing = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._hold, None)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def _release(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
            self._releasing = None
        self._hold(None)

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
        try:
            while self._is_due():
                await self._check(self._members(), self._registry.version)
                if not self._is_due():
                    self._release()
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            self._release()

    async def _check(self, members: list[Member], version: int) -> None:
        self._checked = {m.info.name: (self._links[m.info.name], version) for m in members}
        verdict = await canary_answers.compare(members, self._links, version)
        if verdict is None:
            return
        for member in members:
            name = member.info.name
            if self._registry.get(name) is not member or member.lost:
                continue
            if name in verdict.wrong:
                self._watch.quarantine(name, verdict.wrong[name], version, needs_weights=True)
            elif name in verdict.disputed:
                self._watch.decide("suspect", name, verdict.disputed[name])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
