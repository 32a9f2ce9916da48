"""Shared weights between processes, and their behavior when one of them is killed."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import EngineLost, NotReady, SlipstreamError, UnknownVersion, UpdateInProgress, VersionError
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.transformer import decoder
from slipstream.model.tree import flatten
from slipstream.types import SamplingParams
from slipstream.weights.transports.host import shm

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
OPTIONS = EmbeddedConfig(max_num_seqs=8, max_model_len=64)
PROMPTS = [(20, 21, 22), (7, 9)]

TRAINER = """
import sys, numpy as np, slipstream
from tests.deploy.test_shared_weights import persist
with slipstream.connect(sys.argv[1], timeout=20) as bridge:
    shared = persist(lambda: bridge.share(dict(np.load(sys.argv[2]))))
    print("shared", flush=True)
    sys.stdin.readline()
    shared.hold()
    shared.arrays["model.norm.weight"][:5] = 3.0
    print("half written", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory without weights, and a function that makes some."""
    directory = tmp_path_factory.mktemp("model")
    config = write_sample_config(directory)

    @functools.cache
    def weights(seed):
        leaves = flatten(decoder.init(config, jax.random.key(seed)))
        return {name: 4 * np.asarray(x) if x.ndim > 1 else np.asarray(x) for name, x in leaves.items()}

    return directory, weights


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    with slipstream.launch(model[0], engines=2, engine=OPTIONS, run_dir=run_dir, keep_alive=True) as bridge:
        yield bridge  # for generation and status; trainers connect separately


@pytest.fixture
def bridge(fleet):
    """A trainer in this process, which owns the fleet's updates from its first one on."""
    with slipstream.connect(fleet.run_dir, timeout=30) as joined:
        yield joined


def persist(call):
    """Retry until the gateway has noticed that the previous trainer is gone."""
    until = time.monotonic() + 30
    while True:
        try:
            return call()
        except UpdateInProgress:
            assert time.monotonic() < until
            time.sleep(0.02)


def tokens(bridge, engine=""):
    return [c.token_ids for c in bridge.generate(PROMPTS, GREEDY, engine=engine)]


@pytest.fixture(scope="module")
def expected(model):
    """The tokens of an engine in this process, as a function of the seed of its weights."""
    with slipstream.inprocess(model[0], engine=OPTIONS) as bridge:

        @functools.cache
        def of(seed):
            bridge.sync(model[1](seed))
            return tokens(bridge)

        yield of


def mappings(pid):
    """Mappings of shared trainer memory."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:slipstream-shared" in line]


@contextlib.contextmanager
def trainer(fleet, weights, tmp_path):
    """A process that shares `weights` with the fleet, and starts an update for each line on stdin."""
    np.savez(tmp_path / "weights.npz", **weights)
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, fleet.run_dir, str(tmp_path / "weights.npz")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "shared"
        yield process
    finally:
        process.kill()
        process.wait()


def engines(bridge):
    return {e.info.name: e for e in bridge.status().engines}


def wait_until(done, seconds=300.0):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def test_two_engines_serve_from_one_memory(model, fleet, bridge, expected):
    shared = persist(lambda: bridge.share(model[1](1)))
    assert {e.transport for e in shared.report.engines} == {"shared"} and len(shared.report.engines) == 2
    assert bridge.version == shared.version == shared.report.version
    first = tokens(fleet, "engine-0")
    assert first == tokens(fleet, "engine-1") == expected(1)
    with shared.updating():
        for name, array in model[1](2).items():
            shared.arrays[name][...] = array
        with pytest.raises(UpdateInProgress):
            bridge.sync(model[1](3))
    second = tokens(fleet, "engine-0")
    assert second == tokens(fleet, "engine-1") == expected(2) != first
    assert fleet.generate(PROMPTS, GREEDY)[0].version == shared.version == bridge.version
    assert not bridge.verify(model[1](2)).differences
    with pytest.raises(VersionError, match="not held"):
        shared.notify_update()
    with pytest.raises(SlipstreamError, match="must be keep, recompute or requeue"), shared.updating("finish"):
        pass


def test_a_trainer_that_is_killed_between_updates_leaves_its_version_serving(model, fleet, bridge, expected, tmp_path):
    with trainer(fleet, model[1](4), tmp_path) as process:
        pids = [e.info.pid for e in engines(fleet).values()]
        assert all(mappings(pid) for pid in (process.pid, *pids))
        before = tokens(fleet)
        process.kill()
        process.wait()
    assert before == expected(4)

    def serve_a_copy():
        """Memory of dead trainers is freed."""
        assert [tokens(fleet, name) for name in ("engine-0", "engine-1")] == [before, before]
        return not any(map(mappings, pids))

    wait_until(serve_a_copy)
    persist(lambda: bridge.sync(model[1](2)))  # another trainer takes over
    assert tokens(fleet) == expected(2)
    assert not list(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


def test_a_trainer_that_is_killed_inside_an_update_leaves_no_policy(model, fleet, bridge, expected, tmp_path):
    with trainer(fleet, model[1](4), tmp_path) as process:
        version = fleet.status().version
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "half written"
        process.kill()
        process.wait()
    wait_until(lambda: all(e.state == "empty" for e in engines(fleet).values()))
    with pytest.raises(NotReady, match=rf"update to version {version + 1} was aborted, or its trainer died"):
        tokens(fleet)
    assert persist(lambda: bridge.sync(model[1](2))).version == version + 1
    assert tokens(fleet) == expected(2)
    assert not any(mappings(e.info.pid) for e in engines(fleet).values())


def test_an_engine_that_is_killed_inside_an_update_shares_again_when_it_is_back(model, fleet, bridge, expected):
    victim = engines(fleet)["engine-1"].info.pid

    def is_gone():
        now = engines(fleet)["engine-1"]
        return now.state == "lost" or now.info.pid != victim

    shared = persist(lambda: bridge.share(model[1](1)))
    with pytest.raises((EngineLost, UnknownVersion), match="engine-1"), shared.updating():
        os.kill(victim, signal.SIGKILL)
        wait_until(is_gone)
        for name, array in model[1](2).items():
            shared.arrays[name][...] = array
    wait_until(lambda: engines(fleet)["engine-1"].state == "empty")
    with shared.updating():
        pass
    assert [tokens(fleet, name) for name in ("engine-0", "engine-1")] == [expected(2)] * 2
