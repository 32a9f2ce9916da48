"""Unmodified agents as environments: they play against a gateway, and their sessions become episodes to train on."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

import slipstream
from slipstream.bridge.agent_sessions import AgentSessions
from slipstream.config import EmbeddedConfig
from slipstream.errors import ConfigError, EnvironmentFailed, EnvironmentTimeout, SessionBusy, SessionClosed
from slipstream.rl.agents.api_agent import ApiAgent
from slipstream.rl.agents.episodes import episode_advantages, episode_batch
from slipstream.rl.agents.multi_turn import run_episodes
from slipstream.rl.data.tokens import Codec
from slipstream.types import SamplingParams
from tests.http.test_sessions import chat_models

SAMPLING = SamplingParams(max_tokens=6, seed=3)
CHATS = int(os.environ.get("SLIPSTREAM_AGENT_CHATS", "40"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    model = chat_models.write_chat_model(directory / "qwen3", "qwen3")
    from slipstream.model.checkpoints.hf_config import read_config
    from slipstream.model.checkpoints.sample_model import sample_params

    engine = EmbeddedConfig(max_num_seqs=8, max_model_len=1024, block_size=16)
    with slipstream.launch(model, engine=engine, http=True, keep_alive=True, run_dir=directory / "run") as bridge:
        bridge.sync(sample_params(read_config(model), 0))
        yield bridge, Codec(model)


def play(endpoint):
    """A plain agent: what it asks for is not what the trainer samples with."""
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = [{"role": "user", "content": f"guess {endpoint.seed % 10}"}]
        for _ in range(3):
            answer = client.chat.completions.create(
                model=endpoint.model, messages=messages, temperature=0, max_tokens=50
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "no, again"}]
    return len(messages[1].content) / 10


def test_an_agent_is_an_environment(fleet):
    bridge, codec = fleet
    result = run_episodes(bridge, codec, [ApiAgent(play) for _ in range(4)], SAMPLING, group=2, seed=1)
    assert len(result.episodes) == 4 and not result.errors
    for episode in result.episodes:
        assert [len(turn.token_ids) <= 6 for turn in episode.turns] == [True] * 3
        assert episode.rewards[:2] == (0.0, 0.0)
        (score,) = bridge.score([episode.token_ids])
        for turn in episode.turns:  # the engine's logprobs of exactly these tokens
            assert turn.raw_logprobs == pytest.approx(score.logprobs[turn.start - 1 : turn.stop - 1], abs=1e-4)
            assert turn.logprobs == pytest.approx(turn.raw_logprobs)  # the trainer's temperature, not the agent's
    first, second, other, _ = result.episodes
    assert first.token_ids[: first.turns[0].start] == second.token_ids[: second.turns[0].start]
    assert first.turns[0].token_ids != second.turns[0].token_ids and first.seed != other.seed
    batch = episode_batch(result.episodes, episode_advantages(result.episodes), 256)
    assert batch.mask.sum() == sum(sum(episode.sampled) for episode in result.episodes)


def test_one_failing_agent_costs_its_own_episode(fleet):
    bridge, codec = fleet

    def fails(endpoint):
        play(endpoint)
        raise ValueError("the tool broke")

    def hangs(endpoint):
        time.sleep(30)

    agents = [ApiAgent(play), ApiAgent(fails), ApiAgent(play), ApiAgent(hangs, timeout=0.5), ApiAgent(lambda _: 1.0)]
    result = run_episodes(bridge, codec, agents, SAMPLING, on_error="drop")
    assert {episode.environment for episode in result.episodes} == {0, 2} and result.num_dropped == 3
    raised, timed_out, silent = result.errors
    assert isinstance(raised, EnvironmentFailed) and "ValueError: the tool broke" in str(raised)
    assert isinstance(timed_out, EnvironmentTimeout) and "ApiAgent.timeout" in str(timed_out)
    assert "without a call" in str(silent)


def test_agents_need_the_http_server(fleet):
    bridge, codec = fleet
    with slipstream.connect(bridge.run_dir) as other:
        other.http_url = ""
        with pytest.raises(ConfigError, match="http=True"):
            run_episodes(other, codec, [ApiAgent(play)])


def test_an_agent_of_the_agents_sdk(fleet):
    sdk = pytest.importorskip("agents")
    bridge, codec = fleet
    sdk.set_tracing_disabled(True)

    @sdk.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async def plays(endpoint):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            model = sdk.OpenAIChatCompletionsModel(endpoint.model, client)
            agent = sdk.Agent(name="adder", instructions="Use the tool.", model=model, tools=[add])
            first = await sdk.Runner.run(agent, "2+2", max_turns=3)
            await sdk.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "and 3?"}], max_turns=3)
        return 1.0

    (episode,) = run_episodes(bridge, codec, [ApiAgent(plays)], SAMPLING).episodes  # one: it forked nowhere
    assert len(episode.turns) == 2 and episode.reward == 1.0


def test_a_killed_gateway_comes_back_with_its_sessions(fleet):
    bridge, _ = fleet
    sessions = AgentSessions.of(bridge)
    endpoint = sessions.open(SAMPLING)
    messages = [{"role": "user", "content": "a"}]

    def ask():
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            return client.chat.completions.create(model="", messages=messages)

    first = ask()
    pid = __import__("json").loads((Path(bridge.run_dir) / "gateway.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "b"}]
    second = retried(ask)
    assert second.session["turn"] == 1 and second.session["fork"] is None
    with pytest.raises(SessionBusy):
        sessions.take(endpoint.session)
    sessions.close(endpoint.session, 2.0)
    (trajectory,) = sessions.take(endpoint.session)
    assert [trajectory] == sessions.take(endpoint.session)
    assert trajectory.reward == 2.0 and len(trajectory.turns) == 2
    assert trajectory.versions.count(bridge.version) == sum(trajectory.sampled)
    with pytest.raises(SessionClosed):
        sessions.close(endpoint.session, 3.0)


def retried(call):
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_the_example_runs(capsys, monkeypatch):
    from tests.http.test_sessions import benchmark

    example = benchmark("../examples/openai_agent")
    monkeypatch.setattr(example, "GROUP", 4)
    monkeypatch.setattr(example, "GROUPS", 2)
    rewards = example.main(["--steps", "2"])
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    assert "step   2" in capsys.readouterr().out


def test_chats_keep_their_tokens_and_train(tmp_path, monkeypatch):
    """The benchmark with a few chats."""
    from tests.http.test_sessions import benchmark

    asyncio.set_event_loop(None)
    chats = benchmark("agent_chats")
    monkeypatch.setattr(chats, "TRAIN_ROWS", 16)
    monkeypatch.setattr(chats, "MAX_NUM_SEQS", 8)
    model = chat_models.write_chat_model(tmp_path / "gemma3", "gemma3")
    report = chats.run(model, "gemma3", CHATS, 16)
    assert not report.errors and report.hit_share > 0.95 and report.edits > 0.3 * CHATS
    assert report.turns > 3 * CHATS and report.train_steps >= 2
