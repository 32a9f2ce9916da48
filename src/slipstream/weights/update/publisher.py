"""The trainer's half of weight updates: plan once, then run one update after another (`publication.py`).

All engines stage and verify a version before any engine commits it. If one fails, all roll back and keep the version they
have, or, with `drop_failed`, the others continue without it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.config import SyncOptions
from slipstream.errors import DeltaMismatch, MappingError, Unsupported
from slipstream.runtime import gpus
from slipstream.runtime.clock import unix_time
from slipstream.tensors.boxes import full_box
from slipstream.types import Checksums, EngineInfo, EngineSync, InFlight, Lora, SyncReport, Unchecked, VerifyReport
from slipstream.weights import adapters as layouts
from slipstream.weights.checksum import ScanOptions
from slipstream.weights.plan import Plan, SourceTensor, make_plan
from slipstream.weights.sources import named_tensors
from slipstream.weights.sources.named_tensors import Tensor
from slipstream.weights.transports.device import are_jax_arrays, gpu_ordinals, on_accelerator
from slipstream.weights.update import snapshot, transport_choice
from slipstream.weights.update.publication import AdapterOffer, Publication, Route, UpdateClient
from slipstream.weights.update.sent_pieces import SentPieces
from slipstream.weights.update.verify import compare

log = logging.getLogger(__name__)

DRAFT = "draft."
"""Prefix of a draft model's tensor names. The draft belongs to the policy's version and is updated in the same transaction."""


def _named(params: Any, draft: Any, adapters: Mapping[Lora, Tensor] | None = None) -> dict[str, Tensor]:
    tensors = {} if params is None and adapters else named_tensors.named_tensors(params)
    if draft is not None:
        tensors |= {DRAFT + name: tensor for name, tensor in named_tensors.named_tensors(draft).items()}
    tensors |= {f"{layouts.PREFIX}{index}": packed for index, packed in enumerate((adapters or {}).values())}
    named_tensors.check_not_deleted(tensors)
    return tensors


def _identity(engine: EngineInfo) -> tuple[object, ...]:
    """What must stay the same for the trainer to know which tensors an engine holds."""
    return engine.pid, engine.host, engine.weights_epoch


class Publisher:
    """Sends weights to engines. Keeps plans and connections from update to update; runs one update at a time."""

    def __init__(self, client: UpdateClient, options: SyncOptions | None = None, *, through_host: bool = False) -> None:
        """`through_host`: use no transport that reads a GPU's memory from another process."""
        self._client, self._options, self._through_host = client, options or SyncOptions(), through_host
        self.kept: snapshot.KeptWeights | None = None
        """The weights of the last update, if they could be kept. A trainer of several processes keeps none: all of them
        would have to send at the same time."""
        options = self._options
        scan = ScanOptions(options.checksums, options.check_finite)
        self._sent = SentPieces(scan, options.delta_bytes, on_device=options.delta == "device")
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._routes: dict[str, Route] = {}
        self._describe = named_tensors.DescriptionCache(self._options.process_index)
        # What the routes were made for:
        self._sources: dict[str, SourceTensor] = {}
        self._engines: Sequence[EngineInfo] = ()
        self._partial = False
        self._update: Publication | None = None
        self._extended: tuple[Sequence[EngineInfo], tuple[object, ...], Sequence[EngineInfo]] = (), (), ()
        """Engines, layouts of adapters, and the engines as targets of an update with these."""

    @property
    def phase(self) -> str:
        """What the update in progress is at, in words."""
        return "planning" if self._update is None else self._update.phase

    async def publish(
        self,
        params: Any,
        engines: Sequence[EngineInfo],
        version: int,
        in_flight: InFlight = "keep",
        partial: bool = False,
        drop_failed: bool = False,
        draft: Any = None,
        adapters: Mapping[Lora, Tensor] | None = None,
    ) -> SyncReport:
        """Make `params` the policy of every engine as `version`, or raise and leave every engine as it was.

        With `partial`, tensors that are not in `params` stay as they are. `draft` is the tree of a draft model, for engines
        that decode speculatively; without it the draft stays as it is. `adapters` are packed (`weights/adapters.py`) and
        always sent whole; with them, `params` may be None, and the base model stays as it is."""
        start = time.perf_counter()
        tensors = _named(params, draft, adapters)
        brought = AdapterOffer(tuple(adapters or ()), params is None)
        routes = self._routes_for(self._describe(tensors), self._with_adapters(engines, brought), partial, tensors)
        self._prepare_deltas(routes)
        update = Publication(
            *(self._client, routes, tensors, version, in_flight, drop_failed, self._options.timeout), adapters=brought
        )
        planned = time.perf_counter()
        try:
            self._update = update
            await update.run()
        except BaseException as error:
            if isinstance(error, DeltaMismatch):
                log.warning("all bytes are sent again: %s", error)
            self._drop(*routes)  # the old memory may still be written to; the next update uses other memory
            self._sent.clear()
            await asyncio.shield(self._client.rollback(version))
            raise
        finally:
            self._update = None
        committed = time.perf_counter()
        for name in update.commits:
            seconds = update.staged_at - planned
            routes[name].committed(update.unchanged[name], update.sent[name], update.stages[name], seconds)
        self._sent.end()
        lost = [engine.name for engine in engines if engine.name not in update.commits]
        self._drop(*lost)
        if self._options.process_count == 1 and params is not None:
            base = {name: tensor for name, tensor in tensors.items() if not name.startswith(layouts.PREFIX)}
            facts = (self._options.snapshot, version, base, self.kept, partial)
            is_copied = self._options.snapshot == "copy"
            self.kept = await asyncio.to_thread(snapshot.keep, *facts) if is_copied else snapshot.keep(*facts)
        return SyncReport(
            version=version,
            num_bytes=update.num_bytes,
            plan_seconds=planned - start,
            send_seconds=update.sent_at - planned,
            stage_seconds=update.staged_at - update.sent_at,
            commit_seconds=committed - update.staged_at,
            total_seconds=committed - start,
            engines=tuple(
                EngineSync(
                    *(name, routes[name].transport_label, update.stages[name], update.commits[name]),
                    checksummed=routes[name].is_checksummed,
                    encoding=update.sent[name].encoding,
                    wire_bytes=update.sent[name].num_bytes,
                )
                for name in routes
                if name in update.commits
            ),
            lost=tuple(lost),
            started=unix_time(start),
        )

    async def verify(self, params: Any, engines: Sequence[EngineInfo], draft: Any = None) -> VerifyReport:
        """Compare the engines' weights with `params`. Raise `Unsupported` if no engine can report its weights."""
        tensors = _named(params, draft)
        sources = self._describe(tensors)
        for engine in engines:
            self._plan(sources, engine, partial=False)  # rejects a tree that does not fit
        calls = [self._client.checksums(engine.name) for engine in engines]
        checksums: dict[str, Checksums] = {}
        unsupported: list[Unchecked] = []
        for engine, answer in zip(engines, await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(answer, Unsupported):
                unsupported.append(Unchecked(engine.name, "", str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                checksums |= answer
        if unsupported and not checksums:
            raise Unsupported("no engine can report its weights. " + " | ".join(u.why for u in unsupported))
        report = await asyncio.to_thread(compare, tensors, engines, checksums)
        return replace(report, unchecked=(*unsupported, *report.unchecked))

    def close(self) -> None:
        self._drop(*self._routes)
        self._sent.clear()

    def _prepare_deltas(self, routes: Mapping[str, Route]) -> None:
        wanted = {route.choose_encoding() for route in routes.values()}
        if True in wanted:
            self._sent.begin()
        else:
            self._sent.clear()

    def _with_adapters(self, engines: Sequence[EngineInfo], brought: AdapterOffer) -> Sequence[EngineInfo]:
        """Return the engines as targets of an update with adapters; the same objects for the same engines and layouts."""
        if not brought.adapters:
            return engines
        of, key, extended = self._extended
        if of is not engines or key != brought.layout:
            extended = tuple(layouts.with_adapters(e, brought.adapters, brought.only_adapters) for e in engines)
            self._extended = engines, brought.layout, extended
        return extended

    def _routes_for(
        self,
        sources: dict[str, SourceTensor],
        engines: Sequence[EngineInfo],
        partial: bool,
        tensors: Mapping[str, Tensor],
    ) -> dict[str, Route]:
        is_same = self._engines is engines and self._partial == partial and self._sources == sources
        if is_same and len(self._routes) == len(engines):
            return dict(self._routes)
        options, on_gpu = self._options, not self._through_host and on_accelerator(tensors)
        routes, ordinals = {}, gpu_ordinals(tensors) if on_gpu else set()
        is_jax = on_gpu and are_jax_arrays(tensors)
        for engine in engines:
            plan = self._plan(sources, engine, partial)
            is_seen = not on_gpu or gpus.are_visible(ordinals, engine.devices)
            # The embedded engine has not been tried with PyTorch's memory.
            reads_gpu = on_gpu and (is_jax or engine.kind != "embedded")
            transport = transport_choice.choose(
                engine.name, engine.transports, engine.host, engine.pid, options.transport, reads_gpu, is_seen
            )
            route = self._routes.get(engine.name)
            is_same = route is not None and _identity(route.engine) == _identity(engine)
            if route is None or not is_same or route.plan is not plan or route.transport != transport:
                self._drop(engine.name)
                route = Route(engine, plan, transport, options, self._sent)
            routes[engine.name] = route
        self._drop(*(self._routes.keys() - routes.keys()))
        self._routes, self._sources, self._engines, self._partial = routes, sources, engines, partial
        return dict(routes)

    def _plan(self, sources: dict[str, SourceTensor], engine: EngineInfo, partial: bool) -> Plan:
        has_draft = any(name.startswith(DRAFT) for name in sources)
        optional = [t for t in engine.tensors if partial or (not has_draft and t.name.startswith(DRAFT))]
        # A tensor that is not sent is never read, so any source will do.
        sources = {t.name: SourceTensor(t.shape, engine.dtype, ((0, full_box(t.shape)),)) for t in optional} | sources
        layout = (
            tuple(sorted(sources.items(), key=lambda item: item[0])),
            engine.tensors,
            engine.parameters,
            engine.dtype,
        )
        if layout not in self._plans:
            try:
                self._plans[layout] = make_plan(sources, engine.tensors, engine.parameters, engine.dtype)
            except MappingError as error:
                raise MappingError(f"engine {engine.name!r} ({engine.model}): {error}") from None
        return self._plans[layout]

    def _drop(self, *names: str) -> None:
        for name in names:
            if (route := self._routes.pop(name, None)) is not None:
                route.close()
