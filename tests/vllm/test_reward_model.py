"""A reward model on vLLM's pooling runner, one engine for all tests: its scores beside those of transformers, and its errors.
`tests/rl/test_reward_model.py` compares those of the embedded engine, for the same model and the same texts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import VllmConfig
from slipstream.errors import DeadlineExceeded, EngineLost, InvalidPrompt, NotReady, Unsupported
from slipstream.rl.config import TrainConfig
from slipstream.rl.data.tasks import task_named
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.reward_model import RewardModel
from slipstream.rl.rewards.scoring import open_scorer
from slipstream.rl.trainer.session import open_reward_model
from slipstream.types import SamplingParams
from tests.rl.reward_models import (
    PROMPTS,
    completions,
    scores_of_transformers,
    short_run,
    write_reward_model,
)
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("run")
    # Prompts are computed in parts, and are longer than a block of the cache.
    engine = VllmConfig(
        python=PYTHON, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, vllm={"block_size": 32}
    )
    return short_run(folder, write_reward_model(folder / "model"), model_label=1, model_engine=engine)


FORKS = """
import multiprocessing
from after_import import after_import

def patch(module):
    module.get_mp_context = lambda: multiprocessing.get_context("fork")

after_import("vllm.utils.system_utils", patch)
"""
"""Runs in every Python process of the fleet. Else vLLM would spawn its processes, and each would import vLLM."""


@pytest.fixture(scope="module")
def bridge(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    patches = tmp_path_factory.mktemp("patches")
    (patches / "sitecustomize.py").write_text(FORKS)
    shutil.copy(Path(__file__).with_name("after_import.py"), patches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(patches), prepend=os.pathsep)
        with open_reward_model(config, Path(config.run_dir) / "reward") as opened:
            assert opened is not None
            yield opened


def test_scores_equal_those_of_transformers(bridge: Bridge, config: TrainConfig) -> None:
    directory = Path(config.reward.model)
    codec = Codec(directory)
    rewards = RewardModel(bridge, config.reward, codec).score(completions(codec), PROMPTS)
    assert rewards == pytest.approx(scores_of_transformers(directory, 1), abs=1e-4)
    again = RewardModel(bridge, config.reward, codec).score(completions(codec), PROMPTS)  # from the prefix cache
    assert again == pytest.approx(rewards, abs=1e-5)


def test_it_generates_nothing(bridge: Bridge) -> None:
    with pytest.raises(Unsupported, match="serves a model for sequence classification"):
        bridge.generate(["r12="], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidPrompt, match="sequence 0 ends with 2, the label to score; this model has labels 0 to 1"):
        bridge.score([[4, 2]])


def test_a_run_weighs_its_scores(bridge: Bridge, config: TrainConfig) -> None:
    codec = Codec(Path(config.reward.model))
    with open_scorer(config, task_named(config.task, size=1), codec, bridge) as score:
        rewards = score(completions(codec), PROMPTS).rewards
    assert rewards == pytest.approx(RewardModel(bridge, config.reward, codec).score(completions(codec), PROMPTS) * 2)
    assert bridge.version == 0  # nothing was synced


def test_a_score_has_a_deadline(bridge: Bridge, config: TrainConfig) -> None:
    codec = Codec(Path(config.reward.model))
    bridge.pause()
    with slipstream.connect(bridge.run_dir, timeout=0.3) as impatient:
        model = RewardModel(impatient, config.reward, codec)
        with pytest.raises(DeadlineExceeded, match=rf"the reward model {config.reward.model}: .*scoring"):
            model.score(completions(codec), PROMPTS)
    bridge.resume()
    assert bridge.score([[4, 1]])


def test_a_killed_engine_is_named(bridge: Bridge, config: TrainConfig) -> None:
    """Must run last."""
    codec = Codec(Path(config.reward.model))
    model = RewardModel(bridge, config.reward, codec)
    os.kill(bridge.status().engines[0].info.pid, signal.SIGKILL)
    with pytest.raises((EngineLost, NotReady), match=rf"the reward model {config.reward.model}: .*engine-0"):
        model.score(completions(codec), PROMPTS)
