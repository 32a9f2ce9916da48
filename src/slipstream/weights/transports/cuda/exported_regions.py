"""The trainer's device memory as a reader knows it: numbered regions, each exported once.

If memory cannot be exported, arrays are first copied into a staging buffer that can be. `mapped_regions.py` is the
reader's counterpart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.weights.rank_image import align_up
from slipstream.weights.sources.torch_shards import is_torch
from slipstream.weights.transports.cuda.driver import CudaDriver, NotExportable, Region

IDLE_SYNCS = 2
"""A region that held no array in this many syncs is withdrawn from the reader, and exported again if needed."""


@dataclass
class RegionUpdate:
    """The places of arrays in numbered regions, and how the set of regions changed."""

    places: dict[int, tuple[int, int]]
    """By pointer: the region's number and the offset in it."""
    new: dict[int, tuple[Region, int | bytes]] = field(default_factory=dict)
    """New regions by number, with file descriptors to pass on and close, or CUDA IPC handles."""
    removed: list[int] = field(default_factory=list)
    """Numbers of withdrawn regions."""

    def close(self) -> None:
        """Close the file descriptors."""
        for _, exported in self.new.values():
            if isinstance(exported, int):
                os.close(exported)


class ExportedRegions:
    """The regions that one reader knows."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._numbers: dict[Region, int] = {}
        self._last_used: dict[Region, int] = {}
        """The number of the last sync that used a region."""
        self._next_number = self._sync = 0
        self._staging: Region | None = None
        self.is_staged = False

    def update(self, arrays: Mapping[int, Any]) -> RegionUpdate:
        """Export the memory of the arrays, given by pointer."""
        if not self.is_staged:
            try:
                return self._in_place(arrays)
            except NotExportable:
                self.is_staged = True
        return self._staged(arrays)

    def _in_place(self, arrays: Mapping[int, Any]) -> RegionUpdate:
        update, used = RegionUpdate({}), list[Region]()
        base = end = number = 0
        self._sync += 1
        try:
            for pointer in sorted(arrays):
                # Sorted, so that the arrays of a region are adjacent. Ask the driver in every sync: an allocator may have
                # freed a region and received other memory at the same addresses.
                if not base <= pointer < end:
                    used.append(region := self._driver.region(pointer))
                    base, end, number = region.base, region.base + region.size, self._number(region, update)
                # JAX's regions hold whole arrays. Torch's expandable segments are many small allocations.
                if is_torch(array := arrays[pointer]) and pointer + array.nbytes > end:
                    raise NotExportable("the array spans several allocations")
                update.places[pointer] = (number, pointer - base)
        except NotExportable:
            for region, _ in update.new.values():
                del self._numbers[region]
            update.close()
            raise
        self._last_used |= dict.fromkeys(used, self._sync)
        # Memory that a reader has mapped stays allocated even after the trainer's allocator has freed it.
        for region in [r for r in self._numbers if r not in used]:
            if self._sync - self._last_used[region] >= IDLE_SYNCS or any(_overlap(region, other) for other in used):
                update.removed.append(self._numbers.pop(region))
                del self._last_used[region]
        return update

    def _staged(self, arrays: Mapping[int, Any]) -> RegionUpdate:
        update, end = RegionUpdate({}), 0
        offsets, sizes = {}, {pointer: int(array.nbytes) for pointer, array in arrays.items()}
        for pointer, size in sizes.items():
            offsets[pointer] = end
            end += align_up(size)
        if self._staging is None or self._staging.size < end:
            device = self._driver.region(next(iter(arrays))).device
            if self._staging is not None:
                update.removed.append(self._numbers.pop(self._staging))
                self._driver.free(self._staging)
            self._staging = self._driver.allocate(end, device)
        number = self._number(self._staging, update)
        for pointer, size in sizes.items():
            self._driver.copy(self._staging.base + offsets[pointer], pointer, size)
            update.places[pointer] = (number, offsets[pointer])
        return update

    def _number(self, region: Region, update: RegionUpdate) -> int:
        if region not in self._numbers:
            update.new[self._next_number] = (region, self._driver.export(region))
            self._numbers[region] = self._next_number
            self._next_number += 1
        return self._numbers[region]

    def close(self) -> None:
        if self._staging is not None:
            self._driver.free(self._staging)
            self._staging = None


def _overlap(a: Region, b: Region) -> bool:
    return a.base < b.base + b.size and b.base < a.base + a.size
