"""Slipstream as a side of `grpo_step.py`: `slipstream train` with the embedded engine in the trainer's process, or with vLLM in
a process of its own on the same GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from grpo_job import Job, serve
from machine import describe_device

import slipstream
from slipstream.config import load
from slipstream.engines.embedded.compute import program_choice
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.rl.algorithm import compute
from slipstream.rl.algorithm.batch import padded_length
from slipstream.rl.config import TrainConfig
from slipstream.rl.reporting.records import Record, StepRecord
from slipstream.rl.trainer.session import TrainSession


def run(job: Job) -> dict[str, Any]:
    program_choice.PATIENCE = 0  # the embedded engine compiles in the warm-up, and not later
    settings = {
        "model": job.model,
        "run_dir": str(Path(job.result).with_suffix(".run")),
        "steps": job.steps + 1,  # the last step is not taken: it ends with an evaluation and an export
        "warmup_steps": 0,
        "eval_prompts": 1,
        "eval_every": job.steps + 1,
        "save_every": 0,
        "data.path": job.data,
        "data.order": "file",
        "data.holdout": 0.0,
        "reward.function": "grpo_job:even_share",
        "algorithm.prompts": job.prompts,
        "algorithm.group": job.group,
        "algorithm.max_tokens": job.completion_tokens,
        "algorithm.micro_batches": job.completions // job.rows,
        "algorithm.optimizer.kind": "adamw",
        "algorithm.optimizer.learning_rate": job.learning_rate,
        "engine.max_num_seqs": job.completions,
        "engine.max_model_len": job.length,
        "engine.dtype": job.dtype,
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in (settings | job.options["settings"]).items()]
    config = load(TrainConfig, None, overrides)
    steps, rewards, transport = [], [], ""
    with TrainSession(config) as session:
        records = cast(Generator[Record], session.records())
        last = time.perf_counter()
        for record in records:
            now = time.perf_counter()
            if isinstance(record, StepRecord):
                steps.append(phases(record, now - last))
                rewards.append(record.reward)
                transport = record.sync.engines[0].transport
                if record.num_tokens != job.completions * job.completion_tokens:
                    raise SystemExit(f"{record.num_tokens} tokens were generated; is there an end-of-sequence token?")
                if len(steps) == job.steps:
                    break
            last = now
        records.close()
    algorithm, platform = config.algorithm.compute, compute.platform()
    dtype = compute.compute_dtype(algorithm, platform) or job.dtype
    length = padded_length(job.length) - 1
    plan = compute.make_plan(algorithm, read_config(job.model), job.rows, length, jnp.dtype(dtype).itemsize)
    return {
        "steps": steps,
        "rewards": rewards,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "machine": describe_device(),
        "does": {
            "generation": f"{config.engine.kind} engine, {'own' if config.engines else 'same'} process, {job.dtype}",
            "weight sync": transport,
            "master weights": compute.param_dtype(algorithm, platform) or job.dtype,
            "compute": f"{dtype}, attention {plan.attention}",
            "recomputation": f"remat {plan.remat}",
            "optimizer": f"{config.algorithm.optimizer.kind}, in the compiled update, whose time is `train`",
            "old logprobs": "those of the engine",
            "versions": {"slipstream": slipstream.__version__, "jax": jax.__version__},
        },
    }


def phases(record: StepRecord, wall: float) -> dict[str, float]:
    seconds = record.seconds
    parts = {
        "generate": seconds.generate,
        "reward": seconds.prepare + seconds.reward,
        "train": seconds.train,
        "sync": seconds.sync,
    }
    return parts | {"rest": wall - sum(parts.values())}


if __name__ == "__main__":
    serve(run)
