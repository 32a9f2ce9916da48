"""Who is in the fleet, and in what state. Pure bookkeeping: no sockets, and the clock is an argument.

register, no weights          register, version = fleet's
       │                                │
       ▼            commit(v)           ▼
     empty ──────────────────────────► ready ◄────┐
                                        │         │ commit(v)
      missed a commit, or rolled back   ▼         │
      at commit time                   stale ─────┘
 ready, but has given up memory ─► asleep
 its policy was half overwritten (shared weights) ─► empty
 lease ran out, or connection broke, from any state ─► lost
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slipstream.errors import NameInUse, NotReady, ProtocolMismatch, RequestError, UnknownEngine, VersionError
from slipstream.gateway.breaker import Breaker
from slipstream.types import PROTOCOL_VERSION, EngineInfo, EngineState, EngineStatus, MemoryTag

FORGET_SECONDS = 3600.0
"""For which an engine that is lost can still be seen."""


@dataclass
class Member:
    info: EngineInfo
    last_heard: float
    lost: str = ""
    """Why it was lost; empty while it lives."""
    num_requests: int = 0
    asleep: tuple[MemoryTag, ...] = ()
    """What it has given up, as it said last."""
    is_paused: bool = False
    breaker: Breaker = field(default_factory=Breaker)
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    """As its heartbeats say."""
    is_emptied: bool = False
    """It had a policy and has none any more; why, it says itself."""


class Registry:
    """The engines by name, the committed version, and an epoch that grows whenever an engine comes or goes."""

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.version = -1
        self.epoch = 0
        self._members: dict[str, Member] = {}

    def register(self, info: EngineInfo, now: float) -> None:
        """Takes an engine in, or says why not: a wrong protocol, a name in use, or another model than the fleet's."""
        if info.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"engine {info.name!r} speaks protocol {info.protocol}, this gateway {PROTOCOL_VERSION}; "
                "install the same release of Slipstream on both sides"
            )
        if not info.name or not info.parameters or info.num_ranks < 1:
            raise ProtocolMismatch(f"engine {info.name!r} did not say its name, ranks and parameters")
        present = self._members.get(info.name)
        again = present is not None and info.pid and (present.info.host, present.info.pid) == (info.host, info.pid)
        if present is not None and not present.lost and not again:  # again: it saw its connection break before we did
            raise NameInUse(f"an engine named {info.name!r} is registered already (pid {present.info.pid})")
        for other in self.alive():
            if (other.info.model, other.info.tensors) != (info.model, info.tensors):
                raise RequestError(
                    f"engine {info.name!r} holds model {info.model}, the fleet (engine {other.info.name!r}) holds "
                    f"{other.info.model}; one gateway serves one model"
                )
        was_paused = present is not None and bool(again) and present.is_paused  # by a gateway that lost sight of it
        breaker = Breaker() if present is None else present.breaker  # one that dies of its requests comes back to them
        self._members[info.name] = Member(info, now, is_paused=was_paused, breaker=breaker)
        self.epoch += 1
        if self.version < 0 <= info.version:
            self.version = info.version  # the first engine with weights from its checkpoint sets the fleet's version

    def heard(self, name: str, now: float) -> None:
        self._members[name].last_heard = now

    def counted(self, name: str, looked_up_tokens: int, hit_tokens: int) -> None:
        """Tokens of prompts, and those of them that the engine had computed before."""
        member = self._members[name]
        member.looked_up_tokens, member.hit_tokens = looked_up_tokens, hit_tokens

    def emptied(self, name: str) -> None:
        """An engine says that it holds no policy (any more)."""
        member = self._members[name]
        member.is_emptied = member.is_emptied or member.info.version >= 0
        member.info = replace(member.info, version=-1)

    def slept(self, name: str, asleep: tuple[MemoryTag, ...]) -> None:
        """What an engine says it has given up; nothing when it is awake."""
        self._members[name].asleep = asleep

    def paused(self, name: str, is_paused: bool) -> None:
        """What an engine was told."""
        self._members[name].is_paused = is_paused

    def lose(self, name: str, why: str) -> None:
        member = self._members[name]
        if not member.lost:
            member.lost = why
            self.epoch += 1

    def expire(self, now: float) -> list[str]:
        """Loses the engines whose lease ran out; returns their names."""
        late = [m.info.name for m in self.alive() if now - m.last_heard > self.lease_seconds]
        for name in late:
            self.lose(name, f"no heartbeat for {self.lease_seconds:g} s")
        return late

    def forget(self, now: float) -> list[str]:
        """The engines that were lost long ago are no longer known; returns their names. Where engines come and go under
        new names, the dead would fill the registry."""
        gone = [n for n, m in self._members.items() if m.lost and now - m.last_heard > FORGET_SECONDS]
        for name in gone:
            del self._members[name]
        return gone

    def state(self, member: Member) -> EngineState:
        if member.lost:
            return "lost"
        if member.info.version < 0:
            return "empty"
        if member.info.version != self.version:
            return "stale"
        return "asleep" if member.asleep else "ready"

    def alive(self) -> list[Member]:
        return [m for m in self._members.values() if not m.lost]

    def takers(self, only: str = "") -> list[Member]:
        """Who can take requests, of all or of one. Where all of them sleep, requests go to the sleeping and wait there,
        as they do without a gateway; where the rest has lost its policy, to these, which refuse and say why. Raises
        `NotReady` when there is nobody."""
        members = [self.get(only)] if only else self._members.values()
        current = [m for m in members if self.state(m) in ("ready", "asleep")]
        current = current or [m for m in members if m.is_emptied and not m.lost]
        if not current:
            raise self.why_not_ready()
        return [m for m in current if not m.asleep] or current

    def get(self, name: str) -> Member:
        if name not in self._members:
            raise UnknownEngine(f"no engine is named {name!r}; the fleet has {sorted(self._members) or 'none'}")
        return self._members[name]

    def check_version(self, version: int, names: Iterable[str]) -> None:
        """A new version is for all; the fleet's own is for engines that do not have it."""
        if version == self.version >= 0 and all(self.get(name).info.version < version for name in names):
            return
        if version <= self.version:
            raise VersionError(f"version {version} is not newer than the fleet's, {self.version}; versions only grow")

    def commit(self, version: int, names: Iterable[str]) -> None:
        """`names` now serve `version`; every other engine is behind, that is stale."""
        self.version = version
        for name in names:
            member = self._members[name]
            member.info = replace(member.info, version=version)
            member.is_emptied = False

    def why_not_ready(self) -> NotReady:
        """For a request that no engine can take."""
        if not self._members:
            return NotReady("no engine has registered yet; start one with `slipstream engine`")
        states = "; ".join(f"{s.info.name}: {s.state}{f' ({s.note})' if s.note else ''}" for s in self.statuses(0.0))
        hint = "sync weights first (bridge.sync)" if self.version < 0 else "sync again, or start another engine"
        return NotReady(f"no engine can take requests ({states}); {hint}")

    def statuses(self, now: float) -> tuple[EngineStatus, ...]:
        notes = {"empty": "has no weights", "stale": "missed an update; the next sync brings it back"}
        rows = []
        for member in self._members.values():
            state = self.state(member)
            notes["asleep"] = f"gave up its {' and '.join(member.asleep)}; bridge.wake brings it back"
            note = member.lost or notes.get(state, "") or member.breaker.note(now)
            rows.append(
                EngineStatus(
                    info=member.info,
                    state=state,
                    num_requests=member.num_requests,
                    seconds_since_heartbeat=max(0.0, now - member.last_heard),
                    note=note,
                    is_paused=member.is_paused,
                    circuit=member.breaker.state(now),
                    num_faults=member.breaker.num_faults,
                    looked_up_tokens=member.looked_up_tokens,
                    hit_tokens=member.hit_tokens,
                )
            )
        return tuple(rows)
