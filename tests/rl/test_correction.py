"""Corrections compared with loops in float64, and exact properties."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.rl.algorithm import correction
from slipstream.rl.config import CorrectionConfig
from tests.rl.batches import random_batch

KINDS, LEVELS = ("tis", "mis", "decoupled"), ("token", "sequence", "geometric")


def naive_weights(old, batch, config):
    found = np.ones(batch.mask.shape)
    for i in range(len(batch.mask)):
        steps = np.flatnonzero(batch.mask[i])
        ratios = {t: math.exp(float(old[i, t]) - float(batch.logprobs[i, t])) for t in steps}
        whole = math.prod(ratios.values())
        for t in steps:
            r = {"token": ratios[t], "sequence": whole, "geometric": whole ** (1 / len(steps))}[config.level]
            if config.kind == "tis":
                r = min(r, config.cap)
            if config.kind == "mis":
                r = r if config.low <= r <= config.high else 0.0
            found[i, t] = r
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_match_the_naive_implementation(kind, level):
    config = CorrectionConfig(kind=kind, level=level, cap=1.1, low=0.9, high=1.2)
    batch, _ = random_batch(rows=20)
    expected = naive_weights(batch.old, batch, config)
    np.testing.assert_allclose(correction.weights(jnp.asarray(batch.old), batch, config), expected, rtol=1e-5)
    if kind != "decoupled":  # some tokens are truncated, some are not
        assert 0 < np.isin(expected[batch.mask > 0], (0, 1.1)).mean() < 1


@given(
    st.sampled_from(("none", *KINDS)),
    st.sampled_from(LEVELS),
    st.floats(1, 10),
    st.floats(0, 1),
    st.floats(1, 10),
    st.integers(0, 99),
)
def test_weights_are_exactly_one_if_trainer_and_engine_agree(kind, level, cap, low, high, seed):
    batch, _ = random_batch(seed)
    found = correction.weights(
        jnp.asarray(batch.logprobs), batch, CorrectionConfig(kind=kind, level=level, cap=cap, low=low, high=high)
    )
    assert (np.asarray(found) == 1).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_no_gradient_and_no_overflow(kind, level):
    batch, _ = random_batch()
    wild = jnp.where(
        batch.mask > 0, batch.logprobs + 80.0, 1e4
    )  # the exponential of their sum overflows, so does padding's
    weights, gradient = (
        correction.weights(wild, batch, CorrectionConfig(kind=kind, level=level)),
        jax.grad(lambda old: jnp.sum(correction.weights(old, batch, CorrectionConfig(kind=kind, level=level))))(wild),
    )
    assert np.isfinite(weights).all() and not np.asarray(gradient).any()
    assert (np.asarray(weights)[batch.mask == 0] == 1).all()


@pytest.mark.parametrize("bad", [dict(cap=0.5), dict(low=1.5), dict(high=0.9), dict(low=-0.1)])
def test_bounds_that_exclude_one_are_rejected(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        CorrectionConfig(kind="tis", **bad)
