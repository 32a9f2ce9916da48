"""Conformance suite for engines. A test module imports these functions and provides the fixture `subject`:

    from tests.conformance.engines import *  # noqa: F403

    @pytest.fixture(scope="module")
    def subject(...) -> Iterator[Subject]: ...

The reference is our own decoder with the same weights, token by token and without a KV cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.bridge.in_process import LocalFleet
from slipstream.engines.contract import EngineBackend
from slipstream.errors import (
    ChecksumMismatch,
    InvalidPrompt,
    InvalidSampling,
    NotReady,
    UnknownVersion,
    Unsupported,
    UpdateInProgress,
    VersionError,
)
from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder
from slipstream.types import (
    CommitReport,
    Completion,
    EngineInfo,
    Failure,
    Progress,
    Request,
    SamplingParams,
    Score,
    VerifyReport,
    VersionSpan,
)
from slipstream.weights.transports.device import DEVICE_TRANSPORTS
from slipstream.weights.update.publisher import Publisher
from tests.weights.by_hand import HandUpdate

_logits = jax.jit(decoder.forward, static_argnums=1)


@dataclass
class Subject:
    """An engine, its initial weights, and the event loop on which it is called."""

    engine: EngineBackend
    config: ModelConfig
    params: Any
    tolerance: float = 1e-5
    """Tolerance of logprobs against the reference."""
    bounded: tuple[str, ...] = ()
    """Sampling parameters that the engine supports for small values only."""
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def generate(self, *requests: Request) -> list[Completion | Failure | Progress]:
        return self.runner.run(collect(self.engine, *requests))

    def complete(self, prompt: Sequence[int], **sampling: Any) -> Completion:
        (outcome,) = self.generate(request("only", prompt, **sampling))
        assert isinstance(outcome, Completion), outcome
        return outcome

    def score(self, *sequences: Sequence[int]) -> list[Score]:
        return self.runner.run(self.engine.score(sequences))

    def publish(self, params: Any) -> int:
        """Update to the next version, including the commit."""
        info = self.engine.describe()
        publisher = Publisher(LocalFleet(self.engine))
        report = self.runner.run(publisher.publish(params, (info,), info.version + 1, "keep"))
        publisher.close()
        return report.version

    def logits(self, tokens: Sequence[int], params: Any = None) -> np.ndarray:
        """Reference logits of the successor of each token, `[tokens, vocab]`."""
        # Padded to one length, so that it is compiled once. Causal attention ignores the padding.
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = _logits(self.params if params is None else params, self.config, padded)
        return np.asarray(logits)[0, : len(tokens)]

    def logprobs(self, tokens: Sequence[int], params: Any = None) -> np.ndarray:
        return log_softmax(self.logits(tokens, params))

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Eight prompts of different lengths, free of end-of-sequence tokens."""
        rng = np.random.default_rng(5)
        return [tuple(rng.integers(8, self.config.vocab_size, n).tolist()) for n in (1, 2, 3, 5, 8, 9, 12, 4)]


async def collect(engine: EngineBackend, *requests: Request) -> list[Completion | Failure | Progress]:
    return [outcome async for batch in engine.generate(requests) for outcome in batch]


def request(name: str, prompt: Sequence[int] | str, **sampling: Any) -> Request:
    ids = prompt if isinstance(prompt, str) else tuple(prompt)
    return Request(name, ids, SamplingParams(**({"max_tokens": 8, "seed": 1, "ignore_eos": True} | sampling)))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def update_of(info: EngineInfo, params: Any, version: int) -> HandUpdate:
    through_host = next(t for t in info.transports if t not in DEVICE_TRANSPORTS)
    return HandUpdate(params, info.tensors, info.parameters, info.dtype, version, through_host)


def other_params(subject: Subject) -> Any:
    """Weights that generate other tokens."""
    rng = np.random.default_rng(11)
    return jax.tree.map(
        lambda p: jnp.asarray(np.asarray(p) + 0.1 * rng.standard_normal(p.shape), p.dtype), subject.params
    )


def greedy_reference(subject: Subject, prompt: Sequence[int], count: int, params: Any = None) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(subject.logprobs(tokens, params)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def assert_logprobs(subject: Subject, completion: Completion, temperature: float = 1.0) -> None:
    tokens = completion.prompt_token_ids + completion.token_ids
    rows = subject.logprobs(tokens)[len(completion.prompt_token_ids) - 1 : -1]
    scaled = log_softmax(rows / temperature)
    index = (np.arange(len(completion.token_ids)), completion.token_ids)
    np.testing.assert_allclose(completion.raw_logprobs, rows[index], atol=subject.tolerance)
    np.testing.assert_allclose(completion.logprobs, scaled[index], atol=subject.tolerance)


# --- description ---


def test_description_fits_the_model(subject: Subject) -> None:
    info = subject.engine.describe()
    assert info.model == subject.config.fingerprint()
    assert {t.name: t.shape for t in info.tensors} == {
        name: leaf.shape for name, leaf in hf_weights.flatten(subject.params).items()
    }
    assert {p.rank for p in info.parameters} == set(range(info.num_ranks))
    assert info.version >= 0


# --- generating ---


def test_greedy_is_the_argmax_of_the_reference(subject: Subject) -> None:
    outcomes = subject.generate(*(request(str(i), p, temperature=0) for i, p in enumerate(subject.prompts)))
    found = {o.request_id: o for o in outcomes if isinstance(o, Completion)}
    for i, prompt in enumerate(subject.prompts):
        assert found[str(i)].token_ids == greedy_reference(subject, prompt, 8)
        assert found[str(i)].prompt_token_ids == prompt
        assert_logprobs(subject, found[str(i)])
        assert found[str(i)].logprobs == found[str(i)].raw_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_reference(subject: Subject, temperature: float) -> None:
    outcomes = subject.generate(*(request(str(i), p, temperature=temperature) for i, p in enumerate(subject.prompts)))
    assert len(outcomes) == len(subject.prompts)
    for outcome in outcomes:
        assert isinstance(outcome, Completion)
        assert_logprobs(subject, outcome, temperature)


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 10, "top_p": 0.5}])
def test_truncation_keeps_the_likeliest_and_renormalizes(subject: Subject, truncation: dict[str, Any]) -> None:
    assert_truncated(subject, truncation)


def assert_truncated(subject: Subject, truncation: dict[str, Any]) -> None:
    for completion in subject.generate(request("r", subject.prompts[3], n=6, temperature=0.9, **truncation)):
        assert isinstance(completion, Completion)
        tokens = completion.prompt_token_ids + completion.token_ids
        rows = subject.logprobs(tokens)[len(completion.prompt_token_ids) - 1 : -1]
        for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            kept = naive_truncation(np.exp(row / 0.9) / np.exp(row / 0.9).sum(), **truncation)
            assert logprob == pytest.approx(np.log(kept[token]), abs=subject.tolerance)


def naive_truncation(probabilities: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution after top-k and top-p, one token at a time."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[: top_k or None]
    total = sum(probabilities[i] for i in order)
    kept: list[int] = []
    for i in order:
        if top_p < 1 and sum(probabilities[j] for j in kept) / total >= top_p:
            break
        kept.append(i)
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_one_seed_gives_one_set_of_samples(subject: Subject) -> None:
    def draw(seed: int) -> list[tuple[int, ...]]:
        outcomes = subject.generate(request("r", subject.prompts[4], n=4, seed=seed))
        completions = [o for o in outcomes if isinstance(o, Completion)]
        assert sorted(c.sample_index for c in completions) == [0, 1, 2, 3]
        return [c.token_ids for c in sorted(completions, key=lambda c: c.sample_index)]

    first = draw(2**62 + 3)
    assert draw(2**62 + 3) == first
    assert len(set(first)) == 4
    assert draw(3) != first  # the upper half of the seed counts, too


def test_tokens_do_not_depend_on_the_batch(subject: Subject) -> None:
    mixed = [
        request("a", subject.prompts[1], n=3, seed=4, temperature=1.2),
        request("b", subject.prompts[6], n=2, seed=5, top_k=5),
        request("c", subject.prompts[0], n=5, seed=6, temperature=0),
        request("d", subject.prompts[5], n=2, seed=7, top_p=0.6, max_tokens=3),
    ]
    together = {(o.request_id, o.sample_index): o for o in subject.generate(*mixed) if isinstance(o, Completion)}
    assert len(together) == 12
    for one in mixed:
        for alone in subject.generate(one):
            assert isinstance(alone, Completion)
            other = together[alone.request_id, alone.sample_index]
            assert alone.token_ids == other.token_ids
            np.testing.assert_allclose(alone.logprobs, other.logprobs, atol=subject.tolerance)


def test_long_prompts_draw_the_same_side_by_side(subject: Subject) -> None:
    room = subject.engine.describe().max_model_len - 4
    prompts = [tuple(int(t) for t in np.resize(subject.prompts[i], room)) for i in range(5)]
    asked = [request(str(i), prompt, seed=i, max_tokens=4) for i, prompt in enumerate(prompts)]
    together = {o.request_id: o for o in subject.generate(*asked) if isinstance(o, Completion)}
    assert len(together) == 5
    for one in asked:
        (alone,) = subject.generate(one)
        assert isinstance(alone, Completion) and alone.token_ids == together[alone.request_id].token_ids


def test_equal_prompts_with_different_seeds_differ(subject: Subject) -> None:
    outcomes = subject.generate(*(request(str(seed), subject.prompts[2], seed=seed) for seed in range(6)))
    assert len({o.token_ids for o in outcomes if isinstance(o, Completion)}) == 6


def test_more_samples_than_rows(subject: Subject) -> None:
    count = 3 * subject.engine.describe().max_num_seqs + 1
    outcomes = subject.generate(*(request(str(i), subject.prompts[i % 8], max_tokens=1 + i % 4) for i in range(count)))
    assert sorted(int(o.request_id) for o in outcomes) == list(range(count))
    assert all(isinstance(o, Completion) and len(o.token_ids) == 1 + int(o.request_id) % 4 for o in outcomes)


def test_max_tokens_ends_with_length(subject: Subject) -> None:
    for count in (1, 5):
        completion = subject.complete(subject.prompts[3], max_tokens=count)
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")


def test_a_stop_token_is_the_last_one(subject: Subject) -> None:
    free = subject.complete(subject.prompts[3], temperature=0, max_tokens=8)
    stop = free.token_ids[4]
    cut = subject.complete(subject.prompts[3], temperature=0, max_tokens=8, stop_token_ids=(stop, 0))
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_no_stop_token_comes_before_the_minimum(subject: Subject) -> None:
    free = subject.complete(subject.prompts[3], temperature=0, max_tokens=12)
    stops = free.token_ids[:3]
    least = subject.complete(subject.prompts[3], temperature=0, max_tokens=12, stop_token_ids=stops, min_tokens=5)
    assert len(least.token_ids) > 5
    assert not set(least.token_ids[:5]) & set(stops)


@pytest.mark.parametrize("seen", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_keeps_tokens_from_coming_again(subject: Subject, seen: str) -> None:
    one = request("r", subject.prompts[4], temperature=0, max_tokens=12, **{seen: 1000.0})
    (outcome,) = subject.generate(one)
    if seen in subject.bounded:
        assert (
            isinstance(outcome, Failure) and isinstance(outcome.error, InvalidSampling) and seen in str(outcome.error)
        )
        return
    assert isinstance(outcome, Completion)
    assert len(set(outcome.token_ids)) == 12
    assert seen != "repetition_penalty" or not set(outcome.token_ids) & set(outcome.prompt_token_ids)


def test_penalties_are_subtracted_or_divided_by(subject: Subject) -> None:
    """One token at a time, against the reference's logits."""
    how = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 1.1}
    completion = subject.complete(subject.prompts[5], temperature=0, max_tokens=16, **how)
    tokens, drawn = list(completion.prompt_token_ids), list[int]()
    for token in completion.token_ids:
        logits = subject.logits(tokens)[-1].copy()
        for seen in set(tokens):
            logits[seen] = logits[seen] / 1.3 if logits[seen] > 0 else logits[seen] * 1.3
        for seen in set(drawn):
            logits[seen] -= 0.7 + 1.1 * drawn.count(seen)
        assert token == int(logits.argmax())
        tokens.append(token)
        drawn.append(token)


def test_a_logit_bias_forces_or_bans_tokens(subject: Subject) -> None:
    prompt = subject.prompts[4]
    assert set(subject.complete(prompt, logit_bias={9: 1000.0}).token_ids) == {9}
    first = subject.complete(prompt, temperature=0, max_tokens=1).token_ids[0]
    other = subject.complete(prompt, temperature=0, max_tokens=1, logit_bias={first: -1000.0}).token_ids[0]
    assert other == subject.logprobs(prompt)[-1].argsort()[-2]


def test_min_p(subject: Subject) -> None:
    for completion in subject.generate(request("r", subject.prompts[3], n=6, min_p=0.3)):
        assert isinstance(completion, Completion)
        tokens = completion.prompt_token_ids + completion.token_ids
        rows = np.exp(subject.logprobs(tokens)[len(completion.prompt_token_ids) - 1 : -1])
        for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            assert row[token] >= 0.3 * row.max() * (1 - 1e-4)
            assert logprob == pytest.approx(np.log(row[token] / row[row >= 0.3 * row.max()].sum()), abs=1e-3)


def test_top_logprobs_are_the_likeliest_of_the_reference(subject: Subject) -> None:
    completion = subject.complete(subject.prompts[4], temperature=0.7, top_logprobs=3)
    tokens = completion.prompt_token_ids + completion.token_ids
    rows = subject.logprobs(tokens)
    (score,) = subject.runner.run(subject.engine.score([tokens], top_k=3))
    for tops, reference in (
        (completion.top_logprobs, rows[len(completion.prompt_token_ids) - 1 : -1]),
        (score.top_logprobs, rows[:-1]),
    ):
        assert len(tops) == len(reference)
        for top, row in zip(tops, reference, strict=True):
            order = row.argsort()[::-1][:3]
            assert top.token_ids == tuple(order.tolist())
            np.testing.assert_allclose(top.logprobs, row[order], atol=subject.tolerance)


def test_a_priority_changes_no_token(subject: Subject) -> None:
    sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    requests = [Request(str(i), subject.prompts[i], sampling, priority=p) for i, p in enumerate((5, 0, -3, 0, 9, 2))]
    for outcome in subject.generate(*requests):
        assert isinstance(outcome, Completion)
        assert outcome.token_ids == subject.complete(outcome.prompt_token_ids).token_ids


def test_the_context_ends_a_completion(subject: Subject) -> None:
    limit = subject.engine.describe().max_model_len
    prompt = [9] * (limit - 3)
    completion = subject.complete(prompt, max_tokens=50)
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


def test_the_version_is_that_of_the_weights(subject: Subject) -> None:
    completion = subject.complete(subject.prompts[3], max_tokens=5)
    assert completion.spans == (VersionSpan(subject.engine.describe().version, 0, 5),)


def test_a_bad_prompt_fails_alone(subject: Subject) -> None:
    info = subject.engine.describe()
    outcomes = subject.generate(
        request("good", subject.prompts[3]),
        request("id", [5, subject.config.vocab_size]),
        request("long", [5] * info.max_model_len),
        request("also good", subject.prompts[4]),
    )
    by_id = {o.request_id: o for o in outcomes}
    assert len(outcomes) == 4
    for name, text in (("id", str(subject.config.vocab_size)), ("long", str(info.max_model_len))):
        failure = by_id[name]
        assert isinstance(failure, Failure) and isinstance(failure.error, InvalidPrompt) and text in str(failure.error)
    assert isinstance(by_id["good"], Completion) and isinstance(by_id["also good"], Completion)


def test_progress_is_a_prefix_of_the_completion(subject: Subject) -> None:
    asked = replace(request("only", subject.prompts[3], max_tokens=40, n=2), progress=True)
    told: list[list[int]] = [[], []]
    logprobs: list[list[float]] = [[], []]
    finished = []
    for outcome in subject.generate(asked):
        if isinstance(outcome, Progress):
            assert outcome.sample_index not in [c.sample_index for c in finished]
            assert outcome.request_id == "only" and outcome.start <= len(told[outcome.sample_index])
            told[outcome.sample_index][outcome.start :] = outcome.token_ids
            logprobs[outcome.sample_index][outcome.start :] = outcome.logprobs
        else:
            assert isinstance(outcome, Completion), outcome
            finished.append(outcome)
    assert len(finished) == 2 and any(told)
    for completion in finished:
        tokens = told[completion.sample_index]
        assert completion.token_ids[: len(tokens)] == tuple(tokens)
        assert logprobs[completion.sample_index] == list(completion.logprobs[: len(tokens)])


def test_streaming_does_not_change_the_completion(subject: Subject) -> None:
    """An engine may batch tokens differently when streaming."""
    asked = request("only", subject.prompts[3], max_tokens=40, n=2, top_logprobs=2)
    told = subject.generate(replace(asked, progress=True))
    finished = sorted((o for o in told if isinstance(o, Completion)), key=lambda c: c.sample_index)
    silent = subject.generate(asked)
    assert len(silent) == len(finished) == 2
    for watched, unwatched in zip(finished, sorted(silent, key=lambda c: c.sample_index)):
        assert isinstance(unwatched, Completion) and len(unwatched.token_ids) == 40
        assert watched.token_ids == unwatched.token_ids
        assert [top.token_ids for top in watched.top_logprobs] == [top.token_ids for top in unwatched.top_logprobs]
        assert_logprobs(subject, watched)
        assert_logprobs(subject, unwatched)


def test_resetting_the_prefix_cache_changes_no_token(subject: Subject) -> None:
    prompt = subject.prompts[5]
    before = subject.complete(prompt, max_tokens=12)

    async def amid() -> list[Completion | Failure | Progress]:
        running = asyncio.create_task(collect(subject.engine, request("only", prompt, max_tokens=12)))
        await asyncio.sleep(0)
        await subject.engine.reset_prefix_cache()
        return await running

    (during,) = subject.runner.run(amid())
    assert isinstance(during, Completion) and during.token_ids == before.token_ids
    assert subject.complete(prompt, max_tokens=12).token_ids == before.token_ids


def test_closing_the_iterator_cancels_the_rest(subject: Subject) -> None:
    async def first_only() -> list[Completion | Failure]:
        batches = subject.engine.generate([request("r", subject.prompts[0], n=200, max_tokens=4)])
        first = await anext(batches)
        await batches.aclose()  # type: ignore[attr-defined]
        return first

    assert all(isinstance(o, Completion) for o in subject.runner.run(first_only()))
    assert subject.complete(subject.prompts[1], temperature=0).token_ids == greedy_reference(
        subject, subject.prompts[1], 8
    )


# --- scoring ---


def test_scores_are_the_raw_logprobs_of_the_reference(subject: Subject) -> None:
    sequences = [p for p in subject.prompts if len(p) > 1]
    scores = subject.score(*sequences)
    for tokens, score in zip(sequences, scores, strict=True):
        expected = subject.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
        assert score.token_ids == tokens
        assert score.version == subject.engine.describe().version
        np.testing.assert_allclose(score.logprobs, expected, atol=subject.tolerance)


def test_a_completion_scores_as_it_was_drawn(subject: Subject) -> None:
    completion = subject.complete(subject.prompts[4], temperature=0.8)
    (score,) = subject.score(completion.prompt_token_ids + completion.token_ids)
    np.testing.assert_allclose(score.logprobs[-8:], completion.raw_logprobs, atol=subject.tolerance)


def test_invalid_scores_are_rejected(subject: Subject) -> None:
    limit, vocab = subject.engine.describe().max_model_len, subject.config.vocab_size
    for bad in ([5], [5] * (limit + 1), [5, vocab], [5, -1]):
        with pytest.raises(InvalidPrompt, match="sequence 1"):
            subject.score([5, 6], bad)
    with pytest.raises(InvalidSampling):
        subject.runner.run(subject.engine.score([[5, 6]], top_k=10_000))
    assert subject.score() == []


# --- updates ---


def test_an_update_changes_what_is_generated_and_scored(subject: Subject) -> None:
    new = other_params(subject)
    prompt = subject.prompts[4]
    version = subject.publish(new)
    try:
        assert subject.engine.describe().version == version
        completion = subject.complete(prompt, temperature=0)
        assert completion.token_ids == greedy_reference(subject, prompt, 8, new)
        assert completion.token_ids != greedy_reference(subject, prompt, 8)
        assert completion.version == version
        (score,) = subject.score(prompt)
        expected = subject.logprobs(prompt, new)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(score.logprobs, expected, atol=subject.tolerance)
        assert score.version == version
    finally:
        subject.publish(subject.params)
    assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8)


def test_nothing_changes_before_commit_nor_after_rollback(subject: Subject) -> None:
    engine, run, prompt = subject.engine, subject.runner.run, subject.prompts[4]
    info = engine.describe()
    version, expected = info.version + 1, greedy_reference(subject, subject.prompts[4], 8)
    update = update_of(info, other_params(subject), version)
    run(engine.stage(version, update.send(run(engine.begin(version, update.offer)))))
    assert subject.complete(prompt, temperature=0).token_ids == expected
    run(engine.rollback(version))
    assert subject.complete(prompt, temperature=0).token_ids == expected
    assert engine.describe().version == info.version
    with pytest.raises(UnknownVersion):
        run(engine.commit(version))
    run(engine.rollback(version))  # again, and for a version that never began
    run(engine.rollback(999))


def test_update_steps_out_of_order_are_rejected(subject: Subject) -> None:
    engine, run = subject.engine, subject.runner.run
    info = engine.describe()
    version = info.version + 1
    offer = update_of(info, subject.params, version).offer
    with pytest.raises(UnknownVersion):
        run(engine.stage(version, [[b""]] * info.num_ranks))
    with pytest.raises(UnknownVersion):
        run(engine.commit(version))
    with pytest.raises(VersionError):
        run(engine.begin(info.version, offer))
    run(engine.begin(version, offer))
    with pytest.raises(UpdateInProgress):
        run(engine.begin(version + 1, offer))
    with pytest.raises(UnknownVersion):
        run(engine.commit(version))  # not staged yet
    run(engine.rollback(version))
    assert run(engine.commit(info.version)).pause_seconds == 0  # already serving


def test_damaged_weights_are_not_used(subject: Subject) -> None:
    engine, run, prompt = subject.engine, subject.runner.run, subject.prompts[4]
    info = engine.describe()
    version = info.version + 1
    update = update_of(info, other_params(subject), version)
    destinations = run(engine.begin(version, update.offer))
    manifests = update.send(destinations)
    update_of(info, subject.params, version).send(destinations)  # another writer corrupts the memory
    with pytest.raises(ChecksumMismatch):
        run(engine.stage(version, manifests))
    with pytest.raises(UnknownVersion):
        run(engine.commit(version))
    run(engine.rollback(version))
    assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8)
    again = update_of(info, other_params(subject), version)  # the next attempt is not blocked
    run(engine.stage(version, again.send(run(engine.begin(version, again.offer)))))
    run(engine.commit(version))
    assert engine.describe().version == version
    subject.publish(subject.params)


def test_some_of_the_tensors_can_be_updated(subject: Subject) -> None:
    norm = hf_weights.flatten(subject.params)["model.norm.weight"] * 0.5
    info, prompt = subject.engine.describe(), subject.prompts[4]
    publisher = Publisher(LocalFleet(subject.engine))
    part = {"model": {"norm": {"weight": norm}}}
    subject.runner.run(publisher.publish(part, (info,), info.version + 1, "keep", partial=True))
    publisher.close()
    mixed = hf_weights.unflatten(hf_weights.flatten(subject.params) | {"model.norm.weight": norm})
    try:
        (score,) = subject.score(prompt)
        expected = subject.logprobs(prompt, mixed)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(score.logprobs, expected, atol=subject.tolerance)
    finally:
        subject.publish(subject.params)


# --- checksums ---


def verified(subject: Subject, params: Any) -> VerifyReport:
    publisher = Publisher(LocalFleet(subject.engine))
    try:
        return subject.runner.run(publisher.verify(params, (subject.engine.describe(),)))
    except Unsupported as error:
        pytest.skip(str(error))
    finally:
        publisher.close()


def test_checksums_equal_those_of_the_update(subject: Subject) -> None:
    info = subject.engine.describe()
    report = verified(subject, subject.params)
    assert report.is_same and not report.unchecked, report
    assert report.versions == ((info.name, info.version),)
    assert report.num_parts == sum(len(p.parts) for p in info.parameters)


def test_checksums_name_exactly_the_changed_tensors(subject: Subject) -> None:
    """A tensor that engines may fuse, one that they may shard, and one that they may pad."""
    named, info = hf_weights.flatten(subject.params), subject.engine.describe()
    changed = {"model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"}
    verified(subject, subject.params)  # or skip
    new = hf_weights.unflatten({name: leaf * 0.5 if name in changed else leaf for name, leaf in named.items()})
    subject.publish(new)
    try:
        assert verified(subject, new).is_same
        report = verified(subject, subject.params)
        assert not report.is_same and set(report.tensors) == changed
        expected = {
            (p.rank, p.name, part.tensor) for p in info.parameters for part in p.parts if part.tensor in changed
        }
        assert {(d.rank, d.parameter, d.tensor) for d in report.differences} == expected
    finally:
        subject.publish(subject.params)
    assert verified(subject, subject.params).is_same


def test_checksums_name_both_of_two_swapped_tensors(subject: Subject) -> None:
    named = hf_weights.flatten(subject.params)
    k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
    verified(subject, subject.params)  # or skip
    subject.publish(hf_weights.unflatten(named | {k: named[v], v: named[k]}))
    try:
        assert verified(subject, subject.params).tensors == (k, v)
    finally:
        subject.publish(subject.params)


def test_sleeping_weights_cannot_be_read(subject: Subject) -> None:
    verified(subject, subject.params)  # or skip
    subject.runner.run(subject.engine.sleep())
    with pytest.raises(NotReady, match="wake"):
        subject.runner.run(subject.engine.checksums())
    subject.runner.run(subject.engine.wake())
    assert verified(subject, subject.params).is_same


# --- control ---


async def collected(subject: Subject, *requests: Request) -> list[Completion | Failure]:
    return [outcome async for batch in subject.engine.generate(requests) for outcome in batch]


async def started(subject: Subject, one: Request) -> tuple[asyncio.Task[list[Completion | Failure]], Completion]:
    """Start `one` and wait until a short request next to it has finished. Returns the short one's completion, too."""
    running = asyncio.create_task(collected(subject, one))
    short = asyncio.create_task(collected(subject, request("short", subject.prompts[1], max_tokens=1)))
    (first,) = await short
    assert isinstance(first, Completion)
    return running, first


def test_pause_and_resume_do_not_change_tokens(subject: Subject) -> None:
    engine, limit = subject.engine, subject.engine.describe().max_model_len
    alone = subject.complete(subject.prompts[2], max_tokens=limit)

    async def scenario() -> list[Completion | Failure]:
        running, _ = await started(subject, request("long", subject.prompts[2], max_tokens=limit))
        await engine.pause()
        await engine.pause()
        late = asyncio.create_task(collected(subject, request("late", subject.prompts[3])))
        scoring = asyncio.create_task(engine.score([subject.prompts[4]]))
        dropped = engine.generate([request("dropped", subject.prompts[3])])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(dropped), 0.05)
        await dropped.aclose()
        assert not late.done() and not scoring.done()
        await engine.resume()
        await scoring
        return [*await running, *await late]

    long, late = subject.runner.run(scenario())
    assert isinstance(long, Completion) and isinstance(late, Completion)
    assert long.token_ids == alone.token_ids
    assert late.token_ids == subject.complete(subject.prompts[3]).token_ids


@pytest.mark.parametrize("in_flight", ["keep", "finish", "recompute", "requeue"])
def test_commits_with_requests_in_flight(subject: Subject, in_flight: Any) -> None:
    """Spans attribute tokens to versions whenever the commit happens; it may also happen while nothing runs."""
    engine, limit, new = subject.engine, subject.engine.describe().max_model_len, other_params(subject)
    old = engine.describe().version

    async def scenario() -> list[Completion | Failure]:
        update = update_of(engine.describe(), new, old + 1)
        await engine.stage(old + 1, update.send(await engine.begin(old + 1, update.offer)))
        running, _ = await started(subject, request("long", subject.prompts[2], max_tokens=limit))
        await engine.commit(old + 1, in_flight)
        return await running

    try:
        (found,) = subject.runner.run(scenario())
        assert isinstance(found, Completion)
        assert engine.describe().version == old + 1
        spans, tokens = found.spans, found.prompt_token_ids + found.token_ids
        assert spans[0].start == 0 and spans[-1].stop == len(found.token_ids)
        if in_flight in ("finish", "requeue"):
            assert len(spans) == 1
        for span in spans:
            if span.version == old + 1 and (in_flight != "keep" or span.start == 0):
                rows = subject.logprobs(tokens, new)[len(found.prompt_token_ids) - 1 + span.start : -1]
                expected = rows[np.arange(span.stop - span.start), found.token_ids[span.start :]]
                np.testing.assert_allclose(found.raw_logprobs[span.start :], expected, atol=subject.tolerance)
            if span.version == old:
                rows = subject.logprobs(tokens)[len(found.prompt_token_ids) - 1 :][: span.stop]
                expected = rows[np.arange(span.stop), found.token_ids[: span.stop]]
                np.testing.assert_allclose(found.raw_logprobs[: span.stop], expected, atol=subject.tolerance)
    finally:
        subject.publish(subject.params)


def test_a_commit_reports_what_generation_lost(subject: Subject) -> None:
    """Nothing without requests; with them, what is drawn again and some part of what would be drawn in the pause."""
    engine, old, limit = subject.engine, subject.engine.describe().version, 32

    async def commit(version: int, in_flight: Any) -> CommitReport:
        update = update_of(engine.describe(), subject.params, version)
        await engine.stage(version, update.send(await engine.begin(version, update.offer)))
        return await engine.commit(version, in_flight)

    async def scenario() -> tuple[CommitReport, CommitReport, int, float]:
        idle, start = await commit(old + 1, "requeue"), time.perf_counter()
        several = [request(str(n), prompt, n=8, max_tokens=limit) for n, prompt in enumerate(subject.prompts)]
        running = asyncio.create_task(collected(subject, *several))
        await collected(subject, request("short", subject.prompts[1], max_tokens=4))
        busy = await commit(old + 2, "requeue")
        assert not running.done()
        outcomes = await running
        assert len(outcomes) == 64 and all(isinstance(outcome, Completion) for outcome in outcomes)
        return idle, busy, 64 * limit + busy.redrawn_tokens, time.perf_counter() - start

    idle, busy, drawn, seconds = subject.runner.run(scenario())
    assert idle.pause_seconds > 0 and idle.lost_tokens == 0
    assert 0 < busy.redrawn_tokens <= limit * engine.describe().max_num_seqs
    assert 0.02 < busy.tokens_per_second / (drawn / seconds) < 50
    assert busy.redrawn_tokens < busy.lost_tokens < drawn


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_releases_memory_and_continues_after_waking(subject: Subject, level: int) -> None:
    engine, limit = subject.engine, subject.engine.describe().max_model_len
    alone = subject.complete(subject.prompts[2], max_tokens=limit)
    version = engine.describe().version

    async def scenario() -> list[Completion | Failure]:
        running, _ = await started(subject, request("long", subject.prompts[2], max_tokens=limit))
        asleep = await engine.sleep(level)
        assert set(asleep.asleep) == {"weights", "kv_cache"}
        assert asleep.kv_cache == 0 and (level == 1 or asleep.weights == 0)
        late = asyncio.create_task(collected(subject, request("late", subject.prompts[3])))
        await asyncio.sleep(0.02)
        assert not late.done()
        assert set((await engine.wake(["kv_cache"])).asleep) == {"weights"}
        if level == 2:
            with pytest.raises(NotReady):
                await engine.wake(["weights"])
            update = update_of(engine.describe(), subject.params, version + 1)
            await engine.stage(version + 1, update.send(await engine.begin(version + 1, update.offer)))
            await engine.commit(version + 1)
        assert (await engine.wake()).asleep == ()
        return [*await running, *await late]

    long, late = subject.runner.run(scenario())
    assert isinstance(long, Completion) and isinstance(late, Completion)
    assert long.token_ids == alone.token_ids
    assert late.token_ids == subject.complete(subject.prompts[3]).token_ids
    report = subject.runner.run(engine.memory())
    assert report.asleep == () and report.weights > 0


def test_invalid_control_calls_are_rejected(subject: Subject) -> None:
    engine, run = subject.engine, subject.runner.run
    info = engine.describe()
    with pytest.raises(Unsupported):
        run(engine.sleep(3))
    with pytest.raises(Unsupported):
        run(engine.wake(["lungs"]))  # type: ignore[list-item]
    run(engine.begin(info.version + 1, update_of(info, subject.params, info.version + 1).offer))
    with pytest.raises(UpdateInProgress):
        run(engine.sleep())
    run(engine.rollback(info.version + 1))
    run(engine.resume())  # not paused: no effect
    assert run(engine.wake()).asleep == ()
