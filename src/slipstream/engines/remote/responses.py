"""Checked reading of a server's JSON responses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from slipstream.engines.remote.http_client import ServerClient
from slipstream.errors import ProtocolMismatch

MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a response of an unexpected shape raises."""

MakeMismatch: TypeAlias = Callable[[str, str, Any], ProtocolMismatch]
"""`ServerClient.mismatch`: makes an error from the call, what was expected, and what came."""


class ResponseReader:
    """The fields of a response, by path. A field of the wrong type raises `ProtocolMismatch`."""

    def __init__(self, client: ServerClient, call: str, response: Any) -> None:
        self._client, self._call, self._response = client, call, response

    def get(self, *path: str, default: Any) -> Any:
        value = self._response
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def has(self, *path: str) -> bool:
        return self.get(*path, default=None) is not None

    def text(self, *path: str) -> str:
        return cast(str, self._typed(str, path))

    def number(self, *path: str) -> int:
        return cast(int, self._typed(int, path))

    def flag(self, *path: str) -> bool:
        value = self.get(*path, default=None)
        if not isinstance(value, bool):
            raise self._client.mismatch(self._call, f"true or false at {'.'.join(path)}", self._response)
        return value

    def _typed(self, kind: type, path: tuple[str, ...]) -> Any:
        value = self.get(*path, default=None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._client.mismatch(self._call, f"{kind.__name__} at {'.'.join(path)}", self._response)
        return value


async def get_response(client: ServerClient, path: str) -> ResponseReader:
    return ResponseReader(client, f"GET {path.partition('?')[0]}", await client.get(path))


def parse_logprob(value: Any, least: float = -math.inf) -> float:
    """Return a logprob that is finite and more than `least`, or raise `ValueError`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least < value < 1e-3:
        raise ValueError(f"{value!r} is not a logprob")
    return float(value)
