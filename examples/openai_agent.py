"""GRPO with an agent that speaks OpenAI's API, on CPU: the agent is plain `openai` code, and knows nothing of training.

    python examples/openai_agent.py [--steps 20]

The agent asks a tiny model for a letter of the alphabet's first half, and tells it when it was wrong. Its chats run in sessions
of the gateway, which keep the exact tokens; the reward is high if few turns were needed. Needs the openai package."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import openai

import slipstream
from slipstream.bridge.agent_sessions import AgentEndpoint
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import sample_params
from slipstream.rl.agents.api_agent import ApiAgent
from slipstream.rl.agents.episodes import episode_advantages, episode_batch
from slipstream.rl.agents.multi_turn import run_episodes
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig
from slipstream.rl.data.tokens import Codec
from slipstream.types import SamplingParams

GROUP, GROUPS, TURNS, MAX_LENGTH = 8, 4, 2, 128
WANTED = frozenset("abcdefghijklm")


def play(endpoint: AgentEndpoint) -> float:
    """Play one episode; return its reward."""
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "a letter?"}]
        for turn in range(TURNS):
            answer = client.chat.completions.create(model=endpoint.model, messages=messages)
            if WANTED & set(answer.choices[0].message.content or ""):
                return 1.0 - turn / TURNS
            messages += [answer.choices[0].message, {"role": "user", "content": "no."}]
    return 0.0


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps, rewards = parser.parse_args(arguments).steps, list[float]()
    config = AlgorithmConfig(prompts=GROUPS, group=GROUP, max_tokens=2)
    with tempfile.TemporaryDirectory() as directory:
        slipstream.write_sample_model(directory)  # for its tokenizer and chat template
        model, codec = read_config(directory), Codec(directory)
        step, state = make_train_step(model, config), init_state(sample_params(model, seed=0), model, config)
        engine = EmbeddedConfig(max_num_seqs=GROUP * GROUPS, max_model_len=MAX_LENGTH)
        with slipstream.launch(directory, engine=engine, http=True) as bridge:
            bridge.sync(state.policy)
            for number in range(1, steps + 1):
                agents = [ApiAgent(play) for _ in range(GROUP * GROUPS)]
                sampling = SamplingParams(max_tokens=config.max_tokens, seed=number)
                episodes = run_episodes(bridge, codec, agents, sampling, group=GROUP, seed=number).episodes
                batch = episode_batch(episodes, episode_advantages(episodes), MAX_LENGTH)
                state, _ = jax.block_until_ready(step(state, batch))
                bridge.sync(state.policy)
                rewards.append(float(np.mean([episode.reward for episode in episodes])))
                print(
                    f"step {number:3d}  reward {rewards[-1]:.3f}  turns {np.mean([len(e.turns) for e in episodes]):.2f}"
                )
    return rewards


if __name__ == "__main__":
    main()
