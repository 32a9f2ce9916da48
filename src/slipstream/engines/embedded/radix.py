"""The prefix cache's index: which pages hold the keys and values of which tokens, for one version of the policy.

A tree in which each node is one page. A node's tokens, after those of its ancestors, are the sequence whose keys and
values its page holds. Full pages may have children; a partly filled page is a leaf. Plain Python over integers.

    match    what of this sequence is there already?
    insert   these pages hold, or will soon hold, this sequence
    evict    give pages back, least recently used first
    clear    a new version of the policy: nothing cached is true any more
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from slipstream.engines.embedded.pages import PagePool

Tokens = tuple[int, ...]


class Match(NamedTuple):
    """What the tree knows of a sequence. With pages of 4 tokens and the tree holding 1 2 3 4 | 5 6 7 8 on pages 7 and 9:

    match((1, 2, 3, 4, 5, 6, 0))  ->  Match(pages=(7,), partial=9, num_tokens=6, num_pending=0)
    """

    pages: tuple[int, ...]  # match in full; to be shared
    partial: int | None  # this page's first tokens match too, num_tokens - len(pages) * page_size of them; to be copied
    num_tokens: int  # that match in all
    num_pending: int  # that would match besides, once the pages that are being computed are ready


class Node:
    """One page in the tree. `tokens[:num_ready]` are computed, the others are being computed."""

    __slots__ = ("full", "last_used", "num_ready", "ordered", "page", "parent", "queued", "serial", "tokens")

    def __init__(self, tokens: Tokens, page: int, parent: Node | None, serial: int) -> None:
        self.tokens = tokens
        self.page = page
        self.parent = parent  # None: the root, or no longer in the tree
        self.full: dict[Tokens, Node] = {}  # the children with full pages, by their tokens
        self.ordered: list[Node] = []  # all children, by their tokens
        self.num_ready = 0
        self.last_used = 0
        self.serial = serial  # breaks ties between equally old leaves
        self.queued = False  # stands in the queue of leaves

    @property
    def is_ready(self) -> bool:
        return self.num_ready == len(self.tokens)


class Handle(NamedTuple):
    """What one `insert` added to one page: the tokens from `start` up to `stop`, counted in the whole sequence."""

    node: Node
    start: int
    stop: int


class PrefixTree:
    """The tree holds (see `PagePool`) each of its pages once, and never holds for others: a caller that got pages from
    `match` holds them before it does anything that may evict. One thread; no call blocks.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"a page cannot have {page_size} tokens")
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.evicted_pages = 0
        self._pool = pool
        self._page_size = page_size
        self._root = Node((), -1, None, 0)
        self._nodes: dict[int, Node] = {}  # by page
        self._clock = 0  # counts calls
        self._serial = 0
        # Leaves that are ready, oldest first, each at most once: (last_used, serial, node). Entries are checked when
        # they come up, not when their node changes, so that touching a node costs nothing.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], limit: int | None = None) -> Match:
        """The longest known beginning of `tokens`, at most `limit` tokens of it. The nodes on the way count as used."""
        tokens = tuple(tokens if limit is None else tokens[: max(limit, 0)])
        self._clock += 1
        size, start, node = self._page_size, 0, self._root
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

        # The same again through nodes that are not ready.
        while (child := node.full.get(tokens[start : start + size])) is not None:
            node = child
            node.last_used = self._clock
            start += size
        start += self._closest(node, tokens[start : start + size], ready=False)[1]
        return Match(tuple(pages), closest.page if closest else None, num_tokens, max(start - num_tokens, 0))

    def insert(self, tokens: Sequence[int], pages: Sequence[int], ready: bool = True) -> list[Handle]:
        """Learn that `pages`, which the caller holds, contain `tokens`: now, or (not `ready`) once they are computed.

        Where the tree knows a page's tokens already it keeps its own page. A page that the tree has partly filled may
        come again with more tokens. Returns what is new, in the order of the tokens; of what is not ready the caller
        must `mark_ready` or `discard` every handle in the end, since others wait for it.
        """
        tokens, size = tuple(tokens), self._page_size
        if len(pages) != -(-len(tokens) // size):
            raise ValueError(
                f"{len(tokens)} tokens are {-(-len(tokens) // size)} pages of {size}, but {len(pages)} pages came"
            )
        self._clock += 1
        node = self._root
        handles = []
        for index, page in enumerate(pages):
            start = index * size
            node, num_known = self._place(node, tokens[start : start + size], page, ready)
            if start + num_known < min(start + size, len(tokens)):
                handles.append(Handle(node, start + num_known, min(start + size, len(tokens))))
        self._queue_leaf(node)  # the others have it below them
        return handles

    def mark_ready(self, handles: Iterable[Handle]) -> None:
        """The pages now contain their tokens. Handles that are no longer in the tree are ignored."""
        for node, start, stop in handles:
            if node.parent is not None:
                num_ready = stop - start + start % self._page_size
                node.num_ready = max(node.num_ready, min(num_ready, len(node.tokens)))
                self._queue_leaf(node)

    def discard(self, handles: Iterable[Handle]) -> None:
        """Forget what these inserts added, ready or not, and everything below it. To keep what was computed before a
        cancellation, leave its handles out. Handles that are no longer in the tree are ignored.
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
        """Free `count` pages, or as many as can be; returns how many. Least recently used leaves go first; pages that
        others hold, that are being computed, or that have such a page below them stay. A page that another holds when
        its turn comes counts as used now.
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
            node.last_used = self._clock  # so that the next call does not meet it first again
            self._queue_leaf(node)
        self.evicted_pages += freed
        return freed

    def clear(self) -> None:
        """Forget everything. Pages that others hold stay theirs; handles given out before have no effect any more."""
        for node in self._nodes.values():
            node.parent = None
        self._pool.release(self._nodes)
        self._nodes = {}
        self._leaves = []
        self._root = Node((), -1, None, 0)

    def count_hit(self, match_tokens: int, total_tokens: int) -> None:
        """A sequence of `total_tokens` was admitted and `match_tokens` of them came from the tree."""
        self.hit_tokens += match_tokens
        self.looked_up_tokens += total_tokens

    def _closest(self, parent: Node, tokens: Tokens, ready: bool) -> tuple[Node | None, int]:
        """The child whose page has the most of `tokens` at its beginning (with `ready`: computed), and how many."""
        best, best_len = None, 0
        if tokens:
            # Children are in the order of their tokens, so what they have in common with `tokens` only shrinks with the
            # distance, to either side, from the place where `tokens` would stand.
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
        """The node below `parent` that stands for `tokens` from now on, and how many of them it had before."""
        own = self._nodes.get(page)
        if own is not None and (
            own.parent is not parent or _common_len(own.tokens, tokens) < min(len(own.tokens), len(tokens))
        ):
            raise ValueError(
                f"page {page} came with other tokens than those it has in the tree: was it written to, or released and "
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
        """A child that makes another page with `tokens` useless: an equal full page, or a ready one with as many."""
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
        if len(self._leaves) > 2 * len(self._nodes) + 1000:  # left behind by discarded nodes
            self._leaves = [entry for entry in self._leaves if entry[2].parent is not None]
            heapify(self._leaves)
        node.queued = True
        heappush(self._leaves, (node.last_used, node.serial, node))


_tokens_of = attrgetter("tokens")


def _is_ready_leaf(node: Node) -> bool:
    """In the tree, with nothing below it and nothing being computed."""
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
