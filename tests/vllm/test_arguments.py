"""Conformance suite with real vLLM, with arguments of vLLM that need an engine of their own. SLIPSTREAM_VLLM_ARGUMENTS=1 runs it;
`argument_results.py` keeps the results."""

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
from tests.tiny import random_params, tiny_config
from tests.vllm.argument_results import PROMISE_OF
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.skipif("SLIPSTREAM_VLLM_ARGUMENTS" not in os.environ, reason="SLIPSTREAM_VLLM_ARGUMENTS=1 is not set"),
]

VARIANTS: dict[str, tuple[dict[str, Any]]] = {
    "pipeline": ({"pipeline_parallel_size": 2},),
    "ngram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},),
}
NOT_HELD = {
    "ngram": {
        *(test for test, promise in PROMISE_OF.items() if promise == "seeds"),
        "test_a_priority_changes_no_token",
        "test_a_logit_bias_forces_or_bans_tokens",  # vLLM refuses both
        "test_min_p",
    }
}
"""Tests that a variant need not pass."""


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    config = tiny_config("qwen2", max_position_embeddings=60, num_layers=3, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, config)
    options = ["kind=vllm", "max_num_seqs=4", f"vllm={json.dumps(VARIANTS[request.param][-1])}"]
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
