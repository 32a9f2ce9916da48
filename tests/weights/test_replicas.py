"""Replicas pass weights on to each other, or get them by broadcast, so that bytes leave the trainer once. Real inboxes and sockets in
one process; a fake NCCL."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import SyncOptions
from slipstream.deploy.advice.sync_cost import FleetShape, TrainerMesh, estimate, kinds_of
from slipstream.deploy.processes import certificates
from slipstream.errors import ChecksumMismatch, TransferError
from slipstream.model import families
from slipstream.runtime import event_loop
from slipstream.types import CommitReport, Destinations, EngineInfo, StageReport, UpdateReports, UpdateSteps
from slipstream.weights.checksum import unpack_manifest
from slipstream.weights.plan import Plan
from slipstream.weights.transports.contract import pack_link
from slipstream.weights.transports.host import tcp
from slipstream.weights.transports.nccl.transport import NcclReceiver, NcclSender
from slipstream.weights.update import device_outbox, publisher
from slipstream.weights.update.publisher import Publisher
from slipstream.weights.update.transport_choice import network_of
from tests.weights.fake_nccl import FakeNccl
from tests.weights.nccl_by_hand import Model, same, staged
from tests.weights.tcp_fleet import CONFIG, Engine, Fleet, weights


@pytest.fixture
def make() -> Any:
    fleets = []

    def made(*arguments: Any, **options: Any) -> Fleet:
        fleets.append(Fleet(*arguments, **options))
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.close()


def size_of(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in tensors.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_leave_the_trainer_once_for_any_number_of_replicas(make: Any, tp: int) -> None:
    egress = {}
    kinds = kinds_of(families.family_tensors(CONFIG))
    for count in (1, 2, 4):
        fleet = make(count, tp)
        reports = [fleet.sync(weights(version), version) for version in range(3)]
        before = fleet.sent()
        reports.append(fleet.sync(weights(3), 3))
        egress[count] = fleet.sent() - before
        fleet.hold(weights(3))
        assert {report.num_bytes for report in reports} == {reports[0].num_bytes}
        assert [e.stage.num_bytes for e in reports[3].engines] == [reports[3].num_bytes] * count
        planned = estimate(kinds, TrainerMesh(), FleetShape(count, tp), "float32")
        assert egress[count] == pytest.approx(planned.trainer_rank_bytes, rel=0.1)
    assert max(egress.values()) <= 1.1 * egress[1], egress


def test_only_changes_are_passed_on_and_an_engine_that_joins_gets_all(make: Any) -> None:
    """The newcomer's slots are not those of the others: it has seen fewer versions."""
    fleet = make(2)
    tensors = weights(0)
    fleet.sync(tensors, 0)
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
    assert fleet.sync(changed, 1).num_bytes == tensors["model.norm.weight"].nbytes
    fleet.hold(changed)
    newcomer = fleet.add()
    repair = Publisher(fleet, SyncOptions(transport="tcp"))
    event_loop.run(repair.publish(changed, [fleet.engines[newcomer].info], 1))
    repair.close()
    fleet.hold(changed)
    whole = 2 * size_of(tensors)  # the trainer's own way to the newcomer is new, and it sends everything again
    for version, expected in ((2, whole), (3, size_of(tensors)), (4, size_of(tensors))):
        assert fleet.sync(weights(version), version).num_bytes <= expected
        fleet.hold(weights(version))
    assert len({tuple(engine.inbox._live.values()) for engine in fleet.engines.values()}) > 1
    assert fleet.sync(weights(4), 5).num_bytes == 0


def test_a_version_without_changes_is_one_message(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, messages = make(2), list[UpdateSteps]()
    send_steps = fleet.send_steps

    async def noted(steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        messages.append(steps["engine-0"])
        await send_steps(steps, drop_failed)

    monkeypatch.setattr(fleet, "send_steps", noted)
    counts = []
    for version, seed in enumerate((0, 1, 1)):
        fleet.sync(weights(seed), version)
        counts.append(len(messages))
        fleet.hold(weights(seed))
    assert counts == [3, 6, 7]
    assert messages[-1].offer and messages[-1].manifests and messages[-1].in_flight


def close_receivers(engine: Engine) -> None:
    """What a peer sees of an engine that dies: its sockets close."""
    for rank in engine.inbox._ranks:
        for receiver in rank.receivers.values():
            for connection in receiver._connections[:]:  # type: ignore[attr-defined]
                connection.shutdown(socket.SHUT_RDWR)
            receiver.close()


@pytest.mark.parametrize("phase", ["begun", "sending", "sent"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_engine_fails_the_update_wherever_it_is_in_the_chain(
    make: Any, monkeypatch: pytest.MonkeyPatch, victim: int, phase: str
) -> None:
    monkeypatch.setattr(tcp, "STALL_SECONDS", 5.0)
    fleet = make(3)
    for version in range(3):
        fleet.sync(weights(version), version)
    dead = fleet.engines[f"engine-{victim}"]
    if phase == "sending":
        real = tcp.TcpSender.send

        def dying(sender: tcp.TcpSender, index: int, array: np.ndarray) -> Any:
            if index == 5:
                close_receivers(dead)
            return real(sender, index, array)

        monkeypatch.setattr(tcp.TcpSender, "send", dying)
    elif phase == "begun":
        fleet.publisher.close()  # links are new, and the engine dies before they are used
        begin = dead.inbox.begin

        def dying_then(*arguments: Any) -> Destinations:
            destinations = begin(*arguments)
            close_receivers(dead)
            return destinations

        monkeypatch.setattr(dead.inbox, "begin", dying_then)
    dead.before_stage = lambda: _lost(close_receivers(dead))
    with pytest.raises(TransferError):
        fleet.sync(weights(3), 3)
    monkeypatch.undo()
    fleet.hold(weights(2))
    fleet.engines.pop(dead.info.name).inbox.close()
    fleet.sync(weights(4), 4)
    fleet.hold(weights(4))


def _lost(*_: Any) -> Any:
    raise TransferError("the engine is lost")


def test_an_engine_that_fails_takes_no_other_with_it_where_that_is_asked_for(make: Any) -> None:
    fleet = make(3)
    fleet.sync(weights(0), 0)
    dead = fleet.engines["engine-0"]
    dead.before_stage = lambda: _lost()
    report = fleet.sync(weights(1), 1, drop_failed=True)
    assert report.lost == ("engine-0",) and report.num_bytes == 3 * size_of(weights(1))
    for name in ("engine-1", "engine-2"):
        fleet.engines[name].holds(weights(1))


def test_engines_that_cannot_reach_each_other_are_sent_their_own_copies(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: Any) -> Any:
        raise TransferError("cannot connect to the engine's tcp receiver at 10.0.0.7:1: No route to host")

    monkeypatch.setattr(tcp, "Forwarder", unreachable)
    fleet = make(3)
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            assert fleet.sync(weights(version), version).num_bytes == 3 * size_of(weights(version))
            fleet.hold(weights(version))
    (record,) = caplog.records
    assert "engine-0, engine-1, engine-2 one by one" in record.message and "No route to host" in record.message


def test_bytes_that_an_engine_changed_are_refused_by_the_next(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are the trainer's."""
    fleet = make(3)
    fleet.sync(weights(0), 0)
    real = tcp.Forwarder.put

    def damaged(forwarder: tcp.Forwarder, data: bytes | np.ndarray) -> None:
        real(forwarder, data if isinstance(data, bytes) else data + 1)

    monkeypatch.setattr(tcp.Forwarder, "put", damaged)
    with pytest.raises(ChecksumMismatch, match="engine 'engine-1', rank 0"):
        fleet.sync(weights(1), 1)
    monkeypatch.undo()
    fleet.hold(weights(0))
    fleet.sync(weights(2), 2)
    fleet.hold(weights(2))


def test_engines_encrypt_what_they_pass_on_and_know_whom_they_pass_it_to(make: Any, tmp_path: Any) -> None:
    files = certificates.make(tmp_path, ["127.0.0.1"])
    fleet = make(3, 1, tcp.ListenConfig("127.0.0.1", *files.of("127.0.0.1")))
    for version in range(2):
        assert fleet.sync(weights(version), version).num_bytes == size_of(weights(version))
        fleet.hold(weights(version))
    first, second = (tcp.TcpReceiver(64), tcp.TcpReceiver(64))
    for change, message in (
        ({"secret": "00" * 32}, "rejected the connection"),
        ({"certificate": "ab" * 32}, "does not speak TLS"),
        ({"host": "127.1"}, "announced no certificate"),
        ({"transport": "shm"}, "links of this transport only"),
    ):
        link = json.dumps(json.loads(second.link) | change).encode()
        with pytest.raises(
            TransferError, match=rf"{first._server.getsockname()[1]} cannot pass weights on: .*({message})"
        ):
            tcp.TcpConnection(first.link, [link])
    for receiver in (first, second):
        receiver.close()


def test_what_listens_on_loopback_is_reached_from_its_own_host_only() -> None:
    def network(transport: str, listens: str, host: str) -> str | None:
        return network_of(transport, host, Destinations(((b"", pack_link(transport, host=listens)),), b""))

    assert network("tcp", "127.0.0.1", "a") == network("tcp", "::1", "a") != network("tcp", "127.0.0.1", "b")
    assert network("tcp", "10.0.0.1", "a") == network("tcp", "10.0.0.2", "b") is not None
    assert network("shm", "", "a") is network("disk", "", "a") is network("cuda", "", "a") is None


# --- nccl ---


class NcclEngine:
    """A receiver of the `nccl` transport, as in a vLLM worker."""

    def __init__(self, name: str, model: Model, nccl: FakeNccl) -> None:
        self._model, self._nccl = model, nccl
        self.info = EngineInfo(
            name, "vllm", "model", model.dtype, 1, model.specs, model.parameters, ("nccl",), "here", 8, 8, -1
        )  # fmt: skip
        self.inbox = self  # has `rollback` and `close`
        self.receiver: NcclReceiver | None = None
        self.before_stage: Callable[[], None] = lambda: None

    def run(self, steps: UpdateSteps) -> UpdateReports:
        destinations = stage = commit = None
        if steps.offer is not None:
            if self.receiver is None:
                self.plan = Plan.from_bytes(steps.offer.plan)
                facts = self.plan, 0, [0], 0, self._model.parameters, 20.0, "broadcast", self._nccl
                self.receiver = NcclReceiver(*facts)  # type: ignore[arg-type]
            self.receiver.start()
            destinations = Destinations((tuple(self.receiver.links.values()),), b"")
            self.receiver.expect(steps.version)
        assert self.receiver is not None
        if steps.manifests is not None:
            self.before_stage()
            indices = unpack_manifest(steps.manifests[0][0], steps.version, len(self.plan.incoming[0]))
            num_bytes = self.receiver.wait(steps.version, indices)
            assert num_bytes is not None
            stage = StageReport(num_bytes, 0.0)
        if steps.in_flight is not None:
            commit = CommitReport(0.0, 0.0)
        return UpdateReports(destinations if steps.expected is None else None, stage, commit)

    def holds(self, tensors: Mapping[str, np.ndarray]) -> None:
        same(staged(self.receiver, self._model, 0), self._model.expected(tensors, 0))

    def rollback(self, version: int) -> None:
        if self.receiver is not None:
            self.receiver.abandon()

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()


class NcclFleet(Fleet):
    def __init__(self, count: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.nccl = Model(), FakeNccl(directory)

        def opened(link: bytes, plan: Plan, moves: Any, peer: str, device: Any) -> NcclSender:
            return NcclSender(link, plan, moves, peer, 8 << 10, 20.0, device, self.nccl)  # type: ignore[arg-type]

        monkeypatch.setattr(device_outbox, "open_device_sender", opened)
        monkeypatch.setattr(publisher, "on_accelerator", lambda tensors: True)
        super().__init__(count)
        self.publisher = Publisher(self, SyncOptions(transport="nccl"))

    def add(self) -> str:
        name = f"engine-{len(self.engines)}"
        self.engines[name] = NcclEngine(name, self.model, self.nccl)  # type: ignore[assignment]
        return name

    def sync(self, tensors: Mapping[str, np.ndarray], version: int, **options: Any) -> Any:
        return super().sync({name: jnp.asarray(array) for name, array in tensors.items()}, version, **options)  # type: ignore[misc]

    def sent(self) -> int:
        return sum(pair.sent for pair in self.nccl.pairs if pair.rank == 0)


def test_bytes_leave_the_trainers_gpu_once_for_any_number_of_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    egress = {}
    for count in (1, 2, 4):
        (tmp_path / str(count)).mkdir()
        fleet = NcclFleet(count, tmp_path / str(count), monkeypatch)
        reports = []
        for version in range(2):
            before, tensors = fleet.sent(), fleet.model.weights(version)
            reports.append(fleet.sync(tensors, version))
            egress[count] = fleet.sent() - before
            fleet.hold(tensors)
        assert [report.num_bytes for report in reports] == [fleet.model.plan.num_bytes] * 2
        assert len(fleet.nccl.pairs) == 2 * count + (count + 1 if count > 1 else 0), "they stay connected"
        fleet.close()
    assert egress[1] >= fleet.model.plan.num_bytes
    assert max(egress.values()) <= 1.1 * egress[1], egress


@pytest.mark.parametrize("at", [1, 3], ids=["first bucket", "third bucket"])
def test_a_replica_that_dies_during_a_broadcast_and_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    fleet = NcclFleet(3, tmp_path, monkeypatch)
    fleet.sync(fleet.model.weights(0), 0)
    groups: list[str] = []

    def dies(pair: Any, what: str) -> None:
        if pair.rank == 2:
            groups.append(what)
            if len(groups) == at:
                pair.hang_up()

    fleet.nccl.before_group = dies
    with pytest.raises(TransferError):
        fleet.sync(fleet.model.weights(1), 1)
    fleet.nccl.before_group = lambda pair, what: None
    fleet.sync(fleet.model.weights(2), 2)
    fleet.hold(fleet.model.weights(2))
    fleet.engines.popitem()[1].inbox.close()  # the others are two, and get another communicator
    fleet.sync(fleet.model.weights(3), 3)
    fleet.hold(fleet.model.weights(3))
    fleet.close()


def test_ranks_that_share_a_gpu_are_sent_their_own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = NcclFleet(2, tmp_path, monkeypatch)
    monkeypatch.setattr(fleet.nccl, "device_id", lambda device: "GPU-0")
    for version in range(2):
        assert fleet.sync(fleet.model.weights(version), version).num_bytes == 2 * fleet.model.plan.num_bytes
        fleet.hold(fleet.model.weights(version))
    assert len(fleet.nccl.pairs) == 4
    fleet.close()
