"""Bitwise reproducibility: a request gets the same tokens and logprobs alone and in any batch, with prefix caching,
preemption, chunked prefill and speculation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import AdapterConfig
from slipstream.engines.embedded.compute import program_choice
from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig
from slipstream.types import Completion, Lora, Request
from slipstream.weights.sources.packed_adapters import pack
from tests.adapters import random_adapter
from tests.conformance.engines import Subject, request
from tests.engines.subjects import CONFIG, close, publish, stats, subject_of
from tests.tiny import random_params, variant

CHUNKS = {"max_num_batched_tokens": 16}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "small pool, chunks of 16, more rows": {"num_pages": 18, "max_num_seqs": 8}
    | CHUNKS,  # two long requests do not fit
    "prompt lookup, small pool": {"speculation": "prompt_lookup", "num_pages": 18},
    "tp=2": {"tensor_parallel_size": 2} | CHUNKS,  # of one size, so that one program prefills
}
Make = Callable[..., Subject]


def repetitive(config: ModelConfig) -> Any:
    """Weights with peaked distributions that depend mostly on the newest token. Sequences repeat themselves, so that prompt lookup
    is sometimes right."""
    scales = {"o_proj": 0.04, "lm_head": 4.0}
    named = hf_weights.flatten(random_params(config))
    return hf_weights.unflatten(
        {name: leaf * next((x for key, x in scales.items() if key in name), 1.0) for name, leaf in named.items()}
    )


@pytest.fixture(scope="module", autouse=True)
def sizes_that_fit() -> Iterator[None]:
    """Always take the fitting program; otherwise most requests would run in the first one compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_choice, "PATIENCE", 0)
        yield


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    made: list[Subject] = []

    def make(config: ModelConfig = CONFIG, groups: bool = False, **options: Any) -> Subject:
        """With `groups`, the program for groups of rows decodes from the start. The one without takes long to compile; `default`
        compares the two."""
        made.append(
            subject_of(config, repetitive(config), **({"max_num_batched_tokens": 0, "max_num_seqs": 4} | options))
        )
        made[-1].engine._compute._executor._has_groups = groups  # type: ignore[attr-defined]
        return made[-1]

    yield make
    for subject in made:
        close(subject)


class Alone:
    """Reference results of requests run alone, without caching. Each is computed once."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._known = subject, dict[Request, dict[int, Completion]]()

    def __call__(self, one: Request) -> dict[int, Completion]:
        if one not in self._known:
            self._known[one] = {o.sample_index: o for o in self._subject.generate(one) if isinstance(o, Completion)}
        return self._known[one]


@pytest.fixture(scope="module")
def alone(make: Make) -> dict[int, Alone]:
    """Reference per `tp`: sharding a matrix product changes its last bits."""
    chunks: dict[int, dict[str, Any]] = {1: {}, 2: CHUNKS}
    return {
        tp: Alone(make(tensor_parallel_size=tp, enable_prefix_caching=False, **options))
        for tp, options in chunks.items()
    }


def assert_same_bits(found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    for name in ("logprobs", "raw_logprobs"):
        assert np.array(getattr(found, name)).tobytes() == np.array(getattr(expected, name)).tobytes(), name
    assert found.top_logprobs == expected.top_logprobs


def assert_as_alone(subject: Subject, batch: Sequence[Request], alone: Alone) -> None:
    found: dict[tuple[str, int], Completion] = {}
    for outcome in subject.generate(*batch):
        assert isinstance(outcome, Completion), outcome
        assert (outcome.request_id, outcome.sample_index) not in found
        found[outcome.request_id, outcome.sample_index] = outcome
    assert len(found) == sum(one.sampling.n for one in batch)
    for one in batch:
        for index, expected in alone(one).items():
            assert_same_bits(found[one.id, index], expected)


# --- random batches ---

BEGINNINGS = [(), (7, 8, 9), (7, 8, 9, 7, 8, 9, 7, 8), tuple(range(5, 24))]
PENALTIES = [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}, {"top_logprobs": 3}]


@st.composite
def batches(draw: st.DrawFn, rich: bool) -> list[Request]:
    """Prompts with common prefixes and repetitions; with `rich`, some requests need the rich programs."""
    batch, fields = [], [{}, {}, {}, *PENALTIES] if rich else [{}]
    for index in range(draw(st.integers(1, 6))):
        end = draw(st.lists(st.integers(5, 9), min_size=1, max_size=14))
        batch.append(
            request(
                str(index),
                draw(st.sampled_from(BEGINNINGS)) + tuple(end),
                n=draw(st.integers(1, 3)),
                seed=draw(st.integers(0, 3)),
                temperature=draw(st.sampled_from([0, 0.7, 1])),
                top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
                max_tokens=draw(st.sampled_from([1, 6, 16, 30])),
                **draw(st.sampled_from(fields)),
            )
        )
    return batch


@pytest.mark.parametrize("name", ENGINES)
def test_a_request_gets_the_same_bits_in_any_batch(name: str, make: Make, alone: dict[int, Alone]) -> None:
    subject, tp = make(**ENGINES[name]), ENGINES[name].get("tensor_parallel_size", 1)
    reference = alone[tp]

    # The same batches for every engine, so that the reference is computed once. Rich programs are not repeated on two
    # devices: they take long to compile and are not specific to them.
    @settings(max_examples=8, derandomize=True)
    @given(batches(rich=tp == 1))
    def check(batch: list[Request]) -> None:
        assert_as_alone(subject, batch, reference)

    check()
    counted = stats(subject)
    assert counted["hit_tokens"] > 0
    assert "small pool" not in name or counted["preemptions"] > 0
    assert "lookup" not in name or 0 < counted["accepted_tokens"] < counted["drafted_tokens"]


@pytest.mark.parametrize("name", ["mixtral"])
def test_other_families_too(name: str, make: Make) -> None:
    """Experts, which mix tokens of all rows. One token at a time."""
    config = variant(name, num_layers=1)
    options: dict[str, Any] = CHUNKS | {"decode_steps": 1, "groups": True}
    batch = mixed_batch()
    subject, reference = (
        make(config, num_pages=18, **options),
        Alone(make(config, enable_prefix_caching=False, **options)),
    )
    for _ in range(2):  # the second time from the prefix cache
        assert_as_alone(subject, batch, reference)
    assert stats(subject)["preemptions"] > 0


def test_with_an_adapter_too(make: Make) -> None:
    """In a batch with other adapters, with preemption, from the prefix cache, and after the update of another."""
    options: dict[str, Any] = CHUNKS | {
        "adapters": AdapterConfig(slots=3, rank=5),
        "decode_steps": 1,
        "groups": True,
    }
    subject, alone = make(num_pages=18, **options), make(enable_prefix_caching=False, **options)
    loras = [Lora(name, rank, 2.0, ("k_proj", "v_proj", "o_proj")) for name, rank in (("a", 5), ("b", 1))]
    for each in (subject, alone):
        for lora in loras:
            load(each, lora, seed=lora.rank)
    names = itertools.cycle(("", "a", "b"))
    batch = [replace(one, adapter=name) for one, name in zip(mixed_batch(), names)]
    reference = Alone(alone)
    for seed in range(3):
        assert_as_alone(subject, batch, reference)
        load(subject, Lora("c", 5, 2.0, ("q_proj",)), seed)
    assert stats(subject)["preemptions"] > 0


def load(subject: Subject, lora: Lora, seed: int) -> None:
    tree = hf_weights.flatten(random_adapter(subject.config, lora, seed))
    packed = pack(tree, subject.engine.describe().tensors, lora)
    subject.runner.run(publish(subject, None, adapters={lora: packed}))


def mixed_batch() -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        request(
            str(index),
            BEGINNINGS[index % 4] + tuple(rng.integers(5, 90, rng.integers(1, 20)).tolist()),
            n=1 + index % 3,
            seed=index,
            temperature=(0, 0.7, 1)[index % 3],
            max_tokens=8 + 2 * index,
        )
        for index in range(8)
    ]
