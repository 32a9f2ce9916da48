"""Which of a trainer's device memory a reader has been shown: regions under numbers, each shown once.

Where memory cannot be exported, arrays are copied into a buffer of our own that can be."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.weights.transports.vmm import Driver, NotExportable, Region

IDLE_TURNS = 2
"""A region that held nothing in so many syncs is no longer shown. If it comes back, it is shown again."""
ALIGNMENT = 256


@dataclass
class Found:
    """Where arrays are, in the reader's terms."""

    places: dict[int, tuple[int, int]]
    """By pointer: the region's number, and the offset in it."""
    new: dict[int, tuple[Region, int]] = field(default_factory=dict)
    """Regions that the reader has not seen yet, with file descriptors to pass on and close."""
    gone: list[int] = field(default_factory=list)
    """Numbers of regions that are no more."""


class Exports:
    """Regions that a reader has been shown, under numbers."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._numbers: dict[Region, int] = {}
        self._used: dict[Region, int] = {}
        """In which turn last."""
        self._next = self._turn = 0
        self._staging: Region | None = None
        self.is_staged = False

    def places(self, arrays: Mapping[int, Any]) -> Found:
        """Of arrays by pointer."""
        if not self.is_staged:
            try:
                return self._in_place(arrays)
            except NotExportable:
                self.is_staged = True
        return self._staged(arrays)

    def _in_place(self, pointers: Collection[int]) -> Found:
        found, seen = Found({}), list[Region]()
        base = end = number = 0
        self._turn += 1
        try:
            for pointer in sorted(pointers):
                # Sorted, so that the arrays of a region follow each other. Whether it is still the same is asked every
                # time: an allocator may have given a region back, and got other memory at the same addresses.
                if not base <= pointer < end:
                    seen.append(region := self._driver.region(pointer))
                    base, end, number = region.base, region.base + region.size, self._number(region, found)
                found.places[pointer] = (number, pointer - base)
        except NotExportable:
            for region, fd in found.new.values():
                os.close(fd)
                del self._numbers[region]
            raise
        self._used |= dict.fromkeys(seen, self._turn)
        # What a reader has mapped is not free, even after the trainer's allocator has let go of it.
        idle = [r for r in self._numbers if r not in seen]
        old = [r for r in idle if self._turn - self._used[r] >= IDLE_TURNS or any(_overlap(r, new) for new in seen)]
        for region in old:
            found.gone.append(self._numbers.pop(region))
            del self._used[region]
        return found

    def _staged(self, arrays: Mapping[int, Any]) -> Found:
        found, end = Found({}), 0
        offsets, sizes = {}, {pointer: int(array.nbytes) for pointer, array in arrays.items()}
        for pointer, size in sizes.items():
            offsets[pointer] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if self._staging is None or self._staging.size < end:
            device = self._driver.region(next(iter(arrays))).device
            if self._staging is not None:
                found.gone.append(self._numbers.pop(self._staging))
                self._driver.free(self._staging)
            self._staging = self._driver.allocate(end, device)
        number = self._number(self._staging, found)
        for pointer, size in sizes.items():
            self._driver.copy(self._staging.base + offsets[pointer], pointer, size)
            found.places[pointer] = (number, offsets[pointer])
        return found

    def _number(self, region: Region, found: Found) -> int:
        if region not in self._numbers:
            found.new[self._next] = (region, self._driver.export(region))
            self._numbers[region] = self._next
            self._next += 1
        return self._numbers[region]

    def close(self) -> None:
        if self._staging is not None:
            self._driver.free(self._staging)
            self._staging = None


def _overlap(a: Region, b: Region) -> bool:
    return a.base < b.base + b.size and b.base < a.base + a.size
