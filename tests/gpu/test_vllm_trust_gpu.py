"""A fleet of three vLLM engines on one GPU, of which one computes something else, one freezes and one is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

import slipstream
from slipstream.errors import DeadlineExceeded
from slipstream.model.transformer import decoder
from slipstream.types import SamplingParams
from tests.gpu.vllm import PYTHON, engine_options, needs_vllm
from tests.tiny import random_params, tiny_config, write_config

pytestmark = [pytest.mark.gpu, needs_vllm, pytest.mark.timeout(600)]

CONFIG = tiny_config("llama", hidden_size=128, head_dim=32)
PROMPTS = [(n + 1, 5, 6) for n in range(24)]
SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
SOUND, LIAR = {"engine-0", "engine-1"}, "engine-2"


def params_and_score(seed: int) -> tuple[Any, Callable[[Any], Any]]:
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, seed))
    return params, lambda sequences: decoder.logprobs(params, CONFIG, jnp.asarray(sequences)).tolist()


def ranks_of(bridge: slipstream.Bridge, engine: str) -> list[psutil.Process]:
    """The processes in which vLLM computes."""
    pid = next(e.info.pid for e in bridge.status().present if e.info.name == engine)
    return psutil.Process(pid).children(recursive=True)


def states(bridge: slipstream.Bridge) -> dict[str, str]:
    return {e.info.name: e.state for e in bridge.status().engines}


def test_wrong_frozen_and_killed_ranks(tmp_path: Path) -> None:
    liar = tmp_path / "python"
    liar.write_text(f'#!/bin/sh\nPYTHONPATH={Path(__file__).parent}/other_norm:$PYTHONPATH exec {PYTHON} "$@"\n')
    liar.chmod(0o700)
    engines = [engine_options(), engine_options(), engine_options(python=str(liar))]
    model = write_config(tmp_path / "model", CONFIG)
    with (
        slipstream.launch(
            model,
            engine=engines,
            devices=[[0]] * 3,
            share_gpus=True,
            run_dir=tmp_path / "run",
            timeout=10,
            start_timeout=300,
        ) as bridge,
        ThreadPoolExecutor(1) as pool,
    ):

        def generate() -> set[str]:
            return {c.engine for c in bridge.generate(PROMPTS, SAMPLING, timeout=120)}

        params, score = params_and_score(0)
        report = bridge.sync(params, canary=score)
        gaps = {e.engine: e.canary_gap for e in report.engines}
        print(f"  canary gaps in nats per token: {gaps}; checksummed: {[e.checksummed for e in report.engines]}")
        assert all(gaps[name] < 0.1 for name in SOUND) and gaps[LIAR] > 0.5
        assert all(e.checksummed for e in report.engines)  # its bytes are right
        assert states(bridge) == dict.fromkeys(SOUND, "ready") | {LIAR: "quarantined"}
        assert generate() == SOUND

        frozen = ranks_of(bridge, "engine-1")
        for process in frozen:
            process.suspend()
        waiting = pool.submit(generate)
        params, score = params_and_score(1)
        with pytest.raises(DeadlineExceeded, match="engine-1"):
            bridge.sync(params)
        assert bridge.version == 0
        report = bridge.sync(params, drop_failed=True)
        assert report.version == 1 and report.lost == ("engine-1",)
        print(f"  frozen: {states(bridge)}")
        assert states(bridge)["engine-1"] != "ready" and generate() == {"engine-0"}
        for process in frozen:
            process.resume()
        assert waiting.result(120) <= SOUND
        while states(bridge)["engine-1"] != "ready":  # the bridge sends it the version that it missed
            time.sleep(0.1)

        waiting = pool.submit(generate)
        start = time.monotonic()
        for process in ranks_of(bridge, "engine-0"):
            process.kill()
        assert waiting.result(120) <= SOUND
        print(f"  killed: all answers after {time.monotonic() - start:.1f} s")
        params, score = params_and_score(2)
        report = bridge.sync(params, canary=score)
        print(f"  then: {states(bridge)}, canary {[(e.engine, e.canary_gap) for e in report.engines]}")
        assert states(bridge) == {"engine-0": "lost", "engine-1": "ready", LIAR: "quarantined"}
        assert generate() == {"engine-1"}
        for decision in bridge.status().decisions:
            print(f"  {decision.kind} {decision.engine}: {decision.reason}")
        assert {d.engine for d in bridge.status().decisions} == {LIAR}
