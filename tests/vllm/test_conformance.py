"""The conformance suite over real vLLM, in its own environment and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.model import checkpoint
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.engines.attached import attached
from tests.tiny import random_params, tiny_config
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module", params=["tp=1", "tp=2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Heads of 32 dimensions: vLLM's attention on CPU takes no smaller ones."""
    tp = int(request.param[-1])
    config = tiny_config("qwen2", max_position_embeddings=60, num_layers=3 - tp, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(directory, params, config)
    options = ["kind=vllm", "max_concurrency=4", f"tp={tp}"]
    if tp == 1:
        options.append("prefill_tokens=16")  # long prompts are computed in parts
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
