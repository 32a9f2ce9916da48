"""The receiving thread of the `nccl` transport, one per trainer rank, into a staging image. torch only, no JAX."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import ChecksumMismatch, TransferError, WeightsError
from slipstream.tensors.boxes import contiguous_start, slices
from slipstream.weights.device_checksum import torch_checksums
from slipstream.weights.plan import Move, Plan
from slipstream.weights.rank_image import ALIGNMENT, RankImage, align_up
from slipstream.weights.transports.contract import StallTimer
from slipstream.weights.transports.nccl.communicator import Nccl4py, NcclPair, Primitive
from slipstream.weights.transports.nccl.wire_format import (
    BUCKET_BYTES,
    LARGE_BYTES,
    MAX_IN_FLIGHT,
    Bucket,
    NcclLink,
    Seat,
    UpdateHeader,
    buckets_of,
    is_large,
    leaked_memory,
    pack_indices,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

GRACE_SECONDS = 1.0
"""Extra time, beyond its deadline, for the thread to report a stall with details; then `wait_for` reports it."""


@dataclass(frozen=True)
class _BucketLayout:
    messages: list[tuple[bool, int, int]]
    """For each message: whether it goes into the image (else the buffer), its offset there, its bytes."""
    copies: list[tuple[int, int, int]]
    """For each copy out of the buffer: the move's index, its offset in the buffer, its bytes."""
    buffer_bytes: int


class ReceiveThread:
    """Receives from one trainer rank in a thread that owns the communicator."""

    def __init__(
        self,
        sender: int,
        rank: int,
        ordinal: int,
        plan: Plan,
        image: RankImage,
        staging: torch.Tensor,
        primitive: Primitive,
        deadline: float,
        library: Nccl4py,
    ) -> None:
        import torch

        moves = plan.stream(sender, rank)
        self._moves, self._plan, self._image, self._staging = moves, plan, image, staging
        self._ordinal, self._primitive, self._deadline, self._library = ordinal, primitive, deadline, library
        self._peer = f"trainer rank {sender}"
        starts = {index: _start_in_image(image, move) for index, move in moves.items()}
        self._contiguous = {index: start for index, start in starts.items() if start is not None}
        """Offsets in the image, in bytes, of the moves that are contiguous there."""
        # Allocate now rather than on demand: allocation may wait for the device, where the kernels of another receive
        # thread may be waiting for their peer.
        self._header = torch.empty(UpdateHeader.num_bytes(len(moves)), dtype=torch.uint8, device=staging.device)
        self._buffer = torch.empty(self._buffer_bytes(), dtype=torch.uint8, device=staging.device)
        synchronize(staging.device)
        self._unique_id = library.new_id()
        contiguous = pack_indices(self._contiguous.keys(), moves)
        device = library.device_id(ordinal)
        link = NcclLink(self._unique_id, library.version(), primitive, plan.fingerprint, contiguous, device)
        self.link = link.pack()
        self._group: tuple[Seat, NcclPair] | None = None
        """The communicator over which the trainer rank broadcasts to replicas, this engine rank among them."""
        self._versions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stop, self._changed = threading.Event(), threading.Condition()
        self._expected = self._arrived = -1
        self._sent: frozenset[int] = frozenset()
        self._progress, self._is_quiet = 0, True
        self._error: WeightsError | None = None
        """Why the thread has ended."""
        self._thread: threading.Thread | None = None
        self.seconds = 0.0
        """Duration of the last update, from its header to its last byte."""

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"slipstream-nccl {self._peer}", daemon=True)
            self._thread.start()

    def expect(self, version: int) -> None:
        with self._changed:
            self._check_running()
            self._expected = version
        self._versions.put(version)

    def wait_for(self, version: int, expected: set[int], until: float = math.inf) -> bool:
        """Wait for a version; check that exactly the `expected` moves came. Return False if it is late (`until`)."""
        with self._changed:
            if self._expected != version:
                raise TransferError(f"nccl: expected version {self._expected} from {self._peer}, not version {version}")
            timer = StallTimer(self._deadline + GRACE_SECONDS)
            while self._arrived != version:
                self._check_running()
                if timer.is_stalled(self._progress):
                    raise TransferError(
                        f"nccl: version {version} did not arrive from {self._peer}; no progress for {self._deadline:g} s"
                    )
                if time.monotonic() >= until:
                    return False
                self._changed.wait(min(0.2, until - time.monotonic()))
            if self._sent != expected:
                missing, extra = sorted(expected - self._sent), sorted(self._sent - expected)
                raise TransferError(
                    f"nccl: the moves of version {version} that {self._peer} sent differ from those it announced: "
                    f"{len(missing)} missing ({missing[:4]}), {len(extra)} unexpected ({extra[:4]})"
                )
            return True

    def _check_running(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def stop(self) -> None:
        self._stop.set()
        self._versions.put(None)

    def join(self, timeout: float) -> bool:
        """Return whether it is certain that nothing writes to the staging image any more."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._is_quiet and (self._thread is None or not self._thread.is_alive())

    def _run(self) -> None:
        import torch

        pair: NcclPair | None = None
        ended_by: WeightsError = TransferError("closed")
        try:
            pair = self._library.pair(
                self._unique_id, 1, self._ordinal, self._primitive, self._peer, self._deadline, self._stop
            )
            self._report_progress()
            while (version := self._versions.get()) is not None:
                with torch.inference_mode(), _on_stream(pair, self._staging.device):
                    sent = self._receive(pair, version)
                with self._changed:
                    self._arrived, self._sent = version, sent
                self._report_progress()
        except WeightsError as error:
            ended_by = error
        except Exception as error:  # torch's errors share no base class, and a waiting caller must learn of all of them
            ended_by = TransferError(f"nccl: receiving from {self._peer} failed: {type(error).__name__}: {error}")
        finally:
            are_closed = [pair is None or pair.close(), self._group is None or self._group[1].close()]
            self._is_quiet = all(are_closed)
            if not self._is_quiet:
                leaked_memory.append((self._staging, self._buffer, self._header))
            with self._changed:
                self._error = ended_by
                self._changed.notify_all()

    def _receive(self, pair: NcclPair, version: int) -> frozenset[int]:
        with pair.group(f"receiving the header of version {version}"):
            pair.recv(self._header.data_ptr(), self._header.numel())
        pair.wait(pair.mark(), f"receiving the header of version {version}")
        header = UpdateHeader.unpack(self._header.cpu().numpy().tobytes(), self._moves, self._peer)
        if header.version != version:
            raise TransferError(
                f"nccl: {self._peer} sends version {header.version}, expected version {version}; after a failed update both "
                "sides need new links"
            )
        self._report_progress()
        if header.seat is not None or self._group is not None:
            pair = self._joined(header.seat) or pair
        with _on_stream(pair, self._staging.device):
            self._receive_buckets(pair, header)
            self._compare_checksums(header)
        return header.sent

    def _joined(self, seat: Seat | None) -> NcclPair | None:
        """Return the communicator that a header names. Leave the one that earlier headers named, if it is another."""
        if self._group is not None and self._group[0] != seat:
            if not self._group[1].close():  # the thread ends, and keeps the memory
                raise TransferError(f"nccl: the communicator with {self._peer} and other engines could not be aborted")
            self._group = None
        if self._group is None and seat is not None:
            where = seat.unique_id, seat.rank, self._ordinal
            joined = self._library.pair(*where, "broadcast", self._peer, self._deadline, self._stop, seat.size)
            self._group = seat, joined
            self._report_progress()
        return None if self._group is None else self._group[1]

    def _receive_buckets(self, pair: NcclPair, header: UpdateHeader) -> None:
        start = time.perf_counter()
        buckets = buckets_of(sizes_of(self._plan, self._moves, header.sent), header.direct, header.limit)
        layouts = [self._layout(bucket) for bucket in buckets]
        if (needed := max((layout.buffer_bytes for layout in layouts), default=0)) > self._buffer.numel():
            self._buffer = self._buffer.new_empty(needed)  # the sender uses larger buckets than ours
        in_flight: deque[tuple[str, Any]] = deque()
        for number, layout in enumerate(layouts, 1):
            if len(in_flight) == MAX_IN_FLIGHT:
                self._wait_for_oldest(pair, in_flight)
            what = f"receiving bucket {number} of {len(buckets)} of version {header.version}"
            self._post(pair, layout, what)
            in_flight.append((what, pair.mark()))
        while in_flight:
            self._wait_for_oldest(pair, in_flight)
        self.seconds = time.perf_counter() - start

    def _compare_checksums(self, header: UpdateHeader) -> None:
        """Read what has arrived, on the stream that it arrived on."""
        found = torch_checksums([self._place(index) for index in header.checksums])
        for (index, sent), received in zip(header.checksums.items(), found):
            if received != sent:
                raise ChecksumMismatch(
                    f"nccl: {self._moves[index].tensor} arrived from {self._peer} with checksum {received:08x}, the trainer "
                    f"sent {sent:08x}"
                )

    def _layout(self, bucket: Bucket) -> _BucketLayout:
        """Decide where each message of a bucket goes: directly into the image, or into the buffer."""
        sizes = sizes_of(self._plan, self._moves, (*bucket.alone, *bucket.together))
        messages: list[tuple[bool, int, int]] = []
        copies: list[tuple[int, int, int]] = []
        end = 0
        for index in bucket.alone:
            if index in self._contiguous:
                messages.append((True, self._contiguous[index], sizes[index]))
            else:
                messages.append((False, end, sizes[index]))
                copies.append((index, end, sizes[index]))
                end += align_up(sizes[index])
        if bucket.together:
            messages.append((False, end, sum(sizes[index] for index in bucket.together)))
            for index in bucket.together:
                copies.append((index, end, sizes[index]))
                end += sizes[index]
        return _BucketLayout(messages, copies, end)

    def _post(self, pair: NcclPair, layout: _BucketLayout, what: str) -> None:
        """Post a bucket. Copies out of the buffer are in the same stream, so the next bucket can reuse it at once."""
        with pair.group(what):
            for into_image, start, size in layout.messages:
                memory = self._staging if into_image else self._buffer
                pair.recv(memory.data_ptr() + start, size)
        for index, start, size in layout.copies:
            self._copy_to_image(index, self._buffer[start : start + size])

    def _copy_to_image(self, index: int, data: torch.Tensor) -> None:
        import torch

        place = self._place(index)
        place.copy_(data.view(getattr(torch, self._plan.dtype)).view(place.shape))

    def _place(self, index: int) -> torch.Tensor:
        """Return where a move goes in the image."""
        move = self._moves[index]
        return torch_view(self._staging, self._image, move.parameter, self._plan.dtype)[slices(move.local_box)]

    def _wait_for_oldest(self, pair: NcclPair, in_flight: deque[tuple[str, Any]]) -> None:
        what, mark = in_flight.popleft()
        pair.wait(mark, what)
        self._report_progress()

    def _report_progress(self) -> None:
        with self._changed:
            self._progress += 1
            self._changed.notify_all()

    def _buffer_bytes(self) -> int:
        """Return the buffer size for buckets of `BUCKET_BYTES`: everything that is small or not contiguous in the
        image, but at most one bucket of it."""
        sizes = sizes_of(self._plan, self._moves, self._moves)
        staged = [
            align_up(size)
            for index, size in sizes.items()
            if index not in self._contiguous or not is_large(size, BUCKET_BYTES)
        ]
        bucket = BUCKET_BYTES + ALIGNMENT * (BUCKET_BYTES // LARGE_BYTES)
        return max(min(sum(staged), bucket), max(staged, default=0))


def torch_view(staging: torch.Tensor, image: RankImage, parameter: str, dtype: str) -> torch.Tensor:
    """`RankImage.view` for torch."""
    import torch

    return staging[image.byte_range(parameter)].view(getattr(torch, dtype)).view(image.places[parameter][1])


def _start_in_image(image: RankImage, move: Move) -> int | None:
    offset, shape = image.places[move.parameter]
    start = contiguous_start(move.local_box, shape)
    return None if start is None else offset + start * image.dtype.itemsize


def synchronize(device: torch.device) -> None:
    """Wait for torch's work on new memory: NCCL's streams do not wait for torch's."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on_stream(pair: NcclPair, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    import torch

    if not pair.stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pair.stream, device=device))
