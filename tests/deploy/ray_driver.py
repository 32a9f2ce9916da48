"""A trainer on the first of two machines, run by tests: `python ray_driver.py MODEL RUN_DIR ADDRESS`.

Starts a Ray cluster on this machine, prints its address, waits for the other machine to join, and runs an engine there."""

import json
import sys
import time

import ray

import slipstream
from slipstream.config import EmbeddedConfig, RayConfig
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.types import SamplingParams
from tests.deploy.patient_ray import START_SECONDS, be_patient
from tests.tiny import random_params


def main(model, run_dir, address):
    be_patient()
    ray.init(
        num_cpus=0, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, _node_ip_address=address
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    deadline = time.monotonic() + START_SECONDS
    while len(ray.nodes()) < 2:
        assert time.monotonic() < deadline, ray.nodes()
        time.sleep(0.1)
    engine = EmbeddedConfig(max_num_seqs=8)
    with slipstream.launch(model, engine=engine, run_dir=run_dir, cluster=RayConfig()) as bridge:
        report = bridge.sync(random_params(read_config(model), 1))
        answers = bridge.generate([(1, 2, 3)], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        facts = {
            "gateway": bridge._fleet.address,
            "transports": [e.transport for e in report.engines],
            "tokens": answers[0].token_ids,
            "hosts": sorted({node["NodeManagerAddress"] for node in ray.nodes()}),
        }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
