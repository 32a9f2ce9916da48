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

from slipstream.observe import doctor
from tests.tiny import tiny_config, write_config
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

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


def ranks(python: str, tp: int, dtype: str, directories: list[Path]) -> list[list[dict[str, Any]]]:
    """What each rank says of each model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(tp):
        options = ["--rank", str(rank), "--tp", str(tp), "--port", str(port), "--dtype", dtype]
        command = [python, "-m", "slipstream.engines.vllm.proof", *options, *map(str, directories)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=500)  # most of it is vLLM being imported
            assert process.returncode == 0, err[-3000:]
            found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
        return found
    finally:
        for process in processes:
            process.kill()


def test_vllms_loader_puts_everything_where_the_plan_writes_it(tmp_path: Path) -> None:
    """At TP 2, where there is more to get wrong. (`tests/gpu` has TP 1, and what vLLM does to weights on a GPU.)"""
    for answers in ranks(PYTHON, 2, "float32", models(tmp_path)):
        assert len(answers) == len(FAMILIES)
        for family, answer in zip(FAMILIES, answers):
            assert answer["failed"] == {}, (family, answer["parameters"])
            assert answer["differing"] == [] and len(answer["parameters"]) > 10, family


def test_doctor_says_what_is_written_to_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", PYTHON)
    model = write_config(tmp_path / "tiny", tiny_config("llama", hidden_size=128, head_dim=32))
    (finding,) = doctor._mapping(model, "float32")
    assert (finding.verdict, finding.found) == ("ok", "15 of 15 of tiny are written to directly")
    (finding,) = doctor._mapping(tmp_path / "nowhere", "float32")
    assert finding.verdict == "wrong" and "vLLM cannot make nowhere" in finding.found
