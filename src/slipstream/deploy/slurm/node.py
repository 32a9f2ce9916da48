"""What each node of a SLURM job runs: `srun slipstream role …`, once per node.

    first node            makes certificates, runs the gateway, waits for the engines, runs the trainer
    other trainer nodes   wait for the engines, run the trainer
    inference nodes       wait for the gateway, run engines until it is gone

Nodes find each other through the run directory, on a shared file system. When the trainer on the first node ends, the gateway
removes `gateway.json`, which ends the other nodes."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import Device, EmbeddedConfig, EngineConfig, GatewayConfig
from slipstream.deploy.fleet import RESTART_SECONDS
from slipstream.deploy.processes import certificates
from slipstream.deploy.processes.certificates import Certificates
from slipstream.deploy.processes.placement import Devices, place_here
from slipstream.deploy.processes.process_group import ProcessGroup, ready_file
from slipstream.deploy.slurm.job import JobNode
from slipstream.errors import ConfigError, DeadlineExceeded
from slipstream.runtime.gpus import allocated
from slipstream.runtime.private_files import private_directory
from slipstream.runtime.waiting import waiting_for

log = logging.getLogger(__name__)

START_SECONDS = 900.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class NodeRole:
    """What one node of a job runs. All fields but `node` are the same on every node."""

    node: JobNode
    run_dir: Path
    model: Path
    command: Sequence[str]
    """Command that starts the trainer."""
    engine: EngineConfig = field(default_factory=EmbeddedConfig)
    engines_per_node: int = 1
    port: int = 0
    """Port of the gateway."""
    start_seconds: float = START_SECONDS
    devices: Devices | None = None
    """GPUs of a node's engines, as for `launch`."""
    trainer_devices: Sequence[Device] = ()
    """GPUs of the trainer on each of its nodes; empty: all of the node, or what engines on the same node leave."""
    share_gpus: bool = False

    def run(self) -> int:
        """Run this node to its end. Return the trainer's exit code, or 0 on an inference node."""
        log.info("node %s: %s", self.node.name, "trainer" if self.node.is_trainer else "engines")
        private_directory(self.run_dir, "the run directory")
        if self.node.is_alone:
            return self._alone()
        if self.node.is_head:
            return self._head()
        return self._trainer() if self.node.is_trainer else self._engines()

    def _alone(self) -> int:
        with ProcessGroup(self.run_dir, self.start_seconds) as group:
            group.keep_alive()
            group.start_gateway(GatewayConfig(port=self.port))
            group.wait_for_gateway()
            self._start_engines(group, self.engine)
            return self._train()

    def _head(self) -> int:
        left = [*self.run_dir.glob("*.ready"), *self.run_dir.glob("gateway.json")]
        if left:
            raise ConfigError(
                f"{self.run_dir} was used by another attempt (it has {left[0].name}); give each attempt its own directory"
            )
        files = certificates.make(self._certificates.directory, self.node.hosts)
        with ProcessGroup(self.run_dir, self.start_seconds) as group:
            group.keep_alive()
            certificate, key = files.of(self.node.name)
            gateway = GatewayConfig(host=self.node.name, port=self.port, certificate=certificate, key=key, ca=files.ca)
            group.start_gateway(gateway.replace(mutual_tls=True))
            with waiting_for("engines to register", lambda: f"{len(self._missing())} missing; logs: {self.run_dir}"):
                group.wait_until(lambda: not self._missing(), f"engines {', '.join(self._names)} to register")
            return self._train()

    def _trainer(self) -> int:
        self._wait(lambda: not self._missing(), "all engines")
        return self._train()

    def _engines(self) -> int:
        self._wait(self._has_gateway, "the gateway")
        config = self.engine
        if config.kind == "embedded":  # other backends receive weights over NCCL and do not listen
            certificate, key = self._certificates.of(self.node.name)
            config = config.replace(listen=self.node.name, certificate=certificate, key=key)
        with ProcessGroup(self.run_dir / self.node.name, self.start_seconds) as group:
            group.keep_alive()
            self._start_engines(group, config)
            group.wait_until(lambda: not self._has_gateway(), "the run to end", deadline=math.inf)
        return 0

    def _start_engines(self, group: ProcessGroup, config: EngineConfig) -> None:
        for index, placed in enumerate(self._placed(config)):
            group.start_engine(
                _engine_name(self.node.name, index), self.model, placed, RESTART_SECONDS, joins=self.run_dir
            )
        group.wait_for_engines(self.engines_per_node)

    def _placed(self, config: EngineConfig) -> list[EngineConfig]:
        """Return the config of each engine of this node, with its GPUs."""
        is_open = self.node.is_alone and self.devices is None and not self.trainer_devices
        trainer = None if is_open else self.trainer_gpus
        return place_here([config] * self.engines_per_node, self.devices, trainer, self.share_gpus)

    @property
    def trainer_gpus(self) -> Sequence[Device]:
        """GPUs of the trainer on this node: those that were named, or else, beside engines that are placed, the first of the
        node, as many as they leave."""
        if self.trainer_devices or not self.node.is_alone or self.devices != "auto" or self.engine.kind == "remote":
            return self.trainer_devices if self.node.is_trainer else ()
        ids, needed = [gpu.id for gpu in allocated()], self.engines_per_node * self.engine.num_ranks
        if len(ids) <= needed and not self.share_gpus:
            raise ConfigError(
                f"{self.engines_per_node} engine(s) of {self.engine.num_ranks} rank(s) leave none of the {len(ids)} GPU(s) of "
                f"{self.node.name} for the trainer; take fewer, or share them with --share-gpus"
            )
        return ids[: max(0, len(ids) - needed)]

    def _train(self) -> int:
        """Run the trainer's command and forward SIGTERM to it."""
        environment = {
            **os.environ,
            "SLIPSTREAM_RUN_DIR": str(self.run_dir),
            "SLIPSTREAM_PROCESS_INDEX": str(self.node.index),
            "SLIPSTREAM_PROCESS_COUNT": str(len(self.node.trainers)),
        }
        if gpus := self.trainer_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        started: list[subprocess.Popen[bytes]] = []
        terminated = False

        def end(*_: object) -> None:
            nonlocal terminated
            terminated = True
            for trainer in started:
                trainer.terminate()

        before = signal.signal(signal.SIGTERM, end)
        try:
            started.append(subprocess.Popen(list(self.command), env=environment))
            if terminated:  # the signal came while the trainer was starting
                end()
            code = started[0].wait()
        except OSError as error:
            raise ConfigError(f"cannot run the trainer's command {self.command[0]!r}: {error.strerror}") from None
        finally:
            signal.signal(signal.SIGTERM, before)
        return code if code >= 0 else 128 - code

    @property
    def _certificates(self) -> Certificates:
        return Certificates(self.run_dir / "certificates")

    @property
    def _names(self) -> list[str]:
        return [_engine_name(host, index) for host in self.node.inference for index in range(self.engines_per_node)]

    def _missing(self) -> list[str]:
        return [name for name in self._names if not ready_file(self.run_dir, name).exists()]

    def _has_gateway(self) -> bool:
        return (self.run_dir / "gateway.json").exists()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"node {self.node.name} waited {self.start_seconds:g} s for {what} in {self.run_dir}; is that directory on "
                    f"a file system shared with {self.node.hosts[0]}?"
                )
            time.sleep(POLL_SECONDS)


def _engine_name(host: str, index: int) -> str:
    return f"{host}-{index}"
