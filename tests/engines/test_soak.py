"""Many requests (SLIPSTREAM_SOAK, 400) to one engine that is short of pages, while callers disconnect, the engine pauses and weights change.
The script is drawn from a seed; results are compared with those of an undisturbed engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from slipstream.bridge.in_process import LocalFleet
from slipstream.types import Completion, Failure, InFlight, Request, Score
from slipstream.weights.update.publisher import Publisher
from tests.conformance.engines import Subject, other_params, request
from tests.engines.subjects import assert_nothing_leaked, opened, stats

NUM_REQUESTS, NUM_PAGES, MAX_CALLS = int(os.environ.get("SLIPSTREAM_SOAK", "400")), 20, 24
POLICIES: tuple[InFlight, ...] = ("keep", "finish", "recompute", "requeue")


def kinds() -> list[Request]:
    """The kinds of requests."""
    rng = np.random.default_rng(1)
    found = []
    for index in range(40):
        prompt = (7, 8, 9, 10, 11, 12)[: rng.integers(0, 7)] + tuple(rng.integers(5, 90, rng.integers(1, 16)).tolist())
        found.append(
            request(
                str(index),
                prompt,
                n=int(rng.choice([1, 1, 1, 3])),
                seed=index,
                temperature=float(rng.choice([0, 0.7, 1])),
                max_tokens=int(rng.choice([1, 4, 8, 30])),
                **({"frequency_penalty": 0.3} if index % 13 == 0 else {}),
            )
        )
    return found


KINDS = kinds()
SEQUENCES = [(*one.prompt, 20, 21, 22) for one in KINDS[:12] if isinstance(one.prompt, tuple)]


class Expected:
    """Results of an undisturbed engine under either weights: version `v` has weights `v % 2`."""

    def __init__(self, weights: list[Any]) -> None:
        self.completions: list[dict[tuple[str, int], Completion]] = []
        self.scores: list[list[Score]] = []
        for params in weights:
            with opened(params=params) as subject:
                outcomes = [o for o in subject.generate(*KINDS) if isinstance(o, Completion)]
                self.completions.append({(o.request_id, o.sample_index): o for o in outcomes})
                self.scores.append(subject.score(*SEQUENCES))

    def check(self, found: Completion, commits: dict[int, InFlight], oldest: int, newest: int) -> None:
        """Its spans are consistent, and the tokens of its first version are the expected ones."""
        spans = found.spans
        assert (spans[0].start, spans[-1].stop) == (0, len(found.token_ids))
        assert all(a.stop == b.start and a.version < b.version for a, b in pairwise(spans))
        assert oldest <= spans[0].version and spans[-1].version <= newest
        for span in spans[1:]:
            passed = range(spans[0].version + 1, span.version + 1)
            assert all(commits[version] in ("keep", "recompute") for version in passed)
        expected, stop = self.completions[spans[0].version % 2][found.request_id, found.sample_index], spans[0].stop
        assert found.token_ids[:stop] == expected.token_ids[:stop]
        assert found.logprobs[:stop] == expected.logprobs[:stop]
        assert len(spans) > 1 or found.token_ids == expected.token_ids

    def check_score(self, found: Score, index: int) -> None:
        assert found.logprobs == self.scores[found.version % 2][index].logprobs


class Soak:
    def __init__(self, subject: Subject, weights: list[Any], expected: Expected) -> None:
        self.subject, self.weights, self.expected = subject, weights, expected
        self.publisher = Publisher(LocalFleet(subject.engine))
        self.rng = np.random.default_rng(0)
        self.commits: dict[int, InFlight] = {}
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        calls: set[asyncio.Task[None]] = set()
        num_sent, paused = 0, False
        while num_sent < NUM_REQUESTS:
            action = self.rng.choice(["call", "score", "pause", "commit"], p=[0.76, 0.08, 0.08, 0.08])
            if action == "call":
                batch = [KINDS[i] for i in self.rng.choice(len(KINDS), self.rng.integers(1, 8), replace=False)]
                num_sent += len(batch)
                leave = str(self.rng.choice(["stay", "after the first", "at once"], p=[0.8, 0.1, 0.1]))
                calls.add(asyncio.create_task(self.call(batch, leave)))
            elif action == "score":
                calls.add(asyncio.create_task(self.score(self.rng.choice(len(SEQUENCES), 3, replace=False).tolist())))
            elif action == "pause":
                await (self.subject.engine.resume() if paused else self.subject.engine.pause())
                paused = not paused
            else:
                policy = POLICIES[len(self.commits) % 4]
                if paused and policy == "finish":  # would be rejected
                    await self.subject.engine.resume()
                    paused = False
                await self.commit(policy)
            if len(calls) >= MAX_CALLS and paused:
                await self.subject.engine.resume()
                paused = False
            while len(calls) >= MAX_CALLS:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    call.result()
            self.counts[str(action)] += 1
        await self.subject.engine.resume()
        await asyncio.gather(*calls)
        self.publisher.close()

    async def call(self, batch: list[Request], leave: str) -> None:
        """Every sample is delivered once, unless the call is closed before."""
        oldest = self.subject.engine.describe().version
        seen: Counter[tuple[str, int]] = Counter()
        batches = self.subject.engine.generate(batch)
        if leave == "at once":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(batches), 0.002 * self.rng.random())
            await batches.aclose()
            self.counts["left"] += 1
            return
        async for outcomes in batches:
            newest = self.subject.engine.describe().version
            for outcome in outcomes:
                assert isinstance(outcome, Completion), outcome
                self.expected.check(outcome, self.commits, oldest, newest)
                seen[outcome.request_id, outcome.sample_index] += 1
                self.counts["mixed" if len(outcome.spans) > 1 else "of one version"] += 1
            if leave == "after the first":
                self.counts["left"] += 1
                break
        await batches.aclose()
        wanted = {(one.id, index) for one in batch for index in range(one.sampling.n)}
        assert set(seen.values()) == {1}
        assert seen.keys() == wanted if leave == "stay" else seen.keys() <= wanted

    async def score(self, indices: list[int]) -> None:
        for index, score in zip(indices, await self.subject.engine.score([SEQUENCES[i] for i in indices]), strict=True):
            self.expected.check_score(score, index)

    async def commit(self, policy: InFlight) -> None:
        info = self.subject.engine.describe()
        version = info.version + 1
        self.commits[version] = policy
        await self.publisher.publish(self.weights[version % 2], (info,), version, policy)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with opened(num_pages=NUM_PAGES) as subject:
        yield subject


def test_many_requests(subject: Subject) -> None:
    weights = [subject.params, other_params(subject)]
    soak = Soak(subject, weights, Expected(weights))
    subject.runner.run(soak.run())
    assert_nothing_leaked(subject, NUM_PAGES)
    counted = stats(subject)
    assert counted["preemptions"] > 0 and counted["hit_tokens"] > 0 and counted["evicted_pages"] > 0
    rare = {name for name in ("mixed", "of one version", "left", "score", "pause", "commit") if soak.counts[name] < 5}
    assert not rare, f"the run did not exercise {rare}: {soak.counts}"
    assert set(soak.commits.values()) == set(POLICIES)
    for found in subject.generate(*KINDS[:4]):  # and it still serves
        assert not isinstance(found, Failure)
        soak.expected.check(found, soak.commits, *[subject.engine.describe().version] * 2)
