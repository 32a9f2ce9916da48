"""Tunix with our rollouts, compared with its own."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import ConfigError, InvalidPrompt, MappingError
from slipstream.plugins.tunix import SlipstreamRollout
from slipstream.plugins.tunix_models import model_config
from tests.plugins import tunix_tiny
from tests.tiny import tiny_config, write_config

PROMPTS = ["5 6 7", "40 41 42 43 44", "9", "9"]
GREEDY = RolloutConfig(
    max_prompt_length=8, max_tokens_to_generate=6, kv_cache_size=32, temperature=0.0, top_p=None, return_logprobs=True
)
SAMPLED = replace(GREEDY, temperature=0.7, top_p=1.0, seed=3)
TOKENIZER = TokenizerAdapter(tunix_tiny.Words())


def test_grpo_learns_with_engines_in_another_process_and_begins_where_tunix_alone_begins(monkeypatch):
    """The example, with one layer instead of two, which compile for twice as long. With this seed as well, greedy decoding
    ends some answers early and never samples the padding token."""
    example = tunix_tiny.example()
    config, make = example.ModelConfig, example.make_model
    monkeypatch.setattr(example, "ModelConfig", lambda **fields: config(**(fields | {"num_layers": 1})))
    monkeypatch.setattr(example, "make_model", lambda: make(seed=296))
    steps = 12
    run = example.main(["--rollout", "slipstream", "--steps", str(steps)])
    alone = example.main(["--rollout", "vanilla", "--steps", "0"])
    assert [t.tolist() for t in run.before] == [t.tolist() for t in alone.before]
    assert len({tuple(t) for t in run.before}) == len(example.PROMPTS)
    assert len(run.rewards) == run.version == steps
    assert np.mean(run.rewards[-3:]) > np.mean(run.rewards[:3]) + 0.15, run.rewards
    vowels = [np.isin(t, example.Letters().encode("aeiou")).mean() for t in run.after]
    assert np.mean(vowels) > 0.8  # the engines have the trained weights


@pytest.fixture(scope="module")
def actor():
    return tunix_tiny.make("qwen3")


@pytest.fixture(scope="module")
def rollout(actor):
    made = rollout_of(actor)
    yield made
    made.close()


def rollout_of(actor, **options):
    return SlipstreamRollout(
        rollout_actor=actor,
        tokenizer=TOKENIZER,
        mesh=None,
        rollout_config=GREEDY,
        engine=EmbeddedConfig(max_num_seqs=8),
        **({"start": slipstream.inprocess} | options),
    )


def vanilla(actor):
    config = actor.config
    return VanillaRollout(actor, TOKENIZER, CacheConfig(32, config.num_layers, config.num_kv_heads, config.head_dim))


def padded(tokens):
    return jnp.asarray([np.pad(row, (0, GREEDY.max_tokens_to_generate - len(row))) for row in tokens])


def test_after_an_update_tokens_and_logprobs_are_those_of_tunix(actor, rollout):
    nnx.update(actor, tunix_tiny.shaken(nnx.state(actor, nnx.Param), seed=8))
    version = rollout.bridge.version
    with jax.transfer_guard("disallow_explicit"):  # as RLCluster.sync_weights on CPU
        rollout.update_params(nnx.state(actor, nnx.Param), (nnx.Param,))
    assert rollout.bridge.version == rollout.last_sync.version == version + 1

    theirs, ours = vanilla(actor).generate(PROMPTS, GREEDY), rollout.generate(PROMPTS, GREEDY)
    assert [t.tolist() for t in ours.tokens] == [t.tolist() for t in theirs.tokens]
    assert ours.text == theirs.text
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens)
    for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)

    given = jnp.asarray([[7, 8, 9, 10, 11, 12], [60, 61, 0, 0, 0, 0], [0] * 6, [3] * 6])
    prompts = jnp.asarray(ours.left_padded_prompt_tokens)
    expected = vanilla(actor).get_per_token_logps(prompts, given)
    found = rollout.get_per_token_logps(prompts, given)
    np.testing.assert_allclose(found, jnp.where(given == 0, 0.0, expected), atol=1e-4)
    with pytest.raises(InvalidPrompt, match="row 1 has no prompt"):
        rollout.get_per_token_logps(prompts.at[1].set(0), given)


def test_a_stop_token_is_kept_among_the_tokens_and_left_out_of_the_text(actor, rollout):
    first = rollout.generate(PROMPTS[:1], GREEDY).tokens[0].tolist()
    stop = first[2]
    assert stop not in first[:2]
    config = replace(GREEDY, eos_tokens=[stop, 95])
    ours, theirs = rollout.generate(PROMPTS[:1], config), vanilla(actor).generate(PROMPTS[:1], config)
    assert ours.tokens[0].tolist() == [*theirs.tokens[0].tolist(), stop] == first[:3]
    assert ours.text == theirs.text == [TOKENIZER.decode(first[:2])]


def test_samples_of_a_group_differ_and_a_seed_repeats_the_run(actor):
    def run(seed):
        made = rollout_of(actor)
        try:
            config = replace(SAMPLED, seed=seed)
            return [[t.tolist() for t in made.generate(PROMPTS[2:] * 4, config).tokens] for _ in range(2)]
        finally:
            made.close()

    first = run(jax.random.PRNGKey(3))
    assert len({tuple(tokens) for call in first for tokens in call}) > 12  # of 16, of the same prompt
    assert first == run(jax.random.key(3)) != run(4)


def test_logprobs_are_those_after_temperature(actor, rollout):
    rollout.update_params(nnx.state(actor, nnx.Param))
    output = rollout.generate(PROMPTS, SAMPLED)
    graph, state = nnx.split(actor)
    expected = compute_per_token_logps(
        graph,
        state,
        prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
        completion_tokens=padded(output.tokens),
        pad_id=0,
        eos_id=1,
        temperature=0.7,
    )
    for row, (tokens, own) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        if 0 not in tokens:  # Tunix masks padding
            np.testing.assert_allclose(own, expected[row, : len(tokens)], atol=1e-4)
    assert rollout.generate(PROMPTS, replace(SAMPLED, return_logprobs=False)).logprobs is None


def test_many_threads_with_a_prompt_each_and_more_sampling_parameters(rollout):
    prompts = [f"{i} {i + 1}" for i in range(3, 19)]
    together = rollout.generate(prompts, GREEDY, min_tokens=6)
    with ThreadPoolExecutor(16) as threads:
        alone = list(threads.map(lambda prompt: rollout.generate([prompt], GREEDY, min_tokens=6), prompts))
    assert [t.tolist() for t in together.tokens] == [a.tokens[0].tolist() for a in alone]
    assert all(len(tokens) == 6 for tokens in together.tokens)
    long = rollout.generate(["3 " * 10], GREEDY)
    assert long.left_padded_prompt_tokens.shape == (1, 16)  # as Tunix: the next power of two


def test_of_an_actor_with_lora_only_adapters_come_and_kernels_change():
    adapted = tunix_tiny.with_lora(tunix_tiny.make("qwen3", seed=8), rank=2, alpha=4.0)
    made = rollout_of(adapted, lora_alpha=4.0)
    try:
        whole = made.last_sync.num_bytes
        nnx.update(adapted, tunix_tiny.shaken(nnx.state(adapted, nnx.LoRAParam), seed=9))
        made.update_params(nnx.state(adapted, nnx.LoRAParam), (nnx.LoRAParam,))
        assert 0 < made.last_sync.num_bytes < whole  # kernels without adapters are not sent again
        theirs, ours = vanilla(adapted).generate(PROMPTS, GREEDY), made.generate(PROMPTS, GREEDY)
        assert [t.tolist() for t in ours.tokens] == [t.tolist() for t in theirs.tokens]
    finally:
        made.close()
    with pytest.raises(ConfigError, match="lora_alpha"):
        rollout_of(adapted)


def test_a_fleet_that_is_up_is_joined_and_left_running(actor, rollout, tmp_path):
    model = write_config(tmp_path / "model", model_config(actor, 32))
    with slipstream.launch(model, engine=EmbeddedConfig(max_num_seqs=8), run_dir=tmp_path / "run") as fleet:
        joined = rollout_of(actor, fleet=fleet.run_dir)
        rollout.update_params(nnx.state(actor, nnx.Param))
        assert [t.tolist() for t in joined.generate(PROMPTS, GREEDY).tokens] == [
            t.tolist() for t in rollout.generate(PROMPTS, GREEDY).tokens
        ]
        joined.close()
        assert [engine.state for engine in fleet.status().engines] == ["ready"]


def test_what_does_not_fit_is_refused_before_anything_runs(actor, rollout, tmp_path):
    with pytest.raises(ConfigError, match="runs another model"):
        rollout_of(actor, model=write_config(tmp_path / "other", tiny_config("qwen3")))
    with pytest.raises(ConfigError, match="needs model="):
        rollout_of(actor, mapping=rollout._mapping)
    with pytest.raises(MappingError, match=r"expected a leaf layers\.0\.attn\.k_norm\.w"):
        state = nnx.to_pure_dict(nnx.state(actor, nnx.Param))
        del state["layers"][0]["attn"]["k_norm"]
        rollout.update_params(state)
