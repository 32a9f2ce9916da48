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


@pytest.mark.parametrize("command", ["demo", "train", "gateway", "engine", "status", "doctor", "plan"])
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_plan_counts_bytes(tmp_path):
    write_small_model(tmp_path)
    config = ModelConfig.read(tmp_path)
    total = sum(4 * math.prod(t.shape) for t in families.tensors(config))
    norms = sum(4 * math.prod(t.shape) for t in families.tensors(config) if "norm" in t.name)
    result = run("plan", tmp_path, "--tp", 2, "--engines", 3, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert f"{3 * (total + norms):,} bytes received" in result.output.replace(
        "\n", " "
    )  # norms are held whole by both ranks
    assert f"{(total + norms) // 2:,}" in result.output
    assert isinstance(run("plan", tmp_path, "--dtype", "int4").exception, ConfigError)
    assert isinstance(run("plan", tmp_path, "--tp", 3).exception, ConfigError)
    assert isinstance(run("plan", tmp_path / "nothing").exception, ConfigError)


def test_doctor_finds_this_machine_fit():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "JAX devices" in result.output and "shared memory" in result.output


def test_a_gateway_must_be_named():
    assert isinstance(run("status").exception, ConfigError)
    assert isinstance(run("engine", "--model", "x").exception, ConfigError)
