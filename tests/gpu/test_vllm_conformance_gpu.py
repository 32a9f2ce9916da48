"""Conformance suite with real vLLM on a GPU. Updates read the weights from the GPU memory of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.model.checkpoints import hf_weights
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.engines.attached import attached
from tests.gpu.vllm import PYTHON, needs_vllm
from tests.tiny import random_params, tiny_config

pytestmark = [pytest.mark.gpu, needs_vllm]


@pytest.fixture(scope="module", params=["default-runner", "v1-runner"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Once for each of vLLM's two model runners."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if request.param == "v1-runner" else {}
    config = tiny_config("qwen2", max_position_embeddings=60, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, config)
    options = ("kind=vllm", "max_num_seqs=4", "enforce_eager=true", "kv_cache_tokens=2048")
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options, **variables) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
