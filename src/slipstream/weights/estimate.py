"""`slipstream plan`: what a weight sync would cost, on paper, from a model's shape to 1T parameters on thousands of ranks.

Tensors of the same shape and split are moved alike, so one of each kind is planned for real, with the planner that syncs
use, and counted as often as it occurs. That makes the largest models a matter of a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.types import Box, Parameter, Part, TensorSpec
from slipstream.weights.families import family_tensors
from slipstream.weights.families.base import FamilyTensor
from slipstream.weights.layout import shape_of, shift, split, volume, whole
from slipstream.weights.plan import BUCKET_BYTES, DTYPE_BYTES, Source, make_plan


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that are moved alike."""

    shape: tuple[int, ...]
    split_dim: int | None
    units: int
    expert: bool = False
    """Whole experts can be shared out over ranks (expert parallelism)."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A mesh of `fsdp * tp` ranks. Tensor parallelism splits as in an engine; FSDP splits the largest dimension left."""

    fsdp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.fsdp * self.tp


@dataclass(frozen=True, slots=True)
class Fleet:
    """`replicas` engines of `tp` ranks each; with `ep`, a rank holds whole experts instead of a slice of each."""

    replicas: int = 1
    tp: int = 1
    ep: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one sync. A rank's figures are those of the busiest rank."""

    num_parameters: int
    model_bytes: int
    """In the engine's dtype, once."""
    engine_rank_bytes: int
    """That an engine rank receives: what it holds, and nothing else."""
    trainer_rank_bytes: int
    """That a trainer rank sends, to all replicas."""
    moves_per_engine_rank: int
    buckets_per_engine_rank: int
    total_bytes: int
    engine_extra_bytes: int
    """Beside the weights that serve: the image in which the next version lands."""

    def seconds(self, gigabytes_per_second: float) -> float:
        """At this speed per rank, each way, when all ranks are busy at once."""
        return max(self.engine_rank_bytes, self.trainer_rank_bytes) / gigabytes_per_second / 1e9


def kinds_of(tensors: Iterable[FamilyTensor]) -> Counter[Kind]:
    return Counter(Kind(t.shape, t.split_dim, t.units, ".experts." in t.name) for t in tensors)


def estimate(kinds: Mapping[Kind, int], trainer: Trainer, fleet: Fleet, dtype: str) -> Estimate:
    item = DTYPE_BYTES[dtype]
    received, moves, sent, elements = [0.0] * fleet.tp, [0.0] * fleet.tp, 0, 0
    for kind, count in kinds.items():
        box, name = whole(kind.shape), "w"
        source = Source(kind.shape, "float32", tuple(enumerate(_shards(kind, trainer))))
        spread = fleet.ep and kind.expert
        holders = [box] if spread else [_engine_box(kind, rank, fleet.tp) for rank in range(fleet.tp)]
        parameters = [Parameter(name, r, shape_of(b), (Part(name, b, shift(b, b)),)) for r, b in enumerate(holders)]
        plan = make_plan({name: source}, [TensorSpec(name, kind.shape)], parameters, dtype)
        elements += count * volume(box)
        sent += count * plan.num_bytes
        for rank in range(fleet.tp):
            incoming = plan.incoming[0 if spread else rank]
            share = count / fleet.tp if spread else count
            received[rank] += share * sum(map(plan.size_of, incoming))
            moves[rank] += share * len(incoming)
    most = round(max(received))
    return Estimate(
        num_parameters=elements,
        model_bytes=elements * item,
        engine_rank_bytes=most,
        # Of replicas the least busy sends, so that over many tensors the load is even.
        trainer_rank_bytes=-(-sent * fleet.replicas // trainer.num_ranks),
        moves_per_engine_rank=round(max(moves)),
        buckets_per_engine_rank=-(-most // BUCKET_BYTES),
        total_bytes=sent * fleet.replicas,
        engine_extra_bytes=most,
    )


def _engine_box(kind: Kind, rank: int, tp: int) -> Box:
    even = kind.split_dim is not None and kind.units % tp == 0
    return split(whole(kind.shape), kind.split_dim if even else None, rank, tp)


def _shards(kind: Kind, trainer: Trainer) -> list[Box]:
    """One per trainer rank; ranks that cannot split a tensor hold replicas of it."""
    found = []
    for rank in range(trainer.num_ranks):
        box = _engine_box(kind, rank % trainer.tp, trainer.tp)
        sizes = shape_of(box)
        dims = sorted((d for d in range(len(sizes)) if sizes[d] % trainer.fsdp == 0), key=lambda d: -sizes[d])
        found.append(
            split(box, dims[0] if dims else None, rank // trainer.tp, trainer.fsdp) if trainer.fsdp > 1 else box
        )
    return found


# --- shapes by name ---------------------------------------------------------------------------------------------------

_CONFIGS = {
    "llama-8b": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    ),
    "llama-70b": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=8192, intermediate_size=28_672,
        num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
    ),
    "qwen3-235b-a22b": ModelConfig(
        "qwen3_moe", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288,
        num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128,
        moe=MoeConfig(num_experts=128, experts_per_token=8, intermediate_size=1536),
    ),
}  # fmt: skip


def _kimi_k2() -> Counter[Kind]:
    """1.03T parameters: DeepSeek-V3's architecture (latent attention), 61 layers of which the first is dense, 384 experts."""
    hidden, layers, experts, inner, heads, vocab = 7168, 61, 384, 2048, 64, 163_840
    kinds: Counter[Kind] = Counter()
    kinds[Kind((vocab, hidden), 0, vocab)] += 2
    kinds[Kind((hidden,), None, 1)] += 2 * layers + 1
    kinds[Kind((1536, hidden), None, 1)] += layers  # q_a
    kinds[Kind((1536,), None, 1)] += layers
    kinds[Kind((heads * 192, 1536), 0, heads)] += layers  # q_b
    kinds[Kind((576, hidden), None, 1)] += layers  # kv_a
    kinds[Kind((512,), None, 1)] += layers
    kinds[Kind((heads * 256, 512), 0, heads)] += layers  # kv_b
    kinds[Kind((hidden, heads * 128), 1, heads)] += layers  # o
    kinds[Kind((18_432, hidden), 0, 18_432)] += 2
    kinds[Kind((hidden, 18_432), 1, 18_432)] += 1
    moe_layers = layers - 1
    kinds[Kind((experts, hidden), None, 1)] += moe_layers  # router
    kinds[Kind((experts,), None, 1)] += moe_layers
    for expert, number in ((True, experts), (False, 1)):  # routed, shared
        kinds[Kind((inner, hidden), 0, inner, expert)] += 2 * number * moe_layers
        kinds[Kind((hidden, inner), 1, inner, expert)] += number * moe_layers
    return kinds


def kinds_named(name: str) -> Counter[Kind] | None:
    """The shape of a model that is known by name, or None."""
    if name.lower() == "kimi-k2":
        return _kimi_k2()
    config = _CONFIGS.get(name.lower())
    return None if config is None else kinds_of(family_tensors(config))


def names() -> list[str]:
    return [*_CONFIGS, "kimi-k2"]


def parse_trainer(text: str) -> Trainer:
    """`fsdp=128,tp=8`."""
    facts = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in ("fsdp", "tp") or not equals or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"a trainer's mesh is written fsdp=N,tp=M; {part!r} is not part of one")
        facts[key] = int(value)
    return Trainer(**facts)
