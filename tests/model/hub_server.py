"""A Hugging Face Hub on loopback: the few calls that `snapshot_download` makes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Hub:
    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    """By name. The revisions of each are `main` and `v1`."""
    gated: set[str] = field(default_factory=set)
    token: str = "hf_granted"
    """Opens gated models."""
    downloads: list[str] = field(default_factory=list)


def commit(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            name, (what, revision, *file) = (
                "/".join(parts[2:4] if is_api else parts[:2]),
                (*parts[4 if is_api else 2 :], "", ""),
            )
            if name not in hub.models:
                self._refuse(401, "RepoNotFound")
            elif revision not in ("main", "v1", commit(name)):
                self._refuse(404, "RevisionNotFound")
            elif is_api:
                paths = [path for path in hub.models[name].rglob("*") if path.is_file()]
                files = {str(path.relative_to(hub.models[name])): path.stat().st_size for path in paths}
                tree = [{"type": "file", "path": name, "size": size, "oid": ""} for name, size in files.items()]
                info = {"id": name, "sha": commit(name), "siblings": [{"rfilename": file} for file in files]}
                self._answer(json.dumps(tree if what == "tree" else info).encode(), {})
            elif name in hub.gated and self.headers["Authorization"] != f"Bearer {hub.token}":
                self._refuse(403, "GatedRepo")
            else:
                data = hub.models[name].joinpath(*file).read_bytes()
                if self.command == "GET":
                    hub.downloads.append("/".join(filter(None, file)))
                self._answer(data, {"X-Repo-Commit": commit(name), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

        do_HEAD = do_GET

        def _answer(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def _refuse(self, status: int, code: str) -> None:
            self._answer(json.dumps({"error": code}).encode(), {"X-Error-Code": code}, status)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
