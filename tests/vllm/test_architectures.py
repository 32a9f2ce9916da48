"""Models that our decoder does not know, in real vLLM: weights go through vLLM's own loader, in the same transaction."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

ROOT = Path(__file__).parents[2]
FAMILIES = ["phi3", "olmo2", "granite", "stablelm", "gpt_neox", "cohere"]


def test_ten_syncs_of_six_architectures_generate_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Also: a load that fails halfway leaves the old version, and trees that do not fit are refused."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.architectures", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [answer["architecture"] for answer in found] == FAMILIES
    for family, answer in zip(FAMILIES, found):
        assert answer["tokens"] == answer["expected"], family  # of a checkpoint, of ten syncs, of a directory
        assert len({tuple(tokens) for tokens in answer["tokens"]}) == 12, family  # other weights, other tokens
        assert answer["model"].startswith(family) and answer["same_tensors"], family
        assert all(answer["kept"]) and len(answer["kept"]) == (20 if family == "granite" else 1), family
        for error in answer["errors"]:
            assert error.startswith(
                "EngineFailure: engine 'engine' failed loading version 11: MemoryError: no room for"
            )
        first = answer["first"]
        assert f"missing: {first} [" in answer["refused"]["missing"], family
        assert "not in the model: extra.weight [3]" in answer["refused"]["unknown"], family
        assert f"{first}: the engine expects shape" in answer["refused"]["shape"], family
