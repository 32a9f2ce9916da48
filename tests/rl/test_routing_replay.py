"""Routing replay: with the engine's experts, a trainer in float32 agrees with an engine in bfloat16 several times better."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig, VllmConfig
from slipstream.errors import ConfigError, EngineFailure
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.families import tensors
from slipstream.model.tree import unflatten
from slipstream.observe.mismatch import kl_per_token
from slipstream.rl.agents.episodes import Episode, Turn
from slipstream.rl.algorithm.batch import Batch, make_batch, unknown_expert
from slipstream.rl.config import AlgorithmConfig, ComputeConfig, TaskConfig, TrainConfig
from slipstream.rl.trainer.learner import Learner
from slipstream.types import Completion, ExpertRoutes, VersionSpan
from tests.conformance.engines import request
from tests.engines.subjects import opened
from tests.tiny import tiny_config

MODEL = tiny_config("qwen3_moe", num_layers=2, moe=MoeConfig(6, 2, 32))
UPDATE = AlgorithmConfig(
    prompts=4,
    group=6,
    max_tokens=16,
    row_tokens=80,
    micro_batches=2,
    compute=ComputeConfig(scan_layers=True, remat="full"),
)


def weights(model: ModelConfig) -> dict:
    """Matrices that keep the size of activations, in values that bfloat16 has."""
    rng = np.random.default_rng(0)
    leaves = {}
    for spec in tensors(model):
        leaf = np.ones(spec.shape) if len(spec.shape) == 1 else rng.standard_normal(spec.shape) / spec.shape[1] ** 0.5
        leaves[spec.name] = jnp.asarray(leaf, jnp.bfloat16).astype(jnp.float32)
    return unflatten(leaves)


PARAMS = weights(MODEL)


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    rng = np.random.default_rng(1)
    requests = [
        request(str(i), tuple(rng.integers(5, 90, 20).tolist()), n=6, seed=i, max_tokens=16, ignore_eos=True)
        for i in range(4)
    ]
    with opened(MODEL, PARAMS, dtype="bfloat16", record_routes=True, max_num_seqs=24, kv_cache_tokens=2048) as subject:
        outcomes = subject.generate(*requests)
    found = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    return sorted(found, key=lambda c: (c.request_id, c.sample_index))


@pytest.fixture(scope="module")
def batch(completions: list[Completion]) -> Batch:
    return make_batch(completions, version=0, max_tokens=16, replay_routes=True)


def test_replay_lowers_the_kl_several_times(batch: Batch) -> None:
    learner = Learner(UPDATE, MODEL, PARAMS, seed=0)
    kl = [
        kl_per_token(learner.logprobs(each, 1.0), batch.logprobs, batch.mask)
        for each in (batch, batch._replace(routes=None))
    ]
    assert kl[1] > 5 * kl[0] > 0
    # The update replays the same in packed rows and micro-batches.
    rewards = np.arange(24, dtype=np.float32).reshape(4, 6) % 5
    metrics = learner.update(1, learner.prepare(batch, rewards))
    assert metrics.kl == pytest.approx(kl[0], rel=1e-2)
    assert 0.9 < metrics.route_agreement < 1


def test_a_run_replays_and_says_what_it_gains(tmp_path) -> None:
    model = tiny_config("qwen3_moe", num_layers=1, moe=MoeConfig(4, 1, 32))
    write_sample_config(tmp_path / "model")  # the tokenizer
    hf_weights.save(tmp_path / "model", weights(model), model)
    config = TrainConfig(
        model=tmp_path / "model",
        run_dir=tmp_path / "run",
        engines=0,
        steps=1,
        warmup_steps=0,
        eval_prompts=4,
        save_every=0,
        diagnose_every=1,
        replay_routes=True,
        task=TaskConfig(digits=2),
        algorithm=AlgorithmConfig(prompts=4, group=4, max_tokens=4),
        engine=EmbeddedConfig(max_num_seqs=16, max_model_len=16, dtype="bfloat16"),
    )
    (step,) = slipstream.train(config).steps
    assert step.metrics.route_agreement > 0.8 and step.metrics.kl > 0
    assert f"without {step.kl_without_replay:.2g} nats per token" in step.mismatch


def test_completions_without_the_right_routes_are_refused(completions: list[Completion]) -> None:
    def refused(error: type, match: str, *rows: Completion) -> None:
        with pytest.raises(error, match=match):
            make_batch(rows, version=0, max_tokens=16, replay_routes=True)

    one, routes = completions[0], completions[0].routes
    none = replace(one, routes=None)
    refused(ConfigError, "set record_routes=True", none)
    refused(EngineFailure, "completion 1 .* with no routes; expected those of 35 tokens in 2 layers", one, none)
    cut = replace(routes, experts=routes.experts[:-4])
    refused(
        EngineFailure,
        "with routes of 34 tokens in 2 layers of 2 experts; expected those of 35",
        replace(one, routes=cut),
    )
    failed = replace(one, token_ids=(), logprobs=(), spans=(), routes=None)  # an episode
    found = make_batch([one, failed], version=0, max_tokens=16, replay_routes=True).routes
    assert (found[1] == unknown_expert(found.dtype)).all() and (found[0, :35] < 6).all()


def test_an_episode_has_the_routes_of_its_turns() -> None:
    def turn(start: int, count: int, experts: bytes) -> Turn:
        logprobs, spans = (0.0,) * count, (VersionSpan(0, 0, count),)
        return Turn(start, (5,) * count, logprobs, logprobs, spans, "stop", "", "", 0.0, ExpertRoutes(experts, 1, 1, 1))

    turns = turn(2, 2, b"abc"), turn(5, 2, b"ABCDEF")
    episode = Episode(0, 0, 0, tuple(range(7)), turns, "done")
    assert episode.routes is not None and episode.routes.experts == b"abcDEF"
    assert replace(episode, turns=(replace(turns[0], routes=None), turns[1])).routes is None


def test_the_setting_holds_for_both_sides_and_needs_the_embedded_engine() -> None:
    config = TrainConfig(replay_routes=True)
    assert config.engine.kind == "embedded" and config.engine.record_routes
    assert not TrainConfig().replace(engine=EmbeddedConfig()).engine.record_routes  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"only engine.kind = 'embedded' returns, got 'vllm'"):
        TrainConfig(replay_routes=True, engine=VllmConfig())
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts .* V2 model runner"):
        VllmConfig(vllm={"enable_return_routed_experts": True})
