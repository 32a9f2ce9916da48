"""The embedded engine on a GPU: kernels, memory, bitwise reproducibility."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.assembly import programs_for, shapes_for
from slipstream.engines.embedded.compute.attention import NaiveAttention
from slipstream.engines.embedded.compute.attention_gpu import PallasAttention
from slipstream.engines.embedded.compute.executor import shared_prefixes
from slipstream.engines.embedded.compute.programs import Cache, DecodeBatch, PrefillBatch, Programs
from slipstream.engines.embedded.sampling.batch_settings import BatchSettings
from slipstream.errors import ConfigError, NotReady
from slipstream.model.config import LayerAttention
from slipstream.types import Completion, MemoryReport, Request
from tests.conformance.engines import Subject, assert_logprobs, greedy_reference, other_params, request
from tests.gpu import models
from tests.gpu.models import completions, difference, same_bits, serving
from tests.tiny import random_params, variant

pytestmark = pytest.mark.gpu


# --- attention beside its naive reference ---

DECODE = [[0], [37], [-1], [63], [64], [200], [255], [7]]
PREFILL = [[*range(96, 128)], [*range(32)], [*range(224, 256)], [*range(20), *[-1] * 12], [-1] * 32]
HOWS = {
    "plain": LayerAttention(0.125, window=None, softcap=None),
    "window": LayerAttention(0.125, window=50, softcap=None),
    "cap": LayerAttention(0.125, window=None, softcap=2.0),
    "window and cap": LayerAttention(0.125, window=9, softcap=2.0),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("positions", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_attention_is_that_of_the_reference(
    dtype: str, deterministic: bool, positions: list[list[int]], how: LayerAttention
) -> None:
    rng = np.random.default_rng(0)
    page_size, kv_heads, group, head_dim = 32, 2, 4, 64
    at = jnp.asarray(positions, jnp.int32)
    width = 256 // page_size
    tables = jnp.asarray(rng.permutation(len(at) * width).reshape(len(at), width), jnp.int32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    pages = PallasAttention.layer_shapes(len(at) * width, kv_heads, page_size, head_dim)
    layer = tuple(normal(*shape) for shape in pages)
    new = [normal(*at.shape, kv_heads, head_dim) for _ in layer]
    q = normal(*at.shape, kv_heads * group, head_dim)

    def run(attention: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        def step(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            layer = attention.write(layer, k, v, tables, at)
            return attention.attend(q, layer, tables, at, how), layer

        out, written = jax.jit(step)(layer, q, *new)
        return np.asarray(out, np.float32), tuple(np.asarray(x, np.float32) for x in written)

    out, written = run(PallasAttention(deterministic=deterministic))
    wanted, reference = run(NaiveAttention())
    assert np.isfinite(out).all()
    for ours, theirs in zip(written, reference):
        np.testing.assert_array_equal(ours, theirs)
    live = np.asarray(at) >= 0
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(out[live], wanted[live], rtol=tolerance, atol=tolerance)


# --- models beside the decoder ---

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3_text")


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_the_argmax_of_the_reference(name: str) -> None:
    """Float32, so that there are no ties: the reference multiplies at the highest precision, and so must the engine."""
    config = variant(name, head_dim=16)
    with serving(config, random_params(config), max_num_seqs=8) as subject:
        asked = [request(str(i), p, temperature=0, max_tokens=12) for i, p in enumerate(subject.prompts)]
        asked.append(request("long", [9 + i % 80 for i in range(70)], temperature=0, max_tokens=12))
        found = completions(subject, asked)
        worst = 0.0
        for one in asked:
            completion, prompt = found[one.id], one.prompt
            rows = subject.logprobs((*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
            chosen = rows[np.arange(12), completion.token_ids]
            worst = max(worst, float(np.abs(chosen - completion.raw_logprobs).max()))
        print(f"\n{name}: logprobs within {worst:.1e} of the reference")
        for one in asked:
            assert found[one.id].token_ids == greedy_reference(subject, one.prompt, 12)
            assert_logprobs(subject, found[one.id])


# --- memory ---


@pytest.fixture(scope="module")
def large() -> Iterator[Any]:
    yield models.lively(models.LARGE)


def test_asleep_it_leaves_the_device_and_awake_it_is_the_same(large: Any) -> None:
    options = {"max_num_seqs": 64, "dtype": "bfloat16", "block_size": 64}
    with serving(models.LARGE, large, **options) as subject:
        run, engine = subject.runner.run, subject.engine
        rng = np.random.default_rng(0)
        prompts = [rng.integers(8, models.LARGE.vocab_size, 40 + i).tolist() for i in range(16)]
        asked = [request(str(i), p, max_tokens=16) for i, p in enumerate(prompts)]
        first = tokens(completions(subject, asked))
        awake = told("awake", run(engine.memory()))
        assert awake.weights > 0 and awake.kv_cache > 0 and not awake.asleep

        asleep = told("asleep at level 1", run(engine.sleep(1)))
        assert (asleep.weights, asleep.kv_cache) == (0, 0)
        assert awake.in_use - asleep.in_use >= 0.99 * (awake.weights + awake.kv_cache)
        woken = told("awake again", run(engine.wake()))
        assert (woken.weights, woken.kv_cache, woken.asleep) == (awake.weights, awake.kv_cache, ())
        assert tokens(completions(subject, asked)) == first

        asleep = told("asleep at level 2", run(engine.sleep(2)))
        assert awake.in_use - asleep.in_use >= 0.99 * (awake.weights + awake.kv_cache)
        with pytest.raises(NotReady):
            run(engine.wake(("weights",)))
        subject.publish(large)  # a trainer's arrays on the same device
        woken = told("awake after a sync", run(engine.wake()))
        assert (woken.weights, woken.kv_cache, woken.asleep) == (awake.weights, awake.kv_cache, ())
        assert tokens(completions(subject, asked)) == first


def told(when: str, report: MemoryReport) -> MemoryReport:
    stats = jax.devices()[0].memory_stats() or {}
    print(
        f"\n{when}: {report.in_use / 1e9:.3f} GB in use (the runtime says {stats.get('bytes_in_use', 0) / 1e9:.3f}), of "
        f"them weights {report.weights / 1e9:.3f}, KV cache {report.kv_cache / 1e9:.3f}",
        end="",
    )
    return report


def tokens(found: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {name: completion.token_ids for name, completion in found.items()}


# --- the same bits ---

BITS: dict[str, Any] = {"max_num_seqs": 64, "dtype": "bfloat16", "block_size": 16}
WATCHED = {5: "5 tokens", 63: "63 tokens", 130: "130 tokens, three chunks", 200: "200 tokens, four chunks"}
"""Requests that are looked at, by the length of their prompt; 64 tokens are computed at a time in deterministic mode."""
LENGTH = 32


@pytest.fixture(scope="module")
def small() -> Any:
    return models.lively(models.SMALL)


def crowd() -> list[Request]:
    """A full batch, the watched ones in its midst."""
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(1, 250, 64 - len(WATCHED)).tolist(), *WATCHED]
    order = rng.permutation(len(lengths))
    prompts = [rng.integers(8, models.SMALL.vocab_size, n).tolist() for n in lengths]
    return [drawn(f"{lengths[i]}" if lengths[i] in WATCHED and i >= 60 else f"other {i}", prompts[i]) for i in order]


def drawn(name: str, prompt: list[int] | tuple[int, ...], count: int = LENGTH) -> Request:
    return request(name, prompt, max_tokens=count, seed=11, temperature=1.0)


def situations(params: Any, deterministic: bool) -> Iterator[tuple[str, dict[str, Completion], int]]:
    """The watched requests in one situation after another, the first of which is the reference; and how many of their
    tokens came with the prompt."""
    everyone = crowd()
    watched = [one for one in everyone if one.id.isdigit()]
    options = BITS | {"deterministic": deterministic}
    alone: dict[str, Completion] = {}

    def one_by_one(subject: Subject, asked: list[Request]) -> dict[str, Completion]:
        return {one.id: completions(subject, [one])[one.id] for one in asked}

    def continued() -> list[Request]:
        half = LENGTH // 2
        return [drawn(one.id, (*one.prompt, *alone[one.id].token_ids[:half]), half) for one in watched]

    with serving(models.SMALL, params, enable_prefix_caching=False, **options) as subject:
        alone = one_by_one(subject, watched)
        yield "alone", alone, 0
        yield "alone again", one_by_one(subject, watched), 0
        yield "full batch", completions(subject, everyone), 0
        yield "half of the completion as prompt, alone", one_by_one(subject, continued()), LENGTH // 2
        yield "half of the completion as prompt, batch", completions(subject, continued()), LENGTH // 2
    with serving(models.SMALL, params, **options) as subject:
        yield "full batch, prefix cache", completions(subject, everyone), 0
        yield "full batch, prefix hits", completions(subject, everyone), 0
        yield "alone, prefix hits", one_by_one(subject, watched), 0
        hits = subject.engine.stats()["hit_tokens"]
        assert hits > sum(WATCHED) - 2 * len(WATCHED)
        yield "half of the completion as prompt, hits on decoded pages", one_by_one(subject, continued()), LENGTH // 2
        assert subject.engine.stats()["hit_tokens"] > hits + sum(WATCHED)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
def test_bits_do_not_depend_on_the_batch(small: Any, deterministic: bool) -> None:
    """Promised in deterministic mode only; of the fast one it is told how far it keeps to it."""
    reference: dict[str, Completion] = {}
    broken = []
    for name, found, skip in situations(small, deterministic):
        reference = reference or found
        for key in WATCHED:
            a, b = reference[str(key)], found[str(key)]
            print(f"\n{name}, {WATCHED[key]}: {difference(a, b, skip)}", end="")
            if not same_bits(a, b, skip):
                broken.append(f"{name}, {WATCHED[key]}: {difference(a, b, skip)}")
    assert not (deterministic and broken), "\n".join(broken)


def by_prefill(programs: Programs, params: Any, ids: np.ndarray, table: np.ndarray) -> Cache:
    cache, (size,) = programs.new_cache(), programs.shapes.blocks
    for start in range(0, len(ids), size):
        part = np.zeros((size, 1), np.int32)
        at = np.full((size, 1), -1, np.int32)
        count = len(ids[start : start + size])
        part[:count, 0], at[:count, 0] = ids[start : start + size], np.arange(start, start + count)
        _, cache = programs.prefill(params, cache, PrefillBatch(part, at, np.tile(table, (size, 1))))
    return cache


def by_decode(programs: Programs, params: Any, ids: np.ndarray, table: np.ndarray) -> Cache:
    cache, size = programs.new_cache(), programs.shapes.rows[-1]
    settings = BatchSettings.stack([], size, rich=False)
    for position, id in enumerate(ids):
        token, at, room = np.zeros(size, np.int32), np.full(size, -1, np.int32), np.zeros(size, np.int32)
        token[0], at[0], room[0] = id, position, 1
        rows = DecodeBatch(token, at, room, np.tile(table, (size, 1)), shared_prefixes([], size))
        _, cache = programs.decode(params, cache, rows, settings, 1, None)
    return cache


def test_prefill_writes_the_bits_that_decode_writes(small: Any) -> None:
    """Where bits part if they do: the first layer whose keys or values differ."""
    options = EmbeddedConfig(deterministic=True, **BITS)
    shapes = shapes_for(models.SMALL, options)
    programs = programs_for(models.SMALL, options, shapes)
    params = programs.placement.place(small)
    ids = np.random.default_rng(4).integers(8, models.SMALL.vocab_size, 100).astype(np.int32)
    table = np.zeros(shapes.table_width, np.int32)
    pages = shapes.num_pages_for(len(ids))
    table[:pages] = 1 + np.arange(pages)
    wanted = by_prefill(programs, params, ids, table)
    found = by_decode(programs, params, ids, table)
    parted = [
        f"layer {i}, {what}: {int((a != b).sum())} of {len(ids) * a.shape[1] * a.shape[3]} differ, by "
        f"{float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()):.1e} at most"
        for i, (ours, theirs) in enumerate(zip(found, wanted))
        for what, a, b in zip(("keys", "values"), ours, theirs)
        if (a != b).any()
    ]
    assert not parted, "\n".join(parted)


# --- speculation ---


@pytest.mark.parametrize("speculation", ["prompt_lookup", "draft"])
def test_speculation_changes_no_token(speculation: str) -> None:
    """Prompts that repeat themselves, for a lookup to find something; a draft that is nearly the policy. In float32: guesses
    are checked by products of another shape, and in bfloat16 the difference is enough for other tokens."""
    params = models.lively(models.SMALL, jnp.float32)
    rng = np.random.default_rng(5)
    phrases = [rng.integers(8, models.SMALL.vocab_size, 7).tolist() for _ in range(16)]
    asked = [request(str(i), p * 6, temperature=0, max_tokens=48) for i, p in enumerate(phrases)]
    options = BITS | {"dtype": "float32"}
    with serving(models.SMALL, params, **options) as subject:
        plain = completions(subject, asked)
    draft, more = None, {"speculation": speculation}
    if speculation == "draft":
        draft, more = models.lively(models.SMALL, jnp.float32, size=2.45), more | {"draft_model": "given"}
    with serving(models.SMALL, params, draft, **options, **more) as subject:
        guessed, stats = completions(subject, asked), subject.engine.stats()
    print(f"\n{speculation}: {stats['accepted_tokens']} of {stats['drafted_tokens']} guesses right")
    for one in asked:
        print(f"request {one.id}: {difference(plain[one.id], guessed[one.id])}")
    assert stats["accepted_tokens"] > 0
    assert tokens(guessed) == tokens(plain)


def test_deterministic_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation"):
        shapes_for(models.SMALL, EmbeddedConfig(deterministic=True, speculation="prompt_lookup", **BITS))


# --- weights ---


def test_an_update_from_arrays_on_the_device_changes_what_is_generated() -> None:
    config = variant("llama", head_dim=16)
    with serving(config, random_params(config), max_num_seqs=8) as subject:
        new, prompt = other_params(subject), subject.prompts[4]
        assert all(next(iter(leaf.devices())).platform == "gpu" for leaf in jax.tree.leaves(new))
        before = subject.complete(prompt, temperature=0)
        version = subject.publish(new)
        after = subject.complete(prompt, temperature=0)
        assert before.token_ids == greedy_reference(subject, prompt, 8)
        assert after.token_ids == greedy_reference(subject, prompt, 8, new) != before.token_ids
        assert (after.version, subject.engine.describe().version) == (version, version)
