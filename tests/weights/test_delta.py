"""Lossless deltas: the format beside a naive reference and under damage, what the trainer keeps, the choice, and whole updates."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream.config import EmbeddedConfig, SyncOptions
from slipstream.errors import ConfigError, DeltaMismatch, NonFiniteWeights, TransferError
from slipstream.tensors.boxes import full_box
from slipstream.weights import delta
from slipstream.weights.checksum import ScanOptions, checksum
from slipstream.weights.delta import DeltaError, Encoding
from slipstream.weights.device_checksum import host_checksum, jax_checksum
from slipstream.weights.transports.contract import HostReceiver
from slipstream.weights.transports.device import DevicePiece
from slipstream.weights.transports.host import tcp
from slipstream.weights.update import device_delta
from slipstream.weights.update.sent_pieces import SentPieces
from tests.tiny import random_params, tiny_config, write_config
from tests.weights.naive_checksum import naive_checksum
from tests.weights.tcp_fleet import Fleet, weights

BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES = (0, 1, 255, 256, 257, 511, 512, 1000, 1024, 1025, 3000)


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks in arrays of a thousand elements."""
    patch = pytest.MonkeyPatch()
    patch.setattr(delta, "CHUNK", 1024)
    patch.setattr(device_delta, "CHUNK", 1024)
    yield
    patch.undo()


def pair(size: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two versions, of which a share of the elements differs: mostly by one step of bf16, sometimes by anything."""
    rng = np.random.default_rng(seed)
    old = rng.standard_normal(size, np.float32).astype(BF16)
    new = old.copy()
    changed = rng.random(size) < share
    steps = np.where(rng.random(size) < 0.1, rng.integers(0, 1 << 16, size), rng.choice([1, -1], size))
    delta.bits(new)[changed] += steps.astype(np.uint16)[changed]
    return old, new


def encode(old: np.ndarray, new: np.ndarray) -> bytes:
    base = delta.bits(old.copy())
    parts = [
        delta.encode_chunk(base[start : start + delta.CHUNK], delta.bits(new)[start : start + delta.CHUNK])
        for start in range(0, old.size, delta.CHUNK)
    ]
    assert np.array_equal(base, delta.bits(new))  # the base of the next delta
    return b"".join(parts)


def naive_apply(data: bytes, old: np.ndarray) -> np.ndarray:
    """The docstring of `delta.py`, element by element."""
    result, chunk = delta.bits(old).astype(int).tolist(), 0
    while data:
        count, length = struct.unpack_from("<II", data)
        planes = zstandard.ZstdDecompressor().decompress(data[8 : 8 + length])
        position = chunk - 1
        for entry in range(count):
            position += planes[entry] + 1
            zigzag = planes[count + entry] | planes[2 * count + entry] << 8
            result[position] += zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
        data, chunk = data[8 + length :], chunk + delta.CHUNK
    return (np.array(result, np.int64) & 0xFFFF).astype(np.uint16).view(BF16)


# --- the format ---


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_delta_gives_the_new_bits(size: int, share: float) -> None:
    old, new = pair(size, share)
    encoded = encode(old, new)
    target = np.empty_like(old)
    assert delta.apply(encoded, old, target, Encoding.DELTA) == checksum(new)
    assert np.array_equal(delta.bits(target), delta.bits(new))
    assert np.array_equal(delta.bits(naive_apply(encoded, old)), delta.bits(new))
    assert delta.apply(encoded, old, target, Encoding.DEVICE_DELTA) == host_checksum(delta.bits(new))


def test_strides_of_the_engine_do_not_matter() -> None:
    old, new = pair(60 * 50, 0.05)
    images = [np.zeros((60, 90), BF16) for _ in range(2)]
    base, target = (image[:, 20:70] for image in images)
    base[...] = old.reshape(60, 50)
    assert delta.apply(encode(old, new), base, target, Encoding.DELTA) == checksum(new)
    assert np.array_equal(target, new.reshape(60, 50))
    assert not images[1][:, :20].any() and not images[1][:, 70:].any()


def test_few_changes_are_few_bytes() -> None:
    old, new = pair(100_000, 0.0)
    changed = np.random.default_rng(1).random(old.size) < 0.02
    delta.bits(new)[changed] += 1
    assert len(encode(old, new)) < 0.03 * old.nbytes


@pytest.mark.parametrize("size", [1, 1000, 65_536, 70_000, 200_001])
def test_the_checksum_of_devices_is_the_same_on_the_host(size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size, np.float32).astype(BF16)
    assert host_checksum(delta.bits(values)) == int(jax_checksum(jnp.asarray(values)))
    if size <= 1000:
        assert host_checksum(delta.bits(values)) == naive_checksum(values)


GUARD = 64


def guarded_apply(data: bytes, old: np.ndarray) -> np.ndarray | None:
    """Apply a delta between guards; return the result, None after a `DeltaError`."""
    memory = np.full(old.size + 2 * GUARD, 0x5A5A, np.uint16)
    target = memory[GUARD:-GUARD].view(BF16)
    try:
        delta.apply(data, old, target, Encoding.DELTA)
    except DeltaError:
        target = None
    assert (memory[:GUARD] == 0x5A5A).all() and (memory[-GUARD:] == 0x5A5A).all()
    return target


@settings(max_examples=60)
@given(st.binary(max_size=60), st.sampled_from(SIZES))
def test_noise_is_refused(data: bytes, size: int) -> None:
    assert guarded_apply(data, pair(size, 0.0)[0]) is None or not data or not size


@settings(max_examples=100)
@given(st.data())
def test_damage_is_an_error_or_another_checksum(data: st.DataObject) -> None:
    """Of the compressed bytes, and of the entries in valid compressed ones."""
    old, new = pair(data.draw(st.sampled_from(SIZES[1:])), 0.05)
    if data.draw(st.booleans()):
        encoded = bytearray(encode(old, new))
        for _ in range(data.draw(st.integers(1, 3))):
            encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        count = data.draw(st.integers(0, 40) | st.integers(0, 1 << 32))
        planes = data.draw(st.binary(max_size=200))
        packed = zstandard.ZstdCompressor().compress(planes)
        encoded = bytearray(struct.pack("<II", min(count, (1 << 32) - 1), len(packed)) + packed)
    result = guarded_apply(bytes(encoded), old)
    if result is not None and not np.array_equal(delta.bits(result), delta.bits(new)):
        assert checksum(result) != checksum(new)


def test_entries_beyond_the_piece_and_bombs_are_refused() -> None:
    old, _ = pair(300, 0.0)
    for count, planes in (
        (2, b"\xff\xff" + bytes(4)),  # element 511
        (3, bytes(8)),  # a byte is missing
        (1, bytes(1 << 24)),  # more than announced
        (301, bytes(903)),
    ):
        packed = zstandard.ZstdCompressor().compress(planes)
        assert guarded_apply(struct.pack("<II", count, len(packed)) + packed, old) is None
    assert guarded_apply(encode(old, old) * 2, old) is None


# --- what the trainer keeps ---


def sent_again(pieces: SentPieces, values: np.ndarray, key: Any = None) -> Any:
    pieces.begin()
    key = key or ("bfloat16", "w", full_box(values.shape))
    return pieces.piece(key, 2 * values.size, BF16, lambda: values)


def test_an_update_is_encoded_once_from_the_one_before() -> None:
    pieces = SentPieces(ScanOptions())
    old, new = pair(3000, 0.02)
    assert sent_again(pieces, old.astype(np.float32)).encoding == Encoding.DENSE
    piece = sent_again(pieces, new.astype(np.float32))
    assert piece.since == 1 and piece.encoding == Encoding.DELTA and piece.scan.checksum == checksum(new)
    assert pieces.piece(("bfloat16", "w", full_box((3000,))), 6000, BF16, lambda: 1 / 0) is piece  # another engine's
    target = np.empty_like(old)
    assert delta.apply(piece.delta, old, target, piece.encoding) == checksum(new)
    assert np.array_equal(piece.read(), new)
    pieces.clear()
    assert sent_again(pieces, new).encoding == Encoding.DENSE


def test_what_changed_throughout_is_sent_whole_and_is_the_next_base() -> None:
    pieces = SentPieces(ScanOptions())
    first, other = pair(3000, 0.0)[0], pair(3000, 0.0, seed=1)[0]
    sent_again(pieces, first)
    piece = sent_again(pieces, other)
    assert piece.encoding == Encoding.DENSE and np.array_equal(piece.read(), other)
    assert sent_again(pieces, other).encoding == Encoding.DELTA


def test_memory_is_bounded_and_other_dtypes_are_not_kept() -> None:
    pieces = SentPieces(ScanOptions(), max_bytes=1000)
    values = np.zeros(300, BF16)
    for _ in range(2):
        kept = sent_again(pieces, values)
        beyond = pieces.piece(("bfloat16", "v", ((0, 300),)), 600, BF16, lambda: values)
        wide = pieces.piece(("float32", "w", ((0, 2),)), 8, np.dtype(np.float32), lambda: np.zeros(2, np.float32))
    assert [p.encoding for p in (kept, beyond, wide)] == [Encoding.DELTA, Encoding.DENSE, Encoding.DENSE]


def test_values_that_are_not_finite_are_counted_in_deltas() -> None:
    pieces = SentPieces(ScanOptions())
    old, _ = pair(3000, 0.0)
    sent_again(pieces, old)
    bad = old.astype(np.float32)
    bad[[5, 2500]] = np.inf, 3.4e38  # the second is beyond bf16
    assert sent_again(pieces, bad).scan.num_nonfinite == 2


# --- on the device ---


def test_the_device_finds_what_the_host_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups; pieces that are boxes; sizes that are no whole blocks; float32 in the trainer."""
    monkeypatch.setattr(device_delta, "MAX_GROUP", 4096)
    shapes = {"a": (3, 500), "b": (7,), "c": (40, 70), "d": (256,), "e": ()}
    found, values = device_delta.DeviceDeltas(), []
    for update, share in enumerate((0.0, 0.02, 0.0, 0.01), 1):
        pairs = {n: pair(int(np.prod(s)), 0.0, seed=i) for i, (n, s) in enumerate(shapes.items())}
        new = {n: old.reshape(shapes[n]).copy() for n, (old, _) in pairs.items()}
        for value in new.values():
            changed = np.random.default_rng(update).random(value.shape) < share
            value.reshape(-1).view(np.uint16)[changed.reshape(-1)] += 3
        values.append(new)
        pieces = {
            ("bfloat16", n, full_box(v.shape)): DevicePiece(
                jnp.asarray(v.astype(np.float32))[None], lambda array: array[0], None
            )
            for n, v in new.items()
        }
        deltas = found.find(pieces, update)
        if update == 1:
            assert deltas == {}
            continue
        assert {key[1] for key in deltas} >= {"a", "c"}  # the smallest pieces are no smaller as deltas
        for n, v in ((key[1], new[key[1]]) for key in deltas):
            piece = deltas[("bfloat16", n, full_box(v.shape))]
            assert piece.since == update - 1 and piece.scan == (host_checksum(delta.bits(v)), 0)
            target = np.empty(v.shape, BF16)
            assert delta.apply(piece.delta, values[-2][n], target, Encoding.DEVICE_DELTA) == piece.scan.checksum
            assert np.array_equal(target.view(np.uint16), v.view(np.uint16))
            assert piece.delta == encode(values[-2][n].reshape(-1), v.reshape(-1))
    found.keep_only(99)
    assert found.find(pieces, 5) == {}


def test_more_changes_than_the_device_has_room_for_are_sent_whole() -> None:
    found = device_delta.DeviceDeltas()
    for update in (1, 2, 3):
        values = jnp.asarray(pair(3000, 0.0, seed=min(update, 2))[0])
        deltas = found.find({("bfloat16", "w", ((0, 3000),)): DevicePiece(values, lambda array: array, None)}, update)
        assert len(deltas) == (update == 3)


# --- the choice ---


@pytest.mark.parametrize(
    "link, codec, share, expected",
    [
        (0.125e9, 1e9, 0.05, True),  # 1 Gbit/s
        (0.125e9, 1e9, 0.9, False),  # everything changes
        (1.25e9, 1e9, 0.05, False),  # 10 Gbit/s: encoding takes as long
        (1.25e9, 4e9, 0.05, True),
        (0.7e9, 1e9, 0.05, True),
        (0.8e9, 1e9, 0.05, False),
    ],
)
def test_deltas_are_sent_where_they_are_faster(link: float, codec: float, share: float, expected: bool) -> None:
    assert delta.is_faster(link, codec, share) is expected


def small(tensors: Mapping[str, np.ndarray], step: int, share: float = 0.01) -> dict[str, np.ndarray]:
    """The weights after a step that changes a share of the elements."""
    rng = np.random.default_rng(step)
    return {n: np.where(rng.random(t.shape) < share, t + np.float32(0.5), t) for n, t in tensors.items()}


@pytest.fixture
def make() -> Iterator[Any]:
    fleets: list[Fleet] = []

    def made(*arguments: Any, **options: Any) -> Fleet:
        fleets.append(Fleet(*arguments, dtype=options.pop("dtype", "bfloat16"), **options))
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.close()


def encodings(report: Any) -> list[str]:
    return [engine.encoding for engine in report.engines]


def test_the_first_syncs_measure_the_link(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.weights.update import delta_choice

    monkeypatch.setattr(delta_choice, "SMALL_BYTES", 0)
    seconds = [10.0]
    note = delta_choice.DeltaChoice.note
    monkeypatch.setattr(
        delta_choice.DeltaChoice, "note", lambda choice, sent, size, _: note(choice, sent, size, seconds[0])
    )
    fleet, tensors, found = make(1), weights(0), []
    for version in range(6):
        tensors = small(tensors, version, share=1.0 if version == 4 else 0.01)
        found += encodings(fleet.sync(tensors, version))
        fleet.hold(tensors)
    # All bytes are measured, then kept; version 4 changes everything; version 5 is the difference to it.
    assert found == ["dense", "dense", "delta", "delta", "dense", "delta"]
    unchecked, quick = make(1, checksums=False), make(1)
    for version in range(4):
        tensors = small(tensors, version)
        assert encodings(unchecked.sync(tensors, version)) == ["dense"]
    seconds[0] = 1e-6
    for version in range(4):
        tensors = small(tensors, version)
        assert encodings(quick.sync(tensors, version)) == ["dense"]
    assert quick.publisher._sent._kept == {}


@pytest.mark.parametrize("dtype, options", [("float32", {}), ("bfloat16", {"delta": "never"})])
def test_whole_weights_where_deltas_are_impossible_or_unwanted(make: Any, dtype: str, options: Any) -> None:
    fleet, tensors = make(1, dtype=dtype, **{"delta": "always"} | options), weights(0)
    for version in range(3):
        assert encodings(fleet.sync(small(tensors, version), version)) == ["dense"]
    assert fleet.publisher._sent._kept == {}


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="checksums are off"):
        SyncOptions(delta="always", checksums=False)
    with pytest.raises(ConfigError, match="must be one of"):
        SyncOptions(delta="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not be negative"):
        SyncOptions(delta_bytes=-1)


# --- whole updates ---


@pytest.mark.parametrize("where", ["always", "device"])
@pytest.mark.parametrize("tp, count", [(2, 1), (1, 3)])
def test_engines_get_deltas_from_the_trainer_and_from_each_other(make: Any, where: str, tp: int, count: int) -> None:
    fleet, tensors = make(count, tp, delta=where), weights(0)
    total = 2 * sum(t.size for t in tensors.values())
    for version in range(5):
        report = fleet.sync(tensors if where == "always" else jax.tree.map(jnp.asarray, tensors), version)
        assert encodings(report) == [("dense", "delta")[version > 0]] * count
        assert (report.num_bytes < 0.1 * total) == (version > 0)
        assert {engine.wire_bytes for engine in report.engines} == {report.num_bytes}
        assert report.engines[0].stage.num_bytes > 0.9 * total
        fleet.hold(tensors)
        tensors = small(tensors, version)


def test_over_disk_too(make: Any, tmp_path: Path) -> None:
    fleet, tensors = make(2, transport=f"disk:{tmp_path}", delta="always"), weights(0)
    for version in range(3):
        report = fleet.sync(tensors, version)
        fleet.hold(tensors)
        tensors = small(tensors, version)
    assert encodings(report) == ["delta", "delta"] and list(tmp_path.iterdir()) == []


def test_unchanged_tensors_are_not_part_of_a_delta(make: Any) -> None:
    fleet, tensors = make(1, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors, version)
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
    for version, sent in ((2, changed), (3, tensors), (4, small(tensors, 1))):
        report = fleet.sync(sent, version)
        fleet.hold(sent)
    assert encodings(report) == ["delta"]


def test_an_engine_that_joins_gets_all_and_then_deltas(make: Any) -> None:
    fleet, tensors = make(1, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors := small(tensors, version), version)
    fleet.engines[fleet.add()].version = 1
    found = []
    for version in range(2, 5):
        found.append(encodings(fleet.sync(tensors := small(tensors, version), version)))
        fleet.hold(tensors)
    assert found == [["delta", "dense"], ["delta", "delta"], ["delta", "delta"]] or found[0] == ["dense", "dense"]
    assert found[1:] == [["delta", "delta"]] * 2


def test_an_engine_that_was_restarted_gets_all(make: Any) -> None:
    fleet, tensors, found = make(1, delta="always"), weights(0), []
    for version in range(5):
        if version == 3:
            fleet.engines.clear()
            engine = fleet.engines[fleet.add()]
            engine.version, engine.info = version - 1, replace(engine.info, pid=1234)
        found += encodings(fleet.sync(tensors := small(tensors, version), version))
        fleet.hold(tensors)
    assert found == ["dense", "delta", "delta", "dense", "delta"]


def test_values_that_are_not_finite_are_refused(make: Any) -> None:
    """And the update after that does not start from them."""
    fleet, tensors = make(1, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors, version)
    bad = dict(small(tensors, 1))
    bad["model.norm.weight"] = bad["model.norm.weight"] * np.nan
    with pytest.raises(NonFiniteWeights, match=r"model\.norm\.weight"):
        fleet.sync(bad, 2)
    fleet.hold(tensors)
    for version in (2, 3):
        fleet.sync(tensors := small(tensors, version), version)
        fleet.hold(tensors)


def test_a_wrong_base_is_noticed_and_nothing_is_committed(make: Any) -> None:
    fleet, tensors = make(1, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors := small(tensors, version), version)
    fleet.publisher._sent._kept["bfloat16", "model.norm.weight", ((0, 64),)].values[3] += 1
    with pytest.raises(DeltaMismatch, match=r"delta of model\.norm\.weight: the result has another checksum"):
        fleet.sync(small(tensors, 2), 2)
    fleet.hold(tensors)
    tensors = small(tensors, 2)
    assert encodings(fleet.sync(tensors, 2)) == ["dense"]
    fleet.hold(tensors)


@pytest.mark.parametrize("fault", ["damaged", "no base", "cut off"])
def test_a_delta_that_does_not_arrive_well_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    fleet, tensors = make(2, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors := small(tensors, version), version)
    send = tcp.TcpSender.send_delta
    if fault == "no base":
        monkeypatch.setattr(HostReceiver, "bases", property(lambda _: {}, lambda *_: None), raising=False)
    else:
        change = (lambda data: data[:-1] + bytes([data[-1] ^ 8])) if fault == "damaged" else (lambda data: data[:-1])
        monkeypatch.setattr(
            tcp.TcpSender, "send_delta", lambda sender, i, data, kind: send(sender, i, change(data), kind)
        )
    with pytest.raises(DeltaMismatch):
        fleet.sync(small(tensors, 2), 2)
    monkeypatch.undo()
    fleet.hold(tensors)
    for version in (2, 3):
        fleet.sync(tensors := small(tensors, version), version)
        fleet.hold(tensors)


def test_an_engine_that_dies_in_a_delta_fails_the_update(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_SECONDS", 5.0)
    fleet, tensors = make(2, delta="always"), weights(0)
    for version in range(2):
        fleet.sync(tensors := small(tensors, version), version)
    real, dead = tcp.TcpSender.send_delta, fleet.engines["engine-1"]

    def dying(sender: tcp.TcpSender, index: int, data: bytes, encoding: Encoding) -> None:
        if index == 5:
            for receiver in dead.inbox._ranks[0].receivers.values():
                for connection in receiver._connections[:]:  # type: ignore[attr-defined]
                    connection.shutdown(2)
                receiver.close()
        real(sender, index, data, encoding)

    monkeypatch.setattr(tcp.TcpSender, "send_delta", dying)
    with pytest.raises(TransferError):
        fleet.sync(small(tensors, 2), 2)
    monkeypatch.undo()
    fleet.hold(tensors)
    fleet.engines.pop("engine-1").inbox.close()
    for version in (2, 3):
        fleet.sync(tensors := small(tensors, version), version)
        fleet.hold(tensors)


def test_a_bridge_sends_all_bytes_within_the_same_sync(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config()
    params = random_params(config)
    model = write_config(tmp_path, config)
    engine = EmbeddedConfig(max_num_seqs=2, dtype="bfloat16")
    with slipstream.inprocess(model, engine=engine, transport="tcp", delta="always") as bridge:
        for _ in range(2):
            bridge.sync(params)
            params = jax.tree.map(lambda x: x + np.float32(1e-3), params)
        assert encodings(bridge.sync(params)) == ["delta"]
        kept = bridge._publisher._sent._kept
        next(iter(kept.values())).values[0] += 1
        params = jax.tree.map(lambda x: x + np.float32(1e-3), params)
        with caplog.at_level(logging.WARNING):
            report = bridge.sync(params)
        assert encodings(report) == ["dense"] and "all bytes are sent again" in caplog.text
        assert bridge.verify(params).is_same and bridge.version == 3
