"""Faults during an update, with real processes and every transport. After each fault the error names peer and tensor, the old
version is unchanged, and the next sync succeeds."""

import asyncio
import functools
import os
import signal

import jax
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import ChecksumMismatch, EngineLost, SlipstreamError, TransferError
from slipstream.gateway.client import GatewayFleet
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.transformer import decoder
from slipstream.types import SamplingParams
from slipstream.weights.checksum import PieceScan
from slipstream.weights.delta import Encoding
from slipstream.weights.transports.host import shm
from slipstream.weights.transports.host.disk import DiskSender
from slipstream.weights.transports.host.tcp import _FRAME, TcpSender
from slipstream.weights.update import transfer
from tests.forked import Forks

OPTIONS = EmbeddedConfig(max_num_seqs=8, max_model_len=64)
SAMPLING = SamplingParams(max_tokens=4, n=2, seed=3)
VICTIM = 5
"""Index of the damaged piece."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = write_sample_config(directory)

    @functools.cache
    def weights(seed):
        return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, decoder.init(config, jax.random.key(seed)))

    hf_weights.save(directory, weights(0), config)
    return directory, weights


@pytest.fixture(scope="module")
def run_dir(model, tmp_path_factory):
    """The run directory of a fleet with one engine, to which trainers connect."""
    with slipstream.launch(model[0], engine=OPTIONS, run_dir=tmp_path_factory.mktemp("run")) as bridge:
        yield bridge.run_dir


@pytest.fixture(params=["shm", "tcp", "disk"])
def fleet(request, run_dir, tmp_path):
    where = f"disk:{tmp_path}" if request.param == "disk" else request.param
    with slipstream.connect(run_dir, transport=where, timeout=20) as bridge:
        yield bridge


def tokens(bridge):
    return [c.token_ids for c in bridge.generate(["12=", "7="], SAMPLING)]


def segments():
    return list(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


class Tampering:
    """A sender that mishandles one piece."""

    def __init__(self, sender, fault):
        self._sender, self._fault = sender, fault

    def __getattr__(self, name):
        return getattr(self._sender, name)

    def send(self, index, array):
        if index != VICTIM:
            return self._sender.send(index, array)
        return self._fault(self._sender, index, array)


def corrupted(sender, index, array):
    checksum = sender.send(index, array)
    sender.send(index, array + 1)  # data that does not match its checksum
    return checksum


def duplicated(sender, index, array):
    sender.send(index, array)
    return sender.send(index, array)


def truncated(sender, index, array):
    """Send half of the piece, then nothing."""
    if isinstance(sender, TcpSender):
        frame = _FRAME.pack(sender._version, index, Encoding.DENSE, array.nbytes)
        sender._connection.sendall(frame + b"\0" * (array.nbytes // 2))
        sender.close()
        raise TransferError("the trainer's connection broke")
    checksum = sender.send(index, array)
    if isinstance(sender, DiskSender):
        sender._pending[str(index)] = sender._pending[str(index)][:-4].copy()
    else:
        sender.send(index, array * 0)
    return checksum


def with_fault(monkeypatch, fault):
    real = transfer.open_sender
    monkeypatch.setattr(transfer, "open_sender", lambda *arguments: Tampering(real(*arguments), fault))


@pytest.mark.parametrize("fault", [corrupted, truncated])
def test_bytes_that_are_not_what_was_announced(fleet, model, monkeypatch, fault):
    fleet.sync(model[1](1))
    before, version = tokens(fleet), fleet.version
    with_fault(monkeypatch, fault)
    fleet._publisher.close()  # reconnect, through the fault
    with pytest.raises((ChecksumMismatch, TransferError)) as caught:
        fleet.sync(model[1](2))
    if isinstance(caught.value, ChecksumMismatch):
        assert "engine 'engine-0', rank 0: model.layers.0." in str(caught.value)
    monkeypatch.undo()
    assert tokens(fleet) == before and fleet.version == version
    fleet.sync(model[1](2))
    assert tokens(fleet) != before and fleet.version == version + 1
    assert segments() == []


def test_a_piece_that_comes_twice_and_pieces_in_another_order_do_no_harm(fleet, model, monkeypatch):
    fleet.sync(model[1](1))
    expected = tokens(fleet)
    fleet.sync(model[1](2))
    with_fault(monkeypatch, duplicated)
    real = transfer.Plan.stream
    monkeypatch.setattr(transfer.Plan, "stream", lambda *arguments: dict(reversed(real(*arguments).items())))
    fleet._publisher.close()
    fleet.sync(model[1](1))
    assert tokens(fleet) == expected


def test_checksums_that_do_not_come(fleet, model, monkeypatch):
    fleet.sync(model[1](1))
    before = tokens(fleet)
    real = transfer.Outbox._send_rank

    def forgetful(*arguments):
        sent = real(*arguments)
        sent.scans[VICTIM] = PieceScan(1)
        return sent

    monkeypatch.setattr(transfer.Outbox, "_send_rank", forgetful)
    with pytest.raises(ChecksumMismatch, match=r"engine 'engine-0', rank 0: model\.layers\.0\."):
        fleet.sync(model[1](2))
    monkeypatch.undo()
    assert tokens(fleet) == before
    fleet.sync(model[1](2))
    assert tokens(fleet) != before


STEPS = {"begin": "offer", "stage": "manifests", "commit": "in_flight"}
"""Steps of an update, with the field of `UpdateSteps` for each."""


def test_engines_killed_at_the_phase_boundaries(model, tmp_path, monkeypatch):
    """Each phase kills another engine of the fleet."""
    victims = {"begin": "engine-1", "stage": "engine-2", "commit": "engine-3"}
    with slipstream.launch(model[0], engines=4, engine=OPTIONS, run_dir=tmp_path, timeout=10) as bridge:
        for seed, (phase, name) in enumerate(victims.items(), start=1):
            bridge.sync(model[1](2 * seed - 1))
            before, version = tokens(bridge), bridge.version
            others = {e.info.name for e in bridge.status().present} - {name}
            kill_at(monkeypatch, phase, next(e.info.pid for e in bridge.status().present if e.info.name == name))
            bridge._publisher.close()  # reconnect, so that each step is a message of its own
            if phase == "stage":
                with pytest.raises(EngineLost, match=f"{name!r}"):
                    bridge.sync(model[1](2 * seed))
                assert tokens(bridge) == before and bridge.version == version
            else:  # before the update the fleet is refreshed; once all have staged, the others commit
                report = bridge.sync(model[1](2 * seed))
                assert report.lost == ((name,) if phase == "commit" else ())
                assert {e.engine for e in report.engines} == others
                assert tokens(bridge) != before and bridge.version == version + 1
            monkeypatch.undo()
            assert {e.info.name: e.state for e in bridge.status().present} == dict.fromkeys(others, "ready")
        bridge.sync(model[1](9))
        assert len(tokens(bridge)) == 4
    assert segments() == []


def test_engines_that_pass_weights_on_are_killed_meanwhile(model, tmp_path, monkeypatch):
    """The trainer sends to the first of three engines. The second dies, then the first."""
    with slipstream.launch(
        model[0], engines=3, engine=OPTIONS, run_dir=tmp_path, transport="tcp", timeout=20
    ) as bridge:
        left, real = {"engine-0", "engine-1", "engine-2"}, TcpSender.send
        for victim in ("engine-1", "engine-0"):
            for seed in (1, 2, 3):
                num_bytes = bridge.sync(model[1](seed)).num_bytes
            before, version = tokens(bridge), bridge.version
            pid = next(e.info.pid for e in bridge.status().present if e.info.name == victim)

            def killing(sender, index, array, pid=pid):
                if index == VICTIM:
                    os.kill(pid, signal.SIGKILL)
                return real(sender, index, array)

            monkeypatch.setattr(TcpSender, "send", killing)
            with pytest.raises((EngineLost, TransferError)):
                bridge.sync(model[1](4))
            monkeypatch.undo()
            assert tokens(bridge) == before and bridge.version == version
            report = bridge.sync(model[1](4))
            left.remove(victim)
            assert {e.engine for e in report.engines} == left and report.num_bytes == num_bytes
            assert tokens(bridge) != before and bridge.verify(model[1](4)).is_same


def kill_at(monkeypatch, phase, pid):
    """Kill a process when the next update reaches a phase, before its steps are sent."""
    send_steps = GatewayFleet.send_steps

    async def killing_before_step(fleet, steps, drop_failed=False):
        if all(getattr(engine_steps, STEPS[phase]) is not None for engine_steps in steps.values()):
            os.kill(pid, signal.SIGKILL)
            monkeypatch.undo()  # once
            while phase == "begin" and pid in {e.info.pid for e in (await fleet.status()).present}:
                await asyncio.sleep(0.02)  # until the gateway has noticed
        await send_steps(fleet, steps, drop_failed)

    monkeypatch.setattr(GatewayFleet, "send_steps", killing_before_step)


TRAINER = """
import os, signal, sys
import slipstream
from slipstream.gateway.client import GatewayFleet
from slipstream.weights.update.transfer import Outbox
from tests.deploy.test_faults import STEPS
from slipstream.model.checkpoints import hf_weights as checkpoint
model, run_dir, phase = sys.argv[1:]
params = checkpoint.load(model)
with slipstream.connect(run_dir, timeout=10) as bridge:
    bridge.sync(params)
    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    send_steps, receive_reports = GatewayFleet.send_steps, GatewayFleet.receive_reports
    num_replies = 0
    async def dying_before_step(fleet, steps, drop_failed=False):
        if all(getattr(engine_steps, STEPS[phase]) is not None for engine_steps in steps.values()):
            die()
        await send_steps(fleet, steps, drop_failed)
    async def dying_before_second_reply(fleet):
        global num_replies
        num_replies += 1
        return await receive_reports(fleet) if num_replies == 1 else die()
    if phase == "send":
        Outbox.send = die
    elif phase == "staged":
        GatewayFleet.receive_reports = dying_before_second_reply
    else:
        GatewayFleet.send_steps = dying_before_step
    import jax
    bridge.sync(jax.tree.map(lambda x: x + 1, params))
"""


def test_a_trainer_killed_at_every_phase_boundary(model, run_dir):
    modules = "jax slipstream.bridge.bridge slipstream.gateway.client tests.deploy.test_faults"
    with slipstream.connect(run_dir, timeout=10) as bridge:
        bridge.sync(str(model[0]))
        before = tokens(bridge)
    with Forks(modules, TRAINER) as trainers, slipstream.connect(run_dir, timeout=10) as bridge:
        for phase in ("begin", "send", "stage", "staged", "commit"):
            version = bridge.status().version
            assert trainers.run(model[0], run_dir, phase)[0] == -signal.SIGKILL
            with slipstream.connect(run_dir) as reader:
                assert reader.version == version + 1, phase  # its first sync; the second did not happen
                assert tokens(reader) == before, phase
        # The last of them left an update behind, which the gateway has rolled back.
        report = None
        for _ in range(20):
            try:
                report = bridge.sync(model[1](7))
                break
            except SlipstreamError:
                continue
        assert report is not None and tokens(bridge) != before
    assert segments() == []
