"""Sampling parameters against naive arithmetic over the decoder's logits; invalid requests, each with an error that names the
mistake and leaves the engine serving."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from slipstream.engines.embedded import assembly
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.scheduling.steps_per_tick import StepsPerTick
from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, MappingError, OutOfPages
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion, Failure, Request, SamplingParams, TopLogprobs
from tests.conformance.engines import Subject, _logits, log_softmax, request
from tests.engines.naive import edited
from tests.engines.subjects import (
    CONFIG,
    assert_nothing_leaked,
    close,
    collect,
    opened,
    scheduler_of,
    stats,
    subject_of,
)
from tests.tiny import random_params, tiny_config, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Tokenizer.from_file(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"))


@pytest.fixture(scope="module")
def subject(tokenizer: Any) -> Iterator[Subject]:
    subject = subject_of(tokenizer=tokenizer)
    yield subject
    close(subject)


@pytest.fixture
def fresh() -> Iterator[Subject]:
    """An engine with counters at zero and an empty prefix cache."""
    with opened() as subject:
        yield subject


def serves(subject: Subject) -> None:
    assert len(subject.complete([5, 6, 7]).token_ids) == 8


# --- invalid requests ---


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"n": 4097}, "at most 4096"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "at most max_tokens"),
        ({"top_k": -2}, "top_k must be an integer of at least -1"),
        ({"temperature": -1}, "0 is greedy"),
        ({"temperature": float("nan")}, "finite"),
        ({"top_p": 0}, "greater than 0"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"stop_token_ids": tuple(range(17))}, "at most 16"),
        ({"stop_token_ids": 5}, r"stop_token_ids must be a sequence of token ids, got 5; write \(5,\)"),
        ({"stop": 5}, "stop must be a sequence of texts"),
        ({"logit_bias": (5, 1.0)}, "maps token ids to finite numbers"),
        ({"stop": ("",)}, "non-empty texts"),
        ({"stop": [str(i) for i in range(17)]}, "at most 16 stop texts, got 17"),
        ({"stop": "x" * 1001}, "at most 1000 characters"),
        ({"logit_bias": {5: float("inf")}}, "finite"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "at most 64"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "each once"),
        ({"top_logprobs": 21}, "at most 20"),
        ({"seed": -1}, "seed"),
    ],
)
def test_invalid_sampling_parameters_are_rejected(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSampling, match=words):
        SamplingParams(**fields)


def test_a_top_k_of_minus_one_keeps_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) and SamplingParams(top_k=-1).is_plain


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
    ],
    ids=str,
)
def test_what_changes_the_distribution_is_not_plain(change: dict[str, Any]) -> None:
    rest = {"max_tokens": 9, "n": 2, "seed": 4, "stop": ("x",), "stop_token_ids": (3,), "top_logprobs": 2}
    assert SamplingParams(**rest).is_plain
    assert not SamplingParams(**rest, **change).is_plain


def test_invalid_prompts_are_rejected() -> None:
    for prompt in ((), "", (5, -1), (5, True), (5, 0.5)):
        with pytest.raises(InvalidPrompt):
            Request("r", prompt, SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "words"),
    [
        ([5] * 64, {}, InvalidPrompt, "max_model_len=64"),
        ([5, 96], {}, InvalidPrompt, "token id 96; this model has ids 0 to 95"),
        ([5], {"logit_bias": {96: 1.0}}, InvalidSampling, "logit_bias names token id 96"),
    ],
)
def test_an_invalid_request_fails_alone(
    subject: Subject, prompt: list[int], fields: Any, error: type[Exception], words: str
) -> None:
    outcomes = subject.generate(request("good", [5, 6]), request("bad", prompt, **fields))
    found = {o.request_id: o for o in outcomes}
    assert isinstance(found["good"], Completion)
    failure = found["bad"]
    assert isinstance(failure, Failure) and isinstance(failure.error, error) and words in str(failure.error)
    serves(subject)


class WatchedTokenizer:
    """Encodes when it is told to. Its vocabulary claims tokens of a thousand characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts, self.may_go = tokenizer, list[str](), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def get_vocab(self) -> dict[str, int]:
        return {"x" * 1000: 0}

    def encode_batch(self, texts: list[str]) -> Any:
        self.texts += texts
        assert self.may_go.wait(10), "nobody could say so: the event loop waits for the tokenizer"
        return self._tokenizer.encode_batch(texts)


def test_long_texts_are_tokenized_beside_the_event_loop_and_longer_ones_not_at_all(tokenizer: Any) -> None:
    watched = WatchedTokenizer(tokenizer)

    async def main(subject: Subject) -> None:
        call = asyncio.create_task(
            collect(subject, *(Request(name, name * 1000, SamplingParams()) for name in ("a" * 64, "b" * 65)))
        )
        while not watched.texts:
            await asyncio.sleep(0.01)
        assert isinstance((await collect(subject, request("other", [5, 6])))[0], Completion)
        watched.may_go.set()
        errors = {result.request_id[0]: result.error for result in await call if isinstance(result, Failure)}
        assert watched.texts == ["a" * 64_000]
        assert "64000 tokens, which leaves no room" in str(errors["a"])
        assert isinstance(errors["b"], InvalidPrompt) and "65000 characters, which cannot fit" in str(errors["b"])

    with opened(tokenizer=watched) as subject:
        subject.runner.run(main(subject))


def test_stop_strings_need_a_tokenizer(fresh: Subject) -> None:
    (failure,) = fresh.generate(request("r", [5], stop=("a",)))
    assert isinstance(failure, Failure) and isinstance(failure.error, InvalidSampling)
    assert "no tokenizer" in str(failure.error) and "stop_token_ids" in str(failure.error)
    serves(fresh)


def test_too_many_stop_tokens_with_the_models_own() -> None:
    config = tiny_config(num_layers=1, eos_token_ids=tuple(range(40, 50)))
    with opened(config, random_params(config)) as subject:
        (failure,) = subject.generate(request("r", [5], stop_token_ids=tuple(range(16)), ignore_eos=False))
        assert isinstance(failure, Failure) and isinstance(failure.error, InvalidSampling)
        assert "at most 24 stop tokens are supported, including the model's own; got 26" in str(failure.error)
        serves(subject)


def test_requests_larger_than_the_kv_cache_are_rejected() -> None:
    with opened(kv_cache_tokens=32) as subject:
        (failure,) = subject.generate(request("r", [5] * 20, max_tokens=13))
        assert isinstance(failure, Failure) and isinstance(failure.error, OutOfPages)
        assert "needs 9 pages" in str(failure.error) and "has 8 pages of 4 tokens" in str(failure.error)
        with pytest.raises(OutOfPages, match="sequence 1"):
            subject.score([5, 6], [5] * 33)
        outcomes = subject.generate(*(request(str(i), [5] * 20, max_tokens=12, seed=i) for i in range(4)))
        assert len(outcomes) == 4 and all(isinstance(o, Completion) and len(o.token_ids) == 12 for o in outcomes)


def test_a_small_vocabulary_limits_top_logprobs() -> None:
    config = tiny_config(num_layers=1, vocab_size=12)
    with opened(config, random_params(config)) as subject:
        (failure,) = subject.generate(request("r", [5], top_logprobs=13))
        assert isinstance(failure, Failure) and isinstance(failure.error, InvalidSampling)
        assert "must be 0 to 12" in str(failure.error)
        found = subject.complete([5, 6], top_logprobs=12)
        assert all(sorted(top.token_ids) == list(range(12)) for top in found.top_logprobs)


@pytest.mark.parametrize("top_k", [-1, 21])
def test_scores_with_too_many_top_logprobs_are_rejected(subject: Subject, top_k: int) -> None:
    with pytest.raises(InvalidSampling, match="0 to 20"):
        subject.runner.run(subject.engine.score([[5, 6]], top_k))
    serves(subject)


def test_a_kv_cache_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_available", lambda: 32_000)
    with pytest.raises(ConfigError, match=r"512 tokens needs .* GB are available; set kv_cache_tokens to at most 250"):
        subject_of()


def test_invalid_model_directories(tmp_path: Path) -> None:
    params = random_params(CONFIG)
    hf_weights.save(tmp_path, params, CONFIG)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="mamba"):
        EmbeddedEngine.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(written | {"num_hidden_layers": 2}))
    with pytest.raises(MappingError, match=r"layers\.1"):
        EmbeddedEngine.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(written | {"vocab_size": 97}))
    with pytest.raises(MappingError, match="97"):
        EmbeddedEngine.from_directory(tmp_path)


def test_a_disconnected_caller_frees_its_pages(fresh: Subject) -> None:
    async def scenario() -> None:
        many = [request(str(i), [5 + i] * 9, n=3, max_tokens=50) for i in range(6)]
        calls = [asyncio.create_task(collect(fresh, *many)) for _ in range(2)]
        while stats(fresh)["generated_tokens"] == 0:
            await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        scoring = asyncio.create_task(fresh.engine.score([[5, 6, 7]] * 50))
        await asyncio.sleep(0)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)

    fresh.runner.run(scenario())
    serves(fresh)
    assert_nothing_leaked(fresh)


# --- stop strings ---


def cut(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> tuple[int, str] | None:
    """The number of tokens that complete the first stop string, and the text before it; one token at a time."""
    for count in range(max(1, min_tokens), len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:count]), skip_special_tokens=True)
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            return count, text[: min(places)]
    return None


def test_stop_strings_end_a_completion_exactly(
    subject: Subject, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop strings of one and several tokens, with one and several decode steps per tick."""
    monkeypatch.setattr(StepsPerTick, "steps", lambda self, rows, most: most)  # however slow the machine is
    num_cut = 0
    for seed in range(6):
        free = subject.complete([5, 6, 7], max_tokens=50, seed=seed)
        text = free.text
        assert text == tokenizer.decode(list(free.token_ids)) and len(text) > 8
        for stops in ((text[3],), (text[4:6],), (text[2:6],), (text[7], text[3:5]), ("no such text",)):
            ticks = stats(subject)["ticks"]
            found = subject.complete([5, 6, 7], max_tokens=50, seed=seed, stop=stops)
            expected = cut(tokenizer, free.token_ids, stops)
            if expected is None:
                assert (found.token_ids, found.text, found.finish_reason) == (free.token_ids, text, "length")
                continue
            num_cut += 1
            count, before = expected
            assert (found.token_ids, found.text) == (free.token_ids[:count], before)
            assert found.finish_reason == "stop" and len(found.logprobs) == len(found.raw_logprobs) == count
            assert found.spans[-1].stop == count
            assert stats(subject)["ticks"] - ticks < max(count, 2)  # several steps in one tick
    assert num_cut >= 24


def test_stop_strings_respect_min_tokens(subject: Subject, tokenizer: Any) -> None:
    free = subject.complete([5, 6, 7], max_tokens=50)
    stop = free.text[1]
    found = subject.complete([5, 6, 7], max_tokens=50, stop=stop, min_tokens=20)
    assert len(found.token_ids) >= 20
    assert found.token_ids == free.token_ids[: len(found.token_ids)]


# --- settings against naive arithmetic ---


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7, "temperature": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "presence_penalty": 0.4},
    {"logit_bias": {9: 4.0, 10: 3.0, 11: -50.0}},
    {"logit_bias": {9: 4.0}, "frequency_penalty": 2.0, "repetition_penalty": 1.3, "temperature": 1.4},
    {"min_tokens": 12, "stop_token_ids": (9, 10, 11), "logit_bias": {9: 8.0}},
]


@pytest.mark.parametrize("temperature", [0.0, None], ids=["greedy", "sampled"])
def test_penalties_biases_and_min_tokens_equal_the_reference(subject: Subject, temperature: float | None) -> None:
    batch = [
        request(
            str(i), [5, 9, 9, 20 + i], max_tokens=16, **(fields if temperature is None else fields | {"temperature": 0})
        )
        for i, fields in enumerate(FIELDS)
    ]
    found = {o.request_id: o for o in subject.generate(*batch) if isinstance(o, Completion)}
    for one in batch:
        done, params = found[one.id], one.sampling
        tokens = done.prompt_token_ids + done.token_ids
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(_logits(subject.params, subject.config, padded))[0]
        for i, token in enumerate(done.token_ids):
            row = logits[len(one.prompt) - 1 + i]
            banned = params.stop_token_ids if i < params.min_tokens else ()
            values = edited(row, params, done.prompt_token_ids, done.token_ids[:i], banned)
            expected = log_softmax(values / (params.temperature or 1))
            raw = log_softmax(row)[token]
            assert done.raw_logprobs[i] == pytest.approx(raw, abs=1e-5)
            if params.temperature == 0:
                assert expected[token] == pytest.approx(expected.max(), abs=1e-5)
                assert done.logprobs[i] == done.raw_logprobs[i]
            else:
                assert done.logprobs[i] == pytest.approx(expected[token], abs=2e-5)
        if params.min_tokens:
            assert (len(done.token_ids), done.token_ids[-1], done.finish_reason) == (13, 9, "stop")


def assert_tops(tops: Sequence[TopLogprobs], rows: np.ndarray, count: int) -> None:
    assert len(tops) == len(rows)
    for top, row in zip(tops, rows):
        order = np.argsort(-row, kind="stable")[:count]
        assert top.token_ids == tuple(order.tolist())
        np.testing.assert_allclose(top.logprobs, row[order], atol=1e-5)


def test_top_logprobs_are_those_of_the_decoder(subject: Subject) -> None:
    found = subject.complete([5, 6, 7], max_tokens=20, top_logprobs=4, temperature=0.5, logit_bias={9: 3.0})
    tokens = found.prompt_token_ids + found.token_ids
    rows = subject.logprobs(tokens)
    assert_tops(found.top_logprobs, rows[2:-1], 4)
    for top_k in (0, 1, 20):
        (score,) = subject.runner.run(subject.engine.score([tokens], top_k))
        np.testing.assert_allclose(score.logprobs, rows[np.arange(22), tokens[1:]], atol=1e-5)
        assert score.top_logprobs == () if top_k == 0 else len(score.top_logprobs) == 22
        if top_k:
            assert_tops(score.top_logprobs, rows[:-1], top_k)
    assert subject.complete([5, 6, 7]).top_logprobs == ()


# --- priority and fairness ---


async def order_of(subject: Subject, *calls: Sequence[Request]) -> list[str]:
    """Request ids in the order in which they finish; all calls wait before the first starts."""
    finished: list[str] = []

    async def call(requests: Sequence[Request]) -> None:
        async for batch in subject.engine.generate(requests):
            finished.extend(outcome.request_id for outcome in batch)

    await subject.engine.pause()
    tasks = []
    for requests in calls:
        tasks.append(asyncio.create_task(call(requests)))
        while len(scheduler_of(subject).waiting) < sum(len(c) for c in calls[: len(tasks)]):
            await asyncio.sleep(0.001)
    await subject.engine.resume()
    await asyncio.gather(*tasks)
    return finished


def test_the_lower_priority_number_goes_first() -> None:
    with opened(max_num_seqs=1) as subject:
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, seed=0)
        calls = [[Request(str(priority), (5, 6), sampling, priority)] for priority in (3, 0, 7, -2, 1)]
        mixed = [Request(f"m{priority}", (5, 6), sampling, priority) for priority in (9, 8)]
        found = subject.runner.run(order_of(subject, *calls, mixed))
        assert found == ["-2", "0", "1", "3", "7", "m8", "m9"]


def test_two_callers_share_fairly() -> None:
    with opened(max_num_seqs=2) as subject:
        many, few = (
            [request(f"{name}{i}", [5, 6], max_tokens=5) for i in range(n)] for name, n in (("a", 12), ("b", 3))
        )
        found = subject.runner.run(order_of(subject, many, few))
        assert len(found) == 15
        assert max(found.index(one.id) for one in few) <= 7  # not behind all earlier requests


# --- the prefix cache ---


def test_samples_of_one_prompt_share_it(fresh: Subject) -> None:
    prompt, group = list(range(5, 34)), 6
    fresh.generate(request("r", prompt, n=group, max_tokens=3))
    counted = stats(fresh)
    assert counted["hit_tokens"] == (group - 1) * (len(prompt) - 1)
    assert counted["prefill_tokens"] == len(prompt) - 1


def test_the_next_turn_of_a_conversation_reuses_the_last(fresh: Subject) -> None:
    first = fresh.complete(list(range(5, 25)), max_tokens=12)
    fresh.complete([*first.prompt_token_ids, *first.token_ids, 40, 41], max_tokens=2)
    counted = stats(fresh)
    assert counted["hit_tokens"] == 20 + 12 - 1  # the last token drawn was never computed
    assert counted["prefill_tokens"] == 19 + 2


def test_reset_prefix_cache(fresh: Subject) -> None:
    prompt = list(range(5, 25))
    fresh.complete(prompt, max_tokens=2)
    fresh.runner.run(fresh.engine.reset_prefix_cache())
    fresh.complete(prompt, max_tokens=2)
    assert stats(fresh)["hit_tokens"] == 0 and stats(fresh)["prefill_tokens"] == 2 * 19


def test_scores_use_and_fill_the_prefix_cache(fresh: Subject) -> None:
    tokens = list(range(5, 38))

    def computed() -> int:
        before = stats(fresh)["prefill_tokens"]
        (score,) = fresh.score(tokens)
        np.testing.assert_allclose(
            score.logprobs, fresh.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-5
        )
        return int(stats(fresh)["prefill_tokens"] - before)

    assert computed() == 32
    assert computed() == 4  # all full pages but the last, since something must be left to compute
    fresh.complete(tokens, max_tokens=1)
    assert stats(fresh)["hit_tokens"] == 28 + 32
    fresh.publish(fresh.params)  # another version, another cache
    assert computed() == 32


def test_a_cached_score_is_not_reused_before_another_token(fresh: Subject) -> None:
    """The last logprob of a page belongs to the token after it."""
    for successor in (20, 30, 20, 40):
        tokens = [5, 6, 7, 8, successor, 10, 11, 12, 13]
        (score,) = fresh.score(tokens)
        np.testing.assert_allclose(score.logprobs, fresh.logprobs(tokens)[np.arange(8), tokens[1:]], atol=1e-5)


# --- number of programs ---


def test_there_are_never_more_programs_than_announced(subject: Subject) -> None:
    """After all tests of this module, and some more."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(5, 90, rng.integers(1, 60)).tolist()) for _ in range(40)]
    subject.generate(*(request(str(i), p, n=1 + i % 3, top_logprobs=i % 2) for i, p in enumerate(prompts)))
    subject.score(*(p for p in prompts if len(p) > 1))
    assert stats(subject)["num_programs"] <= subject.engine._compute._executor.shapes.num_programs  # type: ignore[attr-defined]
