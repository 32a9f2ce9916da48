"""The queue of waiting samples: ordered by priority, then fair between callers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items are hashable and compared by identity.

    queue.push(sample, priority=0, owner=sink)
    for sample in queue.candidates(running={sink: 3}):
        if not fits(sample):
            break                  # strict order: nothing overtakes an item that does not fit
        if must_wait(sample):
            continue               # others may overtake it
        queue.remove(sample)
        start(sample)
    """

    def __init__(self) -> None:
        self._places: dict[T, tuple[int, Hashable]] = {}  # item -> (priority, owner)
        # priority -> owner -> item -> turn. A lower turn has waited longer.
        self._lanes: dict[int, dict[Hashable, OrderedDict[T, int]]] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """Iterate over a snapshot of the items, in no particular order."""
        return iter(list(self._places))

    def push(self, item: T, priority: int, owner: Hashable, front: bool = False) -> None:
        """Add an item. Lower `priority` numbers are more urgent. `front` puts it before all other items of its owner, as if
        it had waited longest of all: for preempted items."""
        if item in self._places:
            raise ValueError(f"{item!r} is already in the queue")
        self._pushed += 1
        self._places[item] = priority, owner
        waiting = self._lanes.setdefault(priority, {}).setdefault(owner, OrderedDict())
        waiting[item] = -self._pushed if front else self._pushed
        if front:
            waiting.move_to_end(item, last=False)

    def candidates(self, running: Mapping[Any, int]) -> Iterator[T]:
        """Yield items in the order in which they should start: by priority, then from the owner with the fewest `running`
        items (including those removed in this pass), then by waiting time.

        The caller calls `remove` for an item that starts, or continues with the next item, and may stop at any time. Items
        pushed during the pass may be left for the next one."""
        counts = Counter(running)  # a copy, since the caller may update `running`
        for priority in sorted(self._lanes):
            # One entry per owner. Turns are unique, so owners, which may have no order, are never compared.
            turns = [
                (counts[owner], next(iter(waiting.values())), owner)
                for owner, waiting in self._lanes.get(priority, {}).items()
            ]
            heapify(turns)
            stacks: dict[Hashable, list[tuple[T, int]]] = {}  # each owner's remaining items, next one last
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
            raise ValueError(f"{item!r} is not in the queue")
        priority, owner = self._places.pop(item)
        owners = self._lanes[priority]
        del owners[owner][item]
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._lanes[priority]

    def discard_if(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return all items for which `unwanted` is true."""
        discarded = [item for item in self._places if unwanted(item)]
        for item in discarded:
            self.remove(item)
        return discarded
