"""The journal of sessions: every turn is a group of a rollout journal (`journal.py`) in a file of its own.

    SESSION/open     the settings of the session, if it has any
    SESSION/0, 1 …   one turn each: its place in the conversation, and its completion
    SESSION          the end of the session: its reward, and the numbers of the groups above

An answer is recorded before its client gets it. A session is taken as a whole, in one transaction, and has a position from then
on. Taken again it is the same, until the trainer has saved the position."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import SessionClosed, UnknownSession
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import FinishedSample, Journal
from slipstream.gateway.sessions import ChatSession, SessionTurn
from slipstream.runtime.private_files import private_file
from slipstream.types import Completion

FILE = "sessions.sqlite"
_OPEN = "open"


@dataclass(frozen=True, slots=True)
class TakenSession:
    position: int
    reward: float | None
    session: ChatSession
    completions: Mapping[int, Completion]
    """By turn, each with only the prompt tokens that its turn added."""


class SessionJournal:
    """For one thread at a time."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` holds the file; None keeps the journal in memory."""
        self._journal = Journal(private_file(directory / FILE) if directory is not None else None)
        self._numbers: dict[str, list[int]] = {}
        """Groups of each open session."""
        self.closed: dict[str, None] = {}
        """Sessions that are closed and not taken, oldest first."""

    def load(self) -> list[ChatSession]:
        """Return the sessions that a gateway which was killed left open."""
        sessions: dict[str, ChatSession] = {}
        for group, (data,) in self._journal.finished_groups():
            id, _, name = group.id.partition("/")
            if not name:
                self.closed[id] = None
                sessions.pop(id, None)
                self._numbers.pop(id, None)
                continue
            session = sessions.setdefault(id, ChatSession(id))
            self._numbers.setdefault(id, []).append(group.number)
            _restore(session, name, group.request, data)
        return list(sessions.values())

    def is_known(self, session: str) -> bool:
        """Whether the session was closed, taken or not."""
        return self._journal.find(session) is not None

    def open(self, session: ChatSession, version: int) -> None:
        self._add(session.id, _OPEN, dict(session.sampling), FinishedSample(b"", version, version, ""))

    def record(self, session: ChatSession, turn: SessionTurn, completion: Completion, num_prompt: int) -> None:
        """Record a turn that added `num_prompt` prompt tokens."""
        row = {
            "parent": turn.parent,
            "branch": turn.branch,
            "asked": turn.asked,
            "answered": turn.answered,
            "closed": turn.is_closed,
        }
        prompt = completion.prompt_token_ids
        added = replace(completion, prompt_token_ids=prompt[len(prompt) - num_prompt :], top_logprobs=(), routes=None)
        versions = [span.version for span in completion.spans]
        data = convert.completion_to_pb(added).SerializeToString()
        self._add(
            session.id, str(turn.number), row, FinishedSample(data, min(versions), max(versions), completion.engine)
        )

    def close_session(self, session: str, reward: float | None, version: int) -> None:
        row = {"reward": reward, "groups": self._numbers.get(session, [])}
        self._add(session, "", row, FinishedSample(b"", version, version, ""))
        self._numbers.pop(session, None)
        self.closed[session] = None

    def _add(self, session: str, name: str, row: Mapping[str, Any], sample: FinishedSample) -> None:
        id = f"{session}/{name}" if name else session
        number = self._journal.store(id, json.dumps(row).encode(), sample)
        if name:
            self._numbers.setdefault(session, []).append(number)

    def reward(self, session: str) -> float | None:
        """Return the reward of a closed session."""
        return _end(self._journal, session)[1]["reward"]

    def take(self, session: str, version: int) -> TakenSession:
        """Take a closed session, for a trainer of this version."""
        number, end = _end(self._journal, session)
        if (position := self._journal.position_of(number)) is None:
            self._journal.take([*end["groups"], number], version)
            self.closed.pop(session, None)
            position = self._journal.last_position()
        count = len(end["groups"])
        taken = ChatSession(session)
        completions: dict[int, Completion] = {}
        for group in self._journal.taken(position - count - 1, count):
            name = group.id.partition("/")[2]
            _restore(taken, name, group.request, group.completions[0])
            if name != _OPEN:
                completions[int(name)] = convert.completion_from_pb(pb.Completion.FromString(group.completions[0]))
        return TakenSession(position, end["reward"], taken, completions)

    def forget(self, position: int) -> None:
        """Delete the sessions up to a position that the trainer has saved."""
        self._journal.forget(min(position, self._journal.last_position()))

    def shut(self) -> None:
        self._journal.close()


def _end(journal: Journal, session: str) -> tuple[int, dict[str, Any]]:
    """Return the number of the group that ends a session, and what it says."""
    group = journal.find(session)
    if group is None:
        raise SessionClosed(f"the session {session!r} is open or was never opened; only a closed session can be taken")
    if not group.request:
        raise UnknownSession(f"the session {session!r} was taken, and its trajectories are deleted since it was saved")
    return group.number, json.loads(group.request)


def _restore(session: ChatSession, name: str, request: bytes, data: bytes) -> None:
    row = json.loads(request)
    if name == _OPEN:
        session.sampling = row
        return
    completion = pb.Completion.FromString(data)
    tokens = array("I", [*completion.prompt_token_ids, *completion.token_ids])
    number = int(name)
    session.turns[number] = SessionTurn(
        number, row["parent"], row["branch"], row["asked"], row["answered"], row["closed"], tokens
    )


def trajectories(taken: TakenSession) -> Iterable[tuple[int, tuple[int, ...], list[tuple[int, Completion]]]]:
    """Yield each branch: its number, all its tokens, and the turns sampled in it with their position. A turn that branches
    share belongs to the first of them; for the others its tokens are context. So every sampled token is in one trajectory."""
    for last in taken.session.last_turns():
        start, turns = 0, []
        for turn in taken.session.path(last.number):
            completion = taken.completions[turn.number]
            if turn.branch == last.branch:
                turns.append((start + len(completion.prompt_token_ids), completion))
            start += len(turn.tokens)
        yield last.branch, taken.session.tokens(last.number), turns
