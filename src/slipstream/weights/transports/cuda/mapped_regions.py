"""A trainer rank's regions as an engine rank sees them: mapped memory, and views of the pieces in it.

The counterpart of `exported_regions.py`. Not thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from slipstream.errors import TransferError
from slipstream.tensors.strided import Strided
from slipstream.weights.plan import DTYPE_BYTES
from slipstream.weights.transports.cuda.driver import CudaDriver
from slipstream.weights.transports.cuda.wire_format import Announcement

_MAX_CACHED_VIEWS = 8
"""Views kept per piece, and versions whose pieces are kept."""


class MappedRegion(Protocol):
    """Mapped memory in the reader's framework."""

    def view(self, dtype: str, geometry: Strided, offset: int) -> Any:
        """Return a view of an array that starts `offset` bytes into the region."""


class MappedRegions:
    """`wrap` turns an address and a size into a `MappedRegion`."""

    def __init__(self, driver: CudaDriver, wrap: Callable[[int, int], MappedRegion]) -> None:
        self._driver, self._wrap = driver, wrap
        self._regions: dict[int, tuple[int, int, MappedRegion]] = {}
        """Address, size and memory, by number."""
        self._layouts: dict[int, tuple[str, Strided]] = {}
        """Dtype and geometry, by index."""
        self._views: dict[tuple[int, int, int], Any] = {}
        """Views by row. A trainer's arrays keep returning to the same few places."""
        self._versions: dict[bytes, Mapping[int, Any]] = {}
        """All views of a version, by its packed rows."""

    def apply(self, announcement: Announcement, fds: list[int]) -> None:
        """Unmap and map regions, and store layouts. File descriptors are removed from `fds` as they are used."""
        for number in announcement.removed:
            address, size, _ = self._regions.pop(number)
            self._driver.unmap(address, size)
        if announcement.removed or announcement.layouts:
            self._drop_views()
        without_handle = sum(len(region) == 2 for region in announcement.regions)
        if without_handle != len(fds):
            raise TransferError(f"{without_handle} regions were announced with {len(fds)} file descriptors")
        for number, size, *handle in announcement.regions:
            address = self._driver.map(bytes.fromhex(handle[0]) if handle else fds.pop(0), size)
            self._regions[number] = (address, size, self._wrap(address, size))
        for index, dtype, offset, shape, strides in announcement.layouts:
            if dtype not in DTYPE_BYTES or min((offset, *shape, *strides), default=0) < 0:
                raise TransferError(f"piece {index} has dtype {dtype!r}, offset {offset}, strides {strides}")
            self._layouts[index] = dtype, Strided(tuple(shape), tuple(strides), offset)

    def pieces(self, rows: np.ndarray) -> Mapping[int, Any]:
        """Return views by index. For the same rows it is the same mapping object, while it is cached."""
        key = rows.tobytes()
        if (pieces := self._versions.get(key)) is None:
            if len(self._views) > _MAX_CACHED_VIEWS * len(self._layouts) or len(self._versions) > _MAX_CACHED_VIEWS:
                self._drop_views()
            pieces = self._versions[key] = {row[0]: self._view(*row) for row in rows.tolist()}
        return pieces

    def _view(self, index: int, number: int, offset: int) -> Any:
        key = index, number, offset
        if key in self._views:
            return self._views[key]
        if index not in self._layouts:
            raise TransferError(f"the layout of piece {index} was not announced")
        dtype, geometry = self._layouts[index]
        if number not in self._regions:
            raise TransferError(f"piece {index} is in region {number}, which was not announced")
        _, size, region = self._regions[number]
        itemsize = DTYPE_BYTES[dtype]
        if not 0 <= offset <= offset + geometry.extent * itemsize <= size or offset % itemsize:
            raise TransferError(
                f"piece {index} is not inside its region of {size} bytes, or not aligned: offset {offset}, {geometry}"
            )
        view = self._views[key] = region.view(dtype, geometry, offset)
        return view

    def close(self) -> None:
        """Unmap everything."""
        self._drop_views()
        for address, size, _ in self._regions.values():
            self._driver.unmap(address, size)
        self._regions = {}

    def _drop_views(self) -> None:
        self._views, self._versions = {}, {}
