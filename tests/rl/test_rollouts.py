"""Multi-turn episodes with a real engine in this process: tokens, training batches, failures."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvironmentFailed,
    EnvironmentTimeout,
    InvalidSampling,
    NotReady,
)
from slipstream.model.checkpoints.sample_model import sample_config, sample_params, write_sample_config
from slipstream.rl.agents.environments import Markers, Observation
from slipstream.rl.agents.episodes import Episode, Turn, episode_advantages, episode_batch
from slipstream.rl.agents.multi_turn import arun_episodes, run_episodes
from slipstream.rl.data.tokens import Codec
from slipstream.types import SamplingParams, VersionSpan

ENGINE = EmbeddedConfig(max_num_seqs=32, max_model_len=128, block_size=8)
SAMPLING = SamplingParams(max_tokens=6, seed=5)
MARKERS = Markers(before="\n> ", after="\n", first="> ", unfinished="<eos>")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_sample_config(path)
    return path


@pytest.fixture(scope="module")
def codec(model_dir):
    return Codec(model_dir)


@pytest.fixture(scope="module")
def bridge(model_dir):
    with slipstream.inprocess(model_dir, engine=ENGINE) as bridge:
        bridge.sync(sample_params(sample_config(), 0))
        yield bridge


class Seen:
    """A bridge that records its prompts."""

    def __init__(self, bridge):
        self._bridge, self.prompts = bridge, []

    def __getattr__(self, name):
        return getattr(self._bridge, name)

    async def agenerate(self, prompts, sampling, **how):
        self.prompts += prompts
        return await self._bridge.agenerate(prompts, sampling, **how)

    @property
    def stats(self):
        return self._bridge._fleet._engine.stats()


class Echo:
    """Answers with the length of each action; done after `turns`. The first 30 tokens of the prompt depend on the seed."""

    def __init__(self, turns=3):
        self.turns, self.actions = turns, []

    def reset(self, seed):
        self.seed, self.actions = seed, []
        return Observation(f"{seed:030d}")

    def step(self, action):
        self.actions.append(action)
        return Observation(f"{len(action)} long"), float(len(self.actions)), len(self.actions) == self.turns


class AsyncEcho(Echo):
    async def reset(self, seed):
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_each_turn_continues_from_the_exact_tokens_of_the_last(bridge, codec, kind):
    seen, environments = Seen(bridge), [kind() for _ in range(6)]
    hits = seen.stats["hit_tokens"]
    found = run_episodes(seen, codec, environments, SAMPLING, markers=MARKERS, seed=1, max_turns=5)
    hits = seen.stats["hit_tokens"] - hits

    assert len(found.episodes) == 6 and not found.errors and found.num_dropped == 0
    prompts = {}
    for prompt in seen.prompts:  # the first 33 tokens identify an episode
        prompts.setdefault(prompt[:33], []).append(prompt)
    assert len(prompts) == 6
    known = 0
    for episode, environment in zip(found.episodes, environments):
        assert episode.end == "done" and episode.rewards == (1.0, 2.0, 3.0) and episode.reward == 6.0
        assert [turn.action for turn in episode.turns] == environment.actions
        sent = prompts[episode.token_ids[:33]]
        expected = codec.prompts([f"> {environment.seed:030d}\n"])[0]
        for turn, prompt in zip(episode.turns, sent, strict=True):
            assert prompt == expected == episode.token_ids[: turn.start]  # exactly
            expected += turn.token_ids
            known += len(prompt) if turn is not episode.turns[0] else 0
            cut = "<eos>" if turn.finish_reason == "length" else ""
            said = codec.answers([f"{cut}\n> {len(turn.action)} long\n"])[0]
            if turn is not episode.turns[-1]:
                known -= len(said) + 1  # the new text, and the last sampled token, which is not in the KV cache yet
            expected += said
        assert episode.token_ids == expected[: -len(said)]  # the observation after the end is not part of it
    assert hits >= known > 300  # the whole context came from the prefix cache


def test_masks_logprobs_and_versions_line_up(bridge, codec):
    sampling = SamplingParams(max_tokens=6, temperature=0.7, seed=9)
    found = run_episodes(bridge, codec, [Echo() for _ in range(4)], sampling, markers=MARKERS)
    scores = bridge.score([episode.token_ids for episode in found.episodes])
    for episode, score in zip(found.episodes, scores):
        size = len(episode.token_ids)
        assert size == len(episode.sampled) == len(episode.logprobs) == len(episode.raw_logprobs)
        positions = [i for i, drawn in enumerate(episode.sampled) if drawn]
        assert positions == [i for turn in episode.turns for i in range(turn.start, turn.stop)]
        assert positions == [i for span in episode.spans for i in range(span.start, span.stop)]
        assert {span.version for span in episode.spans} == {bridge.version} == {episode.version}
        for i in range(size):
            if episode.sampled[i]:
                assert episode.raw_logprobs[i] == pytest.approx(score.logprobs[i - 1], abs=1e-4)
                assert episode.logprobs[i] != episode.raw_logprobs[i]  # the temperature
            else:
                assert episode.logprobs[i] == episode.raw_logprobs[i] == 0


def test_equal_seeds_give_equal_episodes_and_groups_start_alike(bridge, codec):
    def play(**how):
        return run_episodes(
            bridge, codec, [Echo() for _ in range(6)], SAMPLING, **{"group": 3, "seed": 4, **how}
        ).episodes

    first = play()
    assert play() == first == play(concurrency=1)
    assert [e.group for e in first] == [0, 0, 0, 1, 1, 1] and [e.environment for e in first] == list(range(6))
    assert [len({e.seed for e in first[i : i + 3]}) for i in (0, 3)] == [1, 1] and first[0].seed != first[3].seed
    assert len({e.token_ids for e in first}) == 6  # and then diverges
    assert play(seed=5)[0].token_ids != first[0].token_ids


def test_async_call_on_another_event_loop(bridge, codec):
    found = asyncio.run(arun_episodes(bridge, codec, [Echo(), Echo()], SAMPLING, max_turns=2))
    assert found == run_episodes(bridge, codec, [Echo(), Echo()], SAMPLING, max_turns=2)
    assert [e.end for e in found.episodes] == ["max_turns"] * 2


def test_an_environment_does_not_wait_for_the_others(bridge, codec):
    finished = threading.Event()

    class Slow(Echo):
        def step(self, action):
            assert finished.wait(60)
            return super().step(action)

    class Last(Echo):
        def step(self, action):
            stepped = super().step(action)
            if stepped[2]:
                finished.set()
            return stepped

    found = run_episodes(bridge, codec, [Slow(), Last()], SAMPLING)
    assert [e.end for e in found.episodes] == ["done", "done"]


def test_an_episode_ends_when_there_is_no_room_left(bridge, codec):
    (episode,) = run_episodes(bridge, codec, [Echo(turns=99)], SAMPLING, max_turns=99, max_length=60).episodes
    assert episode.end == "too_long" and len(episode.turns) >= 2 and len(episode.token_ids) <= 60
    assert episode.sampled[-1]  # the last observation is not part of it
    wide = SamplingParams(max_tokens=500, ignore_eos=True, seed=1)
    (episode,) = run_episodes(bridge, codec, [Echo()], wide).episodes
    assert episode.end == "too_long" and len(episode.token_ids) == ENGINE.max_model_len and episode.rewards == (1.0,)
    with pytest.raises(EnvironmentFailed, match=r"environment 0 .*first observation has 31 tokens.* 20"):
        run_episodes(bridge, codec, [Echo()], SAMPLING, max_length=20)


class Faulty(Echo):
    """Fails in the second turn."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        stepped = super().step(action)
        return self.how(stepped) if len(self.actions) == 2 else stepped


def raises(stepped):
    raise KeyError("no such tool")


def hangs(stepped):
    time.sleep(3600)


FAULTS = {
    r"raised KeyError: 'no such tool'\n(.|\n)*test_rollouts.py": raises,
    r"must return \(observation, reward, done\), got None": lambda stepped: None,
    r"got .*tuple of 5": lambda stepped: (*stepped, {}, {}),
    r"Observation\(text\), got 'text' \(str\)": lambda stepped: ("text", 1.0, False),
    r"as a reward it returned nan": lambda stepped: (stepped[0], float("nan"), False),
    r"as a reward it returned None": lambda stepped: (stepped[0], None, False),
    r"done must be True or False, got 0": lambda stepped: (stepped[0], 1.0, 0),
}


@pytest.mark.parametrize("said", FAULTS)
def test_environment_failures_name_the_environment_and_the_turn(bridge, codec, said):
    with pytest.raises(EnvironmentFailed, match=rf"environment 1 \(Faulty, seed \d+\), turn 1: step(.|\n)*{said}"):
        run_episodes(bridge, codec, [Echo(), Faulty(FAULTS[said])], SAMPLING)


def test_a_hanging_call_times_out(bridge, codec):
    class Asleep(Echo):
        async def reset(self, seed):
            await asyncio.sleep(3600)

    with pytest.raises(EnvironmentTimeout, match=r"environment 0 .* turn 1: step did not return within 1 s"):
        run_episodes(bridge, codec, [Faulty(hangs)], SAMPLING, step_timeout=1.0)
    with pytest.raises(EnvironmentTimeout, match=r"environment 0 .* turn 0: reset did not return"):
        run_episodes(bridge, codec, [Asleep()], SAMPLING, step_timeout=1.0)


def test_a_turn_of_the_policy_times_out(bridge, codec):
    bridge.pause()
    try:
        with pytest.raises(DeadlineExceeded, match=r"environment 0 .* turn 0: the policy's turn took longer than 1 s"):
            run_episodes(bridge, codec, [Echo()], SAMPLING, turn_timeout=1.0)
    finally:
        bridge.resume()
    assert run_episodes(bridge, codec, [Echo()], SAMPLING).episodes


def test_invalid_environments_are_rejected(bridge, codec):
    class Text(Echo):
        def reset(self, seed):
            return "text"

    with pytest.raises(EnvironmentFailed, match="no method reset"):
        run_episodes(bridge, codec, [object()], SAMPLING)
    with pytest.raises(EnvironmentFailed, match=r"turn 0: reset must return an Observation\(text\), got 'text'"):
        run_episodes(bridge, codec, [Text()], SAMPLING)


def test_failed_episodes_are_dropped_from_their_groups(bridge, codec):
    environments = [Faulty(raises), Echo(), Echo(), Faulty(raises), Echo(), Faulty(raises), Echo(), Echo(), Echo()]
    found = run_episodes(bridge, codec, environments, SAMPLING, group=3, on_error="drop")
    assert [e.environment for e in found.episodes] == [1, 2, 6, 7, 8]
    assert len(found.errors) == 3 and found.num_dropped == 4
    with pytest.raises(EnvironmentFailed, match="none of 1 episodes is left"):
        run_episodes(bridge, codec, [Faulty(raises)], SAMPLING, on_error="drop")


@pytest.mark.parametrize(
    "wrong",
    [{"max_turns": 0}, {"group": 2}, {"seed": -1}, {"on_error": "zero"}, {"step_timeout": 0}, {"turn_timeout": -1}],
)
def test_invalid_settings_are_rejected(bridge, codec, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        run_episodes(bridge, codec, [Echo()], SAMPLING, **wrong)


def test_shared_environments_and_several_samples_are_rejected(bridge, codec):
    one = Echo()
    with pytest.raises(ConfigError, match="environments 0 and 1 are the same object"):
        run_episodes(bridge, codec, [one, one], SAMPLING)
    with pytest.raises(InvalidSampling, match="n=2"):
        run_episodes(bridge, codec, [one], SamplingParams(n=2))
    assert run_episodes(bridge, codec, [], SAMPLING).episodes == ()


def test_engine_failures_are_always_raised(model_dir, codec):
    with (
        slipstream.inprocess(model_dir, engine=ENGINE) as empty,
        pytest.raises(NotReady, match=r"environment 0 .* turn 0"),
    ):
        run_episodes(empty, codec, [Echo()], SAMPLING, on_error="drop")


def test_spans_follow_a_policy_that_changes_between_turns(model_dir, codec):
    with slipstream.inprocess(model_dir, engine=ENGINE) as bridge:
        bridge.sync(sample_params(sample_config(), 0))

        class Syncs(Echo):
            def step(self, action):
                bridge.sync(sample_params(sample_config(), len(self.actions) + 1))
                return super().step(action)

        (episode,) = run_episodes(bridge, codec, [Syncs()], SAMPLING).episodes
    assert [span.version for span in episode.spans] == [0, 1, 2] and episode.version == 0


class Together(Echo):
    """Waits for all environments at the start and in the second turn, where one of them runs `action`."""

    def __init__(self, begin, second):
        super().__init__()
        self.begin, self.second = begin, second

    def reset(self, seed):
        self.begin.wait(60)
        return super().reset(seed)

    def step(self, action):
        if len(self.actions) == 1:
            self.second.wait(60)
        return super().step(action)


def test_an_episode_stays_on_its_engine_until_it_dies(model_dir, codec, tmp_path):
    def play(bridge, act):
        begin, second = threading.Barrier(8), threading.Barrier(8, action=act)
        return run_episodes(bridge, codec, [Together(begin, second) for _ in range(8)], SAMPLING).episodes

    with slipstream.launch(model_dir, engines=2, engine=ENGINE, run_dir=tmp_path / "run", start_timeout=200) as bridge:
        bridge.sync(sample_params(sample_config(), 0))
        calm = play(bridge, None)
        assert [len({turn.engine for turn in e.turns}) for e in calm] == [1] * 8
        victim = calm[0].turns[0].engine
        (pid,) = [status.info.pid for status in bridge.status().engines if status.info.name == victim]
        after = play(bridge, lambda: os.kill(pid, signal.SIGKILL))
    assert [e.end for e in after] == ["done"] * 8
    assert [e.token_ids for e in after] == [e.token_ids for e in calm]  # seeds belong to requests, not engines
    for e in after:
        first, second, third = (turn.engine for turn in e.turns)
        assert first == second and third != victim


def episode(group, *turns, length=10):
    made = tuple(
        Turn(
            start,
            tokens,
            tuple(-0.5 for _ in tokens),
            tuple(-0.6 for _ in tokens),
            (VersionSpan(0, 0, len(tokens)),),
            "stop",
            "",
            "",
            reward,
        )
        for start, tokens, reward in turns
    )
    return Episode(0, group, 0, tuple(range(length)), made, "done")


def test_a_batch_trains_on_sampled_tokens_only():
    episodes = [
        episode(0, (2, (2, 3), 1.0), (6, (6, 7, 8), 0.5)),
        episode(0, (1, (1,), 0.0), length=2),
        episode(1, (3, (3,), 9.0), length=4),
    ]
    found = episode_advantages(episodes)
    assert found[0] == pytest.approx(1, abs=1e-4) and found[1] == pytest.approx(-1, abs=1e-4) and found[2] == 0
    batch = episode_batch(episodes, found, max_length=17)
    assert batch.tokens.shape == (3, 24) and batch.mask.shape == batch.logprobs.shape == (3, 23)
    assert np.flatnonzero(batch.mask[0]).tolist() == [1, 2, 5, 6, 7] and np.flatnonzero(batch.mask[1]).tolist() == [0]
    assert (batch.logprobs == -0.5 * batch.mask).all() and batch.tokens[0, :10].tolist() == list(range(10))
    assert episode_batch(episodes, found).tokens.shape == (3, 16)
