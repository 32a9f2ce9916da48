"""Every page on every kind of run, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.observe.dashboard.conftest import PAGES, Dashboard, wait_for

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
