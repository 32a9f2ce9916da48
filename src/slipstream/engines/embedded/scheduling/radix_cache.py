"""Prefix cache: a radix tree from token sequences to the pages that hold their keys and values, for one policy version.

Each adapter has a root of its own, since it has other keys and values for the same tokens; the base model's is "". Each node
is one page. Its tokens, after those of its ancestors, are the sequence whose keys and values the page holds. Full pages may
have children; a partly filled page is a leaf. Plain Python over integers.

    match    find the cached prefix of a sequence
    insert   record that pages hold a sequence, or will once it is computed
    evict    free pages, least recently used first
    clear    forget everything: the policy version has changed
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from slipstream.engines.embedded.scheduling.pages import PagePool

Tokens = tuple[int, ...]


class Match(NamedTuple):
    """The cached prefix of a sequence. With pages of 4 tokens and 1 2 3 4 | 5 6 7 8 cached on pages 7 and 9:

    match((1, 2, 3, 4, 5, 6, 0))  ->  Match(pages=(7,), partial=9, num_tokens=6, num_pending=0)
    """

    pages: tuple[int, ...]  # full matches, to be shared
    partial: int | None  # a page whose first num_tokens - len(pages) * page_size tokens match, to be copied
    num_tokens: int  # matching tokens in total
    num_pending: int  # further tokens that will match once the pages being computed are ready


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One page. `tokens[:num_ready]` are computed, the rest are being computed."""

    tokens: Tokens
    page: int
    parent: Node | None  # None for the root, and after removal from the tree
    serial: int  # breaks ties between equally old leaves
    full: dict[Tokens, Node] = field(default_factory=dict)  # children with full pages, by their tokens
    ordered: list[Node] = field(default_factory=list)  # all children, sorted by their tokens
    num_ready: int = 0
    last_used: int = 0
    queued: bool = False  # is in the eviction queue

    @property
    def is_ready(self) -> bool:
        return self.num_ready == len(self.tokens)


class Handle(NamedTuple):
    """What one `insert` added to one page: tokens `[start, stop)` of the sequence."""

    node: Node
    start: int
    stop: int


class PrefixTree:
    """The tree holds each of its pages once (see `PagePool`) and never on behalf of a caller: hold the pages that `match`
    returned before doing anything that may evict. Not thread-safe; no call blocks.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.hit_tokens = self.looked_up_tokens = self.evicted_pages = 0
        """The first two are counted by the scheduler, for each sequence that it admits."""
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[str, Node] = {}  # by adapter
        self._nodes: dict[int, Node] = {}  # by page
        self._clock = 0  # counts calls
        self._serial = 0
        # Eviction queue of ready leaves, oldest first, each at most once: (last_used, serial, node). Stale entries are
        # handled when popped, so that touching a node costs nothing.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], limit: int | None = None, adapter: str = "") -> Match:
        """Find the longest cached prefix of `tokens`, up to `limit` tokens. Marks its nodes as used."""
        tokens = tuple(tokens if limit is None else tokens[: max(limit, 0)])
        self._clock += 1
        size, start, node = self._page_size, 0, self._root(adapter)
        pages = []
        while (child := node.full.get(tokens[start : start + size])) is not None and child.is_ready:
            node = child
            node.last_used = self._clock
            pages.append(node.page)
            start += size
        closest, num_partial = self._closest(node, tokens[start : start + size], ready=True)
        if closest is not None:
            closest.last_used = self._clock
        num_tokens = start + num_partial

        # Continue through nodes that are still being computed.
        while (child := node.full.get(tokens[start : start + size])) is not None:
            node = child
            node.last_used = self._clock
            start += size
        start += self._closest(node, tokens[start : start + size], ready=False)[1]
        return Match(tuple(pages), closest.page if closest else None, num_tokens, max(start - num_tokens, 0))

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], ready: bool = True, adapter: str = ""
    ) -> list[Handle]:
        """Record that `pages`, which the caller holds, contain `tokens`; with `ready=False`, that they will.

        Where the tree already has a page's tokens it keeps its own page. A partly filled page of the tree may be inserted
        again with more tokens. Returns handles of what was added, in token order. If not `ready`, the caller must eventually
        `mark_ready` or `discard` every handle, since other sequences wait for them.
        """
        tokens, size = tuple(tokens), self._page_size
        if len(pages) != -(-len(tokens) // size):
            raise ValueError(
                f"{len(tokens)} tokens need {-(-len(tokens) // size)} pages of {size}, got {len(pages)} pages"
            )
        self._clock += 1
        node = self._root(adapter)
        handles = []
        for index, page in enumerate(pages):
            start = index * size
            node, num_known = self._place(node, tokens[start : start + size], page, ready)
            if start + num_known < min(start + size, len(tokens)):
                handles.append(Handle(node, start + num_known, min(start + size, len(tokens))))
        self._queue_leaf(node)  # the other nodes are its ancestors
        return handles

    def mark_ready(self, handles: Iterable[Handle]) -> None:
        """Mark the pages as computed. Ignores handles that are no longer in the tree."""
        for node, start, stop in handles:
            if node.parent is not None:
                num_ready = stop - start + start % self._page_size
                node.num_ready = max(node.num_ready, min(num_ready, len(node.tokens)))
                self._queue_leaf(node)

    def discard(self, handles: Iterable[Handle]) -> None:
        """Remove what these inserts added, ready or not, and everything below it. To keep pages that were computed before a
        cancellation, omit their handles. Ignores handles that are no longer in the tree.
        """
        for node, start, _ in handles:
            num_kept = start % self._page_size
            if node.parent is None or len(node.tokens) <= num_kept:
                continue
            self._remove_below(node)
            if num_kept == 0:
                self._remove(node)
            else:
                self._resize(node, node.tokens[:num_kept])
                self._queue_leaf(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first; returns how many. Pages that have other holders, are
        being computed, or are ancestors of such pages stay. A page found to have another holder counts as used now.
        """
        self._clock += 1
        freed = 0
        in_use = []
        while freed < count and self._leaves:
            last_used, _, node = heappop(self._leaves)
            node.queued = False
            if last_used != node.last_used:
                self._queue_leaf(node)
            elif _is_ready_leaf(node):
                if self._pool.holders(node.page) > 1:
                    in_use.append(node)
                else:
                    self._remove(node)
                    freed += 1
        for node in in_use:
            node.last_used = self._clock  # the next call should not look at it first again
            self._queue_leaf(node)
        self.evicted_pages += freed
        return freed

    def clear(self) -> None:
        """Remove everything. Other holders keep their pages; earlier handles have no effect from now on."""
        for node in self._nodes.values():
            node.parent = None
        self._pool.release(self._nodes)
        self._nodes = {}
        self._leaves = []
        self._roots = {}

    def clear_adapter(self, adapter: str) -> None:
        """Remove what was computed with an adapter, as `clear` does."""
        self._remove_below(self._root(adapter))

    def _root(self, adapter: str) -> Node:
        return self._roots.setdefault(adapter, Node((), -1, None, 0))

    def _closest(self, parent: Node, tokens: Tokens, ready: bool) -> tuple[Node | None, int]:
        """The child with the longest common prefix with `tokens` (with `ready`, of its computed tokens), and its length."""
        best, best_len = None, 0
        if tokens:
            # Children are sorted, so common prefixes get shorter with the distance from the insertion point of `tokens`.
            place = bisect_left(parent.ordered, tokens, key=_tokens_of)
            for side in (range(place, len(parent.ordered)), range(place - 1, -1, -1)):
                for index in side:
                    child = parent.ordered[index]
                    common = _common_len(tokens, child.tokens)
                    if common <= best_len:
                        break
                    usable = min(common, child.num_ready) if ready else common
                    if usable > best_len:
                        best, best_len = child, usable
        return best, best_len

    def _place(self, parent: Node, tokens: Tokens, page: int, ready: bool) -> tuple[Node, int]:
        """Return the child of `parent` that now represents `tokens`, and how many of them it had before."""
        own = self._nodes.get(page)
        if own is not None and (
            own.parent is not parent or _common_len(own.tokens, tokens) < min(len(own.tokens), len(tokens))
        ):
            raise ValueError(
                f"page {page} was inserted with other tokens than it has in the tree: was it overwritten, or released and "
                "taken again, while the tree held it?"
            )
        if own is not None and len(own.tokens) >= len(tokens):
            node, num_known = own, len(tokens)
        elif (known := self._known(parent, tokens)) is not None:
            node, num_known = known, len(tokens)
        elif own is not None:
            node, num_known = own, len(own.tokens)
            self._resize(own, tokens)
        else:
            self._pool.hold([page])
            self._serial += 1
            node, num_known = Node(tokens, page, parent, self._serial), 0
            self._nodes[page] = node
            _link(parent, node, self._page_size)
        node.last_used = self._clock
        if ready and node.page == page:
            node.num_ready = max(node.num_ready, len(tokens))
        return node, num_known

    def _known(self, parent: Node, tokens: Tokens) -> Node | None:
        """A child that makes another page with `tokens` redundant: an equal full page, or a ready one that starts with them."""
        if len(tokens) == self._page_size:
            return parent.full.get(tokens)
        closest, common = self._closest(parent, tokens, ready=True)
        return closest if common == len(tokens) else None

    def _resize(self, node: Node, tokens: Tokens) -> None:
        assert node.parent is not None
        _unlink(node.parent, node)
        node.tokens = tokens
        node.num_ready = min(node.num_ready, len(tokens))
        _link(node.parent, node, self._page_size)

    def _remove_below(self, node: Node) -> None:
        doomed = list(node.ordered)
        for child in doomed:
            doomed.extend(child.ordered)
        for child in reversed(doomed):
            self._remove(child)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.ordered
        _unlink(parent, node)
        node.parent = None
        del self._nodes[node.page]
        self._pool.release([node.page])
        self._queue_leaf(parent)

    def _queue_leaf(self, node: Node) -> None:
        if node.queued or not _is_ready_leaf(node):
            return
        if len(self._leaves) > 2 * len(self._nodes) + 1000:  # drop entries of discarded nodes
            self._leaves = [entry for entry in self._leaves if entry[2].parent is not None]
            heapify(self._leaves)
        node.queued = True
        heappush(self._leaves, (node.last_used, node.serial, node))


_tokens_of = attrgetter("tokens")


def _is_ready_leaf(node: Node) -> bool:
    """Whether the node is in the tree, has no children, and is fully computed."""
    return node.parent is not None and not node.ordered and node.is_ready


def _common_len(a: Tokens, b: Tokens) -> int:
    for index, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return index
    return min(len(a), len(b))


def _link(parent: Node, node: Node, page_size: int) -> None:
    parent.ordered.insert(bisect_left(parent.ordered, node.tokens, key=_tokens_of), node)
    if len(node.tokens) == page_size:
        parent.full[node.tokens] = node


def _unlink(parent: Node, node: Node) -> None:
    place = bisect_left(parent.ordered, node.tokens, key=_tokens_of)
    while parent.ordered[place] is not node:  # several partly filled pages may have the same tokens
        place += 1
    del parent.ordered[place]
    if parent.full.get(node.tokens) is node:
        del parent.full[node.tokens]
