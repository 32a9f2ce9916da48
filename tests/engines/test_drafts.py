"""Speculative decoding changes no token and no distribution; a draft model's weights are updated with the policy's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.assembly import shapes_for
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import ConfigError, FleetChanged
from slipstream.model.checkpoints import hf_weights
from slipstream.types import Completion
from tests.conformance.engines import Subject, other_params, request
from tests.engines.subjects import CONFIG, OPTIONS, close, opened, stats, subject_of
from tests.tiny import random_params, tiny_config

DRAFT = tiny_config("qwen2", num_layers=1, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)
GUESSING: dict[str, Any] = {"speculation": "draft", "draft_model": "given by the test", "num_speculative_tokens": 3}
OWN_DRAFT = GUESSING | {"draft": CONFIG}
"""The draft model is a copy of the policy: always right while it has the policy's weights."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Subject]:
    subject = subject_of()
    yield subject
    close(subject)


def acceptance(subject: Subject, before: dict[str, Any]) -> float:
    after = stats(subject)
    drafted = after["drafted_tokens"] - before["drafted_tokens"]
    assert drafted > 0
    return float((after["accepted_tokens"] - before["accepted_tokens"]) / drafted)


def requests() -> list[Any]:
    fields = [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"n": 3, "top_k": 5}, {"min_tokens": 9}]
    return [
        request(str(i), [5 + i, 6, 7], max_tokens=21 + i, seed=i, stop_token_ids=(30, 31, 32), **fields[i % 5])
        for i in range(10)
    ]


def drawn(subject: Subject, *batch: Any) -> dict[tuple[str, int], tuple[Any, ...]]:
    found = [o for o in subject.generate(*batch) if isinstance(o, Completion)]
    return {(o.request_id, o.sample_index): (o.token_ids, o.logprobs, o.raw_logprobs, o.finish_reason) for o in found}


def test_a_draft_changes_no_token(plain: Subject) -> None:
    expected = drawn(plain, *requests())
    with opened(**GUESSING, draft=DRAFT, draft_params=random_params(DRAFT, 1)) as subject:
        for _ in range(2):
            assert drawn(subject, *requests()) == expected
        assert 0 < acceptance(subject, Counter()) < 0.5  # random weights
        # Requests without speculation leave holes in the draft's KV cache: worse drafts, the same tokens.
        rich = [request("rich", [5, 6], max_tokens=12, top_logprobs=1)]
        assert drawn(subject, *requests(), *rich) == expected | drawn(plain, *rich)
        assert stats(subject)["num_programs"] <= subject.engine._compute._executor.shapes.num_programs  # type: ignore[attr-defined]


def test_a_draft_that_is_the_policy_is_always_right(plain: Subject) -> None:
    with opened(**OWN_DRAFT, draft_params=plain.params) as subject:
        long = request("r", [5, 6, 7], max_tokens=40, n=4)
        assert drawn(subject, long) == drawn(plain, long)
        assert acceptance(subject, Counter()) > 0.95
        counted = stats(subject)
        assert counted["generated_tokens"] == 160 and counted["ticks"] < 20
        assert counted["num_programs"] <= subject.engine._compute._executor.shapes.num_programs  # type: ignore[attr-defined]


def test_a_draft_of_another_vocabulary_is_rejected() -> None:
    other = tiny_config(num_layers=1, vocab_size=95)
    with pytest.raises(ConfigError, match="95 tokens, the policy 96"):
        subject_of(**GUESSING, draft=other, draft_params=random_params(other))


def test_a_draft_needs_weights_and_a_directory() -> None:
    with pytest.raises(ConfigError, match="without weights"):
        subject_of(**GUESSING, draft=DRAFT)
    with pytest.raises(ConfigError, match="needs both"):
        EmbeddedConfig(speculation="draft")


def test_a_draft_from_a_directory(tmp_path: Path, plain: Subject) -> None:
    for name, config, seed in (("policy", CONFIG, 0), ("draft", DRAFT, 1)):
        hf_weights.save(tmp_path / name, random_params(config, seed), config)
    options = EmbeddedConfig(**(OPTIONS | GUESSING | {"draft_model": str(tmp_path / "draft")}))
    subject = Subject(EmbeddedEngine.from_directory(tmp_path / "policy", options=options), CONFIG, plain.params)
    one = request("r", [5, 6, 7], max_tokens=20)
    assert drawn(subject, one) == drawn(plain, one)
    close(subject)


def test_max_steps_covers_a_whole_draft() -> None:
    """With fewer, a request without speculation would write past the columns of the result."""
    few = EmbeddedConfig(**(OPTIONS | {"decode_steps": 1, "speculation": "prompt_lookup", "num_speculative_tokens": 3}))
    assert shapes_for(CONFIG, few).max_steps == 4
    assert shapes_for(CONFIG, EmbeddedConfig(**(OPTIONS | {"decode_steps": 1}))).max_steps == 1


# --- updates ---


def test_policy_and_draft_arrive_in_one_transaction(plain: Subject) -> None:
    """Observed through acceptance: everything while both have the same weights, little otherwise."""
    new, long = other_params(plain), request("r", [5, 6, 7], max_tokens=40, n=4)
    with opened(**OWN_DRAFT, draft_params=plain.params) as subject:
        bridge = Bridge(LocalFleet(subject.engine))

        def accepted() -> float:
            before = stats(subject)
            subject.generate(long)
            return acceptance(subject, before)

        assert accepted() > 0.95
        assert bridge.sync(new, draft=new).version == 1
        assert accepted() > 0.95
        bridge.sync(plain.params)  # the draft stays: that of version 1
        assert accepted() < 0.6
        assert drawn(subject, long) == drawn(plain, long)
        assert bridge.sync(new).version == 3
        assert accepted() > 0.95  # and so it was
        norm = {"model": {"norm": new["model"]["norm"]}}
        assert bridge.sync(norm, draft=plain.params, partial=True).version == 4  # the draft, and of the policy a part
        assert accepted() < 0.6

        bridge.sleep(2)
        with pytest.raises(FleetChanged, match=r"level 2.*every tensor"):
            bridge.sync(plain.params)  # the draft was dropped as well
        bridge.sync(plain.params, draft=plain.params)
        bridge.wake()
        assert accepted() > 0.95


# --- distributions ---

SMALL = tiny_config(num_layers=1, vocab_size=6, eos_token_ids=(0,), bos_token_id=0)
SMALL_DRAFT = tiny_config("qwen2", num_layers=1, vocab_size=6, eos_token_ids=(0,), bos_token_id=0)
PROMPT = (2, 3, 4, 5, 2, 3)
"""Prompt lookup drafts 4, 5, 2."""
NUM_SEEDS, NUM_SAMPLES = 4, 500
GUESSERS: dict[str, dict[str, Any]] = {
    "prompt lookup": {"speculation": "prompt_lookup", "num_speculative_tokens": 3},
    "draft": GUESSING | {"draft": SMALL_DRAFT, "draft_params": random_params(SMALL_DRAFT, 1)},
}


def mild(seed: int) -> Any:
    """Weights under which no token is rare."""
    return jax.tree.map(lambda p: jnp.asarray(0.7 * p), random_params(SMALL, seed))


@pytest.fixture(scope="module", params=GUESSERS)
def speculative(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with opened(SMALL, mild(0), **GUESSERS[request.param]) as subject:
        yield subject


TRIPLES = list(itertools.product(range(6), repeat=3))


@pytest.fixture(scope="module")
def exact(speculative: Subject) -> list[float]:
    """The decoder's probability of each triple after the prompt."""
    after = {
        t: np.exp(speculative.logprobs(PROMPT + t)[-1]) for k in range(3) for t in itertools.product(range(6), repeat=k)
    }
    found = [after[()][a] * after[a,][b] * after[a, b][c] for a, b, c in TRIPLES]
    assert sum(found) == pytest.approx(1)
    return found


def p_value(subject: Subject, exact: list[float]) -> float:
    """P-value of the first three tokens of many samples, given their probabilities."""
    from scipy.stats import chisquare

    batch = [request(str(seed), PROMPT, n=NUM_SAMPLES, seed=seed, max_tokens=3) for seed in range(NUM_SEEDS)]
    found = Counter(o.token_ids for o in subject.generate(*batch) if isinstance(o, Completion))
    assert sum(found.values()) == NUM_SEEDS * NUM_SAMPLES
    counts, expected = np.array([found[t] for t in TRIPLES], float), NUM_SEEDS * NUM_SAMPLES * np.array(exact)
    rare = expected < 8
    if rare.any():  # too rare to count separately
        counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def test_speculation_keeps_the_distribution(speculative: Subject, exact: list[float]) -> None:
    assert p_value(speculative, exact) > 1e-3
    assert 0 < stats(speculative)["accepted_tokens"] < stats(speculative)["drafted_tokens"]


def test_the_weights_of_a_draft_are_verified() -> None:
    policy, draft = random_params(CONFIG), random_params(DRAFT, 1)
    with opened(**GUESSING, draft=DRAFT, draft_params=draft) as subject:
        bridge = Bridge(LocalFleet(subject.engine))
        alone, both = bridge.verify(policy), bridge.verify(policy, draft=draft)
        assert alone.is_same and both.is_same and alone.num_parts < both.num_parts
        norm = "model.norm.weight"
        other = hf_weights.unflatten(hf_weights.flatten(draft) | {norm: jnp.zeros(DRAFT.hidden_size)})
        assert bridge.verify(policy, draft=other).tensors == ("draft." + norm,)
