"""The prefix tree: examples, and a stateful test against a flat list of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from slipstream.engines.embedded.scheduling import radix_cache
from slipstream.engines.embedded.scheduling.pages import PagePool
from slipstream.engines.embedded.scheduling.radix_cache import Match, PrefixTree


def tree_of(*sequences: str, page_size: int = 4, num_pages: int = 32) -> tuple[PagePool, PrefixTree]:
    """A tree of sequences inserted one after another, each on new pages that only the tree holds."""
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, page_size)
    for sequence in sequences:
        insert(pool, tree, sequence)
    return pool, tree


def insert(pool, tree, sequence, ready=True):
    pages = pool.take(-(-len(sequence) // tree._page_size))
    handles = tree.insert(tokens(sequence), pages, ready)
    pool.release(pages)
    return handles


def tokens(text) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("sequences", "query", "limit", "match"),
    [
        ([], "abcd", None, Match((), None, 0, 0)),
        (["abcdefgh"], "", None, Match((), None, 0, 0)),
        (["abcdefgh"], "abcdefgh", None, Match((0, 1), None, 8, 0)),
        (["abcdefgh"], "abcdefghi", None, Match((0, 1), None, 8, 0)),
        (["abcdefgh"], "abcdefgh", 7, Match((0,), 1, 7, 0)),
        (["abcdefgh"], "abcdefgh", 4, Match((0,), None, 4, 0)),
        (["abcdefgh"], "abcdefgh", 0, Match((), None, 0, 0)),
        (["abcdefgh"], "abcdefgh", -1, Match((), None, 0, 0)),
        (["abcdefgh"], "abxx", None, Match((), 0, 2, 0)),
        (["abcdefgh"], "xbcd", None, Match((), None, 0, 0)),
        (["abcdef"], "abcdefgh", None, Match((0,), 1, 6, 0)),
        (["abcdef"], "abcde", None, Match((0,), 1, 5, 0)),
        # Of several siblings, the one with the longest common prefix.
        (["axxx", "abxx", "abcx", "b"], "abcd", None, Match((), 2, 3, 0)),
        (["abcd", "abc"], "abcx", None, Match((), 0, 3, 0)),
        # Equal pages are kept once: the second sequence's own first page (2) is not adopted.
        (["abcdefgh", "abcdxyz"], "abcdxyz", None, Match((0,), 3, 7, 0)),
    ],
)
def test_match(sequences, query, limit, match):
    _, tree = tree_of(*sequences)
    assert tree.match(tokens(query), limit) == match


def test_the_tree_holds_what_it_adopts_and_only_that():
    pool, tree = tree_of("abcdefgh")
    pages = pool.take(2)
    handles = tree.insert(tokens("abcdxy"), pages)
    assert [(h.node.page, h.start, h.stop) for h in handles] == [(pages[1], 4, 6)]
    assert [pool.holders(p) for p in pages] == [1, 2] and tree.num_pages == 3
    pool.release(pages)
    assert tree.num_pages == 3 == pool.num_pages - pool.num_free


def test_a_page_with_nothing_new_is_not_adopted():
    pool, tree = tree_of("abcdefgh")
    assert insert(pool, tree, "abcdef") == insert(pool, tree, "abcdefgh") == insert(pool, tree, "a") == []
    assert tree.num_pages == 2


def test_a_partly_filled_page_grows():
    pool, tree = tree_of()
    (page,) = pages = pool.take(1)
    for text, added in [("ab", (0, 2)), ("abc", (2, 3)), ("abcd", (3, 4))]:
        assert [(h.start, h.stop) for h in tree.insert(tokens(text), pages)] == [added]
        assert tree.match(tokens("abcdefgh")).num_tokens == len(text)
        assert (tree.num_pages, pool.holders(page)) == (1, 2)
    assert tree.insert(tokens("abc"), pages) == []  # and never shrinks
    insert(pool, tree, "abcdefgh")
    assert tree.match(tokens("abcdefgh")) == Match((page, 2), None, 8, 0)


def test_a_page_does_not_grow_where_another_page_has_its_tokens():
    pool, tree = tree_of()
    pages = pool.take(2)
    tree.insert(tokens("ab"), pages[:1])
    insert(pool, tree, "abcd")  # page 2
    assert [h.node.page for h in tree.insert(tokens("abcdef"), pages)] == [pages[1]]
    assert tree.match(tokens("abcdef")) == Match((2,), pages[1], 6, 0)


def test_a_page_cannot_have_two_contents():
    pool, tree = tree_of()
    pages = pool.take(2)
    tree.insert(tokens("abcdef"), pages)
    for text, wrong in [("abcdex", pages), ("ef", pages[1:]), ("abcdefghab", [*pages, pages[0]])]:
        with pytest.raises(ValueError, match=r"page \d was inserted with other tokens"):
            tree.insert(tokens(text), wrong)
    with pytest.raises(ValueError, match="5 tokens need 2 pages of 4, got 1 pages"):
        tree.insert(tokens("abcde"), [0])
    with pytest.raises(ValueError, match="page 9 is free"):
        tree.insert(tokens("x"), [9])


def test_pages_being_computed_are_pending_and_not_matched():
    pool, tree = tree_of("abcd")
    handles = insert(pool, tree, "abcdefghij", ready=False)
    assert [(h.start, h.stop) for h in handles] == [(4, 8), (8, 10)]
    query = tokens("abcdefghijk")
    assert tree.match(query) == Match((0,), None, 4, 6)
    assert tree.match(query, 4) == tree.match(tokens("abcdxy")) == Match((0,), None, 4, 0)
    tree.mark_ready(handles[:1])
    assert tree.match(query) == Match((0, 2), None, 8, 2)
    assert tree.match(query, 8) == Match((0, 2), None, 8, 0)
    tree.mark_ready(handles)
    assert tree.match(query) == Match((0, 2), 3, 10, 0)


def test_num_pending_counts_what_waiting_would_add():
    pool, tree = tree_of("abcx")
    insert(pool, tree, "abyy", ready=False)
    assert tree.match(tokens("abcd")) == Match((), 0, 3, 0)  # the pending page has only 2 of these
    assert tree.match(tokens("abyd")) == Match((), 0, 2, 1)


def test_discarding_removes_all_below():
    pool, tree = tree_of("abcd")
    handles = insert(pool, tree, "abcdefgh", ready=False)
    insert(pool, tree, "abcdefghijkl")
    insert(pool, tree, "abcdefghmn")
    assert tree.num_pages == 4
    tree.discard(handles)
    assert tree.num_pages == 1 and pool.num_free == pool.num_pages - 1
    tree.mark_ready(handles)
    tree.discard(handles)
    assert tree.match(tokens("abcdefgh")) == Match((0,), None, 4, 0)


def test_discarding_growth_keeps_what_the_page_had():
    pool, tree = tree_of()
    pages = pool.take(2)
    tree.insert(tokens("ab"), pages[:1])
    handles = tree.insert(tokens("abcdef"), pages, ready=False)
    assert tree.match(tokens("abcdef")) == Match((), pages[0], 2, 4)
    tree.discard(handles)
    assert tree.match(tokens("abcdef")) == Match((), pages[0], 2, 0)
    pool.release(pages)
    assert tree.evict(5) == 1 and pool.num_free == pool.num_pages


def test_discarding_takes_back_what_was_marked_ready():
    pool, tree = tree_of()
    pages = pool.take(1)
    tree.insert(tokens("ab"), pages)
    handles = tree.insert(tokens("abcd"), pages)
    tree.discard(handles)
    assert tree.match(tokens("abcd")) == Match((), pages[0], 2, 0)
    tree.insert(tokens("abxy"), pages, ready=False)  # the page is overwritten after the kept tokens
    assert tree.match(tokens("abxy")) == Match((), pages[0], 2, 2)


def test_equal_pages_computed_at_once_are_kept_apart():
    pool, tree = tree_of()
    first, second = (insert(pool, tree, "ab", ready=False) for _ in range(2))
    tree.discard(first)
    assert tree.match(tokens("ab")) == Match((), None, 0, 2)
    tree.mark_ready(second)
    assert tree.match(tokens("ab")) == Match((), 1, 2, 0)
    third = insert(pool, tree, "ab", ready=False)
    assert third == []
    assert tree.evict(2) == 1 and tree.num_pages == 0


def test_a_held_leaf_does_not_block_the_next_eviction():
    pool, tree = tree_of("aaaa", "bbbb", "cccc", "dddd")
    pool.hold([0])
    assert tree.evict(1) == 1 and list(tree._nodes) == [0, 2, 3]
    pool.release([0])
    assert tree.evict(2) == 2 and list(tree._nodes) == [0]  # held at its turn, so it counts as used


def test_evicts_the_least_recently_used_leaf_first():
    pool, tree = tree_of("aaaabbbb", "aaaacccc", "dddd", "ee")
    names = {tree.match(tokens(text))[:2]: text for text in ("aaaa", "dddd", "ee")}
    names |= {(tree.match(tokens(text)).pages[1:], None): text for text in ("aaaabbbb", "aaaacccc")}
    for used in ("dddd", "aaaacccc", "aaaa", "exx"):
        tree.match(tokens(used))
    order = []
    while tree.num_pages:
        before = set(tree._nodes)
        assert tree.evict(1) == 1
        (page,) = before - set(tree._nodes)
        order.append(names.get(((page,), None)) or names[(), page])
    assert order == ["aaaabbbb", "dddd", "aaaacccc", "aaaa", "ee"]
    assert tree.evicted_pages == 5 and pool.num_free == pool.num_pages and tree.evict(1) == 0


def test_does_not_evict_what_is_held_or_being_computed_or_above_it():
    pool, tree = tree_of("aaaabbbbcccc", "xxxx")
    held = tree.match(tokens("aaaabbbb")).pages
    pool.hold(held)
    handles = insert(pool, tree, "xxxxyyyy", ready=False)
    assert tree.evict(0) == 0
    assert tree.evict(10) == 1  # cccc
    pool.release(held[1:])
    assert tree.evict(10) == 1  # bbbb
    pool.release(held[:1])
    assert tree.evict(10) == 1  # aaaa
    tree.mark_ready(handles)
    assert tree.evict(10) == 2 and tree.num_pages == 0


def test_other_holders_keep_their_pages_after_clear():
    pool, tree = tree_of("aaaa")
    handles = insert(pool, tree, "aaaabbbb", ready=False)
    pool.hold([0])
    tree.clear()
    assert tree.num_pages == 0 and pool.num_free == pool.num_pages - 1
    assert tree.match(tokens("aaaa")) == Match((), None, 0, 0)
    insert(pool, tree, "aaaabbbb")
    tree.mark_ready(handles)
    tree.discard(handles)
    assert tree.match(tokens("aaaabbbb")).num_tokens == 8
    assert tree.evict(10) == 2


def test_many_siblings_are_not_scanned(monkeypatch):
    """10,000 prompts with a common prefix, as with a chat template: a match compares with a few of them."""
    pool = PagePool(10_001)
    tree = PrefixTree(pool, 8)
    for number in range(10_000):
        insert(pool, tree, f"<s>{number:04}")
    compared = []
    monkeypatch.setattr(
        radix_cache, "_common_len", lambda a, b, real=radix_cache._common_len: compared.append(b) or real(a, b)
    )
    assert tree.match(tokens("<s>123x")).num_tokens == 6
    assert len(compared) <= 8


def test_a_large_tree_is_evicted_leaf_by_leaf():
    """Even if the oldest leaves are in use, and after many discarded ones."""
    pool = PagePool(20_000)
    tree = PrefixTree(pool, 1)
    insert(pool, tree, [chr(c) for c in range(32)])
    pool.hold(held := tree.match(range(32)).pages)
    for number in range(5_000):
        insert(pool, tree, [chr(100 + number), "a", "b"])
        tree.discard(insert(pool, tree, [chr(100 + number), "c"]))
    assert len(tree._leaves) <= 2 * tree.num_pages + 1001
    for _ in range(15_000):
        assert tree.evict(1) == 1
    assert tree.evict(1) == 0 and tree.num_pages == 32
    pool.release(held)
    assert tree.evict(100) == 32


SEQUENCES = st.lists(st.integers(0, 1), max_size=9).map(tuple)


def common_len(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(st.lists(st.tuples(SEQUENCES, st.booleans()), max_size=8), SEQUENCES, st.integers(0, 9), st.integers(1, 4))
def test_matches_the_longest_inserted_prefix(inserted, query, limit, page_size):
    pool = PagePool(100)
    tree = PrefixTree(pool, page_size)
    for sequence, ready in sorted(inserted, key=lambda x: not x[1]):  # a ready page may follow one that is not
        insert(pool, tree, [chr(token) for token in sequence], ready)
    best_ready = max((common_len(query[:limit], s) for s, ready in inserted if ready), default=0)
    best = max((common_len(query[:limit], s) for s, _ in inserted), default=0)
    match = tree.match(query, limit)
    assert match.num_tokens == best_ready
    assert match.num_pending == best - best_ready
    assert len(match.pages) == best_ready // page_size
    assert (match.partial is not None) == (best_ready % page_size > 0)


@dataclass(eq=False)
class Record:
    """A page in the flat model: the tokens before it, its own tokens, and how many of them are computed."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]
    num_ready: int = 0


@dataclass(eq=False)
class Caller:
    """A sequence being computed, and the pages it holds."""

    tokens: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    done: bool = False


class TreeMachine(RuleBasedStateMachine):
    """Callers arrive, share pages, grow, fail and leave, as under a scheduler. A flat list of pages is the reference."""

    callers, handles = Bundle("callers"), Bundle("handles")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(14)
        self.size = 3
        self.tree = PrefixTree(self.pool, self.size)
        self.records: dict[int, Record] = {}
        self.everyone: list[Caller] = []

    # The reference, by exhaustive search.

    def naive_match(self, query):
        """(pages, possible partial pages, number of tokens, number of pending tokens)"""

        def walk(usable):
            pages, at = [], 0
            while full := [
                p
                for p, r in self.records.items()
                if r.before == query[:at] and usable(r) == query[at : at + self.size] and len(usable(r)) == self.size
            ]:
                pages += full
                at += self.size
            lengths = {p: common_len(usable(r), query[at:]) for p, r in self.records.items() if r.before == query[:at]}
            best = max(lengths.values(), default=0)
            return pages, {p for p, n in lengths.items() if n == best > 0} or {None}, at + best

        pages, partial, num_tokens = walk(lambda r: r.tokens[: r.num_ready])
        return pages, partial, num_tokens, max(walk(lambda r: r.tokens)[2] - num_tokens, 0)

    def naive_insert(self, tokens, pages, ready):
        """Added tokens: (page, start, stop)."""
        new = []
        for index, page in enumerate(pages):
            start, stop = index * self.size, min((index + 1) * self.size, len(tokens))
            before, chunk = tokens[:start], tokens[start:stop]
            record = self.records.get(page)
            if record is None or len(record.tokens) < len(chunk):
                siblings = [r for r in self.records.values() if r.before == before]
                if len(chunk) == self.size:
                    known = any(r.tokens == chunk for r in siblings)
                else:
                    known = any(r.tokens[: r.num_ready][: len(chunk)] == chunk for r in siblings)
                if known:
                    continue
                record = self.records.setdefault(page, Record(before, ()))
                new.append((page, start + len(record.tokens), stop))
                record.tokens = chunk
            if ready:
                record.num_ready = max(record.num_ready, len(chunk))
        return new

    def children(self, page):
        record = self.records[page]
        path = record.before + record.tokens
        below = {
            p for p, r in self.records.items() if len(r.before) > len(record.before) and r.before[: len(path)] == path
        }
        return below if len(record.tokens) == self.size else set()

    def naive_evict(self, count):
        """Evicted pages, in order."""
        gone = []
        kept = dict(self.records)
        while len(gone) < count:
            idle = [
                p
                for p, r in kept.items()
                if r.num_ready == len(r.tokens) and self.pool.holders(p) == 1 and not self.children(p) & kept.keys()
            ]
            if not idle:
                break
            # The examples above pin what counts as use; here the tree's own clock is trusted.
            oldest = min(idle, key=lambda p: (self.tree._nodes[p].last_used, self.tree._nodes[p].serial))
            gone.append(oldest)
            del kept[oldest]
        return gone

    # Events.

    def check_match(self, query, limit=None):
        pages, partial, num_tokens, pending = self.naive_match(query if limit is None else query[:limit])
        match = self.tree.match(query, limit)
        assert (list(match.pages), match.num_tokens, match.num_pending) == (pages, num_tokens, pending)
        assert match.partial in partial
        return match

    def write(self, caller, ready):
        expected = self.naive_insert(caller.tokens, caller.pages, ready)
        handles = self.tree.insert(caller.tokens, caller.pages, ready)
        assert [(h.node.page, h.start, h.stop) for h in handles] == expected
        return [(h, self.records[h.node.page]) for h in handles]

    @rule(query=SEQUENCES, limit=st.none() | st.integers(0, 9))
    def match(self, query, limit):
        self.check_match(query, limit)

    @rule(target=callers, tokens=SEQUENCES)
    def arrive(self, tokens):
        match = self.check_match(tokens)
        caller = Caller(tokens[: len(match.pages) * self.size], list(match.pages))
        self.pool.hold(match.pages)
        self.everyone.append(caller)
        self.grow(caller, tokens[len(caller.tokens) :])
        return caller

    def grow(self, caller, tokens):
        needed = -(-(len(caller.tokens) + len(tokens)) // self.size) - len(caller.pages)
        if needed > self.pool.num_free:
            self.evict(needed - self.pool.num_free)
        pages = self.pool.take(needed)
        if pages is not None and not caller.done:
            caller.pages += pages
            caller.tokens += tokens

    @rule(target=handles, caller=callers, tokens=SEQUENCES, ready=st.booleans())
    def compute(self, caller, tokens, ready):
        if not caller.done:
            self.grow(caller, tokens[:4])
        return [] if caller.done else self.write(caller, ready)

    @rule(handles=handles, count=st.integers(0, 4))
    def mark_ready(self, handles, count):
        self.tree.mark_ready(h for h, _ in handles[:count])
        for handle, record in handles[:count]:
            if self.records.get(handle.node.page) is record:
                num_ready = min(handle.stop - len(record.before), len(record.tokens))
                record.num_ready = max(record.num_ready, num_ready)

    @rule(handles=handles, skipped=st.integers(0, 4))
    def discard(self, handles, skipped):
        self.tree.discard(h for h, _ in handles[skipped:])
        for handle, record in handles[skipped:]:
            page, num_kept = handle.node.page, handle.start - len(record.before)
            if self.records.get(page) is record and len(record.tokens) > num_kept:
                for child in self.children(page):
                    del self.records[child]
                record.tokens = record.tokens[:num_kept]
                record.num_ready = min(record.num_ready, num_kept)
                if num_kept == 0:
                    del self.records[page]

    @rule(caller=callers)
    def leave(self, caller):
        self.pool.release(caller.pages)
        caller.pages, caller.done = [], True

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        gone = self.naive_evict(count)
        assert self.tree.evict(count) == len(gone)
        assert self.records.keys() - self.tree._nodes.keys() == set(gone)
        for page in gone:
            del self.records[page]

    @precondition(lambda self: len(self.records) > 8)
    @rule()
    def clear(self):
        self.tree.clear()
        self.records = {}

    # Invariants.

    @invariant()
    def each_page_is_held_by_the_tree_and_its_callers(self):
        for page in range(self.pool.num_pages):
            holders = sum(caller.pages.count(page) for caller in self.everyone) + (page in self.records)
            assert self.pool.holders(page) == holders
        assert self.pool.num_free == sum(self.pool.holders(p) == 0 for p in range(self.pool.num_pages))

    @invariant()
    def the_tree_has_the_pages_of_the_model(self):
        assert self.tree.num_pages == len(self.records)
        for page, record in self.records.items():
            node = self.tree._nodes[page]
            assert (node.tokens, node.num_ready) == (record.tokens, record.num_ready)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
