"""One weight update, from begin to commit on every engine: begin → send → stage → commit.

In the steady state the trainer waits for nothing before it moves bytes. After a commit it knows where the next version goes,
so `begin` carries these destinations and an engine only confirms them. Where moving the bytes takes next to no time, begin,
stage and commit travel as one message; otherwise the same steps are sent one by one (`UpdateSteps`)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from slipstream.config import SyncOptions
from slipstream.errors import ChecksumMismatch, DeadlineExceeded, TransferError, Unsupported
from slipstream.runtime.failpoints import step
from slipstream.types import (
    Checksums,
    CommitReport,
    EngineInfo,
    InFlight,
    Lora,
    Offer,
    StageReport,
    UpdateReports,
    UpdateSteps,
)
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Plan
from slipstream.weights.sources.named_tensors import Tensor
from slipstream.weights.transports.device import DEVICE_TRANSPORTS, LOCAL, are_ready
from slipstream.weights.update import transport_choice
from slipstream.weights.update.delta_choice import DeltaChoice
from slipstream.weights.update.device_outbox import DeviceOutbox
from slipstream.weights.update.sent_pieces import SentPieces
from slipstream.weights.update.transfer import CannotRelay, Outbox, Sent
from slipstream.weights.update.unchanged import HeldTensors

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_Sent: TypeAlias = Mapping[str, Sent]
"""By engine."""


class AdapterOffer(NamedTuple):
    """What an update brings besides tensors of the base model, or instead of them."""

    adapters: tuple[Lora, ...] = ()
    only_adapters: bool = False

    @property
    def layout(self) -> tuple[object, ...]:
        """What the layout of the update depends on."""
        return self.only_adapters, *((lora.rank, lora.targets) for lora in self.adapters)


NO_ADAPTERS = AdapterOffer()


class UpdateClient(Protocol):
    """The calls of a fleet that a weight update uses, behind a gateway or in this process. Keys are engine names."""

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        """Send steps to the engines without waiting for their reports.

        All engines get the same version and the same steps. Steps behind a failed step do nothing, so they may be sent
        before its reports arrive. With `drop_failed`, given at begin, the update continues without engines that fail."""

    async def receive_reports(self) -> dict[str, UpdateReports]:
        """Wait for the reports of the oldest unanswered `send_steps`, or raise what an engine raised."""

    async def rollback(self, version: int) -> None:
        """Roll back a version on every engine. Never raises."""

    async def checksums(self, engine: str = "") -> dict[str, Checksums]: ...


class Route:
    """What the trainer keeps for one engine: the plan, the senders to its ranks, and the tensors it holds."""

    def __init__(self, engine: EngineInfo, plan: Plan, transport: str, options: SyncOptions, sent: SentPieces) -> None:
        self.engine, self.plan, self.transport, self._hashed = engine, plan, transport, options.checksums
        self.outbox: Outbox | DeviceOutbox
        scan, rank = ScanOptions(options.checksums, options.check_finite), options.process_index
        if transport in (*DEVICE_TRANSPORTS, LOCAL):
            self.outbox = DeviceOutbox(plan, engine.parameters, rank, engine.name, transport, scan)
        else:
            self.outbox = Outbox(plan, engine.parameters, rank, scan, sent)
        self._choice, self._sent = DeltaChoice(engine, plan, transport, options), sent
        self._held = self._held_after = HeldTensors()
        self._is_one_process = options.process_count == 1
        self._is_connected = False
        """The engine has the plan, and the trainer has links to it."""
        self.is_alone = False
        """Gets its bytes from the trainer, because engines could not pass them on."""
        self._offered = ""

    @property
    def transport_label(self) -> str:
        """The transport, with the note of its sender if there is one."""
        return ", ".join(filter(None, (self.transport, self.outbox.note)))

    @property
    def network(self) -> str | None:
        """See `transport_choice.network_of`."""
        destinations = self.outbox.destinations
        if self.is_alone or destinations is None:
            return None
        return transport_choice.network_of(self.transport, self.engine.host, destinations)

    @property
    def is_checksummed(self) -> bool:
        """Whether the engine compares checksums. A server that is not ours has none to compare with."""
        return self._hashed and self.engine.kind != "remote"

    def choose_encoding(self) -> bool:
        """Decide for deltas or whole weights. Return whether it is deltas."""
        is_delta = self._choice.wants_deltas(self._sent.bytes_per_second)
        if isinstance(self.outbox, Outbox):
            self.outbox.sends_deltas = is_delta
        return is_delta

    def is_quick(self, unchanged: set[str]) -> bool:
        """Whether sending what changed takes next to no time. The processes of a trainer have to agree on it, so with several
        of them it is about the whole model."""
        num_bytes = self.plan.changed_bytes(unchanged) if self._is_one_process else self.plan.num_bytes
        return transport_choice.is_quick(self.transport, num_bytes)

    def offer(self) -> Offer:
        plan = b"" if self._is_connected else self.plan.to_bytes()
        self._offered = self._offered or transport_choice.offered_transport(self.transport)
        return Offer(plan, self.plan.fingerprint, self._offered, not self._is_connected, self._hashed)

    def unchanged(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of tensors that need not be sent."""
        names = self._held.unchanged(tensors, self.engine.tensors)
        takes_all = self.engine.takes_all or transport_choice.takes_all(self.transport)
        if not takes_all or len(names) == len(self.engine.tensors):
            return names
        if missing := [t.name for t in self.engine.tensors if t.name not in tensors]:
            raise Unsupported(
                f"engine {self.engine.name!r} takes all tensors or none (over {self.transport}), and this tree lacks "
                f"{missing[0]} and {len(missing) - 1} more; sync the whole tree"
            )
        return set()

    def close(self) -> None:
        self.outbox.close()
        transport_choice.withdraw(self._offered)

    def prepare_commit(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute what the engine will hold, while the engine is busy and the trainer waits."""
        self._held_after = self._held.after(tensors)

    def committed(self, unchanged: set[str], sent: Sent, stage: StageReport, seconds: float) -> None:
        """Note what the engine was sent, and that it had received and verified it after `seconds`."""
        self._is_connected = True
        self.outbox.committed(unchanged)
        self._held = self._held_after
        self._choice.note(sent, stage.num_bytes, seconds)


class Publication:
    """One update from begin to commit."""

    def __init__(
        self,
        client: UpdateClient,
        routes: Mapping[str, Route],
        tensors: Mapping[str, Tensor],
        version: int,
        in_flight: InFlight,
        drop_failed: bool,
        timeout: float,
        adapters: AdapterOffer = NO_ADAPTERS,
    ) -> None:
        self._client, self._tensors, self._version, self._adapters = client, tensors, version, adapters
        self._in_flight, self._drop_failed, self._timeout = in_flight, drop_failed, timeout
        self.routes = dict(routes)
        """Engines that take part; with `drop_failed`, those that are left."""
        # What a route has sent before may be another adapter's.
        self.unchanged = {
            name: set() if adapters.adapters else route.unchanged(tensors) for name, route in routes.items()
        }
        self._are_destinations_known = not drop_failed and all(
            r.outbox.destinations is not None for r in routes.values()
        )
        self._is_quick = all(route.is_quick(self.unchanged[name]) for name, route in routes.items())
        self.num_bytes, self._counting = 0, threading.Lock()
        self.sent: _Sent = {}
        self.stages: dict[str, StageReport] = {}
        self.commits: dict[str, CommitReport] = {}
        self.sent_at = self.staged_at = 0.0

    @property
    def phase(self) -> str:
        """What the update is at, in words."""
        if not self.sent_at:
            return "sending the weights"
        return "engines commit" if self.staged_at else "engines check what they received"

    async def run(self) -> None:
        if self._are_destinations_known and self._is_quick:
            await self._send_bundled()
        else:
            await self._send_stepwise()
        for route in self.routes.values():
            route.prepare_commit(self._tensors)
        reports = await self._client.receive_reports()
        self.stages |= {name: report.stage for name, report in reports.items() if report.stage is not None}
        self.commits = {name: report.commit for name, report in reports.items() if report.commit is not None}
        for name, report in self.commits.items():
            copy_seconds = await self.routes[name].outbox.released()
            self.commits[name] = replace(
                report,
                load_seconds=max(report.load_seconds, copy_seconds),
                pause_seconds=max(report.pause_seconds, copy_seconds),
            )

    async def _send_bundled(self) -> None:
        """Send all steps as one message, before the bytes or behind them."""
        # A single rank commits everything or nothing, so it may get the message first. Of several ranks, each must confirm
        # that it can read its bytes before any may commit. So must one that compares checksums: it generates meanwhile, which
        # it cannot once it has the order to commit.
        may_commit_early = sum(route.engine.num_ranks for route in self.routes.values()) == 1 and not self._is_scanning
        seems_computed = self._seems_computed()
        promised = self._promised() if may_commit_early and seems_computed else None
        writing = None
        if promised is not None:
            # The message passes through the gateway and the bytes do not. They travel at the same time, and the engine waits
            # for whichever is late. Until gRPC has written the message, the engine may already have it.
            writing = asyncio.create_task(self._send_steps(begin=True, sent=promised, commit=True))
        try:
            await asyncio.sleep(0)  # starts the task
            is_computed = seems_computed and are_ready(self._tensors.values())
            sent = await self._send_bytes(is_computed)
        finally:
            if writing is not None:
                await writing
        self.sent_at = self.staged_at = time.perf_counter()
        if not may_commit_early:
            await self._confirm()
        if promised is None:
            await self._send_steps(begin=True, sent=sent, commit=True)
        if may_commit_early:
            await self._confirm()

    async def _send_stepwise(self) -> None:
        """Send the steps one by one: an engine must know of a long transfer to receive it, and hashes what has arrived."""
        await self._send_steps(begin=True)
        if not self._are_destinations_known:
            self._keep(await self._client.receive_reports())
        try:
            is_computed = self._is_quick and are_ready(self._tensors.values())
            sent = await self._send_bytes(is_computed)
        except TransferError:
            if self._are_destinations_known:  # a restarted engine has other links; its answer to begin says so
                await self._client.receive_reports()
            raise
        self.sent_at = time.perf_counter()
        await self._send_steps(sent=sent)
        if self._are_destinations_known:
            await self._client.receive_reports()
        await self._confirm()
        self._keep(await self._client.receive_reports())
        self.staged_at = time.perf_counter()
        await self._send_steps(commit=True)

    async def _send_steps(self, *, begin: bool = False, sent: _Sent | None = None, commit: bool = False) -> None:
        steps = {
            name: UpdateSteps(
                version=self._version,
                offer=replace(route.offer(), **self._adapters._asdict()) if begin else None,
                expected=route.outbox.destinations if begin and self._are_destinations_known else None,
                manifests=None if sent is None else [[manifest] for manifest in sent[name].manifests],
                in_flight=self._in_flight if commit else None,
            )
            for name, route in self.routes.items()
        }
        await self._client.send_steps(steps, self._drop_failed)

    def _keep(self, reports: Mapping[str, UpdateReports]) -> None:
        """Note the reports of a step, and drop engines that did not complete it."""
        self.routes = {name: route for name, route in self.routes.items() if name in reports}
        for name, route in self.routes.items():
            report = reports[name]
            if report.destinations is not None:
                transport_choice.check_links(name, report.destinations, route.transport)
                route.outbox.destinations = report.destinations
            if report.stage is not None:
                self.stages[name] = report.stage

    def _seems_computed(self) -> bool:
        """Whether the arrays to send are likely computed: an engine should not wait for a training step.

        One program usually computes all arrays, so a few of them from all over the tree speak for the rest. Where the engine
        stands still while it waits (`finish`, `recompute`), look at all of them."""
        unchanged = set.intersection(*self.unchanged.values())
        arrays = [tensor for name, tensor in self._tensors.items() if name not in unchanged]
        if self._in_flight in ("keep", "requeue"):
            arrays = [*arrays[:: 1 + len(arrays) // 8], *arrays[-1:]]
        return are_ready(arrays)

    def _promised(self) -> _Sent | None:
        """Return what `_send_bytes` will return, if it is known before the bytes are sent."""
        promised = {name: r.outbox.promise(self.unchanged[name], self._version) for name, r in self.routes.items()}
        return {name: sent for name, sent in promised.items() if sent is not None} or None

    @property
    def _is_scanning(self) -> bool:
        return any(route.outbox.is_scanning for route in self.routes.values())

    async def _send_bytes(self, is_computed: bool) -> _Sent:
        """Send the bytes to all engines at once, in threads where that takes long enough to pay off. `is_computed` says that
        the arrays are computed and sending them is quick."""
        in_thread = not is_computed or self._is_scanning or self._drop_failed
        step("sync.send", version=self._version)
        if in_thread:
            groups = await self._for_each({names[0]: self._send_group(names, is_computed) for names in self._groups()})
            sent = {name: of_engine for of_group in groups.values() for name, of_engine in of_group.items()}
        else:
            sent = {name: self._send([name], is_computed) for name in self.routes}
        self.sent = sent
        step("sync.sent", version=self._version)
        return sent

    def _groups(self) -> list[list[str]]:
        """Return the engines in groups that get the same bytes, which leave the trainer once for each group. With `drop_failed`
        no engine depends on another, which may fail."""
        groups: dict[object, list[str]] = {}
        for name, route in self.routes.items():
            network = None if self._drop_failed else route.network
            key = name if network is None else (network, id(route.plan), frozenset(self.unchanged[name]))
            groups.setdefault(key, []).append(name)
        # Engines of one host are neighbours in a chain, so that bytes enter and leave the host once.
        return [sorted(names, key=lambda name: self.routes[name].engine.host) for names in groups.values()]

    async def _send_group(self, names: Sequence[str], is_computed: bool) -> _Sent:
        try:
            return dict.fromkeys(names, await asyncio.to_thread(self._send, names, is_computed))
        except CannotRelay as error:
            log.warning("the trainer sends to %s one by one: %s", ", ".join(names), error)
            for name in names:
                self.routes[name].is_alone = True
            groups = await self._for_each({name: self._send_group([name], is_computed) for name in names})
            return {name: sent for group in groups.values() for name, sent in group.items()}

    def _send(self, names: Sequence[str], is_computed: bool) -> Sent:
        """Send to the first engine, and through it to the others."""
        first, *replicas = (self.routes[name].outbox for name in names)
        unchanged = self.unchanged[names[0]]
        sent = first.send(self._tensors, unchanged, self._version, is_computed, replicas)  # type: ignore[arg-type]
        with self._counting:
            self.num_bytes += sent.num_bytes
        return sent

    async def _confirm(self) -> None:
        async def confirm(name: str, route: Route) -> None:
            try:
                async with asyncio.timeout(self._timeout):
                    await route.outbox.confirmed()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"engine {name!r} did not confirm within {self._timeout:g} s that it can read version {self._version}"
                ) from None

        await self._for_each({name: confirm(name, route) for name, route in self.routes.items()})

    async def _for_each(self, calls: Mapping[str, Coroutine[Any, Any, _T]]) -> dict[str, _T]:
        """Run a call for each engine. With `drop_failed`, continue without engines that cannot be reached."""
        results = dict(zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True)))
        failed = {name: result for name, result in results.items() if isinstance(result, BaseException)}
        may_drop = self._drop_failed and len(failed) < len(calls)
        for error in failed.values():
            if not (may_drop and isinstance(error, (TransferError, ChecksumMismatch, DeadlineExceeded))):
                raise error
        for name, error in failed.items():
            log.warning("version %d continues without engine %s: %s", self._version, name, error)
        self.routes = {name: route for name, route in self.routes.items() if name not in failed}
        return {name: result for name, result in results.items() if not isinstance(result, BaseException)}
