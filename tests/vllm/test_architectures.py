"""Models that our decoder does not know, in real vLLM: weights go through vLLM's own loader, in the same transaction. Also a draft
model, which syncs update with the policy, and models that an engine refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipstream.config import VllmConfig
from slipstream.errors import ConfigError
from tests.vllm.draft_syncs import speculation
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

FAMILIES = ["phi3", "olmo2", "granite", "stablelm", "gpt_neox", "cohere"]


def test_ten_syncs_of_six_architectures_generate_the_tokens_of_transformers(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    """Also: a load that fails halfway leaves the old version, and trees that do not fit are refused. The last of the process's
    lines comes after the syncs of a draft (`draft_syncs.py`)."""
    out, log = tmp_path / "out", tmp_path / "log"
    process = preloaded.popen(
        [PYTHON, "-m", "tests.vllm.architectures", str(tmp_path)], stdout=out, stderr=log, env=os.environ
    )
    assert process.wait(1500) == 0, log.read_text()[-4000:]
    *found, refused = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    assert [answer["architecture"] for answer in found] == FAMILIES
    for family, answer in zip(FAMILIES, found):
        assert answer["tokens"] == answer["expected"], family  # of a checkpoint, of ten syncs, of a directory
        if family in ("phi3", "granite", "cohere"):  # an adapter, loaded before all but the first of these weights
            of_adapter, expected = answer["of_adapter"]
            assert of_adapter == expected != answer["tokens"][-1], family
        assert len({tuple(tokens) for tokens in answer["tokens"]}) == 12, family  # other weights, other tokens
        assert answer["model"].startswith(family) and answer["same_tensors"], family
        assert all(answer["kept"]) and len(answer["kept"]) == (20 if family == "granite" else 1), family
        version = 12 if answer["of_adapter"] else 11
        for error in answer["errors"]:
            assert error.startswith(
                f"EngineFailure: engine 'engine' failed loading version {version}: MemoryError: no room for"
            )
        first = answer["first"]
        assert f"missing: {first} [" in answer["refused"]["missing"], family
        assert "not in the model: extra.weight [3]" in answer["refused"]["unknown"], family
        assert f"{first}: the engine expects shape" in answer["refused"]["shape"], family
    assert refused["small heads"].startswith(
        "ConfigError: head_dim of the model is 8; vLLM's attention on CPU needs a multiple"
    )
    assert refused["a draft without weights"].startswith("ConfigError: the draft model ")
    assert "has no weights (safetensors)" in refused["a draft without weights"]


def test_a_draft_cannot_share_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a draft model"):
        VllmConfig(share_weights=True, vllm=speculation(tmp_path))
