"""Training with environments: episodes through the rollout queue, workers that hang or die, tokens and masks."""

import json

import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import ConfigError, EnvironmentFailed
from slipstream.gateway.journal import Journal
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_model
from slipstream.rl.agents.player import open_player
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.config import AlgorithmConfig, DataConfig, EnvironmentConfig, RewardConfig, TaskConfig, TrainConfig
from slipstream.rl.data.tokens import codec_of
from slipstream.rl.reporting.records import Evaluation, StepRecord
from slipstream.rl.trainer.loop import training_loop
from slipstream.types import SamplingParams
from tests.gateway.history import check

ENGINE = EmbeddedConfig(max_num_seqs=16, max_model_len=64)
LETTERS = EnvironmentConfig(
    name="tests.rl.environments:Letters", max_turns=3, max_tokens=12, workers=1, episodes_per_worker=16, step_timeout=20
)
CONFIG = TrainConfig(
    steps=3,
    warmup_steps=0,
    eval_every=3,
    eval_prompts=2,
    save_every=0,
    diagnose_every=2,
    engines=0,
    environment=LETTERS,
    reward=RewardConfig(solved=2.0),
    algorithm=AlgorithmConfig(prompts=4, group=4, max_tokens=1),
    engine=ENGINE,
)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_sample_model(directory)
    with slipstream.inprocess(directory, engine=ENGINE) as opened:
        opened.model_dir = directory
        opened.sync(hf_weights.load(directory))
        yield opened


def play(bridge, config, prompts, n=2, max_tokens=1):
    codec = codec_of(config, bridge.model_dir)
    with open_player(config, bridge, codec) as player:
        params = [SamplingParams(max_tokens, n=n, seed=i, stop_token_ids=codec.stops) for i in range(len(prompts))]
        return codec, player.sample(prompts, params)


def train(bridge, config, run_dir):
    return list(training_loop(config, bridge, bridge.model_dir, run_dir))


def of_kind(kind, records):
    return [record for record in records if isinstance(record, kind)]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_is_one_sequence_whose_environment_text_is_masked(bridge, workers):
    codec, episodes = play(bridge, LETTERS.replace(workers=workers), ["1", "2"])
    assert [e.prompt_index for e in episodes] == [0, 0, 1, 1]
    for episode, letter in zip(episodes, "bbcc"):
        (text,) = codec.decode([episode.token_ids])
        assert codec.decode([episode.prompt_token_ids]) == [f"{letter}="]
        assert [(s.start, s.stop) for s in episode.spans] == [(0, 1), (3, 4)] and text[1:3] == f"{letter}."
        assert (
            episode.episode.rewards == tuple(float(text[i] == letter) for i in (0, 3)) and episode.episode.end == "done"
        )
    batch = make_batch(episodes, version=bridge.version, max_tokens=12)
    start = len(episodes[0].prompt_token_ids) - 1
    assert batch.mask[0, start : start + 5].tolist() == [1, 0, 0, 1, 0] and batch.mask.sum() == 8
    assert (batch.logprobs[batch.mask == 0] == 0).all() and (batch.logprobs[batch.mask == 1] < 0).all()


def test_messages_are_rendered_with_the_chat_template(bridge):
    """The tokens are those of the whole conversation, rendered at once."""
    config = LETTERS.replace(name="tests.rl.environments:Chatty", chat=True, max_turns=2, max_tokens=60)
    codec, (episode,) = play(bridge, config, ["3"], n=1)
    actions = [codec.decode([episode.token_ids[s.start : s.stop]])[0] for s in episode.spans]
    text = f"<|user|>\nb3\n<|assistant|>\n{actions[0]}\n<|tool|>\n7\n<|assistant|>\n{actions[1]}"
    assert codec.decode([episode.prompt_token_ids + episode.token_ids]) == [text]
    ends = codec.answers(["<eos>"])[0]
    assert episode.token_ids[1:2] == ends  # the turn was cut off by max_tokens, and the template ends it
    assert episode.episode.end == "max_turns" and episode.episode.reward == 1.0


@pytest.mark.parametrize("bad", ["die", "hang", "raise"])
def test_an_environment_that_misbehaves_costs_its_own_episodes_only(bad, bridge, tmp_path):
    marks = tmp_path / "marks"
    options = {"bad": bad, "every": 5, "marks": str(marks)}
    config = LETTERS.replace(options=options, step_timeout=2.0 if bad == "hang" else 20.0)
    _, episodes = play(bridge, config, [str(seed) for seed in range(1, 9)])
    failed = {e.prompt_index for e in episodes if e.episode.end == "failed"}
    assert failed == {4}  # seed 5
    for episode in episodes:
        assert np.isnan(episode.episode.reward) == (episode.prompt_index == 4)
    error = episodes[8].episode.error
    expected = {
        "die": "its process ended with exit code 3",
        "hang": "did not return within 2 s",
        "raise": "ValueError: no box",
    }
    assert expected[bad] in error and "seed 5" in error and "turn 1" in error
    if bad == "die":  # each was played again in a process of its own
        assert len(marks.read_text()) >= 3


def test_training_with_an_environment_that_dies(bridge, tmp_path):
    environment = LETTERS.replace(options={"bad": "die", "every": 6})
    records = train(bridge, CONFIG.replace(steps=2, environment=environment), tmp_path)
    steps = of_kind(StepRecord, records)
    assert len(steps) == 2 and any(step.num_dropped for step in steps)
    assert all(step.metrics.ratio == pytest.approx(1, abs=1e-3) for step in steps)
    assert len(of_kind(Evaluation, records)) == 2
    journal = Journal(tmp_path / "episodes.sqlite")
    assert not check(journal, max_staleness=0) and journal.num_taken() == 8  # every group once, none doubled
    journal.close()


def test_all_episodes_failing_ends_the_run_with_the_first_error(bridge, tmp_path):
    config = CONFIG.replace(environment=LETTERS.replace(options={"bad": "raise", "every": 1}))
    with pytest.raises(
        EnvironmentFailed, match=r"all \d+ episodes failed; the first: environment .* raised ValueError: no box"
    ):
        train(bridge, config, tmp_path)


def test_episodes_continue_over_a_sync(bridge, tmp_path):
    config = CONFIG.replace(mode="async", max_staleness=2, steps=4, eval_every=4)
    records = train(bridge, config, tmp_path)
    ages = {age for step in of_kind(StepRecord, records) for age in step.staleness}
    assert ages - {"0"}  # tokens of earlier versions were trained on
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "StepRecord"] == [1, 2, 3, 4]


def test_a_resumed_run_takes_every_group_once(bridge, tmp_path):
    """The second fleet counts versions from where the journal of the first run ended, although it has never heard of it."""
    config = CONFIG.replace(mode="async", max_staleness=1, steps=2, save_every=1, eval_every=9, diagnose_every=0)
    train(bridge, config, tmp_path)
    with slipstream.inprocess(bridge.model_dir, engine=ENGINE) as fresh:
        fresh.model_dir = bridge.model_dir
        records = train(fresh, config.replace(steps=4), tmp_path)
    assert [step.step for step in of_kind(StepRecord, records)] == [3, 4]
    journal = Journal(tmp_path / "episodes.sqlite")
    assert not check(journal, max_staleness=1) and journal.num_taken() == 16
    journal.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": {"name": "nowhere:Env"}, "warmup_steps": 1}, "warmup_steps imitates"),
        (
            {"environment": {"name": "a:b"}, "warmup_steps": 0, "task": {"digits": 2}},
            "one of task, data and environment",
        ),
        ({"environment": {"max_turns": 2}}, "environment.name is missing"),
        ({"data": {"prompt": "q"}}, "data.path is missing"),
        ({"environment": {"name": "a:b"}, "warmup_steps": 0, "reward": {"function": "a:b"}}, "gives the rewards"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.rl.environments:Leters", "did you mean 'Letters'"),
        ("tests.rl.nothing:Env", "there is no module"),
        ("verifiers:gsm8k", "needs the package verifiers"),
        ("openenv:localhost", "write openenv:http://host:port"),
    ],
)
def test_names_that_cannot_be_imported(name, message, bridge):
    with pytest.raises(ConfigError, match=message), open_player(LETTERS.replace(name=name, workers=0), bridge, None):
        pass


def test_unused_sections_are_the_default():
    assert TaskConfig() == TrainConfig().task and DataConfig() == TrainConfig().data
