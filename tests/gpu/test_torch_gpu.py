"""A torch trainer's CUDA tensors into real vLLM on the same GPU: over mapped memory and NCCL, from one rank and from two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.errors import ChecksumMismatch, NonFiniteWeights
from slipstream.types import SamplingParams
from tests.gpu.vllm import engine_options, needs_vllm
from tests.tiny import hf_directory, hf_greedy, hf_model, tiny_config

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    needs_vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here"),
]

PROMPT, COUNT = (5, 7, 11, 13, 17), 8
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
SHAPE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two engines of one rank each. They share the GPU with all trainers."""
    model = hf_directory(tmp_path_factory.mktemp("torch") / "model", **SHAPE)
    options = engine_options(enforce_eager=False)
    place: dict[str, Any] = {"devices": [[0], [0]], "share_gpus": True}
    with slipstream.launch(
        model, engines=2, engine=options, run_dir=model.parent / "run", start_timeout=400, **place
    ) as bridge:
        yield bridge


def module_of(seed: int) -> Any:
    return hf_model(tiny_config(**SHAPE), seed).to("cuda")


def tokens(bridge: Any) -> list[tuple[int, ...]]:
    names = [engine.info.name for engine in bridge.status().engines]
    return [bridge.generate([PROMPT], GREEDY, engine=name)[0].token_ids for name in names]


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_ten_updates_are_read_from_the_modules_memory(fleet: Any, transport: str) -> None:
    from slipstream.plugins.torch_trainer import update_weights

    seen = set()
    module = module_of(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with slipstream.connect(fleet.run_dir, transport=transport) as bridge:
        for _ in range(10):
            ids = torch.tensor([PROMPT * 4], device="cuda")
            optimizer.zero_grad()
            module(ids, labels=ids).loss.backward()
            optimizer.step()  # still running on the GPU when the update begins
            report = update_weights(bridge, module)
            assert [engine.transport for engine in report.engines] == [transport] * 2
            assert all(engine.checksummed for engine in report.engines)
            expected = hf_greedy(module, PROMPT, COUNT)
            assert tokens(bridge) == [expected] * 2
            seen.add(expected)
        assert bridge.verify(dict(module.named_parameters())).is_same
    assert len(seen) > 1


def test_tensors_in_other_layouts_dtypes_and_memory(fleet: Any) -> None:
    """Views that are not row-major are copied first; float64 is cast by the engine."""
    from slipstream.plugins.torch_trainer import update_weights

    module = module_of(1)
    weights = {name: p.detach() for name, p in module.named_parameters()}
    weights = {name: t.T.contiguous().T if "o_proj" in name else t for name, t in weights.items()}
    weights |= {name: t.double() for name, t in weights.items() if "norm" in name}
    with slipstream.connect(fleet.run_dir) as bridge:
        assert update_weights(bridge, weights).engines[0].transport == "cuda"
        assert tokens(bridge) == [hf_greedy(module, PROMPT, COUNT)] * 2


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_wrong_bytes_and_values_are_refused(fleet: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.plugins.torch_trainer import update_weights
    from slipstream.weights.update.torch_scan import TorchScanner

    old, new = module_of(2), module_of(3)
    with slipstream.connect(fleet.run_dir, transport=transport) as bridge:
        version = update_weights(bridge, old).version
        scan = TorchScanner.scan

        def wrong(scanner: Any, pieces: Any) -> Any:
            scans = scan(scanner, pieces)
            victim = max(scans)
            return scans | {victim: scans[victim]._replace(checksum=scans[victim].checksum ^ 1)}

        monkeypatch.setattr(TorchScanner, "scan", wrong)
        with pytest.raises(ChecksumMismatch, match=r"with checksum [0-9a-f]{8}"):
            update_weights(bridge, new)
        monkeypatch.undo()
        bad = {name: p.detach().clone() for name, p in new.named_parameters()}
        bad["model.norm.weight"][5] = float("inf")
        with pytest.raises(NonFiniteWeights, match=r"model.norm.weight \(1 of 128 values\)"):
            update_weights(bridge, bad)
        assert tokens(bridge) == [hf_greedy(old, PROMPT, COUNT)] * 2
        assert update_weights(bridge, new).version == version + 1
        assert tokens(bridge) == [hf_greedy(new, PROMPT, COUNT)] * 2


EXPANDABLE = """
import sys, torch, slipstream
from slipstream.plugins.torch_trainer import update_weights
from tests.gpu.test_torch_gpu import PROMPT, COUNT, module_of, tokens
from tests.tiny import hf_greedy
module = module_of(4)
with slipstream.connect(sys.argv[1]) as bridge:
    report = update_weights(bridge, module)
    print("transport", report.engines[0].transport)
    assert tokens(bridge) == [hf_greedy(module, PROMPT, COUNT)] * 2
"""


def test_expandable_segments(fleet: Any) -> None:
    """Their memory has no handle unless it fits into one segment; it is staged then, and the report says so."""
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE, fleet.run_dir],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())
    assert "transport cuda" in done.stdout


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_two_ranks_of_a_trainer_and_two_of_engines(fleet: Any, tmp_path: Path, transport: str) -> None:
    """`TorchWeightBridge` in distributed mode: FSDP2 shards, each sent by its rank."""
    model = Path(fleet.run_dir).parent / "model"
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SLIPSTREAM_RUN_DIR": fleet.run_dir,
        "MODE": "distributed",
        "TRANSPORT": transport,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-m", "tests.deploy.torch_rank", str(model), str(tmp_path / "rank")]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["transports"] == [transport] * 2 and first["shards"] == second["shards"] > 0
    # Each element is sent by the rank that holds it, to each engine or, where engines pass it on, to one of them.
    sent = first["num_bytes"] + second["num_bytes"]
    assert sent in (first["model_bytes"], 2 * first["model_bytes"])
    print(f"{transport}: {sent:,} bytes for {first['model_bytes']:,} bytes of parameters and two engines")
    for version, found, expected, served in first["steps"]:
        assert found == [expected, expected] and served == [version, version]


# --- weights in vLLM's own memory -------------------------------------------------------------------------------------

LARGE = {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 4096, "head_dim": 64}
"""About 0.8 GB in float32: enough to be seen."""


@pytest.mark.parametrize("shape", ["small", "large"])
def test_an_optimizer_steps_in_vllms_own_memory(tmp_path: Path, shape: str) -> None:
    """CUDA graphs are on: they read the weights where the optimizer writes them."""
    from slipstream.errors import Unsupported
    from slipstream.plugins import TorchWeightBridge
    from tests.gpu.vllm import memory_in_use

    config = tiny_config(**(SHAPE if shape == "small" else LARGE))
    model = tmp_path / "model"
    hf_model(config, 0).save_pretrained(model)
    options = engine_options(enforce_eager=False, share_weights=True)
    with slipstream.launch(model, engine=options, run_dir=tmp_path / "run", start_timeout=400) as fleet:
        module = hf_model(config, 1).to("cuda")
        size = sum(p.nbytes for p in module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        copied = memory_in_use()
        with TorchWeightBridge(module, mode="shared", log_dir=fleet.run_dir) as bridge:
            torch.cuda.empty_cache()
            together = memory_in_use()
            print(f"{shape}: {size / 1e9:.2f} GB; two copies {copied / 1e9:.2f} GB, shared {together / 1e9:.2f} GB")
            if shape == "large":
                assert together < copied - size / 2, "the module has a copy of its own"
            seen = {tokens(fleet)[0]}
            assert seen == {hf_greedy(module, PROMPT, COUNT)}
            for _ in range(5):
                ids = torch.tensor([PROMPT * 4], device="cuda")
                optimizer.zero_grad()
                module(ids, labels=ids).loss.backward()
                optimizer.step()
                version = bridge.notify_update()
                found = fleet.generate([PROMPT], GREEDY)[0]
                assert found.token_ids == hf_greedy(module, PROMPT, COUNT) and found.version == version
                seen.add(found.token_ids)
            assert len(seen) > 1
        with pytest.raises(Unsupported, match="cannot sleep"):
            fleet.sleep()
