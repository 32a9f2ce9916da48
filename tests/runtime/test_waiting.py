"""Messages about long waits, and logs as JSON."""

import json
import logging
import sys
import threading

import pytest

from slipstream.bridge.status_words import engines_in_words, queue_in_words
from slipstream.runtime import waiting
from slipstream.runtime.json_logs import JsonFormatter
from slipstream.runtime.waiting import shown_by, waiting_for
from slipstream.types import EngineStatus, FleetStatus, RolloutStatus
from tests.gateway.test_registry import info


@pytest.fixture
def shown(monkeypatch):
    """What is shown, with the waiting that this takes left out."""
    monkeypatch.setattr(waiting, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "AFTER_SECONDS", 0.05)
    texts = []
    with shown_by(texts.append):
        yield texts


def wait_for(holds):
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("timed out")


def test_a_long_wait_says_what_for_is_updated_and_ends(shown):
    state = "compiling"
    with waiting_for("2 engines", lambda: state):
        wait_for(lambda: shown and shown[-1].startswith("waiting for 2 engines (0 s): compiling"))
        state = "registering"
        wait_for(lambda: "registering" in shown[-1])
        with waiting_for("something inside"):
            wait_for(lambda: len(shown) > 10)
    wait_for(lambda: shown[-1] == "")
    assert not any("inside" in text for text in shown), "the outer wait says it"


def test_a_short_wait_says_nothing_and_a_failing_detail_does_no_harm(shown, monkeypatch):
    monkeypatch.setattr(waiting, "AFTER_SECONDS", 60.0)
    for _ in range(100):
        with waiting_for("a moment"):
            pass
    assert shown == []
    monkeypatch.setattr(waiting, "AFTER_SECONDS", 0.0)
    with pytest.raises(KeyError), waiting_for("an answer", lambda: 1 / 0):
        wait_for(lambda: shown[-1:] == ["waiting for an answer (0 s)"])
        raise KeyError


def test_lines_are_printed_once_and_again_when_they_have_changed(monkeypatch):
    said = []
    lines = waiting._Lines(said.append)
    for text in (
        "waiting for a (3 s): x",
        "waiting for a (4 s): x",
        "",
        "waiting for a (5 s): y",
        "waiting for b (3 s)",
    ):
        lines(text)
    assert said == ["waiting for a (3 s): x", "waiting for b (3 s)"], "a change is not news so soon"
    monkeypatch.setattr(waiting, "REPEAT_SECONDS", 0.0)
    lines("waiting for b (9 s): z")
    assert len(said) == 3


def test_it_can_be_turned_off(shown, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_QUIET", "1")
    monkeypatch.setattr(waiting, "AFTER_SECONDS", 0.0)
    with waiting_for("nothing"):
        threading.Event().wait(0.1)
    assert shown == []


def test_a_fleet_in_words():
    empty, busy = (
        EngineStatus(info("a"), "empty", 0, 0.1),
        EngineStatus(info("b"), "ready", 2, 0.1, activity="compiling decode 8"),
    )
    assert engines_in_words(FleetStatus(0, 1.0, 0, (empty, busy))) == "a has no weights, b is compiling decode 8"
    assert engines_in_words(FleetStatus(0, 1.0, 0, (empty,) * 3 + (busy,))) == "3 empty, 1 compiling"
    assert engines_in_words(FleetStatus(0, 1.0, 0)) == "no engine has registered"
    queue = FleetStatus(0, 1.0, 0, rollouts=RolloutStatus(1, 2, 3))
    assert queue_in_words(queue) == "1 groups wait, 2 run, 3 are finished"


def test_records_as_json():
    formatter = JsonFormatter({"process": "engine", "engine": "engine-0", "run": ""})

    def formatted(message, *arguments, **more):
        record = logging.LogRecord("slipstream.x", logging.WARNING, "file", 1, message, arguments, None, **more)
        return json.loads(formatter.format(record))

    plain = formatted("lost %s: \n%s", "engine-1", OSError("no route"))
    assert plain.pop("time").endswith("+00:00")
    expected = {"level": "WARNING", "process": "engine", "engine": "engine-0", "logger": "slipstream.x"}
    assert plain == expected | {"message": "lost engine-1: \nno route", "error": "OSError"}
    try:
        raise ValueError("odd")
    except ValueError:
        record = logging.LogRecord("slipstream.x", logging.ERROR, "file", 1, "failed", (), sys.exc_info())
    fields = json.loads(formatter.format(record))
    assert fields["error"] == "ValueError" and "Traceback" in fields["traceback"]
