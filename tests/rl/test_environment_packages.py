"""Environments of other packages, in the interpreters that `make environment-venvs` creates: their requirements conflict."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_model
from slipstream.rl.agents.player import open_player
from slipstream.rl.config import EnvironmentConfig
from slipstream.rl.data.tokens import codec_of
from slipstream.types import SamplingParams

ROOT = Path(__file__).parents[2]
VERIFIERS, OPENENV = (os.environ.get(f"SLIPSTREAM_{name}_PYTHON", "") for name in ("VERIFIERS", "OPENENV"))


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_sample_model(directory)
    with slipstream.inprocess(directory, engine=EmbeddedConfig(max_num_seqs=16, max_model_len=128)) as opened:
        opened.model_dir = directory
        opened.sync(hf_weights.load(directory))
        yield opened


def play(bridge, config, prompts, always):
    """Episodes of a policy that always says the same character."""
    codec = codec_of(config, bridge.model_dir)
    ((token,),) = codec.answers([always])
    with open_player(config, bridge, codec) as player:
        params = SamplingParams(1, seed=0, stop_token_ids=codec.stops, logit_bias=((token, 100.0),))
        return codec, player.sample(prompts, [params] * len(prompts))


@pytest.mark.skipif(not VERIFIERS, reason="SLIPSTREAM_VERIFIERS_PYTHON names no interpreter")
def test_a_verifiers_environment_with_a_tool(bridge, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/verifiers"))
    config = EnvironmentConfig(
        name="verifiers:boxes_taskset",
        tools="boxes_taskset:tool_calls",
        python=VERIFIERS,
        max_turns=2,
        max_tokens=120,
        chat=True,
    )
    codec, (looking, answering) = play(bridge, config, ["3", "13"], "d")
    assert codec.decode([looking.prompt_token_ids]) == ["<|user|>\nb3\n<|assistant|>\n"]
    assert codec.decode([looking.token_ids]) == ["d\n<|tool|>\n4\n<|assistant|>\nd"]
    assert (
        looking.episode.rewards == (0.0, 0.2) and looking.episode.end == "done"
    )  # looked, and was stopped after two turns
    assert looking.token_ids == answering.token_ids  # the same of ten tasks
    _, (wrong,) = play(bridge, config, ["3"], "9")
    assert wrong.episode.rewards == (0.0,) and wrong.episode.end == "done"


@pytest.mark.skipif(not OPENENV, reason="SLIPSTREAM_OPENENV_PYTHON names no interpreter")
def test_an_openenv_server(bridge):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([OPENENV, ROOT / "tests/rl/openenv_server.py", str(port)])
    try:
        wait_for(port)
        config = EnvironmentConfig(
            name=f"openenv:http://127.0.0.1:{port}", options={"sign": "?"}, python=OPENENV, max_turns=3, max_tokens=40
        )
        codec, episodes = play(bridge, config, ["3", "4"], "x")
    finally:
        server.kill()
        server.wait()
    assert [codec.decode([e.prompt_token_ids + e.token_ids])[0] for e in episodes] == ["3?xx!x", "4?xx!x"]
    assert [e.episode.rewards for e in episodes] == [(1.0, 2.0)] * 2


def wait_for(port):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
    pytest.fail("the OpenEnv server did not start")
