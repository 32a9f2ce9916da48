"""Which engines have computed which beginnings of prompts. Pure bookkeeping, in bounded memory.

Engines keep what they have computed of a prompt, and find it again for the next one that begins alike: another sample of a
group, the next turn of a conversation, the same system prompt. A prompt is known here by hashes of its first 16, 32, 64, …
tokens, so that the longest beginning that somebody has is found in a few lookups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEVELS = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens. What two prompts have in common beyond the last does not enter into it."""
CHARACTERS = 4
"""Of a text that count as a token."""
MAX_KEYS = 1 << 15
MAX_HOMES = 8
"""Engines remembered for one beginning: those that got it last."""


class Prefix(NamedTuple):
    """The beginning of a prompt."""

    length: int
    """Tokens, roughly."""
    key: int


def prefixes(prompt: str | Sequence[int]) -> tuple[Prefix, ...]:
    """Of a prompt's beginnings up to each level, the shortest first; the last is the prompt itself, unless it is longer.
    Prompts that begin alike have the same up to the level where they part."""
    found: list[Prefix] = []
    unit = CHARACTERS if isinstance(prompt, str) else 1
    key = start = 0
    for level in LEVELS:
        stop = min(level * unit, len(prompt))
        part = prompt[start:stop]
        key = hash((key, part if isinstance(part, str) else tuple(part)))
        found.append(Prefix(-(-stop // unit), key))
        if stop == len(prompt):
            break
        start = stop
    return tuple(found)


def most_of(is_text: bool) -> int:
    """How much of a prompt `prefixes` looks at."""
    return LEVELS[-1] * (CHARACTERS if is_text else 1)


class Affinity:
    """Beginnings and the engines that were sent them. What has not been asked for longest is forgotten first."""

    def __init__(self, capacity: int = MAX_KEYS) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._version = -1

    @property
    def num_keys(self) -> int:
        return len(self._homes)

    def at(self, version: int) -> None:
        """The fleet serves this version. What an older one has computed, engines never use."""
        if version != self._version:
            self._version = version
            self._homes.clear()

    def homes(self, beginnings: Sequence[Prefix]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """`(length, engines)` of every beginning that somebody has, the longest first."""
        for prefix in reversed(beginnings):
            if names := self._homes.get(prefix.key):
                yield prefix.length, names

    def learn(self, beginnings: Sequence[Prefix], name: str) -> None:
        """An engine is being sent a prompt."""
        for prefix in beginnings:
            names = self._homes.get(prefix.key, ())
            if name not in names:
                self._homes[prefix.key] = (name, *names)[:MAX_HOMES]
            self._homes.move_to_end(prefix.key)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def forget(self, name: str) -> None:
        """An engine is gone, and what it had computed with it."""
        for key, names in list(self._homes.items()):
            if name in names:
                left = tuple(other for other in names if other != name)
                if left:
                    self._homes[key] = left
                else:
                    del self._homes[key]
