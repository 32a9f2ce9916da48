"""Weights from a JAX trainer through vLLM's own loader, on one GPU with CUDA graphs: an architecture that our decoder does not
know, and engines that quantize what they load. Compared with engines that are started on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import slipstream
from slipstream.config import VllmConfig
from slipstream.errors import EngineFailure, Unsupported
from slipstream.model.checkpoints.served_model import served_model
from slipstream.types import SamplingParams, VersionSpan
from tests.gpu.vllm import PYTHON, engine_options, needs_vllm
from tests.tiny import served

pytestmark = [pytest.mark.gpu, needs_vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SYNCS = int(os.environ.get("SLIPSTREAM_GPU_SYNCS", "100"))
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44], [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "granite": SHAPE | {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 2.0},
    "llama": SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_direct": ("llama", {}),  # straight into the live parameters
    "granite_loaded": ("granite", {}),
    "granite_fp8": ("granite", {"quantization": "fp8"}),
    "llama_fp8": ("llama", {"quantization": "fp8"}),
}


class Case(NamedTuple):
    bridge: Any
    directory: Path
    options: VllmConfig
    probe: Path
    is_loaded: bool
    """By vLLM's own loader."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """An engine without weights: of an unknown architecture, transformers knows the tensors."""
    model, arguments = CASES[request.param]
    directory, probe = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("probe")
    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    (probe / "sitecustomize.py").write_text(
        "import sys\nif 'engine' in sys.orig_argv or 'spawn_main' in ' '.join(sys.orig_argv):\n"
        "    import tests.gpu.loader_probe\n"
    )
    options = engine_options(enforce_eager=False, vllm=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROBE", str(probe))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(probe), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        run_dir = tmp_path_factory.mktemp("run") / "run"
        with slipstream.launch(directory, engine=options, run_dir=run_dir, start_timeout=400) as bridge:
            yield Case(bridge, directory, options, probe, request.param != "llama_direct")


def weights(directory: Path, seed: int) -> dict[str, jax.Array]:
    """A flat dict of HF names, on the GPU."""
    rng, made = np.random.default_rng(seed), {}
    for tensor in served_model(directory).tensors:
        noise = rng.standard_normal(tensor.shape)
        made[tensor.name] = jnp.asarray(0.1 * noise if len(tensor.shape) > 1 else 1 + 0.3 * noise, jnp.bfloat16)
    return made


def saved(case: Case, tensors: dict[str, jax.Array], at: Path) -> Path:
    at.mkdir()
    (at / "config.json").write_text((case.directory / "config.json").read_text())
    save_file({name: np.asarray(t) for name, t in tensors.items()}, at / "model.safetensors", {"format": "pt"})
    return at


def fingerprint(case: Case) -> dict[str, str]:
    case.bridge.memory()
    found: dict[str, str] = json.loads((case.probe / "found.json").read_text())
    return found


def cold_starts(case: Case, directories: list[Path]) -> list[dict[str, Any]]:
    options = json.loads(case.options.model_dump_json(exclude={"python"}, exclude_defaults=True))
    options["share_weights"] = True  # without sleep mode, which allows one engine per process
    done = subprocess.run(
        [PYTHON, "-m", "tests.gpu.cold_starts", json.dumps(options), json.dumps(PROMPTS), *map(str, directories)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_tokens_and_parameters_are_those_of_a_cold_start(case: Case, tmp_path: Path) -> None:
    """Tokens after each tenth sync, and parameters bit for bit."""
    found, directories, seconds = [], [], []
    with slipstream.connect(case.bridge.run_dir) as bridge:
        for number in range(1, SYNCS + 1):
            tensors = weights(case.directory, number)
            report = bridge.sync(tensors)
            assert [engine.transport for engine in report.engines] == ["cuda"] and report.engines[0].checksummed
            seconds.append(report.total_seconds)
            if number % 10 == 0:
                tokens = [list(tokens) for tokens in served(bridge, PROMPTS, 10)]
                found.append({"tokens": tokens, "parameters": fingerprint(case)})
                directories.append(saved(case, tensors, tmp_path / str(number)))
        completion = bridge.generate([(5, 6, 7)], GREEDY)[0]
        assert completion.spans == (VersionSpan(bridge.version, 0, 10),)
    assert len({json.dumps(answer["tokens"]) for answer in found}) == len(found) == SYNCS // 10
    median = 1e3 * sorted(seconds)[len(seconds) // 2]
    print(f"  {SYNCS} syncs of {report.num_bytes / 1e6:.1f} MB, median {median:.1f} ms")
    cold = cold_starts(case, directories)
    assert len(cold) == len(found)
    for number, (warm, expected) in enumerate(zip(found, cold)):
        pairs = {name: (warm["parameters"].get(name), value) for name, value in expected["parameters"].items()}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert not differing and warm["parameters"].keys() == expected["parameters"].keys(), (number, differing)
        assert warm["tokens"] == expected["tokens"], number


@pytest.mark.parametrize("transport", ["cuda", "nccl", "shm"])
def test_a_load_that_fails_halfway_is_undone(case: Case, transport: str) -> None:
    if not case.is_loaded:
        pytest.skip("it is written directly")
    old, new = weights(case.directory, 1001), weights(case.directory, 1002)
    with slipstream.connect(case.bridge.run_dir, transport=transport) as bridge:
        version, tokens, before = bridge.sync(old).version, served(bridge, PROMPTS, 10), fingerprint(case)
        (case.probe / "break").touch()
        with pytest.raises(EngineFailure, match="no room for the eighth tensor"):
            bridge.sync(new)
        assert not (case.probe / "break").exists()
        assert fingerprint(case) == before
        assert (served(bridge, PROMPTS, 10), bridge.version) == (tokens, version)
        assert bridge.sync(new).version > version
        assert served(bridge, PROMPTS, 10) != tokens and fingerprint(case) != before


def test_a_change_of_one_tensor_sends_all(case: Case) -> None:
    """vLLM's loader fills whole layers: given the query alone, it would leave the key and the value without memory."""
    if not case.is_loaded:
        pytest.skip("it is written directly")
    tensors = weights(case.directory, 1003)
    with slipstream.connect(case.bridge.run_dir) as bridge:
        total = bridge.sync(tensors).num_bytes
        assert bridge.sync(tensors).num_bytes == 0
        changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}
        assert bridge.sync(changed).num_bytes == total
        with pytest.raises(Unsupported, match="all tensors or none"):
            bridge.sync({"model.norm.weight": tensors["model.norm.weight"]}, partial=True)
