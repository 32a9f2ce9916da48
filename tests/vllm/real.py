"""The environment with real vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("SLIPSTREAM_VLLM_PYTHON") or str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
needs_vllm = pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no vLLM: {PYTHON} is not there (make vllm-env)")
