"""Conformance suite with real vLLM, in its own environment and processes, at TP 2. `test_weights.py` runs it at TP 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.model.checkpoints import hf_weights
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.engines.attached import attached
from tests.tiny import random_params, tiny_config
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Heads of 32 dimensions, the least that vLLM's attention on CPU supports."""
    config = tiny_config("qwen2", max_position_embeddings=60, num_layers=1, hidden_size=128, head_dim=32)
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, config)
    options = ["kind=vllm", "max_num_seqs=4", "tensor_parallel_size=2"]
    with attached(PYTHON, directory, tmp_path_factory.mktemp("run"), *options) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        subject = Subject(engine, config, params, tolerance=1e-4, bounded=bounded)
        yield subject
        subject.runner.run(engine.close())
        subject.runner.close()
