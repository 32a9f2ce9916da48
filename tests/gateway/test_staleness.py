"""Stateful test of the staleness limit: no sequence of events yields a sample that is too old, or a deadlock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.errors import ConfigError, StaleRollouts
from slipstream.gateway.staleness import RolloutBound, StalenessTracker


class Run(RuleBasedStateMachine):
    """Engines finish groups in any order; the trainer takes any that are finished, but first those that are due, and syncs when
    it has a batch, or more if it has asked for more. While it syncs it may take from the next one already."""

    @initialize(
        bound=st.integers(0, 3), batch=st.integers(1, 4), surplus=st.none() | st.integers(0, 3), crashes=st.booleans()
    )
    def begin(self, bound: int, batch: int, surplus: int | None, crashes: bool) -> None:
        self.crashes = crashes
        self.bound = RolloutBound(bound, batch, surplus=surplus if bound else None)
        self.staleness = StalenessTracker(self.bound, version=7)
        self.running: dict[int, int] = {}
        """By group: the version under which it was really begun."""
        self.finished: dict[int, int] = {}
        self.next = self.taken = self.ahead = self.more = self.over = 0

    @property
    def wanted(self) -> int:
        """Groups that the trainer takes before it syncs."""
        return self.bound.batch + self.more

    @precondition(lambda self: self.staleness.room)
    @rule()
    def start(self) -> None:
        self.staleness.start(self.next)
        self.running[self.next] = self.staleness.version
        self.next += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        self.finished[group] = self.running.pop(group)

    def takeable(self, ahead: int = 0) -> list[int]:
        if self.ahead >= self.bound.batch if ahead else self.taken >= self.wanted:
            return []
        at = self.staleness.version + ahead
        fitting = [group for group in sorted(self.finished) if self.staleness.fits(group, at)]
        return [group for group in fitting if not self.staleness.lacking({group}, 1, at)]

    @precondition(lambda self: self.takeable())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.takeable()))
        oldest = self.finished.pop(group)
        assert self.staleness.version - oldest <= self.bound.max_staleness
        if not self.bound.max_staleness:
            assert oldest == self.staleness.version
        self.staleness.take(group, self.staleness.version)
        self.taken += 1

    @precondition(lambda self: self.taken == self.wanted and not self.ahead and self.more < 6)
    @rule(count=st.integers(1, 4))
    def ask_more(self, count: int) -> None:
        self.more += count
        for _ in range(2):  # the answer was lost, say
            self.staleness.ask_more(count, self.staleness.version)

    @precondition(lambda self: self.taken == self.wanted and self.takeable(ahead=1))
    @rule(data=st.data())
    def take_ahead(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.takeable(ahead=1)))
        assert self.staleness.version + 1 - self.finished.pop(group) <= self.bound.max_staleness
        self.staleness.take(group, self.staleness.version + 1)
        self.ahead += 1

    @precondition(lambda self: self.taken == self.wanted)
    @rule()
    def sync(self) -> None:
        self.renew(self.staleness.synced(self.staleness.version + 1))

    @precondition(lambda self: self.crashes)
    @rule()
    def sync_without_taking(self) -> None:
        """As a trainer does that was started again."""
        self.renew(self.staleness.synced(self.staleness.version + 1))

    def renew(self, too_old: list[int]) -> None:
        assert self.crashes or not too_old  # nothing is generated for the bin
        for group in too_old:
            assert group in self.running or group in self.finished
            self.running.pop(group, None)
            self.finished.pop(group, None)
            self.staleness.renew(group)
            self.running[group] = self.staleness.version
        self.taken, self.ahead, self.more = self.ahead, 0, 0
        # What a trainer had asked for beyond a batch and did not take, because it has crashed, is under way all the same.
        self.over = max(0, len(self.running) + len(self.finished) + self.taken - self.bound.limit)

    @invariant()
    def engines_are_never_too_far_ahead(self) -> None:
        limit = (self.bound.max_staleness + 1) * self.bound.batch
        if self.bound.surplus is not None:
            limit = min(limit, self.bound.batch + self.bound.surplus)
        assert len(self.running) + len(self.finished) + self.taken + self.ahead <= limit + self.more + self.over

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """A trainer that still wants groups finds some that are under way, or may be started."""
        if self.taken < self.wanted and not self.running and not self.finished:
            assert self.staleness.room

    @invariant()
    def whoever_waits_waits_for_something_that_runs(self) -> None:
        if self.taken < self.wanted and self.finished and not self.takeable():
            assert self.running
        if not self.running and self.taken + len(self.finished) >= self.wanted:
            assert not self.staleness.lacking(self.finished, self.wanted - self.taken, self.staleness.version)


Run.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
test_run = Run.TestCase


def test_on_policy_by_hand() -> None:
    """K = 0: a batch, and nothing more before the sync."""
    staleness = StalenessTracker(RolloutBound(0, 2), version=0)
    assert staleness.room == 2
    staleness.start(1)
    staleness.start(2)
    assert staleness.room == 0
    staleness.take(1, 0)
    staleness.take(2, 0)
    assert staleness.room == 0
    with pytest.raises(StaleRollouts, match=r"2 groups were taken since the last sync.*Sync, raise batch"):
        staleness.check_can_take()
    assert staleness.synced(1) == [] and staleness.room == 2


def test_more_than_a_batch_is_begun_for_who_asks_for_it() -> None:
    staleness = StalenessTracker(RolloutBound(0, 2), version=0)
    for group in (1, 2):
        staleness.start(group)
        staleness.take(group, 0)
    staleness.ask_more(3, 0)
    staleness.check_can_take()
    assert staleness.room == 3
    for group in (3, 4, 5):
        staleness.start(group)
        staleness.take(group, 0)
    assert staleness.room == 0
    assert staleness.synced(1) == [] and staleness.room == 2, "the next version has a batch again"
    staleness.ask_more(1, 1)
    assert staleness.room == 2, "that is less than a batch"


def test_a_straggler_that_is_overtaken_is_waited_for_in_the_end() -> None:
    staleness = StalenessTracker(RolloutBound(1, 2), version=0)
    for group in (1, 2, 3, 4):
        staleness.start(group)
    assert not staleness.lacking({2, 3}, 2, 0)
    staleness.take(2, 0)
    staleness.take(3, 0)
    assert staleness.synced(1) == []  # groups 1 and 4 are one version old: that is allowed, and they are due
    assert staleness.lacking({}, 1, 1) == staleness.lacking({4}, 2, 1) == 1 and not staleness.lacking({1, 4}, 2, 1)
    staleness.take(4, 1)
    assert staleness.lacking({}, 1, 1) == 1
    assert staleness.synced(2) == [1]  # a trainer that syncs all the same
    staleness.renew(1)
    assert staleness.synced(3) == []


def test_what_is_taken_ahead_is_of_the_next_version() -> None:
    staleness = StalenessTracker(RolloutBound(1, 2), version=0)
    for group in (1, 2, 3, 4):
        staleness.start(group)
    staleness.take(1, 0)
    staleness.take(2, 0)
    assert staleness.lacking({3}, 2, 1) == 1 and not staleness.lacking({3, 4}, 2, 1)
    staleness.take(3, 1)
    assert staleness.room == 0, "it makes no room before the sync"
    assert staleness.synced(1) == [] and staleness.room == 2, "and half of the batch that is taken now has been"
    staleness.take(4, 1)
    assert staleness.room == 2 and staleness.synced(2) == [] and staleness.room == 4


def test_the_old_are_not_passed_over_until_there_are_too_many_of_them() -> None:
    """Of three that are equally old one can still wait for two syncs, another for one; then nobody else may be taken."""
    staleness = StalenessTracker(RolloutBound(3, 1), version=0)
    for group in (1, 2, 3):
        staleness.start(group)
    assert staleness.synced(1) == []  # as if another had been taken
    staleness.start(4)
    assert staleness.turn(3) < staleness.turn(4)
    assert staleness.lacking({4}, 1, 1) == 1 and not staleness.lacking({3}, 1, 1)


def test_a_batch_is_the_first_of_a_few_more_to_finish() -> None:
    staleness = StalenessTracker(RolloutBound(2, 4, surplus=1), version=0)
    assert staleness.room == 5
    for group in range(5):
        staleness.start(group)
    for group in (0, 2, 3, 4):
        staleness.take(group, 0)
    assert staleness.room == 0  # group 1 goes on alone
    assert staleness.synced(1) == [] and staleness.room == 4


def test_what_is_late_may_be_delivered_with_its_age() -> None:
    staleness = StalenessTracker(RolloutBound(0, 1, "deliver"), version=0)
    staleness.start(1)
    assert staleness.synced(4) == [] and staleness.fits(1, 4)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: RolloutBound(-1, 1), "max_staleness must be 0 or more"),
        (lambda: RolloutBound(0, 0), "batch 1 or more"),
        (lambda: RolloutBound(1, 1, surplus=-1), "surplus must be 0 or more"),
        (lambda: RolloutBound(0, 1, surplus=1), "needs max_staleness of at least 1"),
        (lambda: RolloutBound(0, 1, "ignore"), "late must be 'renew' or 'deliver'"),  # type: ignore[arg-type]
    ],
)
def test_bounds_that_make_no_sense(make, what) -> None:
    with pytest.raises(ConfigError, match=what):
        make()
