"""A node of a SLURM job does its part: `srun slipstream role …`, once on each.

    first node        makes certificates, runs the gateway, waits for the engines, runs the trainer
    others before     wait for the engines, run the trainer
    the last N        wait for the gateway, run engines until it is gone

They find each other through the run directory, on a file system that all see. When the first node's trainer ends, its gateway
takes `gateway.json` away, and that ends the others."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import EngineConfig, GatewayConfig
from slipstream.errors import ConfigError, DeadlineExceeded
from slipstream.topology import RESTART_SECONDS, certificates
from slipstream.topology.certificates import Certificates
from slipstream.topology.local import ProcessGroup, mark_of
from slipstream.topology.slurm import Role

log = logging.getLogger(__name__)

START_SECONDS = 900.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Part:
    """One node's part in a run; every node is given the same but for `role`."""

    role: Role
    run_dir: Path
    model: Path
    command: Sequence[str]
    """The trainer's."""
    engine: EngineConfig = EngineConfig()  # noqa: RUF009 it is frozen
    engines_per_node: int = 1
    port: int = 0
    """Of the gateway."""
    start_seconds: float = START_SECONDS

    def run(self) -> int:
        """The exit code of this node: the trainer's, or 0 where engines were."""
        log.info("node %s: %s", self.role.name, "trainer" if self.role.is_trainer else "engines")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self.role.is_alone:
            return self._alone()
        if self.role.is_head:
            return self._head()
        return self._trainer() if self.role.is_trainer else self._engines()

    def _alone(self) -> int:
        with ProcessGroup(self.run_dir, self.start_seconds) as group:
            group.keep_alive()
            group.start_gateway(GatewayConfig(port=self.port))
            self._start_engines(group, self.engine)
            return self._train()

    def _head(self) -> int:
        left = [*self.run_dir.glob("*.ready"), *self.run_dir.glob("gateway.json")]
        if left:
            raise ConfigError(
                f"{self.run_dir} was used by another attempt ({left[0].name} is there); give each one its own"
            )
        files = certificates.make(self._certificates.directory, self.role.hosts)
        with ProcessGroup(self.run_dir, self.start_seconds) as group:
            group.keep_alive()
            certificate, key = files.of(self.role.name)
            gateway = GatewayConfig(self.role.name, self.port, certificate=certificate, key=key, ca=files.ca)
            group.start_gateway(gateway)
            group.wait_until(lambda: not self._missing(), f"engines {', '.join(self._names)} to register")
            return self._train()

    def _trainer(self) -> int:
        self._wait(lambda: not self._missing(), "all engines")
        return self._train()

    def _engines(self) -> int:
        self._wait(self._has_gateway, "the gateway")
        config = self.engine
        if config.kind == "embedded":  # the others take weights over NCCL, and listen for none
            certificate, key = self._certificates.of(self.role.name)
            config = replace(config, listen=self.role.name, certificate=certificate, key=key)
        with ProcessGroup(self.run_dir / self.role.name, self.start_seconds) as group:
            group.keep_alive()
            self._start_engines(group, config)
            group.wait_until(lambda: not self._has_gateway(), "the run to end", deadline=math.inf)
        return 0

    def _start_engines(self, group: ProcessGroup, config: EngineConfig) -> None:
        shares = split_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""), self.engines_per_node)
        for index, devices in enumerate(shares):
            name = _engine_name(self.role.name, index)
            group.start_engine(name, self.model, config, RESTART_SECONDS, joins=self.run_dir, environment=devices)
        group.wait_for_engines(self.engines_per_node)

    def _train(self) -> int:
        """Runs the trainer's command; a signal to end reaches it, too."""
        rank = f"{self.role.index}/{len(self.role.trainers)}"
        environment = {**os.environ, "SLIPSTREAM_RUN_DIR": str(self.run_dir), "SLIPSTREAM_TRAINER": rank}
        started: list[subprocess.Popen[bytes]] = []
        told = False

        def end(*_: object) -> None:
            nonlocal told
            told = True
            for trainer in started:
                trainer.terminate()

        before = signal.signal(signal.SIGTERM, end)
        try:
            started.append(subprocess.Popen(list(self.command), env=environment))
            if told:  # while it was being started
                end()
            code = started[0].wait()
        except OSError as error:
            raise ConfigError(f"the trainer's command {self.command[0]!r} cannot be run: {error.strerror}") from None
        finally:
            signal.signal(signal.SIGTERM, before)
        return code if code >= 0 else 128 - code

    @property
    def _certificates(self) -> Certificates:
        return Certificates(self.run_dir / "certificates")

    @property
    def _names(self) -> list[str]:
        return [_engine_name(host, index) for host in self.role.inference for index in range(self.engines_per_node)]

    def _missing(self) -> list[str]:
        return [name for name in self._names if not mark_of(self.run_dir, name).exists()]

    def _has_gateway(self) -> bool:
        return (self.run_dir / "gateway.json").exists()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"node {self.role.name} waited {self.start_seconds:g} s for {what} in {self.run_dir}; is that directory on "
                    f"a file system that {self.role.hosts[0]} writes to as well?"
                )
            time.sleep(POLL_SECONDS)


def _engine_name(host: str, index: int) -> str:
    return f"{host}-{index}"


def split_devices(visible: str, count: int) -> list[Mapping[str, str]]:
    """What each of a node's engines is told of its GPUs: an equal share of those that the node has been given."""
    devices = [device for device in visible.split(",") if device]
    if count == 1 or not devices:
        return [{}] * count
    share, rest = divmod(len(devices), count)
    if rest or not share:
        raise ConfigError(f"{len(devices)} GPU(s) ({visible}) cannot be shared evenly by {count} engines of a node")
    parts = (devices[index * share : (index + 1) * share] for index in range(count))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]
