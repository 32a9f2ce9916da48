"""`NcclPair` with fakes for nccl4py and CUDA: a non-blocking NCCL that is slow, fails or hangs."""

import threading
from types import SimpleNamespace

import pytest

from slipstream.errors import TransferError
from slipstream.weights.transports.nccl import communicator
from slipstream.weights.transports.nccl.communicator import NcclPair

SUCCESS, IN_PROGRESS, REMOTE_ERROR = 0, 7, 6


class Fake:
    """The parts of nccl4py and cuda.core that a pair uses. `states` are NCCL's successive states; the last one repeats."""

    def __init__(self, *states, done_after=0, stuck=False):
        self.states, self.done_after, self.calls = list(states) or [SUCCESS], done_after, []
        self.release = threading.Event()
        if not stuck:
            self.release.set()
        self.core = SimpleNamespace(
            Communicator=SimpleNamespace(init=self.init),
            NCCLConfig=lambda blocking: {"blocking": blocking},
            UniqueId=SimpleNamespace(from_bytes=bytes),
        )
        self.raw = SimpleNamespace(
            Comm=lambda ptr: ptr,
            get_error_string=lambda state: f"error {state}",
            get_version=lambda: 23007,
            group_start=lambda: self.calls.append("start"),
            group_end=lambda: self.calls.append("end"),
            send=lambda *a: self.calls.append(("send", *a)),
            recv=lambda *a: self.calls.append(("recv", *a)),
            broadcast=lambda *a: self.calls.append(("broadcast", *a)),
        )
        stream = SimpleNamespace(handle=5, record=self.record, close=lambda: self.calls.append("stream closed"))
        device = SimpleNamespace(set_current=lambda: None, create_stream=lambda: stream)
        self.cuda = SimpleNamespace(Device=lambda ordinal: device)

    def init(self, num_ranks, rank, unique_id, config):
        assert (num_ranks, len(unique_id), config) == (2, 128, {"blocking": False})
        return SimpleNamespace(ptr=99, get_async_error=self.state, abort=self.abort)

    def state(self):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state

    def abort(self):
        self.calls.append("abort")
        self.release.wait(20)

    def record(self):
        return Mark(self)


class Mark:
    def __init__(self, fake):
        self._fake = fake

    @property
    def is_done(self):
        self._fake.done_after -= 1
        return self._fake.done_after < 0

    def sync(self):
        self._fake.calls.append("drained")


def pair_over(monkeypatch, fake, rank=0, primitive="send", deadline=0.05, stop=None):
    monkeypatch.setattr(communicator, "modules", lambda: (fake.raw, fake.core, fake.cuda))
    return NcclPair(bytes(128), rank, 0, primitive, "engine 'e0' rank 1", deadline, stop or threading.Event())


def test_a_call_is_polled_until_it_is_done(monkeypatch):
    fake = Fake(IN_PROGRESS, IN_PROGRESS, SUCCESS, IN_PROGRESS, SUCCESS, done_after=3)
    pair = pair_over(monkeypatch, fake, deadline=20.0)
    with pair.group("sending"):
        pair.send(1000, 64)
    pair.wait(pair.mark(), "sending")
    assert fake.calls == ["start", ("send", 1000, 64, 1, 1, 99, 5), "end"]
    assert pair.close() and pair.close()
    assert fake.calls[3:] == ["abort", "drained", "stream closed"]
    with pytest.raises(TransferError, match="closed"), pair.group("sending"):
        pass


def test_the_broadcast_primitive_replaces_send_and_recv(monkeypatch):
    for rank, call in ((0, "send"), (1, "recv")):
        fake = Fake()
        pair = pair_over(monkeypatch, fake, rank, "broadcast")
        with pair.group("moving"):
            getattr(pair, call)(1000, 64)
        assert fake.calls[1] == ("broadcast", 1000, 1000, 64, 1, 0, 99, 5)
    fake = Fake()
    pair = pair_over(monkeypatch, fake, 1)
    with pair.group("moving"):
        pair.recv(1000, 64)
    assert fake.calls[1] == ("recv", 1000, 64, 1, 0, 99, 5)


def test_a_peer_that_does_not_connect_is_an_error_and_an_abort(monkeypatch):
    fake = Fake(IN_PROGRESS)
    with pytest.raises(TransferError, match=r"engine 'e0' rank 1.*NCCL_SOCKET_IFNAME"):
        pair_over(monkeypatch, fake)
    assert fake.calls == ["abort", "drained", "stream closed"]


@pytest.mark.parametrize("state", [REMOTE_ERROR, RuntimeError("NCCL is upset")])
def test_an_nccl_error_is_a_transfer_error_and_an_abort(monkeypatch, state):
    fake = Fake(SUCCESS, state)
    pair = pair_over(monkeypatch, fake)
    with (
        pytest.raises(TransferError, match=r"sending bucket 1 with engine 'e0' rank 1"),
        pair.group("sending bucket 1"),
    ):
        pair.send(1, 1)
    assert "abort" in fake.calls


def test_a_stalled_stream_is_an_error(monkeypatch):
    fake = Fake(done_after=10**9)
    pair = pair_over(monkeypatch, fake)
    with pytest.raises(TransferError, match="bucket 2 with engine 'e0' rank 1: no response"):
        pair.wait(pair.mark(), "bucket 2")
    assert fake.calls == ["abort", "drained", "stream closed"]


def test_stop_ends_a_wait(monkeypatch):
    stop = threading.Event()
    pair = pair_over(monkeypatch, Fake(done_after=10**9), deadline=60.0, stop=stop)
    stop.set()
    with pytest.raises(TransferError, match="aborted on this side"):
        pair.wait(pair.mark(), "bucket 2")


def test_an_abort_that_hangs_is_reported_by_close(monkeypatch):
    monkeypatch.setattr(communicator, "ABORT_SECONDS", 0.05)
    fake = Fake(done_after=10**9, stuck=True)
    pair = pair_over(monkeypatch, fake)
    with pytest.raises(TransferError, match="no response"):
        pair.wait(pair.mark(), "bucket 2")
    assert not pair.close()
    assert fake.calls == ["abort"]  # the stream is not closed: something may still run in it
    fake.release.set()


def test_a_group_is_ended_even_if_a_call_in_it_fails(monkeypatch):
    fake = Fake()
    fake.raw.send = lambda *a: 1 / 0
    pair = pair_over(monkeypatch, fake)
    with pytest.raises(TransferError, match="ZeroDivisionError"), pair.group("sending"):
        pair.send(1, 1)
    assert fake.calls[:3] == ["start", "end", "abort"]


def test_the_version_string(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(communicator, "modules", lambda: (fake.raw, fake.core, fake.cuda))
    assert communicator.NCCL.version() == "2.30.7"
