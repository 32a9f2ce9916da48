"""Sessions of agents: exact tokens between turns, explicit forks, tool calls, and trajectories taken once."""

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path

import openai
import pytest

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.gateway.session_journal import trajectories
from slipstream.gateway.sessions import ChatSession, conversation_digests
from tests.http.sampler import SamplingFleet, client_of, front_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chat_models = benchmark("chat_models")


@pytest.fixture(scope="module", params=chat_models.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {name: chat_models.write_chat_model(directory / name, name) for name in chat_models.FAMILIES}


@pytest.fixture
def qwen(models):
    return models["qwen3"]


def user(text):
    return {"role": "user", "content": text}


def assistant(answer):
    return answer.choices[0].message.model_dump(exclude_none=True)


async def ask(client, messages, session="s", **more):
    extra = {"session": session} | more.pop("extra_body", {})
    return await client.chat.completions.create(model="", messages=messages, extra_body=extra, **more)


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def chat(model, steps, **config):
    """Run `steps(client, fleet, front)` against a front of its own; return what it returns."""

    async def run():
        fleet = SamplingFleet(model)
        front = front_of(fleet, model, **config)
        async with client_of(front) as client:
            return await steps(client, fleet, front)

    return asyncio.run(run())


# --- what follows a reply -------------------------------------------------------------------------------------------


def test_appended_text_is_the_templates_own_for_any_reply(models, family):
    """Against the naive rendering of the whole conversation, for replies that the template does not rewrite."""
    tokenizer = ChatTokenizer.read(models[family])
    end = chat_models.FAMILIES[family].end_of_turn
    for reply, appended in (("yes", [user("and now?")]), ("two\nlines", [user(" x ")])):
        messages = [user("hi"), {"role": "assistant", "content": reply}, *appended]
        before = tokenizer.encode_chat(1000, messages[:1])
        raw = tokenizer._tokenizer.encode(reply + end, add_special_tokens=False).ids
        after = tokenizer.encode_appended(1000, messages, 2, True)
        assert before + tuple(raw) + after == tokenizer.encode_chat(1000, messages)
        cut = tokenizer.encode_appended(1000, messages, 2, False)
        assert before + tuple(raw[:-1]) + cut == tokenizer.encode_chat(1000, messages)


def test_a_reply_that_the_template_would_rewrite_stays_as_it_was_sampled(qwen):
    def steps(client, fleet, front):
        async def run():
            fleet.replies = ["<think>\nhm\n</think>\n\nfour<|im_end|>", "five<|im_end|>"]
            first = await ask(client, [user("2+2")])
            await ask(client, [user("2+2"), assistant(first), user("2+3")])
            return fleet.tokenizer.decode(list(fleet.requests[1].prompt), skip_special_tokens=False)

        return run()

    assert chat(qwen, steps) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nfour<|im_end|>\n"
        "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_cannot_render_what_follows_is_a_fork(tmp_path):
    model = chat_models.write_chat_model(tmp_path / "strict", "gemma3")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(
        template.replace("message['content'] | trim", "message['content'] | upper")
    )

    async def steps(client, fleet, front):
        first = await ask(client, [user("a")])
        return (await ask(client, [user("a"), assistant(first), user("b")])).session

    assert chat(model, steps) == {"id": "s", "turn": 1, "branch": 1, "parent": None, "fork": "template"}


# --- turns and forks -------------------------------------------------------------------------------------------------


def test_turns_continue_from_the_sampled_tokens(models, family):
    """Random tokens: decoding and encoding them gives others."""

    async def steps(client, fleet, front):
        messages, known = [], ()
        for turn in range(4):
            messages.append(user(f"message {turn}"))
            answer = await ask(client, messages, extra_body={"return_token_ids": True})
            assert answer.session == {
                "id": "s",
                "turn": turn,
                "branch": 0,
                "parent": turn - 1 if turn else None,
                "fork": None,
            }
            prompt = tuple(answer.prompt_token_ids)
            assert prompt == fleet.requests[-1].prompt and prompt[: len(known)] == known
            known = prompt + tuple(answer.choices[0].token_ids)
            messages.append(assistant(answer))
        return messages, known

    messages, known = chat(models[family], steps)
    assert ChatTokenizer.read(models[family]).encode_chat(2000, messages, None, None, False) != known


def test_every_edit_is_a_fork_from_the_last_turn_in_common(qwen):
    async def steps(client, fleet, front):
        a, b = user("a"), user("b")
        first = await ask(client, [a])
        second = await ask(client, [a, assistant(first), b])
        history = [a, assistant(first), b, assistant(second)]
        edited = [{**history[1], "content": "something else"}, *history[2:]]
        wanted = [
            ([a, assistant(first), user("c")], 1, 0, "edited"),
            ([a, assistant(first), b], 2, 0, "repeated"),
            ([a, *edited, user("d")], 3, None, "edited"),
            ([user("new")], 4, None, "edited"),
            ([*history, user("e")], 0, 1, None),
            ([a], 5, None, "repeated"),
        ]
        for messages, branch, parent, fork in wanted:
            facts = (await ask(client, messages)).session
            assert (facts["branch"], facts["parent"], facts["fork"]) == (branch, parent, fork), messages
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert (await ask(client, [*history, user("g")], tools=tools)).session[
            "fork"
        ] == "edited"  # its beginning changed
        front.sessions.close("s", 1.0, 1)
        taken = front.sessions.take("s", 1, 0)
        return list(trajectories(taken)), fleet

    rows, fleet = chat(qwen, steps)
    assert len(rows) == 7
    sampled = sum(len(c.token_ids) for _, _, turns in rows for _, c in turns)
    assert sampled == sum(len(session_turn.token_ids) for _, _, turns in rows for _, session_turn in turns)
    assert sorted(c.request_id for _, _, turns in rows for _, c in turns) == sorted(r.id for r in fleet.requests)
    for _, tokens, turns in rows:
        for start, completion in turns:
            assert tokens[start : start + len(completion.token_ids)] == completion.token_ids
            request = next(r for r in fleet.requests if r.id == completion.request_id)
            assert tokens[:start] == request.prompt


def test_what_clients_add_to_a_message_or_leave_out_is_no_edit():
    bare = {"role": "assistant", "content": "hi"}
    sent = {**bare, "refusal": None, "annotations": [], "tool_calls": None, "content": [{"type": "text", "text": "hi"}]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert conversation_digests([bare]) == conversation_digests([sent])
    assert conversation_digests([{"role": "assistant", "content": None, "tool_calls": [call]}]) == conversation_digests(
        [{"role": "assistant", "tool_calls": [{**call, "index": 0}]}]
    )
    assert conversation_digests([bare]) != conversation_digests([{**bare, "content": "hi "}])
    assert ChatSession("s").place(conversation_digests([bare])).fork is None


def test_a_session_runs_one_turn_at_a_time(qwen):
    async def steps(client, fleet, front):
        fleet.gate.clear()
        first = asyncio.create_task(ask(client, [user("a")]))
        await until(lambda: fleet.requests)
        with pytest.raises(openai.ConflictError) as refused:
            await ask(client, [user("a")])
        other = asyncio.create_task(ask(client, [user("a")], "another"))
        fleet.gate.set()
        assert (await first).session["fork"] is None and (await other).session["fork"] is None
        fleet.gate.clear()
        gone = asyncio.create_task(ask(client, [user("b")]))
        await until(lambda: len(fleet.requests) == 3)
        gone.cancel()  # its client leaves: nothing is recorded
        await asyncio.gather(gone, return_exceptions=True)
        fleet.gate.set()
        await until(lambda: not any(session.is_busy for session in front.sessions.all_open()))
        assert (await ask(client, [user("c")])).session["turn"] == 1
        return refused.value.code

    assert chat(qwen, steps) == "SessionBusy"


def test_header_field_and_path_name_a_session(qwen):
    async def run():
        front = front_of(SamplingFleet(qwen), qwen)
        async with client_of(front, "/sessions/p/v1") as client:
            assert (await client.chat.completions.create(model="qwen3", messages=[user("a")])).session["id"] == "p"
            assert [model.id async for model in client.models.list()] == ["qwen3"]
        async with client_of(front, default_headers={"X-Slipstream-Session": "h"}) as client:
            assert (await client.chat.completions.create(model="", messages=[user("a")])).session["id"] == "h"
            with pytest.raises(openai.BadRequestError, match="different sessions"):
                await ask(client, [user("a")])
            with pytest.raises(openai.BadRequestError, match="n=2"):
                await ask(client, [user("a")], "h", n=2)
            with pytest.raises(openai.BadRequestError, match="session's id"):
                await ask(
                    client, [user("a")], "h", extra_headers={"X-Slipstream-Session": "a/b"}, extra_body={"session": ""}
                )

    asyncio.run(run())


# --- tool calls ------------------------------------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_back_as_such_beside_the_tokens(qwen, stream):
    async def steps(client, fleet, front):
        fleet.replies = [CALL, "4<|im_end|>"]
        messages = [user("2+2")]
        if stream:
            async with client.chat.completions.stream(
                model="", messages=messages, tools=[ADD], logprobs=True, extra_body={"session": "s"}
            ) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
            tokens = None
        else:
            answer = await ask(client, messages, tools=[ADD], logprobs=True)
            tokens = answer.choices[0].token_ids
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        wanted = fleet.tokenizer.encode(CALL, add_special_tokens=False).ids
        assert tokens in (None, wanted) and len(choice.logprobs.content) == len(wanted)
        reply = {"role": "assistant", "content": choice.message.content}
        reply["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
        ]
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        second = await ask(client, messages, tools=[ADD])
        assert second.session["fork"] is None and second.choices[0].message.content == "4"
        return fleet.tokenizer.decode(list(fleet.requests[1].prompt), skip_special_tokens=False)

    after = chat(qwen, steps).partition("2+2")[2]
    assert after == (
        f"<|im_end|>\n<|im_start|>assistant\n{CALL}\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_tools_a_call_is_text(qwen):
    async def steps(client, fleet, front):
        fleet.replies = [CALL, CALL]
        plain, none = await ask(client, [user("a")]), await ask(client, [user("b")], tools=[ADD], tool_choice="none")
        return [answer.choices[0].message for answer in (plain, none)]

    for message in chat(qwen, steps):
        assert message.tool_calls is None and "<tool_call>" in message.content


# --- limits and trajectories -----------------------------------------------------------------------------------------


def test_sessions_are_bounded_and_expire(qwen, monkeypatch):
    async def steps(client, fleet, front):
        await ask(client, [user("a")], "one")
        with pytest.raises(openai.RateLimitError, match="max_sessions"):
            await ask(client, [user("a")], "two")
        now = front.sessions._by_id["one"].last_used
        monkeypatch.setattr("slipstream.http.sessions.time.monotonic", lambda: now + 3601)
        await ask(client, [user("a")], "two")
        with pytest.raises(openai.ConflictError, match="has ended"):
            await ask(client, [user("a")], "one")
        front.sessions._num_bytes = 1 << 30
        with pytest.raises(openai.RateLimitError, match="max_session_bytes"):
            await ask(client, [user("b")], "two")
        assert list(front.sessions.journal.closed) == ["one"]

    chat(qwen, steps, max_sessions=1)


def test_a_session_survives_the_gateway_and_is_taken_once(qwen, tmp_path):
    async def run():
        fleet = SamplingFleet(qwen)
        front = front_of(fleet, qwen, tmp_path)
        async with client_of(front) as client:
            http = client.with_options(max_retries=0)
            opened = await http.post(
                "/sessions", body={"id": "s", "sampling": {"temperature": 0.5, "max_tokens": 7}}, cast_to=object
            )
            first = await ask(client, [user("a")], temperature=1.0, max_tokens=3)
        assert opened == {"id": "s", "turns": 0, "model": "qwen3"}
        assert (fleet.requests[0].sampling.temperature, fleet.requests[0].sampling.max_tokens) == (0.5, 7)
        front = front_of(fleet, qwen, tmp_path)  # as after a kill: the first was not shut
        async with client_of(front) as client:
            second = await ask(client, [user("a"), assistant(first), user("b")])
            assert second.session == {"id": "s", "turn": 1, "branch": 0, "parent": 0, "fork": None}
            assert fleet.requests[1].sampling.temperature == 0.5
            with pytest.raises(openai.ConflictError, match="is open"):
                await client.post("/sessions/s/take", cast_to=object)
            for _ in range(2):
                await client.post("/sessions/s/close", body={"reward": 0.5}, cast_to=object)
            with pytest.raises(openai.ConflictError, match=r"reward 0\.5"):
                await client.post("/sessions/s/close", body={"reward": 1}, cast_to=object)
            listed = await client.get("/sessions", cast_to=object)
            assert listed == {"open": [], "closed": ["s"]}
            taken = await client.post("/sessions/s/take", cast_to=object)
        front = front_of(fleet, qwen, tmp_path)
        async with client_of(front) as client:
            again = await client.post("/sessions/s/take", cast_to=object)
            with pytest.raises(openai.ConflictError, match="has ended"):
                await ask(client, [user("a")])
            assert (await client.get("/sessions", cast_to=object))["closed"] == []
            with pytest.raises(openai.NotFoundError, match="deleted"):
                await client.post("/sessions/s/take", body={"saved": taken["position"]}, cast_to=object)
            with pytest.raises(openai.NotFoundError):
                await client.post("/sessions/other/take", cast_to=object)
            with pytest.raises(openai.NotFoundError):
                await client.post("/sessions/other/close", cast_to=object)
        return fleet, taken, again, second

    fleet, taken, again, second = asyncio.run(run())
    assert taken == again and taken["reward"] == 0.5
    (row,) = taken["trajectories"]
    assert tuple(row["token_ids"]) == fleet.requests[1].prompt + tuple(second.choices[0].token_ids)
    assert [turn["start"] for turn in row["turns"]] == [len(request.prompt) for request in fleet.requests]
    for turn in row["turns"]:
        count = len(turn["token_ids"])
        assert row["token_ids"][turn["start"] : turn["start"] + count] == turn["token_ids"]
        assert turn["logprobs"] == pytest.approx([-0.1 * (i + 1) for i in range(count)])
        assert turn["version_spans"] == [
            {"version": 0, "start": 0, "stop": 1},
            {"version": 1, "start": 1, "stop": count},
        ]


def test_a_full_disk_leaves_the_session_as_it_was(qwen, tmp_path, monkeypatch):
    from slipstream.errors import JournalUnavailable

    async def run():
        front = front_of(SamplingFleet(qwen), qwen, tmp_path)
        async with client_of(front) as client:
            first = await ask(client, [user("a")])
            with monkeypatch.context() as full:

                def fail(*_):
                    raise JournalUnavailable("the disk is full")

                full.setattr(front.sessions.journal._journal, "store", fail)
                with pytest.raises(openai.InternalServerError) as refused:
                    await ask(client, [user("a"), assistant(first), user("b")])
            assert refused.value.status_code == 503
            facts = (await ask(client, [user("a"), assistant(first), user("b")])).session
            assert (facts["turn"], facts["fork"]) == (1, None)

    asyncio.run(run())


def test_a_client_may_play_and_give_its_reward_but_not_take(qwen, tmp_path):
    import httpx

    from slipstream.gateway.tokens import TokenTable, make_token
    from slipstream.http.app import create_app

    (tmp_path / "token").write_text("run-token")
    token = make_token(tmp_path, "client")
    app = create_app(front_of(SamplingFleet(qwen), qwen), TokenTable("run-token", tmp_path))

    async def run():
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://front", headers=headers
        ) as http:
            body = {"messages": [user("a")], "max_tokens": 4}
            calls = [
                ("/sessions/s/v1/chat/completions", body),
                ("/v1/sessions/s/close", {"reward": 1}),
                ("/v1/sessions/s/take", {}),
            ]
            return [(await http.post(path, json=json)).status_code for path, json in calls]

    assert asyncio.run(run()) == [200, 200, 403]


def test_session_errors_name_the_session(qwen):
    async def steps(client, fleet, front):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.post("/sessions/none/take", cast_to=object)
        return str(refused.value)

    assert re.search(r"no session 'none' was closed", chat(qwen, steps))
