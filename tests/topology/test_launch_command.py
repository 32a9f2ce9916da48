"""`slipstream launch --http`: the front that comes with a fleet, with settings of its own."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import ConfigError
from slipstream.topology import certificates
from tests.http.served import answer, make_model


@contextlib.contextmanager
def held(where: Path, *more: str) -> Iterator[httpx.Client]:
    """A client of the front of a fleet that the command holds. All paths are relative to where it was started."""
    model, files = make_model(where / "model"), certificates.make(where / "files", ["node01"])
    (where / "checkpoints").mkdir()
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "launch",
        "--model",
        model.name,
        "--run-dir",
        "run",
        "--http",
        "0",
    ]
    settings = ("weights=checkpoints", "host=localhost", "certificate=files/node01.pem", "key=files/node01.key")
    command += [text for setting in settings for text in ("--front", setting)]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, cwd=where) as process:
        try:
            assert process.stdout is not None
            said = {}
            for line in process.stdout:
                label, _, text = line.partition(" ")
                said[label] = text.strip()
                if label == "status":
                    break
            url, token = said["http"].split()[0], (where / "run" / "token").read_text()
            trusted = ssl.create_default_context(cafile=files.ca)
            with httpx.Client(base_url=url, verify=trusted, timeout=120) as client:
                assert client.get("/v1/models").status_code == 401
                client.headers["Authorization"] = f"Bearer {token}"
                yield client
        finally:
            process.terminate()
            process.wait(120)


def check_front(client: httpx.Client, where: Path) -> None:
    """It speaks TLS where it was told to, knows the model's words, and loads checkpoints."""
    assert str(client.base_url).startswith("https://localhost:")
    asked = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    before = answer(client.post("/v1/chat/completions", json={"model": "model", **asked}), 200)
    make_model(where / "checkpoints" / "step-1", seed=1)
    found = answer(client.post("/bridge/notify_update", json={"path": "step-1"}), 200)
    assert found["loaded"] and found["policy_version"] == before["choices"][0]["policy_version"] + 1
    after = answer(client.post("/v1/chat/completions", json={"model": "model", **asked}), 200)
    assert after["choices"][0]["policy_version"] == found["policy_version"]


def test_the_front_has_settings_of_its_own(tmp_path: Path) -> None:
    with held(tmp_path, "max_concurrency=8") as client:
        check_front(client, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--front", "weights=checkpoints"), "weights=checkpoints is a setting of the HTTP front.*without --http PORT"),
        (("--http", "0", "--front", "wieghts=checkpoints"), "did you mean 'weights'"),
        (("--http", "0", "--front", "host=node01"), "http.host is 'node01': beyond loopback .* needs TLS"),
        (("--http", "0", "--front", "host=0.0.0.0"), "needs TLS"),
        (("--http", "0", "--ray", "--front", "host=node01", "--front", "certificate=a.pem"), "key is not given"),
    ],
)
def test_a_front_that_may_not_be_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    run_dir = tmp_path / "run"
    command = ["launch", "--model", str(tmp_path), "--run-dir", str(run_dir), *arguments]
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not run_dir.exists()
