"""The models and cases of `decode.py`, by the name of their workload. Models have random weights.

`rollouts`: batches of random prompts; on CPU, groups with long-tailed lengths, as in a training run.

`nano`: the workload of nano-vllm's `bench.py`, drawn in its order from its seed: 256 sequences, prompts and completions of 100
to 1,024 tokens, temperature 0.6, in all 133,966 tokens, with the shape of Qwen3-0.6B. On CPU 16 sequences, ten times shorter,
and a tiny shape.

`experts`: Qwen3-MoE with 8 of 64 experts; on GPU eight layers of Qwen3-30B-A3B with half of its experts.

`speculative`: greedy decoding of 1, 4 and 8 sequences. Random weights either fall into a loop, where any guess is right, or
never repeat anything. Instead, the weights prescribe the text (`write_walking_model`): each token has one successor. The prompt
contains 48 of every 64 tokens of its answer, as when code is edited or a document is quoted. So prompt lookup guesses these
and fails at the rest. The draft model is the target's first layer; it has other successors for one token in five. Every
side has to return the same tokens, so neither luck nor rounding decides what is accepted. vLLM also counts draft tokens
beyond the end of a completion."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from decode_job import BLOCK, QUOTED, Case, walk

from slipstream.model import families
from slipstream.model.checkpoints import hf_weights
from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.tree import unflatten


@dataclass(frozen=True)
class Workload:
    model: ModelConfig
    cases: list[Case]
    num_ids: int = 0
    """Prompts consist of token ids below this; 0 for the model's vocabulary."""
    draft: ModelConfig | None = None
    """The draft model of a workload that walks."""


def rollouts(on_gpu: bool, small: bool) -> Workload:
    if on_gpu:
        shrink = 16 if small else 1
        lengths = [256 // shrink] * (512 // shrink)
        groups = Case("groups", lengths, prompt_lengths=[1024 // shrink] * (len(lengths) // 8))
        return Workload(gpu_model(small), [*(batch(n, 256, shrink) for n in (512, 64, 1024)), groups])
    shrink = 8 if small else 1
    lengths = long_tail(64, low=16 // shrink, high=256 // shrink, typical=45 / shrink)
    return Workload(cpu_model(small), [Case("groups", lengths, prompt_lengths=[128 // shrink] * 8)])


def nano(on_gpu: bool, small: bool) -> Workload:
    model = ModelConfig(
        "qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
        head_dim=128, rope_theta=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    tiny = replace(
        model, vocab_size=16_384, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64
    )  # fmt: skip
    full = on_gpu and not small
    prompt_lengths, lengths = nano_lengths(256, 100, 1024) if full else nano_lengths(16, 10, 102)
    case = Case(
        "nano" if full else "nano scaled down", lengths, prompt_lengths, temperature=0.6, goal=2.0 if full else None
    )
    bare = replace(case, name=f"{case.name} without vLLM's logprobs", logprobs=False)
    return Workload(model if full else tiny, [case, bare], num_ids=NANO_IDS)


NANO_IDS = 10_001


def nano_lengths(count: int, low: int, high: int) -> tuple[list[int], list[int]]:
    """Return the lengths of prompts and completions as nano-vllm draws them: for each prompt its length and then its tokens;
    after all of these the lengths of the completions."""
    source = random.Random(0)
    prompts = [[source.randint(0, NANO_IDS - 1) for _ in range(source.randint(low, high))] for _ in range(count)]
    return [len(prompt) for prompt in prompts], [source.randint(low, high) for _ in range(count)]


def experts(on_gpu: bool, small: bool) -> Workload:
    full = on_gpu and not small
    hidden, inner, layers = (2048, 768, 8) if full else (128, 32, 2) if small else (512, 192, 4)
    model = ModelConfig(
        "qwen3_moe", vocab_size=151_936 if full else 4096, hidden_size=hidden, intermediate_size=6144 if full else 512,
        num_layers=layers, num_heads=hidden // 64, num_kv_heads=4 if full else 2, head_dim=128 if full else 64, rope_theta=1e6,
        moe=MoeConfig(num_experts=64, experts_per_token=8, intermediate_size=inner),
    )  # fmt: skip
    batches = [batch(512, 256), batch(64, 256)] if full else [batch(8, 32)]
    return Workload(model, [replace(case, goal=None if small else 1.0) for case in batches])


def speculative(on_gpu: bool, small: bool) -> Workload:
    model = replace(
        gpu_model(small) if on_gpu else cpu_model(small),
        vocab_size=4096 if small else 32_000,
        tie_word_embeddings=False,
    )
    length = BLOCK * (2 if small else 8 if on_gpu else 4)
    prompt_length = length * QUOTED // BLOCK + 1
    cases = [
        Case(str(n), [length] * n, [prompt_length] * n, temperature=0.0, walks=True)
        for n in ((1, 8) if small else (1, 4, 8))
    ]
    return Workload(model, cases, draft=replace(model, num_layers=1))


WORKLOADS: dict[str, Callable[[bool, bool], Workload]] = {
    "rollouts": rollouts,
    "nano": nano,
    "experts": experts,
    "speculative": speculative,
}


# --- shapes -----------------------------------------------------------------------------------------------------------


def cpu_model(small: bool) -> ModelConfig:
    shape = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return replace(shape, vocab_size=4096, num_layers=2) if small else shape


def gpu_model(small: bool) -> ModelConfig:
    shape = ModelConfig(
        "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return replace(shape, vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=2) if small else shape


def batch(count: int, length: int, shrink: int = 1) -> Case:
    """Prompts and completions of the same length."""
    lengths = [length // shrink] * (count // shrink)
    return Case(str(count), lengths, lengths)


def long_tail(count: int, low: int, high: int, typical: float) -> list[int]:
    """Return lognormal lengths within bounds, from a fixed seed; the mean is about 1.4 × `typical`."""
    source = random.Random(0)
    return [min(high, max(low, round(typical * source.lognormvariate(0.0, 0.85)))) for _ in range(count)]


# --- weights ----------------------------------------------------------------------------------------------------------


def random_weights(config: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
    """Return random weights of standard deviation 0.019, by name.

    Drawing gigabytes from a normal distribution would take longer than the benchmark. Instead, sign, mantissa and the
    lowest bit of the exponent are random bits, which gives magnitudes from 2⁻⁷ to 2⁻⁵."""
    source = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    bits = np.dtype(f"u{kind.itemsize}")
    random_part = (np.iinfo(bits).max >> 8) | (1 << (8 * bits.itemsize - 1))
    exponent = 0x3C << (8 * bits.itemsize - 8)
    arrays = {}
    for spec in families.tensors(config):
        if len(spec.shape) == 1:
            arrays[spec.name] = np.ones(spec.shape, kind)
        else:
            drawn = np.frombuffer(source.bytes(kind.itemsize * int(np.prod(spec.shape))), bits)
            arrays[spec.name] = ((drawn & bits.type(random_part)) | bits.type(exponent)).view(kind).reshape(spec.shape)
    return arrays


def write_model(directory: Path, config: ModelConfig, dtype: str) -> None:
    hf_weights.save(directory, unflatten(random_weights(config, dtype)), config)


LAYER_SCALE = 2.0**-8
"""Factor of what layers add to the residual stream of a walking model. Random layers then add half of an embedding's size at
most, which cannot change the likeliest token."""
DRAFT_ERRORS = 0.2


def write_walking_model(
    directory: Path, config: ModelConfig, draft: Path, draft_config: ModelConfig, dtype: str
) -> None:
    """Write a model whose greedy completions follow `walk`, and a draft model of its first layers.

    The row of the head for a token is the embedding of the token before it. Layers add little to the embedding, and are as
    much work as any. The draft model has the same embedding; in its head, the rows of one token in five are exchanged."""
    arrays = random_weights(config, dtype)
    for name, array in arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            arrays[name] = array * array.dtype.type(LAYER_SCALE)
    order, embedding = np.array(walk(config.vocab_size)), arrays["model.embed_tokens.weight"]
    head = np.empty_like(embedding)
    head[np.roll(order, -1)] = embedding[order]
    hf_weights.save(directory, unflatten(arrays | {"lm_head.weight": head}), config)

    exchanged = np.random.default_rng(1).choice(config.vocab_size, int(DRAFT_ERRORS * config.vocab_size), replace=False)
    head[exchanged] = head[np.roll(exchanged, 1)]
    kept = {spec.name: arrays[spec.name] for spec in families.tensors(draft_config)}
    hf_weights.save(draft, unflatten(kept | {"lm_head.weight": head}), draft_config)


def num_parameters(config: ModelConfig) -> int:
    return sum(int(np.prod(spec.shape)) for spec in families.tensors(config))
