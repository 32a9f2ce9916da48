"""The samples that wait to run: by priority, and fair between the callers that they belong to."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items must be hashable and compare by identity.

    queue.push(sample, priority=0, owner=job)
    for sample in queue.candidates(running={job: 3}):
        if not fits(sample):
            break                  # nothing is admitted before its turn
        if must_wait(sample):
            continue               # others may go first
        queue.remove(sample)
        start(sample)
    """

    def __init__(self) -> None:
        self._places: dict[T, tuple[int, Hashable]] = {}  # item -> (priority, owner)
        # priority -> owner -> item -> its turn: a lower number has waited longer.
        self._lanes: dict[int, dict[Hashable, OrderedDict[T, int]]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """All items, in no particular order. The queue may change meanwhile."""
        return iter(list(self._places))

    def push(self, item: T, priority: int, owner: Hashable, front: bool = False) -> None:
        """Lower numbers are more urgent. `front`: before all other items of its owner, and as if it had waited longer
        than anyone; for an item that ran already and had to make room.
        """
        if item in self._places:
            raise ValueError(f"{item!r} waits already")
        self._pushed += 1
        self._places[item] = priority, owner
        waiting = self._lanes.setdefault(priority, {}).setdefault(owner, OrderedDict())
        waiting[item] = -self._pushed if front else self._pushed
        if front:
            waiting.move_to_end(item, last=False)

    def candidates(self, running: Mapping[Any, int]) -> Iterator[T]:
        """The items in the order in which they should start: the lowest priority number first; within a priority, from
        the owner with the fewest `running` items, counting those removed in this pass; then what waited longest.

        For each item the caller calls `remove` (it starts) or goes on (it must wait, and its owner's next one gets its
        chance), and may stop at any time. What is pushed meanwhile may be left for the next pass.
        """
        counts = Counter(running)  # a copy: the caller may count what it starts in `running` itself
        for priority in sorted(self._lanes):
            # One entry for each owner, not for each item. Turns differ, so owners, which may have no order, are never
            # compared.
            turns = [
                (counts[owner], next(iter(waiting.values())), owner)
                for owner, waiting in self._lanes.get(priority, {}).items()
            ]
            heapify(turns)
            stacks: dict[Hashable, list[tuple[T, int]]] = {}  # what is left of each owner's items, the first one last
            while turns:
                _, _, owner = heappop(turns)
                if owner not in stacks:
                    stacks[owner] = [*reversed(self._lanes.get(priority, {}).get(owner, OrderedDict()).items())]
                stack = stacks[owner]
                if stack:
                    item, _ = stack.pop()
                    if item in self._places:
                        yield item
                        counts[owner] += item not in self._places
                if stack:
                    heappush(turns, (counts[owner], stack[-1][1], owner))

    def remove(self, item: T) -> None:
        if item not in self._places:
            raise ValueError(f"{item!r} does not wait here")
        priority, owner = self._places.pop(item)
        owners = self._lanes[priority]
        del owners[owner][item]
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._lanes[priority]

    def discard_if(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove all items of which `unwanted` is true; returns them."""
        discarded = [item for item in self._places if unwanted(item)]
        for item in discarded:
            self.remove(item)
        return discarded
