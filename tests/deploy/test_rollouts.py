"""Rollouts with real processes: after any kill, every prompt is taken once and within the staleness limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.config import GatewayConfig
from slipstream.errors import DeadlineExceeded, InvalidSampling, MappingError, NotReady, RolloutError, StaleRollouts
from slipstream.gateway.journal import Journal
from slipstream.types import SamplingParams, VersionSpan
from tests.gateway.history import check
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config("llama")
SAMPLING = SamplingParams(max_tokens=6, n=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One fleet, whose history goes on: tests with a staleness limit of 0 come before those with a limit of 1."""
    directory = tmp_path_factory.mktemp("fleet")
    model, gateway = write_config(directory / "model", CONFIG), GatewayConfig(lease_seconds=2.0)
    with slipstream.launch(model, run_dir=directory / "run", gateway=gateway, timeout=30, keep_alive=True) as found:
        yield found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with slipstream.inprocess(write_config(tmp_path_factory.mktemp("model"), CONFIG)) as found:
        yield found


def prompts(count: int, first: int = 0) -> tuple[list[str], list[tuple[int, ...]]]:
    numbers = range(first, first + count)
    return [f"prompt-{n}" for n in numbers], [(1 + n % 50, 2, 3) for n in numbers]


def kill(bridge: Any, name: str) -> None:
    if name == "gateway":
        pid = json.loads((Path(bridge.run_dir) / "gateway.json").read_text())["pid"]
    else:
        pid = bridge.status().engines[0].info.pid
    os.kill(pid, signal.SIGKILL)


def healed(bridge: Any, params: Any) -> None:
    """Wait until the engine is back, and repair it."""
    deadline = time.monotonic() + 300
    while True:
        try:
            if bridge.status().engines and bridge.status().engines[0].state == "ready":
                return
            bridge.repair(params)
        except slipstream.SlipstreamError as error:
            assert time.monotonic() < deadline, error
        time.sleep(0.1)


def journal(bridge: Any) -> Journal:
    return Journal(Path(bridge.run_dir) / "journal.sqlite")


def history(bridge: Any, bound: int) -> list[str]:
    return check(journal(bridge), bound)


def test_on_policy_in_one_process(local: Any) -> None:
    local.sync(random_params(CONFIG, 0))
    rollouts = local.rollouts(max_staleness=0, batch=2)
    ids, tokens = prompts(4)
    assert rollouts.submit(ids, tokens, SAMPLING) == 4 and rollouts.submit(ids, tokens, SAMPLING) == 0
    first = rollouts.take()
    assert [(g.id, g.position, g.version, g.age, g.error) for g in first] == [
        ("prompt-0", 1, local.version, 0, None),
        ("prompt-1", 2, local.version, 0, None),
    ]
    for group in first:
        assert [c.sample_index for c in group.completions] == [0, 1]
        assert all(
            c.spans == (VersionSpan(local.version, 0, 6),) and c.request_id == group.id for c in group.completions
        )
    with pytest.raises(StaleRollouts, match="Sync, raise batch"):
        rollouts.take()
    local.sync(random_params(CONFIG, 1))
    second = rollouts.take()
    assert [(g.id, g.version) for g in second] == [("prompt-2", local.version), ("prompt-3", local.version)]
    again = local.rollouts(max_staleness=0, batch=2, position=0)
    assert again.take(4) == first + second  # a restarted trainer gets the same groups


@pytest.mark.parametrize("cut", ["pause", "sleep"])
def test_stragglers_go_on_with_the_tokens_that_they_have(tmp_path: Path, cut: str) -> None:
    """Four are started and the first three make the batch; the long one continues with the next version. In between it is kept with
    its KV cache, or as tokens."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=1024)
    with slipstream.inprocess(write_config(tmp_path, config)) as bridge:
        bridge.sync(random_params(config, 0))
        rollouts = bridge.rollouts(max_staleness=2, batch=3, surplus=1)
        ids, tokens = prompts(5)
        lengths = [4, 500, 4, 4, 4]
        rollouts.submit(ids, tokens, [SamplingParams(size, n=2, ignore_eos=True) for size in lengths])
        assert [g.id for g in rollouts.take()] == [ids[0], ids[2], ids[3]]
        getattr(bridge, cut)()
        bridge.sync(random_params(config, 1))
        bridge.resume()
        bridge.wake()
        groups = {g.id: g for g in rollouts.take(2)}
    straggler, next_one = groups[ids[1]], groups[ids[4]]
    assert straggler.age == 1 and next_one.age == 0  # which had to wait for the sync
    for completion in straggler.completions:
        assert [span.version for span in completion.spans] == [0, 1] and len(completion.token_ids) == 500


@contextlib.contextmanager
def begun(directory: Path, max_staleness: int) -> Iterator[tuple[Any, Any, list[str]]]:
    """A bridge, its rollouts, and the ids of eight prompts, of which version 0 has taken a batch of two."""
    with slipstream.inprocess(write_config(directory, CONFIG)) as bridge:
        bridge.sync(random_params(CONFIG, 0))
        rollouts = bridge.rollouts(max_staleness=max_staleness, batch=2)
        ids, tokens = prompts(8)
        rollouts.submit(ids, tokens, SAMPLING)
        assert [(g.id, g.version) for g in rollouts.take()] == [(ids[0], 0), (ids[1], 0)]
        yield bridge, rollouts, ids


def test_what_is_expected_comes_with_the_version_that_it_is_for(tmp_path: Path) -> None:
    """On-policy: completions of older versions are not taken."""
    with begun(tmp_path, max_staleness=0) as (bridge, rollouts, ids):
        rollouts.expect(1)
        with pytest.raises(DeadlineExceeded, match=r"requested by expect did not arrive within 0\.1 s"):
            rollouts.take(timeout=0.1)
        rollouts.expect(1)
        with pytest.raises(MappingError):
            bridge.sync({"nonsense": np.zeros(3)})
        bridge.sync(random_params(CONFIG, 1))
        assert [(g.id, g.version) for g in rollouts.take()] == [(ids[2], 1), (ids[3], 1)]
        rollouts.expect(2)
        bridge.sync(random_params(CONFIG, 2))
        assert [(g.id, g.position) for g in rollouts.take(1)] == [(ids[4], 5)]  # as many as the call says


def test_what_is_expected_may_come_before_the_version_that_it_is_for(tmp_path: Path) -> None:
    """With a maximum lag of one version."""
    with begun(tmp_path, max_staleness=1) as (bridge, rollouts, ids):
        rollouts.expect(1)
        assert [(g.id, g.version, g.age) for g in rollouts.take()] == [(ids[2], 1, 1), (ids[3], 1, 1)]
        bridge.sync(random_params(CONFIG, 1))
        assert [(g.id, g.version) for g in rollouts.take()] == [(ids[4], 1), (ids[5], 1)]


def test_input_that_makes_no_sense(local: Any) -> None:
    local.sync(random_params(CONFIG, 0))
    rollouts = local.rollouts(max_staleness=3, batch=4, position=4)
    with pytest.raises(InvalidSampling, match="2 ids, 1 prompts"):
        rollouts.submit(["a", "b"], [(1,)], SAMPLING)
    with pytest.raises(RolloutError, match="two prompts have the id 'x'"):
        rollouts.submit(["x", "x"], [(1,), (2,)], SAMPLING)
    with pytest.raises(RolloutError, match="count of at least 1, got 0"):
        rollouts.take(0)
    with pytest.raises(RolloutError, match="only 0 submitted prompts are left"):
        rollouts.take(1)
    too_long = tuple(range(1, 60))
    rollouts.submit(["too long", "fine"], [too_long * 20, (1, 2)], SAMPLING)
    bad, good = rollouts.take(2)
    assert bad.completions == () and bad.id == "too long" and bad.error is not None
    assert good.error is None and len(good.completions) == 2


def test_without_weights_there_is_nothing_to_take(tmp_path: Path) -> None:
    with (
        slipstream.inprocess(write_config(tmp_path, CONFIG)) as bridge,
        pytest.raises(NotReady, match="no weights yet"),
    ):
        bridge.rollouts(patience=0.1).submit(["a"], [(1,)], SAMPLING)


def test_who_asks_for_more_than_a_batch_before_a_sync_gets_it(bridge: Any) -> None:
    version = bridge.sync(random_params(CONFIG, 0)).version
    rollouts = bridge.rollouts(max_staleness=0, batch=2)
    ids, tokens = prompts(6)
    rollouts.submit(ids, tokens, SAMPLING)
    assert [g.id for g in rollouts.take()] == ids[:2]
    with pytest.raises(StaleRollouts, match="take with more=True"):
        rollouts.take(1)
    more = rollouts.take(3, more=True)
    assert [(g.id, g.version, g.age) for g in more] == [(id, version, 0) for id in ids[2:5]]
    bridge.sync(random_params(CONFIG, 1))
    assert [(g.id, g.version) for g in rollouts.take(1)] == [(ids[5], version + 1)] and history(bridge, 0) == []


def test_an_engine_that_is_killed_is_replaced_and_repaired(bridge: Any) -> None:
    params = random_params(CONFIG, 0)
    version = bridge.sync(params).version
    rollouts = bridge.rollouts(max_staleness=0, batch=4, position=journal(bridge).last_position())
    ids, tokens = prompts(4, first=100)
    rollouts.submit(ids, tokens, LONG)
    kill(bridge, "engine")
    with pytest.raises(DeadlineExceeded, match=r"of 4 groups finished within 0\.2 s"):
        rollouts.take(timeout=0.2)
    healed(bridge, params)
    taken = rollouts.take()
    assert [g.id for g in taken] == ids and {g.version for g in taken} == {version} and {g.age for g in taken} == {0}
    assert bridge.repair(params) is None
    bridge.sync(random_params(CONFIG, 1))
    assert bridge.version == version + 1 and history(bridge, 0) == []


def test_a_gateway_that_is_killed_goes_on(bridge: Any) -> None:
    params, first_position = random_params(CONFIG, 0), journal(bridge).last_position()
    bridge.sync(params)
    rollouts = bridge.rollouts(max_staleness=1, batch=3, position=first_position)
    ids, tokens = prompts(6, first=200)
    rollouts.submit(ids, tokens, LONG)
    first = rollouts.take()
    kill(bridge, "gateway")
    assert rollouts.submit(ids, tokens, LONG) == 0
    second = rollouts.take()
    assert sorted(g.id for g in first + second) == ids
    assert [g.position - first_position for g in first + second] == [1, 2, 3, 4, 5, 6]
    again = bridge.rollouts(max_staleness=1, batch=3, position=first_position + 3)
    assert again.take() == second
    healed(bridge, params)
    bridge.sync(random_params(CONFIG, 1))
    assert history(bridge, 1) == []


def test_a_gateway_that_is_killed_while_groups_are_expected(bridge: Any) -> None:
    version = bridge.sync(random_params(CONFIG, 0)).version
    rollouts = bridge.rollouts(max_staleness=1, batch=2, position=journal(bridge).last_position())
    ids, tokens = prompts(6, first=300)
    rollouts.submit(ids, tokens, LONG)
    seen = rollouts.take()
    rollouts.expect(version + 1)
    kill(bridge, "gateway")
    healed(bridge, random_params(CONFIG, 0))
    bridge.sync(random_params(CONFIG, 1))
    seen += rollouts.take()
    rollouts.expect(version + 2)
    bridge.sync(random_params(CONFIG, 2))
    seen += rollouts.take()
    assert sorted(g.id for g in seen) == ids
    assert [g.version - version for g in seen] == [0, 0, 1, 1, 2, 2]
    assert history(bridge, 1) == []


def test_an_update_in_mid_generation_ages_what_runs(bridge: Any) -> None:
    version = bridge.sync(random_params(CONFIG, 0)).version
    rollouts = bridge.rollouts(max_staleness=1, batch=2, position=journal(bridge).last_position())
    ids, tokens = prompts(8, first=400)
    rollouts.submit(ids, tokens, LONG)
    seen = []
    for seed in range(1, 5):
        groups = rollouts.take()
        assert all(0 <= g.age <= 1 and g.version == version + seed - 1 for g in groups)
        assert all(g.version - g.age == min(c.version for c in g.completions) for g in groups)
        seen += [g.id for g in groups]
        bridge.sync(random_params(CONFIG, seed))
    assert sorted(seen) == ids and history(bridge, 1) == []
