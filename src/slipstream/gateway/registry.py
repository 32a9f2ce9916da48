"""The engines of the fleet and their states. Pure bookkeeping: no sockets, and the clock is an argument.

register, no weights          register, version = fleet's
       │                                │
       ▼            commit(v)           ▼
     empty ──────────────────────────► ready ◄────┐
                                        │         │ commit(v)
      missed or failed a commit         ▼         │
                                       stale ─────┘
 ready, with memory released ─► asleep
 policy half overwritten (shared weights) ─► empty
 wrong results, or far slower than its peers, from any state ─► quarantined, until it passes a probe
 taken out of use by an operator, from any state ─► draining ─► drained, until the operator lets it back
 lease expired or connection broken, from any state ─► lost
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from slipstream.errors import NameInUse, NotReady, ProtocolMismatch, RequestError, UnknownEngine, VersionError
from slipstream.gateway.circuit_breaker import CircuitBreaker
from slipstream.gateway.quarantine import Quarantine
from slipstream.gateway.speed import SpeedMeter, relative_speeds, share_of_work
from slipstream.types import PROTOCOL_VERSION, EngineInfo, EngineState, EngineStatus, MemoryTag

FORGET_SECONDS = 3600.0
"""How long a lost engine stays in the status."""


@dataclass
class Member:
    info: EngineInfo
    last_heard: float
    """Its lease counts from here."""
    lost: str = ""
    """Why the engine was lost; empty while it is alive."""
    num_requests: int = 0
    asleep: tuple[MemoryTag, ...] = ()
    """Memory it has released, by its last report."""
    is_paused: bool = False
    num_stops: int = 0
    """How often it was paused, resumed, put to sleep or woken."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    quarantine: Quarantine = field(default_factory=Quarantine)
    speed: SpeedMeter = field(default_factory=SpeedMeter)
    speed_checked_at: float = -math.inf
    """When it was last compared with a peer because it seemed slow."""
    looked_up_tokens: int = 0
    """Prompt tokens, from its heartbeats."""
    hit_tokens: int = 0
    """Prompt tokens found in its prefix cache, from its heartbeats."""
    num_tokens: int = 0
    """Tokens it has generated."""
    kv_use: float = 0.0
    activity: str = ""
    adapters: tuple[str, ...] = ()
    """From its heartbeats, as in `EngineStatus`."""
    lost_policy: bool = False
    """It had a policy and has none any more. It refuses requests with the reason."""


class Registry:
    """The engines by name, the committed version, and an epoch that increases whenever an engine joins or leaves."""

    def __init__(
        self, lease_seconds: float, quarantined: Mapping[str, str] | None = None, drained: Iterable[str] = ()
    ) -> None:
        """`quarantined` are the engines that an earlier gateway did not trust, with its reasons, and `drained` those that were
        taken out of use."""
        self.lease_seconds = lease_seconds
        self._quarantined = dict(quarantined or {})
        self._drained = set(drained)
        """By name: an engine that is restarted for maintenance stays out of use until the operator says so."""
        self.version = -1
        self._burnt = -1
        """Last version that engines were told to commit and may have committed, though none reported it."""
        self.is_committing = False
        """Engines may already serve a version that is not recorded yet."""
        self.epoch = 0
        self._members: dict[str, Member] = {}

    def register(self, info: EngineInfo, now: float) -> None:
        """Add an engine. Raises if its protocol or model differs from the fleet's, or its name is taken."""
        if info.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"engine {info.name!r} speaks protocol {info.protocol}, this gateway {PROTOCOL_VERSION}; "
                "install the same release of Slipstream on both sides"
            )
        if not info.name or not info.parameters or info.num_ranks < 1:
            raise ProtocolMismatch(f"engine {info.name!r} registered without a name, ranks or parameters")
        present = self._members.get(info.name)
        # The same process again: it saw its connection break before the gateway did.
        is_same = (
            present is not None and bool(info.pid) and present.info.host == info.host and present.info.pid == info.pid
        )
        if present is not None and not present.lost and not is_same:
            raise NameInUse(f"an engine named {info.name!r} is registered already (pid {present.info.pid})")
        for other in self.alive():
            if (other.info.model, other.info.tensors) != (info.model, info.tensors):
                raise RequestError(
                    f"engine {info.name!r} holds model {info.model}, the fleet (engine {other.info.name!r}) holds "
                    f"{other.info.model}; one gateway serves one model"
                )
        member = Member(info, now, quarantine=Quarantine(self._quarantined.pop(info.name, "")))
        if present is not None:
            # An engine that its requests kill, or whose results are wrong, does not become sound by restarting.
            member.breaker, member.quarantine = present.breaker, present.quarantine
            if is_same:
                member.is_paused = present.is_paused
                member.info = replace(info, weights_epoch=present.info.weights_epoch)
            else:
                member.quarantine.renewed()
        self._members[info.name] = member
        self.epoch += 1
        # The first engine with weights from its checkpoint sets the fleet's version. A later one with a newer version has
        # committed it, and the gateway was killed, or its disk was full, before it could record that.
        self.version = max(self.version, info.version)

    def set_empty(self, name: str) -> None:
        """An engine reports that it holds no policy."""
        member = self._members[name]
        member.lost_policy = member.lost_policy or member.info.version >= 0
        member.info = replace(member.info, version=-1)

    def set_paused(self, names: Iterable[str], is_paused: bool) -> None:
        """Engines were told to pause or resume."""
        for name in names:
            self._members[name].is_paused = is_paused
            self._members[name].num_stops += 1

    def set_asleep(self, name: str, asleep: tuple[MemoryTag, ...]) -> None:
        """An engine reports the memory that it has released."""
        member = self._members[name]
        member.num_stops += member.asleep != asleep
        member.asleep = asleep

    def drain(self, name: str, force: bool = False) -> bool:
        """Give an engine no more requests. Return whether it got them until now. Unless forced, raises `RequestError` if no
        other engine takes requests."""
        if self.get(name).info.name in self._drained:
            return False
        others = [self.state(m) for m in self.alive() if m.info.name != name]
        if not force and not set(others) - {"quarantined", "draining", "drained"}:
            raise RequestError(
                f"no engine but {name!r} takes requests, so without it they fail or wait; start another engine first, or "
                "drain it all the same with --force"
            )
        self._drained.add(name)
        return True

    def undrain(self, name: str) -> bool:
        """Let an engine take requests again. Return whether it was drained."""
        was_drained = self.get(name).info.name in self._drained
        self._drained.discard(name)
        return was_drained

    def start_quarantine(self, name: str, now: float, reason: str, needs_weights: bool) -> bool:
        """Use an engine no more; the next update sends it every tensor. Return whether it was trusted until now."""
        member = self.get(name)
        is_new = not member.quarantine.reason or member.quarantine.is_slow
        member.quarantine.start(now, reason, needs_weights)
        if is_new:
            member.info = replace(member.info, weights_epoch=member.info.weights_epoch + 1)
            self.epoch += 1
        return is_new

    def lose(self, name: str, reason: str) -> None:
        member = self._members[name]
        if not member.lost:
            member.lost = reason
            self.epoch += 1

    def expire(self, now: float) -> list[str]:
        """Lose the engines whose lease has expired; return their names."""
        late = [m.info.name for m in self.alive() if now - m.last_heard > self.lease_seconds]
        for name in late:
            self.lose(name, f"no heartbeat for {self.lease_seconds:g} s")
        return late

    def forget(self, now: float) -> list[str]:
        """Remove engines that were lost long ago, so that engines under ever new names do not fill the registry; return their
        names."""
        gone = [n for n, m in self._members.items() if m.lost and now - m.last_heard > FORGET_SECONDS]
        for name in gone:
            del self._members[name]
        return gone

    def state(self, member: Member) -> EngineState:
        if member.lost:
            return "lost"
        if member.quarantine.reason:
            return "quarantined"
        if member.info.name in self._drained:
            return "draining" if member.num_requests else "drained"
        if member.info.version < 0:
            return "empty"
        if member.info.version != self.version:
            return "stale"
        return "asleep" if member.asleep else "ready"

    def alive(self) -> list[Member]:
        return [m for m in self._members.values() if not m.lost]

    def answering(self) -> list[Member]:
        """Return the engines that answer at once."""
        return [m for m in self.alive() if self.state(m) == "ready" and not m.is_paused]

    def available(self, only: str = "") -> list[Member]:
        """Return the engines that can take requests, of all or of one.

        If all of them sleep, return those: requests wait there, as they do without a gateway. If all of them are slow, return
        those. If the others have lost their policy, return those: they refuse requests with the reason. Raises `NotReady` if
        there are none."""
        members = [self.get(only)] if only else self._members.values()
        current = [m for m in members if self.state(m) in ("ready", "asleep")]
        current = current or [m for m in members if self._is_slow_but_sound(m)]
        current = current or [m for m in members if m.lost_policy and self.state(m) == "empty"]
        if not current:
            raise self.not_ready()
        return [m for m in current if not m.asleep] or current

    def _is_slow_but_sound(self, member: Member) -> bool:
        is_used = not member.lost and member.info.name not in self._drained
        return is_used and member.quarantine.is_slow and member.info.version == self.version

    def speeds(self, now: float) -> dict[str, float]:
        """Return how fast engines are, relative to the others; only those that can be compared."""
        return relative_speeds({m.info.name: m.speed.rate(now) for m in self.alive() if not m.quarantine.reason})

    def shares(self, now: float) -> dict[str, float]:
        """Return the weights with which work is shared out; an engine that is not there has 1."""
        return {name: share for name, speed in self.speeds(now).items() if (share := share_of_work(speed)) < 1}

    def get(self, name: str) -> Member:
        if name not in self._members:
            raise UnknownEngine(f"no engine is named {name!r}; the fleet has {sorted(self._members) or 'none'}")
        return self._members[name]

    def check_version(self, version: int, names: Iterable[str]) -> None:
        """Raise `VersionError` unless `version` is new, or it is the fleet's and none of `names` has it."""
        if version == self.version >= 0 and all(self.get(name).info.version < version for name in names):
            return
        if version <= self.version:
            raise VersionError(f"version {version} is not newer than the fleet's version {self.version}")
        if version < self.next_version:
            raise VersionError(
                f"version {version} may be committed by an engine that has not reported it; use {self.next_version}"
            )

    @property
    def next_version(self) -> int:
        return max(self.version, self._burnt) + 1

    def burn(self, version: int) -> None:
        """Use a version's number for no other weights: an engine that died or hangs may have generated with it."""
        self._burnt = version

    def commit(self, version: int, names: Iterable[str]) -> None:
        """Record that `names` serve `version`; every other engine is now stale."""
        self.version = version
        for name in names:
            member = self._members[name]
            member.info = replace(member.info, version=version)
            member.lost_policy = False
            member.quarantine.renewed()

    def not_ready(self) -> NotReady:
        """Return the error for a request that no engine can take."""
        if not self._members:
            return NotReady("no engine has registered yet; start one with `slipstream engine`")
        states = "; ".join(f"{s.info.name}: {s.state}{f' ({s.note})' if s.note else ''}" for s in self.statuses(0.0))
        hint = "sync weights first (bridge.sync)" if self.version < 0 else "sync again or start another engine"
        if any(self.state(m) in ("draining", "drained") for m in self.alive()):
            hint = "`slipstream drain ENGINE --undo` lets a drained one take requests again"
        return NotReady(f"no engine can take requests ({states}); {hint}")

    def statuses(self, now: float) -> tuple[EngineStatus, ...]:
        notes = {
            "empty": "has no weights",
            "stale": "missed an update; the next sync brings it back",
            "draining": "finishes its requests and gets no others",
            "drained": "gets no requests until `slipstream drain ENGINE --undo`",
        }
        rows, speeds = [], self.speeds(now)
        for member in self._members.values():
            state, speed = self.state(member), speeds.get(member.info.name, 0.0)
            notes["asleep"] = f"asleep: {' and '.join(member.asleep)} released; bridge.wake brings them back"
            notes["quarantined"] = member.quarantine.note(now)
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
                    speed=speed,
                    num_tokens=member.num_tokens,
                    kv_use=member.kv_use,
                    activity=member.activity,
                    adapters=member.adapters,
                )
            )
        return tuple(rows)
