"""What every data plane must do. A new one joins by its name in `TRANSPORTS`."""

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
from slipstream.types import Parameter, Part
from slipstream.weights.checksum import checksum
from slipstream.weights.image import image_of
from slipstream.weights.plan import Move
from slipstream.weights.transports import (
    TRANSPORTS,
    base,
    choose,
    host_identity,
    make_landing,
    open_sender,
    shm,
    tcp,
)

SHAPES = {"a": (30, 40), "b": (7,), "c": (300, 1000), "d": ()}
WHOLE = {name: tuple((0, n) for n in shape) for name, shape in SHAPES.items()}
IMAGE = image_of([Parameter(n, 0, s, (Part(n, WHOLE[n], WHOLE[n]),)) for n, s in SHAPES.items()], 0, "float32")
COLUMNS = ((0, 30), (10, 40))
BOXES = [("a", ((0, 30), (0, 10))), ("a", COLUMNS), ("b", WHOLE["b"]), ("c", WHOLE["c"]), ("d", ())]
MOVES = {i: Move(n, box, 0, n, box, 0) for i, (n, box) in enumerate(BOXES)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {i: rng.standard_normal([b - a for a, b in box], np.float32) for i, (_, box) in enumerate(BOXES)}


class Plane:
    def __init__(self, transport):
        self.landing = make_landing(transport, IMAGE.num_bytes, len(MOVES))
        self.pieces = {i: IMAGE.piece(self.landing.buffer, n, box) for i, (n, box) in enumerate(BOXES)}

    def sender(self, moves=MOVES, hashed=True):
        return open_sender(self.landing.link, IMAGE, moves, hashed)

    def expect(self, version, hashed=True):
        self.landing.expect(version, self.pieces, hashed)

    def holds(self, values):
        for index, value in values.items():
            np.testing.assert_array_equal(self.pieces[index], value)


def send_all(sender, version, values):
    sender.begin(version)
    sums = {index: sender.send(index, value) for index, value in values.items()}
    sender.flush()
    return sums


@pytest.fixture(params=TRANSPORTS)
def plane(request, tmp_path):
    made = Plane(f"disk:{tmp_path}" if request.param == "disk" else request.param)
    yield made
    made.landing.close()


def test_pieces_arrive_in_place_with_their_checksums(plane):
    plane.expect(0)
    sums = send_all(plane.sender(), 0, arrays(1))
    assert plane.landing.checksums(sums) == sums == {i: checksum(a) for i, a in arrays(1).items()}
    plane.holds(arrays(1))


def test_a_plane_is_used_again_and_again(plane):
    sender = plane.sender()
    for version in range(4):
        plane.expect(version)
        sums = send_all(sender, version, arrays(version))
        assert plane.landing.checksums(sums) == sums
        plane.landing.settle()
        plane.holds(arrays(version))


def test_a_sender_may_be_ahead_of_the_control_plane(plane):
    import threading

    sender, found = plane.sender(), {}
    thread = threading.Thread(target=lambda: found.update(send_all(sender, 5, arrays(5))))
    thread.start()
    time.sleep(0.1)
    plane.expect(5)
    thread.join(30)
    assert plane.landing.checksums(found) == found
    plane.holds(arrays(5))


def test_several_senders_fill_one_image(plane):
    plane.expect(0)
    sums = {}
    for share in ((0, 3), (1, 2, 4)):
        sender = plane.sender({i: MOVES[i] for i in share})
        sums |= send_all(sender, 0, {i: arrays(2)[i] for i in share})
    assert plane.landing.checksums(sums) == sums
    plane.holds(arrays(2))


def test_a_part_of_the_pieces_leaves_the_others_alone(plane):
    sender = plane.sender()
    plane.expect(0)
    plane.landing.checksums(send_all(sender, 0, arrays(1)))
    plane.expect(1)
    some = {2: arrays(9)[2]}
    sums = send_all(sender, 1, some)
    assert plane.landing.checksums(sums) == sums
    plane.holds(arrays(1) | some)


def test_values_are_cast_and_strides_do_not_matter(plane):
    plane.expect(0)
    wide = {i: np.asfortranarray(a.astype(np.float64)) for i, a in arrays(3).items()}
    sums = send_all(plane.sender(), 0, wide)
    assert plane.landing.checksums(sums) == sums
    plane.holds(arrays(3))


def test_without_checksums_the_bytes_arrive_all_the_same(plane):
    plane.expect(0, hashed=False)
    sums = send_all(plane.sender(hashed=False), 0, arrays(1))
    assert plane.landing.checksums(sums) == sums == dict.fromkeys(sums, 0)
    plane.holds(arrays(1))


def test_what_landed_stays_after_both_halves_closed(plane):
    plane.expect(0)
    sender = plane.sender()
    plane.landing.checksums(send_all(sender, 0, arrays(1)))
    for half in (sender, plane.landing, sender, plane.landing):
        half.close()
    plane.holds(arrays(1))


def test_pieces_that_do_not_come_are_an_error_or_a_wrong_checksum(plane, monkeypatch):
    monkeypatch.setattr(base, "SILENCE_SECONDS", 0.5)
    plane.expect(0)
    sums = send_all(plane.sender(), 0, {0: arrays(1)[0]})
    try:
        assert plane.landing.checksums(sums | {3: checksum(arrays(1)[3])})[3] != checksum(arrays(1)[3])
    except TransferError as error:
        assert "1 piece(s)" in str(error)


def test_a_closed_landing_cannot_be_opened(plane):
    facts = json.loads(plane.landing.link)
    if facts["transport"] == "disk":  # a directory stays a directory; what is left in it goes
        plane.expect(0)
        send_all(plane.sender(), 0, arrays(1))
        plane.landing.close()
        assert list(Path(facts["directory"]).iterdir()) == []
        return
    plane.landing.close()
    with pytest.raises(TransferError):
        send_all(plane.sender(), 0, arrays(1))


@given(st.binary(max_size=40))
def test_links_that_are_nonsense_are_refused(link):
    with pytest.raises(TransferError):
        open_sender(link, IMAGE, MOVES)


@given(
    st.sampled_from(TRANSPORTS),
    st.dictionaries(
        st.sampled_from(["path", "size", "nonce", "key", "pieces", "host", "secret", "name", "directory"]),
        st.none() | st.integers() | st.text(),
    ),
)
def test_links_with_wrong_fields_are_refused(name, fields):
    with pytest.raises(TransferError):
        open_sender(json.dumps({"transport": name, **fields}).encode(), IMAGE, MOVES)


def test_an_unknown_transport_is_named():
    with pytest.raises(TransferError, match="'pigeon'"):
        open_sender(b'{"transport": "pigeon"}', IMAGE, MOVES)
    with pytest.raises(TransferError, match="'pigeon'"):
        make_landing("pigeon", 10, 1)


# --- shm's own promises -----------------------------------------------------------------------------------------------


def segments():
    return sorted(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


def test_the_segment_is_private_and_gone_once_settled():
    before = set(segments())
    plane = Plane("shm")
    (path,) = set(segments()) - before
    assert path.stat().st_mode & 0o777 == 0o600
    sender = plane.sender()
    plane.landing.settle()
    assert not path.exists()
    plane.expect(0)
    plane.landing.checksums(send_all(sender, 0, arrays(1)))
    plane.holds(arrays(1))


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/other", "/dev/null"])
def test_a_link_cannot_make_a_trainer_write_to_other_files(path):
    link = json.dumps({"transport": "shm", "path": path, "size": 10, "nonce": "00", "pieces": 1}).encode()
    with pytest.raises(TransferError, match="not a segment"):
        open_sender(link, IMAGE, MOVES)


def test_a_link_to_another_segment_is_noticed():
    one, two = Plane("shm"), Plane("shm")
    facts = json.loads(one.landing.link) | {"path": json.loads(two.landing.link)["path"]}
    with pytest.raises(TransferError, match="not the segment"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    facts = json.loads(one.landing.link) | {"size": 99}
    with pytest.raises(TransferError, match="the link says 99"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    small = make_landing("shm", 64, len(MOVES))
    with pytest.raises(TransferError, match="the rank's image has"):
        open_sender(small.link, IMAGE, MOVES)
    for landing in (one.landing, two.landing, small):
        landing.close()


def test_more_than_there_is_is_an_error_and_not_a_crash():
    before = segments()
    with pytest.raises(TransferError, match="shared memory"):
        make_landing("shm", 1 << 50, 1)
    assert segments() == before


def _hold_a_segment(ready):
    landing = make_landing("shm", 100, 1)
    ready.put(json.loads(landing.link)["path"])
    time.sleep(60)


def test_a_dead_owners_segment_is_swept_and_a_living_ones_is_not():
    context = mp.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=_hold_a_segment, args=(ready,))
    process.start()
    path = Path(ready.get(timeout=30))
    mine = make_landing("shm", 100, 1)
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


# --- tcp's own promises -----------------------------------------------------------------------------------------------


def test_strangers_on_the_port_are_dropped_and_do_no_harm():
    plane = Plane("tcp")
    facts = json.loads(plane.landing.link)
    for junk in (b"", os.urandom(32), os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n" + bytes(32)):
        with socket.create_connection((facts["host"], facts["port"]), timeout=5) as stranger:
            try:
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except OSError:
                pass  # hung up on already
    plane.expect(0)
    sums = send_all(plane.sender(), 0, arrays(1))
    assert plane.landing.checksums(sums) == sums
    plane.landing.close()


def test_a_wrong_secret_is_refused():
    plane = Plane("tcp")
    facts = json.loads(plane.landing.link) | {"secret": "00" * 32}
    plane.expect(0)
    with pytest.raises(TransferError, match=rf"{facts['host']}:{facts['port']} hung up on us: the secret"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    assert not (plane.pieces[3] == arrays(1)[3]).all()
    plane.landing.close()


def test_frames_that_nobody_expects_end_the_connection():
    plane = Plane("tcp")
    plane.expect(3)
    sender = plane.sender()
    sender.begin(2)  # an old version
    with pytest.raises(TransferError):
        for _ in range(200):
            sender.send(3, arrays(1)[3])
    assert not (plane.pieces[3] == arrays(1)[3]).all()
    sums = send_all(plane.sender(), 3, arrays(2))
    with pytest.raises(TransferError, match="nobody expects"):
        plane.landing.checksums(sums | {99: 0})
    plane.landing.close()


def test_beyond_loopback_needs_tls(tmp_path):
    with pytest.raises(ConfigError, match="needs TLS"):
        tcp.Listen("0.0.0.0")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        tcp.TcpLanding(10, tcp.Listen("127.0.0.1", str(tmp_path / "no.pem"), str(tmp_path / "no.key")))


def certificate(directory, name):
    pem, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engine"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(pem)], check=True, capture_output=True)
    return str(pem), str(key)


def test_tls_with_the_announced_certificate_and_no_other(tmp_path):
    landing = tcp.TcpLanding(IMAGE.num_bytes, tcp.Listen("127.0.0.1", *certificate(tmp_path, "one")))
    pieces = {i: IMAGE.piece(landing.buffer, n, box) for i, (n, box) in enumerate(BOXES)}
    landing.expect(0, pieces, True)
    sums = send_all(open_sender(landing.link, IMAGE, MOVES), 0, arrays(1))
    assert landing.checksums(sums) == sums
    np.testing.assert_array_equal(pieces[3], arrays(1)[3])
    facts = json.loads(landing.link) | {"certificate": "ab" * 32}
    with pytest.raises(TransferError, match="another certificate"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    facts = json.loads(landing.link) | {"certificate": ""}
    with pytest.raises(TransferError, match=r"hung up on us.*or it speaks TLS"):  # to loopback, without TLS
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    landing.close()
    plain = tcp.TcpLanding(IMAGE.num_bytes)
    facts = json.loads(plain.link) | {"certificate": "ab" * 32}
    with pytest.raises(TransferError, match="does not speak TLS"):
        open_sender(json.dumps(facts).encode(), IMAGE, MOVES)
    plain.close()


# --- disk's own promises ----------------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    from slipstream.weights.transports import disk

    plane = Plane(f"disk:{tmp_path}")
    plane.expect(0)
    sender = plane.sender()
    sender.begin(0)
    sums = {i: sender.send(i, a) for i, a in arrays(1).items()}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disk, "save_file", lambda pending, path: (Path(path).write_bytes(b"half"), _full())[0])
    with pytest.raises(TransferError, match="full or read-only"):
        sender.flush()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransferError, match="5 piece"):
        plane.landing.checksums(sums)
    monkeypatch.undo()
    sums = send_all(sender, 0, arrays(1))
    assert plane.landing.checksums(sums) == sums
    plane.landing.close()
    assert list(tmp_path.iterdir()) == []


def _full():
    raise OSError(28, "No space left on device")


def test_a_damaged_file_is_an_error(tmp_path):
    plane = Plane(f"disk:{tmp_path}")
    plane.expect(0)
    sums = send_all(plane.sender(), 0, arrays(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(TransferError, match="cannot be read"):
        plane.landing.checksums(sums)


# --- the choice -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(TransferError, match="say where"):
        choose("e", every, here, pid, forced="disk")
