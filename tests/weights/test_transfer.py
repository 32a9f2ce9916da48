"""The sending and the receiving half against each other, over real streams, with everything that can go wrong."""

import ml_dtypes
import numpy as np
import pytest

from slipstream.errors import (
    ChecksumMismatch,
    MappingError,
    PlanMismatch,
    TransferError,
    UnknownVersion,
    UpdateInProgress,
    VersionError,
)
from slipstream.model.config import ModelConfig
from slipstream.types import Offer
from slipstream.weights import families, source
from slipstream.weights.checksum import pack_manifest, unpack_manifest
from slipstream.weights.plan import Plan, make_plan
from slipstream.weights.transfer import Inbox, send
from slipstream.weights.transports import SENDERS

CONFIG = ModelConfig(
    "qwen2", vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)


def weights(seed):
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in families.tensors(CONFIG)}


class Pair:
    """A trainer's and an engine's half, and the verbs between them."""

    def __init__(self, tp=1, transport="memory", dtype="float32"):
        self.tp, self.dims = tp, families.shard_dims(CONFIG, tp)
        parameters = families.parameters(CONFIG, tp)
        self.plan = make_plan(source.describe(weights(0)), families.tensors(CONFIG), parameters, dtype)
        self.streams = [SENDERS[transport](self.plan.stream_bytes(0, rank)) for rank in range(tp)]
        self.inbox = Inbox(parameters, dtype, "e0")
        self.offer = Offer(self.plan.to_bytes(), self.plan.fingerprint, tuple(s.link for s in self.streams))

    def send(self, version, tensors):
        return [send(self.plan, rank, tensors, stream, version) for rank, stream in enumerate(self.streams)]

    def update(self, version, tensors, serving=-1):
        self.inbox.begin(serving, version, self.offer)
        arrays, report = self.inbox.receive(version, self.send(version, tensors))
        self.inbox.finish(version)
        return arrays, report


@pytest.mark.parametrize("transport", sorted(SENDERS))
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_gets_its_part(transport, tp, dtype):
    pair, tensors = Pair(tp, transport, dtype), weights(1)
    arrays, report = pair.update(0, tensors)
    cast = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    for name, whole in tensors.items():
        parts = [whole] * tp if pair.dims[name] is None else np.split(whole, tp, axis=pair.dims[name])
        for rank in range(tp):
            np.testing.assert_array_equal(arrays[name][rank], parts[rank].astype(cast))
    assert report.num_bytes == pair.plan.num_bytes


def test_what_was_received_does_not_change_when_the_stream_is_reused():
    pair = Pair()
    first, _ = pair.update(0, weights(1))
    kept = {name: [a.copy() for a in arrays] for name, arrays in first.items()}
    pair.offer = Offer(b"", pair.plan.fingerprint, pair.offer.links)  # the plan is there already
    pair.update(1, weights(2), serving=0)
    for name, arrays in first.items():
        np.testing.assert_array_equal(arrays, kept[name])


def test_a_flipped_bit_is_found_and_named():
    pair, tensors = Pair(tp=2), weights(1)
    pair.inbox.begin(-1, 0, pair.offer)
    manifests = pair.send(0, tensors)
    victim = next(m for m in pair.plan.streams[0, 1] if "down_proj" in m.tensor)
    pair.streams[1].region(victim.offset, victim.num_bytes)[3] ^= 0x10
    with pytest.raises(ChecksumMismatch, match=f"engine 'e0', rank 1: {victim.tensor}"):
        pair.inbox.receive(0, manifests)
    pair.inbox.rollback(0)
    arrays, _ = pair.update(0, tensors)
    np.testing.assert_array_equal(arrays["model.norm.weight"][0], tensors["model.norm.weight"])


def test_two_pieces_swapped_are_found():
    pair, tensors = Pair(), weights(1)
    pair.inbox.begin(-1, 0, pair.offer)
    manifests = pair.send(0, tensors)
    k, v = (next(m for m in pair.plan.moves if f"0.self_attn.{x}_proj.weight" in m.tensor) for x in "kv")
    a, b = (pair.streams[0].region(m.offset, m.num_bytes) for m in (k, v))
    a[:], b[:] = b.copy(), a.copy()
    with pytest.raises(ChecksumMismatch):
        pair.inbox.receive(0, manifests)


def test_bytes_of_another_version_are_found():
    pair = Pair()
    pair.inbox.begin(-1, 0, pair.offer)
    manifests = pair.send(0, weights(1))
    pair.send(0, weights(2))  # the trainer went on too early
    with pytest.raises(ChecksumMismatch):
        pair.inbox.receive(0, manifests)


def test_manifests_must_be_of_this_version_and_plan():
    pair = Pair(tp=2)
    pair.inbox.begin(-1, 3, pair.offer)
    good = pair.send(3, weights(1))
    for manifests in ([good[0]], [good[1], pack_manifest(3, [1, 2])], pair.send(2, weights(1)), [b"", b""]):
        with pytest.raises(ChecksumMismatch):
            pair.inbox.receive(3, manifests)
    pair.inbox.receive(3, good)


def test_manifest_round_trip_and_truncation():
    data = pack_manifest(7, [1, 2**64 - 1])
    assert unpack_manifest(data, 7, 2) == (1, 2**64 - 1)
    for cut in range(len(data)):
        with pytest.raises(ChecksumMismatch):
            unpack_manifest(data[:cut], 7, 2)


def test_versions_only_grow():
    pair = Pair()
    for version in (4, 5):
        with pytest.raises(VersionError, match=f"serves version 5; version {version}"):
            pair.inbox.begin(5, version, pair.offer)
    pair.inbox.begin(5, 6, pair.offer)


def test_one_update_at_a_time():
    pair = Pair()
    pair.inbox.begin(-1, 0, pair.offer)
    with pytest.raises(UpdateInProgress, match="receiving version 0"):
        pair.inbox.begin(-1, 1, pair.offer)
    pair.inbox.rollback(7)  # not that one
    with pytest.raises(UpdateInProgress):
        pair.inbox.begin(-1, 1, pair.offer)
    pair.inbox.rollback(0)
    pair.inbox.rollback(0)
    pair.inbox.begin(-1, 1, pair.offer)


def test_steps_for_a_version_that_is_not_under_way():
    pair = Pair()
    for step in (lambda: pair.inbox.receive(0, [b""]), lambda: pair.inbox.finish(0), lambda: pair.inbox.check(0)):
        with pytest.raises(UnknownVersion, match="version 0 is not under way"):
            step()


def test_offers_that_do_not_fit_are_refused_without_a_trace():
    pair = Pair(tp=2)
    links, fingerprint = pair.offer.links, pair.offer.fingerprint
    gap = Plan(pair.plan.dtype, pair.plan.moves[1:])
    other = Plan("bfloat16", ())
    for offer, error in (
        (Offer(b"", fingerprint, links), PlanMismatch),  # it does not have this plan
        (Offer(b"junk", fingerprint, links), PlanMismatch),
        (Offer(pair.offer.plan, "0" * 32, links), PlanMismatch),
        (Offer(gap.to_bytes(), gap.fingerprint, links), MappingError),
        (Offer(other.to_bytes(), other.fingerprint, links), PlanMismatch),
        (Offer(pair.offer.plan, fingerprint, links[:1]), PlanMismatch),
        (Offer(pair.offer.plan, fingerprint, (links[0], b"junk")), TransferError),
    ):
        with pytest.raises(error):
            pair.inbox.begin(-1, 0, offer)
    pair.update(0, weights(1))


def test_a_stream_shorter_than_the_plan_is_an_error():
    pair = Pair()
    short = SENDERS["memory"](64)
    pair.inbox.begin(-1, 0, Offer(pair.offer.plan, pair.offer.fingerprint, (short.link,)))
    with pytest.raises(TransferError, match="outside a stream of 64 bytes"):
        pair.inbox.receive(0, pair.send(0, weights(1)))
