"""A trainer of several processes takes each step of an update together.

Every process holds an update stream of its own and sends its own step; the step is run once, when all have come to it,
and each gets the answer. One that dies, or does not come in time, ends the update for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from slipstream.errors import DeadlineExceeded, PeerError, PlanMismatch, ProtocolMismatch, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.updates import FleetUpdate

MAX_STEP_SECONDS = 3600.0

_Waiting: TypeAlias = dict[int, tuple[pb.UpdateStep, asyncio.Future[pb.UpdateReply]]]
"""By rank: the step it has come to, and where its answer goes."""


class TrainerGroup:
    def __init__(self, update: FleetUpdate, world: int, peer: str) -> None:
        self.world, self.peer = world, peer
        self._update = update
        self._present: dict[int, str] = {}
        """Who it is, by rank."""
        self._leaving: list[tuple[int, str]] = []
        self._waiting: _Waiting = {}

    @property
    def is_empty(self) -> bool:
        return not self._present

    def has(self, rank: int, who: str) -> bool:
        return bool(who) and (self._present.get(rank) == who or (rank, who) in self._leaving)

    def join(self, rank: int, who: str) -> bool:
        """False when this rank is here already."""
        if rank in self._present:
            return False
        self._present[rank] = who
        return True

    async def leave(self, rank: int) -> None:
        """Its stream ended. What it took part in cannot be finished."""
        leaves = (rank, self._present.pop(rank, ""))
        self._leaving.append(leaves)
        self._waiting.pop(rank, None)
        try:
            if self._update.under_way:
                await asyncio.shield(self._update.rollback())
                self._fail(PeerError(f"trainer rank {rank} of {self.world} is gone; the update is rolled back"))
            if self.is_empty:
                await asyncio.shield(self._update.release())
        finally:
            self._leaving.remove(leaves)

    async def step(self, rank: int, step: pb.UpdateStep) -> pb.UpdateReply:
        """The answer to a step, an error among them; after an error the fleet is rolled back."""
        if step.WhichOneof("step") == "rollback":
            await self._update.rollback()
            self._fail(PeerError(f"trainer rank {rank} of {self.world} rolled the update back"))
            return pb.UpdateReply(rolled_back=pb.RolledBack())
        answer: asyncio.Future[pb.UpdateReply] = asyncio.get_running_loop().create_future()
        self._waiting[rank] = (step, answer)
        if len(self._waiting) == self.world:
            # On its own: should this process's stream break meanwhile, the others are owed their answer all the same.
            await asyncio.shield(asyncio.create_task(self._run()))
        timeout = min(step.timeout_seconds, MAX_STEP_SECONDS)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            missing = sorted(set(range(self.world)) - self._waiting.keys())
            what = step.WhichOneof("step")
            error = DeadlineExceeded(
                f"trainer rank(s) {missing} of {self.world} did not come to {what} within {timeout:g} s"
            )
            await self._update.rollback()
            self._fail(error)
            return pb.UpdateReply(error=convert.error_to_pb(error))

    async def _run(self) -> None:
        waiting, self._waiting = self._waiting, {}
        steps = [waiting[rank][0] for rank in range(self.world)]
        try:
            reply = await self._take(_merged(steps))
        except SlipstreamError as error:
            await self._update.rollback()
            reply = pb.UpdateReply(error=convert.error_to_pb(error))
        _answer(waiting, reply)

    async def _take(self, step: pb.UpdateStep) -> pb.UpdateReply:
        timeout = min(step.timeout_seconds, MAX_STEP_SECONDS)
        match step.WhichOneof("step"):
            case "begin":
                return await self._update.begin(step.begin, timeout)
            case "stage":
                return await self._update.stage(step.stage, timeout)
            case "commit":
                return await self._update.commit(step.commit, timeout)
            case "swap":
                return await self._update.swap(step.swap, timeout)
            case _:
                raise ProtocolMismatch("an update step without content came")

    def _fail(self, error: SlipstreamError) -> None:
        waiting, self._waiting = self._waiting, {}
        _answer(waiting, pb.UpdateReply(error=convert.error_to_pb(error)))


def _answer(waiting: _Waiting, reply: pb.UpdateReply) -> None:
    for _, answer in waiting.values():
        if not answer.done():
            answer.set_result(reply)


def _merged(steps: Sequence[pb.UpdateStep]) -> pb.UpdateStep:
    """One step for all: they must agree, except on checksums, where each brings its own."""
    first = steps[0]
    for rank, step in enumerate(steps):
        if step.WhichOneof("step") != first.WhichOneof("step"):
            raise ProtocolMismatch(
                f"trainer rank {rank} is at {step.WhichOneof('step')}, rank 0 at {first.WhichOneof('step')}; all ranks "
                "must call bridge.sync alike"
            )
    if len(steps) == 1:
        return first
    merged = pb.UpdateStep()
    merged.CopyFrom(first)
    match first.WhichOneof("step"):
        case "begin":
            _check_alike([step.begin for step in steps])
        case "stage":
            merged.stage.CopyFrom(_merged_stages([step.stage for step in steps]))
        case "swap":
            _check_alike([step.swap.begin for step in steps])
            merged.swap.stage.CopyFrom(_merged_stages([step.swap.stage for step in steps]))
    return merged


def _check_alike(begins: Sequence[pb.Begin]) -> None:
    wanted = _facts(begins[0])
    for rank, begin in enumerate(begins):
        if _facts(begin) != wanted:
            raise PlanMismatch(
                f"trainer ranks 0 and {rank} have different plans for this version; are their trees sharded alike?"
            )


def _merged_stages(stages: Sequence[pb.Stage]) -> pb.Stage:
    merged = pb.Stage(version=stages[0].version)
    for stage in stages:
        if stage.version != merged.version:
            raise ProtocolMismatch(f"trainer ranks stage versions {merged.version} and {stage.version}")
        for name, manifests in stage.manifests.items():
            into = merged.manifests[name].ranks
            for index, rank_manifests in enumerate(manifests.ranks):
                if index == len(into):
                    into.add()
                into[index].senders.extend(rank_manifests.senders)
    return merged


def _facts(begin: pb.Begin) -> tuple[object, ...]:
    offers = sorted((name, o.fingerprint, o.transport, o.fresh, o.hashed) for name, o in begin.offers.items())
    return begin.version, begin.epoch, begin.drop_failed, tuple(offers)
