"""`slipstream plan --gpus N`: how many GPUs for the trainer, how many engines of which size, and what a step then takes.

Every split of the GPUs is tried with the cost model of `step_cost.py`; splits whose weights, training state or KV cache do not
fit are left out. Pure.

    batch = PlannedBatch(samples=1024, prompt_tokens=512, completion_tokens=2048, group=8)
    best, *others = choose_sizes(ModelShape.of(read_config("my-model")), batch, Cluster(64, HARDWARE["h200"]))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.advice import step_cost
from slipstream.deploy.advice.step_cost import Hardware, ModelShape, PlannedBatch, Rates, Work
from slipstream.deploy.advice.topology import TRAINER_BYTES, USABLE_MEMORY
from slipstream.errors import ConfigError

ITEM = 2
"""Bytes per parameter in engines: bfloat16."""
MAX_ROWS = 512
"""Sequences that an engine generates at a time, if they fit."""
MAX_TP = 64

_TRAIN = Rates(flop=3.44e-15, token=2.98e-6)
HARDWARE: Mapping[str, Hardware] = {
    "h200": Hardware(
        "NVIDIA H200, embedded engine",
        141e9,
        decode=Rates(layer=1e-4, byte=1 / 4.5e12, flop=1 / 600e12, token=1.6e-6),
        prefill=Rates(flop=1 / 494e12),
        train=_TRAIN,
        sync=Rates(step=1.22e-2, byte=1.89e-12),
    ),
    "h200-vllm": Hardware(
        "NVIDIA H200, vLLM",
        141e9,
        decode=Rates(layer=1e-4, byte=1 / 4.5e12, flop=1 / 600e12),
        prefill=Rates(flop=1 / 494e12),
        train=_TRAIN,
        sync=Rates(step=6.95e-3, byte=1.43e-12),
        host=Rates(step=1.7e-3, token=3.38e-5),
    ),
}
"""Fitted to benchmarks/results: decoding of 64 and 512 sequences and of groups (decode_gpu.json), syncs of 1.2B and 8B to vLLM
(weight_sync_gpu.json), syncs of 1.2B to the embedded engine (weight_sync_embedded_gpu.json) and what 8B took more, training
of 0.1B and 0.7B (plan_accuracy_gpu.json)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    gpus: int
    hardware: Hardware
    gpus_per_host: int = 8
    network: float = 50e9
    """Bytes per second and GPU between hosts."""

    def link(self, ranks: int) -> float:
        """Bytes per second and GPU between so many ranks of an engine or a trainer."""
        return self.hardware.link if ranks <= self.gpus_per_host else self.network

    @property
    def sync(self) -> Rates:
        local = self.hardware.sync
        return local if self.gpus <= self.gpus_per_host else local._replace(byte=max(local.byte, 1 / self.network))

    @property
    def usable_memory(self) -> float:
        return USABLE_MEMORY * self.hardware.memory


@dataclass(frozen=True, slots=True)
class Sizes:
    """A split of the GPUs, and the predicted step."""

    trainer_gpus: int
    engines: int
    tp: int
    rows: int
    """Sequences that an engine generates at a time."""
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    sync_seconds: float = 0.0
    step_seconds: float = 0.0
    bound: str = ""
    """What most of the step goes to."""

    @property
    def steps_per_day(self) -> float:
        return 86400 / self.step_seconds


def choose_sizes(shape: ModelShape, batch: PlannedBatch, cluster: Cluster, max_staleness: int = 1) -> list[Sizes]:
    """Return the best split of the cluster's GPUs for each tensor parallelism of engines, the fastest first.

    With `max_staleness` 0, generation and training alternate; else they overlap. On a single GPU they always alternate. Raises
    `ConfigError` if nothing fits."""
    if cluster.gpus < 1:
        raise ConfigError(f"a plan needs at least 1 GPU, got {cluster.gpus}")
    overlap = max_staleness > 0 and cluster.gpus > 1
    found = [predict(split, shape, batch, cluster, overlap) for split in _splits(shape, batch, cluster)]
    if not found:
        size, memory = shape.parameters, cluster.usable_memory
        least = math.ceil(TRAINER_BYTES * size / memory) + math.ceil(2 * ITEM * size / memory)
        needed = (
            f"at least {least:,} are needed" if least > cluster.gpus else "with a KV cache of one sequence beside it"
        )
        raise ConfigError(
            f"{size / 1e9:,.1f}B parameters do not fit {cluster.gpus} GPU(s) of {cluster.hardware.memory / 1e9:,.0f} GB: the "
            f"training state takes {TRAINER_BYTES * size / 1e9:,.0f} GB, an engine with an incoming version "
            f"{2 * ITEM * size / 1e9:,.0f} GB; {needed}"
        )
    best: dict[int, Sizes] = {}
    for sizes in found:  # the fastest for each size of an engine
        if sizes.tp not in best or sizes.step_seconds < best[sizes.tp].step_seconds:
            best[sizes.tp] = sizes
    return sorted(best.values(), key=lambda sizes: sizes.step_seconds)


def _splits(shape: ModelShape, batch: PlannedBatch, cluster: Cluster) -> Iterator[Sizes]:
    """What fits into memory: training state over the trainer's GPUs, and in engines two versions of the weights and at least
    one sequence."""
    size, gpus, memory = shape.parameters, cluster.gpus, cluster.usable_memory
    step = 1 if gpus <= 2 * cluster.gpus_per_host else cluster.gpus_per_host
    for trainer in range(step, gpus, step) if gpus > 1 else (1,):
        left, state = (gpus - trainer, 0.0) if gpus > 1 else (1, TRAINER_BYTES * size)
        for tp in (2**i for i in range(MAX_TP.bit_length()) if 2**i <= left and shape.heads % 2**i == 0):
            free = memory - state - 2 * ITEM * size / tp
            per_row = ITEM * shape.kv / min(tp, shape.kv_heads) * (batch.prompt_tokens + batch.completion_tokens)
            if TRAINER_BYTES * size / trainer <= memory and free >= per_row:
                yield Sizes(trainer, left // tp, tp, min(int(free / per_row), MAX_ROWS))


def predict(sizes: Sizes, shape: ModelShape, batch: PlannedBatch, cluster: Cluster, overlap: bool) -> Sizes:
    """Predict the step of a split."""
    hardware, tp, trainer = cluster.hardware, sizes.tp, sizes.trainer_gpus
    own = batch.share(sizes.engines)
    prompts, operations = step_cost.prefill_work(shape, own, ITEM)
    decode = step_cost.decode_work(shape, own, sizes.rows, ITEM) + prompts
    terms = dict(zip(step_cost.TERMS, hardware.decode.terms(_per_rank(decode, tp))))
    if tp > 1:  # two sums over the ranks per layer
        sent = 2 * ITEM * shape.hidden * decode.tokens * 2 * shape.layers / cluster.link(tp)
        terms["exchange between its ranks"] = 2 * decode.layers * hardware.collective + sent
    terms["computing prompts"] = hardware.prefill.seconds(operations) / tp
    host = hardware.host.seconds(decode)
    generate, reason = sum(terms.values()), max(terms, key=lambda term: terms[term])
    if host > generate:
        generate, reason = host, "the engine's own process"
    training = _per_rank(step_cost.train_work(shape, batch, TRAINER_BYTES), trainer)
    computing = hardware.train.seconds(training._replace(tokens=training.tokens / trainer))
    gathering = (
        3 * ITEM * shape.parameters / cluster.link(trainer) if trainer > 1 else 0.0
    )  # weights twice, gradients once
    train = max(computing, gathering)
    bound = f"generation: {reason}"
    if train > generate:
        bound = "training: computing" if computing >= gathering else "training: exchange between its ranks"
    # Every engine rank receives its share. On one host each engine reads the trainer's memory; between hosts, ranks broadcast.
    num_copies = sizes.engines if cluster.gpus <= cluster.gpus_per_host else 1
    busiest = max(1 / tp, num_copies / trainer) * ITEM * shape.parameters
    sync = cluster.sync.seconds(step_cost.sync_work(shape, busiest))
    busy = max(generate, train) if overlap else generate + train
    return dataclasses.replace(
        sizes,
        generate_seconds=generate,
        train_seconds=train,
        sync_seconds=sync,
        step_seconds=busy + sync,
        bound=bound if sync < busy else "the sync",
    )


def _per_rank(work: Work, ranks: int) -> Work:
    """Ranks share bytes and operations; each starts every layer."""
    return work._replace(bytes=work.bytes / ranks, flops=work.flops / ranks)


def hardware_named(name: str) -> Hardware:
    """Return known hardware, or read a file that `benchmarks/plan_accuracy.py` saved."""
    if name in HARDWARE:
        return HARDWARE[name]
    if Path(name).is_file():
        return Hardware.read(Path(name))
    known = ", ".join(HARDWARE)
    raise ConfigError(f"hardware must be one of {known}, or a file of benchmarks/plan_accuracy.py --save; got {name!r}")
