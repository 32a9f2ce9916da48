"""What on-policy to the bit costs: GRPO steps with `deterministic` and without it, and how far trainer and engine differ.

    python benchmarks/on_policy.py [--steps 10] [--json benchmarks/results/on_policy_cpu.json]
    python benchmarks/on_policy.py --gpu [--json benchmarks/results/on_policy_gpu.json]

Trainer and embedded engine in one process, random weights, lengths fixed by `ignore_eos`, rewards by parity of the tokens.
The two loops alternate step by step, so that a noisy machine slows both equally. Differences are measured in every step, under
the sampling distribution and outside of the step's time. The first steps, which compile, do not count. The
exit code is 1 if a logprob of the deterministic loop differs, and 0 even if the target for the cost is missed.

CPU: 7 million parameters in float32. --gpu: the 1.24B Llama shape, float32 in the trainer and bfloat16 in the engine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import describe_device
from rich.console import Console
from rich.progress import track
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.model.checkpoints import hf_config
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.config import AlgorithmConfig, OptimizerConfig
from slipstream.rl.trainer.learner import Learner
from slipstream.types import SamplingParams

COST_TARGET = 0.15
WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Case:
    model: ModelConfig
    engine: EmbeddedConfig
    algorithm: AlgorithmConfig
    prompt_tokens: int


CPU = Case(
    ModelConfig(
        "llama", vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=6, num_heads=8, num_kv_heads=4,
        head_dim=32, max_position_embeddings=256,
    ),
    EmbeddedConfig(max_num_seqs=64, max_model_len=128),
    AlgorithmConfig(prompts=8, group=8, max_tokens=64, temperature=0.8, optimizer=OptimizerConfig(learning_rate=1e-4)),
    prompt_tokens=48,
)  # fmt: skip
GPU = Case(
    ModelConfig(
        "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True, max_position_embeddings=2048,
    ),
    EmbeddedConfig(max_num_seqs=256, max_model_len=1024, dtype="bfloat16", kv_cache_tokens=1 << 18),
    AlgorithmConfig(
        prompts=32, group=8, max_tokens=256, micro_batches=32, optimizer=OptimizerConfig(learning_rate=1e-6)
    ),
    prompt_tokens=256,
)  # fmt: skip


@dataclass
class Steps:
    """The measured steps of a loop."""

    generate: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    max_gap: list[float] = field(default_factory=list)
    equal_share: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    """Mean ratio of the update."""

    def summary(self) -> dict[str, Any]:
        times = {name: 1e3 * statistics.median(getattr(self, name)) for name in ("generate", "train", "sync", "total")}
        return {
            "milliseconds": times,
            "max_gap": max(self.max_gap),
            "equal_share": statistics.mean(self.equal_share),
            "largest_deviation_of_a_mean_ratio_from_1": max(abs(ratio - 1) for ratio in self.ratio),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="the 1.24B shape on a GPU")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per loop")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    results = measure(GPU if arguments.gpu else CPU, arguments.steps)
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(results["deterministic"]["max_gap"] != 0)


def measure(case: Case, steps: int) -> dict[str, Any]:
    params = decoder.init(case.model, jax.random.key(0))
    with ExitStack() as stack:
        model_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_sample_config(model_dir)  # the tokenizer
        (model_dir / "config.json").write_text(json.dumps(hf_config.to_hf(case.model)))
        loops = {}
        for name in ("default", "deterministic"):
            engine = case.engine.replace(deterministic=name == "deterministic")
            bridge = stack.enter_context(slipstream.inprocess(model_dir, engine=engine))
            exact = SequenceLogprobs(case.model, engine) if engine.deterministic else None
            learner = Learner(case.algorithm, case.model, params, seed=0, exact=exact)
            loops[name] = (Steps(), loop(case, bridge, learner))
        for number in track(range(WARMUP_STEPS + steps), "alternating steps"):
            order = list(loops) if number % 2 else list(reversed(loops))
            for name in order:
                found, records = loops[name]
                record = next(records)
                for column, value in record.items() if number >= WARMUP_STEPS else ():
                    getattr(found, column).append(value)
    summaries = {name: found.summary() for name, (found, _) in loops.items()}
    cost = summaries["deterministic"]["milliseconds"]["total"] / summaries["default"]["milliseconds"]["total"] - 1
    return {
        "machine": describe_device(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "samples": case.algorithm.prompts * case.algorithm.group,
        "prompt_tokens": case.prompt_tokens,
        "completion_tokens": case.algorithm.max_tokens,
        "steps": steps,
        **summaries,
        "cost": {"target": COST_TARGET, "measured": cost, "passed": cost <= COST_TARGET},
    }


def loop(case: Case, bridge: Bridge, learner: Learner) -> Iterator[dict[str, float]]:
    """GRPO steps; yields each one's times, and how far trainer and engine differ."""
    config, rng = case.algorithm, np.random.default_rng(1)
    bridge.sync(learner.policy)
    for step in range(1, 1 << 30):
        prompts = [rng.integers(8, case.model.vocab_size, case.prompt_tokens).tolist() for _ in range(config.prompts)]
        sampling = SamplingParams(
            temperature=config.temperature, max_tokens=config.max_tokens, n=config.group, ignore_eos=True, seed=step
        )
        start = time.perf_counter()
        completions = list(bridge.generate(prompts, sampling))
        generated = time.perf_counter()
        rewards = np.array([sum(c.token_ids) % 2 for c in completions], np.float32).reshape(config.prompts, -1)
        batch = make_batch(completions, version=bridge.version, max_tokens=config.max_tokens)
        batch = learner.prepare(batch, rewards)
        aside = time.perf_counter()
        sampled = batch.mask > 0
        gaps = np.abs(learner.logprobs(batch, config.temperature) - batch.logprobs)[sampled]
        resumed = time.perf_counter()
        metrics = learner.update(step, batch)
        trained = time.perf_counter()
        bridge.sync(learner.policy)
        end = time.perf_counter()
        yield {
            "generate": generated - start,
            "train": trained - resumed,
            "sync": end - trained,
            "total": end - start - (resumed - aside),
            "max_gap": float(gaps.max()),
            "equal_share": float((gaps == 0).mean()),
            "ratio": metrics.ratio,
        }


def show(results: dict[str, Any], console: Console) -> None:
    sides = ("default", "deterministic")
    table = Table("median of a step", *sides, "ratio", title=f"{results['steps']} steps each")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("generate", "train", "sync", "total"):
        plain, exact = (results[side]["milliseconds"][name] for side in sides)
        table.add_row(name, f"{plain:.1f} ms", f"{exact:.1f} ms", f"{exact / plain:.2f}")
    table.add_row("max |trainer − engine|", *(f"{results[side]['max_gap']:.1e}" for side in sides))
    table.add_row("tokens equal to the bit", *(f"{results[side]['equal_share']:.1%}" for side in sides))
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    cost = results["cost"]
    verdict = "[green]PASS[/]" if cost["passed"] else "[red]FAIL[/]"
    console.print(f"{verdict}  cost of a step: {cost['measured']:.1%} (target at most {cost['target']:.0%})")


if __name__ == "__main__":
    main()
