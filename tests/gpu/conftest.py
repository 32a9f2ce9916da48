"""Tests on a real GPU:

    JAX_PLATFORMS=cuda python -m pytest -s tests/gpu

Without a GPU they are skipped, or fail if SLIPSTREAM_REQUIRE_GPU=1."""

from __future__ import annotations

import os

import jax
import pytest

from tests.vllm.argument_results import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_sessionfinish,
)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Before any other fixture of this folder."""
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        found = str(error)
    if found == "gpu":
        return
    asked = os.environ.get("JAX_PLATFORMS", "")
    why = f"JAX has no GPU here (it has: {found}; JAX_PLATFORMS={asked}). Where there is one: JAX_PLATFORMS=cuda"
    if os.environ.get("SLIPSTREAM_REQUIRE_GPU") == "1":
        pytest.fail(f"{why}. SLIPSTREAM_REQUIRE_GPU=1 forbids to skip this")
    pytest.skip(why)
