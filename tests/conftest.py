import gc
import importlib
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before JAX starts: two devices, for tensor parallelism on any machine, and compiled programs shared by the many processes of
# one run (of one run only: a cache from another CPU cannot be trusted). XLA compiles without optimizations, in a fifth of the
# time; SLIPSTREAM_TEST_OPTIMIZED=1 turns them on, as `make test` does for the tests of determinism.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = ["--xla_force_host_platform_device_count=2"]
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("SLIPSTREAM_TEST_OPTIMIZED"):
    _flags += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if version("jaxlib").startswith("0.10."):  # XLA aborts on a flag that it does not know
        _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags]).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread is enough for torch's tiny models; more of them spin, in each of several workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
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


def pytest_collection_finish() -> None:
    """Collections that traverse all modules of all tests would take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """A process that runs hundreds of tests forgets their programs now and then."""
    yield
    mappings = Path("/proc/self/maps")
    if "jax" in sys.modules and mappings.exists() and mappings.read_bytes().count(b"\n") > MAX_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/, whose modules import each other by their bare names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


SLOW = """
    chaos cli/test_cli cli/test_demo cli/test_terminal deploy/test_elastic deploy/test_fanout deploy/test_faults
    deploy/test_hosts deploy/test_kill deploy/test_lan deploy/test_launch deploy/test_ray deploy/test_rollouts
    deploy/test_shared_weights deploy/test_torch_ranks deploy/test_trainer_group engines/test_attention engines/test_attention_gpu
    engines/test_determinism engines/test_drafts engines/test_embedded engines/test_remote engines/test_sampling
    engines/test_sglang engines/test_shared engines/test_smollm2 engines/test_soak gateway/test_process
    gateway/test_real_affinity gateway/test_real_quarantine http/test_control http/test_docs http/test_evaluation
    http/test_agents http/test_fuzz http/test_load http/test_nccl_weights http/test_sockets http/test_trl model/test_decoder
    model/test_families observe/dashboard observe/test_mismatch observe/test_tracing plugins/test_torch_trainer plugins/test_trl
    plugins/test_tunix plugins/test_tunix_models rl/test_chat
    rl/test_checkpoint rl/test_learner rl/test_loop rl/test_multi_turn rl/test_packing rl/test_partial
    rl/test_reference rl/test_resume rl/test_rewards rl/test_rollouts rl/test_session rl/test_tool_use
    rl/test_train_step tensors/test_dlpack weights/test_example_libraries
"""
"""Files and folders that `make test-fast` leaves out: they need Ray, Tunix or TRL, start or kill processes, or compile for long."""


def is_slow(path: Path) -> bool:
    return str(path.relative_to(Path(__file__).parent)).startswith(tuple(SLOW.split()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what would be deselected: some of it imports torch, transformers or Ray."""
    return True if config.getoption("markexpr") == "not slow" and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    # Longest first, so that no worker is left alone with a long file at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per reason for skipping."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


def pytest_unconfigure() -> None:
    _cache.cleanup()
    if _segments is not None:
        _segments.cleanup()
