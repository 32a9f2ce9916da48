"""The tests' handle on the stand-in for an SGLang server (`sglang_server.py`): start it, inject faults, read its state."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 120.0
ROOT = Path(__file__).parents[2]


class StandIn:
    def __init__(self, model: Path, where: Path) -> None:
        self.model, self._where, self._count = model, where, 0
        # One client: each loads the certificates of the system. It keeps no connection, which the server might just be closing.
        self._client = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
        self._start()

    def _start(self) -> None:
        self._count += 1
        port, self.log = self._where / f"port-{self._count}", self._where / f"log-{self._count}"
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.sglang_server", str(self.model), str(port)],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu"},
            )
        deadline = time.monotonic() + START_SECONDS
        while not port.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port.read_text()}"

    def fresh(self, **test: Any) -> StandIn:
        """Reset it, except for what is given; restart it if it has died."""
        if self.process.poll() is not None:
            self._start()
        self.tell(reset=True, **test)
        return self

    def tell(self, **test: Any) -> None:
        self._client.post(f"{self.url}/_test", json=test).raise_for_status()

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"{self.url}/_test").raise_for_status().json()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def standing_in(model: Path, where: Path) -> Iterator[StandIn]:
    made = StandIn(model, where)
    try:
        yield made
    finally:
        made.kill()
        made._client.close()
