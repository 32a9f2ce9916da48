"""The weight bridge in distributed mode: a torch trainer of two ranks and engines on two nodes, each a machine of its own."""

import json
import subprocess
import sys

from slipstream.model.checkpoints import hf_weights
from tests.deploy.lan import environment, lan
from tests.deploy.test_hosts import cluster_in
from tests.tiny import random_params, tiny_config


def test_two_ranks_bring_their_shards_to_two_nodes(tmp_path):
    """Everything comes from the job's environment: who is who, where they meet, and where the logs are."""
    config = tiny_config()
    hf_weights.save(model := tmp_path / "model", random_params(config), config)
    with lan(tmp_path, "node1", "node2", "node3", "node4") as machines:
        cluster = cluster_in(tmp_path, {machine.name: machine.command() for machine in machines})
        role = [
            "slipstream",
            "role",
            "--model",
            str(model),
            "--engine",
            "max_num_seqs=4",
            "--engine",
            "max_model_len=64",
        ]
        trainer = [sys.executable, "-m", "tests.deploy.torch_rank", str(model), str(tmp_path / "rank")]
        job = {"SLURM_JOB_NODELIST": "node[1-4]", "NUM_INFERENCE_NODES": "2", "LOGDIR": str(tmp_path / "logs")}
        own = environment({**job, "GLOO_SOCKET_IFNAME": "eth0"})
        own["PATH"] = f"{cluster}:{own['PATH']}"
        done = subprocess.run(
            ["srun", *role, "--", *trainer], env=own, capture_output=True, text=True, timeout=1200, check=False
        )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["mode"] == second["mode"] == "distributed"
    assert first["rendezvous"] == second["rendezvous"] == "node1:26757"
    assert first["shards"] == second["shards"] == 21
    assert first["transports"] == ["tcp", "tcp"]
    # Each element leaves the trainer once, from the rank that holds it: one engine passes it on to the other.
    assert first["num_bytes"] + second["num_bytes"] == first["model_bytes"]
    for version, found, expected, served in first["steps"]:
        assert found == [expected, expected] and served == [version, version]
    assert first["steps"][0][2] != first["steps"][1][2]
    mapping = json.loads((tmp_path / "logs" / "vllm_bridge_config.json").read_text())
    assert mapping["engines"].keys() == {"node3-0", "node4-0"}
    assert "26758" in (tmp_path / "logs" / "gateway.log").read_text()
