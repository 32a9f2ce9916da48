"""An SGLang server (0.5.16 or later), started with --dtype and --incremental-streaming-output.

What it does, as its source has it, decides the order of calls here. An update that is to flush the cache, or a release of
memory, while any request is in its hands ends the server: so updates flush nothing, requests are aborted by name, since a
closed connection is noticed two seconds late, and the cache is flushed by itself, which answers whether nothing was left.
Whether it is paused it does not say, so a label says whether an update was left half done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slipstream.config import LOOPBACK
from slipstream.engines.remote import sglang_words as words
from slipstream.engines.remote.client import Client
from slipstream.engines.remote.dialect import FRESH, Dialect, Scores, Way, is_plain
from slipstream.engines.remote.server import Asked
from slipstream.engines.remote.sglang_words import SglangServer
from slipstream.engines.sequence import Sample
from slipstream.errors import ConfigError, EngineFailure, SlipstreamError, TransferError, Unsupported
from slipstream.model.config import ModelConfig
from slipstream.types import MemoryTag, Parameter, SamplingParams
from slipstream.weights.image import num_bytes
from slipstream.weights.plan import DTYPE_BYTES
from slipstream.weights.transports import checkpoint, sglang_gloo
from slipstream.weights.transports.gathering import chunks

log = logging.getLogger(__name__)

LEAST = (0, 5, 16)
"""The first release that tells the logprobs of what was sampled where the distribution is truncated."""
READ = "0.5.18"
"""The release whose source this was written by."""
JOIN_SECONDS = 150.0
"""Longer than a trainer waits, so that it is the one to give up."""
UPDATE_SECONDS = 600.0
IDLE_SECONDS = 30.0
"""Within which nothing must be left in its hands, where that matters."""
FLUSH_SECONDS = 1.0
ABORT_SECONDS = 5.0
_DTYPES = {"half": "float16", "float": "float32"}


class SglangDialect(Dialect):
    takes_all, idle_to_sleep, steps_when_awake = False, True, False
    server: SglangServer

    def __init__(self, client: Client, server: SglangServer) -> None:
        super().__init__(client, server)
        self._checkpoints = checkpoint.new_name()
        self._tells_processed: bool | None = None
        self._probing = asyncio.Lock()

    @classmethod
    async def meet(cls, client: Client, model: ModelConfig) -> SglangDialect:
        """Raises `ConfigError` that says what is wrong with the server and how to start it instead."""
        server = await _look(client, model)
        if not server.is_deterministic:
            log.warning(
                "the SGLang server at %s heeds no seeds; start it with --enable-deterministic-inference if one seed "
                "should give one completion",
                client.url,
            )
        return cls(client, server)

    @property
    def transports(self) -> tuple[str, ...]:
        return (sglang_gloo.NAME, "disk") if self.server.can_join else ("disk",)

    async def settle(self) -> None:
        await (self.pause() if self.server.is_paused else self.resume())

    # --- requests ---

    async def needs_score(self, sampling: SamplingParams) -> bool:
        words.check_sampling(sampling, self.server)
        if is_plain(sampling):
            return False
        if sampling.temperature != 0 and not words.is_truncated(sampling) and not await self._probed():
            raise Unsupported(
                f"{self.where} reports logprobs before temperature, so those of the distribution that is sampled are not "
                "known; start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1 without penalties and bias"
            )
        return True

    async def _probed(self) -> bool:
        async with self._probing:
            if self._tells_processed is None:
                answer = await self._ask(words.probe(self.server, _rid()))
                self._tells_processed = words.tells_processed(answer, self.server, self.client.nonsense)
            return self._tells_processed

    async def draw(self, sample: Sample, version: int, salt: str, count: int) -> str | None:
        rid, ended, label = _rid(), False, None
        body = words.completion_request(sample, self.server, salt, rid, count)
        try:
            async with contextlib.aclosing(self.client.events(words.PATH, body)) as events:
                async for event in events:
                    ended, label = words.take_event(sample, event, version, count, self.client.nonsense)
                    if ended or sample.stopped:
                        break
            return label
        finally:
            if not ended:
                await self._abort(rid)

    async def scores(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> Scores:
        answer = await self._ask(words.score_request(tokens, top_k, self.server, salt, _rid(), priority))
        return words.take_score(answer, tokens, top_k, self.client.nonsense)

    async def _ask(self, body: dict[str, Any]) -> Any:
        answer = None
        try:
            answer = await self.client.post(words.PATH, body, math.inf)
            return answer
        finally:
            if answer is None:
                await self._abort(body["rid"])

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(SlipstreamError):
            await self.client.order("/abort_request", {"rid": rid}, ABORT_SECONDS)

    # --- control ---

    async def check_alive(self) -> None:
        await self.label()  # its /health draws a token, which a paused server does not

    async def pause(self) -> None:
        """What runs goes back to the queue: from there it can be aborted."""
        await self.client.order("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.client.order("/continue_generation", {})

    def check_sleep(self, level: int) -> None:
        if not self.server.can_sleep:
            raise Unsupported(f"{self.where} was started without --enable-memory-saver")
        if level == 1 and not self.server.keeps_weights:
            raise Unsupported(
                f"{self.where} was started without --enable-weights-cpu-backup, so that its weights would be lost; sleep at "
                "level 2, and sync when it wakes"
            )

    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        tags = [tag for tag in ("kv_cache", "weights") if tag not in asleep]
        if not asleep:
            await self.forget_prefixes()  # after which nothing is in its hands
        if tags:
            await self.client.order("/release_memory_occupation", {"tags": tags}, UPDATE_SECONDS)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self.client.order("/resume_memory_occupation", {"tags": list(tags)}, UPDATE_SECONDS)

    async def forget_prefixes(self) -> None:
        if refused := await self._flush(IDLE_SECONDS):
            raise refused

    async def _flush(self, seconds: float) -> EngineFailure | None:
        """The last refusal, if it had requests in its hands all this time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                await self.client.order("/flush_cache")
                return None
            except EngineFailure as error:  # those that were cut off may be there for a moment
                if asyncio.get_running_loop().time() > deadline:
                    return EngineFailure(f"{error}. Does somebody else send it requests?")
                await asyncio.sleep(0.02)

    # --- weights ---

    async def label(self) -> str:
        return Asked(self.client, "GET /model_info", await self.client.get("/model_info")).text("weight_version")

    async def put_label(self, text: str) -> None:
        await self.told("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    def way(self, transport: str) -> Way:
        name, _, directory = transport.partition(":")
        if name == "disk" and directory:
            return _Disk(self, directory, self._checkpoints)
        meeting = sglang_gloo.invited(transport)
        if not self.server.can_join:
            raise TransferError(
                f"{self.where} is split in a way in which its workers join no trainer; sync from a disk"
            )
        if meeting.host in LOOPBACK and urlsplit(self.client.url).hostname not in LOOPBACK:
            raise TransferError(
                f"the trainer waits at {meeting.host}:{meeting.port}, where {self.where} cannot find it: set "
                f"{sglang_gloo.ADDRESS} to an address of the trainer's host on a network of your own, or sync from a disk"
            )
        return _Gloo(self, meeting)

    async def told(self, path: str, body: dict[str, Any], seconds: float | None = None) -> None:
        answer = await self.client.post(path, body, seconds)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise self.client.nonsense(f"POST {path}", "success", answer)

    async def spoil(self, label: str) -> None:
        """From here on the weights are nobody's, until the update has ended."""
        await self.put_label(f"{label}-unfinished")

    async def freshen(self) -> None:
        """After an update. Our own prompts find nothing of an older version anyway; other people's may."""
        if refused := await self._flush(FLUSH_SECONDS):
            log.warning("%s: prefixes of an older version stay in its cache", refused)


class _Gloo:
    """The workers join a group of the trainer's, and take its buckets, one call for each."""

    def __init__(self, dialect: SglangDialect, meeting: sglang_gloo.Meeting) -> None:
        self._dialect, self._meeting, self.key = dialect, meeting, str(meeting)
        self._world_size = 1 + dialect.server.num_workers
        self.link = sglang_gloo.make_link(meeting, self._world_size, dialect.client.url)

    async def join(self) -> None:
        info = {
            "master_address": self._meeting.host,
            "master_port": self._meeting.port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "group_name": self._meeting.group,
            "backend": "gloo",
        }
        await self._dialect.told("/init_weights_update_group", info, JOIN_SECONDS)

    async def replace(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        await self._dialect.spoil(label)
        dtype = self._dialect.server.dtype
        sizes = [num_bytes([p], dtype) for p in parameters]
        for bucket in chunks(sizes, sglang_gloo.BUCKET_BYTES):
            info = {
                "names": [parameters[i].name for i in bucket],
                "dtypes": [dtype] * len(bucket),
                "shapes": [list(parameters[i].shape) for i in bucket],
                "group_name": self._meeting.group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            await self._dialect.told("/update_weights_from_distributed", info, UPDATE_SECONDS)
        await self._dialect.put_label(label)
        await self._dialect.freshen()

    async def leave(self) -> None:
        with contextlib.suppress(SlipstreamError):
            await self._dialect.client.order(
                "/destroy_weights_update_group", {"group_name": self._meeting.group}, ABORT_SECONDS
            )


class _Disk:
    """The server reads what the trainer has written."""

    def __init__(self, dialect: SglangDialect, directory: str, name: str) -> None:
        self._dialect, self._directory, self._name = dialect, directory, name
        self.key, self.link = f"disk:{directory}", checkpoint.make_link(directory, name)

    async def join(self) -> None:
        """There is nobody to meet."""

    async def replace(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        await self._dialect.spoil(label)
        info = {
            "model_path": str(checkpoint.place(self._directory, self._name, version)),
            "load_format": "safetensors",
            "weight_version": label,
            "flush_cache": False,
        }
        await self._dialect.told("/update_weights_from_disk", info, UPDATE_SECONDS)
        await self._dialect.freshen()

    async def leave(self) -> None:
        """The trainer takes its files away."""


def _rid() -> str:
    return f"slipstream-{uuid.uuid4().hex}"


# --- what it says of itself ---


async def _look(client: Client, model: ModelConfig) -> SglangServer:
    ask = Asked(client, "GET /server_info", await client.get("/server_info"))
    version = _version(client, ask)
    _check(client, ask, model)
    info = Asked(client, "GET /model_info", await client.get("/model_info"))
    label, load_format = info.text("weight_version"), info.get("load_format", default="")
    has_weights = FRESH.fullmatch(label) is not None and load_format != "dummy"
    page_size = ask.number("page_size")
    split = ask.number("pp_size") > 1 or (ask.number("dp_size") > 1 and not ask.flag("enable_dp_attention"))
    sign = 1 if ask.get("schedule_low_priority_values_first", default=False) is True else -1
    dtype = ask.text("dtype")
    return SglangServer(
        version=version,
        dtype=_DTYPES.get(dtype, dtype),
        max_model_len=ask.number("max_req_input_len") - 1,  # so that what was completed can be scored
        block_size=page_size,
        num_blocks=max(1, ask.number("max_total_num_tokens") // page_size - 2),  # what it keeps back
        kv_cache_bytes=_kv_cache_bytes(ask),
        num_workers=ask.number("tp_size"),
        can_sleep=ask.flag("enable_memory_saver"),
        has_weights=has_weights,
        is_paused=not has_weights,
        num_tokens=model.vocab_size,
        ends=model.eos_token_ids,
        is_deterministic=ask.flag("enable_deterministic_inference"),
        priority_sign=sign if ask.flag("enable_priority_scheduling") else 0,
        keeps_weights=ask.flag("enable_weights_cpu_backup"),
        can_join=not split,
    )


def _version(client: Client, ask: Asked) -> str:
    version = ask.text("version")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        raise client.nonsense("GET /server_info", "a version like 0.5.18", version)
    if tuple(int(part) for part in numbers.groups()) < LEAST:
        raise ConfigError(
            f"the SGLang server at {client.url} is version {version}; Slipstream needs {'.'.join(map(str, LEAST))} or later "
            f"(written by {READ}), which tells the logprobs that a loss needs"
        )
    return version


def _check(client: Client, ask: Asked, model: ModelConfig) -> None:
    where = f"the SGLang server at {client.url}"
    if not ask.flag("incremental_streaming_output"):
        raise ConfigError(
            f"{where} repeats the whole of a completion with every event; start it with --incremental-streaming-output"
        )
    if (dtype := ask.text("dtype")) == "auto":
        raise ConfigError(f"{where} does not say which dtype it has chosen; start it with --dtype bfloat16, or another")
    if _DTYPES.get(dtype, dtype) not in DTYPE_BYTES:
        raise ConfigError(f"{where} holds {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
    for name, what in (("quantization", "quantises its weights"), ("speculative_algorithm", "guesses with a draft")):
        if (found := ask.get(name, default=None)) is not None:
            raise ConfigError(f"{where} {what} ({found}), which Slipstream cannot keep in step with the policy")
    if ask.get("disaggregation_mode", default="null") != "null":
        raise ConfigError(f"{where} is one half of a server (disaggregation_mode); Slipstream needs a whole one")
    if ask.number("max_req_input_len") >= model.max_position_embeddings:
        raise ConfigError(
            f"{where} takes {ask.number('max_req_input_len')} tokens, the model in --model {model.max_position_embeddings}: "
            "is it another model?"
        )


def _kv_cache_bytes(ask: Asked) -> int:
    """Of each worker; 0 where it does not say."""
    states = ask.get("internal_states", default=None)
    usage = (
        states[0].get("memory_usage") if isinstance(states, list) and states and isinstance(states[0], dict) else None
    )
    found = usage.get("kvcache") if isinstance(usage, dict) else None
    return int(found * 2**30) if isinstance(found, (int, float)) else 0
