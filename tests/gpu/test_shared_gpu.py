"""A PyTorch module and the embedded engine that share one copy of the weights in GPU memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import SamplingParams
from tests.tiny import hf_greedy, hf_model, tiny_config, write_config

pytestmark = pytest.mark.gpu

PROMPT = (5, 7, 11, 13, 17)
COUNT = 12
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
OPTIONS = EmbeddedConfig(max_num_seqs=8, max_model_len=64, kv_cache_tokens=1024)
LARGE = {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 4096}
"""About 0.8 GB in float32: enough to be seen."""


def small(**over: Any) -> ModelConfig:
    """With heads that the GPU kernels take."""
    return tiny_config(head_dim=16, **over)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Nobody takes all of the GPU's memory in advance, so that what is used can be told."""
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("torch has no GPU here")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    yield found
    found.cuda.empty_cache()


def by_transformers(module: Any) -> tuple[int, ...]:
    return hf_greedy(module, PROMPT, COUNT)


def by_engine(bridge: Any) -> tuple[int, ...]:
    (found,) = bridge.generate([PROMPT], GREEDY)
    return found.token_ids


def learn(torch: Any, module: Any, optimiser: Any, shared: Any) -> None:
    ids = torch.tensor([PROMPT * 4], device="cuda")
    optimiser.zero_grad()
    module(ids, labels=ids).loss.backward()
    with shared.updating():
        optimiser.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_the_optimiser_is_what_the_engine_serves(torch: Any, tmp_path: Path, dtype: Any) -> None:
    from slipstream.plugins.torch_trainer import share_weights

    config = small()
    module = hf_model(config, seed=1).to("cuda", getattr(torch, dtype))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
    options = EmbeddedConfig(max_num_seqs=8, max_model_len=64, dtype=dtype)
    with slipstream.launch(write_config(tmp_path / "m", config), engine=options, run_dir=tmp_path / "run") as bridge:
        shared = share_weights(bridge, module)
        before = by_engine(bridge)
        for version in range(1, 6):
            learn(torch, module, optimiser, shared)
            assert shared.version == version
            if dtype == "float32":
                assert by_engine(bridge) == by_transformers(module)
            assert bridge.verify(dict(module.named_parameters())).differences == ()
        assert by_engine(bridge) != before
        report = shared.report
        assert report is not None and report.num_bytes == 0 and report.engines[0].transport == "shared-cuda"
        print(f"{dtype}: an engine stood still for {1e3 * report.pause_seconds:.2f} ms at the last update")


def test_there_is_one_copy_of_the_parameters(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.plugins.torch_trainer import share_weights, update_weights

    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")  # else the engine keeps what it has freed, for later

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    config = small(**LARGE)
    module = hf_model(config, seed=1).to("cuda")
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
    with slipstream.launch(write_config(tmp_path / "m", config), engine=OPTIONS, run_dir=tmp_path / "run") as bridge:
        update_weights(bridge, module)
        assert by_engine(bridge) == by_transformers(module)
        copied = used()
        shared = share_weights(bridge, module)
        for _ in range(3):
            learn(torch, module, optimiser, shared)
            module.zero_grad(set_to_none=True)
            assert by_engine(bridge) == by_transformers(module)
        together = used()
    print(f"{size / 1e9:.2f} GB of parameters; used after a copy {copied / 1e9:.2f} GB, shared {together / 1e9:.2f} GB")
    assert together < copied - size / 2, "the engine has a copy of its own"


KILLED = """
import os, signal, sys, torch, slipstream
from slipstream.plugins.torch_trainer import share_weights
from tests.tiny import hf_model, tiny_config
module = hf_model(tiny_config(head_dim=16), seed=2).to("cuda")
bridge = slipstream.connect(sys.argv[1])
shared = share_weights(bridge, module)
if sys.argv[2] == "inside":
    shared.hold()
print("shared", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("where", ["between", "inside"])
def test_a_trainer_that_is_killed_while_its_memory_is_mapped(torch: Any, tmp_path: Path, where: str) -> None:
    from slipstream.plugins.torch_trainer import share_weights

    config = small()
    model, run = write_config(tmp_path / "m", config), tmp_path / "run"
    with slipstream.launch(model, engine=OPTIONS, run_dir=run) as bridge:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(run), where],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL and "shared" in done.stdout, done.stderr
        if where == "between":
            expected = by_transformers(hf_model(config, seed=2).to("cuda"))
            assert by_engine(bridge) == expected, "the last version of the trainer that is gone"
        module = hf_model(config, seed=3).to("cuda")
        share_weights(bridge, module)
        assert by_engine(bridge) == by_transformers(module)


def test_a_module_elsewhere_is_refused(torch: Any, tmp_path: Path) -> None:
    from slipstream.plugins.torch_trainer import share_weights

    config = small()
    model, run = write_config(tmp_path / "m", config), tmp_path / "run"
    with (
        slipstream.launch(model, engine=OPTIONS, run_dir=run) as bridge,
        pytest.raises(Unsupported, match=r"serve from memory on cuda:0, but .* is on cpu"),
    ):
        share_weights(bridge, hf_model(config, seed=1))


def test_the_example_runs(torch: Any) -> None:
    example = Path(__file__).parents[2] / "examples" / "torch_trainer.py"
    done = subprocess.run(
        [sys.executable, str(example), "--steps", "20", "--device", "cuda"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "engine and module agree: True" in done.stdout
