"""A real `vllm serve` on CPU, with the options that a user would give it, and weights synced from a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.bridge.in_process import LocalFleet
from slipstream.config import RemoteConfig
from slipstream.engines.remote.engine import RemoteEngine
from slipstream.errors import EngineFailure, NotReady, Unsupported
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion, VersionSpan
from slipstream.weights.transports.servers import vllm_nccl
from slipstream.weights.update.publisher import Publisher
from tests.conformance.engines import (
    Subject,
    collected,
    greedy_reference,
    other_params,
    request,
    started,
    # What holds for every engine holds for a server: those of the suite that need no memory of ours to land in.
    test_a_bad_prompt_fails_alone,  # noqa: F401
    test_a_stop_token_is_the_last_one,  # noqa: F401
    test_an_update_changes_what_is_generated_and_scored,  # noqa: F401
    test_closing_the_iterator_cancels_the_rest,  # noqa: F401
    test_description_fits_the_model,  # noqa: F401
    test_greedy_is_the_argmax_of_the_reference,  # noqa: F401
    test_logprobs_are_those_of_the_reference,  # noqa: F401
    test_no_stop_token_comes_before_the_minimum,  # noqa: F401
    test_one_seed_gives_one_set_of_samples,  # noqa: F401
    test_pause_and_resume_do_not_change_tokens,  # noqa: F401
    test_penalties_are_subtracted_or_divided_by,  # noqa: F401
    test_scores_are_the_raw_logprobs_of_the_reference,  # noqa: F401
    test_the_context_ends_a_completion,  # noqa: F401
    test_tokens_do_not_depend_on_the_batch,  # noqa: F401
    test_top_logprobs_are_the_likeliest_of_the_reference,  # noqa: F401
    test_truncation_keeps_the_likeliest_and_renormalizes,  # noqa: F401
)
from tests.engines import sockets
from tests.engines.sockets import SocketLibrary
from tests.tiny import hf_model, random_params, tiny_config
from tests.vllm.preloaded import Preloaded
from tests.vllm.real import PYTHON, needs_vllm

pytestmark = needs_vllm

START_SECONDS = 1500.0
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else a helper of the sampler is compiled, for a minute
}
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--served-model-name", "policy"),
    *("--max-model-len", "96", "--max-num-seqs", "4", "--logprobs-mode", "processed_logprobs"),
    *("--weight-transfer-config", '{"backend": "nccl"}', "--disable-uvicorn-access-log"),
)


@pytest.fixture(scope="module")
def break_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, a worker's next broadcast fails."""
    return tmp_path_factory.mktemp("break") / "now"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded, break_file: Path) -> Iterator[str]:
    """A server with the weights of a checkpoint, for the whole module."""
    directory, patches = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("patches")
    config = tiny_config("llama", hidden_size=128, head_dim=32)
    hf_weights.save(directory, random_params(config), config)
    shutil.copy(sockets.__file__, patches)
    for name in ("worker_sockets.py", "after_import.py"):
        shutil.copy(Path(__file__).with_name(name), patches)
    (patches / "sitecustomize.py").write_text("import worker_sockets\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    log = patches / "server.log"
    source = Path(vllm_nccl.__file__).parents[4]
    with open(log, "wb") as file:
        process = preloaded.popen(
            [*command, "--model", str(directory), *OPTIONS],
            stdout=file,
            stderr=file,
            env=os.environ | VARIABLES | {"PYTHONPATH": f"{patches}:{source}", "BREAK": str(break_file)},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # a server that is killed leaves its shared memory behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def library() -> Iterator[SocketLibrary]:
    before, library = vllm_nccl.library, SocketLibrary()
    vllm_nccl.library = library
    yield library
    library.close()
    vllm_nccl.library = before


@pytest.fixture(scope="module")
def subject(url: str, library: SocketLibrary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Must run first, while the server has the weights of its checkpoint."""
    config = tiny_config("llama", hidden_size=128, head_dim=32)
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, params := random_params(config), config)
    runner = asyncio.Runner()
    options = RemoteConfig(url=url, max_num_seqs=4)
    engine = runner.run(RemoteEngine.start(directory, options=options))
    bounded = ("presence_penalty", "frequency_penalty")
    yield Subject(engine, config, params, tolerance=1e-4, bounded=bounded, runner=runner)
    runner.run(engine.close())
    runner.close()


def of_transformers(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(tokens[0, len(prompt) :].tolist())


def test_syncs_each_generate_the_tokens_of_transformers(subject: Subject, library: SocketLibrary) -> None:
    """With one communicator, and buffers so small that a version is sent in several chunks."""
    info, prompt, seen = subject.engine.describe(), subject.prompts[4], set()
    publisher, first = Publisher(LocalFleet(subject.engine)), len(library.joined)
    before, vllm_nccl.BUFFER_BYTES = vllm_nccl.BUFFER_BYTES, 100_000
    try:
        for seed in (1, 2, 3):
            params, version = random_params(subject.config, seed), info.version + seed
            report = subject.runner.run(publisher.publish(params, (info,), version))
            assert (report.version, report.engines[0].transport) == (version, "vllm-nccl")
            assert report.num_bytes == sum(leaf.nbytes for leaf in hf_weights.flatten(params).values())
            found = subject.complete(prompt, temperature=0)
            assert found.token_ids == of_transformers(hf_model(subject.config, seed), prompt, 8)
            assert found.spans == (VersionSpan(version, 0, 8),)
            seen.add(found.token_ids)
        assert len(seen) == 3 and len(library.joined) == first + 1
        assert len(library.joined[first].broadcasts) > 3 * 3
        assert subject.runner.run(publisher.publish(params, (info,), version + 1)).num_bytes == 0  # nothing changed
        assert subject.complete(prompt, temperature=0).spans == (VersionSpan(version + 1, 0, 8),)
        part = {"model.norm.weight": hf_weights.flatten(params)["model.norm.weight"] * 2}
        with pytest.raises(Unsupported, match=r"all tensors or none"):
            subject.runner.run(publisher.publish(part, (info,), version + 2, partial=True))
    finally:
        vllm_nccl.BUFFER_BYTES = before
        publisher.close()
        subject.publish(subject.params)


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute", "requeue"])
def test_spans_are_exact(subject: Subject, in_flight: Any) -> None:
    engine, new, prompt, old = (
        subject.engine,
        other_params(subject),
        subject.prompts[2],
        subject.engine.describe().version,
    )
    info, publisher = engine.describe(), Publisher(LocalFleet(engine))

    async def scenario() -> Completion:
        running, _ = await started(subject, request("long", prompt, max_tokens=90))
        await publisher.publish(new, (info,), old + 1, in_flight)
        (found,) = await running
        assert isinstance(found, Completion)
        return found

    found = subject.runner.run(scenario())
    publisher.close()
    tokens = found.prompt_token_ids + found.token_ids
    rows = np.arange(len(prompt) - 1, len(tokens) - 1)
    for span in found.spans:
        params = new if span.version == old + 1 else None
        expected = subject.logprobs(tokens, params)[rows, tokens[len(prompt) :]]
        np.testing.assert_allclose(
            found.raw_logprobs[span.start : span.stop], expected[span.start : span.stop], atol=1e-4
        )
    assert len(found.token_ids) == 90 and found.spans[-1].stop == 90
    if in_flight in ("finish", "requeue"):
        assert len(found.spans) == 1
    subject.publish(subject.params)


def test_a_partial_update_is_never_served_and_the_next_sync_repairs_it(subject: Subject, break_file: Path) -> None:
    engine, run, prompt, new = subject.engine, subject.runner.run, subject.prompts[4], other_params(subject)
    info = engine.describe()
    before, vllm_nccl.BUFFER_BYTES = vllm_nccl.BUFFER_BYTES, 100_000
    try:
        break_file.touch()
        publisher = Publisher(LocalFleet(engine))
        with pytest.raises(EngineFailure, match=r"POST /update_weights with 500.*told to break in the middle"):
            run(publisher.publish(new, (info,), info.version + 1))
        assert not break_file.exists() and engine.describe().version == -1
        (failure,) = subject.generate(request("r", prompt))
        assert isinstance(failure.error, NotReady) and "sync" in str(failure.error)  # type: ignore[union-attr]
        with pytest.raises(NotReady):
            subject.score(prompt)
        run(publisher.publish(new, (info,), info.version + 1))
        assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8, new)
    finally:
        vllm_nccl.BUFFER_BYTES = before
        publisher.close()
        subject.publish(subject.params)


def test_a_rollback_before_the_commit_changes_nothing(subject: Subject) -> None:
    engine, run, prompt = subject.engine, subject.runner.run, subject.prompts[4]
    info = engine.describe()

    class Broken(LocalFleet):
        async def send_steps(self, steps: Any, drop_failed: bool = False) -> None:
            if any(engine_steps.in_flight is not None for engine_steps in steps.values()):
                raise Unsupported("another engine could not stage")
            await super().send_steps(steps, drop_failed)

    publisher = Publisher(Broken(engine))
    with pytest.raises(Unsupported, match="another engine"):
        run(publisher.publish(other_params(subject), (info,), info.version + 1))
    publisher.close()
    assert engine.describe().version == info.version
    assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8)


def test_a_server_without_sleep_mode_says_so(subject: Subject) -> None:
    with pytest.raises(Unsupported, match="--enable-sleep-mode"):
        subject.runner.run(subject.engine.sleep())
    report = subject.runner.run(subject.engine.memory())
    assert report.asleep == () and report.weights > 0 and report.kv_cache > 0


def test_weights_changed_by_another_client_are_noticed(subject: Subject, url: str) -> None:
    """Must run last: it ends the engine."""

    async def scenario() -> Any:
        await subject.engine._dialect.set_label("someone else's")  # type: ignore[attr-defined]
        return await collected(subject, request("r", subject.prompts[4]))

    (failure,) = subject.runner.run(scenario())
    assert "someone else's" in str(failure.error)
    assert subject.engine.ended.is_set()  # type: ignore[attr-defined]
