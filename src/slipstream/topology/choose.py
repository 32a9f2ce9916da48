"""`slipstream plan`: which topology and which transport fit a model, the machines there are and what an iteration asks of them.

Rules decide, the first that applies, each with its reason; then a simple model of the costs says what an iteration would
take. It is a sketch: no pipeline bubbles, no stragglers, no reward functions. Its constants are measured, in the
files of `benchmarks/results` that stand beside them; the few that are assumed say so, and what is known better can be
given instead (`tokens_per_second=…`, `train_tokens_per_second=…`). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.config import at_least
from slipstream.errors import ConfigError
from slipstream.weights.estimate import Estimate, Fleet, Trainer

Topology: TypeAlias = Literal["in-process", "one machine", "fan-out", "ray"]

# --- what was measured ------------------------------------------------------------------------------------------------

DECODE = {"cpu": 1.55e10, "gpu": 7.35e13}
"""Generated tokens per second times the model's parameters, of one engine: 2 cores with 135M (decode_cpu.json), one H200 with
1.24B in bfloat16 and 512 sequences (decode_gpu.json)."""
TRAIN_COST = 1.35
"""Training on a token, in generated ones, on CPU (loop.json)."""
TRAIN_GPU = 0.4 * 989e12 / 6
"""Trained tokens per second times parameters, of one GPU. Assumed, not measured: 6 operations per parameter and token, at
40 % of an H200's 989 TFLOP/s."""
SYNC = {
    "memory": (0.0045, 5.77),
    "shm": (0.0071, 3.68),
    "tcp": (0.0060, 2.38),
    "cuda": (0.00327, 1735.0),
    "nccl": (0.0240, 60.2),
    "vllm-nccl": (0.0, 30.8),
}
"""Seconds that a sync takes whatever its size, and GB/s: in-process (loop.json, and a copy in weight_sync.json), shared
memory and TCP with checksums (weight_sync.json), from a JAX trainer into vLLM on one H200 (weight_sync_gpu.json)."""
DISK_GBPS = 1.0
"""Of a checkpoint that is written and read. Assumed: disks and network file systems differ by more than any default."""
REQUEST_SECONDS = {"in-process": 0.000191, "one machine": 0.000307, "fan-out": 0.000307, "ray": 0.000307}
"""Of a request in a batch of 64 for one token, by the library and through the gateway (topologies.json)."""
APART = 1.10
"""A step with the engine in a process of its own over one with it inside, on the same two cores (loop.json)."""
OVERLAP = 2.07
"""What running ahead gains on two cores that trainer and engine share (async_rl.json)."""

TRAINER_BYTES = 16
"""Per parameter: float32 weights, gradients and two moments of Adam. Activations come on top."""
ROOM = 0.85
"""Of a device's memory that weights and training state may take; the rest is for the KV cache and activations."""


# --- the question and the answer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """The machines, and what an iteration is: `prompts` groups of samples, a training step, and now and then a sync."""

    device: Literal["cpu", "gpu"] = "cpu"
    hosts: int = 1
    devices: int = 1
    """On each host: accelerators; 1 for a CPU."""
    cores: int = 2
    """Of each host."""
    memory_gb: float = 0.0
    """Of a device; 0 takes 16 for a CPU, 141 for a GPU (H200)."""
    network_gbps: float = 5.0
    """Between two hosts, in GB/s; 0 where trainer and engines cannot reach each other."""
    engine: Literal["embedded", "vllm"] = "embedded"
    servers: bool = False
    """The engines are somebody's vLLM servers, at addresses of their own."""
    ray: bool = False
    """A Ray cluster runs on the hosts; or they come and go."""
    prompts: int = 32
    group: int = 8
    prompt_tokens: int = 128
    tokens: int = 256
    """Mean length of a completion."""
    sync_every: int = 1
    """Iterations from one update of the engines to the next."""
    max_staleness: int = 0
    """Versions that engines may run ahead: 0 takes turns, more overlaps generation and training."""
    active_billions: float = 0.0
    """Parameters that a token passes, of a mixture of experts; 0 is all."""
    tokens_per_second: float = 0.0
    """That all engines generate together, if known."""
    train_tokens_per_second: float = 0.0
    """That the trainer learns from, if known."""

    def __post_init__(self) -> None:
        at_least(self, hosts=1, devices=1, cores=1, memory_gb=0, network_gbps=0, prompts=1, group=1, prompt_tokens=1)
        at_least(self, tokens=1, sync_every=1, max_staleness=0, active_billions=0)
        at_least(self, tokens_per_second=0, train_tokens_per_second=0)

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        return 1e9 * (self.memory_gb or {"cpu": 16.0, "gpu": 141.0}[self.device])

    @property
    def num_samples(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run, why, and what an iteration would take."""

    topology: Topology
    transport: str
    why: tuple[str, ...]
    """Of the topology, then of the transport, then of what else must be known."""
    generate_seconds: float
    train_seconds: float
    sync_seconds: float
    """Of one sync; one comes every `sync_every` iterations."""
    iteration_seconds: float

    @property
    def iterations_per_day(self) -> float:
        return 86400 / self.iteration_seconds


@dataclass(frozen=True, slots=True)
class Question:
    """All that the rules look at."""

    found: Estimate
    trainer: Trainer
    fleet: Fleet
    work: Workload

    @property
    def num_engine_ranks(self) -> int:
        return self.fleet.replicas * self.fleet.tp

    @property
    def is_shared(self) -> bool:
        """There are not enough devices for trainer and engines side by side."""
        return not self.work.servers and self._wanted > self.work.hosts * self.work.devices

    @property
    def _wanted(self) -> int:
        return self.trainer.num_ranks + self.num_engine_ranks

    @property
    def trainer_bytes(self) -> float:
        """On a device."""
        return TRAINER_BYTES * self.found.num_parameters / self.trainer.num_ranks

    @property
    def engine_bytes(self) -> int:
        """On a device: the weights that serve, and the room in which the next version lands; vLLM on the trainer's host, and an
        engine in its process, need none on a GPU."""
        is_mapped = (
            self.work.device == "gpu" and self.work.hosts == 1 and (self.work.engine == "vllm" or self.is_shared)
        )
        return self.found.engine_rank_bytes + (0 if is_mapped else self.found.engine_extra_bytes)

    @property
    def fits_together(self) -> bool:
        return self.trainer_bytes + self.engine_bytes <= ROOM * self.work.memory


# --- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    applies: Callable[[Question], bool]
    answer: str
    why: str


TOPOLOGIES = (
    Rule(lambda q: q.work.servers, "fan-out", "the engines are servers that are up already, each at its own address"),
    Rule(
        lambda q: q.work.hosts > 1 and q.work.ray,
        "ray",
        "several hosts and a Ray cluster: it places the engines, and starts those anew that die with their host",
    ),
    Rule(
        lambda q: q.work.hosts > 1,
        "fan-out",
        "several hosts: every engine dials in to one gateway, which knows who is there and shares the requests out",
    ),
    Rule(
        lambda q: q.work.engine == "vllm",
        "one machine",
        "vLLM lives in a process and an environment of its own",
    ),
    Rule(
        lambda q: not q.is_shared,
        "one machine",
        "there are devices for trainer and engines side by side, each in a process that waits for nobody",
    ),
    Rule(
        lambda q: not q.fits_together,
        "one machine",
        "trainer and engine do not fit into a device's memory together, so they take turns: bridge.sleep before the training "
        "step, bridge.wake after it",
    ),
    Rule(
        lambda q: q.work.device == "cpu" and q.work.cores > 1 and q.work.max_staleness > 0,
        "one machine",
        f"engines may run ahead: in a process of their own they generate while the trainer learns, {OVERLAP:g} times as fast "
        "on two shared cores",
    ),
    Rule(
        lambda q: True,
        "in-process",
        f"trainer and engine share a device and take turns: a process apart would cost {APART - 1:.0%} of a step and bring "
        "nothing",
    ),
)

TRANSPORTS = (
    Rule(lambda q: q.work.servers, "vllm-nccl", "a vLLM server takes weights over NCCL"),
    Rule(
        lambda q: q.work.hosts > 1 and q.work.engine == "vllm",
        "nccl",
        "from GPU to GPU over the network, no host between",
    ),
    Rule(
        lambda q: q.work.hosts > 1 and q.work.network_gbps == 0,
        "disk",
        "trainer and engines cannot reach each other: a checkpoint that both can read",
    ),
    Rule(
        lambda q: q.work.hosts > 1, "tcp", "every engine rank gets the bytes that it needs over a connection of its own"
    ),
    Rule(lambda q: _first(TOPOLOGIES, q).answer == "in-process", "memory", "the engine reads the trainer's arrays"),
    Rule(
        lambda q: q.work.device == "gpu" and q.work.engine == "vllm",
        "cuda",
        "vLLM on the same host maps the trainer's memory: nothing is sent",
    ),
    Rule(lambda q: True, "shm", "shared memory: one copy, into where the engine computes"),
)


def choose(question: Question) -> Choice:
    """Raises `ConfigError` for what cannot work at all, with what would."""
    _check(question)
    topology, transport = _first(TOPOLOGIES, question), _first(TRANSPORTS, question)
    name: Topology = topology.answer  # type: ignore[assignment]
    return _predicted(question, name, transport.answer, (topology.why, transport.why, *_notes(question)))


def _first(rules: tuple[Rule, ...], question: Question) -> Rule:
    return next(rule for rule in rules if rule.applies(question))


def _check(q: Question) -> None:
    if (q.work.servers or (q.work.hosts > 1 and q.work.engine == "vllm")) and (
        q.work.device == "cpu" or q.work.network_gbps == 0
    ):
        what = "a vLLM server" if q.work.servers else "vLLM on another host"
        lacking = "there is none" if q.work.device == "cpu" else "these cannot reach each other (network_gbps=0)"
        raise ConfigError(
            f"{what} takes weights over NCCL alone, from GPU to GPU, and {lacking}; engines of our own (engine=embedded "
            "servers=false) take them over TCP or from a checkpoint"
        )
    memory = ROOM * q.work.memory
    if q.trainer_bytes > memory:
        ranks = math.ceil(TRAINER_BYTES * q.found.num_parameters / memory)
        raise ConfigError(
            f"a trainer's device would hold {q.trainer_bytes / 1e9:,.0f} GB of training state and has "
            f"{q.work.memory / 1e9:,.0f} GB, of which {ROOM:.0%} may go to it; spread it over at least {ranks} "
            f"(--trainer fsdp={ranks})"
        )
    if not q.work.servers and q.engine_bytes > memory:
        raise ConfigError(
            f"an engine's device would hold {q.engine_bytes / 1e9:,.0f} GB of weights (with room for the next version, unless "
            f"that is mapped) and has {q.work.memory / 1e9:,.0f} GB, of which {ROOM:.0%} may go to them; split it over more "
            f"(--tp {2 * q.fleet.tp})"
        )
    devices = q.work.hosts * q.work.devices
    if q.trainer.num_ranks > devices or (not q.work.servers and q.num_engine_ranks > devices):
        raise ConfigError(
            f"the trainer has {q.trainer.num_ranks} rank(s) and the engines {q.num_engine_ranks}, and there are {devices} "
            f"device(s): {q.work.hosts} host(s) of {q.work.devices} (hosts=… devices=…)"
        )


def _notes(q: Question) -> list[str]:
    notes = []
    if q.work.hosts > 1 and q.is_shared:
        notes.append("trainer and engines share devices, and take turns: bridge.sleep and wake")
    if q.work.max_staleness == 0 and not q.is_shared:
        notes.append("with max_staleness=1 engines would generate while the trainer learns, and not wait for it")
    return notes


# --- the costs --------------------------------------------------------------------------------------------------------


def _predicted(q: Question, topology: Topology, transport: str, why: tuple[str, ...]) -> Choice:
    work = q.work
    parameters = 1e9 * work.active_billions or q.found.num_parameters
    speed = work.tokens_per_second or q.num_engine_ranks * DECODE[work.device] / parameters
    learning = work.train_tokens_per_second or q.trainer.num_ranks * _training(work.device) / parameters
    generate = work.num_samples * (work.tokens / speed + REQUEST_SECONDS[topology])
    train = work.num_samples * (work.prompt_tokens + work.tokens) / learning
    sync = sync_seconds(q, transport)
    both = generate + train
    if topology != "in-process" and work.max_staleness > 0:
        if not q.is_shared:
            both = max(generate, train)
        elif work.device == "cpu":
            both /= OVERLAP
    return Choice(topology, transport, why, generate, train, sync, both + sync / work.sync_every)


def _training(device: str) -> float:
    return TRAIN_GPU if device == "gpu" else DECODE["cpu"] / TRAIN_COST


def sync_seconds(q: Question, transport: str) -> float:
    """All ranks send and receive at once, the busiest last."""
    busiest = max(q.found.engine_rank_bytes, q.found.trainer_rank_bytes) / 1e9
    if transport == "disk":
        return (q.found.model_bytes + q.found.total_bytes) / 1e9 / DISK_GBPS
    fixed, speed = SYNC[transport]
    if q.work.hosts > 1 or q.work.servers:
        speed = min(speed, q.work.network_gbps)
    return fixed + busiest / speed
