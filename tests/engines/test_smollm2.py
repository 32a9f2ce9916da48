"""A real model end to end: SmolLM2-135M-Instruct, converted from GGUF, in our decoder and the embedded engine, against
`transformers` on the same directory.

The engine computes the first SLIPSTREAM_SMOLLM2_LAYERS of its 30 layers (3), as it compiles each of them for a second."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.families import tensors
from slipstream.model.transformer.decoder import forward
from slipstream.model.tree import unflatten
from slipstream.types import Completion, Request, SamplingParams
from tests.real import smollm2_directory

pytestmark = pytest.mark.timeout(900)
"""135 million parameters in float32: seconds of work each, and minutes where the cores are shared."""

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in 1984, there was")
QUESTION = "What is 2+3?"
NEW_TOKENS = 8
NUM_LAYERS = int(os.environ.get("SLIPSTREAM_SMOLLM2_LAYERS", "3"))


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2_directory()


@pytest.fixture(scope="module")
def first_layers(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its other layers."""
    made, config = tmp_path_factory.mktemp("first-layers"), read_config(directory)
    config = replace(config, num_layers=NUM_LAYERS, layer_types=config.layer_types[:NUM_LAYERS])
    named = hf_weights.read_arrays(directory, read_config(directory))
    hf_weights.save(made, unflatten({spec.name: named[spec.name] for spec in tensors(config)}), config)
    for file in directory.iterdir():
        if file.suffix != ".safetensors" and not (made / file.name).exists():
            shutil.copy(file, made)
    return made


@dataclass
class Reference:
    """`transformers`: greedy completions of the prompts, and the raw logprobs that it gives to prompt and completion."""

    tokenizer: Any
    model: Any
    prompts: list[list[int]]
    completions: list[list[int]]
    logits: list[np.ndarray]
    """Logits of each prompt with its completion, `[tokens, vocab]`."""

    def logprobs(self, index: int) -> np.ndarray:
        """Logprobs of each token but the first."""
        tokens = np.asarray(self.prompts[index] + self.completions[index])
        logits = self.logits[index][:-1].astype(np.float64)
        peak = logits.max(-1, keepdims=True)
        normal = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        return np.take_along_axis(normal, tokens[1:, None], -1)[:, 0]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of torch wait for each other longer than they work."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_transformers(directory: Path) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    completions, logits = [], []
    with torch.no_grad():
        for prompt in prompts:
            completions.append(continued(model, prompt, NEW_TOKENS))
            logits.append(model(torch.tensor([prompt + completions[-1]])).logits[0].numpy())
    return Reference(tokenizer, model, prompts, completions, logits)


def continued(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return by_transformers(directory)


@pytest.fixture(scope="module")
def shallow(first_layers: Path) -> Reference:
    return by_transformers(first_layers)


@pytest.fixture(scope="module")
def engine(first_layers: Path) -> Iterator[tuple[EmbeddedEngine, asyncio.Runner]]:
    options = EmbeddedConfig(max_num_seqs=4, max_model_len=128)
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine.from_directory(first_layers, options=options)
        yield engine, runner
        runner.run(engine.close())


def generate(engine: tuple[EmbeddedEngine, asyncio.Runner], prompts: list[Any], **sampling: Any) -> list[Completion]:
    requests = [Request(str(i), prompt, SamplingParams(temperature=0, **sampling)) for i, prompt in enumerate(prompts)]

    async def collect() -> dict[str, Any]:
        return {o.request_id: o async for batch in engine[0].generate(requests) for o in batch}

    found = engine[1].run(collect())
    assert all(isinstance(outcome, Completion) for outcome in found.values()), found
    return [found[request.id] for request in requests]


def test_the_model_is_the_one_it_claims_to_be(directory: Path) -> None:
    config = read_config(directory)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 1e5, 1e-5)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    arrays = hf_weights.read_arrays(directory, config)
    assert sum(array.size for array in arrays.values()) == 134_515_008
    assert all(array.dtype == np.float32 for array in arrays.values())


def test_the_tokenizer_equals_smollms(reference: Reference) -> None:
    pieces = reference.tokenizer.convert_ids_to_tokens(reference.tokenizer.encode("In 1984, <|im_start|>it's"))
    assert pieces == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġ", "<|im_start|>", "it", "'s"]
    for text in (*PROMPTS, "naïve 東京 🙂\t\n  x"):
        assert reference.tokenizer.decode(reference.tokenizer.encode(text)) == text


def test_the_decoders_logits_equal_those_of_transformers(directory: Path, reference: Reference) -> None:
    params, config = hf_weights.load(directory), read_config(directory)
    sequences = [prompt + completion for prompt, completion in zip(reference.prompts, reference.completions)]
    longest = max(map(len, sequences))
    tokens = jnp.asarray([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    for ours, theirs in zip(np.asarray(forward(params, config, tokens)), reference.logits):
        np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=1e-3)


def test_the_engine_continues_as_transformers_does(engine: Any, shallow: Reference) -> None:
    for index, completion in enumerate(generate(engine, list(PROMPTS), max_tokens=NEW_TOKENS)):
        assert list(completion.prompt_token_ids) == shallow.prompts[index]
        assert list(completion.token_ids) == shallow.completions[index]
        expected = shallow.logprobs(index)[len(completion.prompt_token_ids) - 1 :]
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-4)


def test_it_answers_a_question_put_by_its_chat_template(engine: Any, shallow: Reference, reference: Reference) -> None:
    """With all of its layers. The engine says what transformers says with the first ones."""
    chat = [{"role": "user", "content": QUESTION}]
    prompt = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = reference.tokenizer.encode(prompt)
    answer = continued(reference.model, ids, 24)
    assert answer[-1] == reference.model.config.eos_token_id and "5" in reference.tokenizer.decode(answer), answer
    (found,) = generate(engine, [prompt], max_tokens=NEW_TOKENS)
    assert list(found.prompt_token_ids) == ids
    assert list(found.token_ids) == continued(shallow.model, ids, NEW_TOKENS)
