"""Who holds which page of the KV cache: reference counts over page numbers. The pages' contents live elsewhere."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 0 to num_pages - 1, each free or held by one or more holders (sequences, the prefix tree).

    Whoever uses a page holds it (`take` or `hold`) and releases it once for each time it held it. Nobody writes to a
    page that another also holds, except behind the tokens that the other reads.

    pool = PagePool(4)
    pool.take(3)           # [0, 1, 2]: a sequence's pages
    pool.hold([0])         # the prefix tree keeps page 0
    pool.release([0, 1, 2])
    pool.num_free          # 3: page 0 is the tree's
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        # Last in, first out: a page just released is the likeliest to be warm in a processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free pages, now held once each; None, and nothing taken, if there are not as many."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which must have one already: only `take` hands out free pages."""
        for page in pages:
            if self.holders(page) == 0:
                raise ValueError(
                    f"page {page} is free, so there is nobody to share it with: was it released too early?"
                )
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; a page without holders is free."""
        for page in pages:
            if self.holders(page) == 0:
                raise ValueError(f"page {page} is free already: it was released more often than held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"no page {page}: this pool has pages 0 to {self.num_pages - 1}")
        return self._holders[page]
