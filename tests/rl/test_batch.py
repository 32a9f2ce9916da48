import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError, VersionError
from slipstream.rl.algorithm.batch import at_tokens, make_batch, sequence_sums
from slipstream.types import VersionSpan
from tests.rl.batches import completion


def test_make_batch_aligns_columns_with_the_next_token():
    rows = [completion([7, 8, 9], [5, 2], [-1.0, -2.0]), completion([7], [6, 6, 2], [-3.0, -4.0, -5.0])]
    batch = make_batch(rows, version=0, max_tokens=4, advantages=np.array([[0.5, -0.5]]))
    assert batch.tokens.tolist() == [[7, 8, 9, 5, 2, 0, 0, 0], [7, 6, 6, 2, 0, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, 0, 0, 0], [-3, -4, -5, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0], [-0.5, -0.5, -0.5, 0, 0, 0, 0]]
    assert not batch.ages.any() and batch.ages.dtype == np.int32


def test_ages_are_relative_to_the_trainers_version():
    row = completion([7, 8], [5, 9, 2], spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))
    assert make_batch([row], version=6, max_tokens=4).ages.tolist() == [[0, 3, 3, 2, 0, 0, 0]]
    with pytest.raises(VersionError, match="version 4, newer than the trainer's version 3"):
        make_batch([row], version=3, max_tokens=4)
    with pytest.raises(VersionError, match="version of token 2"):
        make_batch([completion([7], [5, 9, 2], spans=(VersionSpan(0, 0, 2),))], version=0, max_tokens=4)


def test_the_shape_of_a_batch_does_not_depend_on_the_samples():
    short = make_batch([completion([7, 8], [5])], version=0, max_tokens=9)
    full = make_batch([completion([7, 8], [5] * 9)], version=0, max_tokens=9)
    assert short.tokens.shape == full.tokens.shape == (1, 16)


@pytest.mark.parametrize(
    ("rows", "advantages", "said"),
    [
        ([], None, "at least one completion"),
        ([completion([7], [5])], np.zeros(2), "one advantage for each of 1 completions, got 2"),
        ([completion([7], [5] * 5)], None, "completion 0 has 5 tokens, more than max_tokens"),
        ([completion([7], [5, 6], [-1.0])], None, "2 tokens but 1 logprobs"),
        ([completion([], [5])], None, "no prompt tokens"),
    ],
)
def test_invalid_completions_are_rejected(rows, advantages, said):
    with pytest.raises(ConfigError, match=said):
        make_batch(rows, version=0, max_tokens=4, advantages=advantages)


def test_sums_over_sequences_packed_or_not():
    batch = make_batch([completion([7], [5, 6]), completion([7], [5])], version=0, max_tokens=4)
    values = jnp.arange(14.0).reshape(2, 7)
    assert sequence_sums(values, batch).tolist() == [[21], [70]]
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], np.int32)
    packed = batch._replace(segments=segments)
    sums = sequence_sums(values, packed)
    assert sums[:, :3].tolist() == [[6, 3, 12], [55, 15, 0]]
    assert at_tokens(sums, packed).tolist() == [[3, 3, 3, 12, 12, 12, 6], [15, 15, 55, 55, 55, 55, 55]]
