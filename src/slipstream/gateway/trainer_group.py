"""The processes of one trainer, which run every step of an update together.

Each process holds its own update stream and sends its own message. The gateway runs a message once, when all processes have
sent theirs, and gives each the reply. A process that dies, or does not send its message in time, ends the update for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from slipstream.errors import DeadlineExceeded, PeerError, PlanMismatch, ProtocolMismatch, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.transaction import FleetUpdate, steps_of

MAX_STEP_SECONDS = 3600.0

_Waiting: TypeAlias = dict[int, tuple[pb.UpdateMessage, asyncio.Future[pb.UpdateReply]]]
"""By process: the message it has sent, and the future of its reply."""


class TrainerGroup:
    def __init__(self, update: FleetUpdate, count: int, peer: str) -> None:
        """`count` is the number of processes; `peer` is the address of the first one."""
        self.count, self.peer = count, peer
        self._update = update
        self._ids: dict[int, str] = {}
        """`TrainerProcess.id` by index, of the processes that have joined."""
        self._leaving: list[tuple[int, str]] = []
        self._waiting: _Waiting = {}

    @property
    def is_empty(self) -> bool:
        return not self._ids

    def has(self, process: pb.TrainerProcess) -> bool:
        """Whether an earlier stream of this process is still joined or leaving."""
        index, id = process.index, process.id
        return bool(id) and (self._ids.get(index) == id or (index, id) in self._leaving)

    def join(self, process: pb.TrainerProcess) -> bool:
        """Add a process. Return False if one with its index is present."""
        if process.index in self._ids:
            return False
        self._ids[process.index] = process.id
        return True

    async def leave(self, index: int) -> None:
        """Remove a process whose stream ended, and roll back the update it took part in."""
        leaving = (index, self._ids.pop(index, ""))
        self._leaving.append(leaving)
        self._waiting.pop(index, None)
        try:
            if self._update.in_progress:
                await asyncio.shield(self._update.rollback())
                self._fail(PeerError(f"trainer process {index} of {self.count} is gone; the update is rolled back"))
            if self.is_empty:
                await asyncio.shield(self._update.release())
        finally:
            self._leaving.remove(leaving)

    async def handle(self, index: int, message: pb.UpdateMessage) -> pb.UpdateReply:
        """Return the reply to a message. An error is a reply too; the fleet is rolled back by then."""
        if message.HasField("rollback"):
            await self._update.rollback()
            self._fail(PeerError(f"trainer process {index} of {self.count} rolled the update back"))
            return pb.UpdateReply(rolled_back=True)
        reply: asyncio.Future[pb.UpdateReply] = asyncio.get_running_loop().create_future()
        self._waiting[index] = (message, reply)
        if len(self._waiting) == self.count:
            # In its own task: if this process's stream breaks, the other processes still get their replies.
            await asyncio.shield(asyncio.create_task(self._run()))
        timeout = _timeout(message)
        try:
            return await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            missing = sorted(set(range(self.count)) - self._waiting.keys())
            error = DeadlineExceeded(
                f"trainer process(es) {missing} of {self.count} did not send the same step of the update within "
                f"{timeout:g} s; all processes must call bridge.sync"
            )
            await self._update.rollback()
            self._fail(error)
            return pb.UpdateReply(error=convert.error_to_pb(error))

    async def _run(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            message = _merged([waiting[index][0] for index in range(self.count)])
            reply = await self._update.run(message, _timeout(message))
        except SlipstreamError as error:
            await self._update.rollback()
            reply = pb.UpdateReply(error=convert.error_to_pb(error))
        _resolve(waiting, reply)

    def _fail(self, error: SlipstreamError) -> None:
        waiting, self._waiting = self._waiting, {}
        _resolve(waiting, pb.UpdateReply(error=convert.error_to_pb(error)))


def _timeout(message: pb.UpdateMessage) -> float:
    return min(message.timeout_seconds, MAX_STEP_SECONDS)


def _resolve(waiting: _Waiting, reply: pb.UpdateReply) -> None:
    for _, future in waiting.values():
        if not future.done():
            future.set_result(reply)


def _merged(messages: Sequence[pb.UpdateMessage]) -> pb.UpdateMessage:
    """Return one message for all processes. They must agree on everything but the manifests, which are combined."""
    first = messages[0]
    if len(messages) == 1:
        return first
    merged = pb.UpdateMessage()
    merged.CopyFrom(first)
    for index, message in enumerate(messages[1:], 1):
        if steps_of(message) != steps_of(first):
            raise ProtocolMismatch(
                f"trainer process {index} is at (version, steps) {steps_of(message)}, process 0 at {steps_of(first)}; all "
                "processes must call bridge.sync alike"
            )
        if "begin" in steps_of(first)[1] and _offers(message) != _offers(first):
            raise PlanMismatch(
                f"trainer processes 0 and {index} have different plans for this version; are their trees sharded alike?"
            )
        for name in merged.engines.keys() - message.engines.keys():
            del merged.engines[name]  # a process goes on without an engine that it could not reach
        for name in merged.engines:
            steps = message.engines[name]
            combined = merged.engines[name].stage.ranks
            for rank, manifests in enumerate(steps.stage.ranks):
                if rank == len(combined):
                    combined.add()
                combined[rank].senders.extend(manifests.senders)
    return merged


def _offers(message: pb.UpdateMessage) -> tuple[object, ...]:
    offers = [(name, steps.begin.offer) for name, steps in sorted(message.engines.items())]
    facts = tuple((name, o.fingerprint, o.transport, o.fresh, o.hashed) for name, o in offers)
    return message.epoch, message.drop_failed, facts
