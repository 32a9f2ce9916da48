"""`slipstream top` and `status` in a real terminal, against a real gateway."""

import asyncio
import contextlib
import json
import os
import signal
import time

import pytest

from slipstream.config import GatewayConfig
from slipstream.gateway import server
from slipstream.gateway.service import Service
from slipstream.runtime import event_loop
from tests.gateway.scripted import ScriptedEngine, attached
from tests.observe.run_directory import write_run
from tests.terminal import terminal

NUM_ENGINES = 6


@contextlib.asynccontextmanager
async def gateway_in(directory):
    """A gateway in this process that belongs to a run directory."""
    engines = [ScriptedEngine(f"engine-{i}") for i in range(NUM_ENGINES)]
    engines[-1].version = -1
    config = GatewayConfig()
    running = server.running(config, "a-token", Service(config.lease_seconds))
    async with running as address, contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(attached(engine, address, "a-token"))
        (directory / "token").write_text("a-token")
        (directory / "gateway.json").write_text(json.dumps({"address": address, "pid": os.getpid()}))
        yield


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A run directory whose gateway runs. `stop` ends the gateway."""
    directory = write_run(tmp_path_factory.mktemp("runs") / "live", [step / 60 for step in range(60)])
    stop = asyncio.Event()

    async def serve(up):
        async with gateway_in(directory):
            up.set()
            await stop.wait()

    async def start():
        up = asyncio.Event()
        task = asyncio.create_task(serve(up))
        await up.wait()
        return task

    task = event_loop.run(start())
    yield directory
    event_loop.loop().call_soon_threadsafe(stop.set)
    event_loop.run(asyncio.wait_for(task, 30))


def check_fits(screen):
    """Nothing is wrapped: a line that starts a word of the line before would be the rest of it."""
    rows = screen.rows
    assert max(map(len, rows)) <= screen.screen.columns
    for row in rows:
        assert not row or row.startswith((" ", "─", "engine", "version", "model", "policy")), rows


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50)])
def test_top_shows_a_live_run_follows_it_and_leaves_at_q(live, columns, lines):
    with terminal("top", str(live), "--seconds", "0.2", columns=columns, lines=lines) as found:
        parts = (
            "live",
            "step 60/400",
            "at most",
            "5 ready, 1 empty",
            "engine-5",
            "reward 0.983",
            "█",
            "20.0 ms",
            "lost:",
        )
        text = found.until(lambda text: all(part in text for part in parts))
        check_fits(found)
        assert ("has no weights" in text) == (columns == 160) and ("and 2 more" in text) == (lines == 24), text
        with (live / "engine-0.log").open("a") as log:
            log.write("2099-01-01 12:00:00,000 ERROR slipstream.engines: it happened now\n")
        found.until(lambda text: "it happened now" in text)
        found.resize(100, 30)
        found.until(lambda text: "── log" in text)
        check_fits(found)
        found.press("l")
        found.until(lambda text: "── log gateway" in text)
        found.press("q")
        assert found.wait() == 0
        assert b"Traceback" not in found.written
        assert found.written.rindex(b"\x1b[?1049l") > found.written.rindex(b"\x1b[?1049h"), (
            "the screen from before is back"
        )


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50)])
def test_the_status_once_and_watched(live, columns, lines):
    with terminal("status", "--run-dir", str(live), columns=columns, lines=lines) as found:
        assert found.wait() == 0
        check_fits(found)
        assert "engine-5: has no weights" in found.text and "policy version 0" in found.text
        assert ("kind" in found.text.partition("engine-0")[0]) == (columns == 160), "more columns where there is room"
    if columns == 80:
        with terminal("status", "--run-dir", str(live), "--watch", columns=columns, lines=lines) as found:
            found.until(lambda text: "tokens/s" in text)
            os.kill(found.process.pid, signal.SIGTERM)
            assert found.wait() == 0 and "Traceback" not in found.text


def test_top_goes_on_when_the_gateway_dies_and_the_files_break(tmp_path):
    directory = write_run(tmp_path / "run", [0.25])

    async def one_second():
        async with gateway_in(directory):
            started.set()
            await asyncio.to_thread(ending.wait, 60)

    import threading

    started, ending = threading.Event(), threading.Event()
    serving = event_loop.start(one_second())
    assert started.wait(60)
    with terminal("top", str(directory), "--seconds", "0.1") as found:
        found.until(lambda text: "5 ready" in text)
        ending.set()
        serving.result(60)
        found.until(lambda text: "5 ready" not in text)
        (directory / "gateway.json").write_text(json.dumps({"address": "127.0.0.1:1", "pid": 2**22 + 1}))
        found.until(lambda text: "dead" in text and "not running" in text)
        (directory / "metrics.jsonl").write_bytes(b"\xff\x00{\n" * 100)
        (directory / "engine-0.log").unlink()
        (directory / "run.json").write_text("[]")
        found.until(lambda text: "no training step" in text)
        time.sleep(0.3)
        found.press("x\x1b[A\x1bOQ")  # keys without a meaning
        found.until(lambda text: "no training step" in text)
        found.press("lq")
        assert found.wait() == 0 and "Traceback" not in found.text
