"""Routing replay: how far trainer and engine differ with the engine's experts, and with the trainer's own.

    python benchmarks/routing_replay.py [--json benchmarks/results/routing_replay_cpu.json]
    python benchmarks/routing_replay.py --gpu [--json benchmarks/results/routing_replay_gpu.json]

A random model with experts; trainer and embedded engine in one process, with the same weights. Groups of samples are drawn
twice, the second time from the prefix cache. In the first case the engine computes in bfloat16 and the trainer in float32, in
the second both in bfloat16, by programs that add in another order. `agreement` is the share of tokens and layers in which the
trainer sends a token to the engine's experts. KL(engine ‖ trainer) is the k3 estimate over the sampled tokens.

The exit code is 1 if routes are missing, or if the KL of the first case is not five times lower with replay."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import describe_device
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints import hf_config
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.families import tensors
from slipstream.model.transformer import decoder
from slipstream.model.tree import unflatten
from slipstream.observe.mismatch import kl_per_token
from slipstream.rl.algorithm.batch import Batch, make_batch, unknown_expert
from slipstream.rl.config import AlgorithmConfig, ComputeConfig
from slipstream.rl.trainer.learner import Learner
from slipstream.types import Completion, SamplingParams

KL_TARGET = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    model: ModelConfig
    prompts: int
    group: int
    prompt_tokens: int
    max_tokens: int


CPU = Case(
    ModelConfig(
        "qwen3_moe", vocab_size=512, hidden_size=64, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position_embeddings=256, moe=MoeConfig(num_experts=16, experts_per_token=2, intermediate_size=64),
    ),
    prompts=8, group=8, prompt_tokens=40, max_tokens=32,
)  # fmt: skip
GPU = Case(
    ModelConfig(
        "qwen3_moe", vocab_size=32_768, hidden_size=1024, intermediate_size=384, num_layers=12, num_heads=16, num_kv_heads=4,
        head_dim=64, max_position_embeddings=1024, moe=MoeConfig(num_experts=64, experts_per_token=8, intermediate_size=384),
    ),
    prompts=32, group=8, prompt_tokens=256, max_tokens=128,
)  # fmt: skip
DTYPES = {"engine bfloat16, trainer float32": ("bfloat16", "float32"), "both bfloat16": ("bfloat16", "bfloat16")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="a larger model, on a GPU")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    case = GPU if arguments.gpu else CPU
    results = {
        "machine": describe_device(),
        "cases": {name: measure(case, *dtypes) for name, dtypes in DTYPES.items()},
    }
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    first = next(iter(results["cases"].values()))
    sys.exit(first["agreement"]["replayed"] < 1 or first["kl_ratio"] < KL_TARGET)


def random_weights(model: ModelConfig) -> decoder.Params:
    """Matrices that keep the size of activations, in values that bfloat16 has: trainer and engine have the same weights."""
    leaves = {}
    for index, spec in enumerate(tensors(model)):
        leaf = jnp.ones(spec.shape)
        if len(spec.shape) > 1:
            leaf = jax.random.normal(jax.random.fold_in(jax.random.key(0), index), spec.shape) / spec.shape[1] ** 0.5
        leaves[spec.name] = leaf.astype(jnp.bfloat16).astype(jnp.float32)
    return unflatten(leaves)


def measure(case: Case, engine_dtype: Any, trainer_dtype: Any) -> dict[str, Any]:
    params = random_weights(case.model)
    completions = drawn(case, params, engine_dtype)
    compute = ComputeConfig(dtype=trainer_dtype)
    config = AlgorithmConfig(prompts=2 * case.prompts, group=case.group, max_tokens=case.max_tokens, compute=compute)
    learner = Learner(config, case.model, params, seed=0)
    batch = make_batch(completions, version=0, max_tokens=case.max_tokens, replay_routes=True)
    logprobs = {"replayed": learner.logprobs(batch, 1.0), "own": learner.logprobs(batch._replace(routes=None), 1.0)}
    kl = {way: kl_per_token(each, batch.logprobs, batch.mask) for way, each in logprobs.items()}
    rewards = np.array([sum(c.token_ids) % 2 for c in completions], np.float32).reshape(-1, case.group)
    metrics = learner.update(1, learner.prepare(batch, rewards))
    sampled, routes = batch.mask > 0, completions[0].routes
    assert routes is not None
    return {
        "tokens": int(sampled.sum()),
        "agreement": {**agreement(case, params, batch, trainer_dtype), "own_after_replay": metrics.route_agreement},
        "kl": kl,
        "kl_ratio": kl["own"] / kl["replayed"],
        "mean_gap": {way: float(np.abs(each - batch.logprobs)[sampled].mean()) for way, each in logprobs.items()},
        "largest_gap": {way: float(np.abs(each - batch.logprobs)[sampled].max()) for way, each in logprobs.items()},
        "bytes_per_token": len(routes.experts) / routes.num_tokens,
    }


def drawn(case: Case, params: decoder.Params, dtype: Any) -> list[Completion]:
    length = case.prompt_tokens + case.max_tokens
    engine = EmbeddedConfig(max_num_seqs=64, max_model_len=length, dtype=dtype, block_size=16, record_routes=True)
    prompts = np.random.default_rng(0).integers(8, case.model.vocab_size, (case.prompts, case.prompt_tokens)).tolist()
    with tempfile.TemporaryDirectory() as directory:
        write_sample_config(Path(directory))  # the tokenizer
        Path(directory, "config.json").write_text(json.dumps(hf_config.to_hf(case.model)))
        with slipstream.inprocess(directory, engine=engine) as bridge:
            bridge.sync(params)
            completions: list[Completion] = []
            for seed in (1, 2):
                sampling = SamplingParams(max_tokens=case.max_tokens, n=case.group, ignore_eos=True, seed=seed)
                completions += bridge.generate(prompts, sampling)
    return completions


def agreement(case: Case, params: decoder.Params, batch: Batch, dtype: str) -> dict[str, float]:
    """With replay, the share of routes that the engine has recorded, all of which are used. Without, the share that the
    trainer's own forward pass has in common with the engine's."""
    assert batch.routes is not None
    length = case.prompt_tokens + case.max_tokens - 1  # the last token is not read
    routes = batch.routes[:, :length]

    @jax.jit
    def own(params: decoder.Params, tokens: jax.Array) -> list[jax.Array]:
        positions = jnp.arange(tokens.shape[1])[None]
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return decoder.apply_layers(params, case.model, tokens, positions, decoder.causal_attention, None)[2]

    parts = [np.stack(own(params, part[:, :length]), axis=2) for part in np.array_split(batch.tokens, 8)]
    same = (np.sort(np.concatenate(parts), axis=-1) == np.sort(routes, axis=-1)).all(axis=-1)
    return {"replayed": float((routes != unknown_expert(routes.dtype)).mean()), "own": float(same.mean())}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("", *results["cases"])
    rows = {
        "sampled tokens": lambda case: f"{case['tokens']:,}",
        "agreement with replay": lambda case: f"{case['agreement']['replayed']:.1%}",
        "agreement without": lambda case: f"{case['agreement']['own']:.1%}",
        "KL with replay": lambda case: f"{case['kl']['replayed']:.2e}",
        "KL without": lambda case: f"{case['kl']['own']:.2e}",
        "ratio": lambda case: f"{case['kl_ratio']:.1f}",
        "largest gap with replay": lambda case: f"{case['largest_gap']['replayed']:.3f}",
        "largest gap without": lambda case: f"{case['largest_gap']['own']:.3f}",
        "bytes of routes per token": lambda case: f"{case['bytes_per_token']:.0f}",
    }
    for name, text in rows.items():
        table.add_row(name, *(text(case) for case in results["cases"].values()))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))


if __name__ == "__main__":
    main()
