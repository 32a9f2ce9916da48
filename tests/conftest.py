import os
import tempfile

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

# A busy machine is not a bug: no test fails for being slow.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")


def pytest_unconfigure() -> None:
    _cache.cleanup()
