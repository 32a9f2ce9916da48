"""Curves: smoothing, zoom, comparison, keyboard, theme; the address that keeps them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.observe.dashboard.conftest import Dashboard, wait_for


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
