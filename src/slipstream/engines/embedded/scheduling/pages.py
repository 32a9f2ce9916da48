"""Reference counts of the KV cache's pages. The contents of the pages live elsewhere."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Pages 0 to num_pages - 1, each free or held by one or more holders: sequences and the prefix tree.

    A user of a page holds it (`take` or `hold`) and releases it once per hold. A shared page is written only behind the tokens
    that its other holders read.

    pool = PagePool(4)
    pool.take(3)           # [0, 1, 2]: the pages of a sequence
    pool.hold([0])         # the prefix tree keeps page 0
    pool.release([0, 1, 2])
    pool.num_free          # 3: only the tree's page 0 is in use
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages must be 0 or more, got {num_pages} pages")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        # Last in, first out: a page released recently is likely still in a processor's cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` free pages, each with one holder. Returns None and takes nothing if fewer are free."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each page. The pages must be in use; free pages come from `take` only."""
        for page in pages:
            if self.holders(page) == 0:
                raise ValueError(f"page {page} is free and cannot be shared: was it released too early?")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page. A page without holders is free."""
        for page in pages:
            if self.holders(page) == 0:
                raise ValueError(f"page {page} is free already: it was released more often than held")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def holders(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} does not exist: this pool has pages 0 to {self.num_pages - 1}")
        return self._holders[page]
