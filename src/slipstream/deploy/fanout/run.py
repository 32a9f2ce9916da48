"""`slipstream fanout`: connect to or start the fleet, load weights, run, print the summary."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slipstream.bridge.bridge import Bridge
from slipstream.config import EngineConfig, RemoteConfig, load
from slipstream.deploy.fanout.dispatch import FanOut, FanOutStats
from slipstream.deploy.fanout.display import fan_out_display, summary
from slipstream.deploy.fanout.prompt_file import CompletionFile, count_prompts, read_prompts
from slipstream.deploy.fleet import connect, launch
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.types import SamplingParams


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """A running fleet (`run_dir` or `gateway`), or one to start (`model`)."""

    run_dir: Path | None = None
    gateway: str = ""
    model: Path | None = None
    engines: int = 1
    servers: tuple[str, ...] = ()
    """URLs of vLLM or SGLang servers; each is an engine."""
    options: tuple[str, ...] = ()
    """Settings of all engines to start: `kv_cache_tokens=4096`, or for servers `dialect=sglang`."""
    weights: Path | None = None
    """Checkpoint to load into all engines first."""

    def __post_init__(self) -> None:
        if sum(option is not None for option in (self.run_dir, self.gateway or None, self.model)) != 1:
            raise ConfigError("pass exactly one of --run-dir DIR, --gateway ADDRESS, or --model DIR to start a fleet")
        if self.model is None and (self.servers or self.options):
            raise ConfigError(
                "--server and engine settings apply to a fleet that is started for this run; pass --model DIR as well"
            )

    def open(self) -> Bridge:
        if self.model is None:
            return connect(self.run_dir or self.gateway)
        if self.servers:
            return launch(self.model, engine=[self._server(url) for url in self.servers])
        engine = load(EngineConfig, overrides=self.options)
        return launch(self.model, engines=self.engines, engine=engine, trainer_devices=())  # there is no trainer

    def _server(self, url: str) -> RemoteConfig:
        config = load(RemoteConfig, overrides=[f"url={json.dumps(url)}", *self.options])
        if config.url != url:
            raise ConfigError(
                f"--server is {url}, but the setting url is {config.url!r}; leave url out and repeat --server instead"
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
) -> FanOutStats:
    console = Console(stderr=True)
    total = count_prompts(prompts)
    with CompletionFile(output, ordered=ordered, logprobs=logprobs) as file, fleet.open() as bridge:
        if fleet.weights is not None:
            _load_weights(bridge, fleet.weights, console)
        with fan_out_display(console, total) as show:
            fan_out = FanOut(bridge, file, in_flight=in_flight, patience=patience, on_row=show)
            try:
                stats = asyncio.run(fan_out.run(read_prompts(prompts, sampling, seed)))
            except (SlipstreamError, KeyboardInterrupt):
                console.print(f"stopped; finished prompts are in {output}, and the same command resumes the run")
                raise
    console.print(summary(stats))
    return stats


def _load_weights(bridge: Bridge, checkpoint: Path, console: Console) -> None:
    """Load a checkpoint into every engine, in one transaction."""
    from slipstream.tensors.safetensors_dir import stored_tensors

    report = bridge.sync(stored_tensors(checkpoint))
    console.print(
        f"{checkpoint}: {report.num_bytes / 1e6:,.1f} MB to {len(report.engines)} engine(s) in "
        f"{report.total_seconds:.2f} s, policy version {report.version}"
    )
