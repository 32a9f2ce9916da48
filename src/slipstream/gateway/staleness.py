"""The staleness bound: which rollout groups may start, and which may be taken. Pure: counts and versions in, decisions out.

A group is a prompt with its samples. A trainer takes `batch` groups, trains on them, and syncs, which makes the next version.
The age of a group is the number of versions between its oldest token and the version being trained when it is taken. No group
is taken at an age above `max_staleness`:

    start   while   groups started and not taken  <  (max_staleness + 1) · batch − groups taken since the last sync
            so that groups taken in the order they started are never too old. With a `surplus`, also while there are fewer than
            batch + surplus − taken. A trainer that asks for more than a batch before a sync gets room for exactly that.
    take    finished groups, oldest first. Wait for groups that would become too old otherwise, because the batches until then
            have no room for all groups of their age (`lacking`). So no group becomes too old.
    sync    renew groups that are too old all the same (a restarted trainer that syncs without taking)

A trainer need not wait for its sync to take the next batch. Groups taken ahead are counted, and their ages computed, for the
version that the sync will make. With `max_staleness` 0 no group starts that the next version would see: strictly on-policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.errors import ConfigError, StaleRollouts

Late: TypeAlias = Literal["renew", "deliver"]
"""`renew`: no group is too old; the trainer waits for groups that would become too old, and others are generated again.
`deliver`: the trainer does not wait; groups that are too old are delivered with their age."""


@dataclass(frozen=True, slots=True)
class RolloutBound:
    """How far engines may run ahead of the trainer.

    With `RolloutBound(max_staleness=2, batch=32)` they are at most two versions ahead of a trainer that takes 32 groups per
    version."""

    max_staleness: int
    batch: int
    """Groups the trainer takes between two syncs."""
    late: Late = "renew"
    surplus: int | None = None
    """Groups beyond a batch that may run; None: as many as `max_staleness` allows. With `RolloutBound(2, 32, surplus=8)` a
    batch is the first 32 of 40 groups to finish; the other eight keep their tokens and continue for the next batch."""

    @property
    def limit(self) -> int:
        """Groups that may be started or taken between two syncs."""
        most = (self.max_staleness + 1) * self.batch
        return most if self.surplus is None else min(most, self.batch + self.surplus)

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.batch < 1:
            raise ConfigError(
                f"max_staleness must be 0 or more and batch 1 or more; got {self.max_staleness} and {self.batch}"
            )
        if self.late not in ("renew", "deliver"):
            raise ConfigError(f"late must be 'renew' or 'deliver', got {self.late!r}")
        if self.surplus is not None and self.surplus < 0:
            raise ConfigError(f"surplus must be 0 or more groups, or None; got {self.surplus}")
        if self.surplus and not self.max_staleness:
            raise ConfigError(
                f"a surplus of {self.surplus} groups needs max_staleness of at least 1: groups that are not taken are a "
                "version older after the next sync"
            )


@dataclass
class StalenessTracker:
    """The groups that are started and not taken."""

    bound: RolloutBound
    version: int
    """Version the fleet serves."""
    taken: Counter[int] = field(default_factory=Counter)
    """Number of groups taken, by the version being trained on them: the present one or the next."""
    _more: Counter[int] = field(default_factory=Counter)
    """Groups beyond a batch that the trainer has asked for, by the same version."""
    _started: dict[int, int] = field(default_factory=dict)
    """By group: the version served when it started. None of its tokens is older."""

    def __post_init__(self) -> None:
        for at in self.taken:
            self.ask_more(0, at)  # groups taken beyond a batch had been asked for

    @property
    def room(self) -> int:
        """Number of groups that may start now."""
        return max(0, self.bound.limit + self._more.total() - self.taken.total() - len(self._started))

    def ask_more(self, count: int, at: int) -> None:
        """Make room for `count` groups beyond those taken for version `at`, even if that exceeds a batch. Idempotent.

        A trainer that crashes after asking and then syncs without taking leaves more groups running than the limit; those that
        become too old are renewed."""
        self._more[at] = max(self._more[at], self.taken[at] + count - self.bound.batch)

    def start(self, group: int, version: int | None = None) -> None:
        """Record that a group starts; `version` is that of its oldest token if it has tokens."""
        self._started[group] = self.version if version is None else version

    def renew(self, group: int) -> None:
        """Record that a group starts again, in its old place."""
        if group in self._started:
            self._started[group] = self.version

    def at(self, version: int) -> int:
        """Return the version to take groups for: `version`, or the one the fleet serves if that is newer."""
        return max(version, self.version)

    def fits(self, group: int, at: int) -> bool:
        """Whether a group is young enough to be taken for version `at`."""
        return self.bound.late == "deliver" or at - self._started.get(group, at) <= self.bound.max_staleness

    def take(self, group: int, at: int) -> None:
        self._started.pop(group, None)
        self.taken[at] += 1

    def lacking(self, finished: Collection[int], count: int, at: int) -> int:
        """Return how many more groups must finish before `count` can be taken for version `at`: groups that would become too
        old if they were passed over, because the batches until then have no room for all of them."""
        if self.bound.late == "deliver":
            return 0
        syncs_left = {
            group: max(0, self.bound.max_staleness - (at - version)) for group, version in self._started.items()
        }
        due, ready = Counter(syncs_left.values()), Counter(n for group, n in syncs_left.items() if group in finished)
        lacking = num_due = num_ready = 0
        for syncs in range(self.bound.max_staleness + 1):
            # Groups that are too old after `syncs` + 1 syncs or sooner, and the room for them in later takes.
            num_due, num_ready = num_due + due[syncs], num_ready + ready[syncs]
            later_room = syncs * self.bound.batch + max(0, self.bound.batch - self.taken[at] - count)
            lacking = max(lacking, min(count, num_due - later_room) - num_ready)
        return lacking

    def turn(self, group: int) -> tuple[int, int]:
        """Sort key for finished groups: the oldest first."""
        return self._started.get(group, self.version), group

    def check_can_take(self) -> None:
        """Raise `StaleRollouts` if waiting would never end: no group is started and none may start before a sync."""
        if not self._started and not self.room:
            bound = self.bound
            raise StaleRollouts(
                f"{self.taken.total()} groups were taken since the last sync; max_staleness={bound.max_staleness} and "
                f"batch={bound.batch} allow no more before the next sync. Sync, raise batch, or take with more=True"
            )

    def synced(self, version: int) -> list[int]:
        """Record that the fleet serves a new version; return the groups that are too old now and must be renewed."""
        self.version = version
        self.taken = Counter({at: count for at, count in self.taken.items() if at >= version})
        self._more = Counter({at: count for at, count in self._more.items() if at >= version})
        return self.too_old()

    def too_old(self) -> list[int]:
        if self.bound.late == "deliver":
            return []
        return [group for group in self._started if not self.fits(group, self.version)]
