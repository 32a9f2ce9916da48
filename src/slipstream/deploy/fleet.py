"""`launch`, `connect` and `inprocess`: three ways to get a `Bridge` to inference engines.

`launch` starts a gateway and engines on this machine or a Ray cluster, `connect` joins a running fleet, and `inprocess`
runs an engine in the current process. The bridge has the same methods in all three cases."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.config import (
    MAX_MESSAGE_BYTES,
    SYNC_SECONDS,
    DeltaMode,
    Device,
    EmbeddedConfig,
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    RayConfig,
    RemoteConfig,
    Snapshot,
    SyncOptions,
    checked,
    engine_config,
)
from slipstream.deploy.processes.placement import Devices, place_here
from slipstream.deploy.processes.process_group import ProcessGroup
from slipstream.deploy.processes.run_dir import http_url, new_run_dir, read_run_dir, run_identity, run_token
from slipstream.deploy.processes.vllm_environment import check_environment, check_vllm_arguments, interpreter
from slipstream.errors import ConfigError, GatewayLost, Unauthorized, UnknownArchitecture
from slipstream.gateway.channels import Token
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.families import load_plugins
from slipstream.runtime.private_files import private_directory, private_file
from slipstream.runtime.tls import Identity

if TYPE_CHECKING:
    from slipstream.deploy.ray.cluster import ActorGroup

START_SECONDS = 120.0
FOLLOW_SECONDS, RESTART_SECONDS = 3.0, 300.0
"""How long an engine waits for a lost gateway: without and with a restart, which takes Ray over a minute on a busy machine."""


def launch(
    model: str | Path,
    *,
    engines: int = 1,
    engine: EngineConfig | Literal["embedded", "vllm"] | Sequence[EngineConfig] | None = None,
    devices: Devices | None = None,
    trainer_devices: Sequence[Device] | None = None,
    share_gpus: bool = False,
    gateway: GatewayConfig | None = None,
    run_dir: str | Path | None = None,
    transport: str | None = None,
    checksums: bool = True,
    check_finite: bool = True,
    process_index: int = 0,
    process_count: int = 1,
    snapshot: Snapshot = "reference",
    timeout: float = SYNC_SECONDS,
    delta: DeltaMode = "auto",
    delta_bytes: int | None = None,
    start_timeout: float = START_SECONDS,
    keep_alive: bool = False,
    http: bool | HttpConfig = False,
    cluster: Literal["local", "ray"] | RayConfig = "local",
) -> Bridge:
    """Start a gateway and engines, and connect to them.

    The processes end when the bridge closes, or when this process dies for whatever reason.

    Args:
        model: HF model directory with `config.json`, `tokenizer.json` for text prompts, and weights unless the first
            `sync` brings them; or the name of a model on the Hugging Face Hub, `org/name` or `org/name@revision`. On a Ray
            cluster a directory is a path on every node.
        engines: Number of engine processes.
        engine: Config of the engines; "embedded" or "vllm" for that backend's defaults; or a sequence with one config per
            engine, such as several running servers.
        devices: GPUs of the engines, as `nvidia-smi` numbers them or by UUID: one list per engine with a GPU per rank, such as
            `[[0, 1], [2, 3]]`; or a list to divide among them; or "auto", which takes GPUs that the trainer does not. By
            default a single engine sees the GPUs that this process sees, and several are placed as by "auto".
        trainer_devices: GPUs of the trainer; by default those in CUDA_VISIBLE_DEVICES. Pass `[]` if it uses none.
        share_gpus: Let several ranks, or a rank and the trainer, be on one GPU.
        gateway: Config of the gateway.
        run_dir: Directory for logs, address and token; a new one by default.
        transport: Data plane of weight syncs: `shm`, `tcp` or `disk:/directory`, for example. By default the fastest that
            works.
        checksums: Verify checksums of transferred weights.
        check_finite: Refuse weights with NaN or infinity.
        process_index: `jax.process_index()` of a trainer with several processes. One process launches, the others
            `connect`, and all call `sync`.
        process_count: `jax.process_count()` of the trainer.
        snapshot: What is kept of a sync for engines that start or come back before the next one: "reference" keeps JAX arrays
            as they are, "copy" makes a copy, for trainers that donate or overwrite them, "none" keeps nothing.
        timeout: Time limit in seconds for each step of a sync and for each score.
        delta: Whether `tcp` and `disk` carry only what changed, to engines with 16-bit weights (docs/hosts.md).
        delta_bytes: Limit of the memory that deltas take, 2 bytes per parameter.
        start_timeout: Time limit in seconds for the fleet to start.
        keep_alive: Restart a gateway or engine that dies. The bridge sends a restarted engine the version that it lacks.
        http: Serve HTTP at `bridge.http_url`: OpenAI's API and vLLM's calls for RL (docs/http.md).
        cluster: "ray" or a `RayConfig` runs gateway and engines as Ray actors, which are always restarted (docs/ray.md).

    Example:
        with slipstream.launch("my-model", engine=VllmConfig(tensor_parallel_size=2), engines=2) as bridge:
            bridge.sync(params)
            completions = bridge.generate(["Hello"])
    """
    sync = SyncOptions(
        transport, checksums, check_finite, process_index, process_count, snapshot, timeout, delta, delta_bytes
    )
    configs = _configs(engine, engines)
    gateway = GatewayConfig() if gateway is None else checked(gateway, GatewayConfig, "gateway")
    front = _http_config(http, model)
    if cluster == "local":
        model = model_directory(model)
        load_plugins(module for config in configs for module in config.plugins)
        _check_startable(model, configs)
        configs = place_here(configs, devices, trainer_devices, share_gpus)
    directory = Path(run_dir) if run_dir is not None else new_run_dir()
    keep_alive = keep_alive or cluster != "local"  # Ray always restarts actors
    group = _group(cluster, directory, start_timeout, configs, devices, keep_alive)
    try:
        group.start_gateway(gateway, front)
        for index, config in enumerate(configs):
            patience = RESTART_SECONDS if keep_alive else FOLLOW_SECONDS
            group.start_engine(f"engine-{index}", model, config, patience)
        group.wait_for_engines(len(configs))
        until = time.monotonic() + (RESTART_SECONDS if keep_alive else 0.0)
        while True:
            try:
                bridge = _join_run(directory, sync, gateway.max_message_bytes, model)
                bridge.on_close(group.close)
                return bridge
            except (GatewayLost, ConfigError):  # the gateway has just died and is being restarted
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
    except BaseException:
        group.close()
        raise


def connect(
    target: str | Path | None = None,
    *,
    model: str | Path | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    transport: str | None = None,
    checksums: bool = True,
    check_finite: bool = True,
    process_index: int = 0,
    process_count: int = 1,
    snapshot: Snapshot = "reference",
    timeout: float = SYNC_SECONDS,
    delta: DeltaMode = "auto",
    delta_bytes: int | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Bridge:
    """Connect to a running fleet. `transport`, `checksums`, `check_finite`, `process_index`, `process_count`,
    `snapshot`, `timeout`, `delta` and `delta_bytes` are as for `launch`.

    Args:
        target: The fleet's run directory, or the gateway's address (`127.0.0.1:8471`). Default: SLIPSTREAM_RUN_DIR.
        model: The model's directory or name on the Hub, for conversations as prompts and for the text of `stream_tokens`:
            tokenizer and chat template are read from it.
        token: Bearer token of the gateway. Default: the one in the run directory, or SLIPSTREAM_TOKEN.
        ca: PEM certificate of the CA that signed the gateway's certificate, needed beyond loopback. Default: the one named
            in the run directory, or SLIPSTREAM_CA.
        certificate: PEM certificate of this machine, for a gateway with `mutual_tls`. Default: the one named in the run
            directory, or SLIPSTREAM_CERTIFICATE.
        key: PEM private key of the certificate. Default: as for the certificate, or SLIPSTREAM_KEY.
        max_message_bytes: Maximum size of a control message; must match the gateway's.

    Example:
        bridge = slipstream.connect("runs/fleet", process_index=jax.process_index(), process_count=jax.process_count())
    """
    sync = SyncOptions(
        transport, checksums, check_finite, process_index, process_count, snapshot, timeout, delta, delta_bytes
    )
    target = target if target is not None else os.environ.get("SLIPSTREAM_RUN_DIR", "")
    if target and Path(target).is_dir():
        return _join_run(Path(target), sync, max_message_bytes, model, token, ca, certificate, key)
    if not target:
        raise ConfigError("no fleet given: pass its run directory or address, or set SLIPSTREAM_RUN_DIR")
    address = str(target).removeprefix("grpc://")
    if ":" not in address:
        raise ConfigError(f"{target!r} is neither a run directory nor an address like 127.0.0.1:8471")
    token = (token or os.environ.get("SLIPSTREAM_TOKEN", "")).strip()
    if not token:
        raise Unauthorized("connecting by address needs the gateway's token: pass token=, or set SLIPSTREAM_TOKEN")
    files = {"SLIPSTREAM_CA": ca, "SLIPSTREAM_CERTIFICATE": certificate, "SLIPSTREAM_KEY": key}
    authority, *own = (str(file or os.environ.get(name, "")) for name, file in files.items())
    return _join((address, token, authority, Identity(*own)), sync, max_message_bytes, model)


def inprocess(
    model: str | Path,
    *,
    engine: EmbeddedConfig | None = None,
    transport: str | None = None,
    check_finite: bool = True,
    delta: DeltaMode = "auto",
    run_dir: str | Path | None = None,
) -> Bridge:
    """Run an embedded engine in this process, without a gateway.

    Args:
        model: HF model directory or name on the Hub, as for `launch`.
        engine: Config of the engine.
        transport: Data plane of weight syncs, as for `launch`.
        check_finite: Refuse weights with NaN or infinity.
        delta: As for `launch`.
        run_dir: Directory for the journal of `bridge.rollouts`; by default the journal is lost with the process.

    Example:
        with slipstream.inprocess("my-model") as bridge:
            completions = bridge.generate(["Hello"])
    """
    from slipstream.bridge.in_process import LocalFleet
    from slipstream.engines.embedded.engine import EmbeddedEngine
    from slipstream.runtime import event_loop

    sync = SyncOptions(transport, check_finite=check_finite, delta=delta)
    journal, directory = None, model_directory(model)
    if run_dir is not None:
        journal = private_file(private_directory(Path(run_dir), "run_dir") / "journal.sqlite")

    async def start() -> LocalFleet:
        embedded = EmbeddedEngine.from_directory(directory, name="inprocess", options=engine or EmbeddedConfig())
        return LocalFleet(embedded, journal)

    return Bridge(event_loop.run(start()), sync, read_tokenizer=partial(ChatTokenizer.read, directory))


def _configs(engine: EngineConfig | str | Sequence[EngineConfig] | None, count: int) -> list[EngineConfig]:
    """Return one config per engine."""
    if isinstance(engine, Sequence) and not isinstance(engine, str):
        configs = [engine_config(config) for config in engine]
    else:
        configs = [engine_config(engine)] * checked(count, int, "engines")
    if not configs:
        raise ConfigError(f"engines must be at least 1, got {count}; slipstream.inprocess needs no engine process")
    urls = [config.url for config in configs if isinstance(config, RemoteConfig)]
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{urls[0]} is one server and so one engine, got {len(urls)} engines for it")
    return configs


def _check_startable(model: Path, configs: Sequence[EngineConfig]) -> None:
    """Raise what an engine on this machine would fail with, before any process is started."""
    try:
        read_config(model)
    except UnknownArchitecture:
        if any(config.kind != "vllm" for config in configs):
            raise
    for config in configs:
        if config.kind == "vllm":
            check_environment(interpreter(config))
            check_vllm_arguments(interpreter(config), config.vllm)
        if config.kind == "remote" and importlib.util.find_spec("httpx") is None:
            raise ConfigError("an engine of kind 'remote' needs httpx; pip install 'slipstream-rl[remote]'")


def _group(
    cluster: Literal["local", "ray"] | RayConfig,
    run_dir: Path,
    start_timeout: float,
    configs: Sequence[EngineConfig],
    devices: Devices | None,
    keep_alive: bool,
) -> ProcessGroup | ActorGroup:
    if cluster == "local":
        group = ProcessGroup(run_dir, start_timeout)
        if keep_alive:
            group.keep_alive()
        return group
    if cluster != "ray" and not isinstance(cluster, RayConfig):
        raise ConfigError(f"cluster must be 'local', 'ray' or a RayConfig, got {cluster!r}")
    named = (
        devices if devices not in (None, "auto") else [c.devices for c in configs if c.kind != "remote" and c.devices]
    )
    if named:
        raise ConfigError(
            f'devices is {named!r}, but Ray chooses the GPUs of its actors; use devices="auto" for one per rank, or '
            "RayConfig(gpus=…) for another number or a share"
        )
    from slipstream.deploy.ray.cluster import ActorGroup

    config = RayConfig() if cluster == "ray" else cluster
    ranks = [0 if engine.kind == "remote" else engine.num_ranks for engine in configs]
    gpus = ranks if devices == "auto" else [config.gpus] * len(configs)
    return ActorGroup(run_dir, start_timeout, gpus, config)


def _http_config(http: bool | HttpConfig, model: str | Path) -> HttpConfig | None:
    """Return the config of the HTTP server, with the served model's tokenizer unless it names another."""
    if http is False:
        return None
    config = HttpConfig() if http is True else checked(http, HttpConfig, "http")
    return config if config.model else config.replace(model=str(model))


def _join_run(
    run_dir: Path,
    sync: SyncOptions,
    max_message_bytes: int,
    model: str | Path | None,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> Bridge:
    """Join the gateway of a run directory, with the credentials there unless others are given."""
    address, _, own_ca = read_run_dir(run_dir)
    identity = Identity(str(certificate or ""), str(key or "")) if certificate or key else run_identity(run_dir)
    gateway = (address, token.strip() if token else run_token(run_dir), str(ca or own_ca), identity)
    return _join(gateway, sync, max_message_bytes, model, run_dir)


def _join(
    gateway: tuple[str, Token, str, Identity],
    sync: SyncOptions,
    max_message_bytes: int,
    model: str | Path | None,
    run_dir: Path | None = None,
) -> Bridge:
    """`gateway` is its address, its token, the PEM file of its CA, which is empty without TLS, and what we show to it."""
    from slipstream.gateway.client import GatewayFleet
    from slipstream.runtime import event_loop

    address, token, ca, identity = gateway

    async def join() -> GatewayFleet:
        return GatewayFleet(
            address, token, sync.timeout, max_message_bytes, sync.process_index, sync.process_count, ca, identity
        )

    read_tokenizer = ChatTokenizer if model is None else partial(ChatTokenizer.read, model)
    bridge = Bridge(event_loop.run(join()), sync, str(run_dir or ""), read_tokenizer)
    bridge.http_url = http_url(run_dir) if run_dir is not None else ""
    return bridge
