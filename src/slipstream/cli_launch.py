"""`slipstream launch`: a fleet for trainers that come and go."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.bridge import Bridge


def launch(
    model: Annotated[Path, typer.Option(help="HF model directory; with --ray, on every node.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of EngineConfig: tp=2 dtype=bfloat16 …"),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Replicas.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="As actors of a Ray cluster, instead of on this machine.")] = False,
    place: Annotated[
        list[str] | None,
        typer.Option(help="With --ray, a setting of RayConfig: gpus=1 strategy=PACK address=auto …; may be repeated."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for logs, address and token; one is made unless given.")
    ] = None,
    port: Annotated[int, typer.Option(help="Of the gateway; 0 takes a free one.")] = 0,
    http: Annotated[int | None, typer.Option(help="Also speak HTTP on this port; 0 takes a free one.")] = None,
    front: Annotated[
        list[str] | None,
        typer.Option(help="With --http, a setting of HttpConfig: weights=checkpoints host=node01 …; may be repeated."),
    ] = None,
    start_seconds: Annotated[float, typer.Option(help="How long gateway and engines may take to come up.")] = 900.0,
) -> None:
    """Run a gateway and engines until Ctrl-C, start again what dies, and say how to connect."""
    from slipstream.config import EngineConfig, GatewayConfig, HttpConfig, RayConfig, load
    from slipstream.errors import ConfigError
    from slipstream.topology import launch as start

    if place and not ray:
        raise ConfigError(f"--place {place[0]} says how Ray places engines, and there is none without --ray")
    if front and http is None:
        raise ConfigError(f"--front {front[0]} is a setting of the HTTP front, and there is none without --http PORT")
    stop = threading.Event()
    with start(
        model,
        engines=engines,
        engine=load(EngineConfig, overrides=options or ()),
        gateway=GatewayConfig(port=port),
        run_dir=run_dir,
        start_timeout=start_seconds,
        keep_alive=True,
        http=load(HttpConfig, overrides=[f"port={http}", *(front or ())]) if http is not None else False,
        cluster=load(RayConfig, overrides=place or ()) if ray else "local",
    ) as bridge:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print("\n".join(_how_to_connect(bridge)), flush=True)
        stop.wait()


def _how_to_connect(bridge: Bridge) -> list[str]:
    from slipstream.config import LOOPBACK
    from slipstream.tls import host_of
    from slipstream.topology import read_run_dir

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
    rows["status"] = f"slipstream status --run-dir {run_dir}"
    return [*(f"{label:<10}{text}" for label, text in rows.items()), "Ctrl-C ends it."]
