"""A reward model on the embedded engine: its scores beside those of transformers, its errors, and a training run."""

import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import ConfigError, InvalidPrompt, Unsupported
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import RewardConfig
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.reward_model import RewardModel, check_reward_model
from slipstream.types import SamplingParams
from tests.rl.reward_models import (
    PROMPTS,
    completions,
    scores_of_transformers,
    short_run,
    write_reward_model,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def bridge(directory):
    with slipstream.inprocess(directory, engine=EmbeddedConfig(max_num_seqs=8, max_model_len=64)) as opened:
        yield opened


@pytest.mark.parametrize("label", [0, 1])
def test_scores_equal_those_of_transformers(label, bridge, directory):
    pytest.importorskip("transformers")
    codec = Codec(directory)
    rewards = RewardModel(bridge, RewardConfig(model=directory, model_label=label), codec).score(
        completions(codec), PROMPTS
    )
    assert rewards == pytest.approx(scores_of_transformers(directory, label), abs=1e-4)
    assert len(set(rewards.round(4))) == 3


def test_it_generates_nothing(bridge):
    with pytest.raises(Unsupported, match="serves a model for sequence classification"):
        bridge.generate(["r12="], SamplingParams(max_tokens=1))
    with pytest.raises(Unsupported, match="has no likely tokens"):
        bridge.score([[4, 5]], top_k=1)
    with pytest.raises(InvalidPrompt, match="sequence 0 ends with 2, the label to score; this model has labels 0 to 1"):
        bridge.score([[4, 2]])


def test_what_cannot_be_a_reward_model(directory, tmp_path):
    write_sample_config(tmp_path)
    with pytest.raises(ConfigError, match=r"is a language model; a reward model is one for sequence classification"):
        check_reward_model(RewardConfig(model=tmp_path))
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"has no weights \(safetensors\)"):
        check_reward_model(RewardConfig(model=tmp_path))
    with pytest.raises(ConfigError, match=r"model_label is 2, but .* has labels 0 to 1"):
        check_reward_model(RewardConfig(model=directory, model_label=2))
    with pytest.raises(ConfigError, match=r"model_engine\.kind must be one of 'embedded', 'vllm', got 'remote'"):
        RewardConfig(model=directory, model_engine={"kind": "remote", "url": "http://localhost:8000"})
    with pytest.raises(ConfigError, match=r"model_engines = 0 .* needs model_engine\.kind = 'embedded', got 'vllm'"):
        RewardConfig(model=directory, model_engine="vllm", model_engines=0)


def test_a_run_whose_reward_is_a_model(directory, tmp_path):
    steps = slipstream.train(short_run(tmp_path / "run", directory, model_engines=0)).steps
    assert len(steps) == 2 and all(step.reward != 0 and step.metrics.gradient_norm > 0 for step in steps)
