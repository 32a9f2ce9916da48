import gc
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before JAX starts: two devices, so that tensor parallelism can be tested on any machine, and compiled programs shared
# between the many processes that the tests start (for this run only: a cache from another CPU could not be trusted).
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_cache = tempfile.TemporaryDirectory(prefix="slipstream-tests-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Before Ray is imported, by whomever: nobody else joins the clusters of the tests, and nobody is told of them.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Tests that run beside each other do not see each other's segments: some make sure that none is left.
_segments = None
if "PYTEST_XDIST_WORKER" in os.environ and Path("/dev/shm").is_dir():
    _segments = tempfile.TemporaryDirectory(prefix="slipstream-tests-", dir="/dev/shm")
    os.environ["SLIPSTREAM_SHM_DIR"] = _segments.name

# A busy machine is not a bug: no test fails for being slow.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")


MAX_MAPPINGS = 20_000
"""Each compiled program takes a few mappings of memory. Linux allows a process 65,530, and LLVM crashes at the next."""


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """A process that runs hundreds of tests forgets their programs now and then."""
    yield
    mappings = Path("/proc/self/maps")
    if "jax" in sys.modules and mappings.exists() and mappings.read_bytes().count(b"\n") > MAX_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_unconfigure() -> None:
    _cache.cleanup()
    if _segments is not None:
        _segments.cleanup()
