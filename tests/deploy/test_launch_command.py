"""`slipstream launch --http`: the HTTP server of a fleet, its settings, and its end."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import app
from slipstream.deploy.processes import certificates
from slipstream.errors import ConfigError
from tests.http.served import answer, make_model


@contextlib.contextmanager
def held(where: Path, *more: str, end: signal.Signals = signal.SIGINT) -> Iterator[httpx.Client]:
    """An HTTP client of a fleet that the command runs. All paths are relative to its working directory. Stopped or killed, the
    command takes gateway, engines and the engines' copies of the token with it."""
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
    command += [text for setting in settings for text in ("--http-option", setting)]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, cwd=where) as process:
        try:
            assert process.stdout is not None
            said = {}
            for line in process.stdout:
                label, _, text = line.partition(" ")
                said[label] = text.strip()
                if label == "status":
                    break
            assert said["engines"] == "engine-0 (ready)" and said["here"] == f'slipstream.connect("{where / "run"}")'
            url, token = said["http"].split()[0], (where / "run" / "token").read_text()
            trusted = ssl.create_default_context(cafile=files.ca)
            with httpx.Client(base_url=url, verify=trusted, timeout=120) as client:
                assert client.get("/v1/models").status_code == 401
                client.headers["Authorization"] = f"Bearer {token}"
                yield client
            with slipstream.connect(where / "run") as bridge:
                pids = [engine.info.pid for engine in bridge.status().present]
            pids.append(json.loads((where / "run" / "gateway.json").read_text())["pid"])
            started = [psutil.Process(pid) for pid in pids]
            process.send_signal(end)
            assert process.wait(120) == (-9 if end == signal.SIGKILL else 0)
            assert not psutil.wait_procs(started, timeout=120)[1]
        finally:
            process.kill()
    holding = [path for path in (where / "run").rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    # A killed gateway leaves its token for the next one. An engine must leave none: it may be on another machine.
    kept = {where / "run", where / "run" / "kept"} if end == signal.SIGKILL else set()
    assert {path.parent for path in holding} <= kept


def check_front(client: httpx.Client, where: Path) -> None:
    """It uses TLS on the given host, knows the model's tokenizer, and loads checkpoints."""
    assert str(client.base_url).startswith("https://localhost:")
    asked = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    before = answer(client.post("/v1/chat/completions", json={"model": "model", **asked}), 200)
    make_model(where / "checkpoints" / "step-1", seed=1)
    found = answer(client.post("/bridge/notify_update", json={"path": "step-1"}), 200)
    assert found["loaded"] and found["policy_version"] == before["choices"][0]["policy_version"] + 1
    after = answer(client.post("/v1/chat/completions", json={"model": "model", **asked}), 200)
    assert after["choices"][0]["policy_version"] == found["policy_version"]


def test_settings_of_the_http_server(tmp_path: Path) -> None:
    with held(tmp_path, "max_num_seqs=8") as client:
        check_front(client, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--http-option", "weights=checkpoints"),
            "weights=checkpoints is a setting of the HTTP server and needs --http PORT",
        ),
        (("--http", "0", "--http-option", "wieghts=checkpoints"), "did you mean 'weights'"),
        (("--http", "0", "--http-option", "host=node01"), "host is 'node01': beyond loopback .* TLS is required"),
        (("--http", "0", "--http-option", "host=0.0.0.0"), "TLS is required"),
        (
            ("--http", "0", "--ray", "--http-option", "host=node01", "--http-option", "certificate=a.pem"),
            "key is not set",
        ),
    ],
)
def test_invalid_http_settings_are_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    run_dir = tmp_path / "run"
    command = ["launch", "--model", str(tmp_path), "--run-dir", str(run_dir), *arguments]
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not run_dir.exists()
