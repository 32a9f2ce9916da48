import json
import math

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.rl.tokens import write_small_model
from slipstream.weights import families


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    "command", ["demo", "train", "launch", "gateway", "engine", "fanout", "status", "doctor", "plan", "slurm", "role"]
)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_plan_counts_the_bytes_that_a_sync_moves(tmp_path):
    write_small_model(tmp_path)
    config = ModelConfig.read(tmp_path)
    total = sum(4 * math.prod(t.shape) for t in families.tensors(config))
    norms = sum(4 * math.prod(t.shape) for t in families.tensors(config) if "norm" in t.name)
    result = run("plan", tmp_path, "--tp", 2, "--engines", 3, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["model_bytes"] == total
    assert found["engine_rank_bytes"] == (total + norms) // 2  # both ranks hold the norms whole
    assert found["total_bytes"] == 3 * (total + norms)
    assert "an engine rank receives" in run("plan", tmp_path).output
    for arguments in (
        (tmp_path, "--dtype", "int4"),
        (tmp_path, "--tp", 3),
        (tmp_path / "nothing",),
        (tmp_path, "--trainer", "pp=2"),
    ):
        assert isinstance(run("plan", *arguments).exception, ConfigError)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.55), ("qwen3-235b-a22b", 235.1), ("kimi-k2", 1026)]
)
def test_plan_knows_shapes_by_name(name, billions):
    mesh = ("--trainer", "fsdp=128,tp=8", "--engines", 64, "--tp", 4)
    found = json.loads(run("plan", name, *mesh, "--json").output)
    assert found["num_parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["trainer_rank_bytes"] * 1024 >= found["total_bytes"] >= 64 * found["model_bytes"]
    experts = json.loads(run("plan", name, *mesh, "--ep", "--json").output)
    assert experts["engine_rank_bytes"] <= found["engine_rank_bytes"] * 1.01


def test_doctor_finds_this_machine_fit():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "JAX devices" in result.output and "shared memory" in result.output


def test_a_gateway_must_be_named():
    assert isinstance(run("status").exception, ConfigError)
    assert isinstance(run("engine", "--model", "x").exception, ConfigError)
