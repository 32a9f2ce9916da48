"""The engine for a running `vllm serve`, against a scripted server: its calls, how it reads responses, and what it does when the
server fails, dies or hangs. tests/vllm/test_remote.py runs against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig, RemoteConfig
from slipstream.deploy.fleet import launch
from slipstream.engines.frontend.sequence import EngineRequest, Sample
from slipstream.engines.remote import engine as remote
from slipstream.engines.remote import vllm, vllm_format
from slipstream.engines.remote.engine import RemoteEngine
from slipstream.errors import (
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    EngineFailure,
    EngineLost,
    FleetChanged,
    InvalidSampling,
    NotReady,
    ProtocolMismatch,
    SlipstreamError,
    TransferError,
    Unauthorized,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
    VersionError,
)
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion, EngineSync, Failure, Offer, Request, SamplingParams, VersionSpan
from slipstream.weights.checksum import ScanOptions, pack_manifest
from slipstream.weights.plan import Plan
from slipstream.weights.transports.servers import gather, vllm_nccl
from slipstream.weights.update.publisher import Publisher
from tests.engines.nonsense import anything, refusal
from tests.engines.sockets import SocketLibrary
from tests.engines.vllm_server import VOCABULARY, Script, serving
from tests.tiny import random_params, tiny_config, write_config, write_tokenizer

CONFIG = tiny_config("llama")
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_config(tmp_path_factory.mktemp("model"), CONFIG))


@pytest.fixture
def script() -> Iterator[Script]:
    with serving(Script()) as script:
        yield script


@pytest.fixture
def library() -> Iterator[SocketLibrary]:
    before, library = vllm_nccl.library, SocketLibrary()
    vllm_nccl.library = library
    yield library
    library.close()
    vllm_nccl.library = before


@contextlib.asynccontextmanager
async def started(
    directory: Path, script: Script, timeout: float = 20.0, **options: Any
) -> AsyncIterator[RemoteEngine]:
    config = RemoteConfig(url=script.url, **options)
    engine = await RemoteEngine.start(directory, options=config, timeout=timeout)
    try:
        yield engine
    finally:
        await engine.close()


def with_engine(directory: Path, script: Script, scenario: Callable[[RemoteEngine], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with started(directory, script, **options) as engine:
            return await scenario(engine)

    return asyncio.run(run())


async def collected(engine: RemoteEngine, *requests: Request) -> list[Completion | Failure]:
    return [outcome async for batch in engine.generate(requests) for outcome in batch]


def request(name: str = "r", prompt: Any = PROMPT, **sampling: Any) -> Request:
    return Request(name, prompt, SamplingParams(**({"max_tokens": 4, "seed": 1, "ignore_eos": True} | sampling)))


def drawn(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCABULARY)
    return tuple(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# --- URL, API key, server settings ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "url is required"),
        ({"url": "host:8000"}, "url must look like https://host:8000"),
        ({"url": "ftp://host"}, "url must look like https://host:8000"),
        ({"url": "https://"}, "url must look like https://host:8000"),
        ({"url": "http://[::1"}, "url must look like https://host:8000"),
        ({"url": "http://localhost:port"}, "url must look like https://host:8000"),
        ({"url": "https://host?key=1"}, "url must look like https://host:8000"),
        ({"url": "http://10.0.0.7:8000"}, "http is allowed on loopback only"),
        ({"url": "http://localhost.evil.example"}, "http is allowed on loopback only"),
        ({"url": "https://me:secret@host"}, "a user name or a password"),
        (
            {"url": "https://host", "tensor_parallel_size": 2},
            "tensor_parallel_size is a setting of EmbeddedConfig and VllmConfig",
        ),
        ({"url": "https://host", "dtype": "bfloat16"}, "dtype is a setting of EmbeddedConfig and VllmConfig"),
    ],
)
def test_an_invalid_url_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        RemoteConfig(**options)
    assert "secret" not in str(error.value)


def test_valid_urls() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost", "http://[::1]:8000", "https://host:8000/prefix"):
        assert RemoteConfig(url=url).url == url
    with pytest.raises(ConfigError, match="url is a setting of RemoteConfig; EmbeddedConfig does not have it"):
        EmbeddedConfig(url="https://host")


def test_one_server_is_one_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one engine"):
        launch(tmp_path, engines=2, engine=RemoteConfig(url="http://localhost:1"))


@pytest.mark.parametrize(
    ("over", "error", "text"),
    [
        ({"version": "0.29.1"}, ConfigError, r"version 0\.29\.1; Slipstream needs 0\.30"),
        ({"version": "dev"}, ProtocolMismatch, "a version like"),
        ({"fail": {"/server_info": (404, {"detail": "Not Found"})}}, ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        ({"weight_transfer": None}, ConfigError, "--weight-transfer-config"),
        ({"weight_transfer": {"backend": "ipc"}}, ConfigError, "--weight-transfer-config"),
        ({"logprobs_mode": "raw_logits"}, ConfigError, "--logprobs-mode processed_logprobs"),
        ({"quantization": "fp8"}, ConfigError, "quantizes its weights"),
        ({"dtype": "torch.int8"}, ConfigError, "holds int8"),
        ({"max_model_len": 4096}, ConfigError, "does it serve another model"),
        ({"key": "sesame"}, Unauthorized, "SLIPSTREAM_VLLM_TOKEN"),
        ({"fail": {"/server_info": (200, "<html>")}}, ProtocolMismatch, "expected JSON"),
        ({"fail": {"/server_info": (200, [])}}, ProtocolMismatch, "logprobs_mode|weight-transfer"),
        ({"fail": {"/v1/models": (200, {"data": []})}}, ProtocolMismatch, "str at data.0.id"),
        ({"fail": {"/is_paused": (200, {"is_paused": "no"})}}, ProtocolMismatch, "true or false"),
        (
            {"fail": {"/weight_info": (500, {"error": {"message": "boom"}})}},
            EngineFailure,
            "/weight_info with 500.*boom",
        ),
        ({"fail": {"/version": (302, "")}}, EngineFailure, "302 instead of 200"),
    ],
)
def test_an_unusable_server_is_refused_at_the_start(
    directory: Path, over: dict[str, Any], error: type[SlipstreamError], text: str
) -> None:
    with serving(Script(**over)) as script, pytest.raises((error, ConfigError), match=text) as found:
        with_engine(directory, script, lambda engine: None)
    assert script.url in str(found.value)
    assert script.calls == []  # nothing was changed


def test_a_server_that_cannot_be_reached_or_hangs_is_named(directory: Path, script: Script) -> None:
    script.hang.add("/is_paused")
    with pytest.raises(DeadlineExceeded, match=r"did not answer GET /is_paused within 0\.2 s") as late:
        with_engine(directory, script, lambda engine: None, timeout=0.2)
    assert script.url in str(late.value)
    script.stop()
    with pytest.raises(EngineLost, match="cannot be reached for GET /version") as lost:
        with_engine(directory, script, lambda engine: None)
    assert script.url in str(lost.value)


def test_the_key_comes_from_a_file_or_the_environment(
    directory: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        return await collected(engine, request())

    script.key = "sesame"
    file = tmp_path / "key"
    file.write_text("sesame\n")
    assert isinstance(with_engine(directory, script, scenario, token_file=str(file))[0], Completion)
    monkeypatch.setenv("SLIPSTREAM_VLLM_TOKEN", "sesame")
    assert isinstance(with_engine(directory, script, scenario)[0], Completion)
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            with_engine(directory, script, scenario, token_file=str(bad))
    file.write_text("")
    with pytest.raises(ConfigError, match="one line"):
        with_engine(directory, script, scenario, token_file=str(file))


def test_tls_trusts_only_the_configured_certificate(directory: Path, tmp_path: Path) -> None:
    own, other = (_certificate(tmp_path, name) for name in ("own", "other"))

    async def scenario(engine: RemoteEngine) -> Any:
        return await collected(engine, request())

    with serving(Script(), ssl_certfile=own[0], ssl_keyfile=own[1]) as script:
        assert isinstance(with_engine(directory, script, scenario, certificate=own[0])[0], Completion)
        for wrong in ({"certificate": other[0]}, {}):
            with pytest.raises(EngineLost, match="CERTIFICATE_VERIFY_FAILED"):
                with_engine(directory, script, scenario, **wrong)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            with_engine(directory, script, scenario, certificate=str(directory / "none"))


def _certificate(directory: Path, name: str) -> tuple[str, str]:
    certificate, key = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=server"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("over", [{"paused": True}, {"label": "someone's"}, {"load_format": "dummy"}])
def test_weights_of_unknown_origin_are_not_served(directory: Path, over: dict[str, Any]) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        assert engine.describe().version == -1
        (failure,) = await collected(engine, request())
        assert isinstance(failure, Failure) and isinstance(failure.error, NotReady)

    with serving(Script(**over)) as script:
        with_engine(directory, script, scenario)


# --- generating ---


def test_completions_hold_the_servers_tokens_and_logprobs(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        assert engine.describe().version == 0
        return await collected(engine, request("a", n=3, top_logprobs=2), request("b", "abc", temperature=0))

    outcomes = with_engine(directory, script, scenario)
    assert sorted((o.request_id, o.sample_index) for o in outcomes) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    for one in outcomes:
        assert one.token_ids == drawn(one.prompt_token_ids, 4)
        assert one.logprobs == one.raw_logprobs == (-0.5,) * 4
        assert one.spans == (VersionSpan(0, 0, 4),) and one.finish_reason == "length"
    assert outcomes[0].top_logprobs == () or all(len(top.token_ids) == 2 for top in outcomes[0].top_logprobs)
    assert len({body["seed"] for body in script.bodies}) == 3  # both requests name the same seed
    assert all("priority" not in body for body in script.bodies)  # which this server would refuse


def test_a_modified_distribution_is_scored_again_for_raw_logprobs(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        return await collected(
            engine, request("warm", temperature=0.7, top_logprobs=2), request("cold", temperature=0, min_tokens=2)
        )

    found = {one.request_id: one for one in with_engine(directory, script, scenario)}
    assert found["warm"].logprobs == (-0.5,) * 4 and found["warm"].raw_logprobs == (-0.25,) * 4
    assert [top.logprobs for top in found["warm"].top_logprobs] == [(-0.1, -0.2)] * 4
    assert found["cold"].logprobs == found["cold"].raw_logprobs == (-0.25,) * 4


def test_requests_whose_logprobs_are_unknown_are_refused(directory: Path, script: Script) -> None:
    script.logprobs_mode = "raw_logprobs"

    async def scenario(engine: RemoteEngine) -> Any:
        return await collected(
            engine, request("plain"), request("greedy", temperature=0, min_tokens=1), request("warm", top_k=5)
        )

    found = {one.request_id: one for one in with_engine(directory, script, scenario)}
    assert isinstance(found["plain"], Completion) and isinstance(found["greedy"], Completion)
    assert isinstance(found["warm"], Failure) and isinstance(found["warm"].error, Unsupported)
    assert "--logprobs-mode processed_logprobs" in str(found["warm"].error)


def test_stop_tokens_and_stop_strings_end_a_completion(directory: Path, script: Script) -> None:
    free = drawn(PROMPT, 12)

    async def scenario(engine: RemoteEngine) -> Any:
        token = await collected(engine, request(stop_token_ids=(free[2],), max_tokens=12))
        text = await collected(engine, request(prompt="abc", stop=("zzz", "a"), max_tokens=60))
        return token[0], text[0]

    token, text = with_engine(directory, script, scenario)
    assert token.token_ids == free[:3] and token.finish_reason == "stop"
    assert "a" not in text.text and (text.finish_reason == "stop") == (4 in text.token_ids)


def choice(**over: Any) -> dict[str, Any]:
    columns = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:9": -0.5}]}
    return {"choices": [{"token_ids": [9], "logprobs": columns, "finish_reason": None} | over]}


@pytest.mark.parametrize(
    ("event", "error", "text"),
    [
        ({"error": {"message": "out of memory"}}, EngineFailure, "out of memory"),
        (choice(finish_reason="abort"), EngineFailure, "aborted"),
        (choice(finish_reason="stop"), EngineFailure, "stopped at token 9"),
        (choice(finish_reason="length"), EngineFailure, "after 1 of 4 tokens"),
        (choice(token_ids=[9, 9]), ProtocolMismatch, "as many logprobs"),
        (choice(token_ids=["9"]), ProtocolMismatch, "token ids"),
        (choice(token_ids=None), ProtocolMismatch, "token ids"),
        (choice(logprobs={"token_logprobs": [-9999.0], "top_logprobs": [{}]}), ProtocolMismatch, "logprobs"),
        (choice(logprobs={"token_logprobs": [None], "top_logprobs": [{}]}), ProtocolMismatch, "logprobs"),
        ({"choices": []}, ProtocolMismatch, "an event"),
        ([], ProtocolMismatch, "an event"),
    ],
)
def test_a_malformed_response_fails_its_request(
    directory: Path, script: Script, event: Any, error: type[SlipstreamError], text: str
) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        script.event = event
        (bad,) = await collected(engine, request())
        script.event = None
        (good,) = await collected(engine, request())
        return bad, good

    bad, good = with_engine(directory, script, scenario)
    assert isinstance(bad, Failure) and isinstance(bad.error, error) and text in str(bad.error)
    assert isinstance(good, Completion)


ANYTHING = anything("choices", "token_ids", "logprobs", "token_logprobs", "top_logprobs", "prompt_logprobs", "6", "7")


@given(ANYTHING, st.sampled_from(("event", "choice", "columns", "tops")))
def test_any_event_is_read_or_refused(found: Any, where: str) -> None:
    event = {
        "event": found,
        "choice": {"choices": [found]},
        "columns": choice(logprobs=found),
        "tops": choice(logprobs={"token_logprobs": [-0.5], "top_logprobs": [found]}),
    }[where]
    sample = Sample(EngineRequest("r", PROMPT, SamplingParams(), 1, 4, (), None), 0)  # type: ignore[arg-type]
    with contextlib.suppress(SlipstreamError):
        vllm_format.take_event(sample, event, 0, 1, refusal)
        assert all(isinstance(value, float) and value <= 1e-3 for value in sample.logprobs)


@given(ANYTHING)
def test_any_score_is_read_or_refused(found: Any) -> None:
    for answer in (
        found,
        {"choices": [{"prompt_logprobs": found}]},
        {"choices": [{"prompt_logprobs": [None, found, found]}]},
    ):
        with contextlib.suppress(SlipstreamError):
            score = vllm_format.take_score(answer, PROMPT, 1, refusal)
            assert len(score.logprobs) == 2


def test_a_rejected_request_fails_alone_with_the_servers_message(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        script.fail["/v1/completions"] = (400, {"error": {"message": "presence_penalty must be in [-2, 2]"}})
        (bad,) = await collected(engine, request(presence_penalty=5.0))
        script.fail["/v1/completions"] = (400, {"error": {"message": "no prompt logprobs here"}})
        with pytest.raises(InvalidSampling, match="no prompt logprobs"):
            await engine.score([PROMPT])
        return bad

    bad = with_engine(directory, script, scenario)
    assert isinstance(bad.error, InvalidSampling) and "must be in [-2, 2]" in str(bad.error)


def test_scores(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        return await engine.score([PROMPT, (9, 8)], top_k=1)

    first, second = with_engine(directory, script, scenario)
    assert first.logprobs == (-0.25, -0.25) and first.top_logprobs[0].token_ids == (0,)
    assert second.token_ids == (9, 8) and second.version == 0


def test_leaving_a_generation_closes_the_connections(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.hold_after = 2
        batches = engine.generate([request(n=3)])
        waiting = asyncio.create_task(anext(batches))
        await until(lambda: script.open == 3)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await batches.aclose()
        await until(lambda: script.open == 0)
        assert waiting.cancelled() and not engine.ended.is_set()

    with_engine(directory, script, scenario)
    assert script.open == 0


def test_max_num_seqs_limits_open_requests(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        script.hold_after = 1
        waiting = asyncio.create_task(collected(engine, request(n=7)))
        await until(lambda: script.open == 2)
        await asyncio.sleep(0.05)
        assert script.open == 2
        script.hold_after = 10**6
        return await waiting

    assert len(with_engine(directory, script, scenario, max_num_seqs=2)) == 7


def test_a_server_that_dies_during_generation_ends_the_engine(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.hold_after = 2
        waiting = asyncio.create_task(collected(engine, request("a", n=2), request("b")))
        await until(lambda: script.open == 3)
        await asyncio.to_thread(script.stop)
        outcomes = await waiting
        assert {o.request_id for o in outcomes} == {"a", "b"}
        assert all(isinstance(o, Failure) and isinstance(o.error, EngineLost) for o in outcomes)
        assert engine.ended.is_set() and script.url in str(outcomes[0].error)  # type: ignore[union-attr]
        with pytest.raises(EngineLost):
            await engine.score([PROMPT])

    with_engine(directory, script, scenario)


def test_health_checks_notice_a_dead_server(directory: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HEALTH_SECONDS", 0.02)

    async def scenario(engine: RemoteEngine) -> None:
        await asyncio.to_thread(script.stop)
        await asyncio.wait_for(engine.ended.wait(), 30)
        with pytest.raises(EngineLost, match=r"is closed, or the vLLM server at .* is gone"):
            await engine.score([PROMPT])

    with_engine(directory, script, scenario)


def test_a_restarted_server_is_noticed_before_its_completions_count(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        script.label = "default"
        return await collected(engine, request())

    (failure,) = with_engine(directory, script, scenario)
    assert isinstance(failure.error, EngineLost) and "'default'" in str(failure.error)


# --- updates ---


def params_of(seed: int) -> Any:
    return random_params(CONFIG, seed)


async def publish(engine: RemoteEngine, publisher: Publisher, seed: int, version: int, in_flight: Any = "keep") -> Any:
    return await publisher.publish(params_of(seed), (engine.describe(),), version, in_flight)


@contextlib.contextmanager
def publishing(engine: RemoteEngine) -> Iterator[Publisher]:
    publisher = Publisher(LocalFleet(engine))
    try:
        yield publisher
    finally:
        publisher.close()


def test_an_update_makes_vllms_calls_in_order_and_every_byte_arrives(
    directory: Path, script: Script, library: SocketLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_nccl, "BUFFER_BYTES", 20_000)

    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine) as publisher:
            script.calls.clear()
            report = await publish(engine, publisher, 1, 1)
            assert script.calls == ["init", "pause", "start", "update", "finish", "reset", "resume"]
            assert script.init["world_size"] == 2 and script.init["rank_offset"] == 1 and script.init["packed"] is True
            for name, leaf in hf_weights.flatten(params_of(1)).items():
                np.testing.assert_array_equal(script.tensors[name], np.asarray(leaf))
            assert engine.describe().version == report.version == 1
            assert report.num_bytes == sum(tensor.nbytes for tensor in script.tensors.values())
            assert len(library.joined[0].broadcasts) > 2
            script.calls.clear()
            await publish(engine, publisher, 2, 2)
            assert script.calls == ["pause", "start", "update", "finish", "reset", "resume"]  # connected once
            (found,) = await collected(engine, request())
            assert found.spans == (VersionSpan(2, 0, 4),)  # type: ignore[union-attr]
            assert (await engine.commit(2)).pause_seconds == 0  # already serving
        assert library.joined[0].closed and not library.joined[0].aborted

    with_engine(directory, script, scenario)


def test_unchanged_tensors_are_skipped_only_if_none_changed(
    directory: Path, script: Script, library: SocketLibrary
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine) as publisher:
            params = params_of(1)
            info = engine.describe()
            await publisher.publish(params, (info,), 1)
            script.calls.clear()
            assert (await publisher.publish(params, (info,), 2)).num_bytes == 0
            assert script.calls == ["pause", "label", "resume"] and engine.describe().version == 2
            named = hf_weights.flatten(params)
            named["model.norm.weight"] = named["model.norm.weight"] * 2
            script.tensors.clear()
            await publisher.publish(hf_weights.unflatten(named), (info,), 3)
            assert script.tensors.keys() == named.keys()
            with pytest.raises(Unsupported, match="all tensors or none"):
                part = {"model.norm.weight": named["model.norm.weight"] * 2}
                await publisher.publish(part, (info,), 4, partial=True)
            assert engine.describe().version == 3

    with_engine(directory, script, scenario)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "requeue", "finish"])
def test_spans_of_running_requests_name_the_version_of_each_token(
    directory: Path, script: Script, library: SocketLibrary, in_flight: Any
) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        with publishing(engine) as publisher:
            script.hold_after = 3
            running = asyncio.create_task(
                collected(engine, request("plain", max_tokens=9), request("warm", max_tokens=9, top_k=4))
            )
            await until(lambda: [len(attempt.sample.tokens) for attempt in engine._samples.running] == [3, 3])
            update = asyncio.create_task(publish(engine, publisher, 1, 1, in_flight))
            if in_flight == "finish":
                await asyncio.sleep(0.05)
                assert "pause" not in script.calls and not update.done()
            else:
                await until(lambda: script.paused)
            script.hold_after = 10**6
            await update
            return {o.request_id: o for o in await running}

    found = with_engine(directory, script, scenario)
    plain, warm = found["plain"], found["warm"]
    assert plain.token_ids == warm.token_ids == drawn(PROMPT, 9)
    if in_flight == "finish":
        assert plain.spans == warm.spans == (VersionSpan(0, 0, 9),)
    elif in_flight == "requeue":
        assert plain.spans == warm.spans == (VersionSpan(1, 0, 9),)
    else:
        assert plain.spans == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 9))
        assert warm.spans == (VersionSpan(1, 0, 9),)  # its raw logprobs would be unknown for two versions
        (again,) = [b for b in script.bodies if len(b["prompt"]) == 6 and b.get("stream")]
        assert again["max_tokens"] == 6 and again["cache_salt"] != script.bodies[0]["cache_salt"]


def test_requests_during_an_update_wait_for_it(directory: Path, script: Script, library: SocketLibrary) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        with publishing(engine) as publisher:
            script.hang.add("/finish_weight_update")
            update = asyncio.create_task(publish(engine, publisher, 1, 1))
            await until(lambda: "finish" in script.calls)
            late = asyncio.create_task(collected(engine, request()))
            await asyncio.sleep(0.05)
            assert not late.done() and script.bodies == []
            script.hang.clear()
            await update
            return (await late)[0]

    assert with_engine(directory, script, scenario).spans == (VersionSpan(1, 0, 4),)


@pytest.mark.parametrize(
    "step", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
)
def test_a_failed_update_leaves_no_weights_until_the_next_sync(
    directory: Path, script: Script, library: SocketLibrary, step: str
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.hold_after = 1
        running = asyncio.create_task(collected(engine, request(max_tokens=9)))
        await until(lambda: script.open == 1)
        script.fail[step] = (500, {"error": {"message": "worker failed"}})
        if step == "/start_weight_update":  # retried after ending an unfinished update
            script.fail["/finish_weight_update"] = (500, {"error": {"message": "nothing to finish"}})
        with publishing(engine) as publisher:
            with pytest.raises(EngineFailure, match=f"POST {step}.*with 500.*worker failed") as error:
                await publish(engine, publisher, 1, 1)
            assert script.url in str(error.value)
            assert engine.describe().version == -1 and script.paused  # a mix of two versions is never served
            (failure,) = await running
            assert isinstance(failure, Failure) and isinstance(failure.error, NotReady)
            (refused,) = await collected(engine, request())
            assert isinstance(refused, Failure) and "every tensor" in str(refused.error)
            await engine.rollback(1)
            assert engine.describe().version == -1  # there is no way back
            script.hold_after = 10**6
            script.calls.clear()
            await publish(engine, publisher, 1, 1)
            assert script.calls == ["init", "start", "update", "finish", "reset", "resume"]
            (found,) = await collected(engine, request())
            assert isinstance(found, Completion) and found.version == 1
        assert not engine.ended.is_set()

    with_engine(directory, script, scenario)


def test_an_unfinished_update_is_ended_first(directory: Path, script: Script, library: SocketLibrary) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        assert engine.describe().version == -1
        script.calls.clear()
        script.fail["/start_weight_update"] = (500, {"error": {"message": "already active"}})
        with publishing(engine) as publisher:
            await publish(engine, publisher, 1, 1)
        assert script.calls == ["init", "start", "finish", "start", "update", "finish", "reset", "resume"]
        assert engine.describe().version == 1 and not script.paused

    script.paused = True
    with_engine(directory, script, scenario)


def test_a_trainer_that_disconnects_fails_the_update(
    directory: Path, script: Script, library: SocketLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_nccl, "BUFFER_BYTES", 20_000)

    async def scenario(engine: RemoteEngine) -> None:
        library.fail_at = 1
        with publishing(engine) as publisher:
            with pytest.raises(EngineFailure, match=r"POST /update_weights with 500.*hung up"):
                await publish(engine, publisher, 1, 1)
            assert library.joined[0].aborted and engine.describe().version == -1
            library.fail_at = None
            await publish(engine, publisher, 1, 1)
            assert engine.describe().version == 1 and len(library.joined) == 2

    with_engine(directory, script, scenario)


def test_a_server_that_hangs_in_an_update_ends_the_engine(
    directory: Path, script: Script, library: SocketLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "UPDATE_SECONDS", 0.2)

    async def scenario(engine: RemoteEngine) -> None:
        script.hang.add("/update_weights")
        with (
            publishing(engine) as publisher,
            pytest.raises(DeadlineExceeded, match=r"POST /update_weights within 0\.2 s"),
        ):
            await publish(engine, publisher, 1, 1)
        assert engine.ended.is_set()
        (failure,) = await collected(engine, request())
        assert isinstance(failure, Failure) and isinstance(failure.error, EngineLost)

    with_engine(directory, script, scenario)


def test_a_server_that_dies_in_an_update_ends_the_engine(
    directory: Path, script: Script, library: SocketLibrary
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.hang.add("/update_weights")
        with publishing(engine) as publisher:
            update = asyncio.create_task(publish(engine, publisher, 1, 1))
            await until(lambda: "update" in script.calls)
            await asyncio.to_thread(script.stop)
            with pytest.raises(EngineLost, match="POST /update_weights"):
                await update
        assert engine.ended.is_set()

    with_engine(directory, script, scenario)


def test_a_server_that_cannot_be_joined_or_paused_keeps_its_weights(
    directory: Path, script: Script, library: SocketLibrary
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine) as publisher:
            script.fail["/init_weight_transfer_engine"] = (500, {"error": {"message": "no such backend"}})
            with pytest.raises(EngineFailure, match="no such backend"):
                await publish(engine, publisher, 1, 1)
            script.fail["/pause"] = (500, {"error": "Failed to pause generation"})
            with pytest.raises(EngineFailure, match="Failed to pause"):
                await publish(engine, publisher, 1, 1)
            (found,) = await collected(engine, request())
            assert isinstance(found, Completion) and found.version == 0
            await publish(engine, publisher, 1, 1)
            assert engine.describe().version == 1

    with_engine(directory, script, scenario)


def test_a_rollback_before_the_commit_changes_nothing(directory: Path, script: Script, library: SocketLibrary) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.calls.clear()
        destinations = await engine.begin(1, offer_of(engine))
        with pytest.raises(UpdateInProgress):
            await engine.begin(2, offer_of(engine))
        with pytest.raises(UpdateInProgress):
            await engine.sleep()
        assert destinations.slots == bytes(len(engine.describe().parameters)) and not any(destinations.links[0][1:])
        with pytest.raises(UnknownVersion):
            await engine.commit(1)  # not staged yet
        await engine.rollback(1)
        await engine.rollback(1)
        await engine.rollback(999)
        with pytest.raises(UnknownVersion):
            await engine.stage(1, [[pack_manifest(1, {})]])
        assert set(script.calls) <= {"init"} and engine.describe().version == 0
        (found,) = await collected(engine, request())
        assert isinstance(found, Completion) and found.version == 0

    with_engine(directory, script, scenario)


def plan_of(engine: RemoteEngine) -> Plan:
    from slipstream.weights.plan import make_plan
    from slipstream.weights.sources import named_tensors

    info = engine.describe()
    return make_plan(
        named_tensors.describe(named_tensors.named_tensors(params_of(0))), info.tensors, info.parameters, info.dtype
    )


def offer_of(engine: RemoteEngine, plan: Plan | None = None, transport: str = "") -> Offer:
    plan = plan or plan_of(engine)
    return Offer(plan.to_bytes(), plan.fingerprint, transport or vllm_nccl.offered_transport())


def test_invalid_offers_are_refused_before_any_transfer(
    directory: Path, script: Script, library: SocketLibrary
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.calls.clear()
        plan = plan_of(engine)
        spread = Plan(plan.dtype, tuple(move.__class__(*_fields(move, sender=1)) for move in plan.moves))
        turned = Plan(plan.dtype, tuple(reversed(plan.moves)))
        for offer, error, text in (
            (offer_of(engine, transport="shm"), TransferError, "vllm-nccl"),
            (offer_of(engine, transport="vllm-nccl"), TransferError, "unique id"),
            (offer_of(engine, transport="vllm-nccl:AAAA"), TransferError, "unique id"),
            (offer_of(engine, spread), Unsupported, "one process"),
            (offer_of(engine, turned), SlipstreamError, "in a different order"),
            (Offer(b"", "unknown", vllm_nccl.offered_transport()), SlipstreamError, "does not have plan"),
            (
                Offer(plan.to_bytes(), plan.fingerprint, vllm_nccl.offered_transport(), fresh=False),
                SlipstreamError,
                "a fresh offer",
            ),
        ):
            with pytest.raises(error, match=text):
                await engine.begin(1, offer)
        with pytest.raises(VersionError):
            await engine.begin(0, offer_of(engine))
        assert script.calls == []

    with_engine(directory, script, scenario)


def _fields(move: Any, **over: Any) -> tuple[Any, ...]:
    return tuple(
        over.get(name, getattr(move, name))
        for name in ("tensor", "tensor_box", "sender", "parameter", "local_box", "receiver")
    )


def test_manifests_must_announce_everything_or_nothing(directory: Path, script: Script, library: SocketLibrary) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        await engine.begin(1, offer_of(engine))
        for manifests in ([], [[pack_manifest(1, {0: 0})]], [[pack_manifest(2, {})]], [[b"junk"]]):
            with pytest.raises(ChecksumMismatch):
                await engine.stage(1, manifests)

    async def empty(engine: RemoteEngine) -> None:
        await engine.begin(1, offer_of(engine))
        engine._updates._connecting = None
        with pytest.raises(FleetChanged, match="needs every tensor"):
            await engine.stage(1, [[pack_manifest(1, {})]])

    with_engine(directory, script, scenario)
    script.label = "someone's"
    with_engine(directory, script, empty)


def test_different_nccl_versions_are_reported_before_they_hang(
    directory: Path, script: Script, library: SocketLibrary
) -> None:
    script.packages, library.own_version = "numpy==2.3\nnvidia-nccl-cu12==2.29.7\ntorch==2.13.0", "2.28.9"

    async def scenario(engine: RemoteEngine) -> None:
        with (
            publishing(engine) as publisher,
            pytest.raises(TransferError, match=r"NCCL 2\.28\.9 here, NCCL 2\.29\.7 at the vLLM server"),
        ):
            await publish(engine, publisher, 1, 1)
        assert engine.describe().version == 0

    with_engine(directory, script, scenario)


# --- control ---


def test_pause_and_resume(directory: Path, script: Script, library: SocketLibrary) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        script.calls.clear()
        await engine.pause()
        await engine.pause()
        waiting = asyncio.create_task(collected(engine, request()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(Unsupported, match="never finish"):
            await engine.begin(1, offer_of(engine))
            engine._updates._staged, engine._updates._connecting = [], None
            await engine.commit(1, "finish")
        await engine.rollback(1)
        with publishing(engine) as publisher:
            await publish(engine, publisher, 1, 1)
        assert script.paused and not waiting.done()  # an update does not resume a paused engine
        await engine.resume()
        await engine.resume()
        (found,) = await waiting
        assert found.version == 1  # type: ignore[union-attr]
        assert script.calls.count("pause") == script.calls.count("resume") == 1

    with_engine(directory, script, scenario)


def test_sleep_and_wake(directory: Path, script: Script, library: SocketLibrary) -> None:
    script.can_sleep = True

    async def scenario(engine: RemoteEngine) -> None:
        script.calls.clear()
        awake = await engine.memory()
        assert awake.weights > 0 and awake.kv_cache == 4096 and awake.asleep == ()
        assert (await engine.sleep(1)).asleep == ("kv_cache", "weights")
        assert (await engine.wake(["kv_cache"])).asleep == ("weights",)
        assert (await engine.wake()).asleep == ()
        assert script.calls == ["sleep", "wake", "wake"]
        await engine.sleep(2)
        assert (await engine.memory()).weights == 0
        with pytest.raises(NotReady, match="dropped its weights"):
            await engine.wake(["weights"])
        script.calls.clear()
        with publishing(engine) as publisher:
            await publish(engine, publisher, 1, 1)
        # Woken for the update and paused again: a server that is fully awake resumes.
        assert script.calls == ["init", "wake", "pause", "start", "update", "finish", "reset"]
        assert (await engine.wake()).asleep == ()
        (found,) = await collected(engine, request())
        assert isinstance(found, Completion)
        with pytest.raises(Unsupported, match="cannot read its weights back"):
            await engine.checksums()
        with pytest.raises(Unsupported):
            await engine.sleep(3)
        with pytest.raises(Unsupported):
            await engine.wake(["lungs"])  # type: ignore[list-item]

    with_engine(directory, script, scenario)


def test_closing_resumes_a_paused_server(directory: Path, script: Script) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        await engine.pause()

    with_engine(directory, script, scenario)
    assert not script.paused


# --- as a process behind a gateway ---


def test_a_bridge_works_through_an_engine_process_that_ends_with_the_server(
    directory: Path, script: Script, library: SocketLibrary, tmp_path: Path
) -> None:
    options = RemoteConfig(url=script.url)
    with launch(directory, engine=options, run_dir=tmp_path / "run") as bridge:
        (engine,) = bridge.status().engines
        assert (engine.state, engine.info.kind, engine.info.version) == ("ready", "remote", 0)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        (found,) = bridge.generate([PROMPT], sampling)
        assert found.token_ids == drawn(PROMPT, 4) and found.version == 0
        for version in (1, 2):
            report = bridge.sync(params_of(version))
            assert report.version == version and report.engines[0].transport == "vllm-nccl"
            np.testing.assert_array_equal(
                script.tensors["model.norm.weight"], hf_weights.flatten(params_of(version))["model.norm.weight"]
            )
            (found,) = bridge.generate([PROMPT], sampling)
            assert found.version == version
        script.fail["/update_weights"] = (500, {"error": {"message": "worker failed"}})
        with pytest.raises(EngineFailure, match="worker failed"):
            bridge.sync(params_of(3))
        with pytest.raises(NotReady, match="every tensor"):
            bridge.generate([PROMPT], sampling)
        assert bridge.sync(params_of(3)).version == 3
        (score,) = bridge.score([PROMPT])
        assert score.version == 3
        script.stop()
        with pytest.raises((EngineLost, NotReady)):
            bridge.generate([PROMPT], sampling)
        deadline = time.monotonic() + 60
        while bridge.status().engines[0].state != "lost":
            assert time.monotonic() < deadline


# --- the trainer's side ---


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, []),
        ([10], 10, [[0]]),
        ([10, 1, 5], 10, [[0, 1], [2]]),
        ([11, 11, 1], 10, [[0], [1], [2]]),
        ([4, 4, 4, 4], 8, [[0, 1, 2], [3]]),
    ],
)
def test_a_group_ends_with_the_tensor_that_exceeds_the_limit(
    sizes: list[int], limit: int, expected: list[list[int]]
) -> None:
    assert list(gather.group_by_bytes(sizes, limit)) == expected


@given(st.binary(max_size=200) | st.just(b'{"transport": "vllm-nccl", "server": "s", "world_size": 1}'))
def test_a_malformed_link_is_refused(link: bytes) -> None:
    with pytest.raises(TransferError):
        vllm_nccl.VllmNcclSender(link, None, {}, ScanOptions())  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_a_malformed_transport_name_is_refused(text: str) -> None:
    with pytest.raises(TransferError):
        vllm_nccl.parse_offered(f"vllm-nccl:{text}")


def test_bytes_per_second_includes_a_commit_that_moves_bytes() -> None:
    from slipstream.types import CommitReport, StageReport, SyncReport

    def report(transport: str) -> SyncReport:
        engine = EngineSync("e", transport, StageReport(100, 0.0), CommitReport(1.0, 0.0))
        return SyncReport(1, 100, 0.0, 1.0, 1.0, 2.0, 4.0, (engine,))

    assert report("shm").bytes_per_second == 50 and report("vllm-nccl").bytes_per_second == 25


def test_a_trainer_without_nccl_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(TransferError, match=r"slipstream-rl\[nccl\]"):
        vllm_nccl.offered_transport()
