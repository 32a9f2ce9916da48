"""One browser and one server for all browser tests, on runs that the recorder wrote."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.gateway.tokens import Role
from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.recorded_run import RecordedRun
from tests.observe.dashboard import recorded

PAGES = ("run", "rollouts", "fleet", "timeline", "mismatch")
TOKEN = "a token of a viewer"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="package")  # not longer: Playwright's event loop is in the way of other tests
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        message = "no Chromium: apt-get install chromium, for the tests of the dashboard"
        pytest.fail(message) if os.environ.get("SLIPSTREAM_REQUIRE_BROWSER") == "1" else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"], timeout=180_000)
        yield browser
        browser.close()


@dataclass
class Dashboard:
    """A server with some runs, and pages of the browser that watch it."""

    root: Path
    base: str
    access: Access
    browser: Any
    problems: list[str] = field(default_factory=list)
    """What pages wrote to their console, or threw."""
    _pages: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def id(self, run: str) -> str:
        return RecordedRun(self.root / run).id

    def url(self, page: str, run: str = "", **parameters: object) -> str:
        if run:
            parameters["run"] = self.id(run)
        return f"{self.base}{page}?{'&'.join(f'{name}={value}' for name, value in parameters.items())}"

    def page(self, *, scheme: str = "light", width: int = 1280, login: bool = True) -> Any:
        """A page that is kept for the tests with the same needs, since a new one takes half a second."""
        key = (scheme, width, login)
        if key not in self._pages:
            size = {"width": width, "height": 900}
            context = self.browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            context.set_default_timeout(120_000)
            context.set_default_timeout(20_000)
            if login:
                cookie = {"name": self.access.cookie_name, "value": self.access.log_in(TOKEN), "url": self.base}
                context.add_cookies([cookie])
            page = self._pages[key] = context.new_page()
            page.on(
                "console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text)
            )
            page.on("pageerror", lambda error: self.problems.append(str(error)))
        return self._pages[key]

    def open(self, name: str, run: str = "", *, page: Any = None, **parameters: object) -> Any:
        """Open a page of the dashboard, and wait until it shows its data."""
        page = page or self.page()
        page.goto(self.url(name, run, **parameters))
        self.wait(page)
        return page

    def wait(self, page: Any) -> None:
        """Wait until a page shows its data."""
        page.wait_for_selector("main:not([aria-busy]) .panel:visible")

    def leave(self) -> None:
        """Let every page show nothing, so that none of them asks the server for anything."""
        for page in self._pages.values():
            page.unroute_all()
            page.goto("about:blank")


@pytest.fixture(scope="package")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    import uvicorn

    from slipstream.observe.dashboard.local_server import create_local_app

    root = tmp_path_factory.mktemp("runs")
    recorded.record_run(root / "finished", long=True, hostile=True)
    recorded.record_run(root / "other", steps=20)
    killed_run(root / "killed")
    (root / "empty" / "record").mkdir(parents=True)

    def role_of(token: bytes) -> Role | None:
        return "viewer" if token == TOKEN.encode() else None

    access = Access(role_of, "127.0.0.1")
    config = uvicorn.Config(create_local_app([root], access), port=0, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    wait_for(lambda: uvicorn_server.started)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    yield Dashboard(root, f"http://127.0.0.1:{port}/dashboard/", access, browser)
    uvicorn_server.should_exit = True
    thread.join(10)


@pytest.fixture
def dashboard(server: Dashboard) -> Iterator[Dashboard]:
    """Fails if any page of the test complained in its console."""
    server.leave()
    server.problems.clear()
    yield server
    assert not server.problems


@pytest.fixture
def live(server: Dashboard) -> Iterator[Callable[[], None]]:
    """A run named `live` that another process records. Call the fixture's value for one more step."""
    process = start_recording(server.root / "live")

    def step() -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()

    try:
        yield step
    finally:
        server.leave()
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        wait_for(lambda: is_gone(server.root / "live"))


def is_gone(directory: Path) -> bool:
    """Delete a directory in which the server may just now be creating a file, as readers of SQLite do."""
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def killed_run(directory: Path) -> None:
    """A run that was killed with -9, whose last transaction was torn as well."""
    process = start_recording(directory)
    for _ in range(5):
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
    wait_for(lambda: RecordedRun(directory).summary()["last_step"] >= 5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    log = directory / "record" / "run.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-100])


def start_recording(directory: Path) -> subprocess.Popen[str]:
    """Start to record, and wait until the first step is written."""
    command = [sys.executable, "-m", "tests.observe.dashboard.recorded", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "1"
    wait_for(lambda: RecordedRun(directory).summary()["last_step"] == 1)
    return process


def wait_for(is_done: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
