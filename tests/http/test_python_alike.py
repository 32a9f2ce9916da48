"""Conversations as prompts and tokens as they are drawn: from Python over gRPC and in process, compared with HTTP."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import slipstream
from slipstream import Engine, SamplingParams
from slipstream.errors import DeadlineExceeded, InvalidPrompt, Unsupported
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Failure, TokenEvent
from tests.http.served import eventually

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
OPTIONS = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    "chat_template_kwargs": {"style": "x"},
}
SAMPLING = SamplingParams(max_tokens=12, seed=7, n=2, ignore_eos=True)


@pytest.fixture(scope="module", params=["launched", "connected", "in process", "library"])
def api(request, served):
    """Everything that has the calls."""
    with contextlib.ExitStack() as stack:
        if request.param == "launched":
            yield served.bridge
        elif request.param == "connected":
            yield stack.enter_context(slipstream.connect(served.bridge.run_dir, model=served.model))
        elif request.param == "in process":
            yield stack.enter_context(slipstream.inprocess(served.model))
        else:
            yield stack.enter_context(Engine(served.model))


def test_a_conversation_is_the_prompt_that_http_makes_of_it(api, served):
    body = {"messages": CHAT, **OPTIONS, "max_tokens": 12, "seed": 7, "n": 2, "ignore_eos": True}
    answer = served.post("/v1/chat/completions", body | {"return_token_ids": True})
    wanted = [(tuple(answer["prompt_token_ids"]), tuple(c["token_ids"])) for c in answer["choices"]]
    assert [(c.prompt_token_ids, c.token_ids) for c in api.generate(CHAT, SAMPLING, **OPTIONS)] == wanted
    several = api.generate([CHAT, "abc", [4, 5], CHAT[1:]], SAMPLING, **OPTIONS).by_prompt()
    assert [(c.prompt_token_ids, c.token_ids) for c in several[0]] == wanted
    assert [row[0].prompt_token_ids for row in several[1:3]] == [(4, 5, 6), (4, 5)] and len(several) == 4
    (plain, *_) = asyncio.run(api.agenerate(CHAT, SAMPLING))
    assert len(plain.prompt_token_ids) < len(wanted[0][0]), "without the tools"


def test_tokens_as_they_are_drawn_are_those_of_generate(api):
    prompts, sampling = [CHAT, "abc"], SamplingParams(max_tokens=90, seed=7, n=2, ignore_eos=True)
    wanted = api.generate(prompts, sampling)
    events = list(api.stream_tokens(prompts, sampling))

    async def twin() -> list[TokenEvent | Failure]:
        return [event async for event in api.astream_tokens(prompts, sampling)]

    for found in (events, asyncio.run(twin())):
        assert len(found) > len(wanted) and any(e.text for e in found if e.finish_reason is None)
        for completion in wanted:
            own = [
                e
                for e in found
                if (e.prompt_index, e.sample_index) == (completion.prompt_index, completion.sample_index)
            ]
            assert sum((e.token_ids for e in own), ()) == completion.token_ids
            assert "".join(e.text for e in own) == completion.text
            assert sum((e.logprobs for e in own), ()) == completion.logprobs
            assert [e.finish_reason for e in own] == [None] * (len(own) - 1) + ["length"]
            assert {e.version for e in own} == {completion.version} and len({e.request_id for e in own}) == 1
            assert own[-1].completion.token_ids == completion.token_ids


def test_mistakes_in_conversations_are_named(api):
    with pytest.raises(InvalidPrompt, match=r"prompt 1 of 2: messages\[0\] has no role"):
        api.generate([CHAT, [{"content": "hi"}]])
    with pytest.raises(InvalidPrompt, match=r"messages\[1\] has no role"):
        api.generate([CHAT[0], "hi"])
    with pytest.raises(InvalidPrompt, match="messages must be plain data, as in JSON"):
        api.generate([{"role": "user", "content": "hi", "by": object()}])
    with pytest.raises(InvalidPrompt, match="cannot fit into max_model_len"):
        list(api.stream_tokens([{"role": "user", "content": "a" * 10**6}]))
    with pytest.raises(InvalidPrompt, match="no prompt is a list of messages"):
        api.generate(["abc"], **OPTIONS)
    good, bad = "abc", [10**6]
    failed = [event for event in api.stream_tokens([bad, good]) if isinstance(event, Failure)]
    assert [(event.prompt_index, type(event.error)) for event in failed] == [(0, InvalidPrompt)]


def test_rollouts_take_conversations(served):
    with slipstream.inprocess(served.model) as bridge:
        rollouts = bridge.rollouts(batch=2)
        rollouts.submit(["a", "b"], [CHAT, "abc"], SAMPLING, **OPTIONS)
        groups = {group.id: group.completions[0] for group in rollouts.take()}
        (wanted, _) = bridge.generate(CHAT, SAMPLING, **OPTIONS)
    assert groups["a"].prompt_token_ids == wanted.prompt_token_ids and groups["b"].prompt_token_ids == (4, 5, 6)


def test_a_bridge_that_knows_no_model_streams_tokens_and_refuses_conversations(served):
    with slipstream.connect(served.bridge.run_dir) as bridge:
        with pytest.raises(Unsupported, match="name a model that has one: model="):
            bridge.generate(CHAT)
        *events, last = bridge.stream_tokens(["abc"], SamplingParams(max_tokens=12, seed=7, ignore_eos=True))
        assert all(not e.text and e.token_ids for e in events) and last.text == last.completion.text


def test_a_stream_that_waits_too_long_is_aborted_on_the_engine(served):
    bridge = served.bridge
    bridge.pause()
    try:
        with pytest.raises(DeadlineExceeded, match=r"no result within 0.1 s; 1 samples are missing"):
            next(bridge.stream_tokens(["abc"], timeout=0.1))
        eventually(lambda: not any(e.num_requests for e in bridge.status().engines))
    finally:
        bridge.resume()


def test_events_name_the_version_that_drew_each_token(served):
    with slipstream.inprocess(served.model) as bridge:
        events = bridge.stream_tokens(["abc"], SamplingParams(max_tokens=100, seed=7, ignore_eos=True))
        found = [next(events)]
        bridge.pause()
        bridge.sync(hf_weights.load(served.model))
        bridge.resume()
        found += events
    spans = found[-1].completion.spans
    assert [e.version for e in found for _ in e.token_ids] == [s.version for s in spans for _ in range(s.start, s.stop)]
