"""Which engines have which prompt prefixes in their cache. Pure bookkeeping, in bounded memory.

Engines cache the KV of a prompt and reuse it for the next prompt with the same prefix: another sample of a group, the next turn
of a conversation, the same system prompt. A prompt is represented by hashes of its first 16, 32, 64, … tokens, so the longest
cached prefix is found in a few lookups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEVELS = (16, 32, 64, 128, 256, 512, 1024)
"""Prefix lengths in tokens; longer common prefixes are not distinguished."""
CHARACTERS_PER_TOKEN = 4
"""Estimate for prompts given as text."""
MAX_KEYS = 1 << 15
MAX_ENGINES_PER_PREFIX = 8
"""The engines that got a prefix last are remembered."""


class Prefix(NamedTuple):
    length: int
    """In tokens; an estimate for text."""
    key: int
    """Hash of the prefix."""


def prefixes(prompt: str | Sequence[int], adapter: str = "") -> tuple[Prefix, ...]:
    """Return the prefix of a prompt at each level, shortest first; the last one is the whole prompt unless it is longer.
    Prompts for the same adapter share these up to the level at which they diverge."""
    result: list[Prefix] = []
    unit = CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 1
    key, start = hash(adapter), 0
    for level in LEVELS:
        stop = min(level * unit, len(prompt))
        part = prompt[start:stop]
        key = hash((key, part if isinstance(part, str) else tuple(part)))
        result.append(Prefix(-(-stop // unit), key))
        if stop == len(prompt):
            break
        start = stop
    return tuple(result)


class PrefixAffinity:
    """The engines that were sent each prefix; the least recently used prefixes are dropped first."""

    def __init__(self, capacity: int = MAX_KEYS) -> None:
        self._capacity = capacity
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        """By prefix key."""
        self._version = -1

    def set_version(self, version: int) -> None:
        """The fleet serves this version. Engines never reuse the cache of an older one."""
        if version != self._version:
            self._version = version
            self._engines.clear()

    def engines_with(self, prompt_prefixes: Sequence[Prefix]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield `(length, engines)` of every known prefix, longest first."""
        for prefix in reversed(prompt_prefixes):
            if names := self._engines.get(prefix.key):
                yield prefix.length, names

    def add(self, prompt_prefixes: Sequence[Prefix], name: str) -> None:
        """Record that an engine is sent a prompt."""
        for prefix in prompt_prefixes:
            names = self._engines.get(prefix.key, ())
            if name not in names:
                self._engines[prefix.key] = (name, *names)[:MAX_ENGINES_PER_PREFIX]
            self._engines.move_to_end(prefix.key)
        while len(self._engines) > self._capacity:
            self._engines.popitem(last=False)

    def forget(self, name: str) -> None:
        """Remove an engine that is gone."""
        for key, names in list(self._engines.items()):
            if name in names:
                remaining = tuple(other for other in names if other != name)
                if remaining:
                    self._engines[key] = remaining
                else:
                    del self._engines[key]
