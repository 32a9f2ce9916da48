"""The trainer's logprobs of the embedded engine's tokens on a GPU: equal to the bit in deterministic mode."""

from __future__ import annotations

import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.sequence_logprobs import SequenceLogprobs
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.config import AlgorithmConfig, TaskConfig, TrainConfig
from slipstream.types import Completion
from tests.conformance.engines import request
from tests.gpu import models
from tests.gpu.models import serving

pytestmark = pytest.mark.gpu

OPTIONS = {"max_num_seqs": 64, "block_size": 16, "deterministic": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_the_engines_to_the_bit(dtype: str, temperature: float) -> None:
    """Groups of samples, prompts of several chunks, and a second time from the prefix cache."""
    params, rng = models.lively(models.SMALL, dtype), np.random.default_rng(3)
    lengths = rng.integers(1, 250, 16).tolist()
    requests = [
        request(
            str(i),
            rng.integers(8, models.SMALL.vocab_size, n).tolist(),
            n=4,
            seed=i,
            max_tokens=48,
            temperature=temperature,
        )
        for i, n in enumerate(lengths)
    ]
    with serving(models.SMALL, params, dtype=dtype, **OPTIONS) as subject:
        outcomes = [*subject.generate(*requests), *subject.generate(*requests)]
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    batch = make_batch(outcomes, version=0, max_tokens=48)
    found = SequenceLogprobs(models.SMALL, EmbeddedConfig(dtype=dtype, **OPTIONS))(
        params, batch.tokens, batch.mask > 0, temperature
    )
    gaps = np.abs(found - batch.logprobs)[batch.mask > 0]
    print(f"\n{(gaps == 0).mean():.1%} of {gaps.size} tokens equal, at most {gaps.max():.1e} apart")
    assert gaps.max() == 0


@pytest.mark.parametrize("engines", [0, 1], ids=["engine in this process", "engine in another process"])
def test_a_whole_run_is_on_policy_to_the_bit(engines: int, tmp_path) -> None:
    """In another process, XLA chooses how to multiply matrices a second time."""
    config = TrainConfig(
        run_dir=tmp_path,
        engines=engines,
        share_gpus=True,
        deterministic=True,
        steps=5,
        warmup_steps=2,
        eval_prompts=4,
        save_every=0,
        task=TaskConfig(digits=3),
        algorithm=AlgorithmConfig(prompts=16, group=8, max_tokens=8),
        engine=EmbeddedConfig(max_num_seqs=128, max_model_len=32),
    )
    for step in slipstream.train(config).steps:
        print(f"\nstep {step.step}: gap {step.metrics.gap:.1e}, {step.metrics.equal_share:.1%} of tokens equal", end="")
        assert step.metrics.gap == 0
        # XLA divides float32 approximately on a GPU, so that the mean of ones may be 1.0000001.
        assert (step.metrics.equal_share, step.metrics.ratio) == pytest.approx((1, 1), abs=1e-6)
