"""An update on its way to a vLLM server: what must hold before the first byte moves.

The server overwrites the weights it serves. So `begin` joins its workers with the trainer and `stage` looks whether all tensors
are there; both leave it as it is. The commit replaces the weights, and from its first step on there is no way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from slipstream.engines.checks import not_staged
from slipstream.engines.remote.client import Client
from slipstream.engines.remote.server import Server
from slipstream.errors import (
    ChecksumMismatch,
    PlanMismatch,
    SlipstreamError,
    Unsupported,
)
from slipstream.types import Berths, Offer, Parameter
from slipstream.weights.transfer import Reception, Update
from slipstream.weights.transports import vllm_nccl

JOIN_SECONDS = 150.0
"""Longer than a trainer waits, so that it is the one to give up."""
START_SECONDS = 0.2
"""A server that refuses to be joined says so at once."""
UPDATE_SECONDS = 600.0
RESET_SECONDS = 30.0


class Arrivals(Reception):
    """The updates of one server, one after the other."""

    def __init__(self, client: Client, server: Server, parameters: Sequence[Parameter], name: str) -> None:
        super().__init__(parameters, server.dtype, name)
        self._client, self._server = client, server
        self._joined = ""
        """The unique id of the communicator that the workers have, or are about to have."""
        self._joining: asyncio.Task[Any] | None = None
        self._brings: bool | None = None
        """Whether the update under way brings tensors, once it is staged: all, or none where nothing changed."""

    async def begin(self, serving: int, version: int, offer: Offer) -> Berths:
        plan = self._admit(serving, version, offer)
        if any(move.sender for move in plan.moves):
            raise Unsupported(
                f"engine {self._name!r} is a vLLM server, which takes whole tensors from one process; this trainer's tensors "
                "are spread over several. Gather them in the first one"
            )
        if list(dict.fromkeys(move.parameter for move in plan.moves)) != [p.name for p in self._parameters]:
            raise PlanMismatch(f"the plan brings tensors in another order than engine {self._name!r} names them")
        unique_id = vllm_nccl.invited(offer.transport)
        if unique_id != self._joined:
            if not offer.fresh:
                raise PlanMismatch(
                    f"engine {self._name!r} does not have the trainer's communicator; it must offer anew"
                )
            await self._join(unique_id)
        self._plan, self._update, self._brings = plan, Update(version, plan, hashed=False), None
        link = vllm_nccl.make_link(unique_id, 1 + self._server.num_workers, self._client.url, self._server.nccl)
        return Berths(((link, b""),), bytes(len(self._parameters)))

    async def _join(self, unique_id: str) -> None:
        """The server answers when the trainer has joined, which it does once it has our answer."""
        info = {
            "nccl_unique_id_b64": unique_id,
            "rank_offset": 1,
            "world_size": 1 + self._server.num_workers,
            "packed": True,
            "packed_buffer_size_bytes": vllm_nccl.BUFFER_BYTES,
            "packed_num_buffers": vllm_nccl.NUM_BUFFERS,
        }
        if self._joining is not None:
            self._joining.cancel()
        self._joined = ""
        call = self._client.post("/init_weight_transfer_engine", {"init_info": info}, JOIN_SECONDS)
        self._joining = asyncio.create_task(call)
        done, _ = await asyncio.wait({self._joining}, timeout=START_SECONDS)
        if done:
            self._joining.result()
        self._joined = unique_id

    async def stage(self, version: int, manifests: Sequence[Sequence[bytes]]) -> int:
        """Bytes that are announced. Raises unless all tensors are, or none."""
        update = self._current(version)
        (pieces,), _, num_bytes = self._manifests(update, manifests, 1)
        if pieces and len(pieces) != len(update.plan.moves):
            raise ChecksumMismatch(
                f"engine {self._name!r}: {len(pieces)} of {len(update.plan.moves)} pieces are announced; a vLLM server takes "
                "all tensors or none"
            )
        if self._joining is not None:
            try:
                await asyncio.shield(self._joining)
            except SlipstreamError:
                self._joined = ""
                raise
            self._joining = None
        self.check(version)  # a rollback may have come meanwhile
        self._brings = bool(pieces)
        return num_bytes

    def staged(self, version: int) -> bool:
        """Whether it brings tensors. Raises unless it is staged."""
        if self._update is None or self._update.version != version or self._brings is None:
            raise not_staged(self._name, version)
        return self._brings

    async def replace(self, label: str) -> None:
        """The server takes the weights that the trainer broadcasts. It must be paused. Whatever is raised, it may now hold
        half of the one version and half of the other."""
        names = [p.name for p in self._parameters]
        info = {
            "names": names,
            "dtype_names": [self._server.dtype] * len(names),
            "shapes": [list(p.shape) for p in self._parameters],
        }
        await self._start()
        await self._client.post("/update_weights", {"update_info": info}, UPDATE_SECONDS)
        await self._client.post("/finish_weight_update", {"weight_version": label}, UPDATE_SECONDS)

    async def _start(self) -> None:
        try:
            await self._client.post("/start_weight_update")
        except SlipstreamError as error:  # one that was broken off may be open still
            try:
                await self._client.post("/finish_weight_update")
            except SlipstreamError:
                raise error from None
            await self._client.post("/start_weight_update")

    async def forget_prefixes(self) -> None:
        """What is in the prefix cache, that of an older version too."""
        path, answer = "/reset_prefix_cache?reset_running_requests=true", None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESET_SECONDS):
                while True:
                    answer = await self._client.post(path)
                    if isinstance(answer, dict) and answer.get("success") is True:
                        return
                    await asyncio.sleep(0.05)  # requests that were cut off may hold blocks for a moment
        raise self._client.nonsense(f"POST {path}", f"success within {RESET_SECONDS:g} s", answer)

    def end(self, version: int) -> None:
        """It is committed, or rolled back. Any other is not meant."""
        if self._update is not None and self._update.version == version:
            self._update = self._brings = None

    def disconnect(self) -> None:
        """The communicator is of no use any more: the next trainer must bring another."""
        self._joined = ""

    async def close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
