"""The prompts of the canary, and what the answers of a fleet say about its engines."""

import math

import pytest

from slipstream.engines.canary import MAX_GAP, NUM_PROMPTS, NUM_TOKENS, judge, prompts
from slipstream.types import EngineInfo


def info(vocab_size=1000, max_model_len=64):
    return EngineInfo("e", "embedded", "m", "float32", 1, (), (), (), "h", max_model_len, 8, 0, vocab_size=vocab_size)


def test_prompts_use_all_of_the_vocabulary_and_fit():
    ids = prompts(info())
    assert [len(row) for row in ids] == [NUM_TOKENS] * NUM_PROMPTS
    assert {token * 8 // 1000 for row in ids for token in row} == set(range(8))
    assert ids == prompts(info()), "they are always the same"
    assert all(len(row) == 5 and max(row) < 3 for row in prompts(info(3, 6)))


GOOD, BAD, WORSE = (-1.0, -2.0), (-1.0, -2.7), (-3.0, -2.0)


@pytest.mark.parametrize(
    ("answers", "wrong", "disputed"),
    [
        ({"a": GOOD}, "", ""),
        ({"a": GOOD, "b": GOOD}, "", ""),
        ({"a": GOOD, "b": (-1.0, -2.0 - 0.9 * MAX_GAP["float32"])}, "", ""),
        ({"a": GOOD, "b": BAD}, "", "ab"),
        ({"a": GOOD, "b": GOOD, "c": BAD}, "c", ""),
        ({"a": GOOD, "b": BAD, "c": WORSE}, "", "abc"),
        ({"a": GOOD, "b": GOOD, "c": BAD, "d": BAD}, "", "abcd"),
        ({"a": GOOD, "b": GOOD, "c": GOOD, "d": BAD, "e": WORSE}, "de", ""),
        ({"a": (-1.0, math.nan)}, "a", ""),
        ({"a": GOOD, "b": (-1.0, -math.inf)}, "b", ""),
        ({"a": GOOD, "b": BAD, "c": (math.nan, math.nan)}, "c", "ab"),
    ],
)
def test_the_majority_is_right_and_nobody_without_one(answers, wrong, disputed):
    verdict = judge(answers, dict.fromkeys(answers, "float32"))
    assert (verdict.wrong.keys(), verdict.disputed.keys()) == (set(wrong), set(disputed))


def test_the_coarser_dtype_sets_the_limit():
    near = (-1.0, -2.0 - 0.9 * MAX_GAP["bfloat16"])
    assert not judge({"a": GOOD, "b": near}, {"a": "float32", "b": "bfloat16"}).disputed
    verdict = judge({"a": GOOD, "b": near, "c": GOOD}, dict.fromkeys("abc", "float32"))
    assert verdict.wrong == {"b": "it answered a canary with logprobs that differ by 0.45 nats from those of a, c"}
