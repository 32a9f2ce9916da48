"""The table of vLLM's arguments: what is refused, what is reported, and that the documentation says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.config import AdapterConfig, EngineConfig, VllmConfig, load
from slipstream.deploy.processes.vllm_environment import check_vllm_arguments
from slipstream.errors import ConfigError
from slipstream.observe.doctor import examine_fleet
from slipstream.types import EngineInfo, EngineStatus, FleetStatus
from slipstream.vllm_arguments import PROMISES, RULES, check_known, not_held

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"max_model_len": 64},
            "vllm.max_model_len is not a user's to set: use the setting of VllmConfig with this name",
        ),
        ({"model": "m"}, "vllm.model is not a user's to set: name the model to launch"),
        ({"data_parallel_size": 2}, "vllm.data_parallel_size .* launch several engines"),
        ({"cpu_offload_gb": 4}, r"cpu_offload_gb = 4 is refused: .* \(weights: an update takes effect whole"),
        ({"enable_eplb": True}, "enable_eplb = True is refused: experts would move between ranks"),
        ({"speculative_config": {"method": "eagle", "model": "m"}}, "syncs would not reach what it proposes with"),
        ({"speculative_config": {"method": "ngram", "model": "m"}}, "syncs would not reach what it proposes with"),
        ({"speculative_config": {"method": "draft_model"}}, "'draft_model' with a directory or a name as model"),
        (
            {"speculative_config": {"method": "draft_model", "model": "m"}, "pipeline_parallel_size": 2},
            "needs an engine of one pipeline stage",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be a positive integer, got 0"),
        ({"logits_processors": [print]}, "vllm.logits_processors is .* plain values as in JSON"),
    ],
)
def test_arguments_that_are_ours_or_break_a_promise_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        VllmConfig(vllm=arguments)


def test_adapters_in_toml_and_what_cannot_be_combined_with_them(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('kind = "vllm"\n[adapters]\nslots = 2\ntargets = ["q_proj"]\n')
    config = VllmConfig(adapters=AdapterConfig(slots=2, rank=32, targets=("q_proj",)))
    assert load(EngineConfig, file, ["adapters.rank=32"]) == config
    for over, said in (
        ({"vllm": {"max_loras": 2}}, "vllm.max_loras is not a user's to set: use adapters of VllmConfig"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "adapters and vllm.speculative_config have not"),
        ({"share_weights": True}, "adapters and share_weights have not been tried together"),
        ({"deterministic": True}, "adapters and deterministic have not been tried together"),
        ({"adapters": AdapterConfig(rank=600)}, "adapters.rank is 600; vLLM serves adapters up to rank 512"),
    ):
        with pytest.raises(ConfigError, match=said):
            config.replace(**over)
    assert VllmConfig(vllm={"enable_lora": False}).adapters is None


def test_arguments_pass_in_python_toml_and_on_the_command_line(tmp_path):
    arguments = {"kv_cache_dtype": "fp8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    config = VllmConfig(vllm=arguments)
    file = tmp_path / "engine.toml"
    file.write_text('kind = "vllm"\n[vllm]\nkv_cache_dtype = "fp8"\n[vllm.speculative_config]\nmethod = "ngram"\n')
    dotted = ["vllm.speculative_config.num_speculative_tokens=2"]
    assert load(EngineConfig, file, dotted) == config
    assert load(EngineConfig, None, ["kind=vllm", f"vllm={json.dumps(arguments)}"]) == config
    with pytest.raises(ConfigError, match="vllm"):
        load(EngineConfig, None, ["kind=vllm", 'vllm={"a"'])


def test_promises_that_are_not_held_are_named_with_the_argument():
    assert not_held({"kv_cache_dtype": "auto", "seed": 3, "pipeline_parallel_size": 2}) == ()
    found = not_held({"kv_cache_dtype": "fp8", "fully_sharded_loras": True})
    assert found == (
        "promises for certain: fully_sharded_loras was never tested",
        "logprobs: keys and values are rounded to fewer bits (kv_cache_dtype)",
    )
    info = EngineInfo("e", "vllm", "m", "float32", 1, (), (), (), "h", 64, 8, 0, not_held=found)
    fleet = FleetStatus(0, 1.0, 0, (EngineStatus(info, "ready", 0, 0.1),))
    notes = [diagnosis.result for diagnosis in examine_fleet(fleet) if diagnosis.verdict == "note"]
    assert notes == [f"does not hold {promise}" for promise in found]


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.32\.0 has no argument 'kv_cache_type' .* did you mean 'kv_cache_dtype'"
    ):
        check_known(["kv_cache_type"], ["kv_cache_dtype", "model"], "0.32.0")
    # An interpreter whose vLLM is a stand-in: its source is read, not run.
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "raise SystemExit\nclass EngineArgs:\n    quantization: str = ''\nclass AsyncEngineArgs:\n    b: int = 0\n"
    )
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    check_vllm_arguments(str(python), ["quantization", "b"])
    with pytest.raises(ConfigError, match=r"has no argument 'quantisation' .* did you mean 'quantization'"):
        check_vllm_arguments(str(python), ["quantisation"])


def test_the_table_is_whole_and_in_the_documentation():
    for name, rule in RULES.items():
        assert set(rule.promises) <= PROMISES.keys(), name
        assert bool(rule.reason) == (rule.effect != "kept") and bool(rule.promises) == (
            rule.effect in ("refused", "reported")
        )
    written = subprocess.run(
        [sys.executable, ROOT / "tools" / "vllm_arguments.py", "--check"], capture_output=True, text=True
    )
    assert written.returncode == 0, written.stderr
