"""The compute thread: runs commands at step boundaries, admits, decodes, retires. It alone touches the scheduler, the
cache and the live weights, so none of them has a lock; other threads hand it commands."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream.engines.embedded.programs import Cache, Programs
from slipstream.engines.embedded.sampling import Settings
from slipstream.engines.embedded.scheduler import Failed, Job, Sample, Scheduler, Ticket, plan_prefill
from slipstream.errors import EngineFailure, EngineLost, NotReady, SlipstreamError, UnknownVersion
from slipstream.model.decoder import Params
from slipstream.types import CommitReport, InFlight

MAX_PREFILL_TOKENS = 8192


class Policy(NamedTuple):
    params: Params
    version: int


@dataclass(slots=True, eq=False)
class _Swap:
    policy: Policy
    called: float
    done: Future[CommitReport]


@dataclass(slots=True, eq=False)
class _Scoring:
    sequences: Sequence[Sequence[int]]
    done: Future[tuple[list[np.ndarray], int]]


class Worker:
    """Samples that share a step share its weights: a swap happens between two steps, never inside one."""

    def __init__(self, programs: Programs, num_slots: int, policy: Policy | None, name: str) -> None:
        self._name, self._programs, self._policy = name, programs, policy
        self._scheduler = Scheduler(num_slots)
        self._settings = Settings.for_slots(num_slots)
        self._tokens = np.zeros(num_slots, np.int32)
        """Newest token of each slot, not yet in the cache."""
        self._positions = np.zeros(num_slots, np.int32)
        """Where that token stands in its sequence."""
        self._cache: Cache | None = None
        self._scoring: deque[_Scoring] = deque()
        self._waiting_swaps: list[_Swap] = []
        """Until the running samples are finished; meanwhile none is admitted."""
        self._commands: list[Callable[[], object]] = []
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"slipstream-{name}", daemon=True)
        self._thread.start()

    # --- from any thread ---

    @property
    def version(self) -> int:
        policy = self._policy
        return -1 if policy is None else policy.version

    @property
    def params(self) -> Params | None:
        policy = self._policy
        return None if policy is None else policy.params

    def add(self, tickets: Sequence[Ticket]) -> None:
        samples = [sample for ticket in tickets for sample in ticket.samples()]
        self._submit(lambda: self._scheduler.add(samples))

    def cancel(self, job: Job) -> None:
        """Frees the slots of a job whose caller has gone."""
        self._submit(lambda: self._drop(lambda ticket: ticket.job is job))

    def score(self, sequences: Sequence[Sequence[int]]) -> Future[tuple[list[np.ndarray], int]]:
        """Raw logprobs and the version they were computed with; sequences of one call run together."""
        work = _Scoring(sequences, Future())
        self._submit(lambda: self._scoring.append(work))
        return work.done

    def swap(self, policy: Policy, in_flight: InFlight) -> Future[CommitReport]:
        swap = _Swap(policy, time.perf_counter(), Future())
        self._submit(lambda: self._swap(swap) if in_flight == "keep" else self._waiting_swaps.append(swap))
        return swap.done

    def forget_swap(self, version: int) -> Future[None]:
        """Calls off a swap that still waits for running samples."""
        done: Future[None] = Future()
        self._submit(lambda: self._forget_swap(version, done))
        return done

    def close(self) -> None:
        """Fails what is unfinished with `EngineLost` and joins the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _submit(self, command: Callable[[], object]) -> None:
        with self._wake:
            if self._closing:
                raise EngineLost(f"engine {self._name!r} is closed")
            self._commands.append(command)
            self._wake.notify()

    # --- on the compute thread ---

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._closing or self._has_work())
                commands, self._commands = self._commands, []
                closing = self._closing
            for command in commands:
                command()
            if closing:
                return self._abandon(EngineLost(f"engine {self._name!r} was closed before this was finished"))
            self._step()

    def _has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._scoring or self._waiting_swaps)

    def _step(self) -> None:
        try:
            if not self._waiting_swaps:
                self._admit()
            if self._scheduler.running:
                self._decode()
        except Exception:
            self._fail_running()
        if self._scoring:
            self._score(self._scoring.popleft())
        if not self._scheduler.running:
            while self._waiting_swaps:
                self._swap(self._waiting_swaps.pop(0))

    def _admit(self) -> None:
        admitted = self._scheduler.admit(MAX_PREFILL_TOKENS)
        if not admitted:
            return
        for sample in admitted:
            slot, ticket = sample.slot, sample.ticket
            self._settings.put(slot, ticket.sampling, ticket.seed, sample.sample_index)
            self._tokens[slot], self._positions[slot] = ticket.prompt[-1], len(ticket.prompt) - 1
        work = plan_prefill(admitted)
        self._cache = self._programs.prefill(self._live.params, self._cache_for(self._longest), work)

    def _decode(self) -> None:
        slots = list(self._scheduler.running)
        count = self._programs.slot_bucket(max(slots) + 1)
        drawn, self._cache = self._programs.decode(
            self._live.params,
            self._cache_for(self._longest),
            self._tokens[:count].copy(),
            self._positions[:count].copy(),
            self._settings.first(count),
        )
        tokens, logprobs, raw_logprobs = jax.device_get(drawn)
        self._tokens[slots] = tokens[slots]
        self._positions[slots] += 1
        finished = self._scheduler.record(tokens.tolist(), logprobs.tolist(), raw_logprobs.tolist(), self._live.version)
        if finished:
            self._clear_free_slots()
            _deliver(finished)

    def _score(self, work: _Scoring) -> None:
        if not work.done.set_running_or_notify_cancel():
            return
        try:
            work.done.set_result((self._programs.score(self._live.params, work.sequences), self._live.version))
        except SlipstreamError as error:
            work.done.set_exception(error)
        except Exception:
            work.done.set_exception(self._failure())

    def _swap(self, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return
        boundary = time.perf_counter()
        self._policy = swap.policy  # the old weights are freed here, unless someone else holds them
        swap.done.set_result(CommitReport(time.perf_counter() - boundary, boundary - swap.called))

    def _forget_swap(self, version: int, done: Future[None]) -> None:
        forgotten = [swap for swap in self._waiting_swaps if swap.policy.version == version]
        self._waiting_swaps = [swap for swap in self._waiting_swaps if swap not in forgotten]
        for swap in forgotten:
            _fail(swap.done, UnknownVersion(f"version {version} was rolled back while its commit waited"))
        if done.set_running_or_notify_cancel():
            done.set_result(None)

    def _fail_running(self) -> None:
        """Ends the requests that were in the failed step; those that still wait go on. The cache went into the step and
        may be gone."""
        error, self._cache = self._failure(), None
        failed = {sample.ticket for sample in self._scheduler.running.values()}
        _deliver([Failed(ticket, error) for ticket in self._drop(failed.__contains__)])

    def _abandon(self, error: EngineLost) -> None:
        _deliver([Failed(ticket, error) for ticket in self._drop(lambda _: True)])
        for work in self._scoring:
            _fail(work.done, error)
        for swap in self._waiting_swaps:
            _fail(swap.done, error)

    def _drop(self, unwanted: Callable[[Ticket], bool]) -> list[Ticket]:
        dropped = self._scheduler.drop(unwanted)
        self._clear_free_slots()
        return dropped

    def _clear_free_slots(self) -> None:
        """A free slot is stepped over like any other; cleared, it asks for no noise and no sort."""
        free = self._scheduler.free
        self._settings.clear(free)
        self._tokens[free] = self._positions[free] = 0

    def _cache_for(self, length: int) -> Cache:
        """Memory follows the sequences there are, not the longest that is allowed. `length` is that of the longest."""
        if self._cache is None:
            return self._programs.new_cache(length)
        return self._programs.fitted(self._cache, length)

    @property
    def _longest(self) -> int:
        return max(sample.length for sample in self._scheduler.running.values())

    @property
    def _live(self) -> Policy:
        if self._policy is None:
            raise NotReady(f"engine {self._name!r} has no weights yet")
        return self._policy

    def _failure(self) -> EngineFailure:
        return EngineFailure(f"engine {self._name!r} failed inside a step:\n{traceback.format_exc().strip()}")


def _fail(done: Future[Any], error: SlipstreamError) -> None:
    if done.set_running_or_notify_cancel():  # setting a cancelled future would raise, and end the thread
        done.set_exception(error)


def _deliver(outcomes: Iterable[Sample | Failed]) -> None:
    """Each job hears once per step."""
    by_job: dict[Job, list[Sample | Failed]] = {}
    for outcome in outcomes:
        by_job.setdefault(outcome.ticket.job, []).append(outcome)
    for job, items in by_job.items():
        job.deliver(items)
