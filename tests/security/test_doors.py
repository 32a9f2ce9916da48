"""Known attacks on inference servers, tried at every door. Tests of single doors are with those doors: fuzzing and missing tokens in
tests/http and tests/gateway, path traversal in tests/http/test_control.py, templates in tests/http/test_tokenizer.py, links of
transports in tests/conformance, certificates in tests/runtime/test_tls.py."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import GatewayConfig, RemoteConfig, SyncOptions
from slipstream.engines.frontend.request_parser import read_tokenizer
from slipstream.engines.remote.http_client import ServerClient
from slipstream.errors import SlipstreamError, TransferError
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.server import SERVICE, running
from slipstream.http.errors import redacted
from slipstream.model.chat_template import ChatTemplate
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import write_sample_model
from slipstream.runtime import event_loop
from slipstream.tensors.safetensors_dir import stored_tensors
from slipstream.types import Destinations
from slipstream.weights.update.transport_choice import host_identity
from tests.gateway.scripted import ScriptedEngine, attached
from tests.http.fakes import TOKEN, FakeFleet, completion, front
from tests.security.doors import exchange, http_door

SOURCE = Path(slipstream.__file__).parent
BEARER = (("authorization", f"Bearer {TOKEN}"),)
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 16 << 20)]


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (self.marker,))

    def __init__(self, marker):
        self.marker = marker


@pytest.fixture
def bomb(tmp_path):
    """A pickle that must never be loaded."""
    yield pickle.dumps(Bomb(tmp_path / "exploded"))
    assert not (tmp_path / "exploded").exists(), "a pickle was loaded"


# --- code in data -----------------------------------------------------------------------------------------------------

FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}


def test_no_module_can_run_code_from_data():
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module).partition(".")[0]]
            elif isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                loads = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("torch.load", "np.load")
                given = {keyword.arg for keyword in node.keywords}
                if called in FORBIDDEN_CALLS or loads or given & FORBIDDEN_KEYWORDS:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)[:60]}")
            if FORBIDDEN & set(names):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: import of {names}")
    assert not found


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.safetensors"])
def test_weights_in_a_pickle_are_not_loaded(tmp_path, bomb, name):
    write_sample_model(directory := tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(bomb)
    for load in (stored_tensors, hf_weights.load):
        with pytest.raises(SlipstreamError, match="safetensors"):
            load(directory)


def test_code_that_a_model_directory_names_is_not_run(tmp_path):
    write_sample_model(directory := tmp_path / "model")
    code = f"from pathlib import Path\nPath({str(tmp_path / 'exploded')!r}).touch()\n"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (directory / f"{name}.py").write_text(code)
    maps = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    for file, auto_map in (
        ("config.json", maps),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_evil.T", None]}),
    ):
        facts = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(facts | {"auto_map": auto_map, "trust_remote_code": True}))
    read_config(directory), read_tokenizer(directory), ChatTemplate.read(directory), hf_weights.load(directory)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("path", ["/v1/completions", "/bridge/notify_update", "/update_weights", "/collective_rpc"])
def test_a_pickle_over_http_is_not_json(path, bomb):
    async def main():
        async with front(FakeFleet()) as client:
            headers = {"Content-Type": "application/octet-stream"}
            return await client.post(path, content=bomb, headers=headers)

    response = asyncio.run(main())
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


# --- HTTP -------------------------------------------------------------------------------------------------------------


def post(body, path="/v1/completions", fleet=None):
    async def main():
        async with front(fleet or FakeFleet(lambda name: [[completion(name, [5])]])) as client:
            return await client.post(path, json=body)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "field, value",
    [
        ("prompt_embeds", "gASVAAAA"),
        ("multi_modal_data", {"image": "gASVAAAA"}),
        ("serialized_named_tensors", ["gASVAAAA"]),
        ("lora_request", {"lora_path": "/etc"}),
        ("lora_path", "/etc"),
        ("guided_regex", "(a+)+$"),
        ("guided_json", {"type": "object"}),
        ("guided_grammar", "root ::= root"),
        ("structured_outputs", {"regex": "(a+)+$"}),
        ("logits_processors", ["os.system"]),
        ("custom_logit_processor", "gASVAAAA"),
        ("chat_template", "{{ x }}"),
        ("extra_body", {}),
        ("n", 10**9),
        ("n", 4097),
        ("best_of", 10**9),
        ("logprobs", 10**6),
        ("prompt_logprobs", -1),
        ("max_tokens", 2**31),
        ("stop_token_ids", list(range(17))),
        ("stop_token_ids", [2**31]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 1001]),
        ("logit_bias", {str(i): 1.0 for i in range(65)}),
        ("request_id", "x" * 201),
        ("priority", 2**31),
        ("seed", 2**63),
        ("prompt", ["x"] * 4097),
    ],
)
def test_dangerous_and_excessive_fields_are_refused(field, value):
    response = post({"prompt": [5], field: value})
    assert response.status_code == 400, response.text
    assert len(response.text) < 1000, "an error does not repeat what it refuses"


def test_no_url_in_a_request_is_fetched():
    async def main():
        seen = []
        server = await asyncio.start_server(lambda *connection: seen.append(connection), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        parts = [{"type": kind, kind: {"url": url}} for kind in ("image_url", "video_url", "audio_url", "input_audio")]
        async with server, front(FakeFleet()) as client:
            for part in parts:
                body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
            for path in (url, f"{url}/../..", "file:///etc/passwd", "gs://bucket/model"):
                assert (await client.post("/bridge/notify_update", json={"path": path})).status_code == 400
            await asyncio.sleep(0)
        assert not seen

    asyncio.run(main())


def test_a_server_that_redirects_does_not_get_the_token_elsewhere(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_VLLM_TOKEN", "the-servers-key")

    async def main():
        seen = []
        elsewhere = await asyncio.start_server(lambda *connection: seen.append(connection), "127.0.0.1", 0)
        target = elsewhere.sockets[0].getsockname()

        async def redirect(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            location = f"http://{target[0]}:{target[1]}/"
            writer.write(f"HTTP/1.1 307 x\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
            writer.close()

        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        client = ServerClient(RemoteConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        async with server, elsewhere:
            with pytest.raises(SlipstreamError, match="with 307 instead of 200"):
                await client.get("/health")
            await client.close()
        assert not seen

    asyncio.run(main())


DEV_ROUTES = """
    /docs /redoc /start_profile /stop_profile /load_lora_adapter /v1/load_lora_adapter /invocations /tokenize
    /reset_mm_cache /scale_elastic_ep /add_lora /update_weights_from_tensor /update_weights_from_distributed
    /update_weights_from_disk /init_weights_update_group /get_weights_by_name /configure_logging /debug/pprof /api/jobs/
    /dump_memory /set_internal_state /release_memory_occupation /openapi.json/ /v1/files
"""


@pytest.mark.parametrize("path", DEV_ROUTES.split())
def test_routes_for_developers_do_not_exist(path):
    async def main():
        async with front(FakeFleet()) as client:
            return [await client.request(method, path) for method in ("GET", "POST")]

    assert {response.status_code for response in asyncio.run(main())} == {404}


def test_what_the_server_tells_about_itself_is_not_its_environment(monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_THE_GATEWAY", "do-not-tell")

    async def main():
        async with front(FakeFleet()) as client:
            return [(await client.get(path)).text for path in ("/server_info", "/metrics", "/bridge/info", "/ready")]

    assert not any("do-not-tell" in text or str(SOURCE) in text for text in asyncio.run(main()))


SOCKET_ATTACKS = {
    "host names a public path": b"GET /v1/models HTTP/1.1\r\nHost: front/health?\r\n\r\n",
    "target names a public path": b"GET http://front/health@x/v1/models HTTP/1.1\r\nHost: front\r\n\r\n",
    "path that normalizes": b"GET /health/../v1/models HTTP/1.1\r\nHost: front\r\n\r\n",
    "path with an escape": b"GET /%2e%2e/v1/models HTTP/1.1\r\nHost: front\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two tokens": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a-token\r\nAuthorization: Bearer x\r\n\r\n",
    "method override": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-HTTP-Method-Override: HEAD\r\nX-Original-URL: /health\r\n\r\n",
    "forwarded": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Prefix: /health\r\n\r\n",
    "smuggled": b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "long header": b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "many headers": b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
    "long target": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "header injection": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    "upgrade": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


def test_no_request_gets_in_by_its_shape():
    """Every one is refused, and the server goes on."""

    async def main():
        async with http_door(FakeFleet()) as where:
            for name, sent in SOCKET_ATTACKS.items():
                answer = await asyncio.to_thread(exchange, where, sent)
                assert b'"data"' not in answer and b"root" not in answer, f"{name}: {answer[:300]!r}"
                assert b"Location:" not in answer and b"location:" not in answer, name
            valid = (
                b"GET /v1/models HTTP/1.1\r\nHost: front\r\nConnection: close\r\nAuthorization: Bearer a-token\r\n\r\n"
            )
            assert b'"data"' in await asyncio.to_thread(exchange, where, valid)
            for path in (b"/v1/models/", b"//v1/models", b"/bridge/info/"):
                redirecting = valid.replace(b"/v1/models", path).replace(b"Host: front", b"Host: evil.example")
                assert b" 404 " in await asyncio.to_thread(exchange, where, redirecting)

    asyncio.run(main())


def test_two_requests_with_one_id_are_both_answered():
    async def main():
        fleet = FakeFleet(lambda name: [[completion(name, [5])]])
        async with front(fleet) as client:
            body = {"prompt": [5], "request_id": "the-same"}
            calls = [client.post("/v1/completions", json=body) for _ in range(8)]
            return [response.status_code for response in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [200] * 8


# --- gRPC -------------------------------------------------------------------------------------------------------------


def test_metadata_and_fields_beyond_limits_do_not_hurt_the_gateway(bomb):
    good = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "n": 1}
    excessive = (
        {"n": 2**32 - 1},
        {"max_tokens": 2**32 - 1},
        {"top_logprobs": 2**32 - 1},
        {"stop_token_ids": range(17)},
        {"stop": ["x"] * 17},
        {"bias_token_ids": range(65), "bias_values": [1.0] * 65},
    )

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            address = await stack.enter_async_context(running(GatewayConfig(max_message_bytes=1 << 20), TOKEN))
            await stack.enter_async_context(attached(ScriptedEngine("a"), address, TOKEN))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS))
            status = channel.unary_unary(f"/{SERVICE}/Status")
            for size in (1 << 16, 1 << 20):
                with pytest.raises(grpc.aio.AioRpcError):
                    await status(b"", metadata=(*BEARER, ("x", "a" * size)))
            with pytest.raises(grpc.aio.AioRpcError):
                await status(b"", metadata=(*BEARER, *((f"x-{i}", "y") for i in range(20_000))))
            generate = channel.unary_stream(f"/{SERVICE}/Generate")
            for fields in excessive:
                message = pb.GenerateRequest(requests=[pb.Request(id="0", text="x")])
                message.sampling.append(pb.Sampling(**good | fields))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(message.SerializeToString(), metadata=BEARER).read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for junk in (bomb, b"\x80" * 100):
                with pytest.raises(grpc.aio.AioRpcError):
                    await generate(junk, metadata=BEARER).read()
            assert await status(b"", metadata=BEARER)

    event_loop.run(asyncio.wait_for(main(), 60))


# --- weights ----------------------------------------------------------------------------------------------------------


def test_an_engine_does_not_choose_where_a_trainer_writes(tmp_path):
    elsewhere, chosen, name = tmp_path / "elsewhere", tmp_path / "chosen", "slipstream-" + "0" * 16
    for directory in (elsewhere, chosen):
        directory.mkdir()

    class Evil(ScriptedEngine):
        def __init__(self, link):
            super().__init__("evil")
            self.link = json.dumps(link).encode()

        def describe(self):
            return replace(super().describe(), transports=("shm", "disk"), host=host_identity())

        async def begin(self, version, offer):
            return Destinations(((self.link, b""),), b"\x00")

    links = (
        ("shm", {"transport": "disk", "directory": str(elsewhere), "name": name}),
        ("shm", {"transport": "checkpoint", "directory": str(elsewhere), "name": name}),
        ("shm", {"transport": "tcp", "host": "127.0.0.1", "port": 1, "secret": "00", "certificate": ""}),
        (f"disk:{chosen}", {"transport": "disk", "directory": str(elsewhere), "name": name}),
    )
    for transport, link in links:

        async def start(link=link):
            return LocalFleet(Evil(link))

        bridge = Bridge(event_loop.run(start()), SyncOptions(transport))
        with pytest.raises(TransferError, match=r"engine 'evil' was offered .* and (answers with|names)"):
            bridge.sync({"w": np.ones(2, np.float32)})
        bridge.close()
    assert not list(elsewhere.iterdir())


# --- what errors tell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, told",
    [
        ("there is no directory 'x' under /srv/team/weights", "there is no directory 'x' under …/weights"),
        ("/srv/a/b.safetensors links to a file outside /srv/a;", "…/b.safetensors links to a file outside …/a;"),
        ("the gateway at 10.0.0.7:8471 cannot be reached", "the gateway at … cannot be reached"),
        ("the gateway at node01:8471 refused the token", "the gateway at … refused the token"),
        ("another trainer (ipv4:127.0.0.1:51744, 1 process(es))", "another trainer (ipv4:…, 1 process(es))"),
        ("another trainer (ipv6:[::1]:51744, 1 process(es))", "another trainer (ipv6:…, 1 process(es))"),
        ("the vLLM server at http://gpu-7:8000 answered GET /x", "the vLLM server at … answered GET /x"),
        ("call /start_weight_update first, or /v1/completions", "call /start_weight_update first, or /v1/completions"),
        ("model.layers.0.mlp expects shape [64], got 1.5", "model.layers.0.mlp expects shape [64], got 1.5"),
        ("/" * 100_000 + "a/" * 100_000, None),
    ],
)
def test_clients_are_told_no_paths_and_no_addresses(text, told):
    assert told is None or redacted(text) == told
    error = SlipstreamError(text)
    response = post({"prompt": [5]}, fleet=FakeFleet(lambda _: [error]))
    assert told is None or response.json()["error"]["message"] == told
    streamed = post({"prompt": [5], "stream": True}, fleet=FakeFleet(lambda name: [[], error]))
    assert told is None or told in json.loads(streamed.text.removeprefix("data: "))["error"]["message"]


def test_a_traceback_of_an_engine_stays_in_the_log(caplog):
    error = slipstream.errors.EngineFailure(
        'Traceback (most recent call last):\n  File "/srv/x.py", line 1\nKeyError: 1'
    )
    response = post({"prompt": [5]}, fleet=FakeFleet(lambda _: [error]))
    assert response.status_code == 500 and "x.py" not in response.text and "KeyError" not in response.text
    assert "x.py" in caplog.text
