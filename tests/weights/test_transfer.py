"""The sending and receiving halves of a transfer over real transports, including faults."""

import dataclasses
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import (
    ChecksumMismatch,
    MappingError,
    NonFiniteWeights,
    PlanMismatch,
    TransferError,
    UnknownVersion,
    UpdateInProgress,
    VersionError,
)
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.tensors.boxes import full_box, split
from slipstream.types import Offer, Parameter, ParameterPart, TensorSpec
from slipstream.weights.checksum import (
    ScanOptions,
    add_manifest_header,
    checksum,
    copy_and_scan,
    count_nonfinite,
    pack_entries,
    pack_manifest,
    unpack_manifest,
)
from slipstream.weights.plan import Plan, SourceTensor, make_plan
from slipstream.weights.rank_image import numpy_dtype
from slipstream.weights.transports.host import shm
from slipstream.weights.update.transfer import Inbox, Outbox
from tests.weights.by_hand import HandUpdate

CONFIG = ModelConfig(
    "qwen2", vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
SPECS = families.tensors(CONFIG)


def weights(seed):
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in SPECS}


@pytest.fixture(params=["memory", "shm", "tcp", "disk"])
def transport(request, tmp_path):
    return f"disk:{tmp_path}" if request.param == "disk" else request.param


class Engine:
    """An inbox, and what serves."""

    def __init__(self, tp=1, dtype="float32", transport="memory"):
        self.tp, self.dtype, self.transport = tp, dtype, transport
        self.dims = families.shard_dims(CONFIG, tp)
        self.parameters = families.parameters(CONFIG, tp)
        self.inbox = Inbox(self.parameters, dtype, "e0")
        self.version, self.serving = -1, {}

    def update_to(self, tensors, version=None):
        return HandUpdate(
            tensors,
            SPECS,
            self.parameters,
            self.dtype,
            self.version + 1 if version is None else version,
            self.transport,
        )

    def begin(self, update):
        return self.inbox.begin(self.version, update.version, update.offer)

    def finish(self, update, manifests):
        arrays, report = self.inbox.receive(update.version, manifests)
        self.inbox.finish(update.version)
        self.serving |= arrays
        self.version = update.version
        return report

    def run(self, update):
        return self.finish(update, update.send(self.begin(update)))

    def expect(self, tensors):
        cast = np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16
        for name, whole in tensors.items():
            parts = [whole] * self.tp if self.dims[name] is None else np.split(whole, self.tp, axis=self.dims[name])
            for rank in range(self.tp):
                np.testing.assert_array_equal(self.serving[name][rank], parts[rank].astype(cast), err_msg=name)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_gets_its_part(transport, tp, dtype):
    engine = Engine(tp, dtype, transport)
    update = engine.update_to(weights(1))
    assert engine.run(update).num_bytes == update.plan.num_bytes
    engine.expect(weights(1))


def test_a_stage_of_a_pipeline_has_places_for_its_own_parameters_only():
    engine = Engine(transport="shm")
    engine.parameters = tuple(dataclasses.replace(p, rank=int(".1." in p.name)) for p in engine.parameters)
    engine.inbox = Inbox(engine.parameters, "float32", "e0")
    update = engine.update_to(weights(1))
    arrays, _ = engine.inbox.receive(update.version, update.send(engine.begin(update)))
    places = engine.inbox.places(update.version, arrays)
    for parameter in engine.parameters:
        assert [place is not None for place in places[parameter.name]] == [parameter.rank == 0, parameter.rank == 1]


def test_a_version_that_serves_is_not_touched_by_the_next_two(transport):
    engine = Engine(2, transport=transport)
    for seed in range(4):
        update = engine.update_to(weights(seed))
        manifests = update.send(engine.begin(update))
        if seed:
            engine.expect(weights(seed - 1))  # all bytes of the next one are there
        engine.finish(update, manifests)
        engine.expect(weights(seed))


def test_memory_is_reused_from_the_third_update_on(transport):
    engine = Engine(2, transport=transport)
    update = engine.update_to(weights(0))
    addresses = []
    for version in range(6):
        update.version = version
        update.offer = dataclasses.replace(
            update.offer, fresh=version == 0, plan=update.offer.plan if version == 0 else b""
        )
        engine.run(update)
        addresses.append(engine.serving["model.norm.weight"][0].ctypes.data)
    assert len(set(addresses)) == 2 and addresses[0::2] == [addresses[0]] * 3 and addresses[1::2] == [addresses[1]] * 3


def test_what_did_not_change_is_shared_with_the_old_version(transport):
    engine = Engine(2, transport=transport)
    update = engine.update_to(weights(1))
    engine.run(update)
    old = engine.serving["model.norm.weight"][0].ctypes.data
    expected = weights(1)
    update.offer = dataclasses.replace(update.offer, fresh=False)
    for seed in (2, 3, 4):  # slots of different parameters are now out of step
        name = f"model.layers.{seed % 2}.mlp.up_proj.weight"
        expected[name] = weights(seed)[name]
        update.tensors, update.version = expected, update.version + 1
        manifests = update.send(engine.begin(update), unchanged=set(expected) - {name})
        report = engine.finish(update, manifests)
        assert report.num_bytes == expected[name].nbytes
        engine.expect(expected)
        assert engine.serving["model.norm.weight"][0].ctypes.data == old
    engine.run(engine.update_to(weights(9)))
    engine.expect(weights(9))


def test_a_slot_that_was_not_written_to_can_be_opened_later():
    """The engine unlinks its shared memory once every trainer rank has opened it, and no earlier."""
    engine = Engine(transport="shm")
    sources = {t.name: SourceTensor(t.shape, "float32", halves(t.shape)) for t in SPECS}
    norm = "model.norm.weight"
    sources[norm] = SourceTensor(sources[norm].shape, "float32", ((0, full_box(sources[norm].shape)),))
    plan = make_plan(sources, SPECS, engine.parameters, "float32")
    offer = Offer(plan.to_bytes(), plan.fingerprint, "shm")
    senders = [Outbox(plan, engine.parameters, rank, ScanOptions()) for rank in (0, 1)]
    before, names = shm_segments(), set(weights(0))
    unchanged = [set(), names, names - {norm}, {norm}]  # nothing, then only by rank 0, then also by rank 1
    for version, same in enumerate(unchanged):
        destinations = engine.inbox.begin(version - 1, version, dataclasses.replace(offer, fresh=version == 0))
        manifests = []
        for sender in senders:
            sender.destinations = destinations
            manifests += sender.send(weights(version), same, version)[0]
        engine.serving |= engine.inbox.receive(version, [manifests])[0]
        engine.inbox.finish(version)
    engine.expect({name: weights(2 if name == norm else 3)[name] for name in names})
    assert shm_segments() == before


def halves(shape):
    return tuple((rank, split(full_box(shape), 0, rank, 2)) for rank in (0, 1))


def shm_segments():
    return sorted(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


# --- values that are not finite ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite_are_refused_and_counted(transport, dtype):
    """Of the boxes that two ranks hold, each is counted once."""
    engine, tensors = Engine(2, dtype, transport), weights(1)
    tensors["model.embed_tokens.weight"][[0, 40], [3, 5]] = [np.nan, -np.inf]
    tensors["model.norm.weight"][2] = np.inf
    update = engine.update_to(tensors)
    with pytest.raises(NonFiniteWeights, match=rf"in {dtype}.*embed_tokens.weight \(2 of 1,024.*norm.weight \(1 of 16"):
        update.send(engine.begin(update))
    engine.inbox.rollback(0)
    update.outbox = Outbox(update.plan, engine.parameters, 0, ScanOptions(finite=False))
    assert engine.run(update).num_bytes == update.plan.num_bytes


def test_a_value_beyond_the_range_of_the_engine_is_not_finite():
    engine, tensors = Engine(dtype="bfloat16"), weights(1)
    tensors["model.norm.weight"][0] = np.finfo(np.float32).max
    update = engine.update_to(tensors)
    with pytest.raises(NonFiniteWeights, match=r"model.norm.weight \(1 of 16 values\)"):
        update.send(engine.begin(update))


@given(st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.binary(max_size=96))
def test_values_are_counted_as_numpy_does(dtype, data):
    kind = numpy_dtype(dtype)
    array = np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind)
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        assert count_nonfinite(array) == (~np.isfinite(array.astype(np.float64))).sum()


# --- checksums ---


def test_a_flipped_bit_is_found_and_named():
    engine = Engine(tp=2)
    update = engine.update_to(weights(1))
    manifests = update.send(engine.begin(update))
    index, victim = next((i, m) for i, m in update.plan.stream(0, 1).items() if "down_proj" in m.tensor)
    engine.inbox._ranks[1].pieces[0][index].reshape(-1).view(np.uint8)[3:4] ^= 0x10
    with pytest.raises(ChecksumMismatch, match=f"engine 'e0', rank 1: {victim.tensor}"):
        engine.finish(update, manifests)
    engine.inbox.rollback(0)
    engine.run(engine.update_to(weights(1)))
    engine.expect(weights(1))


def test_two_pieces_swapped_are_found():
    engine = Engine()
    update = engine.update_to(weights(1))
    manifests = update.send(engine.begin(update))
    names = {m.tensor: i for i, m in enumerate(update.plan.incoming[0])}
    a, b = (engine.inbox._ranks[0].pieces[0][names[f"model.layers.0.self_attn.{x}_proj.weight"]] for x in "kv")
    a[:], b[:] = b.copy(), a.copy()
    with pytest.raises(ChecksumMismatch):
        engine.finish(update, manifests)


def test_a_late_writer_of_a_rolled_back_update_hurts_nobody(transport):
    engine = Engine(2, transport=transport)
    engine.run(engine.update_to(weights(1)))
    late = engine.update_to(weights(2))
    destinations = engine.begin(late)
    late.send(destinations, unchanged={n for n in weights(2) if "layers.1" in n})  # it stops in the middle
    engine.inbox.rollback(late.version)
    again = engine.update_to(weights(3))
    manifests = again.send(engine.begin(again))
    try:
        late.send(destinations)  # and goes on now
    except TransferError:
        pass  # a plane may notice
    engine.finish(again, manifests)
    engine.expect(weights(3))


def test_a_parameter_comes_whole_or_not_at_all():
    engine = Engine(tp=2)
    update = engine.update_to(weights(1))
    manifests = update.send(engine.begin(update))
    count = len(update.plan.incoming[1])
    sums = unpack_manifest(manifests[1][0], 0, count)
    del sums[5]
    with pytest.raises(ChecksumMismatch, match=r"got 1 of 2 pieces of model\."):
        engine.finish(update, [manifests[0], [pack_manifest(0, sums)]])


def test_manifests_must_be_of_this_version_and_plan():
    engine = Engine(tp=2)
    update = engine.update_to(weights(1), version=3)
    good = update.send(engine.begin(update))
    for manifests in (
        [good[0]],
        [good[0], [pack_manifest(3, {10_000: 1})]],
        [[pack_manifest(2, {0: 1})], good[1]],
        [[b""], [b""]],
        [good[0], [pack_manifest(3, {0: 1})]],
    ):
        with pytest.raises(ChecksumMismatch):
            engine.inbox.receive(3, manifests)
    engine.inbox.receive(3, good)


def test_manifest_round_trip_and_truncation():
    data = pack_manifest(7, {0: 1, 5: 2**64 - 1})
    assert unpack_manifest(data, 7, 6) == {0: 1, 5: 2**64 - 1}
    for cut in range(len(data)):
        with pytest.raises(ChecksumMismatch):
            unpack_manifest(data[:cut], 7, 6)
    repeated = add_manifest_header(7, pack_entries({0: 1}) * 2)
    for manifest, version, count in ((data, 7, 5), (data, 8, 6), (repeated, 7, 6)):
        with pytest.raises(ChecksumMismatch):
            unpack_manifest(manifest, version, count)


def test_padding_is_zero(transport):
    specs = [TensorSpec("head", (5, 2))]
    part = ParameterPart("head", ((0, 5), (0, 2)), ((0, 5), (0, 2)))
    padded = [Parameter("head", 0, (8, 2), (part,), padding=(((5, 8), (0, 2)),))]
    update = HandUpdate({"head": np.ones((5, 2), np.float32)}, specs, padded, "float32", 0, transport)
    inbox = Inbox(padded, "float32", "e0")
    arrays, _ = inbox.receive(0, update.send(inbox.begin(-1, 0, update.offer)))
    np.testing.assert_array_equal(arrays["head"][0], np.repeat([1.0, 0.0], [5, 3])[:, None] * np.ones(2))
    inbox.close()


@pytest.mark.parametrize("shape", [(), (3,), (700, 1000), (3, 5, 7)])
def test_a_checksum_depends_on_content_alone(shape):
    rng = np.random.default_rng(0)
    array = rng.standard_normal(shape).astype(np.float32)
    strided = np.empty((*shape, 2), np.float32)[..., 0]
    assert copy_and_scan(strided, array, ScanOptions()).checksum == checksum(array) == checksum(strided)
    rounded = np.empty(shape, ml_dtypes.bfloat16)
    assert copy_and_scan(rounded, array, ScanOptions()).checksum == checksum(array.astype(ml_dtypes.bfloat16))


def test_versions_only_grow():
    engine = Engine()
    engine.version = 5
    for version in (4, 5):
        with pytest.raises(VersionError, match=f"serves version 5; version {version}"):
            engine.begin(engine.update_to(weights(1), version))
    engine.begin(engine.update_to(weights(1), 6))


def test_one_update_at_a_time():
    engine = Engine()
    engine.begin(engine.update_to(weights(1), 0))
    with pytest.raises(UpdateInProgress, match="receiving version 0"):
        engine.begin(engine.update_to(weights(1), 1))
    engine.inbox.rollback(7)  # not that one
    with pytest.raises(UpdateInProgress):
        engine.begin(engine.update_to(weights(1), 1))
    engine.inbox.rollback(0)
    engine.inbox.rollback(0)
    engine.begin(engine.update_to(weights(1), 1))


def test_steps_for_a_version_that_is_not_under_way():
    inbox = Engine().inbox
    for step in (lambda: inbox.receive(0, [[b""]]), lambda: inbox.finish(0), lambda: inbox.check(0)):
        with pytest.raises(UnknownVersion, match="version 0 is not in progress"):
            step()


def test_offers_that_do_not_fit_are_refused_without_a_trace():
    engine = Engine(tp=2)
    update = engine.update_to(weights(1))
    plan, fingerprint = update.offer.plan, update.offer.fingerprint
    gap, other = Plan("float32", update.plan.moves[1:]), Plan("bfloat16", ())
    for offer, error in (
        (Offer(b"", fingerprint, "memory"), PlanMismatch),  # it does not have this plan
        (Offer(b"junk", fingerprint, "memory"), PlanMismatch),
        (Offer(plan, "0" * 32, "memory"), PlanMismatch),
        (Offer(gap.to_bytes(), gap.fingerprint, "memory"), MappingError),
        (Offer(other.to_bytes(), other.fingerprint, "memory"), PlanMismatch),
        (Offer(plan, fingerprint, "pigeon"), TransferError),
        (Offer(plan, fingerprint, "disk:/nowhere"), TransferError),
    ):
        with pytest.raises(error):
            engine.inbox.begin(-1, 0, offer)
    engine.run(update)
    engine.expect(weights(1))


def test_a_partial_sync_must_bring_all_tensors_of_a_parameter():
    fused = (Parameter("qk", 0, (24, 16), tuple(
        dataclasses.replace(families.parameters(CONFIG)[i].parts[0], local_box=box)
        for i, box in ((2, ((0, 16), (0, 16))), (3, ((16, 24), (0, 16))))
    )),)  # fmt: skip
    specs = [s for s in SPECS if s.name in {p.tensor for p in fused[0].parts}]
    both = {s.name: weights(1)[s.name] for s in specs}
    update, inbox = HandUpdate(both, specs, fused, "float32", 0), Inbox(fused, "float32", "e0")
    destinations = inbox.begin(-1, 0, update.offer)
    del update.tensors[specs[1].name]
    with pytest.raises(MappingError, match="pass all tensors of a parameter"):
        update.send(destinations, unchanged={specs[1].name})
