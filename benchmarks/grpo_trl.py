"""TRL's GRPOTrainer as a side of `grpo_step.py`: with vLLM in its process (`vllm_mode="colocate"`), or on CPU with the
`generate` of transformers. TRL itself is unmodified; methods of the trainer are wrapped to take their time.

vLLM for CPU starts in TRL's process, but the first `load_weights` fails: it has packed its parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_job import Job, even_share, serve
from transformers.training_args import OptimizerNames

from slipstream.rl.reporting.records import Stopwatch


class Clock(transformers.TrainerCallback):
    """Seconds by phase of each step. The device finishes a phase before the next one starts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._watch = Stopwatch()

    def lap(self, phase: str) -> None:
        """End a phase."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._watch.lap(phase)

    def timed(self, owner: Any, method: str, phase: str, around: str, when: Callable[[], bool] = lambda: True) -> None:
        """Take the time of a method as a phase inside the phase `around`, in calls for which `when` is true."""
        original = getattr(owner, method)

        def call(*arguments: Any, **named: Any) -> Any:
            if not when():
                return original(*arguments, **named)
            self.lap(around)
            result = original(*arguments, **named)
            self.lap(phase)
            return result

        setattr(owner, method, call)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._watch = Stopwatch()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.lap("rest")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.lap("train")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.lap("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.lap("rest")
        self.steps.append(self._watch.laps)
        self._watch = Stopwatch()


def run(job: Job) -> dict[str, Any]:
    config = trl.GRPOConfig(**settings(job))
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        if {len(ids) for ids in completion_ids} != {job.completion_tokens} or len(completion_ids) != job.completions:
            raise SystemExit(f"{len(completion_ids)} completions of {sorted(map(len, completion_ids))} tokens came")
        found = [even_share("", "", ids) for ids in completion_ids]
        rewards.append(sum(found) / len(found))
        return list(found)

    prompts = [json.loads(line)["prompt"] for line in Path(job.data).read_text().splitlines()]
    clock = Clock()
    trainer = trl.GRPOTrainer(job.model, reward, config, Dataset.from_dict({"prompt": prompts}), callbacks=[clock])
    clock.timed(trainer, "_generate_and_score_completions", "reward", around="train")
    clock.timed(trainer, "_generate_single_turn", "generate", around="reward")
    if config.use_vllm:
        clock.timed(trainer.vllm_generation, "sync_weights", "sync", around="generate")
    # In the loss the same method is a part of the update.
    clock.timed(
        trainer,
        "_get_per_token_logps_and_entropies",
        "old logprobs",
        around="reward",
        when=lambda: not torch.is_grad_enabled(),
    )
    trainer.train()

    model: Any = trainer.model
    weights = next(model.parameters()).dtype
    engine = "transformers generate, not vLLM"
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    if config.use_vllm:
        import vllm

        engine = f"vLLM, same process, {trainer.vllm_generation.llm.llm_engine.model_config.dtype}"
        versions["vllm"] = vllm.__version__
    on_gpu = torch.cuda.is_available()
    return {
        "steps": clock.steps,
        "rewards": rewards,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "machine": {"device": torch.cuda.get_device_name(0) if on_gpu else "cpu"},
        "does": {
            "generation": engine,
            "weight sync": f"load_weights, parameter by parameter, from {weights}"
            if config.use_vllm
            else "none: one model",
            "master weights": str(weights),
            "compute": f"{'bfloat16' if config.bf16 else str(weights)} (autocast {'on' if config.bf16 else 'off'})",
            "recomputation": f"gradient checkpointing {'on' if config.gradient_checkpointing else 'off'}",
            "optimizer": OptimizerNames(config.optim).value,
            "old logprobs": "computed before the update"
            if any("old logprobs" in step for step in clock.steps)
            else "those of the update",
            "versions": versions,
        },
    }


def settings(job: Job) -> dict[str, Any]:
    own: dict[str, Any] = {
        "output_dir": str(Path(job.result).parent / "trl"),
        "model_init_kwargs": {"dtype": "float32"},
        "max_steps": job.steps,
        "num_generations": job.group,
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": job.completions // job.rows,
        "max_completion_length": job.completion_tokens,
        "shuffle_dataset": False,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "gradient_checkpointing": False,
        "bf16": job.gpu,
        "use_cpu": not job.gpu,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if job.gpu:
        own |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": job.length,
            "generation_kwargs": {"ignore_eos": True},
        }
    else:
        own["generation_kwargs"] = {"min_new_tokens": job.completion_tokens}
    return own | job.options["settings"]


if __name__ == "__main__":
    serve(run)
