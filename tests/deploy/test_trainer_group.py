"""A trainer of two JAX processes with two devices each (FSDP) syncs to engines with other shardings."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig, GatewayConfig
from slipstream.deploy.processes.process_group import ProcessGroup
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder

CONFIG = ModelConfig(
    "llama", vocab_size=96, hidden_size=48, intermediate_size=96, num_layers=1, num_heads=6, num_kv_heads=6, head_dim=16,
    max_position_embeddings=64,
)  # fmt: skip

TRAINER = """
import json, sys, time
rank, port, run_dir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import slipstream
from slipstream.errors import SlipstreamError
from tests.deploy.test_trainer_group import weights
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def shard(x):
    x = np.asarray(x)
    dim = next((d for d in range(x.ndim) if x.shape[d] % 4 == 0), None)
    spec = P() if dim is None or x.ndim == 1 else P(*[None] * dim, "fsdp")
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
for transport in ("shm", "tcp"):
    with slipstream.connect(run_dir, process_index=rank, process_count=2, timeout=20, transport=transport) as bridge:
        for line in sys.stdin:
            if line.strip() == "next":
                break
            params = jax.tree.map(shard, weights(int(line)))
            try:
                report = bridge.sync(params)
                said = {"version": report.version, "bytes": report.num_bytes, "engines": len(report.engines)}
            except SlipstreamError as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), flush=True)
"""


def weights(seed):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = decoder.init(CONFIG, jax.random.key(seed))
        return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)


class Trainers:
    def __init__(self, run_dir):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, "-c", TRAINER]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), port, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]

    def sync(self, seed):
        self.tell(seed)
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def tell(self, line, ranks=(0, 1)):
        for rank in ranks:
            self.processes[rank].stdin.write(f"{line}\n")
            self.processes[rank].stdin.flush()

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    group = ProcessGroup(tmp_path / "run", 120)
    group.start_gateway(GatewayConfig())
    shapes = {"tp1": 1, "tp3": 3, "again": 1}
    for name, tp in shapes.items():
        group.start_engine(
            name, tmp_path / "model", EmbeddedConfig(max_num_seqs=4, max_model_len=64, tensor_parallel_size=tp), 3.0
        )
    group.wait_for_engines(len(shapes))
    trainers = Trainers(tmp_path / "run")
    yield Path(group.run_dir), trainers
    trainers.close()
    group.close()


def test_two_processes_feed_engines_of_tp_1_and_3_and_a_replica(fleet):
    run_dir, trainers = fleet
    sequence = (5, 17, 3, 42, 42, 8, 90)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(weights(0)))
    with slipstream.connect(run_dir) as reader:
        for version, seed in enumerate((1, 2, 3, 4)):
            if version == 2:
                trainers.tell("next")  # over tcp one of the three engines gets its bytes from another
            answers = trainers.sync(seed)
            assert [a.get("version") for a in answers] == [version, version], answers
            assert {a["engines"] for a in answers} == {3}
            copies = 3 if version < 2 else 2
            # Norms go to every rank of each engine.
            assert copies * whole <= sum(a["bytes"] for a in answers) < (copies + 0.5) * whole
            assert max(a["bytes"] for a in answers) < 1.1 * min(a["bytes"] for a in answers)
            own = np.asarray(decoder.logprobs(weights(seed), CONFIG, jnp.asarray([sequence])))[0]
            for name in ("tp1", "tp3", "again"):
                (score,) = reader.score([sequence], engine=name)
                assert score.version == version
                np.testing.assert_allclose(score.logprobs, own, atol=1e-4, err_msg=name)
        # One of the two dies between updates: the other gets an error that names it, and the old version stays.
        os.kill(trainers.processes[1].pid, signal.SIGKILL)
        trainers.tell(5, ranks=[0])
        answer = json.loads(trainers.processes[0].stdout.readline())
        assert "trainer process" in answer["error"] and "1" in answer["error"], answer
        (score,) = reader.score([sequence], engine="tp3")
        assert score.version == 3
        np.testing.assert_allclose(score.logprobs, own, atol=1e-4)
        assert {e.state for e in reader.status().engines} == {"ready"}
