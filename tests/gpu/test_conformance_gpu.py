"""Conformance suite with the embedded engine on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.engines import *  # noqa: F403
from tests.conformance.engines import Subject
from tests.gpu.models import serving
from tests.tiny import random_params, tiny_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    config = tiny_config("qwen2", max_position_embeddings=60, head_dim=16)
    with serving(config, random_params(config), max_num_seqs=4) as subject:
        yield subject
