"""Bearer tokens, and what their holders may do.

    RUN_DIR/token     the run's own token, with all rights; those who join by the run directory use it
    RUN_DIR/tokens    hashes of tokens with fewer rights, which `slipstream token` makes: one line of hash, role and name each

The gateway reads both files again when they change, so tokens are made, replaced and revoked while it runs. A role token
outlives the gateway; the run's own token does not."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from slipstream.errors import ConfigError
from slipstream.runtime.private_files import WatchedFile, private_directory, write_private

log = logging.getLogger(__name__)

Role: TypeAlias = Literal["run", "trainer", "engine", "client", "viewer"]
"""`run` may do everything; `trainer` everything but serve as an engine; `engine` only that; `client` generates and scores;
`viewer` reads the state of the fleet."""

RUN_TOKEN, ROLE_TOKENS = "token", "tokens"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RoleToken(NamedTuple):
    digest: str
    """SHA-256 of the token. It has 256 random bits, so no salt is needed."""
    role: Role
    name: str


class TokenTable:
    """The tokens that a gateway accepts."""

    def __init__(self, token: str, run_dir: Path | None = None) -> None:
        """`token` is the run's own, until the run directory holds another. Without a directory there are no role tokens."""
        self._token = token
        self._own: WatchedFile | None = None
        self._others: WatchedFile | None = None
        if run_dir is not None:
            self._own = WatchedFile(run_dir / RUN_TOKEN, token)
            self._others = WatchedFile(run_dir / ROLE_TOKENS, keeps_last=False)

    def own(self) -> str:
        """Return the run's own token."""
        return self._own.text().strip() if self._own is not None else self._token

    def role_of(self, token: bytes) -> Role | None:
        """Return what a token permits; None if it is not valid."""
        if token and hmac.compare_digest(token, self.own().encode()):
            return "run"
        return _roles(self._others.text()).get(_digest(token)) if self._others is not None else None


@functools.lru_cache(maxsize=8)
def _roles(text: str) -> dict[str, Role]:
    """Return the roles by hash. A damaged file permits nothing."""
    try:
        return {entry.digest: entry.role for entry in _parse(text)}
    except ConfigError as error:
        log.error("no role token is accepted: %s", error)
        return {}


def _parse(text: str) -> list[RoleToken]:
    entries = []
    for line in text.splitlines():
        digest, _, rest = line.partition(" ")
        role, _, name = rest.partition(" ")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or role not in get_args(Role) or not _NAME.fullmatch(name):
            raise ConfigError(f"the file {ROLE_TOKENS!r} of the run directory has a line that is not 'HASH ROLE NAME'")
        entries.append(RoleToken(digest, cast(Role, role), name))
    return entries


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


# --- making and revoking tokens ---------------------------------------------------------------------------------------


def make_token(run_dir: Path, role: Role, name: str = "") -> str:
    """Return a new token of this role for the gateway of a run directory, which may be running. Only its hash is stored.

    The role `run` replaces the run's own token; those who join by the run directory notice."""
    token = secrets.token_urlsafe(32)
    if role == "run":
        if not (run_dir / RUN_TOKEN).exists():
            raise ConfigError(
                f"no gateway is running in {run_dir}; each gateway makes a token of its own when it starts"
            )
        write_private(run_dir / RUN_TOKEN, token)
        return token
    if role not in get_args(Role):
        raise ConfigError(f"the role of a token must be one of {', '.join(get_args(Role))}, got {role!r}")
    name = name or f"{role}-{secrets.token_hex(3)}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a token's name must be 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
    with _editing(run_dir) as entries:
        if any(entry.name == name for entry in entries):
            raise ConfigError(f"{run_dir} has a token named {name!r}; choose another name, or revoke that one")
        entries.append(RoleToken(_digest(token.encode()), role, name))
    return token


def revoke_token(run_dir: Path, name: str) -> None:
    """Make a role token invalid. Streams that were opened with it end."""
    with _editing(run_dir) as entries:
        named = next((entry for entry in entries if entry.name == name), None)
        if named is None:
            names = ", ".join(f"{entry.name} ({entry.role})" for entry in entries)
            raise ConfigError(f"{run_dir} has no token named {name!r}; it has {names or 'none'}")
        entries.remove(named)


@contextlib.contextmanager
def _editing(run_dir: Path) -> Iterator[list[RoleToken]]:
    """Yield the role tokens of a run directory, and write them back. One process at a time."""
    file = private_directory(run_dir, "the run directory") / ROLE_TOKENS
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        entries = _parse(file.read_text()) if file.exists() else []
        yield entries
        write_private(file, "".join(f"{' '.join(entry)}\n" for entry in entries))
    finally:
        os.close(descriptor)
