"""Repairs in the background, and what interrupts them."""

import asyncio
import threading

import pytest

from slipstream.bridge import background_repair
from slipstream.bridge.background_repair import BackgroundRepair, UpdateLock
from slipstream.errors import EngineLost, UpdateInProgress


@pytest.fixture
def lock(monkeypatch):
    monkeypatch.setattr(background_repair, "INTERVAL_SECONDS", 0.01)
    return UpdateLock()


async def needed():
    return True


def test_a_sync_interrupts_a_repair_and_waits_until_it_has_rolled_back(lock):
    has_begun, events = threading.Event(), []

    async def repair():
        has_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            events.append("rolled back")

    background = BackgroundRepair(needed, repair, lock)
    background.start()
    assert has_begun.wait(10)
    lock.acquire("the repair should have given way")
    assert events == ["rolled back"]
    with pytest.raises(UpdateInProgress, match="one at a time"):
        lock.acquire("one at a time")
    has_begun.clear()
    assert not has_begun.wait(0.1), "no repair during a sync"
    lock.release()
    assert has_begun.wait(10), "and again after it"
    background.close()


def test_no_repair_begins_before_the_sync_that_waits(lock, monkeypatch):
    monkeypatch.setattr(background_repair, "GIVE_WAY_SECONDS", 0.1)
    begun = []

    def interrupt():
        lock.release()
        begun.append(lock.acquire_for_repair(interrupt))

    assert lock.acquire_for_repair(interrupt)
    lock.acquire("the next repair was first")
    assert begun == [False]


def test_a_repair_that_fails_is_tried_again_and_reported_once(lock, caplog):
    attempts, is_done = [], threading.Event()

    async def repair():
        attempts.append(1)
        if len(attempts) < 3:
            raise EngineLost("it died")
        is_done.set()

    background = BackgroundRepair(needed, repair, lock)
    background.start()
    assert is_done.wait(10)
    background.close()
    assert [record.message for record in caplog.records if "it died" in record.message] == [
        "engines without the present version are not repaired yet: it died"
    ]
