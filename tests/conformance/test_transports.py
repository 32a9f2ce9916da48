"""What every data plane must do. A new one joins by its name in `SENDERS` and `RECEIVERS`."""

import json
import multiprocessing as mp
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import TransferError
from slipstream.weights import transports
from slipstream.weights.transports import RECEIVERS, SENDERS, choose, host_identity, open_receiver, shm

NAMES = sorted(SENDERS)


@pytest.fixture(params=NAMES)
def sender(request):
    made = SENDERS[request.param](1000)
    yield made
    made.close()


def test_both_halves_exist_for_every_name():
    assert set(SENDERS) == set(RECEIVERS)


def test_bytes_arrive(sender):
    receiver = open_receiver(sender.link)
    payload = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    sender.region(0, 600)[:] = payload[:600]
    sender.region(600, 400)[:] = payload[600:]
    sender.flush()
    np.testing.assert_array_equal(receiver.region(0, 1000), payload)
    np.testing.assert_array_equal(receiver.region(300, 500), payload[300:800])
    receiver.close()


def test_a_stream_is_used_again_and_again(sender):
    receiver = open_receiver(sender.link)
    sender.attached()
    for round in range(3):
        sender.region(0, 1000)[:] = round + 1
        sender.flush()
        assert (receiver.region(0, 1000) == round + 1).all()
    receiver.close()


def test_several_receivers_read_one_stream(sender):
    receivers = [open_receiver(sender.link) for _ in range(3)]
    sender.region(0, 1000)[:] = 7
    sender.flush()
    assert all((r.region(0, 1000) == 7).all() for r in receivers)


def test_the_receiver_cannot_write(sender):
    receiver = open_receiver(sender.link)
    with pytest.raises(ValueError, match="read-only"):
        receiver.region(0, 10)[:] = 1


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 1001), (999, 2), (0, -1)])
def test_regions_outside_the_stream_are_refused(sender, offset, size):
    receiver = open_receiver(sender.link)
    for half in (sender, receiver):
        with pytest.raises(TransferError, match="outside"):
            half.region(offset, size)


def test_what_was_mapped_stays_readable_after_the_sender_closed(sender):
    receiver = open_receiver(sender.link)
    sender.region(0, 1000)[:] = 5
    sender.close()
    sender.close()
    assert (receiver.region(0, 1000) == 5).all()
    receiver.close()
    receiver.close()


def test_a_closed_link_cannot_be_opened(sender):
    sender.close()
    with pytest.raises(TransferError):
        open_receiver(sender.link)


@given(st.binary(max_size=40))
def test_links_that_are_nonsense_are_refused(link):
    with pytest.raises(TransferError):
        open_receiver(link)


@given(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(["path", "size", "nonce", "key"]), st.none() | st.integers() | st.text()),
)
def test_links_with_wrong_fields_are_refused(name, fields):
    with pytest.raises(TransferError):
        open_receiver(json.dumps({"transport": name, **fields}).encode())


def test_an_unknown_transport_is_named():
    with pytest.raises(TransferError, match="'pigeon'"):
        open_receiver(b'{"transport": "pigeon"}')


# --- shm's own promises -----------------------------------------------------------------------------------------------


def segments():
    return sorted(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


def test_the_segment_is_private_and_gone_once_attached():
    before = set(segments())
    sender = shm.ShmSender(100)
    (path,) = set(segments()) - before
    assert path.stat().st_mode & 0o777 == 0o600
    receiver = shm.ShmReceiver(sender.link)
    sender.attached()
    assert not path.exists()
    sender.region(0, 100)[:] = 3
    assert (receiver.region(0, 100) == 3).all()


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/other", "/dev/null"])
def test_a_link_cannot_make_the_engine_open_other_files(path):
    link = json.dumps({"transport": "shm", "path": path, "size": 10, "nonce": "00"}).encode()
    with pytest.raises(TransferError, match="not a segment"):
        open_receiver(link)


def test_a_link_to_another_segment_is_noticed():
    one, two = shm.ShmSender(100), shm.ShmSender(100)
    facts = json.loads(one.link) | {"path": json.loads(two.link)["path"]}
    with pytest.raises(TransferError, match="not the segment"):
        open_receiver(json.dumps(facts).encode())
    facts = json.loads(one.link) | {"size": 99}
    with pytest.raises(TransferError, match="holds 100 bytes"):
        open_receiver(json.dumps(facts).encode())
    one.close(), two.close()


def test_more_than_there_is_is_an_error_and_not_a_crash():
    before = segments()
    with pytest.raises(TransferError, match="shared memory"):
        shm.ShmSender(1 << 50)
    assert segments() == before


def _hold_a_segment(ready):
    sender = shm.ShmSender(100)
    ready.put(json.loads(sender.link)["path"])
    time.sleep(60)


def test_a_dead_owners_segment_is_swept_and_a_living_ones_is_not():
    context = mp.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=_hold_a_segment, args=(ready,))
    process.start()
    path = ready.get(timeout=30)
    mine = shm.ShmSender(100)
    assert os.path.exists(path) and path not in map(str, shm.sweep())
    os.kill(process.pid, signal.SIGKILL)  # not yet waited for: a zombie counts as dead
    deadline = time.monotonic() + 10
    while os.path.exists(path) and time.monotonic() < deadline:
        shm.sweep()
        time.sleep(0.05)
    assert not os.path.exists(path)
    assert os.path.exists(json.loads(mine.link)["path"])
    process.join()
    mine.close()


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_fastest_usable_transport_is_chosen():
    here, pid = host_identity(), os.getpid()
    assert choose("e", ["memory", "shm"], here, pid) == "memory"
    assert choose("e", ["memory", "shm"], here, pid + 1) == "shm"
    assert choose("e", ["memory", "shm"], here, pid, forced="shm") == "shm"
    with pytest.raises(TransferError, match="'e'"):
        choose("e", ["memory", "shm"], "another host", pid + 1)
    with pytest.raises(TransferError, match="'memory' cannot reach"):
        choose("e", ["memory", "shm"], here, pid + 1, forced="memory")
    assert transports.host_identity() == here
