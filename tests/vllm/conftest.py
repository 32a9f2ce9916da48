"""Results of the conformance suite, by arguments of vLLM, and a process that has imported vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.argument_results import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_sessionfinish,
)
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    server = Preloaded(PYTHON, tmp_path_factory.mktemp("preloaded") / "log")
    yield server
    server.close()
