"""The queue of waiting samples: by priority, fair between owners, first in first out within an owner."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.frontend.waiting_queue import FairQueue


@dataclass(eq=False)
class Item:
    name: str
    priority: int = 0
    owner: object = "a"
    front: bool = False


def filled(*items):
    queue = FairQueue()
    for item in items:
        queue.push(item, item.priority, item.owner, item.front)
    return queue


def admit(queue, running, count=10**9, wait=()):
    """The names of the first `count` items admitted by a caller that skips those in `wait`."""
    admitted = []
    for item in queue.candidates(running):
        if len(admitted) == count:
            break
        if item.name not in wait:
            queue.remove(item)
            admitted.append(item.name)
    return admitted


A = [Item(f"a{i}") for i in range(3)]
B = [Item(f"b{i}", owner="b") for i in range(3)]


@pytest.mark.parametrize(
    ("items", "running", "wait", "order"),
    [
        ([], {}, "", ""),
        (A, {}, "", "a0 a1 a2"),
        ([*A, *B], {}, "", "a0 b0 a1 b1 a2 b2"),
        ([*B, *A], {}, "", "b0 a0 b1 a1 b2 a2"),
        ([*A, *B], {"a": 2, "c": 9}, "", "b0 b1 a0 b2 a1 a2"),
        ([*A, *B], {}, "a0", "a1 b0 a2 b1 b2"),
        ([*A, *B], {}, "b0 b1 b2", "a0 a1 a2"),
        ([*A, Item("urgent", -1)], {"a": 5}, "", "urgent a0 a1 a2"),
        ([Item("late", 7), *A, *B], {}, "", "a0 b0 a1 b1 a2 b2 late"),
        # Items started at one priority count at the next.
        ([Item("late-a", 1), Item("late-b", 1, "b"), Item("now", 0)], {}, "", "now late-b late-a"),
        ([*A, Item("back", front=True)], {}, "", "back a0 a1 a2"),
        ([*A, Item("back1", front=True), Item("back2", front=True)], {}, "", "back2 back1 a0 a1 a2"),
        # A preempted item has waited longest, but does not enlarge its owner's share.
        ([*A, *B, Item("back", owner="b", front=True)], {}, "", "back a0 a1 b0 a2 b1 b2"),
        ([*A, *B, Item("back", owner="b", front=True)], {"b": 1}, "", "a0 back a1 a2 b0 b1 b2"),
    ],
)
def test_order(items, running, wait, order):
    queue = filled(*items)
    assert admit(queue, running, wait=wait.split()) == order.split()
    assert sorted(i.name for i in queue) == sorted(wait.split())
    assert len(queue) == len(wait.split()) and bool(queue) == bool(wait)


def test_owners_need_no_order_and_running_may_be_counted_by_the_caller():
    one, two = object(), object()
    queue = filled(*(Item(f"{name}{i}", owner=owner) for owner, name in ((one, "x"), (two, "y")) for i in range(4)))
    running = Counter()
    order = []
    for item in queue.candidates(running):
        queue.remove(item)
        running[item.owner] += 1
        order.append(item.name)
    assert order == ["x0", "y0", "x1", "y1", "x2", "y2", "x3", "y3"]


def test_discard_if_works_during_a_pass():
    queue = filled(*A, *B)
    seen = []
    for item in queue.candidates({}):
        seen.append(item.name)
        if item.name == "a0":
            assert {i.name for i in queue.discard_if(lambda i: i.owner == "b")} == {"b0", "b1", "b2"}
    assert seen == ["a0", "a1", "a2"]
    assert queue.discard_if(lambda i: False) == [] and len(queue) == 3


def test_items_pushed_during_a_pass_wait_for_their_turn():
    queue = filled(*A)
    extra = Item("extra")
    for item in queue.candidates({}):
        queue.remove(item)
        if item is A[0]:
            queue.push(extra, 0, "a", front=True)
    assert list(queue) == [extra]


def test_an_item_is_in_the_queue_once():
    queue = filled(A[0])
    with pytest.raises(ValueError, match="already in the queue"):
        queue.push(A[0], 1, "b")
    queue.remove(A[0])
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(A[0])


def test_no_owner_starves():
    """`a` pushes two samples for each that finishes; `b` has a few. All of `b`'s are admitted."""
    queue = filled(*(Item(f"a{i}") for i in range(1000)), *(Item(f"b{i}", owner="b") for i in range(20)))
    running: list[Item] = []
    done = []
    for tick in range(60):
        if len(running) == 4:
            done.append(running.pop(0))
        queue.push(Item(f"a-{tick}-0"), 0, "a")
        queue.push(Item(f"a-{tick}-1"), 0, "a")
        counts = {owner: sum(i.owner == owner for i in running) for owner in "ab"}
        for item in queue.candidates(counts):
            if len(running) == 4:
                break
            queue.remove(item)
            running.append(item)
    assert sum(item.owner == "b" for item in done) == 20


class NaiveQueue:
    """All items in a list in waiting order; each candidate is found by a full search."""

    def __init__(self):
        self.items = []

    def push(self, item, priority, owner, front):
        self.items.insert(0 if front else len(self.items), item)

    def candidates(self, running):
        counts, seen = dict(running), set()
        while rest := [i for i in self.items if i not in seen]:
            item = min(rest, key=lambda i: (i.priority, counts.get(i.owner, 0), self.items.index(i)))
            # Items of an owner keep the list's order, since they have the same count.
            seen.add(item)
            yield item
            if item not in self.items:
                counts[item.owner] = counts.get(item.owner, 0) + 1


ITEMS = st.builds(Item, st.just("item"), st.integers(-1, 1), st.sampled_from("abc"), st.booleans())
PASSES = st.tuples(
    st.lists(ITEMS, max_size=8),  # pushed before the pass
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),  # running
    st.lists(st.booleans(), max_size=12),  # admit or skip; the pass ends with this list
)


@given(st.lists(PASSES, max_size=6))
def test_equals_the_naive_queue(passes):
    queue, naive = FairQueue(), NaiveQueue()
    for pushed, running, decisions in passes:
        for item in pushed:
            queue.push(item, item.priority, item.owner, item.front)
            naive.push(item, item.priority, item.owner, item.front)
        for item, expected, admitted in zip(queue.candidates(running), naive.candidates(running), decisions):
            assert item is expected
            if admitted:
                queue.remove(item)
                naive.items.remove(item)
        assert set(queue) == set(naive.items) and len(queue) == len(naive.items)
