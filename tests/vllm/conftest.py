"""Results of the conformance suite, by arguments of vLLM."""

from tests.vllm.argument_results import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_sessionfinish,
)
