"""Sessions: the conversations of an agent as the exact tokens that the policy read and sampled.

A session is a tree of turns. A turn adds the tokens that its prompt added to the turn before, and the tokens sampled. A request
continues the turn whose conversation it extends. If another turn continues that one already, or none matches because the client
has edited the history, a new branch begins: a fork, never silent.

    turn 0 (branch 0) ──► turn 1 (branch 0) ──► turn 2 (branch 0)
                    └───► turn 3 (branch 1)                         the client changed its second message

Pure bookkeeping. Conversations are compared by chained digests of their messages, so no text is kept."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import xxhash

Fork: TypeAlias = Literal["edited", "repeated", "template"]
"""Why a turn does not continue the last turn of its branch. `edited`: the history is not the one of any last turn.
`repeated`: the same request was answered before. `template`: the chat template cannot render what follows the known tokens."""

ROOT = -1
"""The parent of a turn that starts a conversation."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    number: int
    parent: int
    branch: int
    asked: str
    """Digest of the conversation that it answers."""
    answered: str
    """Digest of the conversation with its answer."""
    is_closed: bool
    """Whether the policy ended it with a special token."""
    tokens: array[int] = field(compare=False)
    """What it added: tokens of the prompt, then the sampled ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in its session."""

    parent: int
    num_known: int
    """Messages whose tokens are known from the parent."""
    branch: int
    fork: Fork | None


@dataclass
class ChatSession:
    id: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields that replace those of every request."""
    turns: dict[int, SessionTurn] = field(default_factory=dict)
    is_busy: bool = False
    last_used: float = 0.0
    """On the monotonic clock."""

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns.values())

    @property
    def num_branches(self) -> int:
        return 1 + max((turn.branch for turn in self.turns.values()), default=-1)

    @property
    def next_number(self) -> int:
        return 1 + max(self.turns, default=-1)

    def place(self, digests: Sequence[str]) -> Place:
        """Find where a conversation continues, given by `conversation_digests`: at the turn that knows most of its messages."""
        last = {turn.answered: turn for turn in self.turns.values()}
        known = next((n for n in range(len(digests) - 1, 0, -1) if digests[n] in last), 0)
        parent = last[digests[known]].number if known else ROOT
        siblings = [turn for turn in self.turns.values() if turn.parent == parent]
        if not siblings:
            return Place(parent, known, self.turns[parent].branch if known else 0, None)
        is_repeated = any(turn.asked == digests[-1] for turn in siblings)
        return Place(parent, known, self.num_branches, "repeated" if is_repeated else "edited")

    def restart(self) -> Place:
        """The place of a conversation whose continuation the template cannot render."""
        return Place(ROOT, 0, self.num_branches, "template")

    def path(self, number: int) -> list[SessionTurn]:
        """Return the turns from the start of the conversation to this one."""
        turns = list[SessionTurn]()
        while number != ROOT:
            turns.append(self.turns[number])
            number = turns[-1].parent
        return turns[::-1]

    def tokens(self, number: int) -> tuple[int, ...]:
        """Return all tokens up to the end of a turn."""
        return tuple(token for turn in self.path(number) for token in turn.tokens)

    def last_turns(self) -> list[SessionTurn]:
        """Return the last turn of each branch, by branch."""
        return list({turn.branch: turn for _, turn in sorted(self.turns.items())}.values())


def conversation_digests(messages: Sequence[Mapping[str, Any]], *options: Any) -> list[str]:
    """Return the digest of each beginning of a conversation, that of no messages first. `options` is what else the template
    renders, such as tools."""
    digests = [_digest("", options)]
    for message in messages:
        digests.append(next_digest(digests[-1], message))  # each needs the one before
    return digests


def next_digest(before: str, message: Mapping[str, Any]) -> str:
    """Return the digest of a conversation with one more message."""
    return _digest(before, _plain(message))


def _digest(before: str, value: Any) -> str:
    return xxhash.xxh3_128_hexdigest((before + json.dumps(value, sort_keys=True)).encode())


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what clients add to it, or leave out, when they send it back."""
    plain = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if isinstance(content := plain.get("content"), list):
        plain["content"] = "\n".join(str(part.get("text")) if isinstance(part, dict) else str(part) for part in content)
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [
            [call.get("id"), call.get("function")] if isinstance(call, dict) else call for call in calls
        ]
    return plain
