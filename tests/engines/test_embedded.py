"""The embedded engine beyond the contract: Hugging Face parity, text, commits with requests in flight, failures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded import compute_thread
from slipstream.engines.embedded.assembly import programs_for
from slipstream.engines.embedded.compute import program_choice
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.scheduling.steps_per_tick import StepsPerTick
from slipstream.errors import (
    ConfigError,
    EngineFailure,
    EngineLost,
    InvalidPrompt,
    MappingError,
    NotReady,
    UnknownVersion,
)
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.config import SLIDING, ModelConfig
from slipstream.types import Completion, Failure, Request, VersionSpan
from tests.conformance.engines import Subject, greedy_reference, log_softmax, other_params, request
from tests.engines.subjects import Hold, close, collect, stage
from tests.tiny import hf_directory, random_params, tiny_config, variant, write_tokenizer

Make = Callable[..., Subject]
NEVER = 10**9
"""A tick for `Hold`, which then only limits the engine to one token per tick."""


@pytest.fixture
def make() -> Iterator[Make]:
    """Create engines and close them after the test."""
    made: list[Subject] = []

    def make(config: ModelConfig | None = None, params: Any = "random", **options: Any) -> Subject:
        config = config or tiny_config(num_layers=1)
        params = random_params(config) if isinstance(params, str) else params
        engine = EmbeddedEngine(config, params, options=EmbeddedConfig(**({"max_num_seqs": 2} | options)))
        made.append(Subject(engine, config, params))
        return made[-1]

    yield make
    for subject in made:
        close(subject)


def test_remaining_rows_move_to_a_smaller_program(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3] * 9 + [16] * 3

    def tokens(subject: Subject) -> dict[str, tuple[int, ...]]:
        requests = [request(str(i), [i + 5], max_tokens=length) for i, length in enumerate(lengths)]
        return {o.request_id: o.token_ids for o in subject.generate(*requests) if isinstance(o, Completion)}

    def counts(subject: Subject) -> tuple[int, int]:
        stats = subject.engine.stats()
        return stats["decode_steps"], stats["decode_rows"]

    patient, keen = (make(max_num_seqs=16) for _ in range(2))
    monkeypatch.setattr(program_choice, "PATIENCE", 0)
    monkeypatch.setattr(StepsPerTick, "early_exit_rows", lambda self, rows, steps: 0)
    wanted = tokens(patient)
    monkeypatch.setattr(StepsPerTick, "early_exit_rows", lambda self, rows, steps: 8 if rows > 8 else 0)
    assert tokens(keen) == wanted and {len(wanted[str(i)]) for i in range(12)} == {3, 16}
    assert counts(patient) == (16, 12 * 16)
    assert counts(keen) == (16, 12 * 3 + 3 * 13)


def test_a_larger_program_runs_until_compiling_a_smaller_one_pays_off(make: Make) -> None:
    """With the same bits."""
    programs_for.cache_clear()  # other tests have compiled some
    subject = make(max_num_seqs=16)
    many = [request(str(i), [i + 5], max_tokens=6, seed=i) for i in range(12)]

    def bits(*requests: Request) -> dict[str, tuple[Any, ...]]:
        found = [o for o in subject.generate(*requests) if isinstance(o, Completion)]
        return {o.request_id: (o.token_ids, o.logprobs, o.raw_logprobs) for o in found}

    together = bits(*many)
    compiled = subject.engine._compute._executor._programs.choice.compiled  # type: ignore[attr-defined]
    assert [size for name, size in compiled if name == "decode"] == [16]
    compiled["decode", 16] = 1e9  # seconds that it took
    assert bits(many[3])["3"] == together["3"] and ("decode", 8) not in compiled
    compiled["decode", 16] = 0.0
    assert bits(many[7])["7"] == together["7"] and ("decode", 8) in compiled


def test_requests_of_a_first_burst_share_one_program(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "BURST_SECONDS", 1.0)
    programs_for.cache_clear()
    subject = make(max_num_seqs=16)

    async def burst() -> None:
        one = asyncio.create_task(collect(subject, request("first", [5], max_tokens=4)))
        await asyncio.sleep(0.1)
        await collect(subject, *(request(str(i), [i + 5], max_tokens=4) for i in range(11)))
        await one

    subject.runner.run(burst())
    compiled = subject.engine._compute._executor._programs.choice.compiled  # type: ignore[attr-defined]
    assert [size for name, size in compiled if name == "decode"] == [16]


# --- models ---


# test_smollm2.py compares a Llama, and tests/model all variants.
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe-dense-layer"])
def test_greedy_generation_equals_transformers(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = hf_directory(tmp_path, name, seed=3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = EmbeddedEngine.from_directory(directory, options=EmbeddedConfig(max_num_seqs=4))
    subject = Subject(engine, read_config(directory), hf_weights.load(directory))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, n).tolist() for n in (1, 4, 7, 9)]
    requests = [
        request(str(i), prompt, temperature=0, max_tokens=16, ignore_eos=False) for i, prompt in enumerate(prompts)
    ]
    found = {o.request_id: o for o in subject.generate(*requests) if isinstance(o, Completion)}
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, pad_token_id=0)
        assert list(found[str(i)].token_ids) == out[0, len(prompt) :].tolist()
    subject.runner.run(engine.close())


def test_bfloat16_weights_and_cache(make: Make) -> None:
    config = tiny_config(num_layers=1)
    exact = random_params(config)
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), exact)
    subject = make(config, exact, dtype="bfloat16")
    completion = subject.complete(subject.prompts[4])
    tokens = completion.prompt_token_ids + completion.token_ids
    rows = subject.logprobs(tokens, rounded)[len(completion.prompt_token_ids) - 1 : -1]
    np.testing.assert_allclose(completion.raw_logprobs, rows[np.arange(8), completion.token_ids], atol=0.15)
    assert subject.engine.describe().dtype == "bfloat16"


def test_two_ranks_generate_what_the_decoder_does(make: Make) -> None:
    """Beyond the sliding window, and again after a sharded update. The one head of keys is on both ranks, and the vocabulary does
    not divide either."""
    config = variant("gemma3_text", num_layers=1, layer_types=(SLIDING,), num_kv_heads=1, vocab_size=95)
    subject = make(config, tensor_parallel_size=2)
    prompt, new = subject.prompts[5], other_params(subject)
    for params in (subject.params, new):
        found = subject.complete(prompt, temperature=0, max_tokens=12)
        assert found.token_ids == greedy_reference(subject, prompt, 12, params)
        expected = subject.logprobs(prompt + found.token_ids, params)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(found.raw_logprobs, expected[np.arange(12), found.token_ids], atol=1e-4)
        subject.publish(new)


def test_too_few_devices_for_tp_says_how_to_get_more() -> None:
    with pytest.raises(ConfigError, match="xla_force_host_platform_device_count=8"):
        EmbeddedEngine(tiny_config(num_heads=8, num_kv_heads=8), None, options=EmbeddedConfig(tensor_parallel_size=8))


def test_a_context_longer_than_the_models_is_rejected() -> None:
    with pytest.raises(ConfigError, match="128 positions"):
        EmbeddedEngine(tiny_config(), None, options=EmbeddedConfig(max_model_len=129))


def test_by_default_the_dtype_is_the_checkpoints() -> None:
    def engine_of(**config: Any) -> EmbeddedEngine:
        return EmbeddedEngine(tiny_config(**config), None, options=EmbeddedConfig(max_num_seqs=2))

    for dtype in ("float32", "bfloat16"):
        engine = engine_of(dtype=dtype)
        assert engine.describe().dtype == dtype
        asyncio.run(engine.close())
    with pytest.raises(ConfigError, match=r'float16.*set dtype="bfloat16"'):
        engine_of(dtype="float16")


def test_parameters_of_another_shape_are_rejected() -> None:
    with pytest.raises(MappingError, match="embed_tokens"):
        EmbeddedEngine(tiny_config(), random_params(tiny_config(vocab_size=50)))


def test_the_engine_keeps_its_weights_when_the_trainer_donates_its_own(make: Make) -> None:
    config = tiny_config(num_layers=1)
    params = random_params(config)
    subject = make(config, params)
    subject.params = random_params(config)  # the same, for reference
    jax.jit(lambda tree: jax.tree.map(lambda p: p * 0, tree), donate_argnums=0)(params)
    prompt = subject.prompts[3]
    assert subject.complete(prompt, temperature=0).token_ids == greedy_reference(subject, prompt, 8)


# --- lengths ---


def test_sequences_of_many_pages(make: Make) -> None:
    subject = make()
    prompt = subject.prompts[3]
    long = subject.complete(prompt, temperature=0, max_tokens=1000)
    assert long.prompt_token_ids + long.token_ids == prompt + greedy_reference(subject, prompt, 128 - len(prompt))
    assert subject.complete(prompt, temperature=0).token_ids == long.token_ids[:8]
    first, second = subject.generate(
        request("long", prompt, temperature=0, max_tokens=50), request("short", prompt, temperature=0, max_tokens=3)
    )
    assert isinstance(first, Completion) and isinstance(second, Completion)
    assert {first.token_ids, second.token_ids} == {long.token_ids[:3], long.token_ids[:50]}


def test_scores_in_many_chunks_come_back_in_order(make: Make) -> None:
    subject = make()
    rng = np.random.default_rng(0)
    sequences = [tuple(rng.integers(3, 96, rng.integers(2, 128)).tolist()) for _ in range(100)]
    scores = subject.score(*sequences)
    assert [s.token_ids for s in scores] == sequences
    for i in (0, 50, 99):
        expected = subject.logprobs(sequences[i])[np.arange(len(sequences[i]) - 1), sequences[i][1:]]
        np.testing.assert_allclose(scores[i].logprobs, expected, atol=1e-5)


def test_scoring_in_blocks_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.engines.embedded.compute import programs

    subject = make(
        tiny_config(num_layers=1, vocab_size=97)
    )  # a separate model, since the programs of the shared one are compiled already
    tokens = tuple(np.random.default_rng(0).integers(3, 96, 60).tolist())
    monkeypatch.setattr(programs, "MAX_LOGITS", 97 * 8)
    (score,) = subject.score(tokens)
    np.testing.assert_allclose(score.logprobs, subject.logprobs(tokens)[np.arange(59), tokens[1:]], atol=1e-5)


# --- text ---


def test_text_prompts_and_completions(tmp_path: Path) -> None:
    directory = write_tokenizer(hf_directory(tmp_path, "llama", num_layers=1))
    engine = EmbeddedEngine.from_directory(directory, options=EmbeddedConfig(max_num_seqs=2))
    subject = Subject(engine, read_config(directory), hf_weights.load(directory))
    letters = "abc"
    (by_text,) = subject.generate(request("t", letters, temperature=0, max_tokens=12))
    by_ids = subject.complete([4, 5, 6], temperature=0, max_tokens=12)
    assert isinstance(by_text, Completion)
    assert (by_text.prompt_token_ids, by_text.token_ids) == ((4, 5, 6), by_ids.token_ids)
    characters = dict(enumerate("abcdefghijklmnopqrstuvwxyz0123456789 ", start=4))
    assert by_text.text == "".join(characters.get(t, "") for t in by_ids.token_ids)

    letter = next(t for t in by_ids.token_ids if t in characters)
    stopped = subject.complete([4, 5, 6], temperature=0, max_tokens=12, stop_token_ids=(letter,))
    assert stopped.token_ids[-1] == letter
    assert characters[letter] not in stopped.text
    subject.runner.run(engine.close())


def test_text_without_a_tokenizer_names_what_is_missing(make: Make) -> None:
    subject = make()
    text, ids = sorted(subject.generate(request("a", "hello"), request("b", [5, 6])), key=lambda o: o.request_id)
    assert isinstance(text, Failure) and isinstance(text.error, InvalidPrompt) and "tokenizer" in str(text.error)
    assert isinstance(ids, Completion) and ids.text == ""


def test_eos_ends_a_completion_unless_ignored(make: Make) -> None:
    config = tiny_config(num_layers=1)
    probe = make(config).complete([5, 6, 7], temperature=0, max_tokens=10)
    eos = probe.token_ids[3]
    subject = make(tiny_config(num_layers=1, eos_token_ids=(eos, 0)), random_params(config))
    ended = subject.complete([5, 6, 7], temperature=0, max_tokens=10, ignore_eos=False)
    assert ended.token_ids == probe.token_ids[: probe.token_ids.index(eos) + 1]
    assert ended.finish_reason == "stop"
    assert subject.complete([5, 6, 7], temperature=0, max_tokens=10).token_ids == probe.token_ids


# --- updates while requests run ---


def silent(params: Any) -> Any:
    """Weights with a zero final norm: every token has logprob -log(vocab), and the greedy token is 0."""
    named = hf_weights.flatten(params)
    named["model.norm.weight"] = jnp.zeros_like(named["model.norm.weight"])
    return hf_weights.unflatten(named)


async def commit_in_mid_flight(subject: Subject, in_flight: Any) -> tuple[list[Completion], int, int]:
    """Start two requests; before the long one's 20th token, commit a staged version and send a third request. Returns the three
    completions, the old and the new version."""
    engine, old = subject.engine, subject.engine.describe().version
    new = await stage(subject, silent(subject.params))
    hold = Hold(subject, 20)
    batches = engine.generate([request("short", [5, 6], max_tokens=2), request("long", [7, 8], max_tokens=40)])
    outcomes = list(await anext(batches))
    await hold.reached()
    commit = asyncio.create_task(engine.commit(new, in_flight))
    await hold.release()
    async for batch in engine.generate([request("late", [9, 9], max_tokens=3)]):
        outcomes += batch
    await commit
    async for batch in batches:
        outcomes += batch
    by_id = {o.request_id: o for o in outcomes if isinstance(o, Completion)}
    return [by_id["short"], by_id["long"], by_id["late"]], old, new


def is_silent(completion: Completion) -> list[bool]:
    """For each token, whether its logprob is that of the silent weights."""
    return [abs(p + np.log(96)) < 1e-5 for p in completion.raw_logprobs]


def test_commit_keep_switches_running_requests_at_a_token(make: Make) -> None:
    subject = make()
    alone = subject.complete([7, 8], max_tokens=40)
    (short, long, late), old, new = subject.runner.run(commit_in_mid_flight(subject, "keep"))
    assert short.spans == (VersionSpan(old, 0, 2),)
    assert long.spans == (VersionSpan(old, 0, 20), VersionSpan(new, 20, 40))
    assert is_silent(long) == [False] * 20 + [True] * 20
    assert long.token_ids[:20] == alone.token_ids[:20]
    assert long.version == old
    assert late.spans == (VersionSpan(new, 0, 3),)
    assert subject.engine.describe().version == new


def test_commit_finish_lets_running_requests_end_under_the_old_weights(make: Make) -> None:
    subject = make()
    alone = subject.complete([7, 8], max_tokens=40)
    (_, long, late), old, new = subject.runner.run(commit_in_mid_flight(subject, "finish"))
    assert long.spans == (VersionSpan(old, 0, 40),)
    assert long.token_ids == alone.token_ids
    assert late.spans == (VersionSpan(new, 0, 3),)
    assert is_silent(late) == [True] * 3
    assert subject.engine.describe().version == new


def test_rollback_cancels_a_waiting_commit(make: Make) -> None:
    subject = make()
    engine, old = subject.engine, subject.engine.describe().version

    async def scenario() -> list[Completion | Failure]:
        new = await stage(subject, silent(subject.params))
        hold = Hold(subject, 5)
        batches = engine.generate([request("short", [5, 6], max_tokens=1), request("long", [7, 8], max_tokens=10)])
        outcomes = list(await anext(batches))
        await hold.reached()
        commit = asyncio.create_task(engine.commit(new, "finish"))
        rollback = asyncio.create_task(engine.rollback(new))
        await hold.release()
        await rollback
        with pytest.raises(UnknownVersion, match="rolled back"):
            await commit
        return outcomes + [o async for batch in batches for o in batch]

    outcomes = subject.runner.run(scenario())
    assert len(outcomes) == 2
    assert all(isinstance(o, Completion) and {s.version for s in o.spans} == {old} for o in outcomes)
    assert engine.describe().version == old
    subject.publish(subject.params)  # the next update is not blocked


def test_a_canceled_commit_does_not_swap(make: Make) -> None:
    subject = make()
    engine, old = subject.engine, subject.engine.describe().version

    async def scenario() -> list[Completion | Failure]:
        new = await stage(subject, silent(subject.params))
        hold = Hold(subject, 5)
        generating = asyncio.create_task(collect(subject, request("r", [7, 8], max_tokens=10)))
        await hold.reached()
        commit = asyncio.create_task(engine.commit(new))
        await asyncio.sleep(0)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        await hold.release()
        return await generating

    (outcome,) = subject.runner.run(scenario())
    assert isinstance(outcome, Completion) and outcome.spans == (VersionSpan(old, 0, 10),)
    assert engine.describe().version == old
    subject.runner.run(engine.commit(old + 1))  # still staged
    assert engine.describe().version == old + 1


def test_an_engine_without_weights_waits_for_its_first_update(make: Make, tmp_path: Path) -> None:
    subject = make(params=None)
    assert subject.engine.describe().version == -1
    (failure,) = subject.generate(request("r", [5, 6]))
    assert isinstance(failure, Failure) and isinstance(failure.error, NotReady)
    with pytest.raises(NotReady):
        subject.score([5, 6])
    subject.params = random_params(subject.config)
    assert subject.publish(subject.params) == 0
    assert subject.complete([5, 6], temperature=0).token_ids == greedy_reference(subject, [5, 6], 8)


def test_a_directory_with_weights_is_version_0_and_without_is_empty(tmp_path: Path) -> None:
    config = tiny_config(num_layers=1)
    hf_weights.save(tmp_path, random_params(config), config)
    for expected in (0, -1):
        engine = EmbeddedEngine.from_directory(tmp_path, name="x")
        assert engine.describe().version == expected
        asyncio.run(engine.close())
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_invalid_versions_are_rejected() -> None:
    with pytest.raises(ConfigError, match="without params"):
        EmbeddedEngine(tiny_config(), None, version=3)
    with pytest.raises(ConfigError, match="0 or more"):
        EmbeddedEngine(tiny_config(), random_params(tiny_config()), version=-1)


# --- cancellation, failure, closing ---


def test_canceled_requests_free_their_rows(make: Make) -> None:
    subject = make(tiny_config(num_layers=1, max_position_embeddings=4096))

    async def scenario() -> None:
        batches = subject.engine.generate(
            [request("short", [5], max_tokens=1), request("long", [7], n=9, max_tokens=4000)]
        )
        await anext(batches)
        await batches.aclose()  # type: ignore[attr-defined]
        await subject.engine.score([[5, 6]])  # a later command, so the cancellation has run

    subject.runner.run(scenario())
    scheduler = subject.engine._compute._scheduler  # type: ignore[attr-defined]
    assert not scheduler.live and not scheduler.waiting
    assert scheduler.pool.num_free + scheduler.tree.num_pages == scheduler.pool.num_pages
    assert len(subject.complete([5, 6]).token_ids) == 8


def test_a_failing_step_fails_its_requests_and_the_engine_survives(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make()
    Hold(subject, NEVER)
    programs = subject.engine._compute._executor._programs  # type: ignore[attr-defined]
    expected, decode, calls = subject.complete([5, 6]).token_ids, programs.decode, []

    def broken(*args: Any) -> Any:
        calls.append(1)
        drawn, cache = decode(*args)  # the donated cache is lost by now
        if len(calls) == 2:
            raise ValueError("no luck")
        return drawn, cache

    monkeypatch.setattr(programs, "decode", broken)
    outcomes = subject.generate(request("a", [5, 6], n=3), request("b", [5, 6]))
    failures = [o for o in outcomes if isinstance(o, Failure)]
    assert [f.request_id for f in failures] == ["a"]  # b was still waiting, as there are two rows
    assert isinstance(failures[0].error, EngineFailure) and "no luck" in str(failures[0].error)
    (completion,) = [o for o in outcomes if isinstance(o, Completion)]
    assert (completion.request_id, completion.token_ids) == ("b", expected)
    assert subject.complete([5, 6]).token_ids == expected


def test_closing_fails_unfinished_requests_and_ends_the_thread() -> None:
    config = tiny_config(num_layers=1, max_position_embeddings=4096)

    async def scenario() -> None:
        engine = EmbeddedEngine(config, random_params(config), name="closing", options=EmbeddedConfig(max_num_seqs=2))
        batches = engine.generate([request("short", [5], max_tokens=1), request("long", [7], n=3, max_tokens=4000)])
        await anext(batches)
        await engine.close()
        (failure,) = [o async for batch in batches for o in batch]
        assert isinstance(failure, Failure) and failure.request_id == "long" and isinstance(failure.error, EngineLost)
        assert not [t for t in threading.enumerate() if t.name == "slipstream-closing"]
        (failure,) = [o async for batch in engine.generate([request("after", [5])]) for o in batch]
        assert isinstance(failure, Failure) and isinstance(failure.error, EngineLost)
        with pytest.raises(EngineLost):
            await engine.score([[5, 6]])
        await engine.rollback(1)
        await engine.close()

    asyncio.run(scenario())


def test_requests_from_two_callers_share_the_batch(make: Make) -> None:
    subject = make()

    async def both() -> list[list[Completion | Failure]]:
        async def one(seed: int) -> list[Completion | Failure]:
            requests = [request("same id", subject.prompts[i], seed=seed) for i in range(4)]
            return [o async for batch in subject.engine.generate(requests) for o in batch]

        return await asyncio.gather(one(1), one(2))

    first, second = subject.runner.run(both())
    assert len(first) == len(second) == 4
    for outcome in first:
        assert isinstance(outcome, Completion)
        assert outcome.token_ids == subject.complete(outcome.prompt_token_ids, seed=1).token_ids
        index = np.arange(8), outcome.token_ids
        rows = subject.logprobs(outcome.prompt_token_ids + outcome.token_ids)[len(outcome.prompt_token_ids) - 1 : -1]
        np.testing.assert_allclose(outcome.logprobs, log_softmax(rows)[index], atol=1e-5)
