"""A Ray actor that runs a fleet, for frameworks that drive engines by remote calls:

    actor = ray.remote(RolloutActor).options(num_gpus=1).remote("my-model")
    completions = ray.get(actor.generate.remote(prompts, SamplingParams(n=8)))

    with join(actor) as bridge:      # in the trainer's process
        bridge.sync(params)

Calls carry prompts and completions. Weights go directly from the trainer to the engines, or come from a checkpoint.
`RolloutActor` is a plain class, so that the framework chooses the options of `ray.remote`."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.rollouts import Sampling
from slipstream.config import LOOPBACK
from slipstream.deploy.fleet import connect, launch
from slipstream.deploy.processes.run_dir import read_run_dir, run_identity
from slipstream.deploy.ray.actors import JoinCredentials, node_address
from slipstream.errors import ConfigError, Unsupported
from slipstream.runtime.tls import host_of
from slipstream.types import Completion, MemoryReport, MemoryTag, Prompt, Score, SyncReport

JOIN_SECONDS = 120.0


class RolloutActor:
    """Runs a fleet; the arguments are those of `slipstream.launch`.

    By default the engines are processes on the actor's node and use the actor's CPUs and GPUs. With `cluster="ray"` they are
    actors with their own resources, on any node. All of them end with this actor."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._bridge = launch(model, **{"keep_alive": True, **options})

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling = None) -> list[Completion]:
        """Generate completions, as `Bridge.generate` does. Engines batch concurrent calls."""
        return await self._bridge.agenerate(prompts, sampling)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Return logprobs of given tokens under the current policy, as `Bridge.score` does."""
        return await self._bridge.ascore(sequences, top_k)

    async def update_weights(self, checkpoint: str | Path) -> SyncReport:
        """Load a directory of safetensors, on this actor's node, into all engines, verified and in one transaction. A trainer
        with the weights in memory uses `join(actor)` and `sync` instead."""
        if not isinstance(checkpoint, str | Path):
            raise Unsupported(
                f"update_weights takes the directory of a checkpoint, got {type(checkpoint).__name__}; weights in memory do "
                "not pass through Ray's object store: use `with ray_actor.join(actor) as bridge: bridge.sync(params)`"
            )
        return await asyncio.to_thread(self._update, checkpoint)

    def _update(self, checkpoint: str | Path) -> SyncReport:
        from slipstream.tensors.safetensors_dir import stored_tensors

        # A separate connection: a client that has synced owns the fleet's updates while connected, and a trainer may
        # join later.
        with connect(self._bridge.run_dir) as trainer:
            return trainer.sync(stored_tensors(checkpoint))

    async def sleep(self, level: int = 1) -> dict[str, MemoryReport]:
        return await asyncio.to_thread(self._bridge.sleep, level)

    async def wake_up(self, tags: MemoryTag | Sequence[MemoryTag] | None = None) -> dict[str, MemoryReport]:
        return await asyncio.to_thread(self._bridge.wake, tags)

    async def fleet(self) -> JoinCredentials:
        """Return what `join` needs."""
        run_dir = Path(self._bridge.run_dir)
        address, token, ca = read_run_dir(run_dir)
        texts = (Path(file).read_text() if file else "" for file in (ca, *run_identity(run_dir)))
        return JoinCredentials(address, node_address(), token, *texts)

    async def close(self) -> None:
        """Stop gateway and engines. Killing the actor stops them as well, a moment later."""
        await asyncio.to_thread(self._bridge.close)


def join(actor: Any, **options: Any) -> Bridge:
    """Connect a trainer to the fleet of a `RolloutActor`. `options` are those of `slipstream.connect`."""
    import ray

    fleet: JoinCredentials = ray.get(actor.fleet.remote(), timeout=JOIN_SECONDS)
    if host_of(fleet.address)[0] in LOOPBACK and node_address() != fleet.node:
        raise ConfigError(
            f"the actor's gateway listens on loopback of node {fleet.node}, but this is node {node_address()}; create the "
            'actor with cluster="ray", or run the trainer on its node'
        )
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-")))
        for secret in fleet.write(directory):
            stack.callback(secret.close)
        _, _, ca = read_run_dir(directory)
        certificate, key = run_identity(directory)
        bridge = connect(fleet.address, token=fleet.token, ca=ca, certificate=certificate, key=key, **options)
        bridge.on_close(stack.pop_all().close)
        return bridge
