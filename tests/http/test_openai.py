"""The unmodified `openai` package with a running fleet, and our additions to its answers."""

import openai
import pytest

from slipstream import SamplingParams


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.token, max_retries=0) as made:
        yield made


def test_models(client, served):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == served.bridge.status().engines[0].info.max_model_len


def test_completions_match_the_bridge(client, served):
    sampling = SamplingParams(max_tokens=9, seed=5, n=2)
    wanted = served.bridge.generate(["hello", "world"], sampling)
    found = client.completions.create(model="tiny", prompt=["hello", "world"], max_tokens=9, seed=5, n=2)
    assert [c.index for c in found.choices] == [0, 1, 2, 3]
    assert [c.text for c in found.choices] == [c.text for c in wanted]
    assert [tuple(c.token_ids) for c in found.choices] == [c.token_ids for c in wanted]
    assert found.choices[0].version_spans == [{"version": wanted[0].version, "start": 0, "stop": 9}]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (10, sum(len(c.token_ids) for c in wanted))


def test_prompts_of_token_ids(client, served):
    wanted = served.bridge.generate([[5, 6], [7, 8, 9]], SamplingParams(max_tokens=4, seed=1))
    found = client.completions.create(
        model="tiny", prompt=[[5, 6], [7, 8, 9]], max_tokens=4, seed=1, extra_body={"return_token_ids": True}
    )
    assert [c.prompt_token_ids for c in found.choices] == [[5, 6], [7, 8, 9]]
    assert [tuple(c.token_ids) for c in found.choices] == [c.token_ids for c in wanted]
    alone = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=4, seed=1)
    assert alone.choices[0].text == found.choices[0].text


def test_logprobs_and_echo(client, served):
    found = client.completions.create(model="tiny", prompt="hello", max_tokens=3, logprobs=2, echo=True, seed=0)
    (choice,) = found.choices
    assert choice.text.startswith("hello") and len(choice.logprobs.tokens) == 5 + len(choice.token_ids)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    tokens = [11, 8, 15, 15, 18]
    (score,) = served.bridge.score([tokens], top_k=2)
    assert choice.logprobs.token_logprobs[1:5] == pytest.approx(score.logprobs)
    for row, own, text in zip(
        choice.logprobs.top_logprobs[1:], choice.logprobs.token_logprobs[1:], choice.logprobs.tokens[1:]
    ):
        assert 2 <= len(row) <= 3 and row[text] == own
    bare = client.completions.create(model="tiny", prompt=tokens, max_tokens=0, logprobs=1, echo=True)
    assert bare.choices[0].text == "hello" and bare.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        score.logprobs
    )
    assert bare.usage.completion_tokens == 0


def test_echo_of_a_single_token_prompt_has_no_logprob(client):
    found = client.completions.create(model="tiny", prompt=[5], max_tokens=0, logprobs=1, echo=True)
    assert found.choices[0].logprobs.token_logprobs == [None]


def test_stop_strings_end_a_completion(client):
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=40, seed=2, extra_body={"ignore_eos": True})
    stop = free.choices[0].text[5]
    cut = client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, seed=2, stop=stop, extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free.choices[0].text[: free.choices[0].text.index(stop)]


@pytest.mark.parametrize("stop", [None, "e", ["zz", "ab"]])
def test_a_stream_adds_up_to_the_whole_answer(client, stop):
    asked = dict(model="tiny", prompt=["abc", "de"], max_tokens=50, n=2, seed=3, stop=stop, logprobs=1)
    whole = client.completions.create(**asked)
    texts, tokens, logprobs, ends = ({i: [] for i in range(4)} for _ in range(4))
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index].append(choice.text)
        tokens[choice.index] += choice.token_ids
        logprobs[choice.index] += choice.logprobs.token_logprobs
        ends[choice.index] += [choice.finish_reason] * (choice.finish_reason is not None)
    for choice in whole.choices:
        assert "".join(texts[choice.index]) == choice.text
        assert tokens[choice.index] == choice.token_ids
        assert logprobs[choice.index] == choice.logprobs.token_logprobs
        assert ends[choice.index] == [choice.finish_reason]
    assert chunks[-1].usage == whole.usage
    assert any(len(parts) > 1 for parts in texts.values()), "tokens must arrive in several chunks"


def test_chat(client, served):
    messages = [{"role": "system", "content": "be nice"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    wanted = served.bridge.generate(["s be nice u hi a "], SamplingParams(max_tokens=8, seed=4))[0]
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, seed=4, logprobs=True, top_logprobs=2
    )
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.message.content == wanted.text
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(wanted.logprobs)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert found.usage.prompt_tokens == len(wanted.prompt_token_ids)
    chunks = list(
        client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, seed=4, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason


def test_chat_without_max_tokens_fills_the_context(client, served):
    found = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body={"ignore_eos": True}
    )
    longest = served.bridge.status().engines[0].info.max_model_len
    assert found.choices[0].finish_reason == "length" and found.usage.total_tokens == longest


def test_errors_raise_the_clients_exceptions(client, served):
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be greater than or equal to 0"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="token id 9999"):
        client.completions.create(model="tiny", prompt=[9999])
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        client.completions.create(model="tiny", prompt="a", extra_body={"temprature": 1})
    with pytest.raises(openai.BadRequestError, match="leaves no room") as caught:
        client.completions.create(model="tiny", prompt="a" * 500, stream=True)
    assert caught.value.code == "InvalidPrompt"
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model="tiny", prompt="a", suffix="b")
    with pytest.raises(openai.AuthenticationError, match="token missing or wrong"):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()


def test_prompt_logprobs_in_vllms_format(served):
    body = {"prompt": [11, 8, 15], "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = served.post("/v1/completions", body)["choices"]
    (score,) = served.bridge.score([[11, 8, 15]], top_k=2)
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    for row, token, logprob, tops in zip(rows, (8, 15), score.logprobs, score.top_logprobs):
        assert row[str(token)]["logprob"] == pytest.approx(logprob)
        ranked = sorted(row, key=lambda key: row[key]["rank"])
        assert ranked[:2] == [str(t) for t in tops.token_ids] and set(row) == {*ranked[:2], str(token)}
