"""Fleet, timeline and mismatch."""

from __future__ import annotations

from tests.observe.dashboard.conftest import Dashboard, wait_for
from tests.observe.dashboard.test_run_page import query


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
