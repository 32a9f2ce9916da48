"""After kill -9 of any role, no process and no shared memory is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from slipstream.config import GatewayConfig
from slipstream.deploy.processes import process_group, run_dir
from slipstream.errors import ConfigError, DeadlineExceeded, GatewayLost
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.weights.transports.host import shm

TRAINER = """
import sys, threading, time
import jax, slipstream
from slipstream.errors import GatewayLost, SlipstreamError
from slipstream.model.transformer import decoder
from slipstream.model.checkpoints.hf_config import read_config
model, run_dir, engines = sys.argv[1:]
params = decoder.init(read_config(model), jax.random.key(0))
with slipstream.launch(model, engines=int(engines), run_dir=run_dir, timeout=30) as bridge:
    print("up", flush=True)
    while True:
        try:
            bridge.sync(params)
            bridge.generate(["1="], slipstream.SamplingParams(max_tokens=4))
        except GatewayLost:
            raise
        except SlipstreamError as error:
            print(error, file=sys.stderr)
"""


def segments():
    return list(shm.directory().glob(f"slipstream-{os.getuid()}-*"))


@contextlib.contextmanager
def training(directory, engines):
    """A process that syncs and generates in a loop, with a gateway and engines."""
    write_sample_config(directory / "model")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(directory / "model"), str(directory / "run"), str(engines)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "up"
        yield process, directory / "run"
    finally:
        process.kill()
        process.wait()


def gone_within(seconds, processes):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p.cmdline() for p in alive]


@pytest.mark.parametrize(("role", "engines"), [("gateway", 1), ("an engine, then the trainer", 2)])
def test_nothing_is_left_after_kill_9(tmp_path, role, engines):
    with training(tmp_path, engines) as (process, run_dir):
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1 + engines
        gateway = json.loads((run_dir / "gateway.json").read_text())["pid"]
        engine = next(c.pid for c in children if c.pid != gateway)
        time.sleep(0.5)  # during syncs
        os.kill(gateway if role == "gateway" else engine, signal.SIGKILL)
        if role != "gateway":
            time.sleep(1)  # the trainer goes on with the other engine
            assert process.poll() is None
            process.kill()
        process.wait(timeout=30)  # killed, or ended with a typed error
        assert gone_within(15, children) == []
        assert segments() == []


GATEWAY_OWNER = """
import sys, time
from pathlib import Path
from slipstream.config import GatewayConfig
from slipstream.deploy.processes.process_group import ProcessGroup
group = ProcessGroup(Path(sys.argv[1]), 60)
group.start_gateway(GatewayConfig())
group.wait_for_gateway()
print("up", flush=True)
time.sleep(600)
"""


def test_a_frozen_gateway_makes_way_once_its_trainer_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "ENDING_SECONDS", 0.2)

    def gateway():
        return json.loads((tmp_path / "gateway.json").read_text())["pid"]

    trainer = subprocess.Popen([sys.executable, "-c", GATEWAY_OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline().strip() == "up"
        frozen = psutil.Process(gateway())
        frozen.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="is in use by another gateway"):
            process_group.ProcessGroup(tmp_path, 60)
    finally:
        trainer.kill()
        trainer.wait()
    with process_group.ProcessGroup(tmp_path, 60) as group:
        group.start_gateway(GatewayConfig())
        group.wait_for_gateway()
        assert gateway() != frozen.pid and gone_within(10, [frozen]) == []


def test_an_engine_waits_for_the_gateway_of_its_own_fleet(tmp_path, monkeypatch):
    file = tmp_path / "gateway.json"
    file.write_text(json.dumps({"owner": 1, "address": "127.0.0.1:9"}))  # left by a gateway that was killed
    monkeypatch.setattr(run_dir, "START_SECONDS", 0.1)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for the gateway of process"):
        run_dir.wait_for_gateway(tmp_path, os.getppid())
    with pytest.raises(GatewayLost, match=r"process 7, which was starting the gateway in .* is gone"):
        run_dir.wait_for_gateway(tmp_path, 7)
    file.write_text(json.dumps({"owner": os.getppid()}))
    run_dir.wait_for_gateway(tmp_path, os.getppid())
