"""Conformance suite with real vLLM on a GPU. Updates read the weights from the GPU memory of this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.model.checkpoints import hf_weights
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.engines.attached import attached
from tests.gpu.vllm import PYTHON, needs_vllm
from tests.tiny import random_params, tiny_config
from tests.vllm.argument_results import PROMISE_OF

pytestmark = [pytest.mark.gpu, needs_vllm]


V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
EAGER, TWO_RANKS = ("enforce_eager=true",), ("enforce_eager=true", "devices=[0, 0]")
VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...], dict[str, Any]]] = {
    "default-runner": ({}, EAGER, {}),
    "v1-runner": (V1, EAGER, {}),
}
"""Environment, settings, and arguments of vLLM."""
if "SLIPSTREAM_VLLM_ARGUMENTS" in os.environ:  # several starts of vLLM more
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    VARIANTS |= {
        "kept": (
            {},
            EAGER,
            {"seed": 7, "block_size": 32, "disable_cascade_attn": True, "attention_backend": "TRITON_ATTN"},
        ),
        "graphs": ({}, (), {"cudagraph_capture_sizes": [1, 2, 4], "disable_custom_all_reduce": True}),
        "two-ranks": ({}, ("tensor_parallel_size=2", *TWO_RANKS), {}),
        "pipeline": ({}, TWO_RANKS, {"pipeline_parallel_size": 2}),
        "v1-pipeline": (V1, TWO_RANKS, {"pipeline_parallel_size": 2}),
        "experts": ({}, ("tensor_parallel_size=2", *TWO_RANKS), {"enable_expert_parallel": True}),
        "ngram": ({}, EAGER, {"speculative_config": ngram}),
        "fp8-cache": ({}, ("dtype=bfloat16", *EAGER), {"kv_cache_dtype": "fp8"}),
        "deterministic": ({}, ("deterministic=true", *EAGER), {}),
    }
_LOGPROBS = {test for test, promise in PROMISE_OF.items() if promise == "logprobs"}
NOT_HELD = {
    "ngram": {
        *(test for test, promise in PROMISE_OF.items() if promise == "seeds"),
        "test_a_priority_changes_no_token",
        "test_a_logit_bias_forces_or_bans_tokens",  # vLLM refuses both
        "test_min_p",
    },
    "fp8-cache": _LOGPROBS,
}
"""Tests that a variant need not pass."""
NOT_COMPARABLE = {
    "fp8-cache": {
        "test_a_completion_scores_as_it_was_drawn",
        "test_a_logit_bias_forces_or_bans_tokens",
        "test_an_update_changes_what_is_generated_and_scored",
        "test_commits_with_requests_in_flight",
        "test_damaged_weights_are_not_used",
        "test_min_p",
        "test_nothing_changes_before_commit_nor_after_rollback",
        "test_penalties_are_subtracted_or_divided_by",
        "test_some_of_the_tensors_can_be_updated",
        "test_streaming_does_not_change_the_completion",
    }
}
"""Tests that need logprobs at full precision for what they are about."""


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    variables, settings, arguments = VARIANTS[request.param]
    family = "qwen3_moe" if request.param == "experts" else "qwen2"
    config = tiny_config(family, max_position_embeddings=60, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, config)
    options = ("kind=vllm", "max_num_seqs=4", "kv_cache_tokens=2048", f"vllm={json.dumps(arguments)}", *settings)
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options, **variables) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
