"""Gateway and engines as actors of a real Ray cluster of two nodes: a run survives the death of any of them."""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import app
from slipstream.config import EmbeddedConfig, RayConfig
from slipstream.deploy.processes.run_dir import read_run_dir
from slipstream.errors import ConfigError, DeadlineExceeded, InvalidPrompt, LaunchFailed, Unsupported
from slipstream.gateway.journal import Journal
from slipstream.model.checkpoints import hf_weights
from slipstream.types import SamplingParams
from tests.deploy.lan import environment, lan
from tests.deploy.test_launch_command import check_front, held
from tests.gateway.history import check
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config("llama", num_layers=1, max_position_embeddings=512)
OPTIONS = EmbeddedConfig(max_num_seqs=8)
LONG = SamplingParams(max_tokens=300, n=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DRIVER = str(Path(__file__).with_name("ray_driver.py"))
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 << 20, "include_log_monitor": False}
NO_SPARE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
"""Else each node starts a worker per CPU in advance."""


@dataclass(frozen=True)
class Nodes:
    ray: Any
    """The `ray` module, connected to the cluster."""
    address: str
    model: Path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A cluster of two nodes, without a dashboard."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as home:  # sockets: short
        for name, value in {"RAY_TMPDIR": home, **NO_SPARE_WORKERS}.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        from tests.deploy.patient_ray import be_patient

        be_patient()
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            yield Nodes(ray, cluster.address, write_config(tmp_path_factory.mktemp("model"), CONFIG))
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slipstream.Bridge]:
    """Two engines on two nodes, each on the GPU that Ray believes its node to have. Afterwards, nothing of them must be left."""
    run_dir = tmp_path_factory.mktemp("run")
    cluster = RayConfig(strategy="STRICT_SPREAD")
    settings = {"engines": 2, "engine": OPTIONS, "devices": "auto", "cluster": cluster, "start_timeout": 600}
    with slipstream.launch(nodes.model, run_dir=run_dir, **settings) as bridge:
        assert [e.info.devices for e in bridge.status().engines] == [("0",), ("0",)]
        assert nodes.ray.available_resources().get("GPU", 0) == 0
        yield bridge
        left = everybody(bridge)
    assert len(left) == 6 and all_gone(left)
    assert not list(run_dir.rglob("token")) and not list(run_dir.rglob("gateway.json"))
    eventually(lambda: nodes.ray.available_resources().get("CPU") == 4, "Ray has its CPUs back")


def prompts(count: int) -> tuple[list[str], list[tuple[int, ...]]]:
    return [f"prompt-{n}-{secrets.token_hex(3)}" for n in range(count)], [(1 + n, 2, 3) for n in range(count)]


def pids(bridge: slipstream.Bridge) -> dict[str, int]:
    return {e.info.name: e.info.pid for e in bridge.status().present}


def journal(bridge: slipstream.Bridge) -> Journal:
    return Journal(Path(bridge.run_dir) / "journal.sqlite")


def gateway_pid(bridge: slipstream.Bridge) -> int:
    try:
        return int(json.loads((Path(bridge.run_dir) / "gateway.json").read_text())["pid"])
    except FileNotFoundError:
        return 0


def actor_of(pid: int) -> psutil.Process:
    """Return the actor process that runs a process."""
    actor = psutil.Process(pid).parent()
    assert actor is not None and actor.cmdline()[0].startswith("ray::")
    return actor


def everybody(bridge: slipstream.Bridge) -> list[psutil.Process]:
    """Return the processes of gateway, engines and their actors."""
    own = [gateway_pid(bridge), *pids(bridge).values()]
    return [*map(psutil.Process, own), *map(actor_of, own)]


def busy(bridge: slipstream.Bridge) -> str:
    """Return an engine with requests in flight, if there is one."""
    return next((e.info.name for e in bridge.status().engines if e.num_requests), "")


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=120)[1]


def eventually(done: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def test_a_run_ends_complete_though_an_engines_actor_is_killed(fleet: slipstream.Bridge) -> None:
    report = fleet.sync(random_params(CONFIG, 0))
    assert {e.engine: e.transport for e in report.engines} == {"engine-0": "shm", "engine-1": "shm"}
    before = pids(fleet)
    actors = {name: actor_of(pid) for name, pid in before.items()}
    assert len({actor.ppid() for actor in actors.values()}) == 2  # the nodes
    rollouts = fleet.rollouts(max_staleness=0, batch=4)
    ids, tokens = prompts(12)

    assert rollouts.submit(ids, tokens, LONG) == 12
    eventually(lambda: busy(fleet) != "", "an engine is at work")
    victim = busy(fleet)
    actors[victim].kill()
    taken = rollouts.take(4)
    eventually(lambda: pids(fleet).get(victim, before[victim]) != before[victim], "it is back")
    report = fleet.sync(random_params(CONFIG, 1))
    assert sorted(e.engine for e in report.engines) == ["engine-0", "engine-1"]
    taken += rollouts.take(4)
    fleet.sync(random_params(CONFIG, 2))
    taken += rollouts.take(4)

    assert sorted(g.id for g in taken) == sorted(ids)
    assert all(g.error is None and len(g.completions) == 2 and g.age == 0 for g in taken)
    assert check(journal(fleet), 0) == []
    answers = fleet.generate([(1, 2, 3)] * 4, GREEDY)
    assert {a.engine for a in answers} == set(before) and {a.version for a in answers} == {2}
    assert len({a.token_ids for a in answers}) == 1


def test_processes_whose_actors_live_and_a_gateway_without_its_actor(fleet: slipstream.Bridge) -> None:
    params, run_dir = random_params(CONFIG, 3), Path(fleet.run_dir)
    fleet.sync(params)
    where, before = read_run_dir(run_dir), pids(fleet)
    rollouts = fleet.rollouts(max_staleness=0, batch=9, position=journal(fleet).last_position())
    ids, tokens = prompts(9)
    rollouts.submit(ids, tokens, LONG)
    psutil.Process(before["engine-1"]).kill()
    taken = rollouts.take(3)
    for kill in (lambda pid: actor_of(pid).kill(), lambda pid: psutil.Process(pid).kill()):
        pid = gateway_pid(fleet)
        kill(pid)
        eventually(lambda old=pid: gateway_pid(fleet) not in (0, old), "the gateway is back")  # type: ignore[misc]
        taken += rollouts.take(3)
    assert sorted(g.id for g in taken) == sorted(ids) and read_run_dir(run_dir) == where
    eventually(lambda: set(pids(fleet)) == set(before), "both engines have found it by themselves")
    assert pids(fleet)["engine-0"] == before["engine-0"] and pids(fleet)["engine-1"] != before["engine-1"]
    eventually(lambda: {e.state for e in fleet.status().present} == {"ready"}, "the bridge has sent the version again")
    assert {a.engine for a in fleet.generate([(1, 2, 3)] * 4, GREEDY)} == set(before)


def test_an_actor_for_frameworks(nodes: Nodes, tmp_path: Path) -> None:
    from slipstream.plugins.ray_actor import RolloutActor, join

    hf_weights.save(tmp_path / "one", random_params(CONFIG, 1), CONFIG)
    expected = []
    with slipstream.inprocess(nodes.model, engine=OPTIONS) as bridge:
        for seed in (1, 2):
            bridge.sync(random_params(CONFIG, seed))
            completions = bridge.generate([(1, 2, 3), (4, 5)], GREEDY)
            expected.append(([c.token_ids for c in completions], bridge.score([(1, 2, 3, 4)])[0].logprobs))
    assert expected[0] != expected[1]
    actor = nodes.ray.remote(RolloutActor).remote(str(nodes.model), engine=OPTIONS, run_dir=tmp_path / "run")

    def get(call: Any) -> Any:
        return nodes.ray.get(call, timeout=300)

    def answers() -> Any:
        calls = [actor.generate.remote([(1, 2, 3), (4, 5)], GREEDY), actor.compute_logprobs.remote([(1, 2, 3, 4)])]
        completions, scores = get(calls)
        return [c.token_ids for c in completions], scores[0].logprobs

    report = get(actor.update_weights.remote(str(tmp_path / "one")))
    assert report.version == 0 and [e.transport for e in report.engines] == ["shm"] and answers() == expected[0]
    with join(actor) as bridge:  # the trainer's process: this one
        report = bridge.sync(random_params(CONFIG, 2))
        assert [e.transport for e in report.engines] == ["shm"] and report.num_bytes > 0
        left = [psutil.Process(pid) for pid in pids(bridge).values()]
    assert answers() == expected[1]
    assert get(actor.update_weights.remote(tmp_path / "one")).version == 2 and answers() == expected[0]

    (asleep,) = get(actor.sleep.remote(1)).values()
    (awake,) = get(actor.wake_up.remote()).values()
    assert set(asleep.asleep) == {"weights", "kv_cache"} and awake.asleep == () and answers() == expected[0]

    with pytest.raises(Unsupported, match="not pass through Ray's object store"):
        get(actor.update_weights.remote({"lm_head.weight": [1.0]}))
    with pytest.raises(InvalidPrompt, match="prompt 1 of 2"):
        get(actor.generate.remote([(1,), ()], GREEDY))
    nodes.ray.kill(actor)
    assert all_gone(left)


def test_what_cannot_be_started_says_why(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"reserve {'CPU': 1\.0} for each of 3 engine\(s\) \(STRICT_SPREAD\)"):
        cluster = RayConfig(strategy="STRICT_SPREAD")
        slipstream.launch(nodes.model, engines=3, run_dir=tmp_path / "a", cluster=cluster, start_timeout=1)
    with pytest.raises(LaunchFailed, match=r"config\.json does not exist; a model is a directory"):
        slipstream.launch(tmp_path / "nowhere", run_dir=tmp_path / "b", cluster="ray")
    with pytest.raises(ConfigError, match="cluster must be 'local', 'ray' or a RayConfig, got 'rya'"):
        slipstream.launch(nodes.model, run_dir=tmp_path / "c", cluster="rya")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs cpus or gpus"):
        RayConfig(cpus=0)
    assert not list(tmp_path.rglob("token"))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at '127.0.0.1:1': "),
        ("ray://127.0.0.1:10001", "ray://127.0.0.1:10001 is an address for Ray Client"),
    ],
)
def test_clusters_that_cannot_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(said)):
        slipstream.launch("model", run_dir=tmp_path / "run", cluster=RayConfig(address=address))


def test_without_ray_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.deploy.ray.cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray cannot be imported"):
        slipstream.launch("model", run_dir=tmp_path / "run", cluster="ray")


def test_the_command_holds_a_fleet_until_it_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """Paths are relative to the driver's directory, not to that of Ray's workers. `fleet` ends as SIGINT would end the command's."""
    free = nodes.ray.available_resources()["CPU"]
    with held(
        tmp_path, "--ray", "--ray-option", f"address={nodes.address}", "max_num_seqs=8", end=signal.SIGKILL
    ) as client:
        check_front(client, tmp_path)
        with slipstream.connect(tmp_path / "run") as bridge:
            actors = everybody(bridge)
    assert all_gone(actors)
    eventually(lambda: nodes.ray.available_resources().get("CPU") == free, "Ray has its CPUs back")


def test_ray_options_need_ray(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --ray"):
        command = ["launch", "--model", str(tmp_path), "--ray-option", "gpus=1"]
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_two_machines(tmp_path: Path) -> None:
    """The trainer on one machine and the engine on the other, with TLS between them."""
    with lan(tmp_path, "node1", "node2") as (node1, node2), tempfile.TemporaryDirectory(prefix="ray-") as home:
        model = write_config(tmp_path / "model", CONFIG)
        command = node1.command(sys.executable, DRIVER, str(model), str(tmp_path / "run"), node1.address)
        own = {"RAY_TMPDIR": home, **NO_SPARE_WORKERS}
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(own))
        assert driver.stdout is not None
        cluster = driver.stdout.readline().strip()
        join = [
            "-m",
            "tests.deploy.patient_ray",
            "start",
            "--block",
            "--num-cpus=1",
            "--include-log-monitor=false",
            f"--object-store-memory={80 << 20}",
        ]
        join += [f"--address={cluster}", f"--node-ip-address={node2.address}"]
        other = node2.start(node2.command(sys.executable, *join), tmp_path / "node2.log", **own)
        try:
            facts = json.loads(driver.stdout.read())
            assert driver.wait(30) == 0
        finally:  # Ray's processes would outlive their network
            for process in (*psutil.Process(other.pid).children(recursive=True), other, driver):
                process.kill()
            driver.wait()
            other.wait()
    assert facts["hosts"] == [node1.address, node2.address] and facts["gateway"].startswith(f"{node1.address}:")
    assert facts["transports"] == ["tcp"]
    with slipstream.inprocess(model, engine=OPTIONS) as bridge:
        bridge.sync(random_params(CONFIG, 1))
        assert facts["tokens"] == list(bridge.generate([(1, 2, 3)], GREEDY)[0].token_ids)
