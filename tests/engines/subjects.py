"""Embedded engines for tests. Most tests share one model and one shape, so that programs are compiled once. Removing
pages gives a smaller page pool without compilation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig, SyncOptions
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.scheduling.scheduler import Scheduler
from slipstream.engines.embedded.scheduling.steps_per_tick import StepsPerTick
from slipstream.model.config import ModelConfig
from slipstream.types import Completion, Failure, InFlight, Request
from slipstream.weights.update.publisher import Publisher
from tests.conformance.engines import Subject, update_of
from tests.tiny import random_params, tiny_config

CONFIG = tiny_config(num_layers=1)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 64,
    "block_size": 4,
    "kv_cache_tokens": 512,
    "max_num_batched_tokens": 16,
}


def subject_of(
    config: ModelConfig = CONFIG, params: Any = None, num_pages: int | None = None, **options: Any
) -> Subject:
    """`options` other than fields of `EmbeddedConfig`: `tokenizer`, `draft`, `draft_params`."""
    params = random_params(config) if params is None else params
    extra = {name: options.pop(name) for name in ("tokenizer", "draft", "draft_params") if name in options}
    engine = EmbeddedEngine(config, params, options=EmbeddedConfig(**(OPTIONS | options)), **extra)
    subject = Subject(engine, config, params)
    if num_pages is not None:
        pool = scheduler_of(subject).pool
        pool.take(pool.num_free - num_pages)
    return subject


@contextlib.contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Subject]:
    subject = subject_of(*args, **options)
    yield subject
    close(subject)


def close(subject: Subject) -> None:
    subject.runner.run(subject.engine.close())
    subject.runner.close()


def scheduler_of(subject: Subject) -> Scheduler:
    scheduler: Scheduler = subject.engine._compute._scheduler  # type: ignore[attr-defined]
    return scheduler


def stats(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = subject.engine.stats()  # type: ignore[attr-defined]
    return found


def assert_nothing_leaked(subject: Subject, num_pages: int | None = None) -> None:
    scheduler = scheduler_of(subject)
    assert not scheduler.live and not scheduler.waiting
    assert scheduler.tree is not None
    held = 0 if num_pages is None else scheduler.pool.num_pages - num_pages
    assert scheduler.pool.num_free + scheduler.tree.num_pages + held == scheduler.pool.num_pages


async def collect(subject: Subject, *requests: Request) -> list[Completion | Failure]:
    return [outcome async for batch in subject.engine.generate(requests) for outcome in batch]


async def publish(
    subject: Subject, params: Any, in_flight: InFlight = "keep", options: SyncOptions | None = None, **more: Any
) -> int:
    info = subject.engine.describe()
    publisher = Publisher(LocalFleet(subject.engine), options)
    report = await publisher.publish(params, (info,), info.version + 1, in_flight, **more)
    publisher.close()
    return report.version


async def stage(subject: Subject, params: Any) -> int:
    """Stage the next version, ready to commit."""
    info = subject.engine.describe()
    version = info.version + 1
    update = update_of(info, params, version)
    await subject.engine.stage(version, update.send(await subject.engine.begin(version, update.offer)))
    return version


class _OneStep(StepsPerTick):
    """One step per tick, so that page allocation does not depend on the machine's speed."""

    def steps(self, rows: int, most: int) -> int:
        return 1


class Hold:
    """Limit the engine to one token per tick and hold it before tick number `tick` until released. Commands sent meanwhile run
    right after that tick."""

    def __init__(self, subject: Subject, tick: int) -> None:
        self._held, self._go_on = threading.Event(), threading.Event()
        compute = subject.engine._compute  # type: ignore[attr-defined]
        compute._steps_per_tick = _OneStep(compute._steps_per_tick.sizes)
        executor = compute._executor
        dispatch, count = executor.dispatch, 0

        def held_dispatch(policy: Any, plan: Any) -> Any:
            nonlocal count
            count += 1
            if count == tick:
                self._held.set()
                assert self._go_on.wait(60), "the test never let go"
            return dispatch(policy, plan)

        executor.dispatch = held_dispatch

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._held.wait, 60)

    async def release(self) -> None:
        """Release the engine once earlier commands are in the compute thread's queue."""
        await asyncio.sleep(0.01)
        self._go_on.set()
