"""The engine for an SGLang server, against the stand-in: what it refuses, the order of its calls, and what it does when the server
fails, hangs or dies. test_remote.py tests what it shares with the engine for vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig, RemoteConfig, SyncOptions
from slipstream.deploy.fleet import launch
from slipstream.engines.frontend.sequence import EngineRequest, Sample
from slipstream.engines.remote import sglang, sglang_format
from slipstream.engines.remote.engine import RemoteEngine
from slipstream.errors import (
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
    Unsupported,
)
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion, Failure, Request, SamplingParams, VersionSpan
from slipstream.weights.checksum import ScanOptions, pack_manifest
from slipstream.weights.transports.contract import random_name
from slipstream.weights.transports.servers import checkpoint_dir as on_disk
from slipstream.weights.transports.servers import gather, sglang_gloo
from slipstream.weights.update.publisher import Publisher
from slipstream.weights.update.transport_choice import choose
from tests.conformance.engines import Subject, greedy_reference, update_of
from tests.engines.nonsense import anything, refusal
from tests.engines.sglang_stand_in import StandIn, standing_in
from tests.tiny import random_params, tiny_config

pytest.importorskip("torch")

CONFIG = tiny_config("llama", num_layers=1)
PROMPT = (15, 6, 7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    hf_weights.save(made, params_of(0), CONFIG)
    return made


@pytest.fixture(scope="module")
def stand_in(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with standing_in(directory, tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def server(stand_in: StandIn) -> StandIn:
    return stand_in.fresh()


@contextlib.asynccontextmanager
async def started(server: StandIn, timeout: float = 30.0, **options: Any) -> AsyncIterator[RemoteEngine]:
    config = RemoteConfig(url=server.url, dialect="sglang", **options)
    engine = await RemoteEngine.start(server.model, options=config, timeout=timeout)
    try:
        yield engine
    finally:
        await engine.close()


def with_engine(server: StandIn, scenario: Callable[[RemoteEngine], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with started(server, **options) as engine:
            return await scenario(engine)

    return asyncio.run(run())


async def nothing(engine: RemoteEngine) -> None: ...


async def collected(engine: RemoteEngine, *requests: Request) -> list[Completion | Failure]:
    return [outcome async for batch in engine.generate(requests) for outcome in batch]  # type: ignore[misc]


def request(name: str = "r", prompt: Any = PROMPT, **sampling: Any) -> Request:
    return Request(name, prompt, SamplingParams(**({"max_tokens": 4, "seed": 1, "ignore_eos": True} | sampling)))


def params_of(seed: int) -> Any:
    return random_params(CONFIG, seed)


def greedy(seed: int, count: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    return greedy_reference(Subject(None, CONFIG, params_of(seed)), prompt, count)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def publishing(engine: RemoteEngine, transport: str | None = None) -> Iterator[Publisher]:
    publisher = Publisher(LocalFleet(engine), SyncOptions(transport))
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.fixture(params=["gloo", "disk"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return sglang_gloo.NAME if request.param == "gloo" else f"disk:{tmp_path}"


# --- server settings ---


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"version": "0.5.15.post1"}, ConfigError, r"version 0\.5\.15\.post1; Slipstream needs 0\.5\.16"),
        ({"version": "main"}, ProtocolMismatch, "a version like"),
        ({"incremental_streaming_output": False}, ConfigError, "--incremental-streaming-output"),
        ({"dtype": "auto"}, ConfigError, "--dtype bfloat16"),
        ({"dtype": "int8"}, ConfigError, "holds int8"),
        ({"quantization": "fp8"}, ConfigError, "quantizes its weights"),
        ({"speculative_algorithm": "EAGLE"}, ConfigError, "draft"),
        ({"disaggregation_mode": "decode"}, ConfigError, "disaggregated"),
        ({"max_req_input_len": 4096}, ConfigError, "does it serve another model"),
        ({"tp_size": None}, ProtocolMismatch, "int at tp_size"),
        ({"enable_memory_saver": "yes"}, ProtocolMismatch, "true or false at enable_memory_saver"),
    ],
)
def test_an_unusable_server_is_refused_at_the_start(
    server: StandIn, settings: dict[str, Any], error: type[SlipstreamError], text: str
) -> None:
    server.tell(settings=settings)
    with pytest.raises(error, match=text) as found:
        with_engine(server, nothing)
    assert server.url in str(found.value)
    assert server.state["calls"] == []  # nothing was changed


def test_the_wrong_kind_of_server_is_reported(server: StandIn) -> None:
    with pytest.raises(ConfigError, match="dialect=sglang"):
        asyncio.run(RemoteEngine.start(server.model, options=RemoteConfig(url=server.url)))
    server.tell(fail={"/server_info": [404, {"detail": "Not Found"}]})
    with pytest.raises(ConfigError, match=r"Not Found.*is it an SGLang server"):
        with_engine(server, nothing)
    with pytest.raises(ConfigError, match="dialect is a setting of RemoteConfig"):
        EmbeddedConfig(dialect="sglang")


def test_the_api_key_has_its_own_variable(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.tell(key="sesame")
    with pytest.raises(Unauthorized, match="SLIPSTREAM_SGLANG_TOKEN"):
        with_engine(server, nothing)
    monkeypatch.setenv("SLIPSTREAM_SGLANG_TOKEN", "sesame")
    (found,) = with_engine(server, lambda engine: collected(engine, request()))
    assert isinstance(found, Completion)


@pytest.mark.parametrize(
    "over",
    [
        {"state": {"label": "someone's"}},
        {"state": {"label": "slipstream-0123abcd-3-unfinished"}},
        {"settings": {"load_format": "dummy"}},
    ],
)
def test_weights_of_unknown_origin_are_not_served_until_a_sync_brings_all(
    server: StandIn, over: dict[str, Any]
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        assert engine.describe().version == -1 and server.state["paused"]
        (failure,) = await collected(engine, request())
        assert isinstance(failure, Failure) and isinstance(failure.error, NotReady)
        with publishing(engine) as publisher:
            part = {"model.norm.weight": hf_weights.flatten(params_of(1))["model.norm.weight"]}
            with pytest.raises(FleetChanged, match="needs every tensor"):
                await publisher.publish(part, (engine.describe(),), 1, partial=True)
            await publisher.publish(params_of(1), (engine.describe(),), 1)
        (found,) = await collected(engine, request(temperature=0))
        assert isinstance(found, Completion) and found.token_ids == greedy(1, 4)

    server.tell(**over)
    with_engine(server, scenario)


def test_transports_depend_on_the_servers_parallelism(server: StandIn, tmp_path: Path) -> None:
    async def offered(engine: RemoteEngine) -> tuple[str, ...]:
        return engine.describe().transports

    assert with_engine(server, offered) == ("sglang-gloo", "disk")
    for settings in ({"pp_size": 2}, {"dp_size": 2}):
        server.fresh(settings=settings)
        assert with_engine(server, offered) == ("disk",)
    server.fresh(settings={"dp_size": 2, "enable_dp_attention": True})
    assert with_engine(server, offered) == ("sglang-gloo", "disk")

    async def refused(engine: RemoteEngine) -> None:
        info = engine.describe()
        with publishing(engine) as publisher, pytest.raises(TransferError, match="disk works with a directory"):
            await publisher.publish(params_of(1), (info,), 1)

    server.fresh(settings={"pp_size": 2})
    with_engine(server, refused)


# --- requests ---


def test_requests_have_sglangs_format(server: StandIn) -> None:
    server.tell(settings={"enable_priority_scheduling": True})

    async def scenario(engine: RemoteEngine) -> Any:
        plain = Request("plain", PROMPT, request(n=2).sampling, priority=3)
        asked = [plain, request("ends", ignore_eos=False), request("stops", stop_token_ids=(9,), max_tokens=40)]
        return await collected(engine, *asked), server.state

    outcomes, state = with_engine(server, scenario)
    assert len(outcomes) == 4 and all(isinstance(one, Completion) for one in outcomes)
    bodies = {(b.get("priority", 0), tuple(b["sampling_params"]["stop_token_ids"])): b for b in state["bodies"]}
    plain, ends, stops = bodies[-3, ()], bodies[0, (1,)], bodies[0, (9,)]
    assert plain["input_ids"] == list(PROMPT) and plain["stream"] and plain["return_logprob"]
    assert plain["extra_key"].startswith("slipstream-") and plain["rid"] != ends["rid"]
    assert plain["sampling_params"]["top_k"] == -1 and plain["sampling_params"]["ignore_eos"]
    assert not ends["sampling_params"]["ignore_eos"]  # the server stops where we would
    assert stops["sampling_params"]["ignore_eos"]  # or else it would stop at the model's own tokens, too
    seeds = [b["sampling_params"]["sampling_seed"] for b in state["bodies"] if b.get("priority") == -3]
    assert len(set(seeds)) == 2 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_stop_token_ends_the_completion_and_the_servers_request(server: StandIn) -> None:
    free = greedy(0, 40)
    stop = next(t for i, t in enumerate(free) if i > 2 and t not in free[:i])

    async def scenario(engine: RemoteEngine) -> Any:
        (found,) = await collected(engine, request(temperature=0, stop_token_ids=(stop,), max_tokens=100))
        await until(lambda: server.state["open"] == 0)
        return found

    found = with_engine(server, scenario)
    assert found.token_ids == free[: free.index(stop) + 1] and found.finish_reason == "stop"


def test_requests_whose_logprobs_are_unknown_are_refused(server: StandIn) -> None:
    server.tell(original_logprobs=True)

    async def scenario(engine: RemoteEngine) -> Any:
        asked = [request("plain"), request("greedy", temperature=0, min_tokens=1), request("top", top_k=5)]
        return await collected(engine, *asked, request("warm", temperature=0.5), request("odd", repetition_penalty=1.2))

    found = {one.request_id: one for one in with_engine(server, scenario)}
    assert all(isinstance(found[name], Completion) for name in ("plain", "greedy", "top"))
    for name, text in (("warm", "SGLANG_RETURN_ORIGINAL_LOGPROB"), ("odd", "repetition_penalty")):
        assert isinstance(found[name].error, Unsupported) and text in str(found[name].error)


def test_min_p_logprobs_use_the_sampling_mask_and_never_crash_a_server(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        return await collected(engine, request(min_p=0.3, n=3))

    refused = with_engine(server, scenario)
    assert all(isinstance(one.error, Unsupported) and "min_p" in str(one.error) for one in refused) and server.is_alive
    server.fresh(settings={"enable_deterministic_inference": False})
    subject = Subject(None, CONFIG, params_of(0))  # type: ignore[arg-type]
    for one in with_engine(server, scenario):
        rows = np.exp(subject.logprobs(PROMPT + one.token_ids)[len(PROMPT) - 1 : -1])
        for row, token, logprob in zip(rows, one.token_ids, one.logprobs, strict=True):
            left = row >= 0.3 * row.max()
            assert left[token] and logprob == pytest.approx(np.log(row[token] / row[left].sum()), abs=1e-4)


def test_top_k_with_top_p_has_sglangs_meaning_and_matching_logprobs(server: StandIn) -> None:
    """Top-p applies to the distribution over all tokens, not those that top-k left."""
    outcomes = with_engine(server, lambda engine: collected(engine, request(n=6, top_k=10, top_p=0.5)))
    subject = Subject(None, CONFIG, params_of(0))  # type: ignore[arg-type]
    for one in outcomes:
        rows = np.exp(subject.logprobs(PROMPT + one.token_ids)[len(PROMPT) - 1 : -1])
        for row, token, logprob in zip(rows, one.token_ids, one.logprobs, strict=True):
            order = np.argsort(-row)[:10]
            left = [t for i, t in enumerate(order) if row[order[:i]].sum() <= 0.5]
            assert token in left and logprob == pytest.approx(np.log(row[token] / row[left].sum()), abs=1e-4)


def test_a_rejected_request_fails_alone_with_the_servers_message(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        bad, good = await collected(engine, request("bad", presence_penalty=5.0)), await collected(engine, request())
        server.tell(fail={"/generate": [400, {"error": {"message": "too long"}}]})
        with pytest.raises(InvalidSampling, match="too long"):
            await engine.score([PROMPT])
        return bad[0], good[0]

    bad, good = with_engine(server, scenario)
    assert isinstance(bad.error, InvalidSampling) and "must be in [-2, 2]" in str(bad.error)
    assert isinstance(good, Completion)


def event(**over: Any) -> dict[str, Any]:
    meta = {"finish_reason": None, "weight_version": "v", "output_token_logprobs": [[-0.5, 9, None]]}
    return {"output_ids": [9], "meta_info": meta | over}


MALFORMED: list[tuple[Any, type[SlipstreamError], str]] = [
    ({"error": {"message": "boom", "code": 500}}, EngineFailure, "boom"),
    ({"error": {"message": "min_p", "code": 400}}, InvalidSampling, "min_p"),
    (event(finish_reason={"type": "abort", "message": "Aborted"}), EngineFailure, "aborted a request: Aborted"),
    (
        event(finish_reason={"type": "abort", "message": "no", "status_code": 400}),
        InvalidSampling,
        "aborted a request: no",
    ),
    (event(finish_reason={"type": "stop", "matched": 9}), EngineFailure, "stopped at token 9"),
    (event(finish_reason={"type": "length", "length": 1}), EngineFailure, "after 1 of 4 tokens"),
    (event(finish_reason={"type": "whim"}), EngineFailure, "whim"),
    (event(finish_reason="stop"), ProtocolMismatch, "as many logprobs"),
    (event(output_token_logprobs=[]), ProtocolMismatch, "as many logprobs"),
    (event(output_token_logprobs=[[-0.5, 8, None]]), ProtocolMismatch, "as many logprobs"),
    (event(output_token_logprobs=[[0.5, 9, None]]), ProtocolMismatch, "as many logprobs"),
    (event(weight_version=None), ProtocolMismatch, "an event"),
    ([], ProtocolMismatch, "an event"),
]


def test_a_malformed_response_fails_its_request(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        for found, error, text in MALFORMED:
            server.tell(event=found)
            (bad,) = await collected(engine, request())
            assert isinstance(bad, Failure) and isinstance(bad.error, error) and text in str(bad.error), found
            server.tell(event=None)
            (good,) = await collected(engine, request())
            assert isinstance(good, Completion), found

    with_engine(server, scenario)


ANYTHING = anything(
    *("output_ids", "meta_info", "finish_reason", "weight_version", "output_token_logprobs", "type"),
    *("output_top_logprobs", "input_token_logprobs", "input_top_logprobs", "error", "code"),
)


@given(ANYTHING, st.sampled_from(("event", "reason", "rows", "tops")))
def test_any_event_is_read_or_refused(found: Any, where: str) -> None:
    one = {
        "event": found,
        "reason": event(finish_reason=found),
        "rows": event(output_token_logprobs=found, output_top_logprobs=found),
        "tops": event(output_top_logprobs=[found]),
    }[where]
    sample = Sample(EngineRequest("r", PROMPT, SamplingParams(), 1, 4, (), None), 0)  # type: ignore[arg-type]
    with contextlib.suppress(SlipstreamError):
        sglang_format.take_event(sample, one, 0, 1, refusal)
        assert all(isinstance(value, float) and -math.inf < value <= 1e-3 for value in sample.logprobs)


@given(ANYTHING)
def test_any_score_is_read_or_refused(found: Any) -> None:
    meta = {"finish_reason": None, "weight_version": "v", "input_token_logprobs": found, "input_top_logprobs": found}
    for answer in (found, {"meta_info": found}, {"meta_info": meta}):
        with contextlib.suppress(SlipstreamError):
            scores = sglang_format.take_score(answer, PROMPT, 1, refusal)
            assert len(scores.logprobs) == len(scores.top_logprobs) == 2


def test_leaving_a_generation_aborts_it_in_the_server(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        server.tell(hold_after=2)
        batches = engine.generate([request(n=3, max_tokens=50)])
        waiting = asyncio.create_task(anext(batches))
        await until(lambda: server.state["open"] == 3)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await batches.aclose()
        await until(lambda: server.state["open"] == 0)
        assert server.state["calls"].count("/abort_request") == 3

    with_engine(server, scenario)


def test_weights_changed_by_another_client_are_noticed_by_the_label(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        server.tell(state={"label": "someone else's"})
        (failure,) = await collected(engine, request())
        return failure, engine.ended.is_set()

    failure, ended = with_engine(server, scenario)
    assert isinstance(failure.error, EngineLost) and "someone else's" in str(failure.error) and ended


def test_a_server_that_dies_during_generation_ends_the_engine(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        server.tell(hold_after=2)
        waiting = asyncio.create_task(collected(engine, request(n=2)))
        await until(lambda: server.state["open"] == 2)
        server.kill()
        outcomes = await waiting
        assert outcomes and all(isinstance(o, Failure) and isinstance(o.error, EngineLost) for o in outcomes)
        assert engine.ended.is_set()

    with_engine(server, scenario)


# --- updates ---


def test_an_update_makes_its_calls_in_order_and_every_byte_arrives(
    server: StandIn, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_gloo, "BUCKET_BYTES", 20_000)
    sizes = [leaf.nbytes for leaf in hf_weights.flatten(params_of(0)).values()]
    moves = ["/update_weights_from_disk"]
    if transport == sglang_gloo.NAME:
        buckets = len(list(gather.group_by_bytes(sizes, sglang_gloo.BUCKET_BYTES)))
        moves = ["/update_weights_from_distributed"] * buckets + ["/update_weight_version"]
        assert buckets > 1
    steps = ["/pause_generation", "/update_weight_version", *moves, "/flush_cache", "/continue_generation"]

    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine, transport) as publisher:
            info = engine.describe()
            for version in (1, 2):
                server.tell(calls=[], loaded=[])
                report = await publisher.publish(params_of(version), (info,), version)
                state = server.state
                joins = ["/init_weights_update_group"] if version == 1 and transport == sglang_gloo.NAME else []
                assert state["calls"] == joins + steps
                assert sorted(state["loaded"]) == sorted(p.name for p in info.parameters)
                assert state["label"].endswith(f"-{version}") and not state["paused"]
                assert report.num_bytes == sum(sizes)
                (found,) = await collected(engine, request(temperature=0))
                assert isinstance(found, Completion) and found.token_ids == greedy(version, 4)
                assert found.spans == (VersionSpan(version, 0, 4),)
        first, second = (body["extra_key"] for body in server.state["bodies"])
        assert first != second

    with_engine(server, scenario)


def test_only_changed_tensors_are_sent(server: StandIn, transport: str) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine, transport) as publisher:
            info, params = engine.describe(), params_of(1)
            await publisher.publish(params, (info,), 1)
            server.tell(calls=[], loaded=[])
            assert (await publisher.publish(params, (info,), 2)).num_bytes == 0
            assert server.state["calls"] == ["/pause_generation", "/update_weight_version", "/continue_generation"]
            named = hf_weights.flatten(params)
            named["model.norm.weight"] = named["model.norm.weight"] * 2
            await publisher.publish(hf_weights.unflatten(named), (info,), 3)
            assert server.state["loaded"] == ["model.norm.weight"]
            (score,) = await engine.score([PROMPT])
            expected = Subject(None, CONFIG, hf_weights.unflatten(named)).logprobs(PROMPT)  # type: ignore[arg-type]
            np.testing.assert_allclose(score.logprobs, expected[[0, 1], PROMPT[1:]], atol=1e-4)
            assert score.version == 3

    with_engine(server, scenario)


def test_bfloat16_arrives_as_it_was_sent(server: StandIn, transport: str) -> None:
    server.tell(settings={"dtype": "bfloat16"})

    async def scenario(engine: RemoteEngine) -> Any:
        with publishing(engine, transport) as publisher:
            report = await publisher.publish(params_of(1), (engine.describe(),), 1)
        return report.num_bytes, await engine.score([PROMPT])

    import jax
    import jax.numpy as jnp

    num_bytes, (score,) = with_engine(server, scenario)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params_of(1))
    assert num_bytes == sum(leaf.nbytes for leaf in hf_weights.flatten(rounded).values()) // 2
    expected = Subject(None, CONFIG, rounded).logprobs(PROMPT)  # type: ignore[arg-type]
    np.testing.assert_allclose(score.logprobs, expected[[0, 1], PROMPT[1:]], atol=1e-4)


def test_checkpoints_are_deleted(server: StandIn, tmp_path: Path) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        with publishing(engine, f"disk:{tmp_path}") as publisher:
            for version in (1, 2):
                await publisher.publish(params_of(version), (engine.describe(),), version)
                assert [path.name[-3:] for path in tmp_path.iterdir()] == [f"-v{version}"]
        assert not list(tmp_path.iterdir())

    with_engine(server, scenario)


@pytest.mark.parametrize("in_flight", ["keep", "requeue"])
def test_spans_of_running_requests_name_the_version_of_each_token(server: StandIn, in_flight: Any) -> None:
    async def scenario(engine: RemoteEngine) -> Any:
        with publishing(engine) as publisher:
            server.tell(hold_after=20)
            running = asyncio.create_task(collected(engine, request(max_tokens=30, temperature=0)))
            await until(
                lambda: any(len(attempt.sample.tokens) == 17 for attempt in engine._samples.running)
            )  # in two events
            update = asyncio.create_task(publisher.publish(params_of(1), (engine.describe(),), 1, in_flight))
            await until(lambda: "/update_weights_from_distributed" in server.state["calls"])
            server.tell(hold_after=10**6)
            await update
            return (await running)[0]

    found = with_engine(server, scenario)
    if in_flight == "requeue":
        assert found.spans == (VersionSpan(1, 0, 30),) and found.token_ids == greedy(1, 30)
    else:
        assert found.spans == (VersionSpan(0, 0, 17), VersionSpan(1, 17, 30))
        assert found.token_ids[:17] == greedy(0, 17)
        assert found.token_ids[17:] == greedy(1, 13, PROMPT + found.token_ids[:17])


def test_requests_of_other_clients_neither_block_an_update_nor_crash_the_server(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sglang, "IDLE_SECONDS", 0.05)
    server.tell(hold_after=2)

    async def scenario(engine: RemoteEngine) -> None:
        body = {"rid": "theirs", "input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 20}}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as other:
            theirs = asyncio.create_task(other.post("/generate", json=body))
            await until(lambda: server.state["open"] == 1)
            with publishing(engine) as publisher:
                await publisher.publish(params_of(1), (engine.describe(),), 1)
            with pytest.raises(EngineFailure, match="another client"):
                await engine.sleep(1)
            assert server.is_alive and server.state["released"] == [] and not server.state["paused"]
            server.tell(hold_after=10**6)
            assert (await theirs).status_code == 200
        (found,) = await collected(engine, request(temperature=0))
        assert isinstance(found, Completion) and found.token_ids == greedy(1, 4)  # and no prefix of the older one

    with_engine(server, scenario)


FAILURES = {
    "gloo": ["/update_weight_version", "/update_weights_from_distributed"],
    "disk": ["/update_weight_version", "/update_weights_from_disk"],
}


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind, steps in FAILURES.items() for step in steps])
def test_a_failed_update_leaves_no_weights_until_the_next_sync(
    server: StandIn, tmp_path: Path, kind: str, step: str
) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        info = engine.describe()
        with publishing(engine, sglang_gloo.NAME if kind == "gloo" else f"disk:{tmp_path}") as publisher:
            server.tell(fail={step: [400, {"success": False, "message": "worker failed"}]})
            with pytest.raises(EngineFailure, match=f"POST {step} with 400.*worker failed"):
                await publisher.publish(params_of(1), (info,), 1)
            assert engine.describe().version == -1 and server.state["paused"]
            (refused,) = await collected(engine, request())
            assert isinstance(refused, Failure) and isinstance(refused.error, NotReady)
            await publisher.publish(params_of(1), (info,), 1)
            (found,) = await collected(engine, request(temperature=0))
            assert isinstance(found, Completion) and found.token_ids == greedy(1, 4)
        assert not engine.ended.is_set()

    with_engine(server, scenario)


def test_the_next_engine_recognizes_an_unfinished_update(server: StandIn, tmp_path: Path) -> None:
    async def broken(engine: RemoteEngine) -> None:
        server.tell(fail={"/update_weights_from_disk": [400, {"success": False, "message": "no"}]})
        with publishing(engine, f"disk:{tmp_path}") as publisher, pytest.raises(EngineFailure):
            await publisher.publish(params_of(1), (engine.describe(),), 1)

    async def version(engine: RemoteEngine) -> int:
        return engine.describe().version

    with_engine(server, broken)
    assert server.state["paused"] and server.state["label"].endswith("-1-unfinished")
    assert with_engine(server, version) == -1


def test_a_trainer_that_disconnects_fails_the_update(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_gloo, "BUCKET_BYTES", 20_000)
    broadcast, count = sglang_gloo._GlooGroup.broadcast, 0

    def breaks(group: Any, buffer: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise TransferError("told to fail")
        broadcast(group, buffer)

    async def scenario(engine: RemoteEngine) -> None:
        info = engine.describe()
        with publishing(engine) as publisher:
            monkeypatch.setattr(sglang_gloo._GlooGroup, "broadcast", breaks)
            with pytest.raises(EngineFailure, match="Failed to update parameter online"):
                await publisher.publish(params_of(1), (info,), 1)
            assert engine.describe().version == -1
            await publisher.publish(params_of(1), (info,), 1)
        (found,) = await collected(engine, request(temperature=0))
        assert isinstance(found, Completion) and found.token_ids == greedy(1, 4)
        assert len(server.state["groups"]) == 1  # the one that broke is given up

    with_engine(server, scenario)


def test_workers_stop_waiting_when_the_trainer_does_not_come(server: StandIn) -> None:
    class Broken(LocalFleet):
        async def receive_reports(self) -> Any:
            await super().receive_reports()
            raise Unsupported("another engine could not begin")

    async def scenario(engine: RemoteEngine) -> None:
        info = engine.describe()
        publisher = Publisher(Broken(engine))
        with pytest.raises(Unsupported, match="another engine"):
            await publisher.publish(params_of(1), (info,), 1)
        publisher.close()
        (found,) = await collected(engine, request(temperature=0))  # the workers wait no longer
        assert isinstance(found, Completion) and found.token_ids == greedy(0, 4)
        with publishing(engine) as again:
            await again.publish(params_of(1), (info,), 1)
        assert engine.describe().version == 1

    with_engine(server, scenario)


def test_a_server_that_hangs_in_an_update_ends_the_engine(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "UPDATE_SECONDS", 0.2)

    async def scenario(engine: RemoteEngine) -> None:
        server.tell(hang=["/update_weights_from_disk"])
        with (
            publishing(engine, f"disk:{tmp_path}") as publisher,
            pytest.raises(DeadlineExceeded, match="from_disk within"),
        ):
            await publisher.publish(params_of(1), (engine.describe(),), 1)
        assert engine.ended.is_set()
        server.tell(hang=[])

    with_engine(server, scenario)


def test_invalid_offers_are_refused_before_any_transfer(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        info = engine.describe()
        for transport in ("shm", "disk", "sglang-gloo:", "sglang-gloo:127.0.0.1:70000000:slipstream-0123456789abcdef"):
            update = update_of(info, params_of(1), 1)
            offer = type(update.offer)(update.offer.plan, update.offer.fingerprint, transport)
            with pytest.raises(TransferError, match="an SGLang server takes weights over"):
                await engine.begin(1, offer)
            sglang_gloo.withdraw(update.offer.transport)
        update = update_of(info, params_of(1), 1)
        stale = type(update.offer)(update.offer.plan, update.offer.fingerprint, update.offer.transport, fresh=False)
        with pytest.raises(SlipstreamError, match="a fresh offer"):
            await engine.begin(1, stale)
        await engine.begin(1, update.offer)
        with pytest.raises(SlipstreamError, match="pieces"):
            await engine.stage(1, [[pack_manifest(2, {})]])
        sglang_gloo.withdraw(update.offer.transport)

    with_engine(server, scenario)


def test_a_trainer_on_loopback_is_refused_by_a_server_on_another_host() -> None:
    client = type("Client", (), {"url": "https://gpu-host:30000", "name": "the server"})()
    dialect = sglang.SglangDialect(client, type("Server", (), {"can_join": True})())  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="SLIPSTREAM_RENDEZVOUS"):
        dialect.channel("sglang-gloo:127.0.0.1:1234:slipstream-0123456789abcdef")


# --- sleep ---


def test_sleep_needs_a_server_started_with_it(server: StandIn) -> None:
    server.tell(settings={"enable_weights_cpu_backup": False})

    async def level_two_only(engine: RemoteEngine) -> None:
        with pytest.raises(Unsupported, match="--enable-weights-cpu-backup"):
            await engine.sleep(1)
        assert (await engine.sleep(2)).asleep == ("kv_cache", "weights")
        assert server.state["released"] == ["kv_cache", "weights"]
        with publishing(engine) as publisher:
            await publisher.publish(params_of(1), (engine.describe(),), 1)
        assert (await engine.memory()).kv_cache == 0
        report = await engine.wake()
        assert report.asleep == () and report.kv_cache == 2**28
        (found,) = await collected(engine, request(temperature=0))
        assert isinstance(found, Completion) and found.token_ids == greedy(1, 4)

    with_engine(server, level_two_only)
    server.fresh(settings={"enable_memory_saver": False})

    async def none(engine: RemoteEngine) -> None:
        with pytest.raises(Unsupported, match="--enable-memory-saver"):
            await engine.sleep(1)

    with_engine(server, none)


def test_a_deeper_sleep_releases_nothing_twice(server: StandIn) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        await engine.sleep(1)
        await engine.sleep(1)
        await engine.wake(["kv_cache"])
        assert (await engine.sleep(2)).asleep == ("kv_cache", "weights")
        assert server.is_alive and server.state["calls"].count("/release_memory_occupation") == 2
        assert (await engine.wake()).asleep == ("weights",)  # dropped: a sync brings them back

    with_engine(server, scenario)


# --- the trainer's half ---


def test_a_trainer_without_torch_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_gloo, "is_possible", lambda: False)
    with pytest.raises(TransferError, match=r"needs torch.*disk:/directory"):
        choose("e", ("sglang-gloo", "disk"), "elsewhere", 1)


def test_an_address_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang_gloo.ADDRESS, "192.0.2.1")
    with pytest.raises(ConfigError, match="not an address of this host"):
        sglang_gloo.offered_transport()


@given(st.binary(max_size=200) | st.just(b'{"transport": "sglang-gloo", "server": "s", "world_size": 1}'))
def test_a_malformed_link_is_refused(link: bytes) -> None:
    for sender in (sglang_gloo.SglangGlooSender, on_disk.CheckpointSender):
        with pytest.raises(TransferError):
            sender(link, None, {}, ScanOptions())  # type: ignore[arg-type]


def test_a_missing_directory_or_an_unsafe_name_is_refused(tmp_path: Path) -> None:
    for link in (
        on_disk.make_link(str(tmp_path / "none"), random_name()),
        on_disk.make_link(str(tmp_path), "../x"),
    ):
        with pytest.raises(TransferError):
            on_disk.CheckpointSender(link, None, {}, ScanOptions())  # type: ignore[arg-type]


# --- as a process behind a gateway ---


def test_a_bridge_syncs_and_generates_through_an_engine_process(server: StandIn, tmp_path: Path) -> None:
    options = RemoteConfig(url=server.url, dialect="sglang")
    with launch(server.model, engine=options, run_dir=tmp_path / "run") as bridge:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        for version in (1, 2):
            report = bridge.sync(params_of(version))
            assert (report.version, report.engines[0].transport) == (version, "sglang-gloo")
            (found,) = bridge.generate([PROMPT], sampling)
            assert found.version == version and found.token_ids == greedy(version, 4)
