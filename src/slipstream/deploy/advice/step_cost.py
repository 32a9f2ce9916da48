"""What generation, training and a sync take on given devices: the cost model behind `slipstream plan`.

A phase is counted as `Work` (steps, layers, bytes read, operations), from the model's shape and the batch alone. A device does
it at `Rates`, and the terms add up. `benchmarks/plan_accuracy.py` measures the rates of a host and compares predictions with
measurements that they were not fitted to. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.families import family_tensors

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes at a time."""


class Work(NamedTuple):
    """What a phase makes a device do."""

    steps: float
    layers: float
    """Layers started, over all steps; in a sync, tensors."""
    bytes: float
    """Bytes of weights and KV cache read, of training state updated, or sent."""
    flops: float
    tokens: float = 0.0
    """Tokens drawn, read from prompts, or trained on."""

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other)))


TERMS = ("a fixed cost per step", "starting layers", "memory bandwidth", "computing", "drawing tokens")
"""What a term of `Work` is called where it bounds a step."""


class Rates(NamedTuple):
    """Seconds per unit of `Work`."""

    step: float = 0.0
    layer: float = 0.0
    byte: float = 0.0
    flop: float = 0.0
    token: float = 0.0

    def terms(self, work: Work) -> tuple[float, ...]:
        return tuple(rate * amount for rate, amount in zip(self, work))

    def seconds(self, work: Work) -> float:
        return sum(self.terms(work))


NONE = Rates()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one device and an engine on it do, measured. What is assumed says so."""

    name: str
    memory: float
    """Bytes."""
    decode: Rates
    prefill: Rates
    """Rates of the tokens of prompts and their operations; all else of a prefill is at the rates of decoding."""
    train: Rates
    sync: Rates
    """Rates of a sync within the host."""
    host: Rates = NONE
    """Rates of the engine's own process, which works beside the device: the slower of both bounds decoding."""
    link: float = 300e9
    """Bytes per second between the ranks of an engine or of a trainer. Assumed: NVLink."""
    collective: float = 20e-6
    """Seconds of latency of a collective operation between the ranks of an engine. Assumed."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what `benchmarks/plan_accuracy.py --save` wrote."""
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            return cls(**found | {name: Rates(**found[name]) for name in RATES})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file} does not hold rates of hardware (benchmarks/plan_accuracy.py --save): {error}"
            ) from None

    def save(self, file: Path) -> None:
        rates = {name: getattr(self, name)._asdict() for name in RATES}
        file.write_text(json.dumps(dataclasses.asdict(self) | rates, indent=2) + "\n")


RATES = ("decode", "prefill", "train", "sync", "host")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a model depends on."""

    parameters: float
    active: float
    """Parameters that a token is multiplied with: without the input embedding, and of the experts those it is sent to."""
    expert_parameters: float
    experts: int
    experts_per_token: int
    layers: int
    hidden: int
    kv: float
    """Elements of keys and values per token."""
    attention: float
    """Operations per pair of a token and one that it attends to."""
    num_tensors: int
    kv_heads: int
    """Engines of more ranks than this hold keys and values several times."""
    heads: int
    """The ranks of an engine divide them evenly."""

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        tensors = family_tensors(config)
        sizes = [(math.prod(t.shape), ".experts." in t.name) for t in tensors]
        total, experts = sum(size for size, _ in sizes), sum(size for size, is_expert in sizes if is_expert)
        share = config.moe.experts_per_token / config.moe.num_experts if config.moe else 1.0
        lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        return cls(
            parameters=total,
            active=total - lookup - (1 - share) * experts,
            expert_parameters=experts,
            experts=config.moe.num_experts if config.moe else 1,
            experts_per_token=config.moe.experts_per_token if config.moe else 1,
            layers=config.num_layers,
            hidden=config.hidden_size,
            kv=2 * config.num_layers * config.num_kv_heads * config.head_dim,
            attention=4 * config.num_layers * config.num_heads * config.head_dim,
            num_tensors=len(tensors),
            kv_heads=config.num_kv_heads,
            heads=config.num_heads,
        )

    def read_parameters(self, rows: float) -> float:
        """Parameters read in a step with this many rows: those of the experts that at least one row is sent to."""
        unused = (1 - self.experts_per_token / self.experts) ** rows if self.experts > 1 else 0.0
        return self.parameters - unused * self.expert_parameters


KIMI_K2 = ModelShape(1.03e12, 32e9, 1.01e12, 384, 8, 61, 7168, 61 * 576, 61 * 64 * 2 * (192 + 128), 92_000, 1, 64)
"""Its published sizes; our decoder does not know its architecture."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The samples of a step: `samples` completions of `completion_tokens` each, `group` of them per prompt."""

    samples: int
    prompt_tokens: int
    completion_tokens: int
    group: int = 1

    @property
    def tokens(self) -> int:
        return self.samples * (self.prompt_tokens + self.completion_tokens)

    def share(self, parts: int) -> PlannedBatch:
        """The largest part, if the samples are dealt to `parts` engines or ranks."""
        return dataclasses.replace(self, samples=-(-self.samples // parts))


def decode_work(shape: ModelShape, batch: PlannedBatch, rows: int, item: int) -> Work:
    """The decode steps of a batch, `rows` samples at a time, with `item` bytes per parameter and element of the KV cache."""
    steps = batch.completion_tokens * max(batch.samples / rows, 1.0)
    busy = min(rows, batch.samples)
    context = batch.prompt_tokens + batch.completion_tokens / 2
    read = shape.read_parameters(busy) + busy * context * shape.kv
    flops = steps * busy * _flops(shape, context)
    return Work(steps, steps * shape.layers, steps * item * read, flops, steps * busy)


def prefill_work(shape: ModelShape, batch: PlannedBatch, item: int) -> tuple[Work, Work]:
    """The prompts of a batch, in two parts: what is done at the rates of decoding, and their tokens and operations. The samples
    of a group find their prompt in the prefix cache."""
    tokens = -(-batch.samples // batch.group) * batch.prompt_tokens
    steps = max(tokens / PREFILL_TOKENS, 1.0)
    flops = tokens * _flops(shape, batch.prompt_tokens / 2)
    return Work(steps, steps * shape.layers, steps * item * shape.parameters, 0), Work(0, 0, 0, flops, tokens)


def train_work(shape: ModelShape, batch: PlannedBatch, state_bytes: int) -> Work:
    """A training step: the forward pass, twice that for the backward pass, and an update of `state_bytes` per parameter."""
    length = batch.prompt_tokens + batch.completion_tokens
    flops = 3 * batch.tokens * _flops(shape, length / 2)
    return Work(1, 3 * shape.layers, state_bytes * shape.parameters, flops, batch.tokens)


def sync_work(shape: ModelShape, num_bytes: float) -> Work:
    return Work(1, shape.num_tensors, num_bytes, 0)


def _flops(shape: ModelShape, context: float) -> float:
    """Operations per token that attends to `context` others."""
    return 2 * shape.active + shape.attention * context
