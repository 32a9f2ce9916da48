"""What a server says of itself, and how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from slipstream.engines.remote.client import Client


@dataclass(frozen=True, slots=True)
class Server:
    """The settings of a server that concern any engine; each dialect adds its own."""

    version: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    """Of each worker; 0 where it does not say."""
    num_workers: int
    can_sleep: bool
    has_weights: bool
    """Those of its checkpoint, and whole."""
    is_paused: bool


class Asked:
    """An answer, read field by field."""

    def __init__(self, client: Client, call: str, answer: Any) -> None:
        self._client, self._call, self._answer = client, call, answer

    def get(self, *path: str, default: Any) -> Any:
        found = self._answer
        for key in path:
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return found

    def has(self, *path: str) -> bool:
        return self.get(*path, default=None) is not None

    def text(self, *path: str) -> str:
        return cast(str, self._of(str, path))

    def number(self, *path: str) -> int:
        return cast(int, self._of(int, path))

    def flag(self, *path: str) -> bool:
        found = self.get(*path, default=None)
        if not isinstance(found, bool):
            raise self._client.nonsense(self._call, f"true or false at {'.'.join(path)}", self._answer)
        return found

    def _of(self, kind: type, path: tuple[str, ...]) -> Any:
        found = self.get(*path, default=None)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise self._client.nonsense(self._call, f"{kind.__name__} at {'.'.join(path)}", self._answer)
        return found
