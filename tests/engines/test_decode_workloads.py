"""The decoding benchmark's workloads are what they claim to be."""

import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.engines.embedded.compute.prompt_lookup import lookup
from slipstream.model.checkpoints import hf_weights
from slipstream.model.transformer import decoder
from tests.tiny import tiny_config


@pytest.fixture
def workloads(benchmark_module):
    return benchmark_module("decode_workloads")


def test_nano_draws_what_nano_vllm_draws(workloads):
    case, bare = workloads.nano(True, False).cases
    assert len(case.lengths) == 256 and case.num_tokens == bare.num_tokens == 133_966
    assert all(100 <= length <= 1024 for length in (*case.lengths, *case.prompt_lengths))
    prompts = case.prompts(workloads.NANO_IDS, 1)
    assert [len(prompt) for prompt in prompts] == case.prompt_lengths
    assert max(map(max, prompts)) == 10_000


def test_a_prompt_quotes_its_answer_and_lookup_finds_it(workloads):
    (case, _), num_ids = workloads.speculative(False, True).cases, 4096
    (prompt,), (answer,) = case.prompts(num_ids, 1), case.answers(num_ids, 1)
    assert len(prompt) == case.prompt_lengths[0] and len(answer) == case.lengths[0]
    guessed = [lookup(prompt + answer[:i], 1) == (token,) for i, token in enumerate(answer)]
    assert 2 * 45 <= sum(guessed) <= 2 * 48  # of 2 × 64, without the two tokens that begin each quotation


def test_the_weights_prescribe_the_walk_and_the_draft_knows_most_of_it(workloads, tmp_path):
    config = tiny_config(vocab_size=1024, hidden_size=128, num_layers=4)
    draft = tiny_config(vocab_size=1024, hidden_size=128, num_layers=1)
    workloads.write_walking_model(tmp_path / "model", config, tmp_path / "draft", draft, "float32")
    tokens = np.array(workloads.walk(1024))
    right = []
    for directory, shape in (("model", config), ("draft", draft)):
        params = hf_weights.load(tmp_path / directory)
        logits = decoder.forward(params, shape, jnp.array(tokens[None, :100]))
        right.append(float((np.asarray(logits[0]).argmax(-1) == tokens[1:101]).mean()))
    assert right[0] == 1 and 0.65 < right[1] < 0.95
