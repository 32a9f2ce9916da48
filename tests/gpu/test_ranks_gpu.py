"""Trainers of one and two processes, and engines of one and several ranks, all on one GPU with real vLLM and NCCL: what engines
hold after a sync is compared with what vLLM loads from a checkpoint, and each side loses a rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
import pytest

import slipstream
from slipstream.errors import SlipstreamError
from slipstream.model.checkpoints import hf_weights
from slipstream.runtime import event_loop
from slipstream.types import SamplingParams
from tests.gpu.vllm import engine_options, needs_vllm
from tests.tiny import random_params, tiny_config

pytestmark = [pytest.mark.gpu, needs_vllm]

CONFIGS = {family: tiny_config(family, hidden_size=128, head_dim=32, num_layers=3) for family in ("qwen3", "qwen3_moe")}
PROMPTS = [(5, 6, 7), (40, 41, 42, 43, 44), (9,)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DEADLINE = 20.0
LAYOUTS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "tp1": ([[0]], {}),
    "tp2": ([[0, 0]], {"tensor_parallel_size": 2}),
    "pp2": ([[0, 0]], {"vllm": {"pipeline_parallel_size": 2}}),
    "engines2": ([[0], [0]], {}),
    "experts2": ([[0, 0]], {"tensor_parallel_size": 2, "vllm": {"enable_expert_parallel": True}}),
}
FAMILIES = {"experts2": "qwen3_moe"}

TRAINER = """
import json, sys
rank, port, run_dir, transport, family = int(sys.argv[1]), *sys.argv[2:]
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, local_device_ids=[0])
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import slipstream
from slipstream.errors import SlipstreamError
from tests.gpu.test_ranks_gpu import CONFIGS, DEADLINE
from tests.tiny import random_params
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def shard(x):
    x = np.asarray(x)
    spec = P("fsdp") if x.ndim > 1 and x.shape[0] % 2 == 0 else P()
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
weights = {seed: random_params(CONFIGS[family], seed) for seed in range(3)}
with slipstream.connect(run_dir, process_index=rank, process_count=2, transport=transport, timeout=DEADLINE) as bridge:
    for line in sys.stdin:
        params = jax.tree.map(shard, weights[int(line)])
        try:
            report = bridge.sync(params)
            said = {"version": report.version, "transports": [e.transport for e in report.engines], "bytes": report.num_bytes}
        except SlipstreamError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
"""


class Fleet(NamedTuple):
    bridge: Any
    family: str


class Synced(NamedTuple):
    transports: set[str]
    num_bytes: list[int]
    """Sent by each trainer process."""


class OneProcess:
    def __init__(self, fleet: Fleet, transport: str) -> None:
        self._bridge = slipstream.connect(fleet.bridge.run_dir, transport=transport, timeout=DEADLINE)
        self._config = CONFIGS[fleet.family]

    def sync(self, seed: int) -> Synced:
        report = self._bridge.sync(jax.tree.map(jnp.asarray, random_params(self._config, seed)))
        return Synced({engine.transport for engine in report.engines}, [report.num_bytes])

    def close(self) -> None:
        self._bridge.close()


class TwoProcesses:
    """Parameters lie in halves, one in each process."""

    def __init__(self, fleet: Fleet, transport: str) -> None:
        run_dir = str(fleet.bridge.run_dir)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(rank), port, run_dir, transport, fleet.family],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]

    def answers(self, seed: int, ranks: Sequence[int] = (0, 1)) -> list[dict[str, Any]]:
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(f"{seed}\n")
            stdin.flush()
        return [json.loads(self.processes[rank].stdout.readline() or "{}") for rank in ranks]  # type: ignore[union-attr]

    def sync(self, seed: int) -> Synced:
        found = self.answers(seed)
        assert all("version" in answer for answer in found), found
        return Synced({name for answer in found for name in answer["transports"]}, [a["bytes"] for a in found])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


TRAINERS = {1: OneProcess, 2: TwoProcesses}


@pytest.fixture(scope="module", params=LAYOUTS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Engines that have loaded the weights of seed 0 themselves."""
    (devices, settings), family = LAYOUTS[request.param], FAMILIES.get(request.param, "qwen3")
    directory = tmp_path_factory.mktemp("model")
    hf_weights.save(directory, random_params(CONFIGS[family], 0), CONFIGS[family])
    options = engine_options(dtype="float32", **settings)
    with slipstream.launch(
        directory,
        engines=len(devices),
        engine=options,
        devices=devices,
        share_gpus=True,
        run_dir=tmp_path_factory.mktemp("run") / "run",
        start_timeout=400,
        keep_alive=True,
        snapshot="none",
    ) as bridge:
        yield Fleet(bridge, family)


class Served(NamedTuple):
    """What each engine holds and generates."""

    checksums: dict[str, Any]
    tokens: dict[str, list[tuple[int, ...]]]


def served(fleet: Fleet) -> Served:
    checksums = {name: found.parameters for name, found in event_loop.run(fleet.bridge._fleet.checksums()).items()}
    tokens = {name: [c.token_ids for c in fleet.bridge.generate(PROMPTS, GREEDY, engine=name)] for name in checksums}
    return Served(checksums, tokens)


@pytest.fixture(scope="module")
def cold(fleet: Fleet) -> Served:
    found = served(fleet)
    assert found.checksums and all(found.checksums.values())
    return found


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
@pytest.mark.parametrize("count", TRAINERS)
def test_a_sync_gives_what_a_cold_load_gives(fleet: Fleet, cold: Served, count: int, transport: str) -> None:
    trainer = TRAINERS[count](fleet, transport)
    try:
        for seed in (1, 2):
            trainer.sync(seed)
            other = served(fleet)
            assert other.tokens != cold.tokens and other.checksums != cold.checksums
        synced = trainer.sync(0)
    finally:
        trainer.close()
    assert synced.transports == {transport}
    print(f"  {count} process(es), {transport}: bytes sent by each {synced.num_bytes}")
    assert served(fleet) == cold


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_a_killed_trainer_process_is_an_error_and_the_next_sync_works(
    fleet: Fleet, cold: Served, transport: str
) -> None:
    trainer = TwoProcesses(fleet, transport)
    try:
        trainer.sync(1)
        trainer.processes[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        (answer,) = trainer.answers(2, (0,))
        print(f"  {transport}, trainer process killed: {time.monotonic() - start:.1f} s: {answer['error'][:200]}")
        assert "trainer process" in answer["error"]
        assert time.monotonic() - start < 2 * DEADLINE
    finally:
        trainer.close()
    again = TwoProcesses(fleet, transport)
    try:
        again.sync(0)
    finally:
        again.close()
    assert served(fleet) == cold


@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_a_killed_engine_rank_is_an_error_and_the_next_sync_works(fleet: Fleet, cold: Served, transport: str) -> None:
    trainer = OneProcess(fleet, transport)
    try:
        trainer.sync(1)
        engine = fleet.bridge.status().engines[-1].info
        family = psutil.Process(engine.pid).children(recursive=True)
        named = [
            (kind, process) for kind in ("Worker", "EngineCore") for process in family if kind in str(process.cmdline())
        ]
        _, victim = named[0]  # one of its ranks; a single rank computes in vLLM's core
        victim.kill()
        start = time.monotonic()
        try:
            while time.monotonic() < start + 2 * DEADLINE:
                trainer.sync(2)
            pytest.fail("syncs went on without the rank")
        except SlipstreamError as error:
            print(
                f"  {transport}, engine rank killed: {time.monotonic() - start:.1f} s: {type(error).__name__}: {error!s:.200}"
            )
            assert engine.name in str(error)
        deadline = time.monotonic() + 200
        while True:
            try:
                trainer.sync(0)
                if {status.state for status in fleet.bridge.status().present} == {"ready"} and (
                    len(fleet.bridge.status().present) == len(cold.tokens)
                ):
                    break
            except SlipstreamError:
                pass
            assert time.monotonic() < deadline, fleet.bridge.status()
            time.sleep(1)
    finally:
        trainer.close()
    assert served(fleet) == cold
