"""Checked reading of a server's JSON responses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from slipstream.engines.remote.http_client import ServerClient
from slipstream.errors import ConfigError, ProtocolMismatch

T = TypeVar("T")

MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a response of an unexpected shape raises."""

MakeMismatch: TypeAlias = Callable[[str, str, Any], ProtocolMismatch]
"""`ServerClient.mismatch`: makes an error from the call, what was expected, and what came."""


class ResponseReader:
    """The fields of a response, by path (keys and list indices). A field of the wrong type raises `ProtocolMismatch`."""

    def __init__(self, client: ServerClient, call: str, response: Any) -> None:
        self._client, self._call, self._response = client, call, response

    def get(self, *path: str | int, default: Any) -> Any:
        value = self._response
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return default
        return value

    def text(self, *path: str | int) -> str:
        return self._typed(str, "str", path)

    def number(self, *path: str | int) -> int:
        return self._typed(int, "int", path)

    def flag(self, *path: str | int) -> bool:
        return self._typed(bool, "true or false", path)

    def _typed(self, kind: type[T], expected: str, path: tuple[str | int, ...]) -> T:
        value = self.get(*path, default=None)
        if type(value) is not kind:
            raise self._client.mismatch(self._call, f"{expected} at {'.'.join(map(str, path))}", self._response)
        return value


async def get_response(client: ServerClient, path: str) -> ResponseReader:
    return ResponseReader(client, f"GET {path.partition('?')[0]}", await client.get(path))


def check_version(client: ServerClient, call: str, version: str, minimum: tuple[int, ...], why: str) -> None:
    """Raise `ConfigError` if the server's `version` is older than `minimum`; `why` completes the message."""
    numbers = re.match(r"\.".join([r"(\d+)"] * len(minimum)), version)
    oldest = ".".join(map(str, minimum))
    if numbers is None:
        raise client.mismatch(call, f"a version like {oldest}", version)
    if tuple(map(int, numbers.groups())) < minimum:
        raise ConfigError(f"{client.name} is version {version}; Slipstream needs {oldest} or later {why}")


def parse_logprob(value: Any, least: float = -math.inf) -> float:
    """Return a logprob that is finite and more than `least`, or raise `ValueError`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least < value < 1e-3:
        raise ValueError(f"{value!r} is not a logprob")
    return float(value)
