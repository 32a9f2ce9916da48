"""The HTTP application over a scripted fleet: authentication, validation, errors and streams."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    GatewayLost,
    MessageTooLarge,
    NotReady,
    Overloaded,
    SuspectRequest,
)
from slipstream.gateway import convert
from slipstream.http import checkpoint_updates, event_stream
from slipstream.http.own_gateway import OwnGateway
from slipstream.tensors import safetensors_dir
from slipstream.types import Failure, FleetStatus, Request, SamplingParams
from tests.http.fakes import TOKEN, FakeFleet, completion, endpoints, front, progress


def run(fleet, *calls, **config):
    """Return the answers to `(method, path, arguments)`, called in order."""

    async def main():
        async with front(fleet, **config) as client:
            return [await client.request(method, path, **body) for method, path, body in calls]

    return asyncio.run(main())


def complete(**body):
    return "POST", "/v1/completions", {"json": {"prompt": [5], **body}}


def events(response):
    assert response.headers["content-type"] == "text/event-stream"
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]


# --- authentication and routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, path", [endpoint[:2] for endpoint in endpoints()])
@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"),
        *(TOKEN, f"Token {TOKEN}", "Basic !", "Basic eDp5"),
    ],
)
def test_every_endpoint_needs_the_token(method, path, header):
    headers = {} if header is None else {"Authorization": header}

    async def main():
        async with front(FakeFleet()) as client:
            del client.headers["Authorization"]
            return await client.request(method, path, headers=headers)

    response = asyncio.run(main())
    if path == "/health":
        assert response.status_code == 200
    else:
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v1", "/v1/models/", "/health/x", "//health", "/docs"])
def test_unknown_paths_need_the_token_too_and_lead_nowhere(path):
    async def main():
        async with front(FakeFleet()) as client:
            with_token = await client.get(path)
            del client.headers["Authorization"]
            return with_token, await client.get(path)

    with_token, without = asyncio.run(main())
    assert (with_token.status_code, without.status_code) == (404, 401)
    assert with_token.json()["error"]["code"] == "not_found"


def test_the_token_is_accepted_as_a_password():
    async def main():
        async with front(FakeFleet()) as client:
            del client.headers["Authorization"]
            return await client.get("/v1/models", auth=("anyone", TOKEN)), await client.get(
                "/v1/models", auth=(TOKEN, "")
            )

    right, wrong = asyncio.run(main())
    assert (right.status_code, wrong.status_code) == (200, 401)


def test_a_wrong_method_names_the_right_one():
    get, put = run(FakeFleet(), ("GET", "/v1/completions", {}), ("PUT", "/pause", {}))
    assert get.status_code == put.status_code == 405
    assert "takes POST" in get.json()["error"]["message"] and get.headers["allow"] == "POST"


# --- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, says",
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "a JSON object"),
        (b'"x"', "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"prompt": NaN}', "not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"", "prompt is missing"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": {}}', "prompt: Input should be"),
        (b'{"prompt": []}', "1 to 4096 prompts"),
        (b'{"prompt": [[]]}', "prompt: Input should be"),
        (b'{"prompt": [1, "a"]}', "prompt: Input should be"),
        (b'{"prompt": [-1]}', "prompt: Input should be"),
        (b'{"prompt": [4294967296]}', "prompt: Input should be"),
        (b'{"prompt": [true]}', "prompt: Input should be"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": "a", "n": 0}', "n: Input should be greater than or equal to 1, got 0"),
        (b'{"prompt": "a", "n": 4097}', "n: Input should be less than or equal to 4096"),
        (b'{"prompt": ["a", "b"], "n": 4000}', "at most 4096 choices"),
        (b'{"prompt": "a", "n": 2.5}', "n: Input should be a valid integer"),
        (b'{"prompt": "a", "top_p": 0}', "top_p must be greater than 0"),
        (b'{"prompt": "a", "stop": [""]}', "stop must be"),
        (
            b'{"prompt": "a", "stop": ["a"' + b', "a"' * 16 + b"]}",
            "stop: Input should be a valid string or List should have at most 16",
        ),
        (
            b'{"prompt": "a", "stop_token_ids": [1' + b", 1" * 16 + b"]}",
            "stop_token_ids: List should have at most 16 items",
        ),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"99999999999": 1}}', "logit_bias"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        (b'{"prompt": "a", "stream": true, "echo": true}', "not streamed"),
        (b'{"prompt": "a", "best_of": 3}', "best_of"),
        (b'{"prompt": "a", "logprobs": 21}', "logprobs: Input should be less than or equal to 20"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"all": true}}', "stream_options: unknown field 'all'"),
        (b'{"prompt": "a", "temprature": 1}', "unknown field 'temprature'; did you mean 'temperature'?"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix is not supported"),
        (b'{"prompt": "a", "stream": 1}', "stream: Input should be a valid boolean"),
        (b'{"prompt": "a", "temperature": "1"}', "temperature: Input should be a valid number"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature: Input should be a valid number"),
    ],
)
def test_invalid_bodies_are_refused_with_the_reason(body, says):
    (response,) = run(FakeFleet(), ("POST", "/v1/completions", {"content": body}))
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_null_integral_floats_and_ignored_fields_are_accepted():
    fleet = FakeFleet(lambda name: [[completion(name, [5, 6])]])
    fields = {"n": 1.0, "stop": None, "temperature": None, "user": "me", "metadata": {"a": 1}, "logit_bias": {"5": 1}}
    (response,) = run(fleet, complete(**fields))
    assert response.status_code == 200, response.text


def test_query_strings_are_checked():
    wrong, unknown, right = run(
        FakeFleet(),
        ("POST", "/pause?mode=later", {}),
        ("POST", "/pause?mod=keep", {}),
        ("POST", "/pause?mode=keep&clear_cache=false", {}),
    )
    assert wrong.status_code == unknown.status_code == 400 and right.status_code == 200
    assert wrong.json()["error"]["param"] == "mode" and unknown.json()["error"]["param"] == "mod"
    assert "did you mean 'mode'" in unknown.json()["error"]["message"]


def test_a_body_that_is_too_large():
    async def pieces():
        for _ in range(64):
            yield b" " * 1024

    said, unsaid, fits = run(
        FakeFleet(),
        ("POST", "/v1/completions", {"content": b" " * (64 << 10)}),
        ("POST", "/v1/completions", {"content": pieces()}),
        ("POST", "/v1/completions", {"content": b" " * (16 << 10)}),
        max_body_bytes=16 << 10,
    )
    assert said.status_code == unsaid.status_code == 413 and "max_body_bytes" in said.json()["error"]["message"]
    assert fits.status_code == 400


def test_unsupported_chats_are_refused():
    def chat(*messages, **more):
        return "POST", "/v1/chat/completions", {"json": {"messages": list(messages), **more}}

    none, tools, form, empty = run(
        FakeFleet(),
        chat({"role": "user", "content": "a"}),
        chat({"role": "user", "content": "a"}, tool_choice="required"),
        chat({"role": "user", "content": "a"}, response_format={"type": "json_object"}),
        chat(),
    )
    assert none.status_code == 400 and "no chat template" in none.json()["error"]["message"]
    assert tools.json()["error"]["param"] == "tool_choice" and form.json()["error"]["param"] == "response_format"
    assert empty.json()["error"]["param"] == "messages"


# --- errors and streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status",
    [
        (NotReady("no weights"), 503),
        (EngineLost("gone"), 503),
        (GatewayLost("gone"), 503),
        (DeadlineExceeded("late"), 504),
        (MessageTooLarge("large"), 413),
        (SuspectRequest("two are gone"), 400),
        (EngineFailure("broken"), 500),
    ],
)
def test_errors_map_to_status_and_code(error, status):
    raised, failed, streamed = run(
        FakeFleet(lambda _: [error]), complete(), complete(stream=True), ("GET", "/v1/models", {})
    )
    assert raised.status_code == failed.status_code == status and streamed.status_code == 200
    assert raised.json()["error"] == {
        "message": str(error),
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None,
        "code": type(error).__name__,
    }
    (failure,) = run(FakeFleet(lambda name: [[Failure(name, error)]]), complete())
    assert failure.status_code == status


def test_a_model_name_is_that_of_the_base_model_or_of_an_adapter():
    class Fleet(FakeFleet):
        async def generate(self, requests):
            yield [completion(request.id, [7], request.adapter) for request in requests]

    fleet = Fleet()
    (engine,) = fleet.status_value.engines
    fleet.status_value = replace(fleet.status_value, engines=(replace(engine, adapters=("math", "code")),))
    models, *answers, unknown = run(
        fleet,
        *(("GET", "/v1/models", {}), complete(), complete(model="policy"), complete(model="math")),
        ("POST", "/generate", {"json": {"prompt": [5], "model": "code"}}),
        complete(model="maths"),
    )
    rows = [(row["id"], row["parent"]) for row in models.json()["data"]]
    assert rows == [("policy", None), ("code", "policy"), ("math", "policy")]
    found = [(answer.json()["model"], answer.json()["choices"][0]["text"]) for answer in answers[:3]]
    assert found == [("policy", ""), ("policy", ""), ("math", "math")] and answers[3].json()["text"] == ["code"]
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert "this fleet serves 'policy', 'code', 'math'" in unknown.json()["error"]["message"]


def test_unexpected_errors_stay_in_the_log():
    (response,) = run(FakeFleet(lambda _: [ZeroDivisionError("secret")]), complete())
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


def test_an_error_during_a_stream_is_its_last_event():
    script = [[progress("cmpl/0", 0, [5, 6])], EngineLost("gone")]
    (response,) = run(FakeFleet(lambda name: [[progress(name, 0, [5, 6])], *script[1:]]), complete(stream=True))
    first, last = events(response)
    assert response.status_code == 200 and json.loads(first)["choices"][0]["token_ids"] == [5, 6]
    assert json.loads(last)["error"]["code"] == "EngineLost"


def test_a_sample_that_restarts_with_the_same_tokens_continues():
    def script(name):
        told = [progress(name, 0, [5, 6]), progress(name, 0, [5]), progress(name, 1, [6, 7])]
        return [[one] for one in told] + [[completion(name, [5, 6, 7, 8])]]

    (response,) = run(FakeFleet(script), complete(stream=True))
    *chunks, done = events(response)
    assert [json.loads(chunk)["choices"][0]["token_ids"] for chunk in chunks] == [[5, 6], [7], [8]]
    assert done == "[DONE]"


@pytest.mark.parametrize("after", [progress, completion])
def test_a_sample_that_restarts_with_other_tokens_ends_the_stream(after):
    def script(name):
        other = progress(name, 0, [5, 9]) if after is progress else completion(name, [5])
        return [[progress(name, 0, [5, 6])], [other]]

    (response,) = run(FakeFleet(script), complete(stream=True))
    assert json.loads(events(response)[-1])["error"]["code"] == "began_anew"


def test_a_stream_holds_nothing_but_events(monkeypatch):
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.01, raising=False)  # for a server that sends comments

    class Slow(FakeFleet):
        async def generate(self, requests):
            await asyncio.sleep(0.1)
            yield [completion(requests[0].id, [5])]

    (response,) = run(Slow(), complete(stream=True))
    assert all(part.startswith("data: ") for part in response.text.split("\n\n")[:-1]) and len(events(response)) == 2


def test_a_generation_past_its_deadline_fails():
    class Never(FakeFleet):
        async def generate(self, requests):
            await asyncio.Event().wait()
            yield []

    (response,) = run(Never(), complete(), request_seconds=0.1)
    assert response.status_code == 504 and "request_seconds" in response.json()["error"]["message"]


class Held(FakeFleet):
    """Answers once it may, with as many tokens as it is told."""

    def __init__(self, num_tokens=1):
        super().__init__()
        self.num_tokens, self.may_go, self.num_running = num_tokens, asyncio.Event(), 0

    async def generate(self, requests):
        self.num_running += 1
        await self.may_go.wait()
        yield [completion(requests[0].id, [5] * self.num_tokens)]


def test_more_generations_than_permitted_are_answered_with_429():
    async def main():
        fleet = Held()
        async with front(fleet, max_requests=2) as client:

            def generate(**body):
                return client.post("/v1/completions", json={"prompt": [5], **body})

            held = [asyncio.create_task(generate(stream=stream)) for stream in (False, True)]
            while fleet.num_running < 2:
                await asyncio.sleep(0)
            for refused in (await generate(), await generate(stream=True)):
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"] | {"message": ""} == {
                    "message": "", "type": "rate_limit_error", "param": None, "code": "Overloaded",
                }  # fmt: skip
            assert (await client.post("/pause?mode=keep")).status_code == 200, "control calls work meanwhile"
            fleet.may_go.set()
            assert [(await answer).status_code for answer in held] == [200, 200]
            assert (await generate()).status_code == 200

    asyncio.run(main())


def test_bodies_and_results_beyond_the_memory_for_them_are_refused():
    async def main():
        fleet = Held()
        async with front(fleet, max_buffered_bytes=1 << 20) as client:

            def generate(prompt):
                return client.post("/v1/completions", json={"prompt": prompt})

            large = "a" * (900 << 10)
            held = asyncio.create_task(generate(large))
            while not fleet.num_running:
                await asyncio.sleep(0)
            assert (await generate(large)).status_code == 429
            small = asyncio.create_task(generate("a"))
            fleet.may_go.set()
            assert (await held).status_code == (await small).status_code == 200
            assert (await generate(large)).status_code == 200, "what was held was given back"
            fleet.num_tokens = 1 << 20
            assert (await generate("a")).status_code == 413

    asyncio.run(main())


def test_a_checkpoint_whose_file_system_hangs_fails_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_updates, "OPEN_SECONDS", 0.1)
    answers = threading.Event()

    def hanging(directory):
        assert answers.wait(60)
        raise ConfigError("it answers again")

    monkeypatch.setattr(safetensors_dir, "weight_files", hanging)

    async def main():
        async with front(FakeFleet(), weights=str(tmp_path)) as client:

            async def status():
                return (await client.post("/bridge/notify_update", json={})).status_code

            assert (await status(), await status()) == (504, 409)
            assert (await client.get("/ready")).status_code == 200
            answers.set()
            while await status() == 409:
                await asyncio.sleep(0.01)
            assert await status() == 400

    asyncio.run(main())


def test_a_pause_that_fails_on_one_engine_is_undone():
    fleet = FakeFleet(engines="ab", failing={"pause": EngineLost("one is gone")})
    (response,) = run(fleet, ("POST", "/pause", {}))
    assert response.status_code == 503 and fleet.calls == ["pause", "resume a", "resume b"]
    fleet = FakeFleet(engines="ab", failing={"sleep": EngineLost("one is gone")})
    (response,) = run(fleet, ("POST", "/sleep", {}))
    assert response.status_code == 503 and fleet.calls == ["sleep", "wake a", "wake b"]
    fleet = FakeFleet(engines="ab", failing={"pause": EngineLost("one is gone")}, paused="a")
    run(fleet, ("POST", "/pause", {}))
    assert fleet.calls == ["pause", "resume b"], "an engine that was paused before stays paused"
    fleet = FakeFleet(engines="ab", failing={"pause": EngineLost("one is gone"), "resume": EngineLost("one is gone")})
    (response,) = run(fleet, ("POST", "/pause", {}))
    assert response.status_code == 503 and fleet.calls == ["pause", "resume a", "resume b"], "each engine must be tried"


def test_ready_and_health():
    empty = FakeFleet()
    empty.status_value = FleetStatus(-1, 1.0, 0, ())
    alive, ready, models, size = run(
        empty, ("GET", "/health", {}), ("GET", "/ready", {}), ("GET", "/v1/models", {}), ("GET", "/get_world_size", {})
    )
    assert alive.status_code == 200
    assert ready.status_code == models.status_code == size.status_code == 503
    assert models.headers["retry-after"] == "1"
    (ready,) = run(FakeFleet(), ("GET", "/ready", {}))
    assert ready.json() == {"status": "ready", "policy_version": 0, "engines": {"one": "ready"}}


def test_without_a_directory_no_weights_are_loaded():
    (response,) = run(FakeFleet(), ("POST", "/bridge/notify_update", {"json": {}}))
    assert response.status_code == 400 and "weights=DIRECTORY" in response.json()["error"]["message"]


def test_metrics_count_calls_and_tokens():
    fleet = FakeFleet(lambda name: [[completion(name, [5, 6])]])
    *_, response = run(fleet, complete(), complete(n=0), ("GET", "/metrics", {}))
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'slipstream_http_requests_total{method="POST",path="/v1/completions",status="200"} 1.0',
        'slipstream_http_requests_total{method="POST",path="/v1/completions",status="400"} 1.0',
        'slipstream_http_tokens_total{kind="completion"} 2.0',
        'slipstream_engines{state="ready"} 1.0',
        "slipstream_policy_version 0.0",
    ):
        assert line in response.text.splitlines()


def test_impossible_tokens_have_finite_logprobs():
    def script(name):
        found = completion(name, [5, 6])
        return [[type(found)(**{f: getattr(found, f) for f in found.__slots__} | {"logprobs": (float("-inf"), -1.0)})]]

    (response,) = run(FakeFleet(script), complete(logprobs=0))
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -1.0]


# --- in the gateway's process ------------------------------------------------------------------------------------------


def test_generations_do_not_pass_through_a_socket_and_are_refused_at_once():
    class Service:
        async def generate(self, message, caller):
            if len(message.requests) > 1:
                raise Overloaded("no room")
            yield convert.results_to_pb([completion("a", [7])])

    one = Request("a", (5,), SamplingParams())

    async def main():
        fleet = OwnGateway(Service(), "127.0.0.1:1", TOKEN, 5.0, 1 << 20)  # nobody listens there
        try:
            with pytest.raises(Overloaded):
                await anext(fleet.generate([one, one]))
            return [outcomes async for outcomes in fleet.generate([one])]
        finally:
            await fleet.close()

    ((outcome,),) = asyncio.run(main())
    assert outcome.token_ids == (7,)
