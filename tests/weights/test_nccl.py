"""Both halves of the `nccl` transport, over a fake NCCL. (`tests/gpu` uses the real one.)"""

import base64
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ChecksumMismatch, MappingError, TransferError
from slipstream.tensors.boxes import contiguous_start, slices
from slipstream.weights.transports.nccl import receive_thread, transport
from slipstream.weights.transports.nccl.transport import NcclReceiver, NcclSender
from slipstream.weights.transports.nccl.wire_format import (
    Bucket,
    UpdateHeader,
    buckets_of,
    is_large,
    pack_indices,
    unpack_indices,
)
from tests.test_architecture import loaded_by
from tests.weights.fake_nccl import FakeNccl
from tests.weights.nccl_by_hand import Model, Piece, same, staged
from tests.weights.test_device_checksum import as_torch

SMALL = 8 << 10  # with buckets of this size, some moves of the tiny model are large, and some fill a bucket
SOON = 2.0  # the deadline in tests that wait for it


@pytest.fixture
def nccl(tmp_path):
    return FakeNccl(tmp_path)


class Fleet:
    """Every trainer rank connected to every engine rank, in one process."""

    def __init__(self, model, nccl, tp=1, trainers=1, deadline=20.0, bucket=SMALL, primitive="send", device=None):
        self.model, self.tp, self.trainers, self.nccl = model, tp, trainers, nccl
        self.deadline, self.bucket, self.device = deadline, bucket, device
        self.receivers = [
            NcclReceiver(model.plan, rank, range(trainers), -1, model.parameters, deadline, primitive, nccl)
            for rank in range(tp)
        ]
        self.senders = {}
        self.connect()

    def connect(self):
        for sender in self.senders.values():
            sender.close()
        for rank, receiver in enumerate(self.receivers):
            receiver.start()
            for trainer, link in receiver.links.items():
                moves = self.model.plan.stream(trainer, rank)
                self.senders[trainer, rank] = NcclSender(
                    link,
                    self.model.plan,
                    moves,
                    f"engine 'e0' rank {rank}",
                    self.bucket,
                    self.deadline,
                    self.device,
                    library=self.nccl,
                )

    def update(self, version, weights, only=lambda move: True, convert=lambda pieces: pieces):
        for receiver in self.receivers:
            receiver.expect(version)
        indices = [set() for _ in self.receivers]
        with ThreadPoolExecutor(len(self.senders)) as pool:
            sends = []
            for (trainer, rank), sender in self.senders.items():
                pieces = convert(self.model.pieces(weights, trainer, rank, only))
                indices[rank] |= pieces.keys()
                sends.append(pool.submit(sender.send, version, pieces))
            num_bytes = sum(receiver.wait(version, indices[rank]) for rank, receiver in enumerate(self.receivers))
            for send in sends:
                send.result()
        return num_bytes

    def close(self):
        for half in (*self.senders.values(), *self.receivers):
            half.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# --- wire format ---


def test_buckets_by_hand():
    sizes = {0: 10, 1: 640, 2: 20, 5: 600, 6: 64, 7: 5}
    # Staged bytes fill a bucket of 640; moves of 160 bytes and more are messages of their own.
    assert buckets_of(sizes, set(), 640) == [
        Bucket((), (0,)),
        Bucket((1,), ()),
        Bucket((5,), (2,)),
        Bucket((), (6, 7)),
    ]
    assert buckets_of(sizes, {1, 5}, 640) == [Bucket((1, 5), (0, 2, 6, 7))]
    assert buckets_of({3: 5_000}, set(), 640) == [Bucket((3,), ())]
    assert buckets_of(dict.fromkeys(range(40), 640), set(range(40)), 640) == [
        Bucket(tuple(range(16)), ()), Bucket(tuple(range(16, 32)), ()), Bucket(tuple(range(32, 40)), ()),
    ]  # fmt: skip
    assert buckets_of({}, set(), 640) == []


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 3000)), st.sets(st.integers(0, 50)), st.integers(1, 1000))
def test_buckets_hold_every_move_once_and_stay_in_bounds(sizes, direct, limit):
    buckets = buckets_of(sizes, direct, limit)
    assert sorted(i for b in buckets for i in (*b.alone, *b.together)) == sorted(sizes)
    for bucket in buckets:
        members = (*bucket.alone, *bucket.together)
        kept = [sizes[i] for i in members if not (i in direct and is_large(sizes[i], limit))]
        assert members and (sum(kept) <= limit or len(members) == 1 or kept == [max(kept)])
        assert all(is_large(sizes[i], limit) for i in bucket.alone)
        assert not any(is_large(sizes[i], limit) for i in bucket.together)


@given(st.sets(st.integers(0, 40)), st.data())
def test_a_header_survives_packing(stream, data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(stream)))) if stream else set()
    assert unpack_indices(pack_indices(chosen, stream), stream) == chosen
    checksums = data.draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(chosen, st.integers(0, 2**32 - 1))))
    header = UpdateHeader(7, 1024, frozenset(chosen), frozenset(sorted(chosen)[:1]), checksums)
    packed = header.pack(stream)
    assert len(packed) == UpdateHeader.num_bytes(len(stream))
    assert UpdateHeader.unpack(packed, stream, "trainer rank 0") == header


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=3))
def test_contiguous_start_agrees_with_numpy(dims):
    box = tuple((before, before + size) for before, size, _ in dims)
    shape = tuple(before + size + after for before, size, after in dims)
    numbers = np.arange(np.prod(shape)).reshape(shape)[slices(box)].reshape(-1)
    is_run = np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers)))
    assert contiguous_start(box, shape) == (numbers[0] if is_run else None)


# --- transfers ---


@pytest.mark.parametrize("primitive", ["send", "broadcast"])
@pytest.mark.parametrize(
    ("tp", "trainers", "source", "dtype"),
    [
        (1, 1, "bfloat16", "bfloat16"),
        (1, 1, "float32", "bfloat16"),
        (2, 1, "float32", "float32"),
        (2, 2, "float32", "bfloat16"),
        (2, 2, "bfloat16", "float16"),
        (1, 3, "float16", "float32"),
    ],
)
def test_every_rank_receives_the_exact_bits(nccl, tp, trainers, source, dtype, primitive):
    model = Model(tp, trainers, dtype, source)
    with Fleet(model, nccl, tp, trainers, primitive=primitive) as fleet:
        for version in range(3):
            weights = model.weights(version)
            assert fleet.update(version, weights) == model.plan.num_bytes
            for rank, receiver in enumerate(fleet.receivers):
                same(staged(receiver, model, rank), model.expected(weights, rank))
    assert {pair.primitive for pair in nccl.pairs} == {primitive}
    assert all(pair.closed for pair in nccl.pairs)


@pytest.mark.parametrize("bucket", [1, 100, 4096, 64 << 20])
def test_buckets_of_any_size(nccl, bucket):
    model, weights = Model(2, 1, most=3000), None
    with Fleet(model, nccl, tp=2, bucket=bucket) as fleet:
        for version in range(2):
            weights = model.weights(version)
            fleet.update(version, weights)
        for rank, receiver in enumerate(fleet.receivers):
            same(staged(receiver, model, rank), model.expected(weights, rank))


def test_a_partial_update_leaves_other_parameters_unchanged(nccl):
    model = Model(2, 2)
    first, second = model.weights(1), model.weights(2)

    def norms(move):
        return "norm" in move.tensor

    with Fleet(model, nccl, 2, 2) as fleet:
        fleet.update(1, first)
        few = fleet.update(2, second, norms)
        assert 0 < few < model.plan.num_bytes / 4
        for rank, receiver in enumerate(fleet.receivers):
            same(staged(receiver, model, rank), model.expected(second, rank, model.expected(first, rank), norms))
        assert fleet.update(3, second, lambda move: False) == 0
        fleet.update(4, second)
        same(staged(fleet.receivers[1], model, 1), model.expected(second, 1))


def test_a_trainer_rank_without_moves(nccl):
    model = Model()
    receiver = receiver_of(model, nccl, 20.0, (0, 7))
    receiver.start()
    senders = {trainer: sender_of(model, link, nccl, 20.0, trainer) for trainer, link in receiver.links.items()}
    weights = model.weights(0)
    receiver.expect(0)
    senders[7].send(0, {})
    pieces = model.pieces(weights, 0, 0)
    senders[0].send(0, pieces)
    receiver.wait(0, pieces.keys())
    same(staged(receiver, model, 0), model.expected(weights, 0))
    for half in (*senders.values(), receiver):
        half.close()
        half.close()


def test_contiguous_pieces_are_sent_in_place(nccl, monkeypatch):
    """bfloat16 to bfloat16 on one rank: all large moves, also bands of rows, are sent without packing."""
    from slipstream.weights.transports.nccl import packing

    seen = []
    real = packing.Packer._compile
    monkeypatch.setattr(packing.Packer, "_compile", lambda self, program: seen.append(program) or real(self, program))
    model = Model(1, 1, "bfloat16", "bfloat16", most=3000)
    weights = model.weights(0)
    with Fleet(model, nccl) as fleet:
        fleet.update(0, weights)
        same(staged(fleet.receivers[0], model, 0), model.expected(weights, 0))
    assert seen and all(program.num_alone == 0 for program in seen)


def test_pieces_on_another_device_are_copied_first(nccl):
    model = Model(2)
    weights = model.weights(0)
    with Fleet(model, nccl, 2) as fleet:
        for receiver in fleet.receivers:
            receiver.expect(0)
        for rank, receiver in enumerate(fleet.receivers):
            pieces = model.pieces(weights, 0, rank, device=jax.devices()[1])
            here = model.pieces(weights, 0, rank, only=lambda move: "mlp" in move.tensor)
            fleet.senders[0, rank].send(0, pieces | here)
            receiver.wait(0, pieces.keys())
            same(staged(receiver, model, rank), model.expected(weights, rank))


@pytest.mark.parametrize(("source", "dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_torch_tensors_arrive_like_jax_arrays(nccl, source, dtype):
    """Shards of two trainer ranks, some of which are sent in place and some cast first."""
    model = Model(tp=2, trainers=2, source=source, dtype=dtype)
    fleet = Fleet(model, nccl, tp=2, trainers=2, device=torch.device("cpu"))
    for version in range(2):
        weights = model.weights(version)
        assert fleet.update(version, weights, convert=torch_pieces) == model.plan.num_bytes
        for rank, receiver in enumerate(fleet.receivers):
            same(staged(receiver, model, rank), model.expected(weights, rank))
    piece = next(iter(torch_pieces(model.pieces(weights, 0, 0)).items()))
    with pytest.raises(MappingError, match="the plan says"):
        fleet.senders[0, 0].send(2, {piece[0]: dataclasses.replace(piece[1], box=((0, 1),))})


def torch_pieces(pieces):
    return {
        index: dataclasses.replace(piece, array=as_torch(np.array(piece.array)).requires_grad_())
        for index, piece in pieces.items()
    }


def test_transposed_and_reshaped_pieces(nccl):
    """A slice is any traceable function; only contiguous pieces are sent in place."""
    model = Model(1, 1, "float32", "float32")
    weights = model.weights(0)

    class Transposed(Piece):
        def slice(self, array):
            return array.T[slices(self.box)]

    class Flat(Piece):
        def slice(self, array):
            return array.reshape(-1)[None][0].reshape(self.box)

    pieces = model.pieces(weights, 0, 0)
    for number, (index, piece) in enumerate(pieces.items()):
        if piece.array.ndim == 2:
            transposed = Transposed(jnp.asarray(np.asarray(piece.array).T.copy()), piece.box, piece.checksum)
            whole = piece.array.size == np.prod([b - a for a, b in piece.box])
            flat = Flat(piece.array, piece.array.shape, piece.checksum)
            pieces[index] = flat if number % 2 and whole else transposed
    with Fleet(model, nccl) as fleet:
        fleet.receivers[0].expect(0)
        fleet.senders[0, 0].send(0, pieces)
        fleet.receivers[0].wait(0, pieces.keys())
        same(staged(fleet.receivers[0], model, 0), model.expected(weights, 0))


def test_programs_are_compiled_once_and_keep_no_array(nccl, monkeypatch):
    from slipstream.weights.transports.nccl import packing

    compiled = []
    real = packing.Packer._compile
    monkeypatch.setattr(packing.Packer, "_compile", lambda *a: compiled.append(1) or real(*a))
    model = Model(2)
    with Fleet(model, nccl, 2) as fleet:
        fleet.update(0, model.weights(0))
        count = len(compiled)
        weights, gone = model.weights(1), []
        for rank, receiver in enumerate(fleet.receivers):
            receiver.expect(1)
            pieces = model.pieces(weights, 0, rank)
            gone += [weakref.ref(piece.array) for piece in pieces.values()]
            fleet.senders[0, rank].send(1, pieces)
            receiver.wait(1, pieces.keys())
        del pieces
        gc.collect()
        assert len(compiled) == count
        assert not any(ref() for ref in gone)


def test_at_most_two_buckets_are_in_flight(nccl):
    model = Model()
    with Fleet(model, nccl, bucket=2048) as fleet:
        fleet.update(0, model.weights(0))
    sender = next(pair for pair in nccl.pairs if pair.rank == 0)
    marked = waited = most = 0
    for what, value in sender.log:
        marked += what == "mark"
        waited = max(waited, value) if what == "wait" else waited
        most = max(most, marked - waited)
    assert marked > 5 and most == 2


def test_nothing_is_posted_between_updates(nccl):
    model = Model()
    posted = []
    nccl.before_group = lambda pair, what: posted.append(pair.rank)
    with Fleet(model, nccl) as fleet:
        assert posted == []
        fleet.update(0, model.weights(0))
        count = len(posted)
        fleet.update(1, model.weights(1))
        assert len(posted) == 2 * count


# --- failures ---


def receiver_of(model, nccl, deadline=20.0, senders=(0,)):
    return NcclReceiver(model.plan, 0, senders, -1, model.parameters, deadline, library=nccl)


def sender_of(model, link, nccl, deadline=20.0, trainer=0, **over):
    moves = model.plan.stream(trainer, 0)
    return NcclSender(link, model.plan, moves, "engine 'e0' rank 0", SMALL, deadline, library=nccl, **over)


def test_bytes_that_are_not_the_trainers_are_found(nccl):
    model = Model(2)
    with Fleet(model, nccl, 2) as fleet:
        fleet.update(1, model.weights(1))
        index, victim = next((i, m) for i, m in model.plan.stream(0, 1).items() if "down_proj" in m.tensor)
        pieces = model.pieces(model.weights(2), 0, 1)
        pieces[index] = dataclasses.replace(pieces[index], checksum=pieces[index].checksum ^ 1)
        receiver = fleet.receivers[1]
        receiver.expect(2)
        fleet.senders[0, 1].send(2, pieces)
        with pytest.raises(ChecksumMismatch, match=f"nccl: {victim.tensor} arrived from trainer rank 0 with checksum"):
            receiver.wait(2, pieces.keys())
        for other in fleet.receivers:
            other.abandon()
        fleet.connect()
        weights = model.weights(3)
        fleet.update(3, weights)
        same(staged(receiver, model, 1), model.expected(weights, 1))


def test_pieces_without_checksums_are_not_compared(nccl):
    model = Model()
    with Fleet(model, nccl) as fleet:
        pieces = {i: dataclasses.replace(p, checksum=None) for i, p in model.pieces(model.weights(0), 0, 0).items()}
        fleet.receivers[0].expect(0)
        fleet.senders[0, 0].send(0, pieces)
        assert fleet.receivers[0].wait(0, pieces.keys()) == model.plan.num_bytes


def test_a_trainer_that_never_connects_is_named(nccl):
    model = Model(trainers=2)
    receiver = receiver_of(model, nccl, SOON, senders=(0, 1))
    receiver.start()
    sender = sender_of(model, receiver.links[0], nccl)
    receiver.expect(1)
    sender.send(1, {})
    with pytest.raises(TransferError, match=r"trainer rank 1.*NCCL_MULTI_RANK_GPU_ENABLE"):
        receiver.wait(1, set())
    receiver.close()


def test_a_receiver_that_never_connects_is_named(nccl):
    model = Model()
    receiver = receiver_of(model, nccl)
    link = receiver.links[0]
    receiver.close()  # never started: the link leads nowhere
    for server in nccl._servers.values():
        server.close()
    with pytest.raises(TransferError, match="engine 'e0' rank 0"):
        sender_of(model, link, nccl, SOON)


def test_a_trainer_that_stays_silent_is_named(nccl):
    """It connects, and then sends nothing."""
    model = Model()
    receiver = receiver_of(model, nccl, SOON)
    receiver.start()
    sender = sender_of(model, receiver.links[0], nccl)
    receiver.expect(3)
    with pytest.raises(TransferError, match="header of version 3 with trainer rank 0"):
        receiver.wait(3, {0})
    with pytest.raises(TransferError, match="trainer rank 0"):  # the error persists
        receiver.expect(4)
    with pytest.raises(TransferError, match="rank 0"):
        sender.send(3, model.pieces(model.weights(0), 0, 0))


def test_a_receiver_that_stays_silent_is_named(nccl):
    """It did not begin an update, so it receives nothing."""
    model = Model(config=None, source="float32", dtype="float32")
    receiver = receiver_of(model, nccl)
    receiver.start()
    sender = sender_of(model, receiver.links[0], nccl, SOON)
    big = Model(dtype="float32", config=model.config)
    with pytest.raises(TransferError, match="engine 'e0' rank 0"):
        for version in range(100):  # the socket's buffers fill up
            sender.send(version, big.pieces(big.weights(0), 0, 0))
    with pytest.raises(TransferError, match="need new links"):
        sender.send(0, {})
    receiver.close()


def dying(rank, at):
    """Break the communicator of `rank` silently at its `at`-th group."""
    seen = []

    def hook(pair, what):
        if pair.rank == rank:
            seen.append(what)
            if len(seen) == at:
                pair.hang_up()
                raise SystemExit

    return hook


@pytest.mark.parametrize("at", [1, 3])
def test_a_trainer_that_dies_during_a_transfer_and_the_next_update(nccl, at):
    model, weights = Model(2), None
    with Fleet(model, nccl, 2, deadline=10.0) as fleet:
        fleet.update(1, model.weights(1))
        nccl.before_group = dying(0, at)
        for receiver in fleet.receivers:
            receiver.expect(2)
        with pytest.raises(SystemExit):
            fleet.senders[0, 0].send(2, model.pieces(model.weights(2), 0, 0))
        with pytest.raises(TransferError, match="trainer rank 0"):
            fleet.receivers[0].wait(2, range(len(model.plan.incoming[0])))
        nccl.before_group = lambda pair, what: None
        before = [dict(receiver.links) for receiver in fleet.receivers]
        for receiver in fleet.receivers:
            receiver.abandon()
        fleet.connect()
        assert all(old[0] != receiver.links[0] for old, receiver in zip(before, fleet.receivers))
        for version in (3, 4):
            weights = model.weights(version)
            fleet.update(version, weights)
        for rank, receiver in enumerate(fleet.receivers):
            same(staged(receiver, model, rank), model.expected(weights, rank))
    assert all(pair.closed for pair in nccl.pairs)


def test_a_receiver_that_abandons_a_transfer(nccl):
    model = Model()
    with Fleet(model, nccl, deadline=10.0) as fleet:
        receiver, sender = fleet.receivers[0], fleet.senders[0, 0]
        reached, go_on = threading.Event(), threading.Event()

        def hook(pair, what):
            if pair.rank == 0 and "bucket 2" in what:
                reached.set()
                go_on.wait(10)

        nccl.before_group = hook
        receiver.expect(1)
        with ThreadPoolExecutor(1) as pool:
            send = pool.submit(sender.send, 1, model.pieces(model.weights(1), 0, 0))
            assert reached.wait(10)
            receiver.abandon()
            go_on.set()
            with pytest.raises(TransferError, match="engine 'e0' rank 0"):
                send.result()
        with pytest.raises(TransferError, match="did not expect version 1"):
            receiver.wait(1, {0})
        sender.close()
        nccl.before_group = lambda pair, what: None
        fleet.connect()
        weights = model.weights(2)
        fleet.update(2, weights)
        same(staged(receiver, model, 0), model.expected(weights, 0))


def test_closing_a_sender_ends_a_send_that_hangs(nccl):
    model = Model(dtype="float32")
    receiver = receiver_of(model, nccl, deadline=60.0)
    receiver.start()
    sender = sender_of(model, receiver.links[0], nccl, deadline=60.0)
    pieces = model.pieces(model.weights(0), 0, 0)

    def send():
        for version in range(1000):
            sender.send(version, pieces)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        sender.close()
        with pytest.raises(TransferError):
            sending.result(30)
    receiver.close()


def test_a_wrong_version_is_refused(nccl):
    model = Model()
    receiver = receiver_of(model, nccl)
    receiver.start()
    sender = sender_of(model, receiver.links[0], nccl)
    receiver.expect(5)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 4, model.pieces(model.weights(0), 0, 0))
        with pytest.raises(TransferError, match="trainer rank 0 sends version 4, expected version 5"):
            receiver.wait(5, {0})
        sending.exception()
    receiver.close()


def test_other_moves_than_announced_are_refused(nccl):
    model = Model()
    with Fleet(model, nccl) as fleet:
        receiver, sender = fleet.receivers[0], fleet.senders[0, 0]
        pieces = model.pieces(model.weights(0), 0, 0)
        receiver.expect(1)
        sender.send(1, {i: piece for i, piece in pieces.items() if i})
        with pytest.raises(TransferError, match=r"that trainer rank 0 sent differ.*1 missing \(\[0\]\)"):
            receiver.wait(1, pieces.keys())
        with pytest.raises(TransferError, match="expected version 1"):
            receiver.wait(2, set())
        with pytest.raises(TransferError, match="move 10000"):
            receiver.wait(1, {10_000})


def test_pieces_that_do_not_fit_the_plan(nccl):
    model = Model()
    for wrong in ({10_000: Piece(jnp.zeros(3), ((0, 3),))}, {0: Piece(jnp.zeros(3), ((0, 3),))}):
        with Fleet(model, nccl) as fleet:
            fleet.receivers[0].expect(0)
            with pytest.raises(MappingError, match=r"the plan"):
                fleet.senders[0, 0].send(0, wrong)


def test_different_versions_of_nccl(tmp_path):
    model = Model()
    receiver = receiver_of(model, FakeNccl(tmp_path, "2.28.9"))
    with pytest.raises(TransferError, match=r"NCCL 2.30.7 here, NCCL 2.28.9 at engine 'e0' rank 0.*nccl-cu13==2.30.7"):
        sender_of(model, receiver.links[0], FakeNccl(tmp_path, "2.30.7"))
    receiver.close()


def test_another_plan_is_refused(nccl):
    model, other = Model(), Model(source="float32", dtype="float32")
    receiver = receiver_of(model, nccl)
    with pytest.raises(TransferError, match="plan"):
        sender_of(other, receiver.links[0], nccl)
    receiver.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda link: b"",
        lambda link: link[:-5],
        lambda link: b'{"transport": "tcp"}',
        lambda link: changed(link, id="not base64!"),
        lambda link: changed(link, id=base64.b64encode(b"short").decode()),
        lambda link: changed(link, id=7),
        lambda link: changed(link, nccl=None),
        lambda link: changed(link, primitive="reduce"),
        lambda link: changed(link, contiguous=""),
    ],
)
def test_a_corrupt_link(nccl, spoil):
    model = Model()
    receiver = receiver_of(model, nccl)
    with pytest.raises(TransferError):
        sender_of(model, spoil(receiver.links[0]), nccl)
    receiver.close()


def changed(link, **facts):
    return json.dumps(json.loads(link) | facts).encode()


@given(st.binary(max_size=40))
def test_any_header_is_read_or_refused(data):
    stream = range(9)
    data = data.ljust(UpdateHeader.num_bytes(len(stream)), b"\0")
    for bits in (data, UpdateHeader._MAGIC + data[8:]):
        try:
            assert UpdateHeader.unpack(bits[: UpdateHeader.num_bytes(9)], stream, "trainer rank 0").sent <= set(stream)
        except TransferError as error:
            assert "trainer rank 0" in str(error)


def test_memory_that_may_still_be_written_is_never_reused(nccl, monkeypatch):
    """If a communicator cannot be aborted, its memory is kept, and the next update uses other memory."""
    leaked: list = []
    for module in (transport, receive_thread):
        monkeypatch.setattr(module, "leaked_memory", leaked)
    model = Model()
    with Fleet(model, nccl) as fleet:
        receiver = fleet.receivers[0]
        fleet.update(1, model.weights(1))
        name = model.parameters[0].name
        before = receiver.view(name).data_ptr()
        nccl.quiet = False
        receiver.abandon()
        nccl.quiet = True
        assert leaked
        assert receiver.view(name).data_ptr() != before
        fleet.senders[0, 0].close()
        fleet.connect()
        weights = model.weights(2)
        fleet.update(2, weights)
        same(staged(receiver, model, 0), model.expected(weights, 0))


KILLED = """
import os, signal, sys
from slipstream.weights.transports.nccl.transport import NcclSender
from tests.weights.fake_nccl import FakeNccl
from tests.weights.nccl_by_hand import Model
nccl, model = FakeNccl(sys.argv[1]), Model()
groups = []
def hook(pair, what):
    groups.append(what)
    if len(groups) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
nccl.before_group = hook
sender = NcclSender(sys.argv[2].encode(), model.plan, model.plan.stream(0, 0), "the test", 8192, 20.0, library=nccl)
sender.send(1, model.pieces(model.weights(1), 0, 0))
"""


def test_a_trainer_process_killed_during_a_transfer(nccl, tmp_path):
    model = Model()
    receiver = receiver_of(model, nccl, deadline=60.0)
    receiver.start()
    receiver.expect(1)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), receiver.links[0].decode()], env=os.environ
    )
    with pytest.raises(TransferError, match=r"trainer rank 0.*did it die"):
        receiver.wait(1, range(len(model.plan.incoming[0])))
    assert process.wait(30) == -signal.SIGKILL
    receiver.close()


def test_importing_the_transport_loads_neither_jax_nor_torch_nor_nccl():
    without = ("jax", "jaxlib", "torch", "nccl", "cuda")
    assert loaded_by("import slipstream.weights.transports.nccl.transport", absent=without).isdisjoint(without)


def test_without_nccl4py_the_error_says_what_to_install():
    from slipstream.weights.transports.nccl.communicator import NCCL

    try:
        import nccl.bindings.nccl  # noqa: F401
    except ImportError:
        with pytest.raises(TransferError, match=r"slipstream-rl\[nccl\]"):
            NCCL.version()
