"""Start and stop a gateway and engines as actors of a Ray cluster, from the driver. The actors are in `actors.py`.

Ray places and restarts processes. Weights and rollouts do not pass through Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config import LOOPBACK, EngineConfig, GatewayConfig, HttpConfig, RayConfig
from slipstream.deploy.processes import certificates
from slipstream.deploy.processes.certificates import Certificates
from slipstream.deploy.processes.process_group import STOP_SECONDS
from slipstream.deploy.processes.run_dir import read_run_dir
from slipstream.deploy.ray.actors import EngineActor, GatewayActor, JoinCredentials
from slipstream.errors import ConfigError, DeadlineExceeded, LaunchFailed
from slipstream.gateway.tokens import make_token, revoke_token
from slipstream.model.checkpoints.hub import absolute_model
from slipstream.runtime.tls import host_of
from slipstream.runtime.waiting import waiting_for

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"Ray cannot be imported ({error}); pip install 'slipstream-rl[ray]'") from None

CONNECT_SECONDS = 5.0
KILL_SECONDS = 2 * STOP_SECONDS


class ActorGroup:
    """The actors of one run, with the interface of `ProcessGroup`. They end when this process ends, for whatever reason."""

    def __init__(self, run_dir: Path, start_timeout: float, gpus: Sequence[float], config: RayConfig) -> None:
        """`gpus` are those to reserve for each engine."""
        self._run_dir, self._config, self._gpus = run_dir.absolute(), config, gpus
        self._deadline, self._start_timeout = time.monotonic() + start_timeout, start_timeout
        self._gateway: Any = None
        self._engines: dict[str, Any] = {}
        self._placement: Any = None
        self._token_name, self._engine_token = f"ray-{secrets.token_hex(4)}", ""
        """Engines may run on other machines, so they do not get the run's own token."""
        self._is_ours = _join(config.address)
        try:
            self._driver = ray.get_runtime_context().get_node_id()
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            self._node, self._is_spread = nodes[self._driver], len(set(nodes.values())) > 1
            self._place()
        except BaseException:
            self.close()
            raise

    def _place(self) -> None:
        """Reserve resources for all engines, or fail."""
        needs = [{"CPU": self._config.cpus, "GPU": gpus} for gpus in self._gpus]
        bundles = [{kind: amount for kind, amount in need.items() if amount} for need in needs]
        self._placement = placement_group(bundles, strategy=self._config.strategy)
        if not self._placement.wait(self._start_timeout):
            free = {kind: amount for kind, amount in ray.available_resources().items() if kind in ("CPU", "GPU")}
            raise DeadlineExceeded(
                f"waited {self._start_timeout:g} s for Ray to reserve {bundles[0]} for each of {len(bundles)} engine(s) "
                f"({self._config.strategy}); free in the cluster: {free or 'nothing'}"
            )

    def start_gateway(self, config: GatewayConfig, http: HttpConfig | None = None) -> None:
        """Start the gateway on this node, where its token and journal are; it is restarted there, too. It listens on
        loopback if all nodes of the cluster have one address, and otherwise with a certificate that is made here."""
        if self._is_spread and config.host in LOOPBACK:
            files = self._certified(self._node)
            certificate, key = files.of(self._node)
            config = config.replace(host=self._node, certificate=certificate, key=key, ca=files.ca, mutual_tls=True)
        here = NodeAffinitySchedulingStrategy(self._driver, soft=False)
        self._gateway = (
            ray.remote(GatewayActor)
            .options(num_cpus=0, max_restarts=self._config.max_restarts, scheduling_strategy=here)
            .remote(self._run_dir, config, _absolute(http) if http is not None else None, self._start_timeout)
        )
        self._wait_for([self._gateway], "the gateway")
        self._engine_token = make_token(self._run_dir, "engine", self._token_name)

    def start_engine(self, name: str, model: str | Path, config: EngineConfig, patience: float) -> None:
        index = len(self._engines)
        place = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index)
        options = {"num_cpus": self._config.cpus, "num_gpus": self._gpus[index], "scheduling_strategy": place}
        self._engines[name] = (
            ray.remote(EngineActor)
            .options(max_restarts=self._config.max_restarts, **options)
            .remote(
                name,
                Path(absolute_model(model)),
                config,
                self._credentials(name),
                self._run_dir,
                patience,
                self._start_timeout,
            )
        )

    def _credentials(self, name: str) -> JoinCredentials:
        address, _, ca = read_run_dir(self._run_dir)
        token = self._engine_token
        if not ca:
            return JoinCredentials(address, self._node, token)
        files = (ca, *self._certified(name).of(name))
        return JoinCredentials(address, self._node, token, *(Path(file).read_text() for file in files))

    def _certified(self, name: str) -> Certificates:
        return certificates.make(self._run_dir / "certificates", [name])

    def wait_for_engines(self, count: int) -> None:
        self._wait_for(list(self._engines.values())[:count], f"{count} engine(s) to register")

    def _wait_for(self, actors: Sequence[Any], what: str) -> None:
        try:
            with waiting_for(what, lambda: f"logs are in {self._run_dir} on the node of each actor"):
                timeout = max(0.0, self._deadline - time.monotonic())
                ray.get([actor.up.remote() for actor in actors], timeout=timeout)
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"waited {self._start_timeout:g} s for {what}; logs are in {self._run_dir} on the node of each actor "
                "(`ray list actors`)"
            ) from None
        except RayError as error:
            raise LaunchFailed(
                f"an actor ended while waiting for {what}; logs are in {self._run_dir} on its node: {error}"
            ) from None

    def close(self) -> None:
        """Stop all actors, engines first so that the gateway sees them leave. Idempotent, also after `ray.shutdown`."""
        engines, self._engines = list(self._engines.values()), {}
        gateway, self._gateway = self._gateway, None
        placement, self._placement = self._placement, None
        if self._engine_token:
            self._engine_token = ""
            revoke_token(self._run_dir, self._token_name)
        if not ray.is_initialized():
            return
        for actors in (engines, [gateway] if gateway is not None else []):
            _stop(actors)
        if placement is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(placement)
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()


def _absolute(http: HttpConfig) -> HttpConfig:
    """Make paths absolute: an actor has another working directory."""
    paths = {name: getattr(http, name) for name in ("weights", "certificate", "key")}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path}
    return http.replace(**absolute, **({"model": absolute_model(http.model)} if http.model else {}))


def _stop(actors: Sequence[Any]) -> None:
    """Stop actors. One that does not stop its process in time is killed; the process then exits because its parent is gone."""
    stopping = [actor.stop.remote() for actor in actors]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=KILL_SECONDS)
    for actor in actors:
        with contextlib.suppress(RayError):
            ray.kill(actor, no_restart=True)


def _join(address: str) -> bool:
    """Connect to the cluster. Return whether we did, and so must disconnect."""
    if ray.is_initialized():
        return False
    _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"at {address!r}" if address else "(RAY_ADDRESS, or one of this machine)"
        raise LaunchFailed(f"cannot connect to a Ray cluster {where}: {error}") from None
    return True


def _check_reachable(address: str) -> None:
    """Fail at once if nothing listens at the address; Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is an address for Ray Client, but the gateway runs on the trainer's node; run the trainer on a node of "
            "the cluster (ray job submit)"
        )
    if ":" not in address:  # auto, local
        return
    try:
        socket.create_connection(host_of(address), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"there is no Ray cluster at {address!r}: {error}; `ray status` shows its address") from None
