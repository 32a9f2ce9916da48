"""Arguments of the wrong kind, unknown names and missing packages: typed errors, before any process starts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config import GatewayConfig, HttpConfig, RemoteConfig, VllmConfig
from slipstream.deploy.processes.vllm_environment import check_environment
from slipstream.errors import BridgeClosed, ConfigError, InvalidSampling, Unsupported
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.types import SamplingParams
from tests.gateway.scripted import ScriptedEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_sample_config(directory := tmp_path_factory.mktemp("model"))
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Any:
    """Must not be made."""
    yield tmp_path / "run"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"engine": "vlm"},
            "engine must be an EmbeddedConfig, VllmConfig or RemoteConfig, or 'embedded' or 'vllm'; got 'vlm'",
        ),
        ({"engine": {"kind": "vllm"}}, "engine must be an EmbeddedConfig"),
        ({"engines": "2"}, "engines must be of type int, got '2'"),
        ({"gateway": {"port": 0}}, r"gateway must be of type GatewayConfig, got \{'port': 0\}"),
        ({"http": 9001}, "http must be of type HttpConfig, got 9001"),
        ({"cluster": "slurm"}, "cluster must be 'local', 'ray' or a RayConfig, got 'slurm'"),
        ({"transport": "smh"}, "transport must be one of memory, device, shm, tcp, disk, cuda, .*got 'smh'"),
        ({"transport": "disk"}, "'disk' needs a directory"),
        ({"transport": "shm:/tmp"}, "other transports take none"),
        ({"transport": 3}, "transport must be of type str, got 3"),
    ],
)
def test_launch_refuses(model: Path, run_dir: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slipstream.launch(model, run_dir=run_dir, **arguments)


@pytest.mark.parametrize("engine", ["vllm", VllmConfig(), {"max_num_seqs": 4}])
def test_an_engine_in_this_process_is_embedded(model: Path, engine: Any) -> None:
    with pytest.raises(ConfigError, match="needs an EmbeddedConfig, got"):
        slipstream.inprocess(model, engine=engine)


def test_what_a_process_would_fail_with_is_known_before(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(said: str, model: Path = model, **arguments: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            slipstream.launch(model, run_dir=run_dir, **arguments)

    refused(r"nowhere/config\.json does not exist", tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused("model_type 'gpt2' is not supported", tmp_path)
    monkeypatch.setitem(sys.modules, "httpx", None)
    refused(r"needs httpx; pip install 'slipstream-rl\[remote\]'", engine=RemoteConfig(url="http://127.0.0.1:1"))


def test_a_port_in_use(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for what, config in (("gateway", GatewayConfig(port=port)), ("http", HttpConfig(port=port))):
            with pytest.raises(ConfigError, match=f"{what}: cannot listen on 127.0.0.1:{port}: Address already in use"):
                slipstream.launch(model, run_dir=tmp_path, **{what: config})
    assert not list(tmp_path.glob("*.log"))


def test_an_interpreter_without_vllm_or_slipstream_is_refused(model: Path, run_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"{bare} lacks vllm, slipstream, .*pip install vllm slipstream-rl"):
        slipstream.launch(model, run_dir=run_dir, engine=VllmConfig(python=bare))
    for python, said in ((tmp_path, "cannot be run"), ("/bin/false", "exits with code 1")):
        with pytest.raises(ConfigError, match=said):
            check_environment(str(python))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("revers", "task.name 'revers' is unknown; did you mean 'reverse'"),
        ("reasoning_gym:chain_sum", "that package is not installed"),
    ],
)
def test_an_unknown_task_and_a_missing_package(task: str, said: str, run_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=said):
        slipstream.train(slipstream.TrainConfig(run_dir=run_dir, task={"name": task}))


# --- calls of a bridge ---


@pytest.fixture(scope="module")
def bridge() -> Any:
    """Over a scripted engine of this process."""
    from slipstream.bridge.bridge import Bridge
    from slipstream.bridge.in_process import LocalFleet
    from slipstream.runtime import event_loop

    async def start() -> LocalFleet:
        return LocalFleet(ScriptedEngine("a", version=0))

    return Bridge(event_loop.run(start()))


def test_settings_of_the_wrong_kind(bridge: Any) -> None:
    for wrong, said in (
        ({"max_tokens": 4}, r"got \{'max_tokens': 4\}; write SamplingParams\(\*\*settings\)"),
        ([SamplingParams(), {"n": 2}], "got {'n': 2}"),
        ("greedy", "got 'greedy'"),
    ):
        with pytest.raises(InvalidSampling, match=said):
            bridge.generate(["a", "b"], wrong)
        with pytest.raises(InvalidSampling, match=said):
            bridge.rollouts().submit(["a", "b"], ["a", "b"], wrong)
    with pytest.raises(Unsupported, match="in_flight must be one of keep, finish, recompute, requeue; got 'drop'"):
        bridge.start_sync({}, in_flight="drop")
    with pytest.raises(ConfigError, match="late must be 'renew' or 'deliver', got 'never'"):
        bridge.rollouts(late="never")


def use_closed(bridge: Any, rollouts: Any) -> None:
    bridge.close()
    bridge.close()
    for call in (
        lambda: bridge.generate([[1, 2]]),
        lambda: list(bridge.stream([[1, 2]])),
        lambda: bridge.sync({}),
        lambda: bridge.score([[1, 2]]),
        bridge.status,
        bridge.pause,
        bridge.sleep,
        lambda: rollouts.submit(["a"], [[1, 2]]),
        rollouts.take,
    ):
        with pytest.raises(BridgeClosed, match="was closed"):
            call()


def test_a_bridge_that_was_closed(bridge: Any, tmp_path: Path) -> None:
    """Must run last: it closes the bridge of the tests above."""
    use_closed(bridge, bridge.rollouts())
    command = [sys.executable, "-m", "slipstream.cli", "gateway", "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as gateway:
        try:
            while not (tmp_path / "run" / "gateway.json").exists():
                assert gateway.poll() is None
            remote = slipstream.connect(tmp_path / "run")
            use_closed(remote, remote.rollouts())
        finally:
            gateway.kill()
