"""Clients that disconnect, send slowly or do not read; and where the server listens."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import HttpConfig
from slipstream.errors import ConfigError
from slipstream.gateway.tokens import TokenTable
from slipstream.http import limits
from slipstream.http.server import _bind
from slipstream.http.server import serve as run_server
from slipstream.http.state import Front
from tests.http.fakes import TOKEN, FakeFleet, progress
from tests.http.served import eventually


def requests_of(served):
    return sum(engine.num_requests for engine in served.bridge.status().engines)


def opened(served):
    where = urlsplit(served.url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


def request_of(token, path, body):
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: front",
        f"Authorization: Bearer {token}",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_disconnect_cancels_the_generation(served, path, stream):
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "abc"}
    if path != "/generate":
        body["stream"] = stream
    served.bridge.pause()
    try:
        with opened(served) as client:
            client.sendall(request_of(served.token, path, body))
            eventually(lambda: requests_of(served) == 1)
        eventually(lambda: requests_of(served) == 0)
    finally:
        served.bridge.resume()
    assert (
        "slipstream_http_in_flight 0.0" in httpx.get(f"{served.url}/metrics", headers=served.headers, timeout=60).text
    )


def test_a_client_that_does_not_read_does_not_block_others(served):
    with opened(served) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = {"prompt": ["abc"] * 60, "n": 4, "max_tokens": 40, "logprobs": 20, "stream": True}
        lazy.sendall(request_of(served.token, "/v1/completions", body))
        eventually(lambda: requests_of(served) > 0)
        assert served.post("/v1/completions", {"prompt": "abc"})["choices"]
    eventually(lambda: requests_of(served) == 0)


def served_by(fleet, test, **config):
    """Run `test(where, front)` with a server over a scripted fleet, in this process."""

    async def main():
        front = Front.create(fleet, lambda: fleet, HttpConfig(**config))
        async with run_server(front, TokenTable(TOKEN)) as url:
            await test((urlsplit(url).hostname, urlsplit(url).port), front)

    asyncio.run(main())


def impatient(client):
    """Run `client(connect)` in a thread, with a server that waits half a second for a body. Return what it returns."""
    found = []

    async def test(where, front):
        found.append(await asyncio.to_thread(client, lambda: socket.create_connection(where, timeout=60)))

    served_by(FakeFleet(), test, body_seconds=0.5)
    return found[0]


def health(connect):
    with connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: front\r\nConnection: close\r\n\r\n")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return answer.status


def test_a_slow_body_is_answered_with_408():
    begun = request_of(TOKEN, "/v1/completions", {"prompt": "abc"})[:-5]

    def client(connect):
        with connect() as slow:
            slow.sendall(begun)
            answer = http.client.HTTPResponse(slow)
            answer.begin()
            assert answer.status == 408 and "body_seconds" in json.loads(answer.read())["error"]["message"]
            assert slow.recv(1) == b"", "the connection must be closed"
        with connect() as half:  # disconnects before the end of the body
            half.sendall(begun)
        return health(connect)

    assert impatient(client) == 200


def test_connections_without_a_whole_request_are_closed():
    def client(connect):
        kept, silent, begun = connect(), connect(), connect()
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: front\r\n\r\n")
        answer = http.client.HTTPResponse(kept)
        answer.begin()
        answer.read()
        begun.sendall(b"GET /health HTTP/1.1\r\nHost: fro")
        kept.sendall(b"GET /health")
        for peer in (silent, begun, kept):
            peer.settimeout(10)
            assert peer.recv(1) == b""
            peer.close()
        return answer.status

    assert impatient(client) == 200


def test_more_connections_than_permitted_are_refused():
    async def test(where, front):
        held = [await asyncio.open_connection(*where) for _ in range(2)]
        for reader, writer in (await asyncio.open_connection(*where), held[0]):
            writer.write(b"GET /health HTTP/1.1\r\nHost: front\r\nConnection: close\r\n\r\n")
            answers.append(await reader.read())
            writer.close()
        held[1][1].close()

    answers = []
    served_by(FakeFleet(), test, max_connections=2)
    refused, answered = answers
    assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in refused.lower()
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many"
    assert answered.startswith(b"HTTP/1.1 200")


def read_until_closed(peer):
    received = b""
    peer.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while data := peer.recv(1 << 16):
            received += data
    return received


def test_a_client_that_never_reads_is_disconnected(monkeypatch):
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.2)

    class Endless(FakeFleet):
        async def generate(self, requests):
            for start in itertools.count():
                yield [progress(requests[0].id, start, [5])]
                await asyncio.sleep(0)

    async def test(where, front):
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            lazy.connect(where)
            body = b'{"prompt": "a", "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: "
            lazy.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
            async with asyncio.timeout(30):
                while not len(front.in_flight):
                    await asyncio.sleep(0.01)
                while len(front.in_flight):
                    await asyncio.sleep(0.01)
                received = await asyncio.to_thread(read_until_closed, lazy)
                while front.admission.held != (0, 0):  # the response ends after its generation
                    await asyncio.sleep(0.01)
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
            assert front.admission.held == (0, 0)

    served_by(Endless(), test)


def test_connections_are_kept_alive(served):
    where = urlsplit(served.url)
    client = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    client.request("GET", "/health")
    client.getresponse().read()
    kept = client.sock
    for body in ("{", json.dumps({"prompt": "abc", "stream": True}), json.dumps({"prompt": "abc"})):
        client.request("POST", "/v1/completions", body, served.headers)
        client.getresponse().read()
        assert client.sock is kept and kept is not None
    client.close()


def test_malformed_requests_do_no_harm(served):
    for junk in (
        os.urandom(4096),
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\r\n" * 1000,
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with opened(served) as peer:
            peer.sendall(junk)
            peer.shutdown(socket.SHUT_WR)
    with opened(served) as peer:  # endless headers
        peer.sendall(b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 200_000)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
    assert served.get("/v1/models")


# --- the process -----------------------------------------------------------------------------------------------------


def start(run_dir, *options, **streams):
    command = [sys.executable, "-m", "slipstream.cli", "gateway", "--run-dir", str(run_dir), *options]
    return subprocess.Popen(command, **streams)


def facts_of(run_dir, process):
    file = run_dir / "gateway.json"

    def is_there():
        assert process.poll() is None
        return file.exists() and json.loads(file.read_text())["pid"] == process.pid

    eventually(is_there)
    return json.loads(file.read_text())


def test_the_server_listens_on_loopback_and_restarts_on_the_same_port(tmp_path):
    process = start(tmp_path, "--http", "0")
    try:
        url = facts_of(tmp_path, process)["http"]
        listening = [c.laddr for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert len(listening) == 2 and {a.ip.removeprefix("::ffff:") for a in listening} == {"127.0.0.1"}
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert not any(word in maps for word in ("jaxlib", "torch", "libcuda"))
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        token = (tmp_path / "token").read_text()
        assert httpx.get(f"{url}/ready", headers={"Authorization": f"Bearer {token}"}, timeout=60).status_code == 503
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start(tmp_path, "--http", "0")
        assert facts_of(tmp_path, process)["http"] == url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert not (tmp_path / "token").exists() and not (tmp_path / "gateway.json").exists()
    finally:
        process.kill()
        process.wait()


def test_invalid_settings_are_refused_at_the_start(tmp_path):
    command = ["gateway", "--run-dir", str(tmp_path)]
    for said, *options in (
        ("TLS is required", "--http", "0", "host=0.0.0.0"),
        ("needs --http", "model=x"),
        ("did you mean 'model'", "--http", "0", "modle=x"),
    ):
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for said, *options in (
            (b"is not a directory", "--http", "0", f"model={tmp_path / 'nowhere'}"),
            (b"cannot listen for HTTP", "--http", str(taken.getsockname()[1])),
        ):
            process = start(tmp_path, *options, stderr=subprocess.PIPE)
            _, text = process.communicate(timeout=60)
            assert process.returncode == 2 and said in text
    assert not (tmp_path / "token").exists()


def test_accepted_sockets_have_tcp_nodelay():
    async def of_a_connection():
        found = asyncio.get_running_loop().create_future()
        listening = _bind(HttpConfig(), 0)

        async def accepted(_, writer):
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            try:
                return await asyncio.wait_for(found, 10)
            finally:
                writer.close()

    assert asyncio.run(of_a_connection())
