"""Engines that join, leave and come back while the trainer is in the middle of a step: they get the version by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import slipstream
from slipstream.config import AdapterConfig, EmbeddedConfig, GatewayConfig
from slipstream.types import Lora, SamplingParams
from tests.adapters import random_adapter
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config("llama")
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)


@contextlib.contextmanager
def training_step() -> Iterator[None]:
    """A trainer's thread that computes, in Python and in JAX, and calls nothing of ours."""
    is_done = threading.Event()

    def run() -> None:
        while not is_done.wait(0.03):  # leaves the engines something of a small machine
            sum(i * i for i in range(100_000))
            jnp.linalg.matrix_power(jnp.eye(300), 200).block_until_ready()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextlib.contextmanager
def engine_by_hand(run_dir: str, model: Path, name: str) -> Iterator[None]:
    command = (sys.executable, "-m", "slipstream.cli", "engine", "--model", model, "--run-dir", run_dir, "--name", name)
    command += ("adapters.slots=2",)
    with (Path(run_dir) / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def served_by(observer: Any, engine: str) -> int:
    """The version that an engine serves, once it serves one."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return observer.generate([(5, 6, 7)], SAMPLING, engine=engine)[0].version
        except slipstream.SlipstreamError:
            assert time.monotonic() < deadline, observer.status()
            time.sleep(0.1)


def scores(observer: Any, engine: str) -> list[tuple[float, ...]]:
    """What an engine computes with its base model and with each adapter."""
    return [observer.score([(5, 6, 7)], engine=engine, adapter=name)[0].logprobs for name in ("", "a", "b")]


def test_engines_join_and_return_during_a_training_step(tmp_path: Path) -> None:
    model, gateway = write_config(tmp_path / "model", CONFIG), GatewayConfig(lease_seconds=5.0)
    params = [jax.tree.map(jnp.asarray, random_params(CONFIG, seed)) for seed in (0, 1, 2)]
    engine = EmbeddedConfig(adapters=AdapterConfig(slots=2))
    adapters = [Lora(name, 4, 8.0, ("q_proj", "down_proj")) for name in "ab"]
    start: dict[str, Any] = {"engine": engine, "gateway": gateway, "timeout": 60, "keep_alive": True}
    with (
        slipstream.launch(model, run_dir=tmp_path / "run", **start) as bridge,
        slipstream.connect(tmp_path / "run") as observer,
    ):
        bridge.sync(params[0])
        bridge.sync(params[1])
        for adapter in adapters:
            bridge.sync(random_adapter(CONFIG, adapter, seed=ord(adapter.name)), adapter=adapter)
        expected = scores(observer, "engine-0")
        assert len(set(expected)) == 3
        with training_step(), engine_by_hand(bridge.run_dir, model, "late"):
            os.kill(observer.status().engines[0].info.pid, signal.SIGKILL)
            for name in ("late", "engine-0"):
                assert served_by(observer, name) == 3
                assert scores(observer, name) == expected
        assert bridge.sync(params[2]).version == 4 and served_by(observer, "engine-0") == 4
        assert all(a != b for a, b in zip(scores(observer, "engine-0"), expected)), (
            "the same adapters, on another model"
        )
