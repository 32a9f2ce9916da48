"""The dashboard as an ASGI application below `/dashboard`: pages, static files, login, and the JSON API."""

from __future__ import annotations

import html
import mimetypes
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.observe.dashboard.access import HEADERS, Access
from slipstream.observe.dashboard.api import ApiError, RunList, error_response, router

STATIC = Path(__file__).parent / "static"
MAX_FORM_BYTES = 4096
_PUBLIC = ("/login", "/static/")
_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_LOGIN_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Slipstream: log in</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/login.css">
</head>
<body>
<main>
<h1>Slipstream</h1>
<form method="post" action="login">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" autofocus required>
<p id="hint">{hint}</p>
{problem}
<button type="submit">Log in</button>
</form>
</main>
</body>
</html>
"""


def create_dashboard(runs: RunList, access: Access, token_hint: str) -> ASGIApp:
    """`token_hint` says where the token for the login is found."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(router(runs), prefix="/api")

    @app.get("/login")
    async def login_page(request: Request, code: str = "") -> Response:
        if not code:
            return _page(token_hint)
        if (cookie := access.redeem(code)) is None:
            return _page(token_hint, "This link was used before. Log in with the token instead.", 403)
        return _redirect("./", access.cookie(request.headers, cookie))

    @app.post("/login")
    async def login(request: Request) -> Response:
        cookie = access.log_in(await _form_field(request, "token"))
        if cookie is None:
            return _page(token_hint, "This token is not valid here.", 403)
        return _redirect("./", access.cookie(request.headers, cookie))

    @app.post("/logout")
    async def logout(request: Request) -> Response:
        access.log_out(request.headers)
        return _redirect("login", access.cookie(request.headers, "", max_age=0))

    @app.get("/static/{path:path}")
    async def static(path: str, request: Request) -> Response:
        return _static_file(path, request.headers.get("if-none-match", ""))

    @app.get("/{page:path}")
    async def pages(page: str, request: Request) -> Response:
        if page.partition("/")[0] in ("api", "static") or "." in PurePosixPath(page).name:
            raise ApiError(404, "not_found", f"there is no {page[:80]!r} here")
        return _static_file("index.html", request.headers.get("if-none-match", ""))

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return error_response(ApiError(400, "invalid", f"{name}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, "http_error", str(error.detail)))

    return _Guard(app, access)


class _Guard:
    """ASGI middleware: lets nothing through that is not addressed to this server, comes from another site's page, or has no
    session, before the request is routed or its body read."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, method = Headers(scope=scope), scope["method"]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_login, is_data = path == "/login", path.startswith(("/api/", "/static/"))
        is_navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and not is_data
        problem: ApiError | None = None
        if not self._access.is_our_host(headers):
            problem = ApiError(421, "wrong_host", "this server is not the host that the request names")
        elif not self._access.is_our_page(headers, is_navigation):
            problem = ApiError(403, "cross_origin", "requests of other sites' pages are refused")
        elif method not in ("GET", "HEAD", "POST"):
            problem = ApiError(405, "method", "only GET, HEAD and POST are answered")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    own[name] = value
                own.setdefault("Cache-Control", "no-store")
            await send(message)

        answer: ASGIApp = self._app
        if problem is not None:
            answer = error_response(problem)
        elif not path.startswith(_PUBLIC) and not self._may_look(headers, is_navigation):
            answer = (
                error_response(ApiError(401, "no_session", "log in first"))
                if is_data or method == "POST"
                else _redirect(_to_root(path) + "login")
            )
        elif is_login and method == "HEAD":
            answer = Response()
        await answer(scope, receive, send_with_headers)

    def _may_look(self, headers: Headers, is_navigation: bool) -> bool:
        """Pages of other sites that lead here get what those without a session get."""
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        return not (is_navigation and is_foreign) and self._access.may_look(headers)


def _to_root(path: str) -> str:
    """The way from a page to `/dashboard/`, relative, since a proxy may have put a prefix before it."""
    return "../" * (path.count("/") - 1) or "./"


def _page(hint: str, problem: str = "", status: int = 200) -> Response:
    shown = f'<p id="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    return Response(_LOGIN_PAGE.format(hint=html.escape(hint), problem=shown), status, media_type="text/html")


def _redirect(to: str, cookie: str = "") -> Response:
    response = Response(status_code=303, headers={"Location": to})
    if cookie:
        response.headers["Set-Cookie"] = cookie
    return response


def _static_file(name: str, known: str) -> Response:
    """A file of the package. The browser keeps it, and asks whether it has changed."""
    try:
        path = (STATIC / name).resolve()
        is_ours = path.is_relative_to(STATIC.resolve()) and path.is_file()
    except (OSError, ValueError):  # no file system has such a name
        is_ours = False
    if not is_ours:
        raise ApiError(404, "not_found", f"there is no file {name[:80]!r}")
    status = path.stat()
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if known == tag:
        return Response(status_code=304, headers=headers)
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Response(path.read_bytes(), headers=headers, media_type=kind)


async def _form_field(request: Request, name: str) -> str:
    """A field of a small form."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            raise ApiError(413, "too_large", "the form is larger than any token")
    fields: dict[str, Any] = parse_qs(body.decode(errors="replace"))
    return str(fields.get(name, [""])[0])
