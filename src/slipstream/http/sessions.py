"""The open sessions of this server: which turn a chat request continues, and the limits on what sessions hold.

`gateway/sessions.py` decides where a request continues, `gateway/session_journal.py` keeps what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.config import HttpConfig
from slipstream.errors import Overloaded, RequestError, SessionBusy, SessionClosed, UnknownSession
from slipstream.gateway.session_journal import SessionJournal, TakenSession
from slipstream.gateway.sessions import ChatSession, Place, SessionTurn, conversation_digests, next_digest
from slipstream.types import Completion

MAX_TURNS = 4096
"""Turns of one session, in all its branches."""
MAX_CLOSED = 100_000
"""Sessions that are closed and wait to be taken."""
BYTES_PER_TOKEN, BYTES_PER_TURN = 4, 1000
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class OpenSessions:
    """Belongs to one event loop. One turn of a session runs at a time."""

    def __init__(self, config: HttpConfig, directory: Path | None) -> None:
        """`directory` is where the journal is kept; None keeps it in memory."""
        self._config, self._directory = config, directory
        self._by_id: dict[str, ChatSession] = {}
        self._num_bytes = 0

    @cached_property
    def journal(self) -> SessionJournal:
        """Opened on first use, with the sessions that were open when the gateway was killed."""
        journal = SessionJournal(self._directory)
        for session in journal.load():
            session.last_used = time.monotonic()
            self._by_id[session.id] = session
            self._num_bytes += _num_bytes(session)
        return journal

    def open(self, id: str, sampling: Mapping[str, Any], version: int) -> ChatSession:
        """Open a session whose requests all have these sampling fields; an empty id makes one. May be repeated."""
        id = id or f"session-{secrets.token_hex(12)}"
        session = self._find(id)
        if session is None:
            session = self._create(id)
            session.sampling = dict(sampling)
            if sampling:
                self.journal.open(session, version)
        elif session.sampling != dict(sampling):
            raise RequestError(f"the session {id!r} is open with other sampling fields: {dict(session.sampling)}")
        return session

    @contextlib.contextmanager
    def turn(self, id: str) -> Iterator[ChatSession]:
        """Hold a session for one turn, and open it if it is new. Raises `SessionBusy` while another turn runs."""
        session = self._find(id) or self._create(id)
        if session.is_busy:
            raise SessionBusy(
                f"another turn of the session {id!r} is running; wait for its answer, or use a session per conversation"
            )
        if len(session.turns) >= MAX_TURNS or self._num_bytes > self._config.max_session_bytes:
            raise Overloaded(
                f"the session {id!r} has {len(session.turns)} of {MAX_TURNS} turns, and all sessions hold {self._num_bytes} of "
                f"{self._config.max_session_bytes} bytes (max_session_bytes); close sessions that have ended"
            )
        session.is_busy = True
        try:
            yield session
        finally:
            session.is_busy, session.last_used = False, time.monotonic()
            if self._by_id.get(id) is session:  # it was not closed meanwhile
                self._by_id[id] = self._by_id.pop(id)

    def record(self, session: ChatSession, turn: SessionTurn, completion: Completion, num_prompt: int) -> None:
        if self._by_id.get(session.id) is not session:
            raise SessionClosed(f"the session {session.id!r} was closed during the turn, which is not part of it")
        self.journal.record(session, turn, completion, num_prompt)
        session.turns[turn.number] = turn
        self._num_bytes += _turn_bytes(turn)

    def close(self, id: str, reward: float | None, version: int) -> None:
        """End a session. Raises `SessionClosed` if it has ended with another reward."""
        if self._find(id, is_closing=True) is None:
            if not self.journal.is_known(id):
                raise UnknownSession(f"no session {id[:130]!r} is open, and none has ended; its first turn opens it")
            if self.journal.reward(id) != reward:
                raise SessionClosed(f"the session {id!r} has ended with the reward {self.journal.reward(id)}")
            return
        self.journal.close_session(id, reward, version)
        self._num_bytes -= _num_bytes(self._by_id.pop(id))

    def take(self, id: str, version: int, saved: int) -> TakenSession:
        """Take a closed session. Positions up to `saved` are deleted."""
        self.journal.forget(saved)
        if self._find(id, is_closing=True) is not None:
            raise SessionBusy(f"the session {id!r} is open; close it before it is taken")
        if not self.journal.is_known(id):
            raise UnknownSession(f"no session {id[:130]!r} was closed here")
        return self.journal.take(id, version)

    def all_open(self) -> list[ChatSession]:
        self._expire()
        return list(self._by_id.values())

    def shut(self) -> None:
        if "journal" in self.__dict__:
            self.journal.shut()

    def _find(self, id: str, is_closing: bool = False) -> ChatSession | None:
        if not _ID.fullmatch(id):
            raise RequestError(
                f"a session's id must be 1 to 128 letters, digits, '.', '_', ':' or '-', got {id[:130]!r}"
            )
        self._expire()
        session = self._by_id.get(id)
        if session is None and not is_closing and self.journal.is_known(id):
            raise SessionClosed(f"the session {id!r} has ended; use another id for a new one")
        return session

    def _create(self, id: str) -> ChatSession:
        if len(self._by_id) >= self._config.max_sessions or len(self.journal.closed) >= MAX_CLOSED:
            raise Overloaded(
                f"this server holds {len(self._by_id)} of {self._config.max_sessions} sessions (max_sessions), and "
                f"{len(self.journal.closed)} of {MAX_CLOSED} closed ones that no trainer has taken; close or take some"
            )
        session = self._by_id[id] = ChatSession(id, last_used=time.monotonic())
        return session

    def _expire(self) -> None:
        """Close the sessions that nobody has used for `session_seconds`, without a reward."""
        _ = self.journal
        before = time.monotonic() - self._config.session_seconds
        for id, session in list(self._by_id.items()):
            if session.last_used > before:
                break  # they are in the order of their last use
            if not session.is_busy:
                self.journal.close_session(id, None, -1)
                self._num_bytes -= _num_bytes(self._by_id.pop(id))


@dataclass
class ChatTurn:
    """A chat request: its prompt, and where it stands in its session if it has one."""

    prompt: tuple[int, ...]
    session: ChatSession | None = None
    place: Place | None = None
    num_prompt: int = 0
    """Tokens of the prompt that are not those of the turn before."""
    digest: str = ""
    """Digest of the request's conversation."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the answer says about the session."""
        if self.session is None or self.place is None:
            return {}
        place = self.place
        facts = {"id": self.session.id, "turn": self.session.next_number, "branch": place.branch}
        return {"session": facts | {"parent": place.parent if place.parent >= 0 else None, "fork": place.fork}}

    def record(
        self, sessions: OpenSessions, tokenizer: ChatTokenizer, completion: Completion, reply: Mapping[str, Any]
    ) -> None:
        """Add the completion to the session. `reply` is the message that the client gets."""
        if self.session is None or self.place is None:
            return
        answered = next_digest(self.digest, reply)
        added = array("I", [*self.prompt[len(self.prompt) - self.num_prompt :], *completion.token_ids])
        is_closed = completion.finish_reason == "stop" and tokenizer.is_special(completion.token_ids)
        turn = SessionTurn(
            self.session.next_number, self.place.parent, self.place.branch, self.digest, answered, is_closed, added
        )
        sessions.record(self.session, turn, completion, self.num_prompt)


async def make_turn(
    tokenizer: ChatTokenizer, max_length: int, session: ChatSession | None, messages: Sequence[Any], *options: Any
) -> ChatTurn:
    """Return the prompt of a chat request. In a session that is the tokens so far, followed by those of what the client has
    appended. `options` are the other arguments of `ChatTokenizer.render_chat`."""
    if session is None:
        return ChatTurn(await asyncio.to_thread(tokenizer.encode_chat, max_length, messages, *options))
    digests = conversation_digests(messages, *options)
    place = session.place(digests)
    if place.num_known:
        closed = session.turns[place.parent].is_closed
        arguments = (max_length, messages, place.num_known, closed, *options)
        appended = await asyncio.to_thread(tokenizer.encode_appended, *arguments)
        if appended is not None:
            prompt = session.tokens(place.parent) + appended
            return ChatTurn(prompt, session, place, len(appended), digests[-1])
        place = session.restart()
    prompt = await asyncio.to_thread(tokenizer.encode_chat, max_length, messages, *options)
    return ChatTurn(prompt, session, place, len(prompt), digests[-1])


def _num_bytes(session: ChatSession) -> int:
    return sum(map(_turn_bytes, session.turns.values()))


def _turn_bytes(turn: SessionTurn) -> int:
    return BYTES_PER_TURN + BYTES_PER_TOKEN * len(turn.tokens)
