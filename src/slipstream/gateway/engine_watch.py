"""Watches what engines return, and keeps those out of use that return wrong results, or good ones far too late.

    wrong for certain (`output_check.py`)          quarantined at once
    suspect: one token over and over               quarantined if scores say that it was not sampled from the policy
    reported by the trainer or an operator         quarantined at once
    far slower than its peers (`speed.py`)         given less work (`router.py`), and quarantined if a canary confirms it

The results of an engine that is quarantined for wrong ones are not delivered. What it was generating is generated elsewhere,
and so is what it has finished with that version and no trainer has taken. What a slow engine has finished is delivered. Both
still take part in updates, and are let back in by a probe (`quarantine.py`). Every decision is recorded, here and in the
journal."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream.errors import EngineQuarantined, SlipstreamError
from slipstream.gateway import canary_answers
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.engine_stream import EngineLink
from slipstream.gateway.output_check import fault_in, fault_in_completion, is_repetitive
from slipstream.gateway.registry import Member, Registry
from slipstream.gateway.speed import EVEN, SLOW, SpeedMeter
from slipstream.types import MAX_TOP_LOGPROBS, Decision

log = logging.getLogger(__name__)

MAX_GAP = 0.5
"""Nats per token by which the logprobs of a completion may differ from those of scoring it. Rounding in bfloat16 explains 0.05;
two tensors swapped show 0.8 (`observe/mismatch.py`)."""
MIN_CHANCE = 1e-9
"""A completion whose tokens are outside the likeliest ones with a smaller probability was not sampled from the policy."""
CLEARED = 4
"""After this many suspicions that proved wrong, an engine is not suspected again before the next version."""
JUDGES = 2
"""Engines besides its own that score a suspect completion."""
SPEED_TRIES = 4
"""How often an engine answers the canary for its speed; the quickest answer counts. A program that must be compiled, or a sync,
delays one of them."""
SPEED_SECONDS = 10.0
"""Least time between two such canaries of one engine."""
SCORE_SECONDS, PROBE_SECONDS = 30.0, 60.0
PROBE_PROMPT, PROBE_TOKENS, PROBE_SEED = tuple(range(1, 9)), 16, 7
MAX_DECISIONS = 64
"""Decisions kept for `slipstream status`."""


class _Opinion(NamedTuple):
    """What scoring says about a completion."""

    gap: float
    """Mean difference of logprobs, in nats."""
    chance: float
    """Upper bound of the probability that the policy samples such tokens."""

    @property
    def reason(self) -> str:
        if self.gap > MAX_GAP:
            return f"logprobs that differ by {self.gap:.2g} nats per token from those of scoring its tokens"
        if self.chance < MIN_CHANCE:
            return f"tokens that the policy samples with a probability of less than {self.chance:.1g}"
        return ""


class EngineWatch:
    def __init__(
        self,
        registry: Registry,
        links: Mapping[str, EngineLink],
        record: Callable[[str, str, str, int], None],
        drop: Callable[[str, int, str], None],
    ) -> None:
        """`record(kind, engine, reason, version)` stores a decision. `drop(engine, version, reason)` has all generated again
        that the engine has generated with this version or later and nobody has taken."""
        self._registry, self._links, self._record, self._drop = registry, links, record, drop
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=MAX_DECISIONS)
        self.decision_counts: Counter[str] = Counter()
        """By kind, since the gateway started."""
        self._cleared: dict[str, tuple[int, int]] = {}
        """By engine: a version, and how many suspicions proved wrong under it."""
        self._probes: set[asyncio.Task[None]] = set()

    def decisions(self, now: float) -> tuple[Decision, ...]:
        return tuple(replace(decision, seconds_ago=now - at) for at, decision in self._decisions)

    def decide(self, kind: str, engine: str, reason: str) -> None:
        """Record a decision. A `suspect` engine may be wrong, and stays in use."""
        log.warning("engine %s, %s: %s", engine, kind, reason)
        version = self._registry.version
        self.decision_counts[kind] += 1
        self._decisions.append((time.monotonic(), Decision(kind, engine, reason, version, 0.0)))
        self._record(kind, engine, reason, version)

    # --- results ---

    async def inspect(self, engine: str, results: pb.Results, sampling_of: Callable[[str], pb.Sampling | None]) -> None:
        """Raise `EngineQuarantined` if an engine's results are wrong. `sampling_of` returns the settings of a request, None if
        the engine was not given one with this id."""
        vocab_size = self._registry.get(engine).info.vocab_size
        rows: list[pb.Completion | pb.Progress] = [*results.completions, *results.progress]
        fault, since = "", self._registry.version
        for row in rows:
            sampling = sampling_of(row.request_id)
            if sampling is None:
                fault = f"an answer to {row.request_id!r:.80}, a request that it was not given"
            elif isinstance(row, pb.Completion):
                since = min((span.version for span in row.spans), default=self._registry.version)
                fault = fault_in_completion(row, vocab_size, sampling.temperature)
                if not fault and self._is_suspect(engine, row, sampling):
                    fault = await self._judge(engine, row)
            else:
                fault = fault_in(row, vocab_size, sampling.temperature)
            if fault:
                raise self.quarantine(engine, f"it returned {fault}", since)

    def inspect_scores(self, engine: str, reply: pb.ScoreReply) -> None:
        """Raise `EngineQuarantined` if an engine's scores are wrong. A token that the model excludes has a logprob of -inf."""
        if any(math.isnan(sum(score.logprobs)) for score in reply.scores):
            raise self.quarantine(engine, "it returned scores that are not numbers")

    def quarantine(
        self, engine: str, reason: str, since: int | None = None, needs_weights: bool = False
    ) -> EngineQuarantined:
        """Stop using an engine; return the error for requests that it was serving. What it has generated with version `since`
        or later is generated again. With `needs_weights` it is not probed before it has new weights."""
        error = _refusal(engine, reason)
        if self._registry.start_quarantine(engine, time.monotonic(), reason, needs_weights):
            self.decide("quarantine", engine, reason)
            self._links[engine].interrupt(error)
        self._drop(engine, self._registry.version if since is None else since, reason)
        return error

    # --- suspicion ---

    def _is_suspect(self, engine: str, row: pb.Completion, sampling: pb.Sampling) -> bool:
        version, num_cleared = self._cleared.get(engine, (-1, 0))
        if version == self._registry.version and num_cleared >= CLEARED:
            return False
        # Other settings make the policy's own probabilities meaningless.
        is_plain = sampling.temperature <= 1 and not (
            sampling.bias_token_ids
            or sampling.min_tokens
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1)
        )
        return is_plain and is_repetitive(row.token_ids[:])

    async def _judge(self, engine: str, row: pb.Completion) -> str:
        """Return why a suspect completion is wrong; empty if it is not, or nobody can tell."""
        own = await self._opinion(engine, row)
        if own is not None and own.reason:
            return own.reason
        others = [opinion for judge in self._judges(engine) if (opinion := await self._opinion(judge, row)) is not None]
        against = [opinion.reason for opinion in others if opinion.reason]
        if against and len(against) == len(others) >= JUDGES:
            return against[0]
        if against:  # one against one: either may be wrong
            self.decide("suspect", engine, f"another engine disagrees with it: {against[0]}")
        version, count = self._cleared.get(engine, (-1, 0))
        self._cleared[engine] = (self._registry.version, count + 1 if version == self._registry.version else 1)
        return ""

    def _judges(self, engine: str) -> Sequence[str]:
        """Return the least loaded engines that can give an opinion on another's results."""
        names = [m.info.name for m in self._registry.answering() if m.info.name != engine]
        return sorted(names, key=lambda name: self._links[name].load)[:JUDGES]

    async def _opinion(self, judge: str, row: pb.Completion) -> _Opinion | None:
        """Compare a completion with an engine's scores of its tokens; None if that says nothing about it."""
        ids, claimed = [*row.prompt_token_ids, *row.token_ids], row.raw_logprobs[:]
        versions = {span.version for span in row.spans}
        if not claimed or not row.prompt_token_ids:
            return None
        sequences = [pb.TokenIds(ids=ids)]
        request = pb.ScoreRequest(sequences=sequences, top_k=MAX_TOP_LOGPROBS, adapter=row.adapter)
        try:
            answer = await self._links[judge].ask(pb.ToEngine(score=request), SCORE_SECONDS, "score")
        except SlipstreamError as error:  # some engines cannot score
            log.info("engine %s has no opinion: %s", judge, error)
            return None
        if len(answer.scores.scores) != 1 or versions != {answer.scores.scores[0].version}:
            return None
        (score,) = answer.scores.scores
        scored, width = score.logprobs[-len(claimed) :], score.top_logprobs.width
        if len(score.logprobs) != len(ids) - 1 or not all(map(math.isfinite, scored)):
            return None
        gap = sum(abs(a - b) for a, b in zip(claimed, scored)) / len(claimed)
        likeliest, values = score.top_logprobs.token_ids[:], score.top_logprobs.logprobs[:]
        log_chance = 0.0
        for index, token in enumerate(row.token_ids, len(score.logprobs) - len(claimed)):
            top = slice(index * width, (index + 1) * width)
            if width and token not in likeliest[top]:
                log_chance += math.log(max(1e-12, 1 - math.fsum(map(math.exp, values[top]))))
        return _Opinion(gap, math.exp(log_chance))

    # --- probes ---

    def start_probes(self) -> None:
        """Probe the quarantined engines that are due."""
        for member in self._registry.alive():
            can_answer = member.info.version == self._registry.version and not (member.asleep or member.is_paused)
            if can_answer and member.quarantine.wants_probe(time.monotonic()):
                member.quarantine.probe_sent()
                self._start(self._probe(member))

    async def _probe(self, member: Member) -> None:
        name, quarantine, speed = member.info.name, member.quarantine, 1.0
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                fault = await self._probe_fault(name)
            if quarantine.is_slow and fault == "":
                speed = await self._relative_speed(name)
        except TimeoutError:
            fault = f"it did not answer a probe within {PROBE_SECONDS:g} s"
        except SlipstreamError as error:
            fault = f"it failed a probe: {error}"
        finally:
            quarantine.probe_ended()
        if fault is None or member.lost or self._registry.get(name) is not member:
            return
        if fault:
            quarantine.failed(time.monotonic(), fault)
            self.decide("probe", name, fault)
        elif speed < EVEN:
            reason = _slow(speed)
            quarantine.failed(time.monotonic(), reason, is_slow=True)
            self.decide("probe", name, reason)
        else:
            kind = "not slow" if quarantine.is_slow else "release"
            self.decide(kind, name, f"it passed a probe. It was quarantined: {quarantine.reason}")
            quarantine.passed(time.monotonic())
            member.speed = SpeedMeter()

    async def _probe_fault(self, engine: str) -> str | None:
        """Have an engine generate a few tokens, and others score them. Return what is wrong with them; None if a sync came in
        between, and nobody can tell."""
        row = await self._probe_answer(engine)
        if fault := fault_in_completion(row, self._registry.get(engine).info.vocab_size):
            return f"it answered a probe with {fault}"
        for judge in (engine, *self._judges(engine)):
            opinion = await self._opinion(judge, row)
            if opinion is not None and opinion.reason:
                return f"it answered a probe with {opinion.reason} (scored by {judge!r})"
        return await self._compared(engine)

    async def _compared(self, engine: str) -> str | None:
        """Return how an engine's answers to the canary differ from those of others; empty if they do not. What it was
        quarantined for may show there and not in its probe."""
        version = self._registry.version
        members = [self._registry.get(name) for name in (engine, *self._judges(engine))]
        if len(members) < 2 or not all(member.info.vocab_size for member in members):
            return ""
        verdict = await canary_answers.compare(members, self._links, version)
        if verdict is None:
            return "" if self._registry.version == version else None
        return verdict.wrong.get(engine) or verdict.disputed.get(engine, "")

    async def _probe_answer(self, engine: str) -> pb.Completion:
        """Have an engine generate a few tokens."""
        info = self._registry.get(engine).info
        limit = info.vocab_size - 1 if info.vocab_size else max(PROBE_PROMPT)
        request = pb.GenerateRequest(
            sampling=[pb.Sampling(max_tokens=PROBE_TOKENS, temperature=1, top_p=1, n=1, ignore_eos=True)],
            requests=[pb.Request(id="probe", seed=PROBE_SEED)],
        )
        request.requests[0].tokens.ids.extend(min(token, limit) for token in PROBE_PROMPT)
        return await self._links[engine].completion(request)

    # --- speed ---

    def measure(self, engine: str, now: float, work: float, seconds: float, answers: int) -> None:
        """Count answers of an engine. One that seems far slower than the others is compared with one of them."""
        member = self._registry.get(engine)
        member.speed.add(now, work, seconds, answers)
        is_due = now - member.speed_checked_at >= SPEED_SECONDS and not member.quarantine.reason
        if is_due and self._registry.speeds(now).get(engine, 1.0) < SLOW:
            member.speed_checked_at = now
            self._start(self._check_speed(member))

    async def _check_speed(self, member: Member) -> None:
        """Quarantine an engine if it is as slow as it seems: its requests may be longer, or need programs that it compiles."""
        name = member.info.name
        speed = await self._relative_speed(name)
        if member.lost or self._registry.get(name) is not member or member.quarantine.reason:
            return
        if speed >= SLOW:
            log.info("engine %s seemed slow, and answers a canary with %.0f %% of a peer's speed", name, 100 * speed)
            member.speed = SpeedMeter()
            return
        reason = _slow(speed)
        member.quarantine.start(time.monotonic(), reason, is_slow=True)
        self.decide("slow", name, reason)
        self._links[name].interrupt(_refusal(name, reason))

    async def _relative_speed(self, engine: str) -> float:
        """Return how fast an engine answers the same few tokens as a peer, relative to it; 1 if there is no peer."""
        peers = [m for m in self._registry.answering() if m.info.name != engine]
        rates = {m.info.name: m.speed.rate(time.monotonic()) or 0.0 for m in peers}
        if not rates:
            return 1.0
        peer = sorted(rates, key=rates.__getitem__)[len(rates) // 2]
        own, others = await asyncio.gather(self._answer_seconds(engine), self._answer_seconds(peer))
        return 1.0 if others is None else 0.0 if own is None else others / own

    async def _answer_seconds(self, engine: str) -> float | None:
        """Return how long an engine takes for a few tokens, the best of several times; None if it does not answer."""
        times = []
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                for _ in range(SPEED_TRIES):
                    start = time.monotonic()
                    await self._probe_answer(engine)
                    times.append(time.monotonic() - start)
        except (SlipstreamError, TimeoutError) as error:
            log.info("engine %s did not answer a canary for its speed: %s", engine, error)
        return min(times, default=None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def close(self) -> None:
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)


def _refusal(engine: str, reason: str) -> EngineQuarantined:
    return EngineQuarantined(f"engine {engine!r} is quarantined: {reason}")


def _slow(speed: float) -> str:
    return f"it answers a canary with {speed:.0%} of the speed of its peers"
