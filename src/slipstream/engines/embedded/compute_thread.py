"""The thread on which the engine computes. Only it touches the device, the scheduler and the serving policy."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from slipstream.engines.embedded.compute.executor import Executor, Policy, StagedUpdate, TickResult
from slipstream.engines.embedded.scheduling.scheduler import Scheduler, Tick
from slipstream.engines.embedded.scheduling.steps_per_tick import StepsPerTick
from slipstream.engines.frontend.checks import never_finish, unloaded_adapter, weights_dropped
from slipstream.engines.frontend.draw_rate import DrawRate
from slipstream.engines.frontend.sequence import EngineRequest, FailedRequest, ResultSink, Sample
from slipstream.errors import EngineFailure, EngineLost, SlipstreamError, UnknownVersion
from slipstream.types import CommitReport, InFlight, MemoryReport, MemoryTag

COUNTED = ("ticks", "decode_steps", "decode_rows", "generated_tokens", "drafted_tokens", "accepted_tokens")

BURST_SECONDS = 0.03
"""How long the first requests wait for others. Their program takes a second to compile; it should be that of them all."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(slots=True, eq=False)
class _Swap:
    staged: StagedUpdate
    in_flight: InFlight
    requested_at: float
    done: Future[CommitReport]


def between_ticks(
    method: Callable[Concatenate[ComputeThread, P], T],
) -> Callable[Concatenate[ComputeThread, P], asyncio.Future[T]]:
    """Make a call of this method, on an event loop, run on the compute thread between two ticks."""

    @functools.wraps(method)
    def submit(self: ComputeThread, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(method(self, *args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        self._submit(command)
        return asyncio.wrap_future(done)

    return submit


class ComputeThread:
    """Runs ticks in a loop. Commands from other threads, including weight swaps, run between two ticks."""

    def __init__(self, executor: Executor, scheduler: Scheduler, policy: Policy | None, name: str) -> None:
        self._name, self._executor, self._scheduler = name, executor, scheduler
        self.policy: Policy | None = None
        """Set on the compute thread only."""
        self._steps_per_tick = StepsPerTick(executor.shapes.rows)
        self._swapped_at, self._idle_seconds = time.perf_counter(), 0.0
        """Time of the last swap, and idle time since then."""
        self._pending_swaps: list[_Swap] = []
        """Swaps that wait for the samples in flight to finish. Meanwhile no other sample starts."""
        self._asleep: set[MemoryTag] = set()
        self._paused = False
        self._held_at: float | None = None
        """When a trainer began to overwrite the serving weights. Until the next swap nothing may read them."""
        self.drop_reason: SlipstreamError | None = None
        """Why the engine lost its policy."""
        self._commands: list[Callable[[], object]] = []
        self._closing = False
        self._outbox: list[Sample | FailedRequest] = []
        """Results to deliver while the device works on the next tick."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._draw_rate = DrawRate()
        if policy is not None:
            self._set_policy(policy)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"slipstream-{name}", daemon=True)
        self._thread.start()

    # --- called from any thread ---

    @property
    def version(self) -> int:
        policy = self.policy
        return -1 if policy is None else policy.version

    def add(self, requests: Sequence[EngineRequest]) -> None:
        samples = [sample for request in requests for sample in request.samples()]
        self._submit(lambda: self._add(samples))

    def cancel(self, sink: ResultSink) -> None:
        """Drop the requests of a sink whose caller is gone, and free their pages."""
        self._submit(lambda: self._scheduler.drop(lambda request: request.sink is sink))

    def swap(self, staged: StagedUpdate, in_flight: InFlight) -> asyncio.Future[CommitReport]:
        swap = _Swap(staged, in_flight, time.perf_counter(), Future())
        self._submit(lambda: self._swap_when_finished(swap) if in_flight == "finish" else self._swap(swap))
        return asyncio.wrap_future(swap.done)

    def memory(self) -> MemoryReport:
        """Does not wait for the tick in progress."""
        return self._executor.memory(self.policy, tuple(sorted(self._asleep)))

    def stats(self) -> dict[str, Any]:
        """Counters since the start. Does not wait for the tick in progress, so they may not be mutually consistent."""
        scheduler, executor = self._scheduler, self._executor
        tree = scheduler.tree
        return {
            **{name: self._counts[name] for name in COUNTED},
            "seconds": {phase: self._seconds[phase] for phase in ("prefill", "decode", "host")},
            "prefill_tokens": scheduler.prefill_tokens,
            "hit_tokens": tree.hit_tokens if tree else 0,
            "looked_up_tokens": tree.looked_up_tokens if tree else 0,
            "evicted_pages": tree.evicted_pages if tree else 0,
            "cached_pages": tree.num_pages if tree else 0,
            "free_pages": scheduler.pool.num_free,
            "num_pages": scheduler.pool.num_pages,
            "preemptions": scheduler.num_preemptions,
            "activity": executor.activity,
            "num_programs": executor.num_programs,
            "compile_seconds": executor.compile_seconds,
        }

    def close(self) -> None:
        """Fail unfinished requests with `EngineLost` and join the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _submit(self, command: Callable[[], object]) -> None:
        with self._changed:
            if self._closing:
                raise EngineLost(f"engine {self._name!r} is closed")
            self._commands.append(command)
            self._changed.notify()

    # --- on the compute thread ---

    def _run(self) -> None:
        has_waited = False
        while True:
            with self._changed:
                idle_since = time.perf_counter()
                self._changed.wait_for(lambda: self._commands or self._closing or self._outbox or self._can_work)
                self._idle_seconds += time.perf_counter() - idle_since
                commands, self._commands = self._commands, []
                closing = self._closing
            for command in commands:
                command()
            if closing:
                return self._shut_down(EngineLost(f"engine {self._name!r} was closed before this request finished"))
            if self._can_work and not (has_waited or self._counts["decode_steps"]):
                has_waited = True
                time.sleep(BURST_SECONDS)
            elif self._can_work:
                has_waited = False
                self._tick()
            self._deliver()

    @property
    def _can_work(self) -> bool:
        can_step = not (self._asleep or self._paused or self._held_at is not None) and self.policy is not None
        if self._pending_swaps:
            return can_step or not self._scheduler.has_in_flight
        return can_step and bool(self._scheduler.live or self._scheduler.waiting)

    def _tick(self) -> None:
        """Plan and dispatch a tick, deliver the previous tick's results while the device works, then record this one's."""
        scheduler = self._scheduler
        if self._pending_swaps and not scheduler.has_in_flight:
            while self._pending_swaps:
                self._swap(self._pending_swaps.pop(0))
            return
        try:
            policy, started = self.policy, time.perf_counter()
            assert policy is not None, "ticks run only while there are weights"
            limits, num_running = self._steps_per_tick, len(scheduler.running)
            steps = limits.steps(num_running, self._executor.shapes.max_steps)
            tick = scheduler.plan(steps, admit=not self._pending_swaps, overhead=limits.overhead(num_running))
            tick.steps = min(tick.steps, limits.steps(len(tick.decode), steps))  # newly admitted samples included
            tick.early_exit_rows = limits.early_exit_rows(len(tick.decode), tick.steps)
            if tick.is_empty:
                raise RuntimeError("requests are waiting, none is running, and none could be admitted")
            dispatched = self._executor.dispatch(policy, tick)
            self._deliver()
            result = dispatched.wait(policy.version)
            self._executor.take_routes([sample for sample in tick.decode if sample.finish_reason is not None])
            self._outbox += scheduler.finish_prefill(tick)
            self._outbox += [sample for sample in tick.decode if scheduler.record(sample)]
        except Exception:
            return self._fail_live()
        seconds = time.perf_counter() - started
        self._draw_rate.add(result.num_drawn, seconds)
        self._count(tick, result, seconds)

    def _count(self, tick: Tick, result: TickResult, seconds: float) -> None:
        host_seconds = max(0.0, seconds - result.prefill_seconds - result.decode_seconds)
        if result.num_steps:
            self._steps_per_tick.record_tick(len(tick.decode), result.num_steps, result.decode_seconds, host_seconds)
        self._seconds["prefill"] += result.prefill_seconds
        self._seconds["decode"] += result.decode_seconds
        self._seconds["host"] += host_seconds
        self._counts["ticks"] += 1
        self._counts["decode_steps"] += result.num_steps
        self._counts["decode_rows"] += len(tick.decode) * result.num_steps
        self._counts["generated_tokens"] += result.num_drawn
        self._counts["drafted_tokens"] += result.num_drafted
        self._counts["accepted_tokens"] += result.num_accepted

    @between_ticks
    def pause(self, paused: bool) -> None:
        """Pause or resume. Once the future is done, no tick runs until resumed."""
        self._paused = paused

    @between_ticks
    def reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    # --- versions ---

    def _swap(self, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return
        boundary, redrawn = time.perf_counter(), 0
        _old = self.policy  # frees its weights on return, when nothing waits for that any longer
        rate = self._draw_rate.tokens_per_second if self._has_draws else 0.0
        try:
            if swap.in_flight in ("recompute", "requeue"):
                redrawn = self._scheduler.preempt_all(swap.in_flight == "requeue", swap.staged.names)
            self._apply(swap.staged)
        except Exception:  # out of device memory, for example: the old policy keeps serving
            return swap.done.set_exception(self._failure("while swapping weights"))
        waited = 0.0 if swap.in_flight == "finish" else boundary - swap.requested_at
        self._steps_per_tick.record_commit(boundary - self._swapped_at, waited, self._idle_seconds)
        self._swapped_at, self._idle_seconds = boundary, 0.0
        stopped_at, self._held_at = self._held_at or boundary, None
        pause = time.perf_counter() - stopped_at
        swap.done.set_result(CommitReport(pause, boundary - swap.requested_at, 0.0, rate, redrawn))

    @property
    def _has_draws(self) -> bool:
        """Whether a commit keeps samples from drawing tokens."""
        samples = itertools.chain(self._scheduler.running, self._scheduler.prefilling, self._scheduler.waiting)
        return not (self._asleep or self._paused) and any(not sample.request.is_scoring for sample in samples)

    def _swap_when_finished(self, swap: _Swap) -> None:
        is_held = self._held_at is not None
        if (self._paused or self._asleep or is_held) and self._scheduler.has_in_flight:
            error = never_finish(self._name, self._paused or is_held)
            return _fail(swap.done, error)
        self._pending_swaps.append(swap)

    def _add(self, samples: Sequence[Sample]) -> None:
        self._scheduler.add(samples)
        if self.drop_reason is not None:
            self._fail_all(self.drop_reason)
        if (adapters := self._executor.adapters) is not None:  # one may have been unloaded meanwhile
            for name in {sample.request.adapter for sample in samples} - {"", *adapters.names}:
                self._fail_adapter(name)

    def _apply(self, staged: StagedUpdate) -> None:
        for adapter in staged.adapters:
            assert self._executor.adapters is not None, "an engine without adapters accepts none"
            self._executor.adapters.load(adapter)
        if staged.policy is not None:
            return self._set_policy(staged.policy)
        assert self.policy is not None, "an engine without a base model accepts no adapters"
        self.policy = self.policy._replace(version=staged.version)
        self._scheduler.set_version(staged.version, staged.names)

    @between_ticks
    def unload_adapter(self, name: str) -> None:
        if self._executor.adapters is not None:
            self._executor.adapters.unload(name)
            self._scheduler.clear_adapter(name)
            self._fail_adapter(name)

    def _fail_adapter(self, name: str) -> None:
        error = unloaded_adapter(self._name, name)
        failed = self._scheduler.drop(lambda request: request.adapter == name)
        self._outbox += [FailedRequest(request, error) for request in failed]

    def _set_policy(self, policy: Policy) -> None:
        self.policy = self._executor.to_devices(policy)
        self.drop_reason = None
        self._asleep.discard("weights")
        self._scheduler.set_version(policy.version)

    @between_ticks
    def hold(self) -> None:
        """Once the future is done, no tick runs until the next swap, even if the engine is resumed or woken."""
        self._held_at = time.perf_counter()

    @between_ticks
    def copy_policy(self) -> None:
        """Copy the serving weights to memory that the engine owns."""
        if self.policy is not None:
            self.policy = self._executor.copy_weights(self.policy)

    @between_ticks
    def drop_policy(self, reason: SlipstreamError) -> None:
        """Drop the serving policy because its weights are no longer valid, and fail all requests with `reason`."""
        self.policy, self._held_at, self.drop_reason = None, None, reason
        self._scheduler.clear_cache()
        self._fail_all(reason)

    @between_ticks
    def cancel_swap(self, version: int) -> None:
        """Cancel a swap that still waits for running samples."""
        canceled = [swap for swap in self._pending_swaps if swap.staged.version == version]
        self._pending_swaps = [swap for swap in self._pending_swaps if swap not in canceled]
        for swap in canceled:
            _fail(swap.done, UnknownVersion(f"version {version} was rolled back while its commit was waiting"))

    # --- memory ---

    @between_ticks
    def sleep(self, level: int) -> MemoryReport:
        """Free device memory. Running samples are preempted: they keep their tokens and recompute their KV cache."""
        self._scheduler.preempt_all()
        self._scheduler.clear_cache()
        self._executor.drop_cache()
        self._asleep.add("kv_cache")
        if self.policy is not None:
            self.policy = self._executor.offload(self.policy, keep=level == 1)
            self._asleep.add("weights")
        return self.memory()

    @between_ticks
    def wake(self, tags: Sequence[MemoryTag] | None) -> MemoryReport:
        policy = self.policy
        if tags is None:
            tags = [
                t for t in sorted(self._asleep) if t != "weights" or (policy is not None and policy.params is not None)
            ]
        if "weights" in tags and "weights" in self._asleep and policy is not None:
            if policy.params is None:
                raise weights_dropped(self._name)
            self.policy = self._executor.to_devices(policy)
            self._asleep.discard("weights")
        if "kv_cache" in tags and "kv_cache" in self._asleep:
            self._executor.make_cache()
            self._asleep.discard("kv_cache")
        return self.memory()

    # --- failures and delivery ---

    def _fail_live(self) -> None:
        """Fail the requests of the failed tick; waiting ones continue. The KV cache was donated to the tick and may be lost,
        so the prefix cache is cleared, too."""
        error = self._failure("inside a step")
        failed = {sample.request for sample in self._scheduler.live} or {s.request for s in self._scheduler.waiting}
        self._outbox += [FailedRequest(request, error) for request in self._scheduler.drop(failed.__contains__)]
        self._scheduler.clear_cache()
        self._executor.drop_cache()

    def _shut_down(self, error: EngineLost) -> None:
        self._executor.close()
        self._fail_all(error)
        self._deliver()
        for swap in self._pending_swaps:
            _fail(swap.done, error)

    def _fail_all(self, error: SlipstreamError) -> None:
        self._outbox += [FailedRequest(request, error) for request in self._scheduler.drop(lambda _: True)]

    def _deliver(self) -> None:
        """Deliver the outbox, with one call per sink."""
        results, self._outbox = self._outbox, []
        by_sink: dict[ResultSink, list[Sample | FailedRequest]] = {}
        for result in results:
            by_sink.setdefault(result.request.sink, []).append(result)
        for sink, own in by_sink.items():
            sink.deliver(own)

    def _failure(self, where: str) -> EngineFailure:
        return EngineFailure(f"engine {self._name!r} failed {where}:\n{traceback.format_exc().strip()}")


def _fail(done: Future[T], error: SlipstreamError) -> None:
    if done.set_running_or_notify_cancel():  # setting a canceled future would raise and end the thread
        done.set_exception(error)
