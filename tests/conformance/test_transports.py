"""Conformance tests for transports through host memory. A new transport is added by its name in `TRANSPORTS`."""

import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, TransferError
from slipstream.types import Parameter, ParameterPart
from slipstream.weights import delta
from slipstream.weights.checksum import ScanOptions, checksum
from slipstream.weights.plan import Move
from slipstream.weights.rank_image import rank_image
from slipstream.weights.transports.contract import REFUSED
from slipstream.weights.transports.host import shm, tcp
from slipstream.weights.update.transport_choice import (
    DELTA_TRANSPORTS,
    TRANSPORTS,
    choose,
    host_identity,
    make_receiver,
    open_sender,
)

SHAPES = {"a": (30, 40), "b": (7,), "c": (300, 1000), "d": ()}
WHOLE = {name: tuple((0, n) for n in shape) for name, shape in SHAPES.items()}
IMAGE = rank_image(
    [Parameter(n, 0, s, (ParameterPart(n, WHOLE[n], WHOLE[n]),)) for n, s in SHAPES.items()], 0, "float32"
)
COLUMNS = ((0, 30), (10, 40))
BOXES = [("a", ((0, 30), (0, 10))), ("a", COLUMNS), ("b", WHOLE["b"]), ("c", WHOLE["c"]), ("d", ())]
MOVES = {i: Move(n, box, 0, n, box, 0) for i, (n, box) in enumerate(BOXES)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {i: rng.standard_normal([b - a for a, b in box], np.float32) for i, (_, box) in enumerate(BOXES)}


class Transport:
    def __init__(self, transport):
        self.receiver = make_receiver(transport, IMAGE.num_bytes, len(MOVES))
        self.pieces = {i: IMAGE.piece(self.receiver.buffer, n, box) for i, (n, box) in enumerate(BOXES)}

    def sender(self, moves=MOVES, hashed=True):
        return open_sender(self.receiver.link, IMAGE, moves, ScanOptions(hashed))

    def expect(self, version, hashed=True):
        self.receiver.expect(version, self.pieces, hashed)

    def holds(self, values):
        for index, value in values.items():
            np.testing.assert_array_equal(self.pieces[index], value)


def send_all(sender, version, values):
    sender.begin(version)
    sums = {index: sender.send(index, value).checksum for index, value in values.items()}
    sender.flush()
    return sums


@pytest.fixture(params=TRANSPORTS)
def transport(request, tmp_path):
    made = Transport(f"disk:{tmp_path}" if request.param == "disk" else request.param)
    yield made
    made.receiver.close()


def test_pieces_arrive_in_place_with_their_checksums(transport):
    transport.expect(0)
    sums = send_all(transport.sender(), 0, arrays(1))
    assert transport.receiver.checksums(sums) == sums == {i: checksum(a) for i, a in arrays(1).items()}
    transport.holds(arrays(1))


def test_a_transport_can_be_reused(transport):
    sender = transport.sender()
    for version in range(4):
        transport.expect(version)
        sums = send_all(sender, version, arrays(version))
        assert transport.receiver.checksums(sums) == sums
        transport.receiver.senders_opened()
        transport.holds(arrays(version))


def test_a_sender_may_be_ahead_of_the_control_plane(transport):
    import threading

    sender, found = transport.sender(), {}
    thread = threading.Thread(target=lambda: found.update(send_all(sender, 5, arrays(5))))
    thread.start()
    time.sleep(0.1)
    transport.expect(5)
    thread.join(30)
    assert transport.receiver.checksums(found) == found
    transport.holds(arrays(5))


def test_several_senders_fill_one_image(transport):
    transport.expect(0)
    sums = {}
    for share in ((0, 3), (1, 2, 4)):
        sender = transport.sender({i: MOVES[i] for i in share})
        sums |= send_all(sender, 0, {i: arrays(2)[i] for i in share})
    assert transport.receiver.checksums(sums) == sums
    transport.holds(arrays(2))


def test_a_partial_update_leaves_other_pieces_unchanged(transport):
    sender = transport.sender()
    transport.expect(0)
    transport.receiver.checksums(send_all(sender, 0, arrays(1)))
    transport.expect(1)
    some = {2: arrays(9)[2]}
    sums = send_all(sender, 1, some)
    assert transport.receiver.checksums(sums) == sums
    transport.holds(arrays(1) | some)


def test_values_are_cast_and_strides_do_not_matter(transport):
    transport.expect(0)
    wide = {i: np.asfortranarray(a.astype(np.float64)) for i, a in arrays(3).items()}
    sums = send_all(transport.sender(), 0, wide)
    assert transport.receiver.checksums(sums) == sums
    transport.holds(arrays(3))


def test_bytes_arrive_without_checksums(transport):
    transport.expect(0, hashed=False)
    sums = send_all(transport.sender(hashed=False), 0, arrays(1))
    assert transport.receiver.checksums(sums) == sums == dict.fromkeys(sums, 0)
    transport.holds(arrays(1))


def test_pieces_stay_valid_after_both_halves_closed(transport):
    transport.expect(0)
    sender = transport.sender()
    transport.receiver.checksums(send_all(sender, 0, arrays(1)))
    for half in (sender, transport.receiver, sender, transport.receiver):
        half.close()
    transport.holds(arrays(1))


@pytest.fixture
def halves():
    """16-bit pieces, one of them not contiguous, and those of the version before."""
    image = rank_image([Parameter("a", 0, (30, 40), (ParameterPart("a", WHOLE["a"], WHOLE["a"]),))], 0, "bfloat16")
    boxes = {0: ((0, 30), (0, 10)), 1: COLUMNS}
    return image, {i: Move("a", box, 0, "a", box, 0) for i, box in boxes.items()}


@pytest.mark.parametrize("name", DELTA_TRANSPORTS)
def test_deltas_arrive_in_place_with_the_checksums_of_the_result(name, tmp_path, halves):
    image, moves = halves
    receiver = make_receiver(f"disk:{tmp_path}" if name == "disk" else name, image.num_bytes, len(moves))
    pieces = {i: image.piece(receiver.buffer, "a", move.local_box) for i, move in moves.items()}
    rng = np.random.default_rng(0)
    old = {i: rng.standard_normal(piece.shape, np.float32).astype(piece.dtype) for i, piece in pieces.items()}
    new = {i: np.where(rng.random(a.shape) < 0.1, a + a, a).astype(a.dtype) for i, a in old.items()}
    data = {i: delta.encode_chunk(delta.bits(old[i].copy()), delta.bits(new[i])) for i in old}
    sums = {i: checksum(a) for i, a in new.items()}
    sender = open_sender(receiver.link, image, moves, ScanOptions())
    for version, bases in enumerate((old, {0: old[0]}, old)):
        receiver.bases = bases
        receiver.expect(version, pieces, True)
        sender.begin(version)
        for i in data:
            damaged = version == 2 and i == 1
            sender.send_delta(i, data[i][:-3] if damaged else data[i], delta.Encoding.DELTA)
        sender.flush()
        received = receiver.checksums(sums)
        if version == 0:
            assert received == sums and receiver.deltas == {0: "", 1: ""}
            np.testing.assert_array_equal(pieces[1].view(np.uint16), new[1].view(np.uint16))
        else:  # without a base, or damaged
            assert received == {0: sums[0], 1: REFUSED}
            assert "holds no earlier version" in receiver.deltas[1] or "the delta ends" in receiver.deltas[1]
    receiver.close()


def test_missing_pieces_are_an_error_or_a_wrong_checksum(transport, monkeypatch):
    monkeypatch.setattr(tcp, "STALL_SECONDS", 0.5)
    transport.expect(0)
    sums = send_all(transport.sender(), 0, {0: arrays(1)[0]})
    try:
        assert transport.receiver.checksums(sums | {3: checksum(arrays(1)[3])})[3] != checksum(arrays(1)[3])
    except TransferError as error:
        assert "1 piece(s)" in str(error)


def test_a_closed_receiver_cannot_be_opened(transport):
    facts = json.loads(transport.receiver.link)
    if facts["transport"] == "disk":  # the directory remains; its files are removed
        transport.expect(0)
        send_all(transport.sender(), 0, arrays(1))
        transport.receiver.close()
        assert list(Path(facts["directory"]).iterdir()) == []
        return
    transport.receiver.close()
    with pytest.raises(TransferError):
        send_all(transport.sender(), 0, arrays(1))


@given(st.binary(max_size=40))
def test_malformed_links_are_refused(link):
    with pytest.raises(TransferError):
        open_sender(link, IMAGE, MOVES, ScanOptions())


@given(
    st.sampled_from(TRANSPORTS),
    st.dictionaries(
        st.sampled_from(["path", "size", "nonce", "key", "pieces", "host", "secret", "name", "directory"]),
        st.none() | st.integers() | st.text(),
    ),
)
def test_links_with_wrong_fields_are_refused(name, fields):
    with pytest.raises(TransferError):
        open_sender(json.dumps({"transport": name, **fields}).encode(), IMAGE, MOVES, ScanOptions())


def test_an_unknown_transport_is_named():
    with pytest.raises(TransferError, match="'pigeon'"):
        open_sender(b'{"transport": "pigeon"}', IMAGE, MOVES, ScanOptions())
    with pytest.raises(TransferError, match="'pigeon'"):
        make_receiver("pigeon", 10, 1)


# --- shm ---


def segments():
    return sorted(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


def test_the_segment_is_private_and_unlinked_once_opened():
    before = set(segments())
    transport = Transport("shm")
    (path,) = set(segments()) - before
    assert path.stat().st_mode & 0o777 == 0o600
    sender = transport.sender()
    transport.receiver.senders_opened()
    assert not path.exists()
    transport.expect(0)
    transport.receiver.checksums(send_all(sender, 0, arrays(1)))
    transport.holds(arrays(1))


def test_a_closed_sender_maps_nothing():
    """Though something may still refer to it."""
    before = set(segments())
    transport = Transport("shm")
    (path,) = set(segments()) - before
    sender = transport.sender()
    send_all(sender, 0, arrays(1))
    assert Path("/proc/self/maps").read_text().count(path.name) == 2
    sender.close()
    assert Path("/proc/self/maps").read_text().count(path.name) == 1
    transport.receiver.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/other", "/dev/null"])
def test_a_link_cannot_make_a_trainer_write_to_other_files(path):
    link = json.dumps({"transport": "shm", "path": path, "size": 10, "nonce": "00", "pieces": 1}).encode()
    with pytest.raises(TransferError, match="not a segment"):
        open_sender(link, IMAGE, MOVES, ScanOptions())


def test_a_link_to_another_segment_is_refused():
    one, two = Transport("shm"), Transport("shm")
    facts = json.loads(one.receiver.link) | {"path": json.loads(two.receiver.link)["path"]}
    with pytest.raises(TransferError, match="not the segment"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    facts = json.loads(one.receiver.link) | {"size": 99}
    with pytest.raises(TransferError, match="the link says 99"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    small = make_receiver("shm", 64, len(MOVES))
    with pytest.raises(TransferError, match="the rank's image has"):
        open_sender(small.link, IMAGE, MOVES, ScanOptions())
    for receiver in (one.receiver, two.receiver, small):
        receiver.close()


def test_running_out_of_shared_memory_is_an_error_and_not_a_crash():
    before = segments()
    with pytest.raises(TransferError, match="shared memory"):
        make_receiver("shm", 1 << 50, 1)
    assert segments() == before


def _hold_a_segment(ready):
    receiver = make_receiver("shm", 100, 1)
    ready.put(json.loads(receiver.link)["path"])
    time.sleep(60)


def test_sweep_removes_only_segments_of_dead_owners():
    context = mp.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=_hold_a_segment, args=(ready,))
    process.start()
    path = Path(ready.get(timeout=30))
    mine = make_receiver("shm", 100, 1)
    assert path.exists() and path not in shm.sweep()
    os.kill(process.pid, signal.SIGKILL)  # not yet waited for: a zombie counts as dead
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:
        shm.sweep()
        time.sleep(0.05)
    assert not path.exists()
    assert Path(json.loads(mine.link)["path"]).exists()
    process.join()
    mine.close()


# --- tcp ---


def test_unauthenticated_clients_are_dropped():
    transport = Transport("tcp")
    facts = json.loads(transport.receiver.link)
    for junk in (b"", os.urandom(32), os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n" + bytes(32)):
        with socket.create_connection((facts["host"], facts["port"]), timeout=5) as stranger:
            try:
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except OSError:
                pass  # already disconnected
    transport.expect(0)
    sums = send_all(transport.sender(), 0, arrays(1))
    assert transport.receiver.checksums(sums) == sums
    transport.receiver.close()


def test_a_wrong_secret_is_refused():
    transport = Transport("tcp")
    facts = json.loads(transport.receiver.link) | {"secret": "00" * 32}
    transport.expect(0)
    with pytest.raises(
        TransferError, match=rf"{facts['host']}:{facts['port']} rejected the connection: the link's secret is wrong"
    ):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    assert not (transport.pieces[3] == arrays(1)[3]).all()
    transport.receiver.close()


def test_unexpected_frames_end_the_connection():
    transport = Transport("tcp")
    transport.expect(3)
    sender = transport.sender()
    sender.begin(2)  # an old version
    with pytest.raises(TransferError):
        for _ in range(200):
            sender.send(3, arrays(1)[3])
    assert not (transport.pieces[3] == arrays(1)[3]).all()
    sums = send_all(transport.sender(), 3, arrays(2))
    with pytest.raises(TransferError, match="unexpected piece"):
        transport.receiver.checksums(sums | {99: 0})
    transport.receiver.close()


def test_beyond_loopback_needs_tls(tmp_path):
    with pytest.raises(ConfigError, match="TLS is required"):
        tcp.ListenConfig("0.0.0.0")
    with pytest.raises(ConfigError, match="cannot load the certificate"):
        tcp.TcpReceiver(10, tcp.ListenConfig("127.0.0.1", str(tmp_path / "no.pem"), str(tmp_path / "no.key")))


def certificate(directory, name):
    pem, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engine"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(pem)], check=True, capture_output=True)
    return str(pem), str(key)


def test_tls_accepts_only_the_announced_certificate(tmp_path):
    receiver = tcp.TcpReceiver(IMAGE.num_bytes, tcp.ListenConfig("127.0.0.1", *certificate(tmp_path, "one")))
    pieces = {i: IMAGE.piece(receiver.buffer, n, box) for i, (n, box) in enumerate(BOXES)}
    receiver.expect(0, pieces, True)
    sums = send_all(open_sender(receiver.link, IMAGE, MOVES, ScanOptions()), 0, arrays(1))
    assert receiver.checksums(sums) == sums
    np.testing.assert_array_equal(pieces[3], arrays(1)[3])
    facts = json.loads(receiver.link) | {"certificate": "ab" * 32}
    with pytest.raises(TransferError, match="another certificate"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    facts = json.loads(receiver.link) | {"certificate": ""}
    with pytest.raises(TransferError, match=r"rejected the connection.*uses TLS"):  # to loopback, without TLS
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    receiver.close()
    plain = tcp.TcpReceiver(IMAGE.num_bytes)
    facts = json.loads(plain.link) | {"certificate": "ab" * 32}
    with pytest.raises(TransferError, match="does not speak TLS"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES, ScanOptions())
    plain.close()


# --- disk ---


def test_files_appear_atomically(tmp_path, monkeypatch):
    from slipstream.tensors import safetensors_dir

    transport = Transport(f"disk:{tmp_path}")
    transport.expect(0)
    sender = transport.sender()
    sender.begin(0)
    sums = {i: sender.send(i, a).checksum for i, a in arrays(1).items()}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(
        safetensors_dir, "save_file", lambda pending, path, metadata: (Path(path).write_bytes(b"half"), _full())[0]
    )
    with pytest.raises(TransferError, match="full or read-only"):
        sender.flush()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransferError, match="5 piece"):
        transport.receiver.checksums(sums)
    monkeypatch.undo()
    sums = send_all(sender, 0, arrays(1))
    assert transport.receiver.checksums(sums) == sums
    transport.receiver.close()
    assert list(tmp_path.iterdir()) == []


def _full():
    raise OSError(28, "No space left on device")


def test_a_damaged_file_is_an_error(tmp_path):
    transport = Transport(f"disk:{tmp_path}")
    transport.expect(0)
    sums = send_all(transport.sender(), 0, arrays(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(TransferError, match="cannot read the weights"):
        transport.receiver.checksums(sums)


# --- choosing a transport ---


def test_the_fastest_usable_transport_is_chosen():
    here, pid, every = host_identity(), os.getpid(), list(TRANSPORTS)
    assert choose("e", every, here, pid) == "memory"
    assert choose("e", every, here, pid + 1) == "shm"
    assert choose("e", every, "another host", pid + 1) == "tcp"
    assert choose("e", every, here, pid, forced="shm") == "shm"
    assert choose("e", every, here, pid, forced="disk:/x") == "disk:/x"
    with pytest.raises(TransferError, match="'e'"):
        choose("e", ["memory", "shm"], "another host", pid + 1)
    with pytest.raises(TransferError, match="'memory' cannot reach"):
        choose("e", every, here, pid + 1, forced="memory")
    with pytest.raises(TransferError, match="needs a directory"):
        choose("e", every, here, pid, forced="disk")
