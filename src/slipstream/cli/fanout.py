"""The `fanout` command: a file of prompts to a fleet, a file of completions back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import JoinGateway, JoinRunDir


def fanout(
    prompts: Annotated[Path, typer.Argument(help="Prompts, one per line: text, or JSON in a .jsonl file.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="With --model: engine settings, as for `slipstream engine`; with --server: dialect=sglang …",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of completions; PROMPTS.out.jsonl by default.")
    ] = None,
    run_dir: JoinRunDir = None,
    gateway: JoinGateway = "",
    model: Annotated[
        Path | None, typer.Option(help="HF model directory or org/name on the Hub: start a fleet for this run.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="With --model: number of engine processes.")] = 1,
    server: Annotated[
        list[str] | None,
        typer.Option(help="With --model: URL of a running vLLM or SGLang server to use as an engine; repeatable."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Directory of safetensors to load into every engine first.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per completion.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: sample from this probability mass.")] = 1.0,
    n: Annotated[int, typer.Option("-n", help="Completions per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same completions.")] = 0,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write completions in the order of the prompts, not as they finish.")
    ] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also write the log-probability of each token.")] = False,
    in_flight: Annotated[
        int, typer.Option(help="Maximum number of completions in flight; 0 keeps the engines full.")
    ] = 0,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a lost fleet to come back.")] = 60.0,
) -> None:
    """Generate completions for a file of prompts.

    Use a running fleet (--run-dir or --gateway), or start one for this run
    (--model). Run the same command again to resume an interrupted run. A prompt
    that cannot be completed has an error in its line; the exit code is then 1.
    """
    from slipstream.deploy.fanout.run import FleetChoice, run
    from slipstream.types import SamplingParams

    fleet = FleetChoice(run_dir, gateway, model, engines, tuple(server or ()), tuple(options or ()), weights)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, n=n)
    target = output or prompts.with_name(prompts.name + ".out.jsonl")
    stats = run(fleet, prompts, target, sampling, seed, ordered, logprobs, in_flight, patience)
    raise typer.Exit(bool(stats.failed))
