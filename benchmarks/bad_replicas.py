"""Engines that lie: how soon is each quarantined, do its samples reach the trainer, and is a healthy fleet left alone?

    python benchmarks/bad_replicas.py [--requests 10000] [--json benchmarks/results/bad_replicas.json]

Three embedded engines with the demo's model serve a training loop without training: prompts with a common beginning go in,
groups are taken, other weights are synced. From step 4 on one engine lies in one of six ways. The exit code is 1 unless each is
quarantined within 64 of its requests, no bad sample is taken after that, and the healthy fleet raises no alarm."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, GatewayConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.gateway.engine_stream import serve_engine
from slipstream.gateway.server import running
from slipstream.model.checkpoints.sample_model import sample_config, sample_params
from slipstream.runtime import event_loop
from slipstream.types import Completion, Request, SamplingParams, VersionSpan

MAX_REQUESTS = 64
"""An engine that lies must be quarantined within this many requests."""
TOKEN, ENGINES, LIAR = "benchmark-token", ("a", "b", "c"), "b"
BATCH, SOUND_STEPS, STEPS, STEPS_AFTER = 24, 3, 40, 3
CONFIG = sample_config()
OPTIONS = EmbeddedConfig(max_num_seqs=8, kv_cache_tokens=8192, block_size=8)
CHANGE = 0.5
"""Each version differs from the one before by this share of its weights' standard deviation."""
ALARMS = ("suspect", "quarantine", "probe", "slow")


def policy(version: int) -> Any:
    """The weights of a version. The head is scaled, so that the policy is as peaked as a trained one."""
    mixed = [sample_params(CONFIG, seed) for seed in (0, 100 + version)]
    params = jax.tree.map(lambda a, b: a * (1 - CHANGE) + b * CHANGE, *mixed)
    params["lm_head"]["weight"] *= 12
    return params


# --- engines that lie ---


class Sound(EmbeddedEngine):
    is_bad = False
    num_served = 0
    """Requests since it has been bad."""

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[list[Any], None]:
        if self.is_bad and requests[0].id not in ("canary", "probe"):
            self.num_served += len(requests)
        async with contextlib.aclosing(self.answers(requests)) as batches:
            async for batch in batches:
                yield batch

    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[list[Any], None]:
        async for batch in super().generate(requests):
            yield [self.lie(row) if self.is_bad and isinstance(row, Completion) else row for row in batch]

    def lie(self, row: Completion) -> Completion:
        return row

    def turn_bad(self) -> None:
        self.is_bad = True


class NanLogprobs(Sound):
    def lie(self, row: Completion) -> Completion:
        return replace(row, logprobs=(math.nan,) * len(row.logprobs))


class ZeroTokens(Sound):
    def lie(self, row: Completion) -> Completion:
        size = len(row.token_ids)
        return replace(row, token_ids=(0,) * size, logprobs=(-1.0,) * size, raw_logprobs=(-1.0,) * size)


class OutOfVocabulary(Sound):
    def lie(self, row: Completion) -> Completion:
        return replace(row, token_ids=(*row.token_ids[:-1], CONFIG.vocab_size + 5))


class WrongWeights(Sound):
    """Receives, verifies and commits every version, and computes with other weights."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self._other = EmbeddedEngine(CONFIG, policy(1000), name=self.describe().name, options=OPTIONS)

    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[list[Any], None]:
        if not self.is_bad:
            async for batch in super().answers(requests):
                yield batch
            return
        version = self.describe().version
        async for batch in self._other.generate(requests):
            yield [
                replace(row, spans=(VersionSpan(version, 0, len(row.token_ids)),))
                if isinstance(row, Completion)
                else row
                for row in batch
            ]

    async def close(self) -> None:
        await super().close()
        if self.is_bad:
            await self._other.close()


class TenTimesSlower(Sound):
    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[list[Any], None]:
        start = time.monotonic()
        async for batch in super().answers(requests):
            if self.is_bad:
                await asyncio.sleep(9 * (time.monotonic() - start))
                start = time.monotonic()
            yield batch


class StaleKeysAndValues(Sound):
    """Keeps its prefix cache over a commit."""

    def turn_bad(self) -> None:
        super().turn_bad()
        self._compute._scheduler.clear_cache = lambda: None  # type: ignore[method-assign]


LIES: dict[str, tuple[type[Sound], Callable[[Completion], bool]]] = {
    "NaN logprobs": (NanLogprobs, lambda row: not all(map(math.isfinite, row.logprobs))),
    "zero tokens": (ZeroTokens, lambda row: not any(row.token_ids)),
    "out of vocabulary": (OutOfVocabulary, lambda row: max(row.token_ids) >= CONFIG.vocab_size),
    "wrong weights": (WrongWeights, lambda row: True),
    "10 x slower": (TenTimesSlower, lambda row: False),
    "stale keys and values": (StaleKeysAndValues, lambda row: True),
}
"""By lie: the engine, and whether one of its samples is bad."""


# --- the loop ---


@contextlib.contextmanager
def fleet(kind: type[Sound] = Sound) -> Iterator[tuple[Bridge, Sound]]:
    """A gateway and three engines in this process, over gRPC, of which one is of this kind."""
    stack = contextlib.AsyncExitStack()

    async def start() -> tuple[str, Sound]:
        address = await stack.enter_async_context(running(GatewayConfig(), TOKEN))
        engines = {
            name: (kind if name == LIAR else Sound)(CONFIG, None, name=name, options=OPTIONS) for name in ENGINES
        }
        for engine in engines.values():
            stack.push_async_callback(engine.close)
            registered = asyncio.Event()
            task = asyncio.create_task(serve_engine(engine, address, TOKEN, 5.0, 1 << 24, registered.set))
            stack.callback(task.cancel)
            await registered.wait()
        return address, engines[LIAR]

    address, liar = event_loop.run(start())
    try:
        with slipstream.connect(address, token=TOKEN) as bridge:
            yield bridge, liar
    finally:
        event_loop.run(stack.aclose())


def prompts(step: int, rng: random.Random) -> tuple[list[str], list[tuple[int, ...]]]:
    """Prompts with a common beginning, as a system prompt is."""
    tokens = [
        (*range(4, 28), *(rng.randrange(4, CONFIG.vocab_size) for _ in range(rng.randrange(4, 12))))
        for _ in range(BATCH)
    ]
    return [f"{step}/{i}" for i in range(BATCH)], tokens


@dataclass
class Outcome:
    lie: str
    requests_until_quarantine: int | None = None
    seconds_until_quarantine: float = 0.0
    reason: str = ""
    bad_taken_before: int = 0
    bad_taken_after: int = 0
    decisions: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        requests = self.requests_until_quarantine
        return requests is not None and requests <= MAX_REQUESTS and not self.bad_taken_after


def unmask(lie: str) -> Outcome:
    """Run the loop with an engine that turns bad."""
    kind, is_bad = LIES[lie]
    rng, outcome, sampling = random.Random(7), Outcome(lie), SamplingParams(max_tokens=16, ignore_eos=True)
    with fleet(kind) as (bridge, liar):
        bridge.sync(policy(0))
        rollouts = bridge.rollouts(max_staleness=1, batch=BATCH)
        turned_at, steps_left, step = 0.0, STEPS, 0
        while steps_left:
            step, steps_left = step + 1, steps_left - 1
            rollouts.submit(*prompts(step, rng), sampling)
            taken = [row for group in rollouts.take() for row in group.completions]
            bad = sum(row.engine == LIAR and step > SOUND_STEPS and is_bad(row) for row in taken)
            decisions = bridge.status().decisions
            found = [d for d in decisions if d.engine == LIAR and d.kind in ("quarantine", "slow")]
            if outcome.requests_until_quarantine is not None:
                outcome.bad_taken_after += bad
            else:
                outcome.bad_taken_before += bad
            if found and outcome.requests_until_quarantine is None:
                outcome.requests_until_quarantine, outcome.reason = liar.num_served, found[0].reason
                outcome.seconds_until_quarantine = time.monotonic() - found[0].seconds_ago - turned_at
                steps_left = STEPS_AFTER
            if step == SOUND_STEPS:
                liar.turn_bad()
                turned_at = time.monotonic()
            bridge.sync(policy(step))
        outcome.decisions = [f"{d.engine}, {d.kind}: {d.reason}" for d in bridge.status().decisions]
    return outcome


def healthy(num_requests: int) -> list[str]:
    """Send requests of all lengths to a sound fleet, with syncs in between; return the alarms."""
    rng, done, version = random.Random(8), 0, 0
    with fleet() as (bridge, _):
        while done < num_requests:
            bridge.sync(policy(version))
            version += 1
            for _ in range(4):
                count = min(rng.choice((1, 8, 24, 96)), num_requests - done)
                tokens = [
                    tuple(rng.randrange(4, CONFIG.vocab_size) for _ in range(rng.randrange(2, 60)))
                    for _ in range(count)
                ]
                sampling = [
                    SamplingParams(rng.choice((1, 4, 16, 48)), temperature=rng.choice((0.0, 0.7, 1.0)))
                    for _ in range(count)
                ]
                if count:
                    bridge.generate(tokens, sampling)
                done += count
        return [f"{d.engine}, {d.kind}: {d.reason}" for d in bridge.status().decisions if d.kind in ALARMS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests to the healthy fleet")
    parser.add_argument("--lies", nargs="*", default=list(LIES), choices=[*LIES, []], metavar="LIE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, outcomes = Console(), []
    for lie in arguments.lies:
        outcomes.append(unmask(lie))
        console.print(f"{lie}: {asdict(outcomes[-1])}", markup=False, highlight=False)
    start = time.monotonic()
    alarms = healthy(arguments.requests)
    seconds = time.monotonic() - start
    table = Table("lie", "requests until quarantine", "seconds", "bad samples taken before", "after", "reason")
    for o in outcomes:
        row = (o.requests_until_quarantine, f"{o.seconds_until_quarantine:.2f}", o.bad_taken_before, o.bad_taken_after)
        table.add_row(o.lie, *map(str, row), o.reason)
    console.print(table)
    console.print(f"healthy fleet: {len(alarms)} alarms in {arguments.requests} requests, {seconds:.0f} s", *alarms)
    if arguments.json is not None:
        facts = {
            "command": "python benchmarks/bad_replicas.py",
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()},
            "lies": [asdict(o) for o in outcomes],
            "healthy": {"requests": arguments.requests, "alarms": alarms, "seconds": round(seconds, 1)},
        }
        arguments.json.write_text(json.dumps(facts, indent=2, default=lambda x: np.asarray(x).tolist()) + "\n")
    return 0 if all(o.is_good for o in outcomes) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
