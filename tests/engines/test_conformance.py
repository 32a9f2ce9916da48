"""Conformance suite with the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.tiny import random_params, tiny_config


@pytest.fixture(scope="module", params=["tp=1", "tp=2"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Few rows, so that requests queue; a context length that is not a power of two, so that buckets reach their cap."""
    tp = int(request.param[-1])
    config = tiny_config("qwen2", max_position_embeddings=60, num_layers=1)
    params = random_params(config)
    options = EmbeddedConfig(max_num_seqs=4, tensor_parallel_size=tp)
    subject = Subject(EmbeddedEngine(config, params, options=options), config, params)
    yield subject
    subject.runner.run(subject.engine.close())
    subject.runner.close()
