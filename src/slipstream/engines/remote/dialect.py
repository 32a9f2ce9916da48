"""What differs between the servers of different makers: their words, and what they do unasked.

`RemoteEngine` decides what is asked of a server, and when; a `Dialect` says it, and reads the answer. Calls raise what
`Client` raises, and `ProtocolMismatch` where an answer makes no sense."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from slipstream.engines.remote.client import Client
from slipstream.engines.remote.server import Server
from slipstream.engines.sequence import Sample
from slipstream.errors import EngineLost
from slipstream.types import MemoryTag, Parameter, SamplingParams, TopLogprobs

FRESH = re.compile(r"default|slipstream-[0-9a-f]{8}-checkpoint")
"""The label of a server that nobody has updated: its own word, or that of an engine that was here before."""


class Scores(NamedTuple):
    """Of a sequence: what follows each token but the last."""

    logprobs: list[float]
    tops: list[TopLogprobs]
    label: str | None
    """As `Dialect.draw` returns it."""


class Way(Protocol):
    """By which weights of one trainer reach the server."""

    key: str
    """Two offers with the same one need not be joined anew."""
    link: bytes
    """For the trainer."""

    async def join(self) -> None:
        """The server meets the trainer; it may answer only when the trainer has come, which it does once it has the link."""
        ...

    async def replace(self, parameters: Sequence[Parameter], version: int, label: str) -> None:
        """The server, which is paused, takes these, carries the label, and forgets the prefixes of older versions. Whatever is
        raised, it may now hold half of the one version and half of the other."""
        ...

    async def leave(self) -> None:
        """What has been joined is of no use any more. Never raises."""
        ...


class Dialect(ABC):
    """One server, in its words."""

    takes_all: ClassVar[bool]
    """An update brings every tensor or none."""
    idle_to_sleep: ClassVar[bool]
    """No request may be in its hands when it goes to sleep."""
    steps_when_awake: ClassVar[bool]
    """Once all of it is awake it generates, unasked."""

    def __init__(self, client: Client, server: Server) -> None:
        self.client, self.server = client, server

    @property
    def where(self) -> str:
        """For messages."""
        return self.client.who

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]: ...

    @abstractmethod
    async def settle(self) -> None:
        """The first calls that change the server: it is awake, and paused or not as `server.is_paused` says."""

    # --- requests ---

    @abstractmethod
    async def needs_score(self, sampling: SamplingParams) -> bool:
        """Whether raw logprobs must be asked for afterwards. Raises `Unsupported` where what is wanted cannot be known."""

    @abstractmethod
    async def draw(self, sample: Sample, version: int, salt: str, count: int) -> str | None:
        """From the prompt, or from what there is of the completion, to the end, with the `count` likeliest at each position.
        Cancelled, it ends the request in the server. `salt` names the version as nobody else would: what another one has put
        into the prefix cache is not found. Returns the label that the answer carried, if answers do."""

    @abstractmethod
    async def scores(self, tokens: tuple[int, ...], top_k: int, salt: str, priority: int) -> Scores: ...

    # --- control ---

    @abstractmethod
    async def check_alive(self) -> None: ...

    @abstractmethod
    async def pause(self) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    def check_sleep(self, level: int) -> None:
        """Raises `Unsupported` where the server was not started for it."""

    @abstractmethod
    async def sleep(self, level: int, asleep: Sequence[MemoryTag]) -> None:
        """`asleep` is what sleeps already."""

    @abstractmethod
    async def wake(self, tags: Sequence[MemoryTag]) -> None: ...

    @abstractmethod
    async def forget_prefixes(self) -> None:
        """What is in the prefix cache, that of an older version too."""

    # --- weights ---

    @abstractmethod
    async def label(self) -> str: ...

    @abstractmethod
    async def put_label(self, text: str) -> None:
        """On weights that stay as they are."""

    @abstractmethod
    def way(self, transport: str) -> Way:
        """Of an offer. Raises `TransferError` for one that cannot be taken; asks nothing of the server."""


class Label:
    """The weight version that the server carries for us. A server that was restarted, or updated by someone else, carries
    another one: what it generated is then not what we think."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._own, self._text = dialect, secrets.token_hex(4), ""

    def of(self, what: int | str) -> str:
        return f"slipstream-{self._own}-{what}"

    async def put(self, what: int | str) -> None:
        """On weights that stay as they are."""
        await self._dialect.put_label(self.of(what))
        self.was_put(what)

    def was_put(self, what: int | str) -> None:
        self._text = self.of(what)

    async def ask(self) -> None:
        expected = self._text
        self._compare(expected, await self._dialect.label())

    def check(self, found: str) -> None:
        self._compare(self._text, found)

    def _compare(self, expected: str, found: str) -> None:
        if found != expected:
            raise EngineLost(
                f"{self._dialect.where} holds weights labelled {found!r} instead of {expected!r}: it was restarted, or "
                "somebody else updates it. Start this engine again"
            )


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the distribution that is sampled is the model's own, or its likeliest token is taken: then both kinds of
    logprobs are the same, and it does not matter where a completion began."""
    return (
        sampling.temperature in (0, 1)
        and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
        and not sampling.logit_bias
        and (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
        and not sampling.min_tokens
    )
