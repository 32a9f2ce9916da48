"""Packed rows compared with one row per sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.rl.algorithm.batch import make_batch
from slipstream.rl.algorithm.forward import TrainableParams, forward, logprob_fn
from slipstream.rl.algorithm.loss import objective
from slipstream.rl.algorithm.packing import learned_lengths, pack, plan_rows, round_up
from slipstream.rl.config import AlgorithmConfig, CorrectionConfig
from tests.rl.batches import completion
from tests.tiny import random_params, variant


def sequences(seed=0):
    rng = np.random.default_rng(seed)
    rows = [
        completion(rng.integers(4, 90, p), rng.integers(4, 90, n), rng.normal(-3, 0.5, n))
        for p, n in ((1, 1), (4, 2), (3, 7), (2, 5), (6, 3), (2, 9), (5, 1))
    ]
    batch = make_batch(rows, version=0, max_tokens=9, advantages=rng.normal(size=len(rows)))
    return batch, [len(r.prompt_token_ids) + len(r.token_ids) for r in rows]


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(12, 30))
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths, capacity):
    rows = plan_rows(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < load <= capacity for load in loads)
    assert all(a + b > capacity for n, a in enumerate(loads) for b in loads[n + 1 :])  # no two rows would fit into one


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3_moe"])
def test_packed_logprobs_match_unpacked_logprobs(name):
    model = variant(name, **({} if name == "gemma3_text" else {"num_layers": 1}))  # whose layers differ
    params, (batch, lengths) = random_params(model), sequences()
    packed = pack(batch, lengths, row_tokens=18)
    assert len(packed.tokens) < len(batch.tokens)
    score = logprob_fn(model, 0.7)
    own, found = score(params, batch), score(params, packed)
    key = lambda b, x: sorted(zip(b.logprobs[b.mask > 0].tolist(), np.asarray(x)[b.mask > 0].tolist()))  # noqa: E731
    np.testing.assert_allclose(key(packed, found), key(batch, own), atol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(kind="dr_grpo"),
        AlgorithmConfig(kind="dapo", correction=CorrectionConfig(kind="tis", level="sequence")),
        AlgorithmConfig(kind="grpo", entropy_weight=0.1, correction=CorrectionConfig(kind="mis", level="geometric")),
    ],
)
def test_packed_loss_and_gradient_match_unpacked(config):
    model = variant("llama", num_layers=1)
    params, (batch, lengths) = random_params(model), sequences()
    packed = pack(batch, lengths, row_tokens=18, rows_multiple=4)

    @jax.jit
    def both(params, batch):
        def loss(params):
            found = objective(forward(TrainableParams(params, None), model, batch, config), batch, config)
            return found.loss, found

        return jax.grad(loss, has_aux=True)(params)

    (gradient, found), (packed_gradient, packed_found) = both(params, batch), both(params, packed)
    np.testing.assert_allclose(packed_found, found, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(packed_gradient), jax.tree.leaves(gradient)):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()) + 1e-6)


def test_rows_are_padded_to_a_multiple_with_every_column():
    batch, lengths = sequences()
    batch = batch._replace(ages=batch.mask.astype(np.int32) * 3, reference=batch.logprobs * 2)
    packed = pack(batch, lengths, row_tokens=18, rows_multiple=5)
    assert packed.tokens.shape == (5, 18) and packed.mask.shape == packed.reference.shape == (5, 17)
    assert packed.mask.sum() == batch.mask.sum() and packed.ages.sum() == batch.ages.sum()
    np.testing.assert_array_equal(packed.reference, packed.logprobs * 2)
    assert packed.values is None and packed.ages.dtype == np.int32
    for row in range(5):
        for number in set(packed.segments[row].tolist()) - {0}:
            positions = packed.positions[row][packed.segments[row] == number]
            assert positions.tolist() == list(range(len(positions)))


def test_row_counts_are_rounded_up_by_less_than_a_quarter():
    found = [round_up(count) for count in range(2000)]
    assert all(count <= n and 4 * n < 5 * count for count, n in enumerate(found) if count)
    assert sorted(set(found))[:15] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28]
    assert [len({n for n in found if 2**k <= n < 2 ** (k + 1)}) for k in range(3, 10)] == [4] * 7


def test_learned_lengths_end_at_the_last_trained_token():
    batch, lengths = sequences()
    assert learned_lengths(batch) == lengths
    mask = batch.mask.copy()
    mask[2] = 0  # left out
    mask[5, lengths[5] - 2] = 0  # its last token
    assert learned_lengths(batch._replace(mask=mask)) == [*lengths[:2], 0, *lengths[3:5], lengths[5] - 1, lengths[6]]


def test_invalid_batches_for_packing_are_rejected():
    batch, lengths = sequences()
    with pytest.raises(ConfigError, match="sequence 5 has 11 tokens and does not fit into a row of 10"):
        pack(batch, lengths, 10)
    with pytest.raises(ConfigError, match="7 rows, got 6 lengths"):
        pack(batch, lengths[:-1], 18)
    with pytest.raises(ConfigError, match="already packed"):
        pack(pack(batch, lengths, 18), lengths, 18)
