"""That our map of vLLM's live parameters is right, for every family: real vLLM's models, loaded by its own loader, hold at each
place what the plan would write there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config, write_config
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

FAMILIES = ("mixtral", "qwen3_moe", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Those with experts first: vLLM makes the groups that they need only when the first model has experts."""


def models(root: Path) -> list[Path]:
    """Sizes that a split by two and a padded vocabulary leave something to get wrong."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "head_dim": 32,
        "vocab_size": 100,
        "num_kv_heads": 2,
        "intermediate_size": 96,
    }
    return [write_config(root / family, tiny_config(family, **shape)) for family in FAMILIES]


def ranks(python: str, tp: int, device: str, dtype: str, directories: list[Path]) -> list[list[dict[str, Any]]]:
    """What each rank says of each model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("rank.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"ranks-{port}"}
    processes = []
    for rank in range(tp):
        command = [python, script, str(rank), str(tp), str(port), device, dtype, *map(str, directories)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, err[-3000:]
            found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
        return found
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("tp", [1, 2])
def test_vllms_loader_puts_everything_where_the_plan_writes_it(tp: int, tmp_path: Path) -> None:
    for answers in ranks(PYTHON, tp, "cpu", "float32", models(tmp_path)):
        assert len(answers) == len(FAMILIES)
        for family, answer in zip(FAMILIES, answers):
            assert answer["failed"] == {}, (family, answer["parameters"])
            assert answer["differing"] == [] and len(answer["parameters"]) > 10, family
