"""The conformance suite over real vLLM on a GPU; weights of updates are read from this process's own GPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.model import checkpoint
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.engines.attached import attached
from tests.gpu.vllm import PYTHON, needs_vllm
from tests.tiny import random_params, tiny_config

pytestmark = [pytest.mark.gpu, needs_vllm]


@pytest.fixture(scope="module", params=["its-choice", "first-runner"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Twice: vLLM has two model runners, which our part of it must know."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if request.param == "first-runner" else {}
    config = tiny_config("qwen2", max_position_embeddings=60, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(directory, params, config)
    options = ("kind=vllm", "max_concurrency=4", "eager=true", "kv_cache_tokens=2048")
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options, **variables) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
