"""The receiving thread of `nccl`: what comes from one trainer rank, into an engine rank's staging image. torch only, no JAX."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import TransferError
from slipstream.weights.image import Image
from slipstream.weights.layout import run_start, shape_of, slices
from slipstream.weights.plan import Move, Plan
from slipstream.weights.transports.nccl_pair import How, Library, Pair
from slipstream.weights.transports.nccl_wire import (
    BUCKET,
    IN_FLIGHT,
    LARGE_BYTES,
    Bucket,
    Header,
    Link,
    buckets_of,
    is_large,
    lost,
    pack_indices,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
GRACE_SECONDS = 1.0
"""A lane notices by itself that nothing moves; who waits for it gives it this much longer to say so."""


@dataclass(frozen=True)
class _Layout:
    messages: list[tuple[bool, int, int]]
    """Whether into the image (else into the buffer), start there, bytes."""
    copies: list[tuple[int, int, int]]
    """A move's index, start in the buffer, bytes."""
    buffered: int


class Lane:
    """What comes from one trainer rank, received by a thread that owns the communicator."""

    def __init__(
        self,
        sender: int,
        rank: int,
        ordinal: int,
        plan: Plan,
        image: Image,
        staging: torch.Tensor,
        how: How,
        deadline: float,
        library: Library,
    ) -> None:
        import torch

        moves = plan.stream(sender, rank)
        self._moves, self._plan, self._image, self._staging = moves, plan, image, staging
        self._ordinal, self._how, self._deadline, self._library = ordinal, how, deadline, library
        self._peer = f"trainer rank {sender}"
        starts = {index: _start_in(image, move) for index, move in moves.items()}
        self._places = {index: start for index, start in starts.items() if start is not None}
        """Where the moves begin that land in one run of memory, in bytes."""
        # Memory is made here, and not when it is needed: allocating may wait for the device, on which another lane waits.
        self._header = torch.empty(Header.num_bytes(len(moves)), dtype=torch.uint8, device=staging.device)
        self._buffer = torch.empty(self._most_staged(), dtype=torch.uint8, device=staging.device)
        settle(staging.device)
        self._unique_id = library.new_id()
        dense = pack_indices(self._places.keys(), moves)
        self.link = Link(self._unique_id, library.version(), how, plan.fingerprint, dense).pack()
        self._versions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._expected = self._arrived = -1
        self._sent: frozenset[int] = frozenset()
        self._steps, self._error, self._quiet = 0, "", True
        self._thread: threading.Thread | None = None
        self.seconds = 0.0
        """From the last update's header to its last byte."""

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"slipstream-nccl {self._peer}", daemon=True)
            self._thread.start()

    def expect(self, version: int) -> None:
        with self._changed:
            if self._error:
                raise TransferError(self._error)
            self._expected = version
        self._versions.put(version)

    def check(self, version: int, expected: set[int], until: float = math.inf) -> bool:
        """Waits until the version is here, and compares what came with what was announced. False if it is not here by
        then."""
        with self._changed:
            if self._expected != version:
                raise TransferError(f"nccl: version {version} of {self._peer} was not expected ({self._expected} was)")
            seen, since = -1, time.monotonic()
            while self._arrived != version:
                if self._error:
                    raise TransferError(self._error)
                if self._steps != seen:
                    seen, since = self._steps, time.monotonic()
                if time.monotonic() - since > self._deadline + GRACE_SECONDS:
                    raise TransferError(
                        f"nccl: version {version} of {self._peer} did not come; nothing moved for {self._deadline:g} s"
                    )
                if time.monotonic() >= until:
                    return False
                self._changed.wait(min(0.2, until - time.monotonic()))
            if self._sent != expected:
                missing, more = sorted(expected - self._sent), sorted(self._sent - expected)
                raise TransferError(
                    f"nccl: of version {version}, {self._peer} sent other moves than it announced: {len(missing)} are missing "
                    f"({missing[:4]}), {len(more)} are too many ({more[:4]})"
                )
            return True

    def halt(self) -> None:
        self._stop.set()
        self._versions.put(None)

    def ended(self, timeout: float) -> bool:
        """Whether it is certain that nothing is written any more."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._quiet and (self._thread is None or not self._thread.is_alive())

    def _serve(self) -> None:
        import torch

        pair: Pair | None = None
        error = "closed"
        try:
            pair = self._library.pair(
                self._unique_id, 1, self._ordinal, self._how, self._peer, self._deadline, self._stop
            )
            self._step()
            while (version := self._versions.get()) is not None:
                with torch.inference_mode(), _on_stream(pair, self._staging.device):
                    sent = self._receive(pair, version)
                with self._changed:
                    self._arrived, self._sent = version, sent
                self._step()
        except TransferError as found:
            error = str(found)
        except Exception as found:  # torch's errors have many classes; whoever waits has to know in any case
            error = f"nccl: receiving from {self._peer} failed: {type(found).__name__}: {found}"
        finally:
            self._quiet = pair is None or pair.close()
            if not self._quiet:
                lost.append((self._staging, self._buffer, self._header))
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _receive(self, pair: Pair, version: int) -> frozenset[int]:
        with pair.group(f"receiving the header of version {version}"):
            pair.recv(self._header.data_ptr(), self._header.numel())
        pair.wait(pair.mark(), f"receiving the header of version {version}")
        header = Header.unpack(self._header.cpu().numpy().tobytes(), self._moves, self._peer)
        if header.version != version:
            raise TransferError(
                f"nccl: {self._peer} sends version {header.version}, version {version} is under way; an update that failed "
                "needs new links on both sides"
            )
        self._step()
        start = time.perf_counter()
        buckets = buckets_of(sizes_of(self._plan, self._moves, header.sent), header.direct, header.limit)
        layouts = [self._layout(bucket) for bucket in buckets]
        if (most := max((layout.buffered for layout in layouts), default=0)) > self._buffer.numel():
            self._buffer = self._buffer.new_empty(most)  # the sender's buckets are larger than ours
        in_flight: deque[tuple[str, Any]] = deque()
        for number, layout in enumerate(layouts, 1):
            if len(in_flight) == IN_FLIGHT:
                self._landed(pair, in_flight)
            what = f"receiving bucket {number} of {len(buckets)} of version {version}"
            self._take(pair, layout, what)
            in_flight.append((what, pair.mark()))
        while in_flight:
            self._landed(pair, in_flight)
        self.seconds = time.perf_counter() - start
        return header.sent

    def _layout(self, bucket: Bucket) -> _Layout:
        """Where the messages of a bucket go: straight to their places, or into the buffer first."""
        sizes = sizes_of(self._plan, self._moves, (*bucket.alone, *bucket.together))
        messages: list[tuple[bool, int, int]] = []
        copies: list[tuple[int, int, int]] = []
        end = 0
        for index in bucket.alone:
            if index in self._places:
                messages.append((True, self._places[index], sizes[index]))
            else:
                messages.append((False, end, sizes[index]))
                copies.append((index, end, sizes[index]))
                end += _aligned(sizes[index])
        if bucket.together:
            messages.append((False, end, sum(sizes[index] for index in bucket.together)))
            for index in bucket.together:
                copies.append((index, end, sizes[index]))
                end += sizes[index]
        return _Layout(messages, copies, end)

    def _take(self, pair: Pair, layout: _Layout, what: str) -> None:
        """Posts a bucket. The copies out of the buffer are in the same stream, so the next bucket can use it at once."""
        with pair.group(what):
            for straight, start, size in layout.messages:
                memory = self._staging if straight else self._buffer
                pair.recv(memory.data_ptr() + start, size)
        for index, start, size in layout.copies:
            self._put(index, self._buffer[start : start + size])

    def _put(self, index: int, data: torch.Tensor) -> None:
        import torch

        move = self._moves[index]
        place = view_of(self._staging, self._image, move.parameter, self._plan.dtype)[slices(move.local_box)]
        place.copy_(data.view(getattr(torch, self._plan.dtype)).view(shape_of(move.local_box)))

    def _landed(self, pair: Pair, in_flight: deque[tuple[str, Any]]) -> None:
        what, mark = in_flight.popleft()
        pair.wait(mark, what)
        self._step()

    def _step(self) -> None:
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def _most_staged(self) -> int:
        """The buffer's size for buckets of our own size: all that is small or scattered, or a bucket of it."""
        sizes = sizes_of(self._plan, self._moves, self._moves)
        staged = [_aligned(n) for i, n in sizes.items() if i not in self._places or not is_large(n, BUCKET)]
        return max(min(sum(staged), BUCKET + ALIGNMENT * (BUCKET // LARGE_BYTES)), max(staged, default=0))


def view_of(staging: torch.Tensor, image: Image, parameter: str, dtype: str) -> torch.Tensor:
    """`Image.view` for torch."""
    import torch

    offset, shape = image.places[parameter]
    size = int(np.prod(shape, dtype=np.int64)) * image.dtype.itemsize
    return staging[offset : offset + size].view(getattr(torch, dtype)).view(shape)


def _start_in(image: Image, move: Move) -> int | None:
    offset, shape = image.places[move.parameter]
    start = run_start(move.local_box, shape)
    return None if start is None else offset + start * image.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def settle(device: torch.device) -> None:
    """What torch was asked to do with new memory is done: NCCL's streams do not wait for torch's."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on_stream(pair: Pair, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    import torch

    if not pair.stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pair.stream, device=device))
