"""Bucketed shapes, and how they follow from an engine's options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded import assembly
from slipstream.engines.embedded.assembly import shapes_for
from slipstream.engines.embedded.scheduling.shapes import COPIES, MIN_ROWS, Shapes, bucket, ladder
from slipstream.errors import ConfigError
from tests.tiny import tiny_config

SHAPES = Shapes(page_size=4, num_pages=10, max_length=30, rows=(8, 16, 24), block=16, blocks=(1, 4), max_steps=8)


@pytest.mark.parametrize(
    ("low", "high", "factor", "steps"),
    [
        (8, 100, 2, (8, 16, 32, 64, 100)),
        (8, 64, 2, (8, 16, 32, 64)),
        (8, 8, 2, (8,)),
        (8, 3, 2, (8,)),
        (1, 16, 4, (1, 4, 16)),
        (1, 17, 4, (1, 4, 16, 17)),
    ],
)
def test_ladder(low: int, high: int, factor: int, steps: tuple[int, ...]) -> None:
    assert ladder(low, high, factor) == steps


@pytest.mark.parametrize(("size", "expected"), [(0, 8), (1, 8), (8, 8), (9, 16), (17, 24), (24, 24)])
def test_bucket_is_the_smallest_that_holds_it(size: int, expected: int) -> None:
    assert bucket(size, (8, 16, 24)) == expected


def test_derived_sizes() -> None:
    assert SHAPES.table_width == 8
    assert [SHAPES.num_pages_for(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_the_number_of_programs_is_known_before_the_first() -> None:
    copies = len(COPIES)
    # Three sizes of decoding, plain and rich; two of prefill and of both kinds of scoring.
    assert SHAPES.num_programs == 4 * 3 + 3 * 2 + copies
    speculative = replace(SHAPES, num_speculative=4)
    assert speculative.num_programs == SHAPES.num_programs + 3
    assert replace(speculative, has_draft=True).num_programs == speculative.num_programs + 2 * 3 + 2 + copies


# --- from options; the tests run on CPU ---

MODEL = tiny_config()


def test_rows_are_never_fewer_than_eight() -> None:
    for concurrency, rows in [(1, (8,)), (8, (8,)), (9, (8, 9)), (64, (8, 16, 32, 64)), (100, (8, 16, 32, 64, 100))]:
        shapes = shapes_for(MODEL, EmbeddedConfig(max_num_seqs=concurrency))
        assert shapes.rows == rows and shapes.rows[0] == MIN_ROWS


def test_prefill_calls_hold_max_num_batched_tokens() -> None:
    shapes = shapes_for(MODEL, EmbeddedConfig())
    assert (shapes.block, shapes.blocks) == (16, (1, 4, 16))
    assert shapes_for(MODEL, EmbeddedConfig(max_num_batched_tokens=64)).blocks == (1, 4)
    assert shapes_for(MODEL, EmbeddedConfig(max_num_batched_tokens=3)).blocks == (1,)  # at least one block


def test_decode_steps_and_speculative_tokens() -> None:
    assert shapes_for(MODEL, EmbeddedConfig()).max_steps == 16
    assert shapes_for(MODEL, EmbeddedConfig(decode_steps=3)).max_steps == 3
    assert shapes_for(MODEL, EmbeddedConfig(num_speculative_tokens=6)).num_speculative == 0
    lookups = shapes_for(MODEL, EmbeddedConfig(speculation="prompt_lookup", num_speculative_tokens=6))
    assert (lookups.num_speculative, lookups.has_draft) == (6, False)
    drafts = shapes_for(MODEL, EmbeddedConfig(speculation="draft", draft_model="somewhere"))
    assert (drafts.num_speculative, drafts.has_draft) == (4, True)


def test_on_cpu_asking_for_determinism_changes_nothing() -> None:
    assert shapes_for(MODEL, EmbeddedConfig(deterministic=True)) == shapes_for(MODEL, EmbeddedConfig())


def test_max_length_is_the_models_or_shorter() -> None:
    longest = MODEL.max_position_embeddings
    assert shapes_for(MODEL, EmbeddedConfig()).max_length == longest
    shapes = shapes_for(MODEL, EmbeddedConfig(max_model_len=10, block_size=32))
    assert (shapes.max_length, shapes.page_size, shapes.table_width) == (10, 10, 1)
    with pytest.raises(ConfigError, match=f"{longest} positions"):
        shapes_for(MODEL, EmbeddedConfig(max_model_len=longest + 1))


def test_pages_are_those_of_kv_cache_tokens() -> None:
    def num_pages(tokens: int) -> int:
        return shapes_for(MODEL, EmbeddedConfig(kv_cache_tokens=tokens, block_size=4)).num_pages

    assert [num_pages(tokens) for tokens in (1, 4, 7, 8, 1000)] == [1, 1, 1, 2, 250]


def test_by_default_there_are_pages_for_every_sequence() -> None:
    shapes = shapes_for(MODEL, EmbeddedConfig(max_num_seqs=5, block_size=4, max_model_len=30))
    assert shapes.num_pages == 5 * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_default_pages_fit_into_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EmbeddedConfig(max_num_seqs=64, block_size=4, max_model_len=30, dtype=dtype)
    page_bytes = 4 * 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * (4 if dtype == "float32" else 2)
    monkeypatch.setattr(assembly, "_memory", lambda: 20.5 * page_bytes)
    assert shapes_for(MODEL, options).num_pages == 20
    assert (
        shapes_for(MODEL, options.replace(tensor_parallel_size=2)).num_pages == 41
    )  # each device has a shard of every page
    monkeypatch.setattr(assembly, "_memory", lambda: 0.0)
    assert shapes_for(MODEL, options).num_pages == 8


def test_memory_is_a_share_of_the_machine() -> None:
    assert 0 < assembly._memory() < 1 << 50
