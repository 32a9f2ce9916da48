"""Weights over NCCL between two processes that share this GPU. Needs nccl4py, torch, and NCCL 2.30 or later."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

NEEDED = ("torch", "nccl", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        any(importlib.util.find_spec(n) is None for n in NEEDED), reason="needs torch, nccl4py, cuda-core"
    ),
]

LONG, SHORT = 60.0, 15.0


class Peer:
    def __init__(self, role):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.nccl_peer", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )

    def ask(self, call, **facts):
        self.process.stdin.write(json.dumps({"call": call, **facts}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the process ended with {self.process.wait()}")

    def call(self, call, **facts):
        self.ask(call, **facts)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def peers():
    found = []

    def make(role):
        found.append(Peer(role))
        return found[-1]

    yield make
    for peer in found:
        peer.end()


def met(peers, dtype="bfloat16", source="bfloat16", deadline=LONG, primitive="send"):
    receiver, sender = peers("receiver"), peers("sender")
    sender.call("warm")
    link = receiver.call("open", dtype=dtype, source=source, deadline=deadline, primitive=primitive)["link"]
    assert sender.call("open", link=link, dtype=dtype, source=source, deadline=deadline) == {}
    return receiver, sender


def update(receiver, sender, version):
    receiver.call("expect", version=version)
    sender.ask("send", version=version, seed=version)
    found = receiver.call("wait", version=version, seed=version)
    assert sender.answer() == {}
    assert found["wrong"] == [] and found["num_bytes"] == found["planned"]


@pytest.mark.parametrize("primitive", ["send", "broadcast"])
@pytest.mark.parametrize(
    ("source", "dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_bits_over_ten_updates(peers, source, dtype, primitive):
    receiver, sender = met(peers, dtype, source, primitive=primitive)
    for version in range(10):
        update(receiver, sender, version)
    assert sender.call("close") == receiver.call("close") == {}


def test_a_trainer_killed_in_mid_transfer_and_another(peers):
    receiver, sender = met(peers, deadline=SHORT)
    update(receiver, sender, 0)
    receiver.call("expect", version=1)
    sender.ask("send", version=1, seed=1, die_at=3)
    assert sender.process.wait(60) == -signal.SIGKILL
    assert "trainer rank 0" in receiver.call("wait", version=1, seed=1)["error"]
    another = peers("sender")
    another.call("warm")
    link = receiver.call("renew")["link"]
    assert another.call("open", link=link, dtype="bfloat16", source="bfloat16", deadline=LONG) == {}
    for version in (2, 3):
        update(receiver, another, version)


def test_a_receiver_killed_in_mid_transfer_and_another(peers):
    receiver, sender = met(peers, deadline=SHORT)
    update(receiver, sender, 0)
    receiver.ask("expect", version=1, die_at=2)  # what is left after the first bucket fits in NCCL's own buffers
    sender.ask("send", version=1, seed=1)
    assert receiver.process.wait(60) == -signal.SIGKILL
    assert "the receiver" in sender.answer()["error"]
    another = peers("receiver")
    link = another.call("open", dtype="bfloat16", source="bfloat16", deadline=LONG)["link"]
    assert sender.call("open", link=link, dtype="bfloat16", source="bfloat16", deadline=LONG) == {}
    for version in (2, 3):
        update(another, sender, version)


def test_nobody_comes(peers):
    receiver = peers("receiver")
    receiver.call("open", dtype="bfloat16", source="bfloat16", deadline=SHORT)
    receiver.call("expect", version=0)
    assert "trainer rank 0" in receiver.call("wait", version=0, seed=0)["error"]
    assert receiver.call("renew")["link"]
