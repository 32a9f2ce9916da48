"""A random reward model, and its scores by transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import sample_config, sample_params, write_sample_config
from slipstream.rl.config import AlgorithmConfig, RewardConfig, TaskConfig, TrainConfig
from slipstream.rl.data.tokens import Codec
from slipstream.types import Completion, VersionSpan

PROMPTS, TEXTS = ["r12=", "s", "a long prompt of words: "], ["21", "", "and an answer"]


def write_reward_model(directory: Path) -> Path:
    """Write a model for sequence classification with two labels."""
    write_sample_config(directory)
    config = dataclasses.replace(sample_config(), num_labels=2)
    hf_weights.save(directory, sample_params(config, seed=5), config)
    return directory


def completions(codec: Codec) -> list[Completion]:
    """`TEXTS` as completions of `PROMPTS`."""
    rows = zip(codec.prompts(PROMPTS), codec.answers(TEXTS), strict=True)
    return [
        Completion(
            str(i), 0, prompt, ids, "", (-1.0,) * len(ids), (), "stop", (VersionSpan(0, 0, len(ids)),), prompt_index=i
        )
        for i, (prompt, ids) in enumerate(rows)
    ]


def scores_of_transformers(directory: Path, label: int) -> list[float]:
    """The scores of `TEXTS` for `PROMPTS`."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    end = read_config(directory).eos_token_ids[:1]
    prompts = Codec(directory).prompts([prompt + text for prompt, text in zip(PROMPTS, TEXTS)])
    with torch.no_grad():
        return [model(torch.tensor([[*ids, *end]])).logits[0, label].item() for ids in prompts]


def short_run(run_dir: Path, directory: Path, **reward: Any) -> TrainConfig:
    """Two steps with the reward model of `directory`; the policy is in the trainer's process."""
    return TrainConfig(
        run_dir=run_dir,
        steps=2,
        warmup_steps=0,
        eval_every=2,
        eval_prompts=2,
        save_every=0,
        diagnose_every=0,
        engines=0,
        patience=0,
        task=TaskConfig(digits=2),
        reward=RewardConfig(model=directory, model_weight=2.0, **reward),
        algorithm=AlgorithmConfig(prompts=4, group=4, max_tokens=3),
        engine=EmbeddedConfig(max_num_seqs=16, max_model_len=16),
    )
