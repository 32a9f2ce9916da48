"""The dashboard from outside: without a token, with a wrong one, and from other origins."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.observe.dashboard.conftest import TOKEN, Dashboard


@pytest.fixture
def stranger(dashboard: Dashboard) -> Any:
    page = dashboard.page(login=False)
    page.context.clear_cookies()
    return page


def log_in(dashboard: Dashboard, page: Any) -> None:
    value = dashboard.access.log_in(TOKEN)
    page.context.add_cookies([{"name": dashboard.access.cookie_name, "value": value, "url": dashboard.base}])


def test_login(dashboard: Dashboard, stranger: Any) -> None:
    page = stranger
    page.goto(dashboard.url("rollouts", "finished"))
    assert page.url.endswith("/dashboard/login")
    page.get_by_label("Token", exact=True).fill("wrong")
    page.get_by_role("button", name="Log in", exact=True).click()
    page.get_by_role("alert").wait_for()
    assert "finished" not in page.content()
    dashboard.problems.clear()  # the browser notes the 403
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    dashboard.wait(page)
    assert page.evaluate("document.cookie") == ""  # HttpOnly


def test_an_expired_session_leads_to_the_login(dashboard: Dashboard, stranger: Any) -> None:
    page = stranger
    log_in(dashboard, page)
    dashboard.open("run", "finished", page=page)
    page.context.clear_cookies()
    page.keyboard.press("3")
    page.wait_for_url("**/dashboard/login")
    dashboard.problems.clear()  # the browser notes the 401


def test_a_refused_stream_is_opened_again(dashboard: Dashboard, stranger: Any) -> None:
    page = stranger
    log_in(dashboard, page)
    pill = page.locator(".top .pill")
    page.route("**/api/live", lambda route: route.fulfill(status=503))
    dashboard.open("run", "finished", page=page)
    pill.get_by_text("Connection lost, retrying").wait_for()
    page.unroute("**/api/live")
    pill.get_by_text("Finished").wait_for()

    page.route("**/api/live", lambda route: route.fulfill(status=401))
    page.reload()
    dashboard.wait(page)
    page.context.clear_cookies()
    page.wait_for_url("**/dashboard/login")
    page.unroute("**/api/live")
    dashboard.problems.clear()  # the browser notes every answer but 200


def test_a_hidden_page_has_no_stream(dashboard: Dashboard) -> None:
    page = dashboard.page()
    with page.expect_request("**/api/live") as stream:
        dashboard.open("run", "finished")
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
        "document.dispatchEvent(new Event('visibilitychange')) }"
    )
    with page.expect_event("requestfailed", lambda request: request == stream.value):
        page.evaluate(hide, True)
    with page.expect_request("**/api/live"):
        page.evaluate(hide, False)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Another site, on a port of its own."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_other_sites_see_nothing(dashboard: Dashboard, elsewhere: str) -> None:
    """A page of another origin, in a browser that is logged in."""
    page = dashboard.page()
    page.goto(elsewhere)
    target = dashboard.url("api/runs")
    for mode in ("cors", "no-cors"):
        code = f"fetch('{target}', {{credentials: 'include', mode: '{mode}'}}).then(r => r.text(), () => 'refused')"
        assert page.evaluate(code) in ("refused", "")
    framed = """url => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.onload = () => { let seen; try { seen = frame.contentDocument?.body.innerText ?? "" } catch { seen = "" } done(seen) };
        frame.src = url;
        document.body.append(frame);
    })"""
    assert page.evaluate(framed, dashboard.url("run")) == ""
    dashboard.problems.clear()  # what the browser says of the refusals
