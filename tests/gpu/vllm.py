"""Real vLLM on the GPU, with the interpreter of its environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest

from slipstream.config import VllmConfig

PYTHON = os.environ.get("SLIPSTREAM_VLLM_PYTHON") or sys.executable
needs_vllm = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("vllm") is None,
    reason="no vLLM: it is not installed here, and SLIPSTREAM_VLLM_PYTHON names no interpreter that has it",
)


def engine_options(**over: Any) -> VllmConfig:
    """Small, and quick to start."""
    settings: dict[str, Any] = dict(
        python=PYTHON, max_num_seqs=8, max_model_len=96, kv_cache_tokens=4096, enforce_eager=True
    )
    return VllmConfig(**(settings | over))


def memory_in_use() -> int:
    """Bytes of the whole device, whoever has them."""
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1])
    _, free, total = cu.cuMemGetInfo()
    return int(total - free)
