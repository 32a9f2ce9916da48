"""The receiving half of an update between devices, for an engine whose weights are JAX arrays; the counterpart of
`device_outbox.py`.

The pieces of a new version are copied into new arrays when they arrive, while the engine generates with the old ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from slipstream.tensors.boxes import full_box, shape_of, slices
from slipstream.types import Destinations, Offer, Parameter, StageReport
from slipstream.weights.plan import Move, Plan
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.device import LOCAL, DeviceReceiver
from slipstream.weights.transports.device_copy import CopyForm, CopyProgram, LocalReceiver
from slipstream.weights.update.transfer import EngineInbox, IncomingUpdate


class DeviceInbox(EngineInbox):
    """Its methods are those of `Inbox`."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        dtype: str,
        name: str,
        devices: Sequence[jax.Device],
        shardings: Mapping[str, Sharding],
    ) -> None:
        """`devices` are those of the ranks. `shardings` are those of the engine's arrays by parameter: whole parameters on a
        single device arrive in them."""
        super().__init__(parameters, dtype, name)
        self._devices = devices
        self._shardings = shardings if len(devices) == 1 else {}
        self._own = {(p.name, p.rank): p for p in self._parameters}
        self._receivers: list[DeviceReceiver] = []
        self._links: tuple[tuple[bytes, ...], ...] = ()
        self._joins: dict[object, Callable[[list[list[jax.Array]]], list[jax.Array]]] = {}
        """The program that makes parameters from several pieces, for the parameters of the last update."""

    def begin(self, serving: int, version: int, offer: Offer) -> Destinations:
        with self._lock:
            plan = self._admit(serving, version, offer)
            if offer.fresh or plan is not self._plan or offer.transport != self._transport or not self._receivers:
                self._connect(plan, offer.transport)
            self._plan, self._transport = plan, offer.transport
            # Checksums come with the pieces, and are compared before the pieces are confirmed.
            self._update = IncomingUpdate(version, plan, hashed=False)
            for receiver in self._receivers:
                receiver.expect(version)
            return Destinations(self._links, b"")

    def _connect(self, plan: Plan, transport: str) -> None:
        self._close_receivers()
        links = []
        for rank, device in enumerate(self._devices):
            senders = sorted({move.sender for move in plan.incoming.get(rank, ())})
            program = CopyProgram(self._dtype, device, self._forms(plan, rank))
            receiver = _receiver(transport, senders, program, device)
            receiver.start()
            self._receivers.append(receiver)
            links.append(tuple(receiver.links.get(sender, b"") for sender in range(1 + max(senders, default=0))))
        self._links = tuple(links)

    def _forms(self, plan: Plan, rank: int) -> dict[int, CopyForm]:
        """The forms of pieces that are whole parameters."""
        forms = {}
        for index, move in enumerate(plan.incoming.get(rank, ())):
            shape = self._own[move.parameter, rank].shape
            if move.parameter in self._shardings and move.local_box == full_box(shape):
                forms[index] = CopyForm(shape, self._shardings[move.parameter])
        return forms

    def receive(
        self, version: int, manifests: Sequence[Sequence[bytes]]
    ) -> tuple[dict[str, list[jax.Array]], StageReport]:
        """Wait for the pieces; return the new local arrays by parameter and rank. Parameters that were not sent are left out.
        Blocks: call it in a thread."""
        with self._lock:
            update, receivers = self._current(version), self._receivers
        start = time.perf_counter()
        sums, sent, num_bytes = self._manifests(update, manifests, len(receivers))
        self._check_complete(update, sent)
        arrays: dict[str, list[jax.Array]] = {p.name: [] for p in self._parameters if p.name in sent}
        seconds = 0.0
        for rank, (receiver, expected) in enumerate(zip(receivers, sums)):
            receiver.wait(version, expected)
            moves = update.plan.incoming.get(rank, ())
            copies = {index: receiver.source(index) for index in expected}
            local = self._join(rank, {index: (moves[index], copy) for index, copy in copies.items()})
            jax.block_until_ready(local)
            seconds = time.perf_counter() - start
            receiver.done(version, float)  # they are copied, and no commit waited for that
            for name, array in local.items():
                arrays[name].append(array)
        return arrays, StageReport(num_bytes, time.perf_counter() - start, seconds)

    def _join(self, rank: int, copies: Mapping[int, tuple[Move, jax.Array]]) -> dict[str, jax.Array]:
        """Make the rank's parameters from their pieces."""
        pieces: dict[str, list[tuple[Move, jax.Array]]] = defaultdict(list)
        for move, copy in copies.values():
            pieces[move.parameter].append((move, copy))
        local, split = dict[str, jax.Array](), dict[str, list[tuple[Move, jax.Array]]]()
        for name, parts in pieces.items():
            (move, copy), shape = parts[0], self._own[name, rank].shape
            if move.local_box == full_box(shape):
                local[name] = copy if copy.shape == shape else copy.reshape(shape)
            else:
                split[name] = parts
        if split:
            targets = [(self._own[name, rank].shape, [m.local_box for m, _ in parts]) for name, parts in split.items()]
            key = rank, *((name, *(id(move) for move, _ in parts)) for name, parts in split.items())
            if key not in self._joins:
                dtype = numpy_dtype(self._dtype)

                def join(of_parameters: list[list[jax.Array]]) -> list[jax.Array]:
                    joined = []
                    for (shape, boxes), parts in zip(targets, of_parameters):
                        whole = jnp.zeros(shape, dtype)
                        for box, part in zip(boxes, parts):
                            whole = whole.at[slices(box)].set(part.reshape(shape_of(box)))
                        joined.append(whole)
                    return joined

                self._joins = {k: v for k, v in self._joins.items() if k[0] != rank} | {key: jax.jit(join)}  # type: ignore[index]
            local |= zip(split, self._joins[key]([[copy for _, copy in parts] for parts in split.values()]))
        return local

    def finish(self, version: int) -> None:
        """End a committed update."""
        with self._lock:
            self._current(version)
            self._update = None

    def _close_receivers(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers, self._links, self._joins = [], (), {}


def _receiver(transport: str, senders: Sequence[int], program: CopyProgram, device: jax.Device) -> DeviceReceiver:
    if transport == LOCAL:
        return LocalReceiver(senders, program)
    from slipstream.weights.transports.cuda.copying_receiver import CopyingReceiver
    from slipstream.weights.transports.cuda.driver import CudaDriver

    index = device.local_hardware_id or 0
    return CopyingReceiver(senders, program, CudaDriver(index), index)
