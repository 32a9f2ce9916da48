"""The page pool: every page is free or held, and reference counts are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.embedded.scheduling.pages import PagePool


def test_a_page_is_free_again_when_its_last_holder_releases_it():
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.hold([0])
    pool.release([0, 1, 2])
    assert (pool.num_free, pool.holders(0), pool.holders(1)) == (3, 1, 0)
    pool.release([0])
    assert pool.num_free == pool.num_pages == 4


def test_takes_all_or_nothing():
    pool = PagePool(2)
    assert pool.take(3) is None and pool.num_free == 2
    assert pool.take(0) == []
    assert sorted(pool.take(2)) == [0, 1]
    assert pool.take(1) is None


@pytest.mark.parametrize("wrong", [0, 2, -1], ids=["free", "outside", "negative"])
@pytest.mark.parametrize("verb", ["hold", "release"])
def test_wrong_pages_are_refused_by_number(verb, wrong):
    with pytest.raises(ValueError, match=f"page {wrong}"):
        getattr(PagePool(2), verb)([wrong])


def test_counts_cannot_be_negative():
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(-1)
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(1).take(-1)


@given(
    st.integers(0, 8), st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 8)), max_size=60)
)
def test_counts_are_those_of_a_list_of_holds(num_pages, operations):
    pool = PagePool(num_pages)
    held: list[int] = []  # the model: a page appears once for each holder
    for verb, number in operations:
        if verb == "take":
            free = set(range(num_pages)) - set(held)
            pages = pool.take(number)
            if number > len(free):
                assert pages is None
            else:
                assert len(set(pages)) == number and set(pages) <= free
                held += pages
        elif held:
            page = held[number % len(held)]
            getattr(pool, verb)([page])
            held.append(page) if verb == "hold" else held.remove(page)
        assert [pool.holders(p) for p in range(num_pages)] == [held.count(p) for p in range(num_pages)]
        assert pool.num_free == num_pages - len(set(held))
