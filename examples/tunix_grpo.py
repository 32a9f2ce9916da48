"""GRPO with Tunix, with rollouts by Tunix itself or by Slipstream engines in other processes.

    pip install google-tunix
    python examples/tunix_grpo.py --rollout vanilla
    python examples/tunix_grpo.py --rollout slipstream [--engine vllm] [--engines 2] [--steps 20]

Learner, model and loss are Tunix's; the two variants differ in one argument of `ClusterConfig`. A small Qwen3 with
random weights learns to answer in vowels. Prints the reward of every step, and greedy completions before and after
training. Both variants print the same completions before training."""

from __future__ import annotations

import argparse
import string
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from slipstream.config import EmbeddedConfig, VllmConfig
from slipstream.plugins.tunix import SlipstreamRollout

PROMPTS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
PROMPT_TOKENS, ANSWER_TOKENS = 8, 8


class Letters:
    """Tokenizer with Tunix's interface: one token per letter, after padding (0), end (1) and beginning (2) of
    sequence."""

    def encode(self, text: str) -> list[int]:
        return [3 + string.ascii_lowercase.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(string.ascii_lowercase[i - 3] for i in ids if i >= 3)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        return 2


def make_model(seed: int = 6) -> Qwen3:
    """Create a small model with random weights.

    With this seed, greedy decoding ends some answers early and never samples the padding token, which Tunix would drop
    from a completion."""
    config = ModelConfig(
        num_layers=2,
        vocab_size=3 + len(string.ascii_lowercase),
        embed_dim=64,
        hidden_dim=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,  # vLLM's attention on CPU takes multiples of 32
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return Qwen3(config, rngs=nnx.Rngs(seed))


@dataclass
class Run:
    """Results of a run of this script."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    before: list[np.ndarray] = field(default_factory=list)
    """Greedy completions of `PROMPTS` before training, without the end-of-sequence token."""
    after: list[np.ndarray] = field(default_factory=list)
    """The same after training."""
    version: int = -1
    """Final policy version of the engines: the number of syncs after the first."""


def main(argv: list[str] | None = None) -> Run:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout", choices=("vanilla", "slipstream"), default="slipstream")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--python", default="", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args(argv)

    run = Run()

    def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        shares = [sum(letter in "aeiou" for letter in text) / ANSWER_TOKENS for text in completions]
        run.rewards.append(float(np.mean(shares)))
        print(f"step {len(run.rewards):3d}  reward {run.rewards[-1]:.3f}", flush=True)
        return shares

    engine: Any = "vanilla"
    if arguments.rollout == "slipstream":
        settings = VllmConfig(python=arguments.python) if arguments.engine == "vllm" else EmbeddedConfig()
        engine = partial(SlipstreamRollout, engine=settings, engines=arguments.engines, start_timeout=300)
    cluster = make_cluster(make_model(), engine, arguments.steps)
    try:
        run.before = greedy(cluster)
        batch = {"prompts": np.array(PROMPTS)}
        if arguments.steps:
            GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), vowels).train([batch] * arguments.steps)
        run.after = greedy(cluster)
    finally:
        if isinstance(cluster.rollout, SlipstreamRollout):
            last = cluster.rollout.last_sync
            run.version = last.version
            print(f"weights synced {last.version} times, the last sync took {last.total_seconds * 1e3:.1f} ms")
            cluster.rollout.close()
    for prompt, before, after in zip(PROMPTS, run.before, run.after):
        print(f"{prompt:6s} → {Letters().decode(list(before)):8s} → {Letters().decode(list(after))}")
    return run


def make_cluster(model: nnx.Module, rollout_engine: Any, steps: int) -> RLCluster:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    sampled = RolloutConfig(
        max_prompt_length=PROMPT_TOKENS,
        max_tokens_to_generate=ANSWER_TOKENS,
        kv_cache_size=32,
        temperature=1.0,
        seed=0,
    )
    best = RolloutConfig(
        max_prompt_length=PROMPT_TOKENS,
        max_tokens_to_generate=ANSWER_TOKENS,
        kv_cache_size=32,
        temperature=0.0,
        top_p=None,  # Tunix's own rollout is greedy only without top_p
    )
    return RLCluster(
        actor=model,
        tokenizer=Letters(),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
            rollout_engine=rollout_engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=steps + 1, max_steps=steps
            ),
            rollout_config={Mode.TRAIN: sampled, Mode.EVAL: best},
        ),
    )


def greedy(cluster: RLCluster) -> list[np.ndarray]:
    """Return greedy completions, without the end-of-sequence token that only Slipstream's rollout keeps."""
    output = cluster.generate(PROMPTS, mode=Mode.EVAL)
    return [tokens[tokens != Letters().eos_id()] for tokens in output.tokens]


if __name__ == "__main__":
    main()
