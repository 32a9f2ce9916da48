"""One real vLLM engine: the conformance suite, and weight syncs from a JAX trainer, repeated, during generation, and failing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import slipstream
from slipstream.errors import EngineFailure, EngineLost, NotReady
from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig
from slipstream.types import Completion, SamplingParams, VersionSpan
from tests.conformance.engines import Subject, collected, greedy_reference, other_params, request, started, update_of
from tests.engines.attached import attached
from tests.tiny import hf_model, random_params, tiny_config, write_tokenizer
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

PROMPTS = [(5, 6, 7), (40, 41, 42, 43, 44), (9,)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


ARGUMENTS = {
    "seed": 7,
    "block_size": 32,
    "disable_cascade_attn": True,
    "disable_log_stats": False,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 12,
    "prefix_caching_hash_algo": "sha256_cbor",
    "stream_interval": 2,
    "trust_remote_code": True,
}
"""Arguments of vLLM that keep all promises, together (`argument_results.py`)."""


def config_of(**over: Any) -> ModelConfig:
    return tiny_config("llama", hidden_size=128, head_dim=32, rope_theta=1e6, **over)  # the theta of Tunix's Llama


BREAKS = """
import os
from after_import import after_import

def patch(module):
    load = module.WorkerExtension._slipstream_weights

    def weights(self, tensors, dtype):
        for index, pair in enumerate(load(self, tensors, dtype)):
            if index == 5 and os.path.exists(os.environ["BREAK"]):
                os.unlink(os.environ["BREAK"])
                raise MemoryError("no room for the sixth tensor")
            yield pair

    module.WorkerExtension._slipstream_weights = weights

after_import("slipstream.engines.vllm.worker_extension", patch)
"""
"""While the file exists, a worker's next load fails halfway."""


@pytest.fixture(scope="module")
def break_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("break") / "now"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, run_dir: Path, break_file: Path) -> Iterator[Subject]:
    config = config_of()
    params = random_params(config)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params, config)
    write_tokenizer(directory)
    (break_file.parent / "sitecustomize.py").write_text(BREAKS)
    shutil.copy(Path(__file__).with_name("after_import.py"), break_file.parent)
    path = os.pathsep.join([str(break_file.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "BREAK": str(break_file)}
    # Long prompts are computed in parts.
    options = ("kind=vllm", "max_num_seqs=4", "max_num_batched_tokens=16", f"vllm={json.dumps(ARGUMENTS)}")
    with attached(PYTHON, directory, run_dir, *options, **variables) as engine:
        bounded = ("presence_penalty", "frequency_penalty")
        yield Subject(engine, config, params, tolerance=1e-4, bounded=bounded)


@pytest.fixture(scope="module")
def bridge(subject: Subject, run_dir: Path) -> Iterator[Any]:
    """A trainer of the same engine."""
    with slipstream.connect(run_dir) as it:
        yield it


# --- one engine, without a trainer ---


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_version_that_workers_fail_to_load_is_undone(subject: Subject, break_file: Path, when: str) -> None:
    """At first the checkpoint serves, later an update."""
    engine, run, prompt, new = subject.engine, subject.runner.run, subject.prompts[4], other_params(subject)
    expected = greedy_reference(subject, prompt, 8)
    info = engine.describe()
    assert (info.version == 0) == (when == "first")
    version = info.version + 1
    update = update_of(info, new, version)
    run(engine.stage(version, update.send(run(engine.begin(version, update.offer)))))
    break_file.touch()
    with pytest.raises(EngineFailure, match=rf"loading version {version}.*no room for the sixth tensor"):
        run(engine.commit(version))
    assert not break_file.exists()
    run(engine.rollback(version))
    again = subject.complete(prompt, temperature=0)
    assert (again.token_ids, again.version) == (expected, info.version)
    assert subject.publish(new) == version
    assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8, new)
    subject.publish(subject.params)


# --- what every engine does; after the test above, which needs a new one ---

from tests.conformance.engines import *  # noqa: E402, F403

# --- what vLLM does ---


def test_memory_that_workers_cannot_map_fails_before_anything_changes(subject: Subject) -> None:
    engine, run, info = subject.engine, subject.runner.run, subject.engine.describe()
    version = info.version + 1
    update = update_of(info, other_params(subject), version)
    destinations = run(engine.begin(version, update.offer))
    manifests = update.send(destinations)
    Path(json.loads(destinations.links[0][0])["path"]).unlink()
    with pytest.raises(EngineFailure, match=r"workers failed to map the shared memory.*No such file"):
        run(engine.stage(version, manifests))
    run(engine.rollback(version))
    assert subject.complete(subject.prompts[4], temperature=0).token_ids == greedy_reference(
        subject, subject.prompts[4], 8
    )


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_spans_are_exact(subject: Subject, in_flight: Any) -> None:
    """Pause the engine during a request, replace its weights, and resume it."""
    engine, new, prompt = subject.engine, other_params(subject), subject.prompts[2]
    old = engine.describe().version
    long = request("long", prompt, max_tokens=100)
    alone = subject.complete(prompt, max_tokens=100)

    async def scenario() -> Completion:
        update = update_of(engine.describe(), new, old + 1)
        await engine.stage(old + 1, update.send(await engine.begin(old + 1, update.offer)))
        running, _ = await started(subject, long)
        await engine.pause()
        await engine.commit(old + 1, in_flight)
        await engine.resume()
        (found,) = await running
        assert isinstance(found, Completion)
        return found

    found = subject.runner.run(scenario())
    assert [span.version for span in found.spans] == [old, old + 1]
    first, second = found.spans
    assert 0 < first.stop == second.start < second.stop == 100
    assert found.token_ids[: first.stop] == alone.token_ids[: first.stop]
    tokens = found.prompt_token_ids + found.token_ids
    rows = np.arange(len(prompt) - 1, len(tokens) - 1)
    old_logprobs, new_logprobs = (subject.logprobs(tokens, p)[rows, tokens[len(prompt) :]] for p in (None, new))
    split = first.stop
    np.testing.assert_allclose(found.raw_logprobs[:split], old_logprobs[:split], atol=1e-4)
    if in_flight == "recompute":
        np.testing.assert_allclose(found.raw_logprobs[split:], new_logprobs[split:], atol=1e-4)
    # The token at the border was drawn by the new weights, not by the old ones.
    assert abs(found.raw_logprobs[split] - old_logprobs[split]) > 1e-3
    subject.publish(subject.params)


def test_the_prefix_cache_of_an_older_version_is_never_used(subject: Subject) -> None:
    """A prompt longer than a block, sent before an update, and again by a request that waits during it."""
    engine, new = subject.engine, other_params(subject)
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(8, 96, 70).tolist())
    subject.complete(prompt, temperature=0, max_tokens=4)
    old = engine.describe().version

    async def scenario() -> Completion:
        await engine.pause()
        waiting = asyncio.create_task(collected(subject, request("waits", prompt, temperature=0, max_tokens=4)))
        await asyncio.sleep(0.1)
        update = update_of(engine.describe(), new, old + 1)
        await engine.stage(old + 1, update.send(await engine.begin(old + 1, update.offer)))
        await engine.commit(old + 1)
        await engine.resume()
        (found,) = await waiting
        assert isinstance(found, Completion)
        return found

    found = subject.runner.run(scenario())
    assert found.spans == (VersionSpan(old + 1, 0, 4),)
    assert found.token_ids == greedy_reference(subject, prompt, 4, new)
    subject.publish(subject.params)


# --- a trainer ---


def test_tunix_generates_with_this_engine_what_its_own_rollout_does(subject: Subject, run_dir: Path) -> None:
    """Before the other tests' trainer connects: a fleet has one."""
    from flax import nnx

    from tests.plugins import tunix_tiny
    from tests.plugins.test_tunix import GREEDY, PROMPTS, rollout_of, vanilla

    actor = tunix_tiny.make("llama3", num_layers=2, embed_dim=128, head_dim=32, norm_eps=subject.config.rms_norm_eps)
    rollout = rollout_of(actor, fleet=run_dir)
    before = rollout.last_sync.version
    # With these seeds no padding is drawn, which Tunix's own rollout would drop.
    for count, seed in enumerate((4, 5), start=1):
        nnx.update(actor, tunix_tiny.shaken(nnx.state(actor, nnx.Param), seed))
        rollout.update_params(nnx.state(actor, nnx.Param))
        assert rollout.last_sync.version == before + count
        theirs, ours = vanilla(actor).generate(PROMPTS, GREEDY), rollout.generate(PROMPTS, GREEDY)
        assert [t.tolist() for t in ours.tokens] == [t.tolist() for t in theirs.tokens]
        for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4)
    rollout.close()


def of_transformers(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return tuple(tokens[0, len(prompt) :].tolist())


def test_ten_syncs_each_generate_the_tokens_of_transformers(bridge: Any) -> None:
    seen, before = set(), bridge.status().version
    for seed in range(10):
        report = bridge.sync(random_params(config_of(), seed))
        assert report.version == bridge.status().version == before + 1 + seed
        model = hf_model(config_of(), seed)
        model.generation_config.eos_token_id = None
        for completion, prompt in zip(bridge.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
            assert completion.token_ids == of_transformers(model, prompt, 10), seed
            assert completion.spans == (VersionSpan(report.version, 0, 10),)
            seen.add(completion.token_ids)
    assert len(seen) == 10 * len(PROMPTS)  # other weights, other tokens


def test_unchanged_tensors_are_not_sent(bridge: Any) -> None:
    params = random_params(config_of(), 3)
    bridge.sync(params)
    assert bridge.sync(params).num_bytes == 0
    named = hf_weights.flatten(params)
    named["model.norm.weight"] = named["model.norm.weight"] * 0.5
    report = bridge.sync(hf_weights.unflatten(named))
    assert report.num_bytes == named["model.norm.weight"].nbytes
    (score,) = bridge.score([PROMPTS[1]])
    expected = reference_scores(hf_weights.unflatten(named), PROMPTS[1])
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)


def reference_scores(params: Any, tokens: tuple[int, ...]) -> np.ndarray:
    subject = Subject(None, config_of(), params)  # type: ignore[arg-type]
    return subject.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def test_text_prompts_and_stop_strings(bridge: Any) -> None:
    bridge.sync(random_params(config_of(), 4))
    (free,) = bridge.generate(["abc 12"], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert len(free.token_ids) == 20 and len(free.prompt_token_ids) == 6
    text = free.text
    stop = next(text[i : i + 2] for i in range(4, 15) if text.find(text[i : i + 2]) == i)
    (cut,) = bridge.generate(["abc 12"], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=(stop,)))
    assert cut.finish_reason == "stop"
    np.testing.assert_allclose(cut.raw_logprobs, free.raw_logprobs[: len(cut.token_ids)], atol=1e-5)
    assert cut.text == text[: text.find(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


def test_many_requests_with_stop_strings(bridge: Any) -> None:
    """Enough for vLLM to merge outputs before they are read."""
    how = {"max_tokens": 40, "n": 8, "seed": 9, "ignore_eos": True, "top_logprobs": 2}
    free = bridge.generate(["abc 12", "x"], SamplingParams(**how))
    cut = bridge.generate(["abc 12", "x"], SamplingParams(stop=("never to be found",), **how))
    for one, other in zip(free, cut, strict=True):
        assert one.token_ids == other.token_ids and len(other.top_logprobs) == 40
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-5)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert [t.token_ids for t in one.top_logprobs] == [t.token_ids for t in other.top_logprobs]


def test_seeds_determine_many_samples_of_a_prompt(bridge: Any) -> None:
    sampling = SamplingParams(max_tokens=6, n=12, seed=5, ignore_eos=True)
    first = [c.token_ids for c in bridge.generate(PROMPTS, sampling)]
    assert [c.token_ids for c in bridge.generate(PROMPTS, sampling)] == first
    assert len(set(first)) > 30


# --- failures ---


def test_an_engine_that_is_killed_while_it_starts_leaves_no_process(tmp_path: Path, preloaded: Preloaded) -> None:
    model = tmp_path / "model"
    hf_weights.save(model, random_params(config_of()), config_of())
    (tmp_path / "gateway.json").write_text(json.dumps({"address": "127.0.0.1:1"}))
    (tmp_path / "token").write_text("x" * 32)
    command = [PYTHON, "-m", "slipstream.cli", "engine", "kind=vllm", "--run-dir", str(tmp_path), "--model", str(model)]
    log = tmp_path / "log"
    process = preloaded.popen([*command, "--owner", str(preloaded.pid)], stdout=log, stderr=log, env=os.environ)
    family: list[psutil.Process] = []
    while sum(is_vllm(p) for p in family) < 2:  # the core and a worker, which loads the model
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=1200)
    assert not alive, alive


def is_vllm(process: psutil.Process) -> bool:
    """Not Python's resource tracker."""
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_killed_engine_leaves_no_process_and_no_shared_memory(bridge: Any) -> None:
    """Must run last: it ends the fleet of the other tests."""
    (engine,) = bridge.status().engines
    family = psutil.Process(engine.info.pid).children(recursive=True)
    assert len(family) >= 2  # the core and a worker
    shared = {map.path for process in family for map in process.memory_maps() if map.path.startswith("/dev/shm/")}
    assert shared and not [path for path in shared if Path(path).exists()], "what has a name outlives a kill of all"
    os.kill(engine.info.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=120)  # the core needs ten seconds after its worker
    assert not alive, [p.cmdline() for p in alive]
    with pytest.raises((EngineLost, NotReady), match="attached"):
        bridge.generate(PROMPTS, GREEDY)
