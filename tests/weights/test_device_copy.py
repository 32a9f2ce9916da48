"""Weights into an embedded engine of this process without a way through the host, on CPU devices; on GPUs it is the same program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.errors import ChecksumMismatch, NonFiniteWeights, TransferError
from slipstream.types import SamplingParams
from slipstream.weights.sources.transforms import View
from slipstream.weights.transports import device_copy
from slipstream.weights.transports.device import DevicePiece, DeviceSlice
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config(tie_word_embeddings=False)
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def tokens(bridge: Bridge) -> tuple[int, ...]:
    return bridge.generate([(1, 2, 3)], GREEDY)[0].token_ids


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, ...]]:
    """Tokens by seed of the policy, through the host."""
    with slipstream.inprocess(write_config(tmp_path_factory.mktemp("model"), CONFIG)) as bridge:
        found = {}
        for seed in (1, 2):
            assert bridge.sync(random_params(CONFIG, seed)).engines[0].transport == "memory"
            found[seed] = tokens(bridge)
        return found


@pytest.fixture
def bridge(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bridge]:
    options = slipstream.EmbeddedConfig(tensor_parallel_size=getattr(request, "param", 1))
    with slipstream.inprocess(write_config(tmp_path, CONFIG), engine=options, transport="device") as found:
        yield found


@pytest.mark.parametrize("bridge", [1, 2], indirect=True, ids=["one rank", "two ranks"])
def test_the_engine_serves_its_own_copy_of_every_version(bridge: Bridge, expected: dict[int, tuple[int, ...]]) -> None:
    donating = jax.jit(lambda tree: jax.tree.map(lambda x: x * jnp.nan, tree), donate_argnums=0)
    for seed in (1, 2, 1):
        params = jax.tree.map(jnp.asarray, random_params(CONFIG, seed))
        report = bridge.sync(params)
        assert report.engines[0].transport == "device" and report.engines[0].checksummed
        assert bridge.verify(params).is_same
        donating(params)  # the next training step writes where the weights were
        assert tokens(bridge) == expected[seed]


def test_the_copy_is_no_pause(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine copies while it generates. What `done` is told to wait for would reach the trainer as a pause."""
    waited: list[float] = []
    done = device_copy.LocalReceiver.done

    def seen(receiver: device_copy.LocalReceiver, version: int, copied: Callable[[], float]) -> float:
        waited.append(copied())
        return done(receiver, version, copied)

    monkeypatch.setattr(device_copy.LocalReceiver, "done", seen)
    stage = bridge.sync(jax.tree.map(jnp.asarray, random_params(CONFIG, 1))).engines[0].stage
    assert waited == [0.0] and 0 < stage.receive_seconds <= stage.verify_seconds


def test_stacked_and_partial_trees(bridge: Bridge, expected: dict[int, tuple[int, ...]]) -> None:
    params = random_params(CONFIG, 1)
    bridge.sync(jax.tree.map(jnp.asarray, params))
    other = jax.tree.map(jnp.asarray, random_params(CONFIG, 2))
    head = bridge.sync({"lm_head": other["lm_head"]}, partial=True)
    assert head.num_bytes == other["lm_head"]["weight"].nbytes
    params["lm_head"] = other["lm_head"]
    assert bridge.verify(params).is_same
    bridge.sync(other)
    assert tokens(bridge) == expected[2]


def test_what_is_refused_leaves_the_old_version(
    bridge: Bridge, expected: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, 1))
    bridge.sync(params)
    broken = jax.tree.map(jnp.asarray, random_params(CONFIG, 2))
    norm = broken["model"]["norm"]
    norm["weight"] = norm["weight"].at[3].set(jnp.nan)
    with pytest.raises(NonFiniteWeights, match=r"model\.norm\.weight"):
        bridge.sync(broken)
    checksum = device_copy.jax_checksum
    monkeypatch.setattr(device_copy, "jax_checksum", lambda values: checksum(values) + np.uint32(1))
    with pytest.raises(ChecksumMismatch, match="is not used"):
        bridge.sync(jax.tree.map(jnp.asarray, random_params(CONFIG, 2)))
    monkeypatch.undo()
    assert tokens(bridge) == expected[1] and bridge.verify(params).is_same
    bridge.sync(jax.tree.map(jnp.asarray, random_params(CONFIG, 2)))
    assert tokens(bridge) == expected[2]


def test_weights_on_the_host_are_refused_by_name(bridge: Bridge) -> None:
    with pytest.raises(slipstream.SlipstreamError, match="no device of this process holds"):
        bridge.sync(jax.tree.map(np.asarray, random_params(CONFIG, 1)))


def test_a_closed_engine_is_named() -> None:
    program = device_copy.CopyProgram("float32", jax.devices()[0])
    receiver = device_copy.LocalReceiver([0], program)
    link = receiver.links[0]
    array = jnp.arange(4.0)
    sender = device_copy.LocalSender(link, "engine-0, rank 0")
    sender.send(1, {0: DevicePiece(array, DeviceSlice(View(), (slice(1, 3),)), None)})
    assert receiver.wait(1, [0]) == 8 and receiver.source(0).tolist() == [1.0, 2.0]
    assert receiver.wait(2, [0], patience=0.01) is None
    del receiver, sender
    with pytest.raises(TransferError, match="engine-0, rank 0 is closed"):
        device_copy.LocalSender(link, "engine-0, rank 0")
