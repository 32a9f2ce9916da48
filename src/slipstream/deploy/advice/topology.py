"""`slipstream plan`: recommend a topology and a transport for a model, its machines and the workload of an iteration.

An ordered list of rules decides; the first that applies wins, and its reason is reported. A simple cost model then predicts the
duration of an iteration, without pipeline bubbles, stragglers or reward functions. Its constants are measured: each names
its file in `benchmarks/results`. The few that are assumed say so. Known speeds replace them (`tokens_per_second=…`,
`train_tokens_per_second=…`). The module has no side effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from slipstream.config import Settings
from slipstream.deploy.advice.sync_cost import FleetShape, SyncCost, TrainerMesh
from slipstream.errors import ConfigError

Topology: TypeAlias = Literal["in-process", "one machine", "fan-out", "ray"]

# --- what was measured ------------------------------------------------------------------------------------------------

DECODE = {"cpu": 1.55e10, "gpu": 7.35e13}
"""Generated tokens per second times model parameters for one engine: 2 cores with 135M parameters (decode_cpu.json), one
H200 with 1.24B in bfloat16 and 512 sequences (decode_gpu.json)."""
TRAIN_COST = 1.35
"""Cost of training on a token relative to generating one, on CPU (loop.json)."""
TRAIN_GPU = 0.4 * 989e12 / 6
"""Trained tokens per second times parameters for one GPU. Assumed, not measured: 6 operations per parameter and token at
40 % of an H200's 989 TFLOP/s."""
SYNC = {
    "memory": (0.0045, 14.8),
    "shm": (0.0092, 3.52),
    "tcp": (0.0082, 2.07),
    "cuda": (0.00911, 1739.0),
    "nccl": (0.0284, 60.3),
    "vllm-nccl": (0.0, 43.6),
}
"""Fixed seconds per sync, and GB/s: in-process (loop.json, and the copy in weight_sync.json), shared memory and TCP with
checksums (weight_sync.json), from a JAX trainer into vLLM on one H200 (weight_sync_gpu.json)."""
PASSED_ON = ("tcp", "nccl")
"""Transports over which replicas get the same bytes from each other, or by broadcast."""
DISK_GBPS = 1.0
"""Speed of writing and of reading a checkpoint. Assumed: disks and network file systems vary widely."""
REQUEST_SECONDS = {"in-process": 0.000191, "one machine": 0.000307, "fan-out": 0.000307, "ray": 0.000307}
"""Overhead per request in a batch of 64 one-token requests, in-process and through the gateway (topologies.json)."""
SEPARATE_PROCESS = 1.10
"""Duration of a step with the engine in another process relative to one in the same process, on two cores (loop.json)."""
OVERLAP = 2.07
"""Speed-up by asynchronous rollouts on two cores shared by trainer and engine (async_rl.json)."""

TRAINER_BYTES = 16
"""Bytes of training state per parameter: float32 weights, gradients and two Adam moments. Activations are not included."""
USABLE_MEMORY = 0.85
"""Fraction of device memory available to weights and training state; the rest is for KV cache and activations."""


# --- scenario and recommendation --------------------------------------------------------------------------------------


class Workload(Settings):
    """The hardware, and the work of an iteration: `prompts` groups of samples, a training step, and an occasional sync."""

    device: Literal["cpu", "gpu"] = "cpu"
    hosts: PositiveInt = 1
    devices: PositiveInt = 1
    """Accelerators per host; 1 for a CPU."""
    cores: PositiveInt = 2
    """CPU cores per host."""
    memory_gb: NonNegativeFloat = 0.0
    """Memory per device; 0 means 16 for a CPU and 141 for a GPU (H200)."""
    network_gbps: NonNegativeFloat = 5.0
    """Network speed between two hosts in GB/s; 0 if trainer and engines cannot reach each other."""
    engine: Literal["embedded", "vllm"] = "embedded"
    servers: bool = False
    """Use running vLLM servers as engines."""
    ray: bool = False
    """The hosts form a Ray cluster, or hosts come and go."""
    prompts: PositiveInt = 32
    group: PositiveInt = 8
    prompt_tokens: PositiveInt = 128
    tokens: PositiveInt = 256
    """Mean completion length."""
    sync_every: PositiveInt = 1
    """Iterations per weight sync."""
    max_staleness: NonNegativeInt = 0
    """Maximum policy lag in versions: 0 alternates generation and training, more overlaps them."""
    active_billions: NonNegativeFloat = 0.0
    """Active parameters per token of a mixture of experts; 0 means all."""
    tokens_per_second: NonNegativeFloat = 0.0
    """Measured generation speed of all engines together, if known."""
    train_tokens_per_second: NonNegativeFloat = 0.0
    """Measured training speed, if known."""

    @property
    def memory(self) -> float:
        """Memory of a device in bytes."""
        return 1e9 * (self.memory_gb or {"cpu": 16.0, "gpu": 141.0}[self.device])

    @property
    def num_samples(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended setup, the reasons for it, and the predicted duration of an iteration."""

    topology: Topology
    transport: str
    reasons: tuple[str, ...]
    """Why this topology, why this transport, then further notes."""
    generate_seconds: float
    train_seconds: float
    sync_seconds: float
    """Duration of one sync, which happens every `sync_every` iterations."""
    iteration_seconds: float

    @property
    def iterations_per_day(self) -> float:
        return 86400 / self.iteration_seconds


@dataclass(frozen=True, slots=True)
class Scenario:
    cost: SyncCost
    trainer: TrainerMesh
    fleet: FleetShape
    work: Workload

    @property
    def num_engine_ranks(self) -> int:
        return self.fleet.replicas * self.fleet.tp

    @property
    def is_shared(self) -> bool:
        """Whether trainer and engines must share devices, because there are too few for both."""
        num_ranks = self.trainer.num_ranks + self.num_engine_ranks
        return not self.work.servers and num_ranks > self.work.hosts * self.work.devices

    @property
    def trainer_bytes(self) -> float:
        """Training state per device."""
        return TRAINER_BYTES * self.cost.num_parameters / self.trainer.num_ranks

    @property
    def engine_bytes(self) -> int:
        """Weights per device, plus memory for the incoming version. On a GPU, vLLM on the trainer's host and an engine in the
        trainer's process need none of the latter."""
        is_mapped = (
            self.work.device == "gpu" and self.work.hosts == 1 and (self.work.engine == "vllm" or self.is_shared)
        )
        return self.cost.engine_rank_bytes * (1 if is_mapped else 2)

    @property
    def fits_together(self) -> bool:
        return self.trainer_bytes + self.engine_bytes <= USABLE_MEMORY * self.work.memory


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdviceRule:
    applies: Callable[[Scenario], bool]
    answer: str
    why: str


TOPOLOGIES = (
    AdviceRule(lambda q: q.work.servers, "fan-out", "the engines are running servers, each at its own address"),
    AdviceRule(
        lambda q: q.work.hosts > 1 and q.work.ray,
        "ray",
        "several hosts with a Ray cluster: Ray places the engines and restarts those that die with their host",
    ),
    AdviceRule(
        lambda q: q.work.hosts > 1,
        "fan-out",
        "several hosts: every engine connects to one gateway, which distributes the requests",
    ),
    AdviceRule(
        lambda q: q.work.engine == "vllm",
        "one machine",
        "vLLM runs in its own process and environment",
    ),
    AdviceRule(
        lambda q: not q.is_shared,
        "one machine",
        "there are enough devices for trainer and engines, each in its own process",
    ),
    AdviceRule(
        lambda q: not q.fits_together,
        "one machine",
        "trainer and engine do not fit into a device's memory together, so they alternate: bridge.sleep before the training "
        "step, bridge.wake after it",
    ),
    AdviceRule(
        lambda q: q.work.device == "cpu" and q.work.cores > 1 and q.work.max_staleness > 0,
        "one machine",
        f"with asynchronous rollouts, engines in other processes generate while the trainer trains: {OVERLAP:g} times as fast "
        "on two shared cores",
    ),
    AdviceRule(
        lambda q: True,
        "in-process",
        f"trainer and engine share a device and alternate: a separate process would add {SEPARATE_PROCESS - 1:.0%} to a step "
        "without a benefit",
    ),
)

TRANSPORTS = (
    AdviceRule(lambda q: q.work.servers, "vllm-nccl", "a vLLM server receives weights over NCCL"),
    AdviceRule(
        lambda q: q.work.hosts > 1 and q.work.engine == "vllm",
        "nccl",
        "from GPU to GPU over the network, bypassing host memory",
    ),
    AdviceRule(
        lambda q: q.work.hosts > 1 and q.work.network_gbps == 0,
        "disk",
        "trainer and engines cannot reach each other, so weights go through a checkpoint that both can access",
    ),
    AdviceRule(
        lambda q: q.work.hosts > 1, "tcp", "every engine rank receives exactly its bytes over its own connection"
    ),
    AdviceRule(
        lambda q: _first(TOPOLOGIES, q).answer == "in-process", "memory", "the engine reads the trainer's arrays"
    ),
    AdviceRule(
        lambda q: q.work.device == "gpu" and q.work.engine == "vllm",
        "cuda",
        "vLLM on the same host maps the trainer's GPU memory, so nothing is sent",
    ),
    AdviceRule(lambda q: True, "shm", "shared memory: one copy, directly into the engine's weights"),
)


def choose(scenario: Scenario) -> Recommendation:
    """Recommend a setup. Raise `ConfigError` for one that cannot work, with a change that would make it work."""
    _check(scenario)
    topology, transport = _first(TOPOLOGIES, scenario), _first(TRANSPORTS, scenario)
    name: Topology = topology.answer  # type: ignore[assignment]
    return _predict(scenario, name, transport.answer, (topology.why, transport.why, *_notes(scenario)))


def _first(rules: tuple[AdviceRule, ...], scenario: Scenario) -> AdviceRule:
    return next(rule for rule in rules if rule.applies(scenario))


def _check(q: Scenario) -> None:
    if (q.work.servers or (q.work.hosts > 1 and q.work.engine == "vllm")) and (
        q.work.device == "cpu" or q.work.network_gbps == 0
    ):
        what = "a vLLM server" if q.work.servers else "vLLM on another host"
        lacking = "there is no GPU" if q.work.device == "cpu" else "the GPUs cannot reach each other (network_gbps=0)"
        raise ConfigError(
            f"{what} receives weights over NCCL only, from GPU to GPU, but {lacking}; embedded engines (engine=embedded "
            "servers=false) receive them over TCP or from a checkpoint"
        )
    memory = USABLE_MEMORY * q.work.memory
    if q.trainer_bytes > memory:
        ranks = math.ceil(TRAINER_BYTES * q.cost.num_parameters / memory)
        raise ConfigError(
            f"the training state is {q.trainer_bytes / 1e9:,.0f} GB per device, which is more than {USABLE_MEMORY:.0%} of its "
            f"{q.work.memory / 1e9:,.0f} GB; shard it over at least {ranks} devices (--trainer fsdp={ranks})"
        )
    if not q.work.servers and q.engine_bytes > memory:
        raise ConfigError(
            f"an engine needs {q.engine_bytes / 1e9:,.0f} GB per device for weights (including the incoming version, unless it "
            f"is mapped), which is more than {USABLE_MEMORY:.0%} of its {q.work.memory / 1e9:,.0f} GB; shard it over more "
            f"devices (--tp {2 * q.fleet.tp})"
        )
    devices = q.work.hosts * q.work.devices
    if q.trainer.num_ranks > devices or (not q.work.servers and q.num_engine_ranks > devices):
        raise ConfigError(
            f"the trainer has {q.trainer.num_ranks} rank(s) and the engines {q.num_engine_ranks}, but there are {devices} "
            f"device(s): {q.work.hosts} host(s) of {q.work.devices} (hosts=… devices=…)"
        )


def _notes(q: Scenario) -> list[str]:
    notes = []
    if q.work.hosts > 1 and q.is_shared:
        notes.append("trainer and engines share devices and alternate: bridge.sleep and bridge.wake")
    if q.work.max_staleness == 0 and not q.is_shared:
        notes.append("with max_staleness=1 engines would generate while the trainer trains")
    return notes


# --- costs ------------------------------------------------------------------------------------------------------------


def _predict(q: Scenario, topology: Topology, transport: str, reasons: tuple[str, ...]) -> Recommendation:
    work = q.work
    parameters = 1e9 * work.active_billions or q.cost.num_parameters
    speed = work.tokens_per_second or q.num_engine_ranks * DECODE[work.device] / parameters
    train_rate = TRAIN_GPU if work.device == "gpu" else DECODE["cpu"] / TRAIN_COST
    train_speed = work.train_tokens_per_second or q.trainer.num_ranks * train_rate / parameters
    generate = work.num_samples * (work.tokens / speed + REQUEST_SECONDS[topology])
    train = work.num_samples * (work.prompt_tokens + work.tokens) / train_speed
    sync = sync_seconds(q, transport)
    rollout_and_train = generate + train
    if topology != "in-process" and work.max_staleness > 0:
        if not q.is_shared:
            rollout_and_train = max(generate, train)
        elif work.device == "cpu":
            rollout_and_train /= OVERLAP
    iteration = rollout_and_train + sync / work.sync_every
    return Recommendation(topology, transport, reasons, generate, train, sync, iteration)


def sync_seconds(q: Scenario, transport: str) -> float:
    """Return the duration of a sync. All ranks transfer at once, so the busiest one determines it. Over `tcp` and `nccl` bytes
    leave the trainer once for all replicas, otherwise once for each."""
    if transport == "disk":
        return (q.cost.model_bytes + q.cost.total_bytes) / 1e9 / DISK_GBPS
    fixed, speed = SYNC[transport]
    if q.work.hosts > 1 or q.work.servers:
        speed = min(speed, q.work.network_gbps)
    return fixed + q.cost.seconds(speed, 1 if transport in PASSED_ON else q.fleet.replicas)
