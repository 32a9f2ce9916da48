"""Where trainer, gateway and engines run: one process, several on one machine, a Ray cluster, or a fleet that is up already.

The three ways to a `Bridge`; what the trainer does with it is the same in all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.bridge import Bridge
from slipstream.config import MAX_MESSAGE_BYTES, EngineConfig, GatewayConfig, HttpConfig, RayConfig
from slipstream.errors import ConfigError, GatewayLost, Unauthorized
from slipstream.topology.local import ProcessGroup, new_run_dir

if TYPE_CHECKING:
    from slipstream.topology.ray_cluster import ActorGroup

SYNC_SECONDS = 120.0
START_SECONDS = 120.0
FOLLOW_SECONDS, RESTART_SECONDS = 3.0, 60.0
"""How long an engine does without its gateway: not long, unless it will be started again."""


def launch(
    model: str | Path,
    *,
    engines: int = 1,
    engine: EngineConfig | Sequence[EngineConfig] | None = None,
    gateway: GatewayConfig | None = None,
    run_dir: str | Path | None = None,
    transport: str | None = None,
    checksums: bool = True,
    trainer: tuple[int, int] = (0, 1),
    timeout: float = SYNC_SECONDS,
    start_timeout: float = START_SECONDS,
    keep_alive: bool = False,
    http: bool | HttpConfig = False,
    cluster: Literal["local", "ray"] | RayConfig = "local",
) -> Bridge:
    """Starts a gateway and `engines` engine processes on this machine, or on a Ray cluster, and connects to them. Several
    configs in `engine` are an engine each: servers that are up already at several addresses, say.

    `model` is an HF model directory: `config.json`, a `tokenizer.json` if prompts are text, and weights unless the first
    `sync` brings them. Logs, address and token are in `run_dir`. The processes end with the bridge, and also when this
    process dies, however it dies. `timeout` bounds each step of a sync and each score. `transport` forces a data plane
    (`shm`, `tcp`, `disk:/directory`); `checksums=False` trusts it. A trainer of several JAX processes launches in one of
    them and connects in the others, each with `trainer=(jax.process_index(), jax.process_count())`; all call `sync`. With
    `keep_alive`, a gateway or an engine that dies is started again (see `bridge.rollouts` and `bridge.repair`). With `http`,
    the gateway speaks HTTP too, at `bridge.http_url`: OpenAI's interface and vLLM's calls for RL (docs/http.md). With
    `cluster="ray"`, or a `RayConfig`, they are actors that Ray places and always starts again (docs/ray.md); `model` is then a
    path on every node."""
    configs = [engine or EngineConfig()] * engines if not isinstance(engine, Sequence) else list(engine)
    if not configs:
        raise ConfigError(f"engines must be at least 1, got {engines}; slipstream.inprocess needs no engine process")
    servers = [config.url for config in configs if config.kind == "remote"]
    if len(set(servers)) < len(servers):
        raise ConfigError(f"{servers[0]} is one server and so one engine; engines is {len(servers)}")
    gateway = gateway or GatewayConfig()
    directory = Path(run_dir) if run_dir is not None else new_run_dir()
    keep_alive = keep_alive or cluster != "local"  # Ray always does
    group = _group(cluster, directory, start_timeout, len(configs), keep_alive)
    try:
        group.start_gateway(gateway, _front(http, Path(model)))
        for index, config in enumerate(configs):
            patience = RESTART_SECONDS if keep_alive else FOLLOW_SECONDS
            group.start_engine(f"engine-{index}", Path(model), config, patience)
        group.wait_for_engines(len(configs))
        until = time.monotonic() + (RESTART_SECONDS if keep_alive else 0.0)
        while True:
            try:
                bridge = _bridge(
                    *read_run_dir(directory),
                    timeout,
                    gateway.max_message_bytes,
                    transport,
                    checksums,
                    trainer,
                    directory,
                )
                bridge.on_close(group.close)
                return bridge
            except (GatewayLost, ConfigError):  # it has just died, and is being started again
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
    except BaseException:
        group.close()
        raise


def _group(
    cluster: Literal["local", "ray"] | RayConfig, run_dir: Path, start_timeout: float, engines: int, keep_alive: bool
) -> ProcessGroup | ActorGroup:
    if cluster == "local":
        group = ProcessGroup(run_dir, start_timeout)
        if keep_alive:
            group.keep_alive()
        return group
    if cluster != "ray" and not isinstance(cluster, RayConfig):
        raise ConfigError(f"cluster must be 'local', 'ray' or a RayConfig, got {cluster!r}")
    from slipstream.topology.ray_cluster import ActorGroup

    return ActorGroup(run_dir, start_timeout, engines, RayConfig() if cluster == "ray" else cluster)


def _front(http: bool | HttpConfig, model: Path) -> HttpConfig | None:
    """Its text is the served model's, unless it says otherwise."""
    if http is False:
        return None
    config = HttpConfig() if http is True else http
    return config if config.model else replace(config, model=str(model))


def connect(
    target: str | Path | None = None,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    transport: str | None = None,
    checksums: bool = True,
    trainer: tuple[int, int] = (0, 1),
    timeout: float = SYNC_SECONDS,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Bridge:
    """Joins a running fleet: by its run directory, or by address (`127.0.0.1:8471`), token and, beyond loopback, the PEM file
    of the CA that signed the gateway's certificate.

    What is not given is read from SLIPSTREAM_RUN_DIR, SLIPSTREAM_TOKEN and SLIPSTREAM_CA."""
    target = target if target is not None else os.environ.get("SLIPSTREAM_RUN_DIR", "")
    if target and Path(target).is_dir():
        address, found, told = read_run_dir(Path(target))
        who = (address, token or found, str(ca or told))
        return _bridge(*who, timeout, max_message_bytes, transport, checksums, trainer, Path(target))
    if not target:
        raise ConfigError("say which fleet: its run directory or its address, or set SLIPSTREAM_RUN_DIR")
    address = str(target).removeprefix("grpc://")
    if ":" not in address:
        raise ConfigError(f"{target!r} is neither a run directory nor an address like 127.0.0.1:8471")
    token = token or os.environ.get("SLIPSTREAM_TOKEN")
    if not token:
        raise Unauthorized("connecting by address needs the gateway's token: pass token=, or set SLIPSTREAM_TOKEN")
    ca = str(ca or os.environ.get("SLIPSTREAM_CA", ""))
    return _bridge(address, token, ca, timeout, max_message_bytes, transport, checksums, trainer)


def inprocess(
    model: str | Path,
    *,
    engine: EngineConfig | None = None,
    transport: str | None = None,
    run_dir: str | Path | None = None,
) -> Bridge:
    """An embedded engine inside this process: no gateway, no other process, same verbs. The journal of `bridge.rollouts` is in
    `run_dir`; without one it ends with the process."""
    from slipstream import portal
    from slipstream.engines.embedded.engine import EmbeddedEngine
    from slipstream.engines.local import LocalFleet

    journal = None
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        journal = Path(run_dir) / "journal.sqlite"

    async def start() -> LocalFleet:
        held = EmbeddedEngine.from_directory(model, name="inprocess", options=engine or EngineConfig())
        return LocalFleet(held, journal)

    return Bridge(portal.run(start()), transport)


def read_run_dir(directory: Path) -> tuple[str, str, str]:
    """`(address, token, CA)` of the gateway that runs in this directory; no CA without TLS."""
    try:
        facts = json.loads((directory / "gateway.json").read_text())
        return facts["address"], (directory / "token").read_text().strip(), facts.get("ca", "")
    except FileNotFoundError:
        raise ConfigError(f"no gateway is running in {directory} (it has no gateway.json and token)") from None


def _bridge(
    address: str,
    token: str,
    ca: str,
    timeout: float,
    max_message_bytes: int,
    transport: str | None,
    checksums: bool,
    trainer: tuple[int, int],
    run_dir: Path | None = None,
) -> Bridge:
    from slipstream import portal
    from slipstream.gateway.client import GatewayFleet

    async def join() -> GatewayFleet:
        return GatewayFleet(address, token, timeout, max_message_bytes, trainer, ca)

    fleet = portal.run(join())
    bridge = Bridge(fleet, transport, str(run_dir or ""), checksums, trainer[0])
    bridge.http_url = _http_url(run_dir) if run_dir is not None else ""
    return bridge


def _http_url(directory: Path) -> str:
    try:
        return str(json.loads((directory / "gateway.json").read_text()).get("http", ""))
    except FileNotFoundError:  # the gateway has just ended
        return ""
