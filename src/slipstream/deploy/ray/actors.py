"""Ray actors, each of which runs one process on a node: a gateway or an engine.

The process is the same as without Ray, `slipstream gateway` or `slipstream engine`. Actor and process end together: if the
actor is killed, the process sees that its parent is gone; if the process dies, the actor exits as well. Ray then restarts the
actor, which restarts its process, which rejoins the fleet."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import LOOPBACK, EngineConfig, GatewayConfig, HttpConfig
from slipstream.deploy.processes.process_group import ProcessGroup
from slipstream.deploy.ray.secret_file import SecretFile
from slipstream.errors import ConfigError, LaunchFailed
from slipstream.runtime.private_files import private_directory, write_private
from slipstream.runtime.tls import host_of


@dataclass(frozen=True, slots=True)
class JoinCredentials:
    """What an engine needs to join a fleet, by value: its node may not share a file system with the gateway's."""

    address: str
    node: str
    """Address of the gateway's node; a loopback address of the gateway is valid on this node only."""
    token: str = field(repr=False)
    ca: str = field(default="", repr=False)
    """CA in PEM, as are the next two; empty if everything is on loopback."""
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)

    def write(self, directory: Path) -> list[SecretFile]:
        """Write files like those of a run directory. No secret is on a command line, in the environment, or outlives us."""
        private_directory(directory, "the engine's directory")
        names = {"ca": "ca.pem", "certificate": "engine.pem", "key": "engine.key"}
        facts = {name: str(directory / file) for name, file in names.items() if getattr(self, name)}
        write_private(directory / "gateway.json", json.dumps({"address": self.address, **facts}))
        write_private(directory / "ca.pem", self.ca)
        write_private(directory / "engine.pem", self.certificate)
        return [SecretFile(directory / "token", self.token), SecretFile(directory / "engine.key", self.key)]


class ProcessActor(ABC):
    """An actor that lives as long as its process."""

    def __init__(self, name: str, directory: Path, start_seconds: float) -> None:
        self._name, self._ending = name, threading.Event()
        self._group = ProcessGroup(directory, start_seconds)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._watch, name="slipstream-watch", daemon=True).start()

    @abstractmethod
    def _start(self) -> None:
        """Start the process, and return when it is up."""

    def __repr__(self) -> str:
        """Return the name of this actor in Ray's tools and logs."""
        return f"slipstream {self._name}"

    def up(self) -> int:
        """Return the pid of this actor, once its process is up."""
        return os.getpid()

    def stop(self) -> None:
        """Stop the process. The driver then kills the actor, without a restart."""
        self._ending.set()
        self._group.close()

    def _watch(self) -> None:
        try:
            self._group.wait_until(self._ending.is_set, "the run to end", deadline=math.inf)
        except LaunchFailed as ended:
            if not self._ending.is_set():
                print(ended, file=sys.stderr, flush=True)
                os._exit(1)  # Ray does not restart an actor that exits normally


class GatewayActor(ProcessActor):
    """The gateway's actor. It always runs on the driver's node, where the run directory with token and journal is."""

    def __init__(self, run_dir: Path, config: GatewayConfig, http: HttpConfig | None, start_seconds: float) -> None:
        self._run_dir, self._config, self._http = run_dir, config, http
        super().__init__("gateway", run_dir, start_seconds)

    def _start(self) -> None:
        """Start with the address and token of the previous gateway, if there was one. If its actor was killed, that gateway has
        stopped normally and removed both files, so copies are kept."""
        kept = self._run_dir / "kept"
        files = [(self._run_dir / name, kept / name) for name in ("token", "gateway.json")]
        for file, copy in files:
            if _was_restarted() and copy.exists() and not file.exists():
                file.hardlink_to(copy)
        shutil.rmtree(kept, ignore_errors=True)
        self._group.start_gateway(self._config, self._http)
        self._group.wait_for_gateway()
        kept.mkdir(mode=0o700)
        for file, copy in files:
            copy.hardlink_to(file)

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._run_dir / "kept", ignore_errors=True)


class EngineActor(ProcessActor):
    """An engine's actor. Ray chooses its node, and another one if that node is lost."""

    def __init__(
        self,
        name: str,
        model: Path,
        config: EngineConfig,
        joins: JoinCredentials,
        run_dir: Path,
        patience: float,
        start_seconds: float,
    ) -> None:
        self._model, self._engine, self._joins, self._patience = model, config, joins, patience
        self._files, self._secrets = run_dir / f"{name}.joins", list[SecretFile]()
        # A new directory for each attempt, so that earlier logs are kept.
        super().__init__(name, run_dir / f"{name}-{os.getpid()}", start_seconds)

    def _start(self) -> None:
        here = node_address()
        if host_of(self._joins.address)[0] in LOOPBACK and here != self._joins.node:
            raise ConfigError(
                f"{self._name} runs on node {here}, but the gateway listens on loopback of node {self._joins.node}, because "
                "the cluster had no other node when the fleet started; start the fleet again"
            )
        files, config = self._files, self._engine
        self._secrets = self._joins.write(files)
        # Other backends receive weights over NCCL and do not listen.
        if self._joins.certificate and config.kind == "embedded":
            config = config.replace(listen=here, certificate=str(files / "engine.pem"), key=str(files / "engine.key"))
        self._group.start_engine(self._name, self._model, config, self._patience, joins=files)
        self._group.wait_for_engines(1)

    def stop(self) -> None:
        super().stop()
        for secret in self._secrets:
            secret.close()
        shutil.rmtree(self._files, ignore_errors=True)


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _was_restarted() -> bool:
    """Return whether Ray has restarted this actor."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
