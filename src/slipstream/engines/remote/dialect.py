"""The interface between `RemoteEngine` and the servers of different makers.

`RemoteEngine` decides what is asked of a server and when; a `Dialect` implements it in the server's HTTP API. Calls raise what
`ServerClient` raises, and `ProtocolMismatch` for a malformed response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.remote.http_client import ServerClient
from slipstream.types import MemoryTag, Parameter, SamplingParams, TopLogprobs

CHECKPOINT_LABEL = re.compile(r"default|slipstream-[0-9a-f]{8}-checkpoint")
"""The label of a server that holds its checkpoint: the server's default, or that of an earlier engine."""

STREAM_INTERVAL = 16
"""Tokens per streamed event."""
JOIN_SECONDS = 150.0
"""Timeout for the server to meet a trainer. Longer than the trainer's, so that the trainer gives up first."""
UPDATE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What an engine needs to know of a server. Each dialect adds its own."""

    version: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    """Size of each worker's KV cache; 0 if unknown."""
    num_workers: int
    can_sleep: bool
    has_weights: bool
    """Whether the server holds the complete weights of its checkpoint."""
    is_paused: bool


class ServerScore(NamedTuple):
    """Logprobs of all tokens of a sequence but the first."""

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    label: str | None
    """As `Dialect.generate` returns it."""


class WeightChannel(Protocol):
    """How the weights of one trainer reach the server."""

    key: str
    """Offers with the same key share a connection."""
    link: bytes
    """Sent to the trainer."""

    async def connect(self) -> None:
        """Connect the server with the trainer. The server may answer only once the trainer, which needs the link first, has
        connected too."""

    async def replace_weights(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        """Make the paused server take these parameters and the label, and drop the prefix cache of older versions. After any
        error it may hold a mix of two versions."""

    async def disconnect(self) -> None:
        """Best effort: failures are not raised."""


class Dialect(Protocol):
    """One server, through the API of its maker."""

    needs_all_tensors: ClassVar[bool]
    """An update must bring every tensor or none."""
    must_be_idle_to_sleep: ClassVar[bool]
    """The server may hold no request when it goes to sleep."""
    resumes_on_wake: ClassVar[bool]
    """The server generates as soon as all of it is awake."""
    client: ServerClient
    server: ServerInfo

    def __init__(self, client: ServerClient, server: ServerInfo) -> None:
        self.client, self.server = client, server

    @property
    def name(self) -> str:
        """The server, for messages."""
        return self.client.name

    @property
    def transports(self) -> tuple[str, ...]: ...

    async def prepare(self) -> None:
        """Make the first calls that change the server: afterwards it is awake, and paused if `server.is_paused`."""

    # --- requests ---

    async def needs_rescoring(self, sampling: SamplingParams) -> bool:
        """Return whether raw logprobs need a second request. Raise `Unsupported` if the logprobs cannot be known."""

    async def generate(self, sample: Sample, version: int, salt: str, num_top: int) -> str | None:
        """Complete the sample, from its prompt or its tokens so far, with the `num_top` likeliest tokens at each position.
        Cancellation ends the request in the server. `salt` is unique to the version: prefix-cache entries of other
        versions do not match. Return the weight label of the response, if responses carry one."""

    async def score(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> ServerScore: ...

    # --- control ---

    async def check_alive(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def check_sleep(self, level: int) -> None:
        """Raise `Unsupported` if the server was not started with sleep enabled."""

    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        """`asleep` is what sleeps already."""

    async def wake(self, tags: Sequence[MemoryTag]) -> None: ...

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache, entries of older versions included."""

    # --- weights ---

    async def label(self) -> str: ...

    async def set_label(self, text: str) -> None:
        """Change the label of weights that stay as they are."""

    def channel(self, transport: str) -> WeightChannel:
        """Return the channel of an offer, without calling the server. Raise `TransferError` if the offer cannot be taken."""
