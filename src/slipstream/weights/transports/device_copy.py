"""Copies of the trainer's device arrays, made by one JAX program: cut, cast, and checksummed on the way.

- `CopyProgram` makes arrays in the engine's dtype from pieces, with checksums of what it has read.
- `LocalSender` and `LocalReceiver` are the transport `device`: trainer and engine in one process. The sender runs the program.

`cuda/copying_receiver.py` does the same for a trainer in another process."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from slipstream.errors import ChecksumMismatch, TransferError
from slipstream.weights.device_checksum import jax_checksum
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.contract import link_field, pack_link, unpack_link
from slipstream.weights.transports.device import LOCAL, DevicePiece, DeviceSender

DEADLINE_SECONDS = 30.0

MAX_PROGRAMS = 4
"""Programs that are kept, since trainers may alternate between whole and partial updates."""


class CopyForm(NamedTuple):
    shape: tuple[int, ...]
    sharding: Sharding


class CopyProgram:
    """Compiled once for the pieces of an update, which are usually the same in the next one.

    A model has hundreds of tensors, and any call for each of them takes longer than copying them all. So the program makes
    arrays that need nothing more."""

    def __init__(self, dtype: str, device: jax.Device, forms: Mapping[int, CopyForm] | None = None) -> None:
        """`dtype` and `device` are those of the copies. `forms` are the shapes and shardings that copies get, by index of
        the piece; others keep the shape of their piece."""
        self._dtype, self._device, self._forms = numpy_dtype(dtype), device, forms or {}
        self._programs: dict[object, Callable[[list[jax.Array]], tuple[list[jax.Array], jax.Array]]] = {}

    def __call__(
        self, pieces: Mapping[int, tuple[Any, Callable[[Any], Any]]], checksums: bool
    ) -> tuple[dict[int, jax.Array], jax.Array]:
        """Start copying pieces, given as arrays and how to cut each. Return the copies and their checksums, which are empty
        unless asked for."""
        cuts = [cut for _, cut in pieces.values()]
        arrays = [array for array, _ in pieces.values()]
        is_here = all(array.devices() == {self._device} for array in arrays)
        key = checksums, is_here, *pieces, *map(id, cuts)
        if key not in self._programs:
            forms = [self._forms.get(index) for index in pieces]
            shardings = [form.sharding if form else None for form in forms]

            def copy(arrays: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
                values = [cut(array) for cut, array in zip(cuts, arrays)]
                sums = [jax_checksum(value) for value in values] if checksums else []
                values = [v.reshape(form.shape) if form else v for v, form in zip(values, forms)]
                # An explicit copy: a program returns an unchanged input itself, which the trainer may donate.
                return [jnp.copy(v.astype(self._dtype)) for v in values], jnp.array(sums, jnp.uint32)

            for old in list(self._programs)[: 1 - MAX_PROGRAMS]:
                del self._programs[old]
            # `cuts` stay alive with it, and so their ids are not reused
            self._programs[key] = jax.jit(copy, out_shardings=(shardings, None)) if is_here else jax.jit(copy)
        copies, sums = self._programs[key](arrays)
        if not is_here:
            targets = [form.sharding if form else self._device for form in map(self._forms.get, pieces)]
            copies = jax.device_put(copies, targets)
        return dict(zip(pieces, copies)), sums


# --- in one process ---


class LocalReceiver:
    """See `DeviceReceiver`. `source` returns a copy, as an array on the engine rank's device."""

    seconds = 0.0

    def __init__(self, senders: Collection[int], program: CopyProgram) -> None:
        key = secrets.token_hex(8)
        self.links: Mapping[int, bytes] = dict.fromkeys(senders, pack_link(LOCAL, key=key))
        _receivers[key] = self
        self.program = program
        self._changed = threading.Condition()
        self._version, self._copies = -1, dict[int, jax.Array]()

    def start(self) -> None:
        """Do nothing: senders find this object."""

    def expect(self, version: int) -> None:
        """Do nothing: an update begins when a sender has copied its pieces."""

    def take(self, version: int, copies: Mapping[int, jax.Array]) -> None:
        with self._changed:
            if version != self._version:
                self._version, self._copies = version, {}
            self._copies |= copies
            self._changed.notify_all()

    def wait(self, version: int, indices: Collection[int], patience: float = DEADLINE_SECONDS) -> int | None:
        def is_complete() -> bool:
            return self._version == version and self._copies.keys() >= set(indices)

        with self._changed:
            if not self._changed.wait_for(is_complete, min(patience, DEADLINE_SECONDS)):
                if patience < DEADLINE_SECONDS:
                    return None
                raise TransferError(f"the trainer sent no weights of version {version} within {DEADLINE_SECONDS:g} s")
            return sum(self._copies[index].nbytes for index in indices)

    def source(self, index: int) -> jax.Array:
        return self._copies[index]

    def done(self, version: int, copied: Callable[[], float]) -> float:
        """The trainer waits for nothing: its arrays live until the program has read them."""
        self.abandon()
        return copied()

    def abandon(self) -> None:
        with self._changed:
            self._version, self._copies = -1, {}

    def close(self) -> None:
        self.abandon()


_receivers: weakref.WeakValueDictionary[str, LocalReceiver] = weakref.WeakValueDictionary()


class LocalSender(DeviceSender):
    def __init__(self, link: bytes, peer: str) -> None:
        receiver = _receivers.get(link_field(unpack_link(link), "key", str))
        if receiver is None:
            raise TransferError(f"engine {peer} is closed, or in another process")
        self._receiver, self._peer = receiver, peer
        self._started: tuple[int, dict[int, jax.Array], jax.Array] | None = None
        """The version that is being copied while the trainer computes its checksums, with copies and checksums."""

    def prepare(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        self._started = version, *self._copy(pieces, checksums=True)

    def send(self, version: int, pieces: Mapping[int, DevicePiece]) -> None:
        started, self._started = self._started, None
        if started is None or started[0] != version:
            expected = [piece.checksum for piece in pieces.values()]
            started = version, *self._copy(pieces, checksums=None not in expected)
        _, copies, sums = started
        for (index, piece), found in zip(pieces.items(), np.asarray(sums).tolist()):
            if piece.checksum is not None and found != piece.checksum:
                raise ChecksumMismatch(
                    f"engine {self._peer}: piece {index} was read with checksum {found:08x}, the trainer has "
                    f"{piece.checksum:08x}; version {version} is not used"
                )
        self._receiver.take(version, copies)

    def _copy(self, pieces: Mapping[int, DevicePiece], checksums: bool) -> tuple[dict[int, jax.Array], jax.Array]:
        return self._receiver.program({i: (piece.array, piece.slice) for i, piece in pieces.items()}, checksums)
