"""The dashboard in a real browser. All tests are in one file, so that one worker starts the browser and records the runs."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.observe.dashboard import recorded
from tests.observe.dashboard.conftest import PAGES, TOKEN, Dashboard, wait_for

# --- every page on every kind of run ---

EXPECTED = {
    "finished": {
        "run": "Step time by phase",
        "rollouts": "6 groups",
        "fleet": "2 engines",
        "timeline": "Latest syncs",
        "mismatch": "Difference of logprobs",
    },
    "killed": {"run": "Step time by phase", "rollouts": "6 groups", "timeline": "Latest syncs"},
    "empty": {
        "run": "This run has no steps yet",
        "rollouts": "This run has no rollouts yet",
        "fleet": "No engine yet",
        "timeline": "Nothing on the timeline yet",
        "mismatch": "No logprobs of the trainer yet",
    },
}
"""Run, page: a text on it."""
STATES = {"finished": "Finished", "killed": "Ended without finishing", "empty": "Nothing recorded yet"}


@pytest.mark.parametrize("run", EXPECTED)
def test_every_page_opens(dashboard: Dashboard, run: str) -> None:
    page = dashboard.page()
    for name in PAGES:
        dashboard.open(name, run)
        page.get_by_text(EXPECTED[run].get(name, ""), exact=False).first.wait_for()
        assert STATES[run] in page.locator(".top .pill").inner_text()
        assert page.locator("#tabs a[aria-current]").inner_text().lower() == name
        assert not page.locator("[role=alert]").count()


def test_pages_follow_a_live_run(dashboard: Dashboard, live: Any) -> None:
    page = dashboard.open("run", "live")
    figure = page.locator(".figures dd").first
    assert "Live" in page.locator(".top .pill").inner_text()
    assert figure.inner_text().startswith("1 ")
    for _ in range(2):
        live()
    wait_for(lambda: figure.inner_text().startswith("3 "))
    for name in PAGES[1:]:
        page.locator("#tabs a").filter(has_text=name.capitalize()).click()
        dashboard.wait(page)
    page.get_by_role("link", name="Rollouts", exact=True).click()
    latest = page.locator(".list header")
    latest.get_by_text("step 3, the latest").wait_for()
    live()
    latest.get_by_text("step 4, the latest").wait_for()


def test_a_slow_page_opens_while_its_run_changes(dashboard: Dashboard, live: Any) -> None:
    page = dashboard.open("fleet", "live")
    held: list[Any] = []
    page.route("**/steps?*", lambda route: held.append(route))
    with page.expect_request("**/steps?*"):
        page.keyboard.press("1")
    for _ in range(3):
        live()
        page.wait_for_timeout(700)  # the server looks twice a second
    assert len(held) == 1
    held[0].continue_()
    page.unroute("**/steps?*")
    dashboard.wait(page)
    # What changed meanwhile is shown as well.
    wait_for(lambda: page.locator(".figures dd").first.inner_text().startswith("4 "))


def test_a_run_that_starts_later_appears(dashboard: Dashboard, request: pytest.FixtureRequest) -> None:
    page = dashboard.open("fleet", "finished")
    page.locator(".menu summary").click()
    assert not page.locator(".run-row").filter(has_text="live").count()
    request.getfixturevalue("live")
    page.locator(".run-row").filter(has_text="live").wait_for()
    assert page.locator(".menu summary").inner_text().strip().endswith("finished")


def test_a_phone_needs_no_sideways_scrolling(dashboard: Dashboard) -> None:
    page = dashboard.page(width=380)
    for name in PAGES:
        dashboard.open(name, "finished", page=page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, name


@pytest.mark.parametrize(
    ("scheme", "rules"),
    [("light", {}), ("dark", {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}})],
    ids=["light", "dark"],
)
def test_accessibility(dashboard: Dashboard, scheme: str, rules: dict[str, Any]) -> None:
    """The schemes differ in colours only."""
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()
    page = dashboard.page(scheme=scheme)
    options = {"resultTypes": ["violations"], **rules}
    for name in PAGES:
        # A short completion: axe looks at every token.
        parameters = {"row": "30.1.1", "colour": "gap", "sync": 30, "outlier": "30.1.1@1"}
        dashboard.open(name, "finished", page=page, **parameters)
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        found = axe.run(page, options=options).response["violations"]
        assert not [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found], name
    dashboard.open("run", "empty", page=page)
    assert not axe.run(page, options=options).response["violations"]


# --- curves: smoothing, zoom, comparison, keyboard, theme; the address that keeps them ---


def query(page: Any) -> dict[str, str]:
    return query_of(page.evaluate("location.href"))  # `page.url` is updated only between calls


def query_of(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def chart(page: Any, title: str) -> Any:
    return page.locator("section.chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def test_zoom_by_mouse_goes_into_the_address(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    box = chart(page, "Reward").locator(".u-over").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], y, steps=3)
    page.mouse.up()
    wait_for(lambda: "from" in query(page))
    low, high = float(query(page)["from"]), float(query(page)["to"])
    assert 7 < low < 10 and 14 < high < 17  # a quarter and a half of steps 1 to 30
    link = page.evaluate("location.href")
    page.get_by_role("button", name="show all").click()
    assert "from" not in query(page)
    page.goto(link)  # the link of a colleague
    page.get_by_role("button", name=re.compile(r"Steps \d+ to \d+: show all")).wait_for()
    assert query(page) == query_of(link)


def test_charts_by_keyboard(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    plot = chart(page, "Reward").locator(".plot")
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert "step 29" in page.locator("#announcer").inner_text()
    assert chart(page, "Reward").locator(".legend .at").inner_text() == "step 29"
    assert chart(page, "Entropy").locator(".legend .at").inner_text() == "step 29"  # the cursor is shared
    page.keyboard.press("+")
    assert float(query(page)["to"]) - float(query(page)["from"]) < 16
    page.keyboard.press("0")
    assert "from" not in query(page)
    assert plot.get_attribute("aria-label").startswith("Reward: reward 0.0")


def test_smoothing(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    shown = chart(page, "Reward").locator(".value")
    smooth = shown.inner_text()
    page.locator("#smooth").fill("1")
    assert query(page)["smooth"] == "1"
    raw = shown.inner_text()
    assert raw == "0.953" and float(smooth) < float(raw)  # the last of a rising curve


def test_runs_are_compared(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    page.locator(".menu summary").click()
    page.get_by_label("Compare other", exact=True).check()
    chart(page, "Reward").locator(".legend").get_by_text("other").wait_for()
    assert query(page)["with"] == dashboard.id("other")
    assert chart(page, "Reward").locator(".legend li").count() == 2
    dashes = chart(page, "Reward").locator(".key").evaluate_all("keys => keys.map(key => key.className)")
    assert dashes == ["key", "key dash"]  # not by colour alone
    page.get_by_role("button", name="Time", exact=True).click()
    assert query(page)["x"] == "time"
    page.go_back()
    wait_for(lambda: "with" not in query(page))
    wait_for(lambda: chart(page, "Reward").locator(".legend").inner_text().strip() == "reward")


def test_theme_is_kept(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    try:
        page.keyboard.press("t")
        assert page.evaluate(background) != light
        page.reload()
        dashboard.wait(page)
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.get_by_role("button", name="Switch between light and dark", exact=True).click()
        assert page.evaluate(background) == light
    finally:
        page.evaluate("localStorage.clear()")


def test_pages_by_keyboard_alone(dashboard: Dashboard) -> None:
    page = dashboard.open("run", "finished")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    wait_for(lambda: page.evaluate("document.activeElement.id") == "main")
    page.keyboard.press("3")
    page.wait_for_selector("table.engines")
    page.locator(".menu summary").focus()
    page.keyboard.press("Enter")
    assert page.locator(".menu").get_attribute("open") is not None
    page.keyboard.press("Escape")
    assert page.locator(".menu").get_attribute("open") is None


# --- rollouts: filters, sorting, tokens, and completions that mean harm ---


def rows(page: Any) -> list[str]:
    return page.locator(".list tbody tr").evaluate_all("rows => rows.map(row => row.dataset.id)")


def test_filters(dashboard: Dashboard) -> None:
    page = dashboard.open("rollouts", "finished")
    assert rows(page) == [f"30.{group}" for group in range(recorded.GROUPS)]
    page.locator("[name=zero_variance]").select_option("zero variance")
    wait_for(lambda: rows(page) == ["30.0"])
    assert "zero variance" in page.locator(".list tbody").inner_text()
    page.get_by_role("button", name="Clear", exact=True).click()
    page.get_by_label("Least staleness", exact=True).fill("1")
    wait_for(lambda: rows(page) == ["30.1"])
    page.get_by_role("button", name="All", exact=True).click()
    wait_for(lambda: len(rows(page)) == 30)
    page.reload()  # the address has the filters
    wait_for(lambda: len(rows(page)) == 30)
    assert page.get_by_label("Least staleness", exact=True).input_value() == "1"
    page.get_by_role("button", name="Clear", exact=True).click()
    page.locator("[name=engine]").select_option("engine-1")
    wait_for(lambda: rows(page) == ["30.1", "30.3", "30.5"])
    page.get_by_role("button", name="Completions", exact=True).click()
    page.locator("[name=finish]").select_option("length limit")
    wait_for(lambda: rows(page) == ["30.1.3", "30.3.3", "30.5.3"])
    page.locator("[name=text]").fill("no such text")
    page.get_by_text("Nothing found").wait_for()


def test_sorting(dashboard: Dashboard) -> None:
    page = dashboard.open("rollouts", "finished", view="samples", min_length=4)
    lengths = "rows => rows.map(row => Number(row.cells[4].textContent.replace(/[^0-9]/g, '')))"
    for order, is_descending in (("descending", True), ("ascending", False)):
        page.locator("[data-sort=length]").click()
        page.locator(f"th[aria-sort={order}] [data-sort=length]").wait_for()
        found = page.locator(".list tbody tr").evaluate_all(lengths)
        assert found == sorted(found, reverse=is_descending) and len(set(found)) > 2
    assert query(page)["sort"] == "length" and query(page)["order"] == "asc"


def test_rows_and_completions_by_keyboard(dashboard: Dashboard) -> None:
    page = dashboard.open("rollouts", "finished")
    page.locator(".list tbody a").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 30, group 1, completion 0", exact=True).wait_for()
    page.keyboard.press("]")
    page.get_by_role("heading", name="Step 30, group 1, completion 1", exact=True).wait_for()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert query(page)["token"] == "1"
    facts = page.locator(".tip").inner_text()
    assert "Trainer − engine\n−2.0000 nats" in facts and "Version\n29" in facts and "Advantage\n+0.500" in facts
    page.get_by_role("button", name="Logprob gap", exact=True).click()
    assert page.locator(".tokens .n3").count() == 1
    assert query(page)["colour"] == "gap"


def test_a_completion_of_36000_tokens_opens_at_once(dashboard: Dashboard) -> None:
    page = dashboard.open("rollouts", "finished", row="30.0.2")
    page.get_by_role("heading", name="Step 30, group 0, completion 2", exact=True).wait_for()
    page.locator(".siblings button").first.click()
    page.get_by_role("heading", name="Completion, 36,000 tokens", exact=True).wait_for()
    assert page.locator(".tokens span").count() >= 600  # the first ones are there with the heading
    all_there = "(count) => document.querySelectorAll('.tokens span').length === count"  # Ctrl-F finds the others
    page.wait_for_function(all_there, arg=recorded.LONG, polling=500, timeout=180_000)
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert "35,999 of 36,000" in page.locator(".tip").inner_text()


def test_hostile_completions_are_only_text(dashboard: Dashboard) -> None:
    page = dashboard.open("rollouts", "finished", row="30.2.0")
    page.get_by_role("heading", name="Step 30, group 2, completion 0", exact=True).wait_for()
    shown = page.locator(".tokens").inner_text()
    assert recorded.HOSTILE in shown
    assert "‹202E›‹2066›‹07›‹1B›‹200B›" in shown
    everywhere = page.locator("body").inner_text()
    assert not set("\u202e\u2066\x07\x1b\u200b") & set(everywhere)
    dashboard.open("mismatch", "finished")
    page.locator("main table").get_by_text("<script>").first.wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


# --- fleet, timeline and mismatch ---


def test_engines_and_their_commits(dashboard: Dashboard) -> None:
    page = dashboard.open("fleet", "finished")
    second = page.locator("table.engines tbody tr").nth(1).inner_text()
    assert "quarantined" in second and "mean gap 2.3 nats" in second and "62 %" in second
    commits = page.get_by_role("slider", name="Committed version", exact=True)
    assert commits.get_attribute("aria-valuenow") == "31"
    commits.focus()
    page.keyboard.press("ArrowLeft")
    assert commits.get_attribute("aria-valuetext").startswith("version 30, on 2 of 2 engines")
    assert query(page)["version"] == "30"
    page.get_by_role("combobox", name="Kind", exact=True).select_option("quarantine")
    assert page.locator(".events tbody tr").count() == 1
    page.locator(".events tbody a").click()
    page.wait_for_selector(".lanes canvas")
    dashboard.open("timeline", "finished", **{"from": 1, "to": 2})  # a time at which nothing happened
    assert page.locator(".lanes canvas").is_visible()


def test_timeline_zooms_to_a_millisecond_and_opens_a_sync(dashboard: Dashboard) -> None:
    page = dashboard.open("timeline", "finished")
    canvas = page.locator(".lanes canvas")
    canvas.focus()
    for _ in range(40):
        page.keyboard.press("+")
    wait_for(lambda: "to" in query(page) and float(query(page)["to"]) - float(query(page)["from"]) < 0.0011)
    link = page.evaluate("location.href")
    page.keyboard.press("0")
    wait_for(lambda: float(query(page)["to"]) - float(query(page)["from"]) > 5)
    page.goto(link)
    page.wait_for_selector(".lanes canvas")
    assert page.evaluate("location.href") == link

    dashboard.open("timeline", "finished")
    page.get_by_text("Spans in view, as a list").click()
    page.locator(".listing button").get_by_text("commit").first.click()
    page.get_by_role("heading", name="Sync of version").wait_for()
    assert "shm" in page.locator(".report table").inner_text()
    assert "sync" in query(page)

    canvas.focus()
    page.keyboard.press("n")
    assert page.locator(".report h2").count() == 1
    with page.expect_download() as download:
        page.get_by_role("link", name="Export to Perfetto", exact=True).click()
    assert download.value.suggested_filename == "finished.perfetto-trace"


def test_a_sync_opens_by_click(dashboard: Dashboard) -> None:
    page = dashboard.open("timeline", "finished", sync=30)
    page.get_by_role("heading", name="Sync of version 30", exact=True).wait_for()
    page.locator("table button").get_by_text("29", exact=True).click()
    page.get_by_role("heading", name="Sync of version 29", exact=True).wait_for()
    # The sync is now in the middle of the lanes, a third of their width.
    wait_for(lambda: "from" in query(page))

    def is_shown_by_click() -> bool:
        """False as long as the spans in view are being loaded."""
        canvas = page.locator(".lanes canvas")
        canvas.click(position={"x": 118 + (canvas.bounding_box()["width"] - 118) * 0.45, "y": 42})
        return page.locator(".report h2").all_inner_texts() == ["sync"]

    wait_for(is_shown_by_click)


def test_outliers_have_their_context(dashboard: Dashboard) -> None:
    page = dashboard.open("mismatch", "finished")
    assert "Numerics: rounding." in page.locator(".verdict").inner_text()
    first = page.locator("main table tbody tr").first
    assert "−2.0000" in first.inner_text()
    first.get_by_role("button").click()
    page.locator(".tokens .n3.active").wait_for()
    page.get_by_role("link", name="Open the completion", exact=True).click()
    page.get_by_role("heading", name="group 1, completion 1").wait_for()
    assert query(page)["token"] == "1" and query(page)["colour"] == "gap"
    assert "−2.0000 nats" in page.locator(".tip").inner_text()


# --- from outside: without a token, with a wrong one, and from other origins ---


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
