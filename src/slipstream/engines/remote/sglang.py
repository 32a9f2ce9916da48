"""An SGLang server (0.5.16 or later), started with --dtype and --incremental-streaming-output.

The order of calls follows from SGLang's source. An update that flushes the cache, or a release of memory, crashes the server if
it holds any request. So updates do not flush. Requests are aborted by id, because the server notices a closed connection two
seconds late. A separate call flushes the cache and reports whether requests were left. The server does not report
whether it is paused, so the label marks an unfinished update."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from slipstream.config import LOOPBACK
from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.remote import sglang_format
from slipstream.engines.remote.dialect import (
    JOIN_SECONDS,
    UPDATE_SECONDS,
    Dialect,
    ServerScore,
    WeightChannel,
)
from slipstream.engines.remote.http_client import ServerClient
from slipstream.engines.remote.responses import get_response
from slipstream.engines.remote.sglang_info import SglangServerInfo, inspect_server
from slipstream.errors import EngineFailure, SlipstreamError, TransferError, Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import MemoryTag, Parameter, SamplingParams
from slipstream.weights.rank_image import num_bytes
from slipstream.weights.transports.contract import random_name
from slipstream.weights.transports.servers import checkpoint_dir, sglang_gloo
from slipstream.weights.transports.servers.gather import group_by_bytes

log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""How long to wait for the server to hold no request, where that is required."""
FLUSH_SECONDS = 1.0
"""How long to try flushing the cache after an update."""
ABORT_SECONDS = 5.0


class SglangDialect(Dialect):
    needs_all_tensors, must_be_idle_to_sleep, resumes_on_wake = False, True, False
    server: SglangServerInfo

    def __init__(self, client: ServerClient, server: SglangServerInfo) -> None:
        super().__init__(client, server)
        self._checkpoints = random_name()
        self._reports_processed: bool | None = None
        """Whether logprobs are those of the sampled distribution; None until probed."""
        self._probing = asyncio.Lock()

    @classmethod
    async def connect(cls, client: ServerClient, model: ModelConfig) -> SglangDialect:
        """Raise `ConfigError` if we cannot use the server as it was started."""
        server = await inspect_server(client, model)
        if not server.is_deterministic:
            log.warning("%s ignores seeds; to honor them, start it with --enable-deterministic-inference", client.name)
        return cls(client, server)

    @property
    def transports(self) -> tuple[str, ...]:
        return (sglang_gloo.NAME, "disk") if self.server.can_join else ("disk",)

    async def prepare(self) -> None:
        await (self.pause() if self.server.is_paused else self.resume())

    # --- requests ---

    async def needs_rescoring(self, sampling: SamplingParams) -> bool:
        sglang_format.check_sampling(sampling, self.server)
        if sampling.is_plain_or_greedy:
            return False
        if sampling.temperature != 0 and not sglang_format.is_truncated(sampling) and not await self._probe():
            raise Unsupported(
                f"{self.name} reports logprobs before temperature, so those of the sampled distribution are unknown; start "
                "it without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1 without penalties and bias"
            )
        return True

    async def _probe(self) -> bool:
        async with self._probing:
            if self._reports_processed is None:
                response = await self._request(sglang_format.probe_request(_request_id()))
                self._reports_processed = sglang_format.reports_processed(response, self.server, self.client.mismatch)
            return self._reports_processed

    async def generate(self, sample: Sample, version: int, salt: str, num_top: int) -> str | None:
        rid, ended, label = _request_id(), False, None
        body = sglang_format.completion_request(sample, self.server, salt, rid, num_top)
        try:
            async with contextlib.aclosing(self.client.events(sglang_format.PATH, body)) as events:
                async for event in events:
                    ended, label = sglang_format.take_event(sample, event, version, num_top, self.client.mismatch)
                    if ended or sample.stopped:
                        break
            return label
        finally:
            if not ended:
                await self._abort(rid)

    async def score(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> ServerScore:
        body = sglang_format.score_request(tokens, top_k, self.server, salt, _request_id(), priority)
        return sglang_format.take_score(await self._request(body), tokens, top_k, self.client.mismatch)

    async def _request(self, body: dict[str, Any]) -> Any:
        response = None
        try:
            response = await self.client.post(sglang_format.PATH, body, math.inf)
            return response
        finally:
            if response is None:
                await self._abort(body["rid"])

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(SlipstreamError):
            await self.client.command("/abort_request", {"rid": rid}, ABORT_SECONDS)

    # --- control ---

    async def check_alive(self) -> None:
        await self.label()  # /health generates a token, which a paused server does not

    async def pause(self) -> None:
        """Move running requests back to the queue, where they can be aborted."""
        await self.client.command("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.client.command("/continue_generation", {})

    def check_sleep(self, level: int) -> None:
        if not self.server.can_sleep:
            raise Unsupported(f"{self.name} was started without --enable-memory-saver")
        if level == 1 and not self.server.keeps_weights:
            raise Unsupported(
                f"{self.name} was started without --enable-weights-cpu-backup, so its weights would be lost; sleep at level "
                "2, and sync when it wakes"
            )

    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        tags = [tag for tag in ("kv_cache", "weights") if tag not in asleep]
        if not asleep:
            await self.reset_prefix_cache()  # also checks that the server holds no request
        if tags:
            await self.client.command("/release_memory_occupation", {"tags": tags}, UPDATE_SECONDS)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self.client.command("/resume_memory_occupation", {"tags": list(tags)}, UPDATE_SECONDS)

    async def reset_prefix_cache(self) -> None:
        if error := await self._flush(IDLE_SECONDS):
            raise error

    async def _flush(self, timeout: float) -> EngineFailure | None:
        """Return the server's last error if it held requests all the time."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                await self.client.command("/flush_cache")
                return None
            except EngineFailure as error:  # aborted requests may linger for a moment
                if asyncio.get_running_loop().time() > deadline:
                    return EngineFailure(f"{error}. Does another client send it requests?")
                await asyncio.sleep(0.02)

    # --- weights ---

    async def label(self) -> str:
        return (await get_response(self.client, "/model_info")).text("weight_version")

    async def set_label(self, text: str) -> None:
        await self.update("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def channel(self, transport: str) -> WeightChannel:
        name, _, directory = transport.partition(":")
        if name == "disk" and directory:
            return DiskChannel(self, directory, self._checkpoints)
        rendezvous = sglang_gloo.parse_offered(transport)
        if not self.server.can_join:
            raise TransferError(
                f"{self.name} is split by pipeline or data parallelism, so its workers cannot join a trainer; use transport "
                "disk:/directory"
            )
        if rendezvous.host in LOOPBACK and urlsplit(self.client.url).hostname not in LOOPBACK:
            raise TransferError(
                f"the trainer waits at {rendezvous.host}:{rendezvous.port}, where {self.name} cannot reach it; set "
                f"{sglang_gloo.ADDRESS} to the trainer's address on a private network, or use transport disk:/directory"
            )
        return GlooChannel(self, rendezvous)

    async def update(self, path: str, body: dict[str, Any], timeout: float | None = None) -> None:
        """POST a call that reports its success."""
        response = await self.client.post(path, body, timeout)
        if not isinstance(response, dict) or response.get("success") is not True:
            raise self.client.mismatch(f"POST {path}", "success", response)

    @contextlib.asynccontextmanager
    async def updating(self, label: str) -> AsyncIterator[None]:
        """Label the weights as unusable until the update has ended. Then flush the cache, if possible: our prompts never match
        entries of an older version, but those of other clients may."""
        await self.set_label(f"{label}-unfinished")
        yield
        if error := await self._flush(FLUSH_SECONDS):
            log.warning("%s: prefixes of an older version stay in its cache", error)


class GlooChannel:
    """See `dialect.WeightChannel`. The workers join a process group of the trainer and receive buckets, one per call."""

    def __init__(self, dialect: SglangDialect, rendezvous: sglang_gloo.Rendezvous) -> None:
        self._dialect, self._rendezvous, self.key = dialect, rendezvous, str(rendezvous)
        self._world_size = 1 + dialect.server.num_workers
        self.link = sglang_gloo.make_link(rendezvous, self._world_size, dialect.client.url)

    async def connect(self) -> None:
        info = {
            "master_address": self._rendezvous.host,
            "master_port": self._rendezvous.port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "group_name": self._rendezvous.group,
            "backend": "gloo",
        }
        await self._dialect.update("/init_weights_update_group", info, JOIN_SECONDS)

    async def replace_weights(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        dtype = self._dialect.server.dtype
        sizes = [num_bytes([p], dtype) for p in parameters]
        async with self._dialect.updating(label):
            for bucket in group_by_bytes(sizes, sglang_gloo.BUCKET_BYTES):
                info = {
                    "names": [parameters[i].name for i in bucket],
                    "dtypes": [dtype] * len(bucket),
                    "shapes": [list(parameters[i].shape) for i in bucket],
                    "group_name": self._rendezvous.group,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                await self._dialect.update("/update_weights_from_distributed", info, UPDATE_SECONDS)
            await self._dialect.set_label(label)

    async def disconnect(self) -> None:
        with contextlib.suppress(SlipstreamError):
            await self._dialect.client.command(
                "/destroy_weights_update_group", {"group_name": self._rendezvous.group}, ABORT_SECONDS
            )


class DiskChannel:
    """See `dialect.WeightChannel`. The server reads a checkpoint that the trainer writes."""

    def __init__(self, dialect: SglangDialect, directory: str, name: str) -> None:
        self._dialect, self._directory, self._name = dialect, directory, name
        self.key, self.link = f"disk:{directory}", checkpoint_dir.make_link(directory, name)

    async def connect(self) -> None:
        """Nothing to connect."""

    async def replace_weights(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        info = {
            "model_path": str(checkpoint_dir.checkpoint_path(self._directory, self._name, version)),
            "load_format": "safetensors",
            "weight_version": label,
            "flush_cache": False,
        }
        async with self._dialect.updating(label):
            await self._dialect.update("/update_weights_from_disk", info, UPDATE_SECONDS)

    async def disconnect(self) -> None:
        """Nothing to do: the trainer deletes its files."""


def _request_id() -> str:
    return f"slipstream-{uuid.uuid4().hex}"
