"""Tokens: what each role may do over gRPC and HTTP, and tokens that are made, replaced and revoked while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import GatewayConfig
from slipstream.deploy.processes.run_dir import run_token
from slipstream.errors import ConfigError, Forbidden, Unauthorized
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.server import METHODS, SERVICE, running
from slipstream.gateway.tokens import TokenTable, make_token, revoke_token
from slipstream.runtime import event_loop
from slipstream.runtime.private_files import write_private
from slipstream.types import Request, SamplingParams
from tests.gateway.scripted import ScriptedEngine, attached
from tests.http.fakes import FakeFleet, endpoints, fake_app

ROLES = ("trainer", "engine", "client", "viewer")
CAP = 1 << 20
REQUEST = Request("0", (5,), SamplingParams(max_tokens=2, seed=1))


@pytest.fixture
def tokens(tmp_path):
    return TokenTable("the-runs-own", tmp_path)


def on_the_loop(test):
    event_loop.run(asyncio.wait_for(test, 60))


async def refusal(address, token, method):
    """Call a method without a message; return the class of the gateway's error, if it refuses the token."""
    kind = pb.DESCRIPTOR.services_by_name["Gateway"].methods_by_name[method]
    async with grpc.aio.insecure_channel(address) as channel:
        name, metadata = f"/{SERVICE}/{method}", (("authorization", f"Bearer {token}"),)
        try:
            if kind.client_streaming:
                call = channel.stream_stream(name)(metadata=metadata)
                await call.done_writing()
                await call.read()
            elif kind.server_streaming:
                await channel.unary_stream(name)(b"", metadata=metadata).read()
            else:
                await channel.unary_unary(name)(b"", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return dict(error.trailing_metadata() or ()).get("slipstream-error")
    return None


def test_over_grpc_each_role_may_call_its_methods_only(tmp_path, tokens):
    assert METHODS.keys() == set(pb.DESCRIPTOR.services_by_name["Gateway"].methods_by_name)
    given = {role: make_token(tmp_path, role) for role in ROLES}

    async def main():
        async with running(GatewayConfig(), tokens) as address:
            for method, permitted in METHODS.items():
                for role, token in given.items():
                    refused = await refusal(address, token, method)
                    assert (refused == "Forbidden") == (role not in permitted), (role, method, refused)
                assert await refusal(address, "the-runs-own", method) not in ("Forbidden", "Unauthorized")
                for wrong in (given["viewer"][:-1], "the-runs-ow", ""):
                    assert await refusal(address, wrong, method) == "Unauthorized"

    on_the_loop(main())


@pytest.mark.parametrize("role", ROLES)
def test_over_http_viewers_read_clients_generate_and_trainers_do_the_rest(tmp_path, monkeypatch, tokens, role):
    monkeypatch.setattr("tests.http.fakes.TokenTable", lambda _: tokens)
    token = make_token(tmp_path, role)

    async def main():
        transport = httpx.ASGITransport(fake_app(FakeFleet()), raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://front", headers=headers) as client:
            return {(method, path): await client.request(method, path) for method, path, _ in endpoints()}

    generates = {"/v1/completions", "/v1/chat/completions", "/generate"}
    # An agent plays in a session of its own and says how it went. What was sampled is for trainers.
    generates |= {"/v1/sessions", "/v1/sessions/{session}/close", "/sessions/{session}/v1/chat/completions"}
    for (method, path), response in asyncio.run(main()).items():
        may = {
            "trainer": True,
            "client": method == "GET" or path in generates,
            "viewer": method == "GET",
            "engine": path == "/health",
        }[role]
        assert (response.status_code == 403) == (not may), (method, path, response.text)
        if not may:
            assert response.json()["error"]["code"] == "forbidden" and role in response.json()["error"]["message"]


def test_a_client_generates_and_nothing_else(tmp_path, tokens):
    async def main():
        async with running(GatewayConfig(), tokens) as address, attached(ScriptedEngine("a"), address, "the-runs-own"):
            client = GatewayFleet(address, make_token(tmp_path, "client"), 5.0, CAP)
            assert [batch async for batch in client.generate([REQUEST])]
            for call in (client.pause, client.sleep):
                with pytest.raises(Forbidden, match=f"{address}.*'client' does not permit Control"):
                    await call()
            await client.close()
            with pytest.raises(Forbidden, match="'client' does not permit Attach"):
                async with attached(ScriptedEngine("b"), address, make_token(tmp_path, "client")):
                    pass

    on_the_loop(main())


def test_a_revoked_token_ends_open_streams(tmp_path, tokens):
    async def main():
        config = GatewayConfig(lease_seconds=0.4)  # an engine's next message is its heartbeat
        async with running(config, tokens) as address:
            token = make_token(tmp_path, "engine", "gpu-7")
            async with attached(ScriptedEngine("a"), address, token) as task:
                owner = GatewayFleet(address, "the-runs-own", 5.0, CAP)
                assert [engine.state for engine in (await owner.status()).engines] == ["ready"]
                revoke_token(tmp_path, "gpu-7")
                with pytest.raises(Unauthorized, match="revoked"):
                    await asyncio.wait_for(asyncio.shield(task), 30)
                assert [engine.state for engine in (await owner.status()).engines] == ["lost"]
                await owner.close()

    on_the_loop(main())


def test_the_runs_own_token_is_replaced_while_it_runs(tmp_path, tokens):
    """The gateway, an engine and a trainer that joined by the run directory go on; the old token is refused."""

    write_private(tmp_path / "token", "the-runs-own")

    async def main():
        async with running(GatewayConfig(), tokens) as address:
            current = run_token(tmp_path)
            async with attached(ScriptedEngine("a"), address, current, patience=30.0):
                trainer, old = (GatewayFleet(address, token, 5.0, CAP) for token in (current, "the-runs-own"))
                await old.status()
                after = make_token(tmp_path, "run")
                assert current() == after != "the-runs-own"
                assert [batch async for batch in trainer.generate([REQUEST])]
                with pytest.raises(Unauthorized):
                    await old.status()
                for fleet in (trainer, old):
                    await fleet.close()

    on_the_loop(main())


def test_tokens_by_command(tmp_path, tokens):
    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--run-dir", str(tmp_path)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output.strip()

    first, second = run("token", "client", "--name", "ci"), run("token", "viewer")
    assert (tokens.role_of(first.encode()), tokens.role_of(second.encode())) == ("client", "viewer")
    assert first not in (tmp_path / "tokens").read_text(), "only hashes are stored"
    run("revoke", "ci")
    assert (tokens.role_of(first.encode()), tokens.role_of(second.encode())) == (None, "viewer")
    for arguments, said in (
        (("token", "admin"), "must be one of"),
        (("token", "client", "--name", "a b"), "name must be"),
        (("revoke", "ci"), r"no token named 'ci'; it has viewer-\w+ \(viewer\)"),
        (("token", "run"), "no gateway is running"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(*arguments)
    run("token", "client", "--name", "ci")
    with pytest.raises(ConfigError, match="has a token named 'ci'"):
        run("token", "client", "--name", "ci")


def test_a_damaged_file_permits_nothing_and_an_empty_token_neither(tmp_path, tokens, caplog):
    token = make_token(tmp_path, "client").encode()
    assert tokens.role_of(token) == "client"
    with (tmp_path / "tokens").open("a") as file:
        file.write("junk\n")
    assert tokens.role_of(token) is None and "no role token is accepted" in caplog.text
    (tmp_path / "tokens").unlink()
    (tmp_path / "token").write_text("")
    assert tokens.role_of(b"") is None and tokens.role_of(token) is None
    with contextlib.suppress(ConfigError):
        revoke_token(tmp_path, "x")
