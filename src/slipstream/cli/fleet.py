"""Commands that run and inspect a fleet: `launch`, `status`, `drain`, `gateway` and `engine`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import (
    BesideGateway,
    EngineDevices,
    EngineSettings,
    JoinGateway,
    JoinRunDir,
    Owner,
    ShareGpus,
    TrainerDevices,
    parse_devices,
    parse_trainer_devices,
)
from slipstream.cli.stderr import LogFormat, LogFormatOption, log_to_stderr
from slipstream.errors import ConfigError
from slipstream.runtime import tracing

if TYPE_CHECKING:
    from slipstream.bridge.bridge import Bridge
    from slipstream.gateway.channels import Token


def launch(
    model: Annotated[
        Path,
        typer.Option(help="HF model directory, with --ray a path on every node; or org/name[@revision] on the Hub."),
    ],
    options: EngineSettings = None,
    engines: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1,
    devices: EngineDevices = "",
    trainer_devices: TrainerDevices = "",
    share_gpus: ShareGpus = False,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster instead of this machine.")] = False,
    ray_option: Annotated[
        list[str] | None,
        typer.Option(help="With --ray: a setting of RayConfig, such as gpus=1 or strategy=PACK; repeatable."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for logs, address and token; a new one by default.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes a free one.")] = 0,
    http: Annotated[int | None, typer.Option(help="Also serve HTTP on this port; 0 takes a free one.")] = None,
    http_option: Annotated[
        list[str] | None,
        typer.Option(help="With --http: a setting of HttpConfig, such as weights=checkpoints; repeatable."),
    ] = None,
    start_seconds: Annotated[float, typer.Option(help="Time limit for gateway and engines to start.")] = 900.0,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Run a gateway and engines until Ctrl-C.

    Processes that die are restarted. Prints how to connect.
    """
    from slipstream.config import EngineConfig, GatewayConfig, HttpConfig, RayConfig, load
    from slipstream.deploy.fleet import launch as start

    if ray_option and not ray:
        raise ConfigError(f"--ray-option {ray_option[0]} is a setting of the Ray cluster and needs --ray")
    if http_option and http is None:
        raise ConfigError(f"--http-option {http_option[0]} is a setting of the HTTP server and needs --http PORT")
    if log_format is LogFormat.json:
        log_to_stderr(log_format, "launch", run_dir=run_dir)
    stop = threading.Event()
    with start(
        model,
        engines=engines,
        engine=load(EngineConfig, overrides=options or ()),
        devices=parse_devices(devices),
        trainer_devices=parse_trainer_devices(trainer_devices),  # the trainer is another process
        share_gpus=share_gpus,
        gateway=GatewayConfig(port=port),
        run_dir=run_dir,
        start_timeout=start_seconds,
        keep_alive=True,
        http=load(HttpConfig, overrides=[f"port={http}", *(http_option or ())]) if http is not None else False,
        cluster=load(RayConfig, overrides=ray_option or ()) if ray else "local",
    ) as bridge:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print("\n".join(_how_to_connect(bridge)), flush=True)
        stop.wait()


def _how_to_connect(bridge: Bridge) -> list[str]:
    from slipstream.config import LOOPBACK
    from slipstream.deploy.processes.run_dir import read_run_dir
    from slipstream.runtime.tls import host_of

    run_dir = Path(bridge.run_dir).absolute()
    address, _, ca = read_run_dir(run_dir)
    rows = {
        "engines": ", ".join(f"{e.info.name} ({e.state})" for e in bridge.status().engines),
        "gateway": address,
        "here": f'slipstream.connect("{run_dir}")',
    }
    if host_of(address)[0] not in LOOPBACK:
        rows["elsewhere"] = (
            f'slipstream.connect("{address}", token=…, ca=…), with copies of {run_dir / "token"} and {ca}'
        )
    if bridge.http_url:
        rows["http"] = f"{bridge.http_url} (the token is in {run_dir / 'token'})"
    rows["logs"] = f"slipstream logs {run_dir} (files: {run_dir}/*.log)"
    rows["status"] = f"slipstream status --run-dir {run_dir}"
    rows["top"] = f"slipstream top {run_dir}"
    return [*(f"{label:<10}{text}" for label, text in rows.items()), "Press Ctrl-C to stop."]


def status(
    run_dir: JoinRunDir = None,
    gateway: JoinGateway = "",
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until q or Ctrl-C.")] = False,
) -> None:
    """Show a running fleet: its engines and policy version."""
    from rich.console import Console
    from rich.text import Text

    from slipstream.deploy.fleet import connect
    from slipstream.observe.terminal.fleet_poller import FleetPoller
    from slipstream.observe.terminal.fleet_table import describe, wrapped
    from slipstream.observe.terminal.screen import keep_drawing

    if run_dir is None and not gateway:
        raise ConfigError("no gateway given: pass --run-dir DIR or --gateway ADDRESS")
    with connect(run_dir or gateway) as bridge:
        fleet = bridge.status()
    if not watch:
        console = Console(highlight=False)
        for line in describe(fleet, console.width):
            console.print(line, soft_wrap=True)
        return
    poller = FleetPoller(lambda: connect(run_dir or gateway))

    def draw(width: int, height: int) -> list[Text]:
        found = poller.status
        return wrapped(poller.error, width) if found is None else describe(found, width, poller.rates)

    with poller.running():
        poller.asked.wait(1.0)
        keep_drawing(draw)


def drain(
    engine: Annotated[str, typer.Argument(help="Name of the engine.")],
    run_dir: JoinRunDir = None,
    gateway: JoinGateway = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let the engine take requests again.")] = False,
    seconds: Annotated[
        float, typer.Option(min=0, help="After this time, other engines get the requests that are not finished.")
    ] = 600.0,
    force: Annotated[bool, typer.Option("--force", help="Also drain the last engine that takes requests.")] = False,
) -> None:
    """Take an engine out of use for maintenance.

    It gets no new requests and finishes those that it has; the command waits
    for that. It keeps getting new weights, and stays drained, also over a
    restart, until `slipstream drain ENGINE --undo`.
    """
    from slipstream.deploy.fleet import connect

    if run_dir is None and not gateway:
        raise ConfigError("no gateway given: pass --run-dir DIR or --gateway ADDRESS")
    with connect(run_dir or gateway) as bridge:
        if undo:
            bridge.undrain(engine)
            print(f"{engine} takes requests again")
            return

        def on_progress(num_requests: int) -> None:
            print(f"{engine}: {num_requests} request(s) left", flush=True)

        if handed_back := bridge.drain(engine, seconds, force=force, on_progress=on_progress):
            print(f"{handed_back} request(s) were not finished within {seconds:g} s; other engines got them")
    print(f"{engine} is drained; stop it, or let it take requests again with `slipstream drain {engine} --undo`")


def gateway(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Directory for logs and the gateway's address and token.")],
    host: Annotated[
        str,
        typer.Option(help="Host name or address to listen on; beyond loopback it needs --certificate, --key and --ca."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 0,
    lease_seconds: Annotated[float, typer.Option(help="An engine silent for this long is considered lost.")] = 10.0,
    max_message_bytes: Annotated[int, typer.Option(help="Maximum size of a control message.")] = 64 << 20,
    max_requests: Annotated[int, typer.Option(help="Prompts accepted and not answered yet.")] = 65_536,
    max_buffered_bytes: Annotated[
        int, typer.Option(help="Size of these prompts, and of results that nobody has read yet.")
    ] = 1 << 30,
    certificate: Annotated[str, typer.Option(help="PEM file of the certificate; see `slipstream certificates`.")] = "",
    key: Annotated[str, typer.Option(help="PEM file of the certificate's private key.")] = "",
    ca: Annotated[
        str, typer.Option(help="PEM file of the CA that signed the certificate, for those who connect.")
    ] = "",
    mutual_tls: Annotated[
        bool, typer.Option(help="Require those who connect to show a certificate signed by the CA.")
    ] = False,
    http: Annotated[
        int | None,
        typer.Option(help="Also serve HTTP (OpenAI's API, vLLM's calls for RL) on this port; 0 takes a free one."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="HTTP settings: model=my-model weights=checkpoints …"),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record what happens in the fleet, for the dashboard.")
    ] = False,
    log_format: LogFormatOption = LogFormat.text,
    owner: Owner = 0,
) -> None:
    """Run a gateway, which engines and trainers connect to.

    Weights do not pass through it. It writes its address to
    RUN_DIR/gateway.json and a new token to RUN_DIR/token, which only you can
    read.
    """
    from slipstream.config import GatewayConfig, HttpConfig, load
    from slipstream.gateway.server import serve
    from slipstream.runtime.process_times import process_start_time

    log_to_stderr(log_format, "gateway", run_dir=run_dir)
    tracing.start("gateway")
    config = GatewayConfig(
        host=host,
        port=port,
        lease_seconds=lease_seconds,
        max_message_bytes=max_message_bytes,
        max_requests=max_requests,
        max_buffered_bytes=max_buffered_bytes,
        certificate=certificate,
        key=key,
        ca=ca,
        mutual_tls=mutual_tls,
        record=record,
    )
    front = None
    if http is not None:
        from slipstream.http.server import companion_server

        settings = load(HttpConfig, overrides=[f"port={http}", *(options or ())])
        front = companion_server(settings, config, run_dir)
    elif options:
        raise ConfigError(f"{options[0]} is a setting of the HTTP server and needs --http PORT")

    # The next owner tells by these whether this process is still wanted.
    facts = {"owner": owner, "started": process_start_time(os.getpid())}
    _run_until_stopped(owner, lambda stop: serve(config, run_dir, stop, front, facts))


def engine(
    model: Annotated[
        Path,
        typer.Option(
            help="HF model directory: config.json, tokenizer.json, and weights unless a sync brings them; or a name on the Hub."
        ),
    ],
    run_dir: JoinRunDir = None,
    gateway: Annotated[
        str,
        typer.Option(
            help="Address of the gateway, instead of --run-dir; needs its token and, beyond loopback, its CA."
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the gateway's token; SLIPSTREAM_TOKEN by default.")
    ] = None,
    ca: Annotated[
        str, typer.Option(help="PEM file of the CA that signed the gateway's certificate.", envvar="SLIPSTREAM_CA")
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            help="PEM certificate to show to a gateway with --mutual-tls; by default that of the engine's settings.",
            envvar="SLIPSTREAM_CERTIFICATE",
        ),
    ] = "",
    key: Annotated[str, typer.Option(help="PEM private key of the certificate.", envvar="SLIPSTREAM_KEY")] = "",
    name: Annotated[str, typer.Option(help="Name of the engine in the fleet; engine-PID by default.")] = "",
    options: EngineSettings = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a lost gateway to come back.")] = 60.0,
    log_format: LogFormatOption = LogFormat.text,
    owner: Owner = 0,
    beside_gateway: BesideGateway = False,
) -> None:
    """Run an engine and connect it to a gateway.

    The engine is the embedded JAX engine, vLLM (kind=vllm), or a running server
    (kind=remote url=https://host:8000, with dialect=sglang for SGLang).
    """
    from slipstream.config import EngineConfig, load

    name = name or f"engine-{os.getpid()}"
    log_to_stderr(log_format, "engine", name, run_dir)
    tracing.start(name)
    config = load(EngineConfig, overrides=options or ())
    if config.kind != "remote":
        os.environ.update(config.environment)  # before anything looks for GPUs
    if config.kind == "embedded" and config.tensor_parallel_size > 1:
        # CPU devices, if there is no accelerator; JAX reads the flag when it starts.
        flag = f"--xla_force_host_platform_device_count={config.tensor_parallel_size}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    from slipstream.deploy.processes.engine_process import host
    from slipstream.deploy.processes.run_dir import run_identity, wait_for_gateway
    from slipstream.runtime.tls import ANONYMOUS, Identity

    if beside_gateway and run_dir is not None:
        wait_for_gateway(run_dir, owner)
    address, token, authority = _credentials(run_dir, gateway, token_file, ca)
    identity = run_identity(run_dir) if run_dir is not None else Identity(certificate, key)
    if identity == ANONYMOUS and config.kind != "remote":
        identity = Identity(config.certificate, config.key)
    ready = run_dir / f"{name}.ready" if run_dir is not None else None

    _run_until_stopped(
        owner,
        lambda stop: host(model, name, config, address, token, patience, ready, stop, authority, identity),
    )


def _run_until_stopped(owner: int, serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run a server process until its event is set, which also happens when `owner` exits. Its files are private."""
    from slipstream.deploy.processes.lifeline import follow
    from slipstream.weights.transports.host import shm

    async def main() -> None:
        stop = asyncio.Event()
        follow(owner, stop)
        await serve(stop)

    os.umask(0o077)
    try:
        asyncio.run(main())
    finally:
        shm.sweep()


def _credentials(run_dir: Path | None, address: str, token_file: Path | None, ca: str) -> tuple[str, Token, str]:
    """Return `(address, token, CA)` of the gateway to join."""
    from slipstream.deploy.processes.run_dir import TokenFile, read_run_dir, run_token

    if run_dir is not None:
        address, _, ca = read_run_dir(run_dir)
        return address, run_token(run_dir), ca
    token = TokenFile(token_file) if token_file is not None else os.environ.get("SLIPSTREAM_TOKEN", "")
    if not address or not token:
        raise ConfigError(
            "no gateway given: pass --run-dir DIR, or --gateway ADDRESS with --token-file FILE or the token in "
            "SLIPSTREAM_TOKEN"
        )
    return address, token, ca
