"""Multi-turn GRPO with tool use, on CPU in one process: the policy calls a calculator, reads its output, and answers.

    python examples/tool_use.py [--steps 60] [--warmup 30]

The small demo model cannot add. An episode:

    environment   3+4=            question
    policy        3+4?            tool call
    environment   07;             tool output
    policy        07              answer

A correct call earns 0.2 and a correct answer 1; anything else earns 0. Prints the share of both during training, and an
episode from the first and the last step."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints.sample_model import EOS, sample_params, write_sample_config
from slipstream.rl.agents.environments import Observation
from slipstream.rl.agents.episodes import Episode, episode_advantages, episode_batch
from slipstream.rl.agents.multi_turn import run_episodes
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.data.tasks import Split
from slipstream.rl.data.tokens import Codec
from slipstream.rl.trainer import supervised
from slipstream.types import SamplingParams

GROUP, GROUPS, MAX_LENGTH = 8, 8, 24
CONFIG = AlgorithmConfig(prompts=GROUPS, group=GROUP, max_tokens=5)


def question(seed: int) -> str:
    left, right = np.random.default_rng(seed).integers(10, size=2)
    return f"{left}+{right}"


def calculate(call: str) -> str:
    """Return the tool's output: `"07;"` for `"3+4?"`, and `"??;"` for a malformed call."""
    match = re.fullmatch(r"(\d)\+(\d)\?", call)
    return f"{int(match[1]) + int(match[2]):02d};" if match else "??;"


class Calculator:
    """Environment that asks for a sum, executes one tool call, and scores the answer."""

    def reset(self, seed: int) -> Observation:
        self.asked, self.called = question(seed), False
        return Observation(f"{self.asked}=")

    def step(self, action: str) -> tuple[Observation, float, bool]:
        if not self.called:
            self.called = True
            return Observation(calculate(action)), 0.2 * (action == f"{self.asked}?"), False
        return Observation(""), float(f"{action};" == calculate(f"{self.asked}?")), True


class Imitation:
    """Both turns as a supervised task. The warm-up makes some episodes succeed, so that RL has a reward signal."""

    name = "calculator"

    def prompts(self, rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
        asked = [question(int(seed)) for seed in rng.integers(2**32, size=count)]
        return [f"{q}=" if i % 2 else f"{q}={q}?{EOS}{calculate(f'{q}?')}" for i, q in enumerate(asked)]

    def answer(self, prompt: str) -> str:
        return prompt[-3:-1] if prompt.endswith(";") else f"{prompt[:-1]}?"

    def reward(self, prompt: str, text: str) -> float:
        return float(text == self.answer(prompt))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=30, help="supervised steps before RL")
    options = parser.parse_args(arguments)
    sampling, rewards = SamplingParams(max_tokens=CONFIG.max_tokens, seed=0), []
    with tempfile.TemporaryDirectory() as directory:
        model, codec = write_sample_config(directory), Codec(Path(directory))
        params = sample_params(model, seed=0)
        for warmed, _ in supervised.warm_up(params, model, Imitation(), codec, steps=options.warmup, seed=(0,)):
            params = warmed
        train_step, state = make_train_step(model, CONFIG), init_state(params, model, CONFIG)

        engine = EmbeddedConfig(max_num_seqs=16, max_model_len=MAX_LENGTH)
        with slipstream.inprocess(directory, engine=engine) as bridge:
            bridge.sync(params)
            for step in range(1, options.steps + 1):
                environments = [Calculator() for _ in range(GROUP * GROUPS)]
                episodes = run_episodes(
                    bridge, codec, environments, sampling, group=GROUP, max_turns=2, seed=step, step_timeout=10
                ).episodes
                batch = episode_batch(episodes, episode_advantages(episodes), MAX_LENGTH)
                state, metrics = jax.block_until_ready(train_step(state, batch))
                bridge.sync(state.policy)
                rewards.append(float(np.mean([e.reward for e in episodes])))
                show(step, options.steps, episodes, rewards[-1], float(metrics["ratio"]))
    return rewards


def show(step: int, steps: int, episodes: Sequence[Episode], reward: float, ratio: float) -> None:
    if step == 1 or step == steps or step % 10 == 0:
        calls, answers = (np.mean([e.rewards[turn] > 0 for e in episodes]) for turn in (0, 1))
        print(
            f"step {step:3d}  reward {reward:.3f}  correct calls {calls:.2f}  correct answers {answers:.2f}  "
            f"ratio {ratio:.5f}"
        )
    if step in (1, steps):
        actions = " → ".join(repr(turn.action) for turn in episodes[0].turns)
        print(f"          {question(episodes[0].seed)}=  {actions}  reward {episodes[0].reward:g}")


if __name__ == "__main__":
    main()
