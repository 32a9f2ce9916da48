"""`launch` end to end: trainer here, gateway and engines in other processes, weights over shared memory."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.deploy.processes.run_dir import read_run_dir
from slipstream.errors import (
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    EngineLost,
    GatewayLost,
    InvalidPrompt,
    InvalidSampling,
    LaunchFailed,
    MappingError,
    NotReady,
    Unauthorized,
    UnknownEngine,
)
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.transformer import decoder
from slipstream.types import SamplingParams
from slipstream.weights.transports.host import shm
from slipstream.weights.transports.host.in_place import InPlaceSender

PROMPTS = ["123=", (20, 21, 22), "7="]
SAMPLING = SamplingParams(max_tokens=5, n=2, seed=3)
OPTIONS = EmbeddedConfig(max_num_seqs=8, max_model_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with weights (version 0), and three more sets of weights, scaled so that completions differ."""
    directory = tmp_path_factory.mktemp("model")
    config = write_sample_config(directory)

    def weights(seed):
        return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, decoder.init(config, jax.random.key(seed)))

    hf_weights.save(directory, weights(0), config)
    return directory, config, [weights(seed) for seed in range(1, 4)]


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    """Two engines and a gateway, shared by tests that do not damage it."""
    with slipstream.launch(
        model[0], engines=2, engine=OPTIONS, run_dir=tmp_path_factory.mktemp("run"), timeout=20
    ) as bridge:
        yield bridge


def tokens(bridge, sampling=SAMPLING, **where):
    return [c.token_ids for c in bridge.generate(PROMPTS, sampling, **where)]


@pytest.fixture(scope="module")
def expected(model):
    """The tokens of an engine in this process with each set of weights."""
    with slipstream.inprocess(model[0], engine=OPTIONS) as bridge:

        def of(params):
            bridge.sync(params)
            return tokens(bridge)

        return [of(params) for params in model[2]]


def segments():
    return sorted(p.name for p in shm.directory().glob(f"slipstream-{os.getuid()}-*"))


def test_after_a_sync_every_engine_speaks_with_the_new_weights(model, fleet, expected):
    before = tokens(fleet)
    for params, wanted in zip(model[2][:2], expected):
        report = fleet.sync(params)
        assert wanted != before
        for engine in ("engine-0", "engine-1"):
            completions = fleet.generate(PROMPTS, SAMPLING, engine=engine)
            assert [c.token_ids for c in completions] == wanted
            assert {c.version for c in completions} == {report.version} == {fleet.version}
            assert {c.engine for c in completions} == {engine}
        before = wanted
    assert {e.transport for e in report.engines} == {"shm"} and len(report.engines) == 2
    assert report.bytes_per_second > 0
    unchanged = fleet.sync(params)
    assert unchanged.num_bytes == 0 and unchanged.version == report.version + 1 and tokens(fleet) == wanted
    norm = {"model.norm.weight": params["model"]["norm"]["weight"] * 3}
    assert fleet.sync(norm, partial=True).num_bytes == 2 * 64 * 4
    assert tokens(fleet) != wanted
    fleet.sync(params)
    assert tokens(fleet) == wanted
    assert segments() == []  # names are removed after mapping


def test_order_and_grouping_of_completions(fleet, model):
    fleet.sync(model[2][0])
    completions = fleet.generate(PROMPTS, SAMPLING)
    assert [(c.prompt_index, c.sample_index) for c in completions] == [(i, k) for i in range(3) for k in range(2)]
    assert completions[2].prompt_token_ids == (20, 21, 22)
    streamed = {(c.prompt_index, c.sample_index): c.token_ids for c in fleet.stream(PROMPTS, SAMPLING)}
    assert streamed == {(c.prompt_index, c.sample_index): c.token_ids for c in completions}
    per_prompt = [
        SamplingParams(max_tokens=2, seed=1),
        SamplingParams(max_tokens=3, seed=1, n=2),
        SamplingParams(max_tokens=1, seed=1),
    ]
    assert [c.prompt_index for c in fleet.generate(PROMPTS, per_prompt)] == [0, 1, 1, 2]
    assert fleet.generate([], SAMPLING) == [] and fleet.score([]) == []


def test_logprobs_are_the_trainers_own(model, fleet):
    _, config, (params, *_) = model
    fleet.sync(params)
    completions = fleet.generate(PROMPTS, SamplingParams(max_tokens=6, n=4, seed=11))
    sequences = np.zeros((len(completions), 16), np.int32)  # padded at their ends: one shape for all
    for row, c in zip(sequences, completions):
        row[: len(c.prompt_token_ids + c.token_ids)] = c.prompt_token_ids + c.token_ids
    for c, row in zip(completions, np.asarray(decoder.logprobs(params, config, jnp.asarray(sequences)))):
        own = row[len(c.prompt_token_ids) - 1 : len(c.prompt_token_ids + c.token_ids) - 1]
        np.testing.assert_allclose(c.logprobs, own, atol=1e-5)
        np.testing.assert_allclose(c.raw_logprobs, own, atol=1e-5)
    scores = fleet.score([c.prompt_token_ids + c.token_ids for c in completions])
    for c, score in zip(completions, scores):
        np.testing.assert_allclose(score.logprobs[len(c.prompt_token_ids) - 1 :], c.raw_logprobs, atol=1e-5)
        assert score.version == fleet.version


def test_a_corrupted_chunk_is_refused_and_the_old_version_goes_on(model, fleet, monkeypatch):
    fleet.sync(model[2][0])
    before, version = tokens(fleet), fleet.version
    send = InPlaceSender.send

    def corrupting(sender, index, array):
        checksum = send(sender, index, array)
        if array.shape == (192, 64):
            sender._pieces[index][7, 3] += 1
        return checksum

    monkeypatch.setattr(InPlaceSender, "send", corrupting)
    with pytest.raises(
        ChecksumMismatch, match=r"engine 'engine-[01]', rank 0: model\.layers\.0\.mlp\.(gate|up)_proj\.weight"
    ):
        fleet.sync(model[2][1])
    assert tokens(fleet) == before and fleet.version == version
    assert {e.state for e in fleet.status().engines} == {"ready"}
    monkeypatch.undo()
    fleet.sync(model[2][1])
    assert tokens(fleet) != before and fleet.version == version + 1
    assert segments() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["model"].pop("norm"), "missing: model.norm.weight"),
        (lambda p: p["model"]["norm"].update(weight=jnp.ones(63)), r"expects shape \[64\], the trainer has \[63\]"),
        (lambda p: p.update(extra=jnp.ones(3)), "not in the model: extra"),
    ],
)
def test_trees_that_do_not_fit_are_refused_before_a_byte_moves(model, fleet, change, said):
    fleet.sync(model[2][0])
    before, version = tokens(fleet), fleet.version
    wrong = jax.tree.map(lambda x: x, model[2][1])
    change(wrong)
    with pytest.raises(MappingError, match=said):
        fleet.sync(wrong)
    assert tokens(fleet) == before and fleet.version == version


def test_connect_by_directory_and_by_address(model, fleet):
    fleet.sync(model[2][0])
    with slipstream.connect(fleet.run_dir) as other:
        assert other.version == fleet.version and tokens(other) == tokens(fleet)
    run_dir = Path(fleet.run_dir)
    address, token, _ = read_run_dir(run_dir)
    with slipstream.connect(f"grpc://{address}", token=token) as other:
        assert tokens(other) == tokens(fleet)
    with pytest.raises(Unauthorized):
        slipstream.connect(address, token="wrong")
    with pytest.raises(Unauthorized, match="SLIPSTREAM_TOKEN"):
        slipstream.connect(address)
    with pytest.raises(ConfigError, match="neither a run directory"):
        slipstream.connect("nowhere")
    assert (run_dir / "token").stat().st_mode & 0o777 == 0o600


def test_bad_requests_are_typed_and_the_fleet_goes_on(model, fleet):
    fleet.sync(model[2][0])
    for call, error, said in (
        (lambda: fleet.generate([[]], SAMPLING), InvalidPrompt, "prompt 0 of 1"),
        (lambda: fleet.generate("text", SAMPLING), InvalidPrompt, "list of prompts"),
        (lambda: fleet.generate([[1.5]], SAMPLING), InvalidPrompt, "integers"),
        (lambda: fleet.generate([[1], [-1]], SAMPLING), InvalidPrompt, "prompt 1 of 2"),
        (lambda: fleet.generate([[10**6]], SAMPLING), InvalidPrompt, "prompt 0 of 1"),
        (lambda: fleet.generate([[5] * 200], SAMPLING), InvalidPrompt, "prompt 0 of 1"),
        (lambda: fleet.generate(["1="] * 2, [SAMPLING]), InvalidSampling, "1 sampling_params for 2 prompts"),
        (lambda: fleet.generate(["1="], SAMPLING, engine="zebra"), UnknownEngine, "zebra"),
        (lambda: fleet.score([[10**6, 1]]), InvalidPrompt, "1000000"),
        (lambda: SamplingParams(n=0), InvalidSampling, "n must be"),
        (lambda: SamplingParams(top_p=0), InvalidSampling, "top_p"),
        (lambda: SamplingParams(temperature=float("nan")), InvalidSampling, "temperature"),
        (lambda: SamplingParams(seed=-1), InvalidSampling, "seed"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert len(tokens(fleet)) == 6


def test_an_engine_killed_while_generating_and_then_the_gateway(model, fleet):
    """The last test of this fleet: the first death costs no sample; the second is a typed error and takes the other engine
    along."""
    fleet.sync(model[2][0])
    sampling = SamplingParams(max_tokens=50, ignore_eos=True, n=8, seed=2)
    prompts = ["12="] * 8
    fleet.generate(prompts, sampling)  # compile, so that the kill happens during generation
    victim, survivor = (engine.info for engine in fleet.status().engines)
    stream = fleet.stream(prompts, sampling)
    first = next(stream)
    os.kill(victim.pid, signal.SIGKILL)
    rest = list(stream)
    answered = [(c.prompt_index, c.sample_index, len(c.token_ids)) for c in (first, *rest)]
    assert sorted(answered) == [(prompt, sample, 50) for prompt in range(8) for sample in range(8)]
    os.kill(json.loads((Path(fleet.run_dir) / "gateway.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(GatewayLost, match=r"127\.0\.0\.1"):
        fleet.generate(["1="], SAMPLING)
    with pytest.raises(GatewayLost):
        fleet.sync(model[2][0])
    _until(lambda: not _alive(survivor.pid))
    assert segments() == []


def _until(done, seconds=120):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_engines_that_cannot_start_say_why(tmp_path):
    write_sample_config(tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(LaunchFailed, match=r"engine-0 exited with code[\s\S]*model\.safetensors"):
        slipstream.launch(tmp_path / "torn", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="engines must be at least 1"):
        slipstream.launch(tmp_path, engines=0)


def test_the_first_sync_brings_weights_and_a_stopped_engine_comes_back_with_them(model, expected, tmp_path):
    write_sample_config(tmp_path / "bare")
    gateway = slipstream.GatewayConfig(lease_seconds=2.0)
    with slipstream.launch(
        tmp_path / "bare", engine=OPTIONS, gateway=gateway, run_dir=tmp_path / "run", timeout=10
    ) as bridge:
        assert bridge.version == -1
        with pytest.raises(NotReady, match=r"bridge\.sync"):
            bridge.generate(["1="], SAMPLING)
        bridge.sync(model[2][0])
        assert bridge.version == 0 and tokens(bridge) == expected[0]
        (engine,) = bridge.status().engines
        os.kill(engine.info.pid, signal.SIGSTOP)
        with pytest.raises((EngineLost, DeadlineExceeded), match="engine-0"):
            bridge.sync(model[2][1])
        _until(lambda: bridge.status().engines[0].state == "lost")
        with pytest.raises(NotReady, match="engine-0: lost"):
            bridge.generate(["1="], SAMPLING)
        for call in (bridge.sync, bridge.verify):
            with pytest.raises(NotReady, match=r"all are lost.*engine-0: no heartbeat"):
                call(model[2][1])
        os.kill(engine.info.pid, signal.SIGCONT)
        _until(lambda: bridge.status().engines[0].state == "ready")
        assert tokens(bridge) == expected[0]
        bridge.sync(model[2][1])
        assert tokens(bridge) == expected[1]
