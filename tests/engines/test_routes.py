"""Routes that the embedded engine records: of prompts from the prefix cache, of chunks, of preempted samples, of draft tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.errors import ConfigError, ProtocolMismatch
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.model.transformer import decoder
from slipstream.types import Completion, ExpertRoutes
from tests.engines.subjects import opened, stats, subject_of
from tests.engines.test_determinism import repetitive
from tests.engines.test_sequence_logprobs import drawn
from tests.tiny import variant

CONFIG = variant("qwen3_moe-dense-layer")


def recorded(completion: Completion) -> np.ndarray:
    routes = completion.routes
    assert routes is not None
    array = np.frombuffer(routes.experts, np.uint8)
    return array.reshape(routes.num_tokens, routes.num_layers, routes.num_chosen)


def test_they_are_those_of_the_model_for_every_token() -> None:
    with opened(CONFIG, repetitive(CONFIG), num_pages=24, record_routes=True, speculation="prompt_lookup") as subject:
        completions = drawn(subject, temperature=0.7)
        counted = stats(subject)
        params = subject.params
    assert counted["hit_tokens"] > 0 and counted["preemptions"] > 0 and counted["accepted_tokens"] > 0

    @jax.jit
    def routes(tokens: jax.Array) -> list[jax.Array]:
        positions = jnp.arange(tokens.shape[1])[None]
        return decoder.apply_layers(params, CONFIG, tokens, positions, decoder.causal_attention, None)[2]

    sequences = [completion.prompt_token_ids + completion.token_ids for completion in completions]
    tokens = np.zeros((len(sequences), 64), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    (expected,) = routes(jnp.asarray(tokens))
    for completion, sequence, row in zip(completions, sequences, np.asarray(expected)):
        np.testing.assert_array_equal(recorded(completion)[:, 0], row[: len(sequence) - 1])


def test_they_survive_the_wire() -> None:
    routes = ExpertRoutes(bytes(range(12)), num_layers=3, num_chosen=2, item_size=1)
    assert routes.num_tokens == 2
    completion = Completion("a", 0, (1, 2), (3,), "", (0.0,), (0.0,), "stop", (), routes=routes)
    assert convert.completion_from_pb(convert.completion_to_pb(completion)) == completion
    assert convert.completion_from_pb(pb.Completion(finish_reason="stop")).routes is None
    row = convert.completion_to_pb(completion)
    row.routes.experts = b"12345"
    with pytest.raises(ProtocolMismatch, match="5 bytes of expert routes for 3 layers of 2 experts in 1 bytes"):
        convert.completion_from_pb(row)

    longer = ExpertRoutes(bytes(18), num_layers=3, num_chosen=2, item_size=1)
    assert routes.followed_by(longer).experts == bytes(range(12)) + bytes(6)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="this llama model has none"):
        subject_of(record_routes=True)
