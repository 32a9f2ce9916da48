"""The mapping of vLLM's live parameters, for every family: models loaded by vLLM contain the values that the plan would
write, at the same places."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe import doctor
from tests.tiny import tiny_config, write_config
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

FAMILIES = ("mixtral", "qwen3_moe", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families with experts come first: vLLM creates their process groups only if the first model has experts."""


def models(root: Path) -> list[Path]:
    """Sizes that exercise the split by two and the padded vocabulary."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "head_dim": 32,
        "vocab_size": 100,
        "num_kv_heads": 2,
        "intermediate_size": 96,
    }
    return [write_config(root / family, tiny_config(family, **shape)) for family in FAMILIES]


def ranks(
    preloaded: Preloaded, tmp_path: Path, tp: int, dtype: str, directories: list[Path]
) -> list[list[dict[str, Any]]]:
    """The results of each rank, for each model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(tp):
        options = ["--rank", str(rank), "--tp", str(tp), "--port", str(port)]
        command = [*doctor.mapping_command(dtype, *directories), *options]
        os.mkfifo(tmp_path / f"{rank}.out")
        processes.append(
            preloaded.popen(command, env=environment, stdout=tmp_path / f"{rank}.out", stderr=tmp_path / f"{rank}.log")
        )
    try:
        found = []
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context((tmp_path / f"{rank}.out").open()) for rank in range(tp)]
            for rank, (process, output) in enumerate(zip(processes, outputs)):
                lines = (line for line in output if line.startswith("{"))
                found.append([json.loads(line) for line in itertools.islice(lines, 1)])
                named = list(Path("/dev/shm").glob(f"mapping-check-{port}-*"))
                assert not named, "a kill would leave this shared memory"
                found[-1] += map(json.loads, lines)
                assert process.wait(timeout=60) == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
        return found
    finally:
        for process in processes:
            process.kill()


def test_vllms_loader_puts_everything_where_the_plan_writes_it(
    preloaded: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At TP 2. `tests/gpu` covers TP 1, and what vLLM does to weights on a GPU."""
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", PYTHON)
    directories = models(tmp_path)
    for answers in ranks(preloaded, tmp_path, 2, "float32", directories):
        assert len(answers) == len(FAMILIES)
        for family, answer in zip(FAMILIES, answers):
            assert answer["failed"] == {}, (family, answer["parameters"])
            assert answer["differing"] == [] and len(answer["parameters"]) > 10, family
        llama = FAMILIES.index("llama")
        (diagnosis,) = doctor._judged(directories[llama], answers[llama])
        assert (diagnosis.verdict, diagnosis.result) == ("ok", "15 of 15 of llama receive weights directly")


def test_doctor_says_why_a_model_cannot_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", sys.executable)  # has no vLLM
    model = write_config(tmp_path / "tiny", tiny_config("llama"))
    (diagnosis,) = doctor._mapping(model, "float32")
    assert (diagnosis.verdict, diagnosis.result) == (
        "wrong",
        "vLLM cannot load tiny: ModuleNotFoundError: No module named 'vllm'",
    )
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi" / "config.json").write_text('{"model_type": "phi3"}')
    (diagnosis,) = doctor._mapping(tmp_path / "phi", "float32")
    assert (diagnosis.verdict, diagnosis.result) == ("note", "vLLM's layout of phi is not known")
    (diagnosis,) = doctor._mapping(tmp_path / "nowhere", "float32")
    assert diagnosis.verdict == "wrong" and "nowhere has no config.json" in diagnosis.result
