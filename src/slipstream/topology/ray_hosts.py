"""What runs on the nodes of a Ray cluster: actors that look after one process each, a gateway or an engine.

The process is the one that runs without Ray, too, `slipstream gateway` or `slipstream engine`, and it follows its actor. So
both end together: when the actor is killed, the process sees that its parent is gone; when the process dies, the actor ends
as well. Ray then starts the actor anew, the actor its process, and that finds its place in the fleet by itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.config import LOOPBACK, EngineConfig, GatewayConfig, HttpConfig
from slipstream.errors import ConfigError, LaunchFailed
from slipstream.tls import host_of
from slipstream.topology.lent import Lent
from slipstream.topology.local import ProcessGroup


@dataclass(frozen=True, slots=True)
class Pass:
    """What an engine needs to join a fleet, by value: its node may share no file system with the gateway's."""

    address: str
    node: str
    """Address of the gateway's node: its loopback cannot be dialled from another."""
    token: str = field(repr=False)
    ca: str = field(default="", repr=False)
    """PEM, as are the next two; empty where everything is on loopback."""
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)

    def leave(self, directory: Path) -> list[Lent]:
        """As files, like those of a run directory: no secret is in a command line or in the environment, nor outlives us."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = {"address": self.address, **({"ca": str(directory / "ca.pem")} if self.ca else {})}
        (directory / "gateway.json").write_text(json.dumps(facts))
        (directory / "ca.pem").write_text(self.ca)
        (directory / "engine.pem").write_text(self.certificate)
        return [Lent(directory / "token", self.token), Lent(directory / "engine.key", self.key)]


class Host(ABC):
    """An actor that is alive as long as its process is."""

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
        """Returns when the process is at work."""

    def __repr__(self) -> str:
        """What Ray's tools and logs call this actor."""
        return f"slipstream {self._name}"

    def up(self) -> int:
        """The pid of this actor, once its process is at work."""
        return os.getpid()

    def stop(self) -> None:
        """Ends the process in order. The actor itself is then killed by whoever made it, and not started again."""
        self._ending.set()
        self._group.close()

    def _watch(self) -> None:
        try:
            self._group.wait_until(self._ending.is_set, "the run to end", deadline=math.inf)
        except LaunchFailed as ended:
            if not self._ending.is_set():
                print(ended, file=sys.stderr, flush=True)
                os._exit(1)  # one that ends in order would not be started again


class GatewayHost(Host):
    """Runs on the driver's node, always: the run directory with token and journal is there."""

    def __init__(self, run_dir: Path, config: GatewayConfig, http: HttpConfig | None, start_seconds: float) -> None:
        self._run_dir, self._config, self._http = run_dir, config, http
        super().__init__("gateway", run_dir, start_seconds)

    def _start(self) -> None:
        """Under the address and the token of the one before, if there was one. That one has ended in order if it was its actor
        that was killed, and has taken both files along: so they are kept a second time."""
        kept = self._run_dir / "kept"
        files = [(self._run_dir / name, kept / name) for name in ("token", "gateway.json")]
        for file, copy in files:
            if _is_again() and copy.exists() and not file.exists():
                file.hardlink_to(copy)
        shutil.rmtree(kept, ignore_errors=True)
        self._group.start_gateway(self._config, self._http)
        kept.mkdir(mode=0o700)
        for file, copy in files:
            copy.hardlink_to(file)

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._run_dir / "kept", ignore_errors=True)


class EngineHost(Host):
    """Runs on whatever node Ray gives it; after a node's end, on another."""

    def __init__(
        self,
        name: str,
        model: Path,
        config: EngineConfig,
        joins: Pass,
        run_dir: Path,
        patience: float,
        start_seconds: float,
    ) -> None:
        self._model, self._engine, self._joins, self._patience = model, config, joins, patience
        self._files, self._lent = run_dir / f"{name}.joins", list[Lent]()
        # Of each attempt its own, so that the log of the one before stays.
        super().__init__(name, run_dir / f"{name}-{os.getpid()}", start_seconds)

    def _start(self) -> None:
        here = node_address()
        if host_of(self._joins.address)[0] in LOOPBACK and here != self._joins.node:
            raise ConfigError(
                f"{self._name} is on node {here}, and the gateway listens on loopback of node {self._joins.node}, because the "
                "cluster had no other when it was started; start the fleet again now that it has"
            )
        files, config = self._files, self._engine
        self._lent = self._joins.leave(files)
        # The others take weights over NCCL, and listen for none.
        if self._joins.certificate and config.kind == "embedded":
            config = replace(config, listen=here, certificate=str(files / "engine.pem"), key=str(files / "engine.key"))
        self._group.start_engine(self._name, self._model, config, self._patience, joins=files)
        self._group.wait_for_engines(1)

    def stop(self) -> None:
        super().stop()
        for secret in self._lent:
            secret.close()
        shutil.rmtree(self._files, ignore_errors=True)


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _is_again() -> bool:
    """Whether Ray has started this actor before."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
