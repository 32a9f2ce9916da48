"""A `vllm serve` (0.30 or later), with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.remote import vllm_format
from slipstream.engines.remote.dialect import JOIN_SECONDS, UPDATE_SECONDS, Dialect, ServerScore
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.responses import get_response
from slipstream.engines.remote.vllm_info import VllmServerInfo, inspect_server
from slipstream.errors import DeadlineExceeded, SlipstreamError, Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import MemoryTag, Parameter, SamplingParams
from slipstream.weights.transports.servers import vllm_nccl

RESET_SECONDS = 30.0
"""How long to retry resetting the prefix cache."""


class VllmDialect(Dialect):
    needs_all_tensors, must_be_idle_to_sleep, resumes_on_wake = True, False, True
    transports = (vllm_nccl.NAME,)
    server: VllmServerInfo

    @classmethod
    async def connect(cls, client: ServerClient, model: ModelConfig) -> VllmDialect:
        """Raise `ConfigError` if we cannot use the server as it was started."""
        return cls(client, await inspect_server(client, model))

    async def prepare(self) -> None:
        if self.server.is_paused:
            if self.server.can_sleep:
                await self.client.post("/wake_up")
            await self.pause()

    # --- requests ---

    async def needs_rescoring(self, sampling: SamplingParams) -> bool:
        if sampling.is_plain_or_greedy:
            return False
        if self.server.logprobs_mode == "processed_logprobs":
            return True
        if sampling.temperature == 0:  # greedy tokens carry their raw logprobs
            return False
        raise Unsupported(
            "this vLLM server reports raw logprobs, so those of the sampled distribution are unknown; start it with "
            "--logprobs-mode processed_logprobs, or sample at temperature 1 without truncation, penalties and bias"
        )

    async def generate(self, sample: Sample, version: int, salt: str, num_top: int) -> None:
        body = vllm_format.completion_request(sample, self.server, salt, num_top)
        async with contextlib.aclosing(self.client.events(vllm_format.PATH, body)) as events:
            async for event in events:
                is_last = vllm_format.take_event(sample, event, version, num_top, self.client.mismatch)
                if is_last or sample.stopped:
                    break

    async def score(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> ServerScore:
        body = vllm_format.score_request(tokens, top_k, self.server, salt, priority)
        response = await self.client.post(vllm_format.PATH, body, math.inf)
        return vllm_format.take_score(response, tokens, top_k, self.client.mismatch)

    # --- control ---

    async def check_alive(self) -> None:
        await self.client.get("/health")

    async def pause(self) -> None:
        await self.client.post("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self.client.post("/resume")

    def check_sleep(self, level: int) -> None:
        if not self.server.can_sleep:
            raise Unsupported(f"{self.name} was started without --enable-sleep-mode")

    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        if asleep:  # vLLM can only fall asleep when it is awake
            await self.client.post("/wake_up")
        await self.client.post(f"/sleep?level={level}&mode=keep")

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self.client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def reset_prefix_cache(self) -> None:
        path, response = "/reset_prefix_cache?reset_running_requests=true", None
        try:
            async with asyncio.timeout(RESET_SECONDS):
                while True:
                    response = await self.client.post(path)
                    if isinstance(response, dict) and response.get("success") is True:
                        return
                    await asyncio.sleep(0.05)  # interrupted requests may hold blocks for a moment
        except DeadlineExceeded:  # the server did not answer
            raise
        except TimeoutError:
            pass
        raise self.client.mismatch(f"POST {path}", f"success within {RESET_SECONDS:g} s", response)

    # --- weights ---

    async def label(self) -> str:
        return (await get_response(self.client, "/weight_info")).text("weight_version")

    async def set_label(self, text: str) -> None:
        await self.client.post("/update_weight_version", {"new_version": text})

    def channel(self, transport: str) -> NcclChannel:
        return NcclChannel(self, vllm_nccl.parse_offered(transport))


class NcclChannel:
    """See `dialect.WeightChannel`. The server's workers join the trainer's communicator and receive its broadcasts."""

    def __init__(self, dialect: VllmDialect, unique_id: str) -> None:
        self.key, self._dialect, self._client = unique_id, dialect, dialect.client
        self._world_size = 1 + dialect.server.num_workers
        self.link = vllm_nccl.make_link(unique_id, self._world_size, dialect.client.url, dialect.server.nccl)

    async def connect(self) -> None:
        info = {
            "nccl_unique_id_b64": self.key,
            "rank_offset": 1,
            "world_size": self._world_size,
            "packed": True,
            "packed_buffer_size_bytes": vllm_nccl.BUFFER_BYTES,
            "packed_num_buffers": vllm_nccl.NUM_BUFFERS,
        }
        await self._client.post("/init_weight_transfer_engine", {"init_info": info}, JOIN_SECONDS)

    async def replace_weights(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        info = {
            "names": [p.name for p in parameters],
            "dtype_names": [self._dialect.server.dtype] * len(parameters),
            "shapes": [list(p.shape) for p in parameters],
        }
        await self._start_update()
        await self._client.post("/update_weights", {"update_info": info}, UPDATE_SECONDS)
        await self._client.post("/finish_weight_update", {"weight_version": label}, UPDATE_SECONDS)
        await self._dialect.reset_prefix_cache()

    async def _start_update(self) -> None:
        try:
            await self._client.post("/start_weight_update")
        except SlipstreamError as error:  # an update that broke off may still be open
            try:
                await self._client.post("/finish_weight_update")
            except SlipstreamError:
                raise error from None
            await self._client.post("/start_weight_update")

    async def disconnect(self) -> None:
        """Nothing to do: the next communicator replaces this one."""
