"""The gateway process: imported modules, listening addresses, what it leaves."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.errors import ConfigError, GatewayLost
from slipstream.gateway import channels
from slipstream.gateway.client import GatewayFleet
from slipstream.runtime import event_loop
from slipstream.runtime.failpoints import VARIABLE
from tests.gateway.scripted import ScriptedEngine, attached
from tests.gateway.test_gateway import collect, request


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """One for all tests; the last of them kills it."""
    run_dir = tmp_path_factory.mktemp("run")
    process = subprocess.Popen([sys.executable, "-m", "slipstream.cli", "gateway", "--run-dir", str(run_dir)])
    deadline = time.monotonic() + 120
    while not (run_dir / "gateway.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield process, run_dir
    process.kill()
    process.wait()


def listening(pid):
    """The host of each address that it listens on. The kernel's table changes under the reader while other tests open and close connections, so that one
    look may miss an entry."""
    found = set()
    for _ in range(20):
        connections = psutil.Process(pid).net_connections("inet")
        found |= {c.laddr for c in connections if c.status == "LISTEN"}
        time.sleep(0.01)
    return [address.ip.removeprefix("::ffff:") for address in found]


def test_it_never_loads_jax_and_listens_on_loopback(gateway):
    process, run_dir = gateway
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "grpc" in maps and not any(word in maps for word in ("jaxlib", "torch", "libcuda"))
    assert listening(process.pid) == ["127.0.0.1"]
    assert (run_dir / "token").stat().st_mode & 0o777 == 0o600


def test_random_bytes_on_its_port_do_not_hurt_it(gateway):
    process, run_dir = gateway
    host, port = json.loads((run_dir / "gateway.json").read_text())["address"].rsplit(":", 1)
    for junk in (
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(2048),
        b"",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(junk)
    done = CliRunner().invoke(app, ["status", "--run-dir", str(run_dir)], catch_exceptions=False)
    assert done.exit_code == 0 and "none yet" in done.stdout
    assert process.poll() is None


def test_a_port_in_use_and_an_address_beyond_loopback_are_refused(gateway, tmp_path):
    _, run_dir = gateway
    port = json.loads((run_dir / "gateway.json").read_text())["address"].rpartition(":")[2]

    command = ["gateway", "--run-dir", str(tmp_path / "other")]
    taken = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", *command, "--port", port], capture_output=True, text=True, timeout=60
    )
    assert taken.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in taken.stderr
    with pytest.raises(ConfigError, match=r"beyond loopback.* TLS is required"):
        CliRunner().invoke(app, [*command, "--host", "0.0.0.0"], catch_exceptions=False)


def test_a_frozen_gateway_is_noticed_by_a_call_in_progress(gateway, monkeypatch):
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 1500)
    monkeypatch.setattr(channels, "KEEPALIVE_TIMEOUT_MS", 500)
    process, run_dir = gateway
    address, token = json.loads((run_dir / "gateway.json").read_text())["address"], (run_dir / "token").read_text()
    engine = ScriptedEngine("e")
    engine.gate.clear()

    async def main():
        fleet = GatewayFleet(address, token, timeout=60.0, max_message_bytes=1 << 20)
        async with attached(engine, address, token, patience=60.0):
            call = asyncio.create_task(collect(fleet.generate([request("x")])))
            while not engine.seen:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(GatewayLost):
                    await asyncio.wait_for(call, 30)  # gRPC's own limit is a minute
            finally:
                process.send_signal(signal.SIGCONT)
        await fleet.close()

    event_loop.run(main())


def test_a_gateway_that_fails_in_the_place_of_a_killed_one_leaves_address_and_token(gateway, tmp_path):
    process, run_dir = gateway
    files = [run_dir / "gateway.json", run_dir / "token"]
    left = [file.read_text() for file in files]
    process.kill()
    process.wait()
    (tmp_path / "chaos" / "armed").mkdir(parents=True)
    (tmp_path / "chaos" / "armed" / "launch.gateway").write_text("error")
    failed = subprocess.run(
        [sys.executable, "-m", "slipstream.cli", "gateway", "--run-dir", str(run_dir)],
        env={**os.environ, VARIABLE: str(tmp_path / "chaos")},
        capture_output=True,
        timeout=60,
    )
    assert failed.returncode and b"a fault was injected at launch.gateway" in failed.stderr
    assert [file.read_text() for file in files] == left  # engines and trainers know them
