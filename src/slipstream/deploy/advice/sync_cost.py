"""`slipstream plan`: the predicted cost of a weight sync, for models up to 1T parameters on thousands of ranks.

Tensors with the same shape and sharding move in the same way. So one tensor of each kind is planned with the planner that
syncs use, and counted as often as it occurs. Even the largest models take about a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig, MoeConfig
from slipstream.model.families import family_tensors
from slipstream.model.families.family import FamilyTensor
from slipstream.tensors.boxes import full_box, shape_of, shift, split, volume
from slipstream.types import Box, Parameter, ParameterPart, TensorSpec
from slipstream.weights.checksum import CHUNK_BYTES
from slipstream.weights.plan import BUCKET_BYTES, DTYPE_BYTES, SourceTensor, make_plan


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape and sharding that a group of tensors shares."""

    shape: tuple[int, ...]
    split_dim: int | None
    units: int
    expert: bool = False
    """Part of an expert; expert parallelism distributes whole experts over ranks."""


@dataclass(frozen=True, slots=True)
class TrainerMesh:
    """A mesh of `fsdp * tp` trainer ranks. Tensor parallelism shards as in an engine; FSDP shards the largest remaining
    dimension."""

    fsdp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.fsdp * self.tp


@dataclass(frozen=True, slots=True)
class FleetShape:
    """`replicas` engines of `tp` ranks each. With `ep`, a rank holds whole experts instead of a slice of each."""

    replicas: int = 1
    tp: int = 1
    ep: bool = False


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Bytes of one sync. Figures per rank are those of the busiest rank."""

    num_parameters: int
    model_bytes: int
    """Size of one copy of the model in the engine's dtype."""
    engine_rank_bytes: int
    """Bytes received by an engine rank: exactly what it holds. The incoming version needs as much memory again."""
    trainer_rank_bytes: int
    """Bytes sent by a trainer rank over the network: once, whatever the number of replicas, which pass them on."""
    moves_per_engine_rank: int
    buckets_per_engine_rank: int
    total_bytes: int
    """Bytes received by all engines."""
    num_hops: int = 0
    """Length of the chain of replicas, behind the first."""

    def seconds(self, gigabytes_per_second: float, num_copies: int = 1) -> float:
        """Return the duration at this speed per rank and direction, with all ranks transferring at once, and replicas passing
        on each chunk as it arrives. A transport without that sends `num_copies`."""
        chain = self.num_hops * CHUNK_BYTES if num_copies == 1 else 0
        busiest = max(self.engine_rank_bytes, num_copies * self.trainer_rank_bytes)
        return (busiest + chain) / gigabytes_per_second / 1e9


def kinds_of(tensors: Iterable[FamilyTensor]) -> Counter[TensorKind]:
    return Counter(TensorKind(t.shape, t.split_dim, t.units, ".experts." in t.name) for t in tensors)


def estimate(kinds: Mapping[TensorKind, int], trainer: TrainerMesh, fleet: FleetShape, dtype: str) -> SyncCost:
    item = DTYPE_BYTES[dtype]
    received, moves, sent, elements = [0.0] * fleet.tp, [0.0] * fleet.tp, 0, 0
    for kind, count in kinds.items():
        box, name = full_box(kind.shape), "w"
        source = SourceTensor(kind.shape, "float32", tuple(enumerate(_shards(kind, trainer))))
        spread = fleet.ep and kind.expert
        holders = [box] if spread else [_engine_box(kind, rank, fleet.tp) for rank in range(fleet.tp)]
        parameters = [
            Parameter(name, r, shape_of(b), (ParameterPart(name, b, shift(b, b)),)) for r, b in enumerate(holders)
        ]
        plan = make_plan({name: source}, [TensorSpec(name, kind.shape)], parameters, dtype)
        elements += count * volume(box)
        sent += count * plan.num_bytes
        for rank in range(fleet.tp):
            incoming = plan.incoming[0 if spread else rank]
            share = count / fleet.tp if spread else count
            received[rank] += share * sum(map(plan.size_of, incoming))
            moves[rank] += share * len(incoming)
    most = round(max(received))
    return SyncCost(
        num_parameters=elements,
        model_bytes=elements * item,
        engine_rank_bytes=most,
        # Among ranks that hold the same shard the least busy sends, so the load is even over many tensors.
        trainer_rank_bytes=-(-sent // trainer.num_ranks),
        moves_per_engine_rank=round(max(moves)),
        buckets_per_engine_rank=-(-most // BUCKET_BYTES),
        total_bytes=sent * fleet.replicas,
        num_hops=fleet.replicas - 1,
    )


def _engine_box(kind: TensorKind, rank: int, tp: int) -> Box:
    even = kind.split_dim is not None and kind.units % tp == 0
    return split(full_box(kind.shape), kind.split_dim if even else None, rank, tp)


def _shards(kind: TensorKind, trainer: TrainerMesh) -> list[Box]:
    """Return one box per trainer rank. Ranks that cannot shard a tensor hold replicas of it."""
    boxes = []
    for rank in range(trainer.num_ranks):
        box = _engine_box(kind, rank % trainer.tp, trainer.tp)
        sizes = shape_of(box)
        dims = sorted((d for d in range(len(sizes)) if sizes[d] % trainer.fsdp == 0), key=lambda d: -sizes[d])
        boxes.append(
            split(box, dims[0] if dims else None, rank // trainer.tp, trainer.fsdp) if trainer.fsdp > 1 else box
        )
    return boxes


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


def _kimi_k2() -> Counter[TensorKind]:
    """Return the kinds of Kimi K2, 1.03T parameters: DeepSeek-V3's architecture (latent attention), 61 layers of which the
    first is dense, 384 experts."""
    hidden, layers, experts, inner, heads, vocab = 7168, 61, 384, 2048, 64, 163_840
    kinds: Counter[TensorKind] = Counter()
    kinds[TensorKind((vocab, hidden), 0, vocab)] += 2
    kinds[TensorKind((hidden,), None, 1)] += 2 * layers + 1
    kinds[TensorKind((1536, hidden), None, 1)] += layers  # q_a
    kinds[TensorKind((1536,), None, 1)] += layers
    kinds[TensorKind((heads * 192, 1536), 0, heads)] += layers  # q_b
    kinds[TensorKind((576, hidden), None, 1)] += layers  # kv_a
    kinds[TensorKind((512,), None, 1)] += layers
    kinds[TensorKind((heads * 256, 512), 0, heads)] += layers  # kv_b
    kinds[TensorKind((hidden, heads * 128), 1, heads)] += layers  # o
    kinds[TensorKind((18_432, hidden), 0, 18_432)] += 2
    kinds[TensorKind((hidden, 18_432), 1, 18_432)] += 1
    moe_layers = layers - 1
    kinds[TensorKind((experts, hidden), None, 1)] += moe_layers  # router
    kinds[TensorKind((experts,), None, 1)] += moe_layers
    for expert, number in ((True, experts), (False, 1)):  # routed, shared
        kinds[TensorKind((inner, hidden), 0, inner, expert)] += 2 * number * moe_layers
        kinds[TensorKind((hidden, inner), 1, inner, expert)] += number * moe_layers
    return kinds


def kinds_named(name: str) -> Counter[TensorKind] | None:
    """Return the kinds of tensors of a model known by name, or None."""
    if name.lower() == "kimi-k2":
        return _kimi_k2()
    config = config_named(name)
    return None if config is None else kinds_of(family_tensors(config))


def config_named(name: str) -> ModelConfig | None:
    """Return the config of a model known by name, or None."""
    return _CONFIGS.get(name.lower())


def names() -> list[str]:
    return [*_CONFIGS, "kimi-k2"]


def parse_trainer(text: str) -> TrainerMesh:
    """Parse a mesh such as `fsdp=128,tp=8`."""
    sizes = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in ("fsdp", "tp") or not equals or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"a trainer mesh is written fsdp=N,tp=M; got {part!r}")
        sizes[key] = int(value)
    return TrainerMesh(**sizes)
