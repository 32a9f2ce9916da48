"""Weight syncs from a JAX trainer to real vLLM on the same GPU: device to device, and with either side killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import slipstream
from slipstream.errors import ChecksumMismatch, NonFiniteWeights, SlipstreamError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.types import SamplingParams, VersionSpan
from slipstream.weights.update.device_scan import DeviceScanner
from tests.conformance.engines import Subject, greedy_reference
from tests.gpu.vllm import engine_options, memory_in_use, needs_vllm
from tests.tiny import random_params, tiny_config, write_config
from tests.vllm.test_mapping import FAMILIES, models, ranks

pytestmark = [pytest.mark.gpu, needs_vllm]

PROMPTS = [(5, 6, 7), (40, 41, 42, 43, 44), (9,)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ROOT = Path(__file__).parents[2]


def config_of(family: str = "llama", **over: Any) -> ModelConfig:
    return tiny_config(family, hidden_size=128, head_dim=32, **over)


def expected(params: Any, prompt: tuple[int, ...], config: ModelConfig | None = None) -> tuple[int, ...]:
    config = config or config_of()
    return greedy_reference(Subject(None, config, params), prompt, 10)  # type: ignore[arg-type]


def test_a_direct_write_equals_vllms_loader_bit_for_bit(tmp_path: Path) -> None:
    """Every parameter of every family, after all that vLLM does to weights on a GPU."""
    (answers,) = ranks(tmp_path, 1, "bfloat16", models(tmp_path))
    assert len(answers) == len(FAMILIES)
    for family, answer in zip(FAMILIES, answers):
        print(
            f"  {family}: {len(answer['parameters'])} parameters, failed {answer['failed']}, differing {answer['differing']}"
        )
        assert answer["failed"] == {} and answer["differing"] == [], family


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write_config(tmp_path_factory.mktemp("model"), config_of())
    run_dir = tmp_path_factory.mktemp("run") / "run"
    with slipstream.launch(directory, engine=engine_options(), run_dir=run_dir, start_timeout=300) as it:
        yield it


@pytest.fixture
def bridge(fleet: Any) -> Iterator[Any]:
    """A trainer: a fleet takes updates from one at a time, so each test has its own."""
    with slipstream.connect(fleet.run_dir) as it:
        yield it


def test_ten_syncs_in_a_row_each_read_from_the_trainers_memory(bridge: Any) -> None:
    seen = set()
    for seed in range(10):
        params = jax.tree.map(jnp.asarray, random_params(config_of(), seed))
        report = bridge.sync(params)
        assert [engine.transport for engine in report.engines] == ["cuda"]
        for completion, prompt in zip(bridge.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
            assert completion.token_ids == expected(params, prompt), seed
            assert completion.spans == (VersionSpan(report.version, 0, 10),)
            seen.add(completion.token_ids)
    assert len(seen) == 10 * len(PROMPTS)


def test_unchanged_tensors_are_not_read(bridge: Any) -> None:
    params = jax.tree.map(jnp.asarray, random_params(config_of(), 3))
    bridge.sync(params)
    assert bridge.sync(params).num_bytes == 0
    named = hf_weights.flatten(params)
    named["model.norm.weight"] = named["model.norm.weight"] * 0.5
    assert bridge.sync(hf_weights.unflatten(named)).num_bytes == named["model.norm.weight"].nbytes
    found = bridge.generate(PROMPTS[:1], GREEDY)[0].token_ids
    assert found == expected(hf_weights.unflatten(named), PROMPTS[0])


@pytest.mark.parametrize("transport", ["nccl", "shm"])
def test_the_same_weights_over_other_transports(fleet: Any, transport: str) -> None:
    for way, seeds in ((transport, (20, 21, 22)), ("cuda", (23, 24))):
        with slipstream.connect(fleet.run_dir, transport=way) as bridge:
            for seed in seeds:
                params = jax.tree.map(jnp.asarray, random_params(config_of(), seed))
                assert bridge.sync(params).engines[0].transport == way
                assert bridge.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected(params, PROMPTS[0])


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_bytes_that_differ_and_values_that_are_not_finite_are_refused(
    fleet: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the old version serves, and the next sync works."""
    old, new = (jax.tree.map(jnp.asarray, random_params(config_of(), seed)) for seed in (30, 31))
    with slipstream.connect(fleet.run_dir, transport=transport) as bridge:
        report = bridge.sync(old)
        assert report.engines[0].checksummed
        scan = DeviceScanner.scan

        def wrong(scanner: DeviceScanner, pieces: Any) -> Any:
            scans = scan(scanner, pieces)
            victim = max(scans)
            return scans | {victim: scans[victim]._replace(checksum=scans[victim].checksum ^ 1)}

        monkeypatch.setattr(DeviceScanner, "scan", wrong)
        with pytest.raises(ChecksumMismatch, match=r"with checksum [0-9a-f]{8}"):
            bridge.sync(new)
        monkeypatch.undo()
        bad = hf_weights.unflatten(hf_weights.flatten(new) | {"model.norm.weight": jnp.full(128, jnp.nan)})
        with pytest.raises(NonFiniteWeights, match=r"model.norm.weight \(128 of 128 values\)"):
            bridge.sync(bad)
        assert bridge.version == report.version
        assert bridge.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected(old, PROMPTS[0])
        assert bridge.sync(new).version == report.version + 1
        assert bridge.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected(new, PROMPTS[0])


def test_vllm_computes_what_the_trainer_does(bridge: Any) -> None:
    params = jax.tree.map(jnp.asarray, random_params(config_of(), 32))

    def score(sequences: Any) -> Any:
        return decoder.logprobs(params, config_of(), jnp.asarray(sequences)).tolist()

    gap = bridge.sync(params, canary=score).engines[0].canary_gap
    print(f"  {gap:.3g} nats per token")
    assert gap < 0.1
    other = jax.tree.map(jnp.asarray, random_params(config_of(), 33))
    assert bridge.sync(other, canary=score).engines[0].canary_gap > 0.5


def test_seeds_determine_samples_alone_or_in_a_batch(bridge: Any) -> None:
    bridge.sync(jax.tree.map(jnp.asarray, random_params(config_of(), 5)))
    sampling = SamplingParams(max_tokens=6, n=8, seed=5, ignore_eos=True)
    together = bridge.generate(PROMPTS, sampling)
    assert len({c.token_ids for c in together}) > 18
    for index, prompt in enumerate(PROMPTS):
        alone = bridge.generate([prompt], sampling)
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[8 * index : 8 * index + 8]]


def test_draws_follow_the_models_distribution(bridge: Any) -> None:
    """4,096 first tokens against the engine's own probabilities: a wrong kernel would not pass."""
    bridge.sync(jax.tree.map(jnp.asarray, random_params(config_of(), 6)))
    (top,) = bridge.generate([PROMPTS[0]], SamplingParams(max_tokens=1, top_logprobs=20, ignore_eos=True))
    probabilities = {t: np.exp(p) for t, p in zip(top.top_logprobs[0].token_ids, top.top_logprobs[0].logprobs)}
    draws = [
        c.token_ids[0]
        for c in bridge.generate([PROMPTS[0]], SamplingParams(max_tokens=1, n=4096, seed=1, ignore_eos=True))
    ]
    square = 0.0
    for token, p in probabilities.items():
        wanted = 4096 * p
        square += (draws.count(token) - wanted) ** 2 / wanted
    print(f"  chi-square over the 20 likeliest tokens: {square:.1f}")
    assert square < 60  # 20 degrees of freedom: once in a hundred thousand


# --- memory ---


def test_sleep_frees_gpu_memory_and_a_sync_in_between_wakes_the_weights(tmp_path: Path) -> None:
    """In the order of a trainer and an engine that take turns: sleep, train, wake weights, sync, wake the KV cache."""
    config = ModelConfig(
        "llama", vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_layers=8, num_heads=16, num_kv_heads=8,
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    directory = write_config(tmp_path / "model", config)
    options = engine_options(dtype="bfloat16", kv_cache_tokens=400_000, max_model_len=1024)
    params = [jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), random_params(config, s)) for s in range(2)]
    with slipstream.launch(directory, engine=options, run_dir=tmp_path / "run", start_timeout=300) as bridge:
        bridge.sync(params[0])
        first = bridge.generate(PROMPTS, GREEDY)
        used, report = {"awake": memory_in_use()}, {"awake": bridge.memory()["engine-0"]}
        for level in (1, 2):
            report[f"asleep, level {level}"] = bridge.sleep(level)["engine-0"]
            used[f"asleep, level {level}"] = memory_in_use()
            if level == 1:
                report["weights awake"] = bridge.wake("weights")["engine-0"]
                used["weights awake"] = memory_in_use()
            bridge.sync(params[level - 1])
            used[f"synced after level {level}"] = memory_in_use()
            report[f"all awake after level {level}"] = bridge.wake()["engine-0"]
            used[f"all awake after level {level}"] = memory_in_use()
            assert [c.token_ids for c in bridge.generate(PROMPTS, GREEDY)] == [c.token_ids for c in first] or level == 2
        for moment, in_use in used.items():
            print(f"  {moment:28s} {in_use / 1e9:6.2f} GB of the device; the engine says {report.get(moment, '')}")
        kv_cache, weights = report["awake"].kv_cache, report["awake"].weights
        assert kv_cache > 5e9 and weights > 2e8
        for level in (1, 2):
            assert used["awake"] - used[f"asleep, level {level}"] > 0.95 * (kv_cache + weights)
            assert report[f"asleep, level {level}"].in_use == 0
            assert abs(used["awake"] - used[f"all awake after level {level}"]) < 0.1 * kv_cache
        assert used["weights awake"] - used["asleep, level 1"] > 0.9 * weights
        assert [c.version for c in bridge.generate(PROMPTS, GREEDY)] == [bridge.version] * 3


# --- faults ---


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


TRAINER = """
import sys, time
import jax, jax.numpy as jnp
import slipstream
from tests.gpu.test_vllm_gpu import config_of
from tests.tiny import random_params
bridge = slipstream.connect(sys.argv[1], transport=sys.argv[2])
ballast = jax.block_until_ready(jnp.ones((1 << 30,), jnp.bfloat16))  # memory that would be missed
for seed in range(30, 33):
    report = bridge.sync(jax.tree.map(jnp.asarray, random_params(config_of(), seed)))
print(report.engines[0].transport, flush=True)
if sys.argv[3] == "busy":
    while True:
        seed += 1
        bridge.sync(jax.tree.map(jnp.asarray, random_params(config_of(), seed)))
time.sleep(600)
"""


def other_trainer(run_dir: str, transport: str, then: str = "", **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"} | variables
    command = [sys.executable, "-c", TRAINER, run_dir, transport, then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def test_memory_that_cannot_be_exported_is_staged(fleet: Any) -> None:
    with other_trainer(fleet.run_dir, "cuda", XLA_PYTHON_CLIENT_ALLOCATOR="cuda_async") as process:
        assert process.stdout is not None and process.stdout.readline() == "cuda, staged\n"
        process.kill()
    assert fleet.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected(random_params(config_of(), 32), PROMPTS[0])


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
@pytest.mark.parametrize("then", ["idle", "busy"])
def test_a_killed_trainer_leaves_the_engine_serving_and_its_memory_free(fleet: Any, transport: str, then: str) -> None:
    before = memory_in_use()
    with other_trainer(fleet.run_dir, transport, then) as process:
        assert process.stdout is not None and process.stdout.readline() == f"{transport}\n"
        time.sleep(0.5)
        assert memory_in_use() > before + (2 << 30)
        process.send_signal(signal.SIGKILL)
    until(lambda: memory_in_use() < before + (1 << 30))
    assert len(fleet.generate(PROMPTS, GREEDY)) == 3
    params = jax.tree.map(jnp.asarray, random_params(config_of(), 40))
    with slipstream.connect(fleet.run_dir) as bridge:
        until(lambda: synced(bridge, params), 60.0)
    assert fleet.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected(params, PROMPTS[0])


def synced(bridge: Any, params: Any) -> bool:
    """The gateway may still be busy with the update of the dead."""
    try:
        bridge.sync(params)
        return True
    except SlipstreamError as error:
        print(f"  not yet: {type(error).__name__}: {error}")
        return False


def test_a_killed_engine_is_a_typed_error_and_leaves_no_process(tmp_path: Path) -> None:
    """In mid-generation with syncs under way; then the next run starts clean."""
    directory = write_config(tmp_path / "model", config_of(max_position_embeddings=4096))
    before = memory_in_use()
    for turn, transport in enumerate(("cuda", "nccl")):
        options = engine_options(max_model_len=4096, kv_cache_tokens=40_000)
        run_dir = tmp_path / f"run{turn}"
        with slipstream.launch(
            directory, engine=options, run_dir=run_dir, transport=transport, timeout=20, start_timeout=300
        ) as bridge:
            params = [
                jax.tree.map(jnp.asarray, random_params(config_of(max_position_embeddings=4096), s)) for s in range(2)
            ]
            bridge.sync(params[0])
            bridge.generate(PROMPTS, GREEDY)  # kernels are compiled
            failures: list[BaseException] = []

            def generate(bridge: Any = bridge, failures: Any = failures) -> None:
                try:
                    bridge.generate(PROMPTS, SamplingParams(max_tokens=4000, ignore_eos=True))
                except SlipstreamError as error:
                    failures.append(error)

            thread = threading.Thread(target=generate)
            thread.start()
            (engine,) = bridge.status().engines
            family = psutil.Process(engine.info.pid).children(recursive=True)
            killer = threading.Timer(0.05, os.kill, (engine.info.pid, signal.SIGKILL))
            with pytest.raises(SlipstreamError, match="engine-0") as caught:
                for step in range(1, 100_000):
                    if step == 5:  # it dies among syncs that go through while it generates
                        killer.start()
                    bridge.sync(params[step % 2])
            print(f"  {transport}: sync {step}: {type(caught.value).__name__}: {str(caught.value)[:160]}")
            thread.join(30)
            assert not thread.is_alive() and len(failures) == 1
            print(f"  {transport}: generate: {type(failures[0]).__name__}: {str(failures[0])[:160]}")
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, [p.cmdline() for p in alive]
    until(lambda: memory_in_use() < before + (1 << 30))
