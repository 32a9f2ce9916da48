"""The `plan` command: predict a weight sync, choose the sizes of trainer and engines, recommend a topology."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from slipstream.deploy.advice.sync_cost import SyncCost, TensorKind
    from slipstream.deploy.advice.topology import Recommendation
    from slipstream.model.config import ModelConfig

DEFAULT_GBPS = (5.0, 50.0, 400.0)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model directory, name on the Hub, or one of llama-8b, llama-70b, qwen3-235b-a22b, kimi-k2."
        ),
    ],
    gpus: Annotated[int, typer.Option(min=0, help="Choose how to split this many GPUs.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="With --gpus: completions per step.")] = 512,
    group: Annotated[int, typer.Option(min=1, help="With --gpus: completions per prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="With --gpus: length of a prompt.")] = 512,
    completion_tokens: Annotated[int, typer.Option(min=1, help="With --gpus: length of a completion.")] = 1024,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="With --gpus: 0 alternates generation and training; more overlaps them.")
    ] = 1,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="With --gpus.")] = 8,
    network_gbps: Annotated[float, typer.Option(min=0.001, help="With --gpus: GB/s per GPU between hosts.")] = 50.0,
    hardware: Annotated[
        str, typer.Option(help="With --gpus: h200, h200-vllm, or a file of benchmarks/plan_accuracy.py --save.")
    ] = "h200-vllm",
    trainer: Annotated[str, typer.Option(help="The trainer's mesh: fsdp=128,tp=8.")] = "fsdp=1",
    engines: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks per engine.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Expert parallelism: engine ranks hold whole experts.")] = False,
    dtype: Annotated[str, typer.Option(help="Data type of the engine's weights.")] = "bfloat16",
    gbps: Annotated[list[float] | None, typer.Option(help="Link speed per rank in GB/s; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    workload: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Hardware and workload: device=gpu hosts=2 devices=8 …"),
    ] = None,
) -> None:
    """Predict a weight sync; choose sizes; recommend a topology.

    With --gpus, says how many GPUs the trainer and how many engines of which
    tensor parallelism should get, the expected step, and what bounds it.

    Otherwise prints bytes, moves and memory per rank, and seconds at given link speeds.
    With a workload (settings of Workload: device, hosts, devices, prompts,
    group, tokens, sync_every, …) it also recommends a topology and a transport,
    says why, and predicts iterations per day.
    """
    import dataclasses
    import json

    from rich.console import Console

    from slipstream.config import load
    from slipstream.deploy.advice import sync_cost
    from slipstream.deploy.advice.topology import Scenario, Workload, choose
    from slipstream.weights.plan import DTYPE_BYTES

    if gpus:
        if workload or gbps or (trainer, engines, tp, ep, dtype) != ("fsdp=1", 1, 1, False, "bfloat16"):
            raise ConfigError(
                "--gpus chooses --trainer, --engines and --tp, for weights in bfloat16 and links of --network-gbps; leave "
                "those, --ep, --dtype, --gbps and KEY=VALUE settings out"
            )
        lengths = (batch, prompt_tokens, completion_tokens, group)
        _plan_sizes(model, lengths, (gpus, gpus_per_host, network_gbps), hardware, max_staleness, as_json)
        return
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    mesh = sync_cost.parse_trainer(trainer)
    shape = sync_cost.FleetShape(engines, tp, ep)
    cost = sync_cost.estimate(_kinds(model, tp), mesh, shape, dtype)
    choice = choose(Scenario(cost, mesh, shape, load(Workload, overrides=workload))) if workload else None
    speeds = gbps or DEFAULT_GBPS
    if as_json:
        figures = {**dataclasses.asdict(cost), "seconds": {f"{s:g} GB/s": cost.seconds(s) for s in speeds}}
        if choice is not None:
            figures["recommendation"] = {**dataclasses.asdict(choice), "iterations_per_day": choice.iterations_per_day}
        print(json.dumps(figures))
        return
    title = (
        f"{model}: {cost.num_parameters / 1e9:,.3f}B parameters, {mesh.num_ranks} trainer rank(s) → {engines} × tp {tp}"
    )
    Console().print(_table(title, cost, speeds, choice))
    if choice is None:
        print("Describe the hardware (device=gpu hosts=2 devices=8 …) to get a recommended topology and transport.")


def _plan_sizes(
    model: str,
    lengths: tuple[int, int, int, int],
    machines: tuple[int, int, float],
    hardware: str,
    max_staleness: int,
    as_json: bool,
) -> None:
    import dataclasses
    import json

    from rich.console import Console
    from rich.table import Table

    from slipstream.deploy.advice import sizes, step_cost

    shape = step_cost.KIMI_K2 if model.lower() == "kimi-k2" else step_cost.ModelShape.of(_config(model))
    gpus, gpus_per_host, network_gbps = machines
    cluster = sizes.Cluster(gpus, sizes.hardware_named(hardware), gpus_per_host, 1e9 * network_gbps)
    batch = step_cost.PlannedBatch(*lengths)
    found = sizes.choose_sizes(shape, batch, cluster, max_staleness)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(row), "steps_per_day": row.steps_per_day} for row in found]))
        return
    best, *others = found
    table = Table("", "", title=f"{model} on {gpus:,} × {cluster.hardware.name}", show_header=False)
    joined = "overlapping" if max_staleness and gpus > 1 else "alternating"
    for label, value in (
        ("trainer", f"{best.trainer_gpus:,} GPU(s)"),
        ("engines", f"{best.engines:,} × tensor parallelism {best.tp}, {best.rows:,} sequences at a time each"),
        ("one step", f"[bold]{best.step_seconds:,.3g} s[/]: {best.steps_per_day:,.0f} per day"),
        (f"generation, training ({joined})", f"{best.generate_seconds:,.3g} s, {best.train_seconds:,.3g} s"),
        ("sync", f"{best.sync_seconds:,.3g} s"),
        ("bound by", best.bound),
        *(
            ("or", f"{row.trainer_gpus:,} + {row.engines:,} × tp {row.tp}: {row.step_seconds:,.3g} s, {row.bound}")
            for row in others
        ),
    ):
        table.add_row(label, value)
    Console().print(table)


def _kinds(model: str, tp: int) -> Mapping[TensorKind, int]:
    """Return the kinds of tensors of a model known by name, in a directory, or on the Hub."""
    from slipstream.deploy.advice import sync_cost
    from slipstream.model import families

    kinds = sync_cost.kinds_named(model)
    if kinds is not None:
        return kinds
    config = _config(model)
    families.shard_dims(config, tp)
    return sync_cost.kinds_of(families.family_tensors(config))


def _config(model: str) -> ModelConfig:
    from slipstream.deploy.advice import sync_cost
    from slipstream.model.checkpoints.hf_config import read_config
    from slipstream.model.checkpoints.hub import hub_name, model_directory

    if known := sync_cost.config_named(model):
        return known
    if not Path(model).exists() and not hub_name(model):
        raise ConfigError(f"{model} is neither a directory nor a known name ({', '.join(sync_cost.names())})")
    directory = Path(model).parent if model.endswith("config.json") else model_directory(model, weights=False)
    return read_config(directory)


def _table(title: str, cost: SyncCost, speeds: Sequence[float], choice: Recommendation | None) -> Table:
    from rich.table import Table

    table = Table("", "", title=title, show_header=False)
    for label, value in (
        ("model, in the engine's dtype", f"{cost.model_bytes / 1e9:,.3f} GB"),
        ("an engine rank receives", f"{cost.engine_rank_bytes / 1e9:,.3f} GB"),
        ("in moves", f"{cost.moves_per_engine_rank:,}"),
        ("in buckets of 256 MiB", f"{cost.buckets_per_engine_rank:,}"),
        ("a trainer rank sends, once for all engines", f"{cost.trainer_rank_bytes / 1e9:,.3f} GB"),
        ("all engines receive", f"{cost.total_bytes / 1e9:,.1f} GB"),
        *((f"seconds at {speed:g} GB/s per rank", f"{cost.seconds(speed):,.3f}") for speed in speeds),
    ):
        table.add_row(label, value)
    if choice is not None:
        table.add_section()
        times = (choice.generate_seconds, choice.train_seconds, choice.sync_seconds)
        for label, value in (
            ("topology", f"[bold]{choice.topology}[/]: {choice.reasons[0]}"),
            ("transport", f"[bold]{choice.transport}[/]: {choice.reasons[1]}"),
            *(("note", note) for note in choice.reasons[2:]),
            ("generation, training, one sync", ", ".join(f"{seconds:,.3g} s" for seconds in times)),
            ("one iteration", f"{choice.iteration_seconds:,.3g} s: {choice.iterations_per_day:,.0f} per day"),
        ):
            table.add_row(label, value)
    return table
