"""How old a rollout may be. Pure: counts and versions in, decisions out.

A trainer takes `batch` groups of completions (a prompt's samples are a group), trains on them, and syncs: that makes the next
version. The age of a group is the number of versions between the oldest that made one of its tokens and the one that is being
trained when it is taken. No group is taken at an age above `bound`:

    start   only while   groups that were started and not taken  <  (bound + 1) · batch − taken since the last sync
            so that, taken in the order of starting, none would be too old by its turn; with a `surplus`, only while they
            are fewer than batch + surplus − taken. A trainer that asks for more than a batch before it syncs makes room for
            what it asks for, and no more
    take    the oldest that are finished; but some are waited for: those that would be too old one day, because the batches up
            to then have no room for all that are as old. Then nothing becomes too old
    sync    a group that is too old all the same (a trainer that has crashed syncs without taking) is made anew

A trainer need not wait for its sync to take the next batch. What it takes ahead is counted, and its age, as of the version that
the sync will make. With a bound of 0 nothing is started that the next version would see: strictly on-policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.errors import ConfigError, StaleRollouts

Late: TypeAlias = Literal["renew", "deliver"]
"""`renew`: no group is too old. The trainer waits for one that would be, and what is too old all the same is made anew.
`deliver`: nobody waits, and a group that is too old is delivered with its age."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Example: with `Bound(max_staleness=2, batch=32)` engines are at most two versions ahead of a trainer that takes 32 groups
    for each version."""

    max_staleness: int
    batch: int
    """Groups that the trainer takes between two syncs."""
    late: Late = "renew"
    surplus: int | None = None
    """Groups beyond a batch that may run; None is as many as `max_staleness` allows. With `Bound(2, 32, surplus=8)` a batch is
    the first 32 of 40 to finish, and the eight slowest go on, with the tokens that they have, for the next."""

    @property
    def limit(self) -> int:
        """Groups that may be under way or taken, from one sync to the next."""
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
                f"with a surplus of {self.surplus} groups, those that are not taken are a version older by the next sync: "
                "max_staleness must be at least 1"
            )


@dataclass
class Staleness:
    """The groups between their start and their taking."""

    bound: Bound
    version: int
    """What the fleet serves."""
    taken: Counter[int] = field(default_factory=Counter)
    """Groups, by the version that is trained on them: the one that serves, or the next."""
    _more: Counter[int] = field(default_factory=Counter)
    """Groups beyond a batch that the trainer has asked for, by the same version."""
    _started: dict[int, int] = field(default_factory=dict)
    """By group: the version that served when it was started. None of its tokens is older."""

    def __post_init__(self) -> None:
        for at in self.taken:
            self.ask_more(0, at)  # what was taken beyond a batch had been asked for

    @property
    def room(self) -> int:
        """How many groups may be started now."""
        return max(0, self.bound.limit + self._more.total() - self.taken.total() - len(self._started))

    def ask_more(self, count: int, at: int) -> None:
        """The trainer wants so many besides those that it has taken for version `at`, even if that is more than a batch. To
        ask again changes nothing. Who asks and then syncs without taking (it has crashed) leaves more under way than the limit;
        what is too old then is made anew."""
        self._more[at] = max(self._more[at], self.taken[at] + count - self.bound.batch)

    def start(self, group: int, version: int | None = None) -> None:
        """`version` is that of its oldest token, for a group of which there are some."""
        self._started[group] = self.version if version is None else version

    def renew(self, group: int) -> None:
        """It begins anew, in its old place."""
        if group in self._started:
            self._started[group] = self.version

    def end(self, group: int) -> None:
        """It has failed, and will not be taken."""
        self._started.pop(group, None)

    def at(self, version: int) -> int:
        """The version that is trained on what is taken for `version`: that one, or, if it is outdated, the one that serves."""
        return max(version, self.version)

    def fits(self, group: int, at: int) -> bool:
        """Whether it may be taken for version `at`."""
        return self.bound.late == "deliver" or at - self._started.get(group, at) <= self.bound.max_staleness

    def take(self, group: int, at: int) -> None:
        self._started.pop(group, None)
        self.taken[at] += 1

    def lacking(self, finished: Collection[int], count: int, at: int) -> int:
        """How many groups must be finished beside these before `count` can be taken for version `at`: those that would be too
        old if they were passed over then, since the batches up to then have no room for them all."""
        if self.bound.late == "deliver":
            return 0
        syncs = {group: max(0, self.bound.max_staleness - (at - version)) for group, version in self._started.items()}
        all_, ready = Counter(syncs.values()), Counter(left for group, left in syncs.items() if group in finished)
        most = num_due = num_ready = 0
        for left in range(self.bound.max_staleness + 1):
            # Too old after so many syncs and one more, or sooner; and what can be taken until then besides.
            num_due, num_ready = num_due + all_[left], num_ready + ready[left]
            later = left * self.bound.batch + max(0, self.bound.batch - self.taken[at] - count)
            most = max(most, min(count, num_due - later) - num_ready)
        return most

    def turn(self, group: int) -> tuple[int, int]:
        """Whose turn it is when several are finished: the oldest first."""
        return self._started.get(group, self.version), group

    def check_can_take(self) -> None:
        """Raises `StaleRollouts` when waiting would never end: nothing is under way, and nothing may start before a sync."""
        if not self._started and not self.room:
            bound = self.bound
            raise StaleRollouts(
                f"{self.taken.total()} groups were taken since the last sync, and with max_staleness {bound.max_staleness} and "
                f"batch {bound.batch} no more may be generated before the next; sync, say a larger batch, or, if it is meant, "
                "take them with more=True"
            )

    def synced(self, version: int) -> list[int]:
        """The fleet serves a new version. Groups that are too old now, and must be made anew."""
        self.version = version
        self.taken = Counter({at: count for at, count in self.taken.items() if at >= version})
        self._more = Counter({at: count for at, count in self._more.items() if at >= version})
        return self.too_old()

    def too_old(self) -> list[int]:
        if self.bound.late == "deliver":
            return []
        return [group for group in self._started if not self.fits(group, self.version)]
