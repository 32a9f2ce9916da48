"""Overhead of a request in-process, over gRPC and over HTTP, and throughput by number of engines.

    python benchmarks/topologies.py [--json benchmarks/results/topologies.json]

Overhead: the same requests for one token of a small model go to an engine inside this process, over gRPC through the
gateway, and over HTTP through the same gateway. Such a request is almost entirely overhead, so that the difference to
the in-process engine is the cost of an interface.

Throughput: tokens per second of 1, 2 and 4 engine processes. They share the cores of this machine, so that more engines
do not help once the cores are busy. To show the load balancer alone, the same is measured with fake engines that sleep
instead of computing, like engines whose accelerators are elsewhere. Compared measurements run in alternating blocks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, GatewayConfig
from slipstream.deploy.fleet import connect
from slipstream.deploy.processes.process_group import ProcessGroup
from slipstream.deploy.processes.run_dir import read_run_dir
from slipstream.errors import Unsupported
from slipstream.gateway.engine_stream import serve_engine
from slipstream.model.checkpoints.sample_model import sample_config, sample_params, write_sample_config
from slipstream.runtime import event_loop
from slipstream.types import (
    Completion,
    EngineInfo,
    MemoryReport,
    Parameter,
    ParameterPart,
    Request,
    SamplingParams,
    Score,
    TensorSpec,
)
from slipstream.types import VersionSpan as Span

PROMPT_TOKENS, BATCH = 32, 64
BLOCK = 20
FLEETS = (1, 2, 4)
SCALE_PROMPTS, SCALE_TOKENS = 128, 32
WAIT_SLOTS, WAIT_SECONDS = 8, 0.004
"""Concurrent sequences and seconds per token of a fake engine."""

Call = Callable[[Sequence[tuple[int, ...]]], int]
"""Generates one token for each prompt, and returns the number of tokens received."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="single requests measured per interface")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per fleet")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    engine = EmbeddedConfig(max_num_seqs=BATCH, max_model_len=128)
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        model = Path(root) / "model"
        write_sample_config(model)
        params = sample_params(sample_config(), 0)
        results, others = {"machine": machine()}, BackgroundLoad()
        results["overhead"] = overhead(stack, model, params, engine, Path(root), arguments.requests)
        results["tokens_per_second"] = {
            "engines that compute": computing(stack, model, params, engine, Path(root), arguments.rounds),
            "engines that wait": waiting(stack, Path(root), arguments.rounds),
        }
        results["machine"]["others_busy"] = others.share()
    show(results, Console())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "device": jax.devices()[0].platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "slipstream": slipstream.__version__,
    }


class BackgroundLoad:
    """Measures the CPU load by processes other than ours, from its creation on. It should be near zero."""

    def __init__(self) -> None:
        self._start, self._busy, self._ours = time.perf_counter(), busy_seconds(), our_seconds()

    def share(self) -> float:
        elapsed = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        theirs = busy_seconds() - self._busy - (our_seconds() - self._ours)
        return max(0.0, theirs / elapsed)


def busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def our_seconds() -> float:
    me = psutil.Process()
    return float(sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True))))


# --- interfaces -------------------------------------------------------------------------------------------------------


def overhead(
    stack: contextlib.ExitStack, model: Path, params: Any, engine: EmbeddedConfig, root: Path, requests: int
) -> dict[str, Any]:
    """Return milliseconds per request by interface, one at a time and in a batch, and the gateway's CPU time."""
    local = stack.enter_context(slipstream.inprocess(model, engine=engine))
    fleet = stack.enter_context(slipstream.launch(model, engine=engine, run_dir=root / "interfaces", http=True))
    for bridge in (local, fleet):
        bridge.sync(params)
    interfaces = {"in-process": by_bridge(local), "gRPC": by_bridge(fleet), "HTTP": by_http(fleet)}
    gateway = psutil.Process(json.loads((root / "interfaces" / "gateway.json").read_text())["pid"])
    prompts = random_prompts(BATCH)
    found: dict[str, dict[str, list[float]]] = {name: {"one": [], "batch": [], "cpu": []} for name in interfaces}
    for block in track(range(-2, max(1, requests // BLOCK)), "interfaces"):
        for name in list(interfaces)[:: 1 if block % 2 else -1]:
            call, seen = interfaces[name], found[name]
            single = [timed(call, [prompts[i % BATCH]]) for i in range(BLOCK)]
            before = sum(gateway.cpu_times()[:2])
            batches = [timed(call, prompts) / BATCH for _ in range(3)]
            if block >= 0:  # the first two compile and warm up
                seen["one"] += single
                seen["batch"] += batches
                seen["cpu"].append((sum(gateway.cpu_times()[:2]) - before) / (3 * BATCH))
    return {
        name: {
            "one at a time, ms": 1e3 * statistics.median(seen["one"]),
            f"one of {BATCH}, ms": 1e3 * statistics.median(seen["batch"]),
            f"gateway's CPU, one of {BATCH}, ms": 0.0 if name == "in-process" else 1e3 * statistics.mean(seen["cpu"]),
        }
        for name, seen in found.items()
    }


def timed(call: Call, prompts: Sequence[tuple[int, ...]]) -> float:
    start = time.perf_counter()
    assert call(prompts) == len(prompts)
    return time.perf_counter() - start


def by_bridge(bridge: Bridge) -> Call:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    return lambda prompts: sum(len(c.token_ids) for c in bridge.generate(prompts, sampling))


def by_http(bridge: Bridge) -> Call:
    """Call the OpenAI completions endpoint over one persistent connection."""
    url = urlsplit(bridge.http_url)
    headers = {"Authorization": f"Bearer {(Path(bridge.run_dir) / 'token').read_text()}"}
    connection = http.client.HTTPConnection(url.hostname or "", url.port)

    def call(prompts: Sequence[tuple[int, ...]]) -> int:
        body = {"prompt": [list(p) for p in prompts], "max_tokens": 1, "temperature": 0, "ignore_eos": True, "seed": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        return sum(len(choice["token_ids"]) for choice in answer["choices"])

    return call


def random_prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 3 * k) % 30 + 4 for k in range(PROMPT_TOKENS)) for i in range(count)]


# --- more engines -----------------------------------------------------------------------------------------------------


def computing(
    stack: contextlib.ExitStack, model: Path, params: Any, engine: EmbeddedConfig, root: Path, rounds: int
) -> dict[str, float]:
    bridges = {}
    for count in FLEETS:
        fleet = slipstream.launch(model, engines=count, engine=engine, run_dir=root / f"fleet-{count}")
        bridges[count] = stack.enter_context(fleet)
        bridges[count].sync(params)
    return rates(bridges, rounds, "engines that compute")


def waiting(stack: contextlib.ExitStack, root: Path, rounds: int) -> dict[str, float]:
    bridges = {}
    for count in FLEETS:
        group = ProcessGroup(root / f"waiting-{count}", 60.0)
        stack.callback(group.close)
        group.start_gateway(GatewayConfig())
        address, token, _ = read_run_dir(group.run_dir)
        stack.enter_context(attached([WaitingEngine(f"waiting-{i}") for i in range(count)], address, token))
        bridges[count] = stack.enter_context(connect(group.run_dir))
    return rates(bridges, rounds, "engines that wait")


def rates(bridges: dict[int, Bridge], rounds: int, what: str) -> dict[str, float]:
    """Return tokens per second by fleet size: medians over alternating rounds, after two rounds of warm-up."""
    prompts = random_prompts(SCALE_PROMPTS)
    sampling = SamplingParams(max_tokens=SCALE_TOKENS, ignore_eos=True, seed=0)
    found: dict[int, list[float]] = {count: [] for count in bridges}
    for turn in track(range(-2, rounds), what):
        for count, bridge in bridges.items():
            start = time.perf_counter()
            num_tokens = sum(len(c.token_ids) for c in bridge.generate(prompts, sampling))
            if turn >= 0:
                found[count].append(num_tokens / (time.perf_counter() - start))
    return {str(count): statistics.median(speeds) for count, speeds in found.items()}


class WaitingEngine:
    """Fake engine that sleeps for every token. Implements only what generation through the gateway needs."""

    adapters = ()

    def __init__(self, name: str) -> None:
        self._name, self._slots = name, asyncio.Semaphore(WAIT_SLOTS)

    def describe(self) -> EngineInfo:
        box = ((0, 1),)
        return EngineInfo(
            name=self._name, kind="waiting", model="none", dtype="float32", num_ranks=1, tensors=(TensorSpec("w", (1,)),),
            parameters=(Parameter("w", 0, (1,), (ParameterPart("w", box, box),)),), transports=("memory",), host=self._name,
            max_model_len=512, max_num_seqs=WAIT_SLOTS, version=0,
        )  # fmt: skip

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Completion], None]:
        for done in asyncio.as_completed([self._one(request) for request in requests]):
            yield [await done]

    async def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0, adapter: str = "") -> list[Score]:
        raise Unsupported("it has no model")

    async def _one(self, request: Request) -> Completion:
        count = request.sampling.max_tokens
        async with self._slots:
            await asyncio.sleep(count * WAIT_SECONDS)
        logprobs, prompt = (0.0,) * count, tuple(map(int, request.prompt))
        spans = (Span(0, 0, count),)
        return Completion(request.id, 0, prompt, (5,) * count, "", logprobs, logprobs, "length", spans, self._name)

    async def memory(self) -> MemoryReport:
        return MemoryReport(0, 0, 0)


@contextlib.contextmanager
def attached(engines: Sequence[WaitingEngine], address: str, token: str) -> Iterator[None]:
    tasks = []

    async def start() -> None:
        registered = [asyncio.Event() for _ in engines]
        for engine, event in zip(engines, registered):
            tasks.append(asyncio.create_task(serve_engine(engine, address, token, 5.0, 64 << 20, event.set)))  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            await asyncio.gather(*(event.wait() for event in registered))

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    event_loop.run(start())
    try:
        yield
    finally:
        event_loop.run(stop())


# --- the report -------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any], console: Console) -> None:
    interfaces, fleets = results["overhead"], results["tokens_per_second"]
    columns = list(next(iter(interfaces.values())))
    table = Table("interface", *columns, "overhead over in-process, one at a time", title="a request for one token")
    base = interfaces["in-process"]["one at a time, ms"]
    for name, figures in interfaces.items():
        table.add_row(name, *(f"{figures[c]:.3f}" for c in columns), f"{figures['one at a time, ms'] - base:+.3f} ms")
    console.print(table)
    table = Table(
        "tokens/s by number of engines", *map(str, FLEETS), title=f"{SCALE_PROMPTS} prompts × {SCALE_TOKENS} tokens"
    )
    for what, speeds in fleets.items():
        one = speeds[str(FLEETS[0])]
        table.add_row(what, *(f"{speeds[str(n)]:,.0f} ({speeds[str(n)] / one:.2f}×)" for n in FLEETS))
    console.print(table)
    facts = ", ".join(f"{key} {value}" for key, value in results["machine"].items() if key != "others_busy")
    console.print(f"{facts}; CPU load by other processes {results['machine']['others_busy']:.0%}")
    console.print(
        f"Engines that compute share {results['machine']['cpus']} cores, and do not scale beyond them. "
        f"Engines that wait ({WAIT_SLOTS} concurrent sequences, {1e3 * WAIT_SECONDS:g} ms per token) "
        "stand in for remote accelerators."
    )


if __name__ == "__main__":
    main()
