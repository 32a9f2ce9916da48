"""SLURM jobs: the batch script, and which node of a job is which. The module has no side effects.

Nodes are in the order of `SLURM_JOB_NODELIST`: trainer nodes first, inference nodes last. Without inference nodes, everything
runs on one machine."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

MAX_HOSTS = 1 << 16
NUM_INFERENCE_NODES = "NUM_INFERENCE_NODES"
NCCL_PORT, GLOO_PORT, INFERENCE_PORT = 26756, 26757, 26758
"""Ports of the trainer's process group, by backend, and of the gateway in a job that sets NUM_INFERENCE_NODES."""
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside brackets."""
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(nodelist: str) -> list[str]:
    """Expand a node list: `gpu[08-10],login1` is `gpu08 gpu09 gpu10 login1`. With several brackets, the last varies fastest."""
    hosts: list[str] = []
    for word in _COMMA.split(nodelist.strip()):
        parts = _PART.findall(word)
        if not parts or "".join(parts) != word:
            raise ConfigError(f"cannot parse {word!r} in the node list {nodelist!r}; expected names like gpu[01-04,7]")
        choices = [_numbers(part, nodelist) if part.startswith("[") else [part] for part in parts]
        for names in itertools.product(*choices):
            hosts.append("".join(names))
            if len(hosts) > MAX_HOSTS:
                raise ConfigError(f"the node list {nodelist[:200]!r} has more than {MAX_HOSTS:,} nodes")
    return hosts


def _numbers(bracket: str, nodelist: str) -> list[str]:
    """Expand `[08-10,3]` to `08 09 10 3`. Numbers are padded to the width of the first number of their range."""
    numbers: list[str] = []
    for item in bracket[1:-1].split(","):
        match = _RANGE.fullmatch(item)
        low, high = (match[1], match[2] or match[1]) if match else ("0", "0")
        if match is None or int(low) > int(high):
            raise ConfigError(
                f"the node list {nodelist!r} has {item!r} in brackets; expected a number or a range like 01-04"
            )
        if int(high) - int(low) >= MAX_HOSTS:
            raise ConfigError(f"the node list {nodelist!r} has more than {MAX_HOSTS:,} nodes")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


@dataclass(frozen=True, slots=True)
class JobNode:
    """One node of a job.

    >>> JobNode(("gpu1", "gpu2", "gpu3"), index=0, num_inference=2).trainers
    ('gpu1',)"""

    hosts: tuple[str, ...]
    index: int
    num_inference: int

    @property
    def name(self) -> str:
        return self.hosts[self.index]

    @property
    def trainers(self) -> tuple[str, ...]:
        return self.hosts[: len(self.hosts) - self.num_inference]

    @property
    def inference(self) -> tuple[str, ...]:
        return self.hosts[len(self.hosts) - self.num_inference :]

    @property
    def is_alone(self) -> bool:
        return not self.num_inference

    @property
    def is_head(self) -> bool:
        """Whether the gateway runs here."""
        return self.index == 0

    @property
    def is_trainer(self) -> bool:
        return self.index < len(self.trainers)


def this_node(environ: Mapping[str, str], num_inference: int) -> JobNode:
    """Return the node that this process runs on. It must be the only task of `srun` on its node."""
    hosts = _hosts(environ, num_inference)
    return JobNode(hosts, _index(environ, hosts) if "SLURM_JOB_NODELIST" in environ else 0, num_inference)


def _hosts(environ: Mapping[str, str], num_inference: int) -> tuple[str, ...]:
    if num_inference < 0:
        raise ConfigError(f"the number of inference nodes must be at least 0, got {num_inference}")
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    if not nodelist:
        if num_inference:
            raise ConfigError(
                f"SLURM_JOB_NODELIST is not set, so this is not a SLURM job, but {num_inference} inference node(s) were "
                "requested; run it with srun, or on one machine without inference nodes"
            )
        return ("localhost",)
    hosts = tuple(expand(nodelist))
    if num_inference == 0 and len(hosts) > 1:
        raise ConfigError(
            f"without inference nodes everything runs on one machine, but the job has {len(hosts)} ({nodelist}); pass "
            "--inference-nodes"
        )
    if num_inference and num_inference >= len(hosts):
        raise ConfigError(
            f"{num_inference} inference node(s) of {len(hosts)} ({nodelist}) leave none for the trainer; request more nodes"
        )
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"SLURM_JOB_NODELIST names a node twice: {nodelist}")
    return hosts


@dataclass(frozen=True, slots=True)
class JobRendezvous:
    """Where the ranks of a trainer and the engines of a job meet."""

    head: str
    """The trainer's first host, where the gateway runs."""
    inference: tuple[str, ...] = ()

    def trainers_url(self, backend: str) -> str:
        """Return where the trainer's ranks form their process group, as `torch.distributed` takes it."""
        return f"tcp://{self.head}:{NCCL_PORT if backend == 'nccl' else GLOO_PORT}"


def rendezvous(environ: Mapping[str, str]) -> JobRendezvous:
    """Return the meeting points of a job: the trainer is on the first host of SLURM_JOB_NODELIST, engines are on the last
    NUM_INFERENCE_NODES. Without inference nodes everything is on this machine."""
    text = environ.get(NUM_INFERENCE_NODES) or "0"
    if not text.isdecimal():
        raise ConfigError(f"{NUM_INFERENCE_NODES} must be a number of nodes, got {text!r}")
    if (count := int(text)) == 0:
        return JobRendezvous("localhost")
    hosts = _hosts(environ, count)
    return JobRendezvous(hosts[0], hosts[-count:])


def _index(environ: Mapping[str, str], hosts: Sequence[str]) -> int:
    text = environ.get("SLURM_NODEID", "")
    if not text.isdecimal() or int(text) >= len(hosts):
        raise ConfigError(f"SLURM_NODEID is {text!r}, but the job has {len(hosts)} node(s); start this with srun")
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError(
            "`slipstream role` must run once per node: use srun --ntasks-per-node=1, and --engines-per-node for several "
            "engines"
        )
    name = environ.get("SLURMD_NODENAME", hosts[int(text)])
    if name != hosts[int(text)]:
        raise ConfigError(
            f"SLURM_NODEID {text} is node {hosts[int(text)]!r} of the job, but SLURMD_NODENAME is {name!r}; run srun over all "
            "nodes of the job, in their order"
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that `slipstream slurm` prints a batch script for."""

    command: Sequence[str]
    """Command that starts the trainer."""
    model: str
    run_dir: str
    """Parent of the run directories; each attempt has its own."""
    num_trainers: int = 1
    num_inference: int = 1
    engines_per_node: int = 1
    engine: Sequence[str] = ()
    """Engine settings, such as `tensor_parallel_size=2`."""
    name: str = "slipstream"
    placement: Sequence[str] = ()
    """Options of `slipstream role` that say which GPUs engines and trainer take, such as `--devices=auto`."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, such as `--partition=gpu`."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no trainer command given: slipstream slurm … -- python train.py")
        if self.num_trainers < 1 or self.num_inference < 0 or self.engines_per_node < 1:
            raise ConfigError(
                f"a job has at least 1 trainer node, 0 inference nodes and 1 engine per node; got {self.num_trainers}, "
                f"{self.num_inference} and {self.engines_per_node}"
            )
        if self.num_trainers > 1 and not self.num_inference:
            raise ConfigError(
                f"without inference nodes everything runs on one machine, but {self.num_trainers} trainer nodes were "
                "requested"
            )
        if bad := [option for option in self.sbatch if not option.startswith("-") or "\n" in option]:
            raise ConfigError(f"{bad[0]!r} is not an option of sbatch; expected one like --partition=gpu")
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ConfigError(f"{self.name!r} is not a valid job name; use letters, digits, '.', '-' and '_'")


def script(job: SlurmJob) -> str:
    """Return the batch script. Each attempt of a job has its own run directory, so it never sees files of an earlier one."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.num_trainers + job.num_inference}",
        "--ntasks-per-node=1",
        "--output=%x-%j.log",
        *job.sbatch,
    ]
    settings = [word for setting in job.engine for word in ("--engine", setting)]
    role = ["slipstream", "role", "--model", job.model, "--inference-nodes", str(job.num_inference)]
    role += ["--engines-per-node", str(job.engines_per_node), *settings, *job.placement]
    nodes = (
        f"{job.num_trainers} for the trainer, then {job.num_inference} for engines"
        if job.num_inference
        else "one machine"
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            f"# Nodes: {nodes}. The run directory must be on a file system shared by all nodes:",
            "# it holds the gateway's address, its token and the certificates. It also holds keys; only you can read it.",
            "set -euo pipefail",
            f'export SLIPSTREAM_RUN_DIR={shlex.quote(job.run_dir)}/"$SLURM_JOB_NAME-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
            f"srun --kill-on-bad-exit=1 {shlex.join(role)} -- \\",
            f"    {shlex.join(job.command)}",
            "",
        ]
    )
