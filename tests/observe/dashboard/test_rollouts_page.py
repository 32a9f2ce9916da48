"""Rollouts: filters, sorting, tokens, and completions that mean harm."""

from __future__ import annotations

from typing import Any

from tests.observe.dashboard import recorded
from tests.observe.dashboard.conftest import Dashboard, wait_for
from tests.observe.dashboard.test_run_page import query


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
