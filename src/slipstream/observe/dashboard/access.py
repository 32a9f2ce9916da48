"""Who may see the dashboard: a login, a cookie that scripts cannot read, and requests of its own pages only.

A session is opened with a bearer token, or with the code in the URL that `slipstream dashboard` prints, which works once. The
cookie holds a random number and says nothing by itself; the token is checked again with every request, so that revoking it
ends its sessions."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import cookie_parser

from slipstream.gateway.tokens import Role

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with "no-referrer", browsers send the login form with "Origin: null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of every answer."""
ROLES: Collection[Role] = ("run", "trainer", "client", "viewer")
SESSION_SECONDS = 12 * 3600.0
"""A session ends after this long without a request."""
MAX_SESSIONS = 1000
MAX_TOKEN_CHARACTERS = 200
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


class LoginSession(NamedTuple):
    token: bytes
    """Empty for a session that was opened with the code."""
    used_at: float


@dataclass
class Access:
    role_of: Callable[[bytes], Role | None]
    """What a token permits; None if it is not valid."""
    host: str
    """The name or address under which the server is reached."""
    is_tls: bool = False
    code: str = ""
    """Opens a session, once; empty if there is none."""
    _sessions: OrderedDict[str, LoginSession] = field(default_factory=OrderedDict)

    def is_our_host(self, headers: Mapping[str, str]) -> bool:
        """Whether the request names this server. A page of another name that resolves to our address does not (DNS
        rebinding)."""
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            return False
        names = LOOPBACK_NAMES if self.host in LOOPBACK_NAMES else (self.host.lower(),)
        return name in names

    def is_our_page(self, headers: Mapping[str, str], is_navigation: bool) -> bool:
        """Whether the request comes from a page of this server, or from no page at all. Browsers say so. With
        `is_navigation`, links on other pages may lead here."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin != f"{'https' if self.is_tls else 'http'}://{headers.get('host', '')}":
            return False
        return site in (None, "same-origin", "none") or is_navigation

    def log_in(self, token: str) -> str | None:
        """Return the cookie of a new session; None if the token does not permit to look."""
        given = token.strip().encode()
        if len(given) > MAX_TOKEN_CHARACTERS or self.role_of(given) not in ROLES:
            return None
        return self._open(given)

    def redeem(self, code: str) -> str | None:
        """Return the cookie of a new session for the code, which then is void; None if it is wrong or was used."""
        if not self.code or not secrets.compare_digest(code.encode(), self.code.encode()):
            return None
        self.code = ""
        return self._open(b"")

    def log_out(self, headers: Mapping[str, str]) -> None:
        self._sessions.pop(self._key(headers), None)

    def may_look(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has a session, or a bearer token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.role_of(token.strip().encode()) in ROLES
        key = self._key(headers)
        session = self._sessions.pop(key, None)
        if session is None or time.monotonic() - session.used_at > SESSION_SECONDS:
            return False
        if session.token and self.role_of(session.token) not in ROLES:
            return False
        self._sessions[key] = session._replace(used_at=time.monotonic())
        return True

    def cookie(self, headers: Mapping[str, str], value: str, max_age: int = int(SESSION_SECONDS)) -> str:
        """The header `Set-Cookie` of the answer to a request with `headers`."""
        name, secure = self._name(headers), "; Secure" if self.is_tls else ""
        return f"{name}={value}; Path=/dashboard; Max-Age={max_age}; HttpOnly; SameSite=Strict{secure}"

    @property
    def cookie_name(self) -> str:
        """The name of the cookie of a server at the default port; at another port, the name begins so."""
        return "slipstream-dashboard-tls" if self.is_tls else "slipstream-dashboard"

    def _open(self, token: bytes) -> str:
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        value = secrets.token_urlsafe(32)
        self._sessions[value] = LoginSession(token, time.monotonic())
        return value

    def _key(self, headers: Mapping[str, str]) -> str:
        cookies = cookie_parser(headers.get("cookie", ""))
        return cookies.get(self._name(headers)) or cookies.get(self.cookie_name, "")

    def _name(self, headers: Mapping[str, str]) -> str:
        """Browsers send cookies of a host to all of its ports, so that the name must tell dashboards apart."""
        port = headers.get("host", "").rpartition(":")[2]
        return f"{self.cookie_name}-{port}" if port.isdecimal() else self.cookie_name
