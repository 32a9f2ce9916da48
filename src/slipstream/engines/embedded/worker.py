"""The thread on which the engine computes: it alone touches the device, the scheduler and the policy that serves."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.engines.checks import never_finish, weights_dropped
from slipstream.engines.embedded.executor import Executor, Outcome, Policy
from slipstream.engines.embedded.pace import Pace
from slipstream.engines.embedded.scheduler import Scheduler, Tick
from slipstream.engines.sequence import Failed, Job, Sample, Ticket
from slipstream.errors import EngineFailure, EngineLost, SlipstreamError, UnknownVersion
from slipstream.types import CommitReport, InFlight, MemoryReport, MemoryTag

COUNTED = ("ticks", "decode_steps", "decode_rows", "generated_tokens", "guessed_tokens", "accepted_tokens")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Swap:
    policy: Policy
    in_flight: InFlight
    called: float
    done: Future[CommitReport]


class Worker:
    """Samples that share a step share its weights: a swap happens between two ticks, never inside one."""

    def __init__(self, executor: Executor, scheduler: Scheduler, policy: Policy | None, name: str) -> None:
        self._name, self._executor, self._scheduler = name, executor, scheduler
        self._policy: Policy | None = None
        self._pace = Pace(executor.shapes.rows)
        self._swapped, self._idle = time.perf_counter(), 0.0
        """When the policy came that serves, and for how many seconds since then there was nothing to do."""
        self._waiting_swaps: list[_Swap] = []
        """Until the samples under way are finished; meanwhile no other starts."""
        self._asleep: set[MemoryTag] = set()
        self._paused = False
        self._held_at: float | None = None
        """Since when the weights that serve may be written to, so that nothing may read them."""
        self.dropped: SlipstreamError | None = None
        """Why there is no policy any more, though there was one."""
        self._commands: list[Callable[[], object]] = []
        self._closing = False
        self._outbox: list[Sample | Failed] = []
        """Finished, and delivered while the device works on the next tick."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        if policy is not None:
            self._set_policy(policy)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"slipstream-{name}", daemon=True)
        self._thread.start()

    # --- from any thread ---

    @property
    def version(self) -> int:
        policy = self._policy
        return -1 if policy is None else policy.version

    @property
    def policy(self) -> Policy | None:
        return self._policy

    def add(self, tickets: Sequence[Ticket]) -> None:
        samples = [sample for ticket in tickets for sample in ticket.samples()]
        self._submit(lambda: self._add(samples))

    def cancel(self, job: Job) -> None:
        """Frees the pages of a job whose caller has gone."""
        self._submit(lambda: self._scheduler.drop(lambda ticket: ticket.job is job))

    def swap(self, policy: Policy, in_flight: InFlight) -> Future[CommitReport]:
        swap = _Swap(policy, in_flight, time.perf_counter(), Future())
        self._submit(lambda: self._finish_first(swap) if in_flight == "finish" else self._swap(swap))
        return swap.done

    def forget_swap(self, version: int) -> Future[None]:
        """Calls off a swap that still waits for running samples."""
        return self._call(lambda: self._forget_swap(version))

    def pause(self, paused: bool) -> Future[None]:
        """Done between two ticks: afterwards none runs."""
        return self._call(lambda: setattr(self, "_paused", paused))

    def hold(self) -> Future[None]:
        """Done between two ticks: afterwards none runs until the next swap, whoever resumes or wakes the engine."""
        return self._call(lambda: setattr(self, "_held_at", time.perf_counter()))

    def copy_policy(self) -> Future[None]:
        """What serves lies in memory of the engine's own from then on."""
        return self._call(self._copy_policy)

    def drop_policy(self, why: SlipstreamError) -> Future[None]:
        """What serves cannot be trusted any more: the engine has no policy, and all that it was asked for fails."""
        return self._call(lambda: self._drop_policy(why))

    def forget_prefixes(self) -> Future[None]:
        return self._call(self._scheduler.forget_prefixes)

    def sleep(self, level: int) -> Future[MemoryReport]:
        return self._call(lambda: self._sleep(level))

    def wake(self, tags: Sequence[MemoryTag] | None) -> Future[MemoryReport]:
        return self._call(lambda: self._wake_up(tags))

    def memory(self) -> MemoryReport:
        """Waits for no tick."""
        return self._executor.memory(self._policy, tuple(sorted(self._asleep)))

    def stats(self) -> dict[str, Any]:
        """Counters since the start. Waits for no tick, so they may be of different moments of one."""
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
            "num_programs": executor.num_programs,
            "compile_seconds": executor.compile_seconds,
        }

    def close(self) -> None:
        """Fails what is unfinished with `EngineLost` and joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` between two ticks."""
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._submit(command)
        return done

    def _submit(self, command: Callable[[], object]) -> None:
        with self._changed:
            if self._closing:
                raise EngineLost(f"engine {self._name!r} is closed")
            self._commands.append(command)
            self._changed.notify()

    # --- on the compute thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                waits = time.perf_counter()
                self._changed.wait_for(lambda: self._commands or self._closing or self._outbox or self._can_work)
                self._idle += time.perf_counter() - waits
                commands, self._commands = self._commands, []
                closing = self._closing
            for command in commands:
                command()
            if closing:
                return self._abandon(EngineLost(f"engine {self._name!r} was closed before this was finished"))
            if self._can_work:
                self._tick()
            self._deliver()

    @property
    def _can_work(self) -> bool:
        awake = not (self._asleep or self._paused or self._held_at is not None) and self._policy is not None
        if self._waiting_swaps:
            return awake or not self._scheduler.is_under_way
        return awake and bool(self._scheduler.live or self._scheduler.waiting)

    def _tick(self) -> None:
        """Plan, dispatch, tell those that finished before, wait for the device, record."""
        scheduler = self._scheduler
        if self._waiting_swaps and not scheduler.is_under_way:
            while self._waiting_swaps:
                self._swap(self._waiting_swaps.pop(0))
            return
        try:
            policy, started = self._serving, time.perf_counter()
            pace, num_running = self._pace, len(scheduler.running)
            steps = pace.steps(num_running, self._executor.max_steps)
            tick = scheduler.plan(steps, admit=not self._waiting_swaps, overhead=pace.overhead(num_running))
            tick.steps = min(tick.steps, pace.steps(len(tick.decode), steps))  # with those that were let in
            tick.floor = pace.floor(len(tick.decode), tick.steps)
            if tick.is_empty:
                raise RuntimeError("requests wait, nothing runs, and nothing could be admitted")
            flight = self._executor.dispatch(policy, tick)
            dispatched = time.perf_counter()
            self._deliver()
            outcome = flight.wait(policy.version)
            landed = time.perf_counter()
            self._outbox += scheduler.finish_prefill(tick)
            self._outbox += [sample for sample in tick.decode if scheduler.record(sample)]
        except Exception:
            return self._fail_live()
        self._count(tick, outcome, dispatched - started + time.perf_counter() - landed)

    def _count(self, tick: Tick, outcome: Outcome, host_seconds: float) -> None:
        if outcome.num_steps:
            self._pace.stepped(len(tick.decode), outcome.num_steps, outcome.decode_seconds, host_seconds)
        self._seconds["prefill"] += outcome.prefill_seconds
        self._seconds["decode"] += outcome.decode_seconds
        self._seconds["host"] += host_seconds
        self._counts["ticks"] += 1
        self._counts["decode_steps"] += outcome.num_steps
        self._counts["decode_rows"] += len(tick.decode) * outcome.num_steps
        self._counts["generated_tokens"] += outcome.num_drawn
        self._counts["guessed_tokens"] += outcome.num_guessed
        self._counts["accepted_tokens"] += outcome.num_accepted

    # --- versions ---

    def _swap(self, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return
        boundary = time.perf_counter()
        try:
            if swap.in_flight in ("recompute", "requeue"):
                self._scheduler.put_back(restart=swap.in_flight == "requeue")
            self._set_policy(swap.policy)
        except Exception:  # no room on the device, say: the old policy goes on
            return swap.done.set_exception(self._failure("while swapping weights"))
        waited = 0.0 if swap.in_flight == "finish" else boundary - swap.called
        self._pace.committed(boundary - self._swapped, waited, self._idle)
        self._swapped, self._idle = boundary, 0.0
        stopped, self._held_at = self._held_at or boundary, None
        swap.done.set_result(CommitReport(time.perf_counter() - stopped, boundary - swap.called))

    def _finish_first(self, swap: _Swap) -> None:
        is_held = self._held_at is not None
        if (self._paused or self._asleep or is_held) and self._scheduler.is_under_way:
            error = never_finish(self._name, self._paused or is_held)
            return _fail(swap.done, error)
        self._waiting_swaps.append(swap)

    def _add(self, samples: Sequence[Sample]) -> None:
        self._scheduler.add(samples)
        if self.dropped is not None:
            self._fail_all(self.dropped)

    def _set_policy(self, policy: Policy) -> None:
        self._policy = self._executor.placed(policy)  # the old weights are freed here, unless someone else holds them
        self.dropped = None
        self._asleep.discard("weights")
        self._scheduler.new_version(policy.version)

    def _copy_policy(self) -> None:
        if self._policy is not None:
            self._policy = self._executor.copied(self._policy)

    def _drop_policy(self, why: SlipstreamError) -> None:
        self._policy, self._held_at, self.dropped = None, None, why
        self._scheduler.forget_cached()
        self._fail_all(why)

    def _forget_swap(self, version: int) -> None:
        forgotten = [swap for swap in self._waiting_swaps if swap.policy.version == version]
        self._waiting_swaps = [swap for swap in self._waiting_swaps if swap not in forgotten]
        for swap in forgotten:
            _fail(swap.done, UnknownVersion(f"version {version} was rolled back while its commit waited"))

    # --- memory ---

    def _sleep(self, level: int) -> MemoryReport:
        """What runs is put back: it keeps its tokens, and its cache is computed again after waking."""
        self._scheduler.put_back()
        self._scheduler.forget_cached()
        self._executor.drop_cache()
        self._asleep.add("kv_cache")
        if self._policy is not None:
            self._policy = self._executor.without_weights(self._policy, keep=level == 1)
            self._asleep.add("weights")
        return self.memory()

    def _wake_up(self, tags: Sequence[MemoryTag] | None) -> MemoryReport:
        policy = self._policy
        if tags is None:
            tags = [
                t for t in sorted(self._asleep) if t != "weights" or (policy is not None and policy.params is not None)
            ]
        if "weights" in tags and "weights" in self._asleep and policy is not None:
            if policy.params is None:
                raise weights_dropped(self._name)
            self._policy = self._executor.placed(policy)
            self._asleep.discard("weights")
        if "kv_cache" in tags and "kv_cache" in self._asleep:
            self._executor.make_cache()
            self._asleep.discard("kv_cache")
        return self.memory()

    # --- ends ---

    def _fail_live(self) -> None:
        """Ends the requests that were in the failed tick; those that still wait go on. The cache went into the tick and may
        be gone, and so is all that the prefix tree knew."""
        error = self._failure("inside a step")
        failed = {sample.ticket for sample in self._scheduler.live} or {s.ticket for s in self._scheduler.waiting}
        self._outbox += [Failed(ticket, error) for ticket in self._scheduler.drop(failed.__contains__)]
        self._scheduler.forget_cached()
        self._executor.drop_cache()

    def _abandon(self, error: EngineLost) -> None:
        self._fail_all(error)
        self._deliver()
        for swap in self._waiting_swaps:
            _fail(swap.done, error)

    def _fail_all(self, error: SlipstreamError) -> None:
        self._outbox += [Failed(ticket, error) for ticket in self._scheduler.drop(lambda _: True)]

    def _deliver(self) -> None:
        """Each job hears once per tick."""
        outcomes, self._outbox = self._outbox, []
        by_job: dict[Job, list[Sample | Failed]] = {}
        for outcome in outcomes:
            by_job.setdefault(outcome.ticket.job, []).append(outcome)
        for job, items in by_job.items():
            job.deliver(items)

    def _failure(self, where: str) -> EngineFailure:
        return EngineFailure(f"engine {self._name!r} failed {where}:\n{traceback.format_exc().strip()}")

    @property
    def _serving(self) -> Policy:
        assert self._policy is not None and self._policy.params is not None, "nothing runs without weights"
        return self._policy


def _fail(done: Future[T], error: SlipstreamError) -> None:
    if done.set_running_or_notify_cancel():  # setting a cancelled future would raise, and end the thread
        done.set_exception(error)
