"""The HTTP server under more load than it can serve: are refusals orderly, is everybody served, is memory bounded?

    python benchmarks/http_load.py [--clients 3000] [--prompts 10000] [--json benchmarks/results/http_load.json]

All clients call at once, while a trainer has prompts queued. A third of them read slowly, a tenth disconnect before the answer
is there. A client that is refused (429, 503) asks again after `Retry-After` seconds, as OpenAI's client does. A client is
starved if it has no whole answer after `--patience` seconds. The exit code is 1 if one is, or if a status other than 200, 429
and 503 was seen."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, HttpConfig
from slipstream.types import SamplingParams

Kind = Literal["quick", "slow", "leaving"]

SLOW_BYTES, SLOW_SECONDS = 512, 0.1
"""What a slow client reads, and how often."""
LEAVE_SECONDS = 1.0
"""A client that disconnects does so within this time."""
CALM_SECONDS = 5.0
"""Time after the load before memory is measured again."""


@dataclass
class Report:
    clients: int
    prompts: int
    answers: dict[str, int] = field(default_factory=dict)
    """Answers by status and code of the error, those of refused calls included. `200 CODE` is a stream that ended with one."""
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a client's first call to the end of its answer, by kind of client."""
    starved: int = 0
    completions: int = 0
    """Completions of the trainer's prompts."""
    seconds: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)
    """Resident memory of the gateway before, at most during, and after the load."""

    @property
    def is_orderly(self) -> bool:
        is_served = all(answer == "200" or answer.startswith(("429 ", "503 ")) for answer in self.answers)
        return is_served and not self.starved and self.completions == self.prompts

    def count(self, answer: str) -> None:
        self.answers[answer] = self.answers.get(answer, 0) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=3000)
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts that a trainer has queued meanwhile")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds after which a client counts as starved")
    parser.add_argument("--max-requests", type=int, default=HttpConfig().max_requests, help="as in HttpConfig")
    parser.add_argument("--rounds", type=int, default=2, help="with the same gateway: does its memory grow?")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    _raise_file_limit(options.clients + 256)
    reports = []
    with tempfile.TemporaryDirectory() as root, _launched(Path(root), options.max_requests) as bridge:
        for _ in range(options.rounds):
            reports.append(run(bridge, options.clients, options.prompts, options.max_tokens, options.patience))
            show(reports[-1])
    if options.json:
        rounds = [{**asdict(r), "latencies": {k: _percentiles(v) for k, v in r.latencies.items()}} for r in reports]
        machine = {"cores": os.cpu_count(), "platform": platform.platform()}
        options.json.write_text(json.dumps({"rounds": rounds, "machine": machine}, indent=1) + "\n")
    sys.exit(not all(report.is_orderly for report in reports))


@contextmanager
def _launched(root: Path, max_requests: int) -> Iterator[Bridge]:
    slipstream.write_sample_model(root / "model")
    http = HttpConfig(max_requests=max_requests)
    engine = EmbeddedConfig(max_num_seqs=256, max_model_len=64)
    with slipstream.launch(root / "model", engine=engine, http=http, run_dir=root / "run") as bridge:
        yield bridge


def run(bridge: Bridge, clients: int, prompts: int, max_tokens: int, patience: float) -> Report:
    """Put load on the HTTP server and the gateway of `bridge`."""
    for count in (1, prompts):  # compiles
        bridge.generate(["1+1="] * min(count, 512), SamplingParams(max_tokens=max_tokens, top_logprobs=5))
    return asyncio.run(_run(bridge, Report(clients, prompts), max_tokens, patience))


async def _run(bridge: Bridge, report: Report, max_tokens: int, patience: float) -> Report:
    started = time.perf_counter()
    report.memory_mb["before"] = _memory_mb(bridge)
    watching = asyncio.create_task(_watch_memory(bridge, report))
    training = asyncio.create_task(_train(bridge, report, max_tokens))
    token = (Path(bridge.run_dir) / "token").read_text()
    await asyncio.gather(
        *(Client(bridge.http_url, token, max_tokens, _kind(i), report).run(patience) for i in range(report.clients))
    )
    await training
    report.seconds = time.perf_counter() - started
    await asyncio.sleep(CALM_SECONDS)
    watching.cancel()
    report.memory_mb["after"] = _memory_mb(bridge)
    return report


def _kind(index: int) -> Kind:
    if index % 10 == 5:
        return "leaving"
    return "slow" if index % 3 == 0 else "quick"


async def _train(bridge: Bridge, report: Report, max_tokens: int) -> None:
    if report.prompts:
        prompts = [f"{i}+{i + 1}=" for i in range(report.prompts)]
        report.completions = len(await bridge.agenerate(prompts, SamplingParams(max_tokens=max_tokens)))


class Client:
    """One client, which calls until it is answered."""

    def __init__(self, url: str, token: str, max_tokens: int, kind: Kind, report: Report) -> None:
        self._where, self._token, self._kind, self._report = urlsplit(url), token, kind, report
        self._body = json.dumps(
            {"prompt": "12+30=", "max_tokens": max_tokens, "logprobs": 5, "stream": random.random() < 0.5}
        )

    async def run(self, patience: float) -> None:
        started, self._attempts = time.perf_counter(), 0
        try:
            async with asyncio.timeout(patience):
                while (wait := await self._call()) is not None:
                    await asyncio.sleep(wait * random.uniform(1, 1.5))
        except TimeoutError:
            self._report.starved += 1
            return
        if self._kind != "leaving":
            self._report.latencies.setdefault(self._kind, []).append(time.perf_counter() - started)

    async def _call(self) -> float | None:
        """Call once. Return None if that was answered, otherwise the seconds to wait."""
        try:
            status, headers, body = await self._exchange()
        except OSError as error:  # refused by the kernel, or reset
            self._report.count(type(error).__name__)
            return 1.0
        if status == 0:
            return None  # this client has left
        code = _error_code(body)
        self._report.count(f"{status} {code}".strip())
        return float(headers.get("retry-after", "1")) if status in (429, 503) or code else None

    async def _exchange(self) -> tuple[int, dict[str, str], bytes]:
        connection = socket.socket()
        connection.setblocking(False)
        if self._kind == "slow":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * SLOW_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (self._where.hostname, self._where.port))
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection, limit=SLOW_BYTES)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {self._where.netloc}\r\nAuthorization: Bearer {self._token}\r\n"
                f"Connection: close\r\nContent-Length: {len(self._body)}\r\n\r\n{self._body}".encode()
            )
            if self._kind == "leaving":
                await asyncio.sleep(random.uniform(0, LEAVE_SECONDS))
                return 0, {}, b""
            answer = b""
            while part := await reader.read(SLOW_BYTES if self._kind == "slow" else 1 << 16):
                answer += part
                if self._kind == "slow":
                    await asyncio.sleep(SLOW_SECONDS)
        finally:
            writer.transport.abort()
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        if not first:
            raise ConnectionResetError("no answer")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers, body


def _error_code(body: bytes) -> str:
    """Return the code of an error, or of the error that ended a stream; empty if there is none."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n")]
    errors = [line for line in lines if line.startswith(b'{"error"')]
    return str(json.loads(errors[-1])["error"]["code"]) if errors else ""


async def _watch_memory(bridge: Bridge, report: Report) -> None:
    while True:
        report.memory_mb["peak"] = max(report.memory_mb.get("peak", 0.0), _memory_mb(bridge))
        await asyncio.sleep(0.2)


def _memory_mb(bridge: Bridge) -> float:
    pid = json.loads((Path(bridge.run_dir) / "gateway.json").read_text())["pid"]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99", "max"), values[0] if values else 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def show(report: Report) -> None:
    console = Console()
    console.print(
        f"{report.clients} clients and {report.prompts} queued prompts, {report.seconds:.0f} s: "
        f"answers {report.answers}, starved {report.starved}, completions {report.completions}"
    )
    table = Table("seconds to the answer", "p50", "p90", "p99", "max")
    for kind, values in sorted(report.latencies.items()):
        table.add_row(f"{len(values)} {kind} clients", *(f"{value:.1f}" for value in _percentiles(values).values()))
    console.print(table)
    console.print("gateway memory, MB: " + ", ".join(f"{when} {mb:.0f}" for when, mb in report.memory_mb.items()))


if __name__ == "__main__":
    main()
