"""`slipstream fanout` from its options to its summary: which fleet, with which weights, and what is shown of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slipstream.bridge import Bridge
from slipstream.config import EngineConfig, load
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.observe.fan_out_display import fan_out_display, summary
from slipstream.topology import connect, launch
from slipstream.topology.fan_out import FanOut, Tally
from slipstream.topology.prompt_file import CompletionFile, count_prompts, read_prompts
from slipstream.types import SamplingParams


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """A fleet that is up (one of the first two), or one to be started."""

    run_dir: Path | None = None
    gateway: str = ""
    model: Path | None = None
    engines: int = 1
    servers: tuple[str, ...] = ()
    """Addresses of vLLM or SGLang servers; each is an engine."""
    options: tuple[str, ...] = ()
    """Of the engines to be started, all alike: `kv_cache_tokens=4096`, or for servers `dialect=sglang`."""
    weights: Path | None = None
    """A checkpoint that is to be the policy."""

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.run_dir, self.gateway or None, self.model)) != 1:
            raise ConfigError("say which fleet: one of --run-dir DIR, --gateway ADDRESS, or --model DIR to start one")
        if self.model is None and (self.servers or self.options):
            raise ConfigError(
                "--server and engine settings are for a fleet that is started here; say --model DIR as well"
            )

    def open(self) -> Bridge:
        if self.model is None:
            return connect(self.run_dir or self.gateway)
        if self.servers:
            return launch(self.model, engine=[self._server(url) for url in self.servers])
        return launch(self.model, engines=self.engines, engine=load(EngineConfig, overrides=self.options))

    def _server(self, url: str) -> EngineConfig:
        config = load(EngineConfig, overrides=["kind=remote", f"url={json.dumps(url)}", *self.options])
        if config.url != url:
            raise ConfigError(
                f"--server is {url} and url is {config.url!r}; leave url out, and give --server for each server"
            )
        return config


def run(
    fleet: FleetChoice,
    prompts: Path,
    output: Path,
    sampling: SamplingParams,
    seed: int = 0,
    ordered: bool = False,
    logprobs: bool = False,
    in_flight: int = 0,
    patience: float = 60.0,
) -> Tally:
    console = Console(stderr=True)
    total = count_prompts(prompts)
    with CompletionFile(output, ordered=ordered, logprobs=logprobs) as file, fleet.open() as bridge:
        if fleet.weights is not None:
            _reload(bridge, fleet.weights, console)
        with fan_out_display(console, total) as show:
            job = FanOut(bridge, file, in_flight=in_flight, patience=patience, on_row=show)
            try:
                tally = asyncio.run(job.run(read_prompts(prompts, sampling, seed)))
            except (SlipstreamError, KeyboardInterrupt):
                console.print(f"stopped; what is finished is in {output}, and the same command goes on with it")
                raise
    console.print(summary(tally))
    return tally


def _reload(bridge: Bridge, checkpoint: Path, console: Console) -> None:
    """The checkpoint shuttle: weights by a path, to every engine, as one transaction."""
    from slipstream.weights.stored import stored_tensors

    report = bridge.sync(stored_tensors(checkpoint))
    console.print(
        f"{checkpoint}: {report.num_bytes / 1e6:,.1f} MB to {len(report.engines)} engine(s) in "
        f"{report.total_seconds:.2f} s, policy version {report.version}"
    )
