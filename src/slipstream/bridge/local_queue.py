"""A rollout queue in the trainer's process: that of a fleet without a gateway, and that of episodes with environments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slipstream.types import Request, RolloutGroup, RolloutStatus

if TYPE_CHECKING:
    from slipstream.gateway import slipstream_pb2 as pb
    from slipstream.gateway.rollout_queue import RolloutRun
    from slipstream.gateway.staleness import RolloutBound

Send: TypeAlias = "Callable[[pb.GenerateRequest], AsyncGenerator[pb.Results, None]]"
"""Generates all samples of a request."""


class LocalQueue:
    """Opened with the first use. All methods run on the process's event loop."""

    def __init__(self, journal: Path | None, send: Send, version: Callable[[], int]) -> None:
        """`journal` is a file; None keeps it in memory. `version` returns what the fleet serves, or raises `NotReady`."""
        self._journal, self._send, self._served = journal, send, version
        self._run: RolloutRun | None = None

    async def submit(self, bound: RolloutBound, requests: Sequence[Request]) -> int:
        from slipstream.gateway.rollout_queue import prompts_by_id

        traces = {request.id: request.traceparent for request in requests if request.traceparent}
        return self._opened().queue(bound, self._served()).submit(prompts_by_id(requests), traces)

    async def take(
        self,
        bound: RolloutBound,
        after: int,
        count: int,
        timeout: float,
        saved: int = 0,
        version: int = 0,
        more: bool = False,
    ) -> list[RolloutGroup]:
        from slipstream.gateway import convert

        queue = self._opened().queue(bound, self._served())
        groups = await queue.take(after, count, timeout, saved, version, more)
        return [convert.group_from_pb(convert.taken_to_pb(group)) for group in groups]

    def status(self) -> RolloutStatus | None:
        return None if self._run is None else self._run.status()

    @property
    def version(self) -> int:
        """Last version that the fleet served according to a journal file; -1 if none."""
        return self._opened().version if self._journal is not None else -1

    async def journaled_version(self) -> int:
        """`version`, on the event loop."""
        return self.version

    def on_commit(self, version: int) -> None:
        """The fleet serves a new version."""
        if self._run is not None:
            self._run.on_commit(version)

    async def close(self) -> None:
        if self._run is not None:
            await self._run.close()

    def _opened(self) -> RolloutRun:
        if self._run is None:
            from slipstream.gateway.journal import Journal
            from slipstream.gateway.rollout_queue import RolloutRun

            self._run = RolloutRun(Journal(self._journal), self._send)
        return self._run
