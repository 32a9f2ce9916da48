"""A fleet behind one Ray actor, for frameworks that drive their engines by remote calls:

    actor = ray.remote(RolloutActor).options(num_gpus=1).remote("my-model")
    completions = ray.get(actor.generate.remote(prompts, SamplingParams(n=8)))

    with join(actor) as bridge:      # in the trainer's process
        bridge.sync(params)

Prompts and completions are what the calls carry. Weights are not: they go from the trainer straight to the engines, or come
from a checkpoint. A plain class: the framework says what `ray.remote` should make of it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bridge import Bridge
from slipstream.config import LOOPBACK
from slipstream.errors import ConfigError, Unsupported
from slipstream.tls import host_of
from slipstream.topology import connect, launch, read_run_dir
from slipstream.topology.ray_hosts import Pass, node_address
from slipstream.types import Completion, MemoryReport, MemoryTag, Prompt, SamplingParams, Score, SyncReport

JOIN_SECONDS = 120.0


class RolloutActor:
    """Its arguments are those of `slipstream.launch`. By default the engines are processes on the actor's node, with the
    actor's share of CPUs and GPUs; with `cluster="ray"` they are actors with shares of their own, on any node. All of them end
    with this actor."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._bridge = launch(model, **{"keep_alive": True, **options})

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """As `Bridge.generate`. Calls may overlap: the engines batch them."""
        return await self._bridge.agenerate(prompts, sampling)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Of given tokens under the current policy, as `Bridge.score`."""
        return await self._bridge.ascore(sequences, top_k)

    async def update_weights(self, checkpoint: str | Path) -> SyncReport:
        """Makes a directory of safetensors, seen by this actor's node, the policy of all engines: whole, verified, and at once.
        A trainer that has the weights in memory does the same with `join(actor)` and `sync`."""
        if not isinstance(checkpoint, str | Path):
            raise Unsupported(
                f"update_weights takes the directory of a checkpoint, got {type(checkpoint).__name__}; weights in memory do "
                "not travel through Ray's object store: `with ray_actor.join(actor) as bridge: bridge.sync(params)`"
            )
        return await asyncio.to_thread(self._update, checkpoint)

    def _update(self, checkpoint: str | Path) -> SyncReport:
        from slipstream.weights.stored import stored_tensors

        # By a connection of its own: whoever syncs holds the fleet's updates while connected, and a trainer may join later.
        with connect(self._bridge.run_dir) as trainer:
            return trainer.sync(stored_tensors(checkpoint))

    async def sleep(self, level: int = 1) -> dict[str, MemoryReport]:
        return await asyncio.to_thread(self._bridge.sleep, level)

    async def wake_up(self, tags: MemoryTag | Sequence[MemoryTag] | None = None) -> dict[str, MemoryReport]:
        return await asyncio.to_thread(self._bridge.wake, tags)

    async def fleet(self) -> Pass:
        """What `join` needs."""
        address, token, ca = read_run_dir(Path(self._bridge.run_dir))
        return Pass(address, node_address(), token, Path(ca).read_text() if ca else "")

    async def close(self) -> None:
        """Ends gateway and engines. Killing the actor does so as well, a moment later."""
        await asyncio.to_thread(self._bridge.close)


def join(actor: Any, **options: Any) -> Bridge:
    """The trainer's bridge to the fleet of a `RolloutActor`. `options` are those of `slipstream.connect`."""
    import ray

    fleet: Pass = ray.get(actor.fleet.remote(), timeout=JOIN_SECONDS)
    if host_of(fleet.address)[0] in LOOPBACK and node_address() != fleet.node:
        raise ConfigError(
            f"the actor's gateway listens on loopback of node {fleet.node}, and this is node {node_address()}; make the actor "
            'with cluster="ray", or run the trainer on its node'
        )
    with contextlib.ExitStack() as stack:
        ca = None
        if fleet.ca:
            ca = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-"))) / "ca.pem"
            ca.write_text(fleet.ca)
        bridge = connect(fleet.address, token=fleet.token, ca=ca, **options)
        bridge.on_close(stack.pop_all().close)
        return bridge
