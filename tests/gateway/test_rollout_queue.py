"""Exactly-once rollouts: every accepted prompt is taken once, across crashes and repeated generation."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidPrompt,
    JournalError,
    Overloaded,
    RequestError,
    RolloutError,
    StaleRollouts,
)
from slipstream.gateway import convert, rollout_queue
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import FinishedSample, Journal, TakenGroup
from slipstream.gateway.rollout_queue import RolloutQueue, prompts_by_id
from slipstream.gateway.staleness import RolloutBound
from slipstream.types import Failure, Request, SamplingParams
from tests.gateway.history import check, states


class Engines:
    """Generates two samples per request, when it is told to, with the version that serves then."""

    def __init__(self) -> None:
        self.version = 0
        self.going = asyncio.Event()
        self.going.set()
        self.begun: list[bytes] = []
        self.dying: set[bytes] = set()
        self.slow: set[bytes] = set()
        self.hold = asyncio.Event()

    async def __call__(self, request: bytes) -> AsyncGenerator[pb.Results, None]:
        self.begun.append(request)
        version = self.version
        await self.going.wait()
        if request in self.slow:
            await self.hold.wait()
        if request == b"bad":
            yield convert.results_to_pb([Failure("bad", InvalidPrompt("too long"))])
            return
        yield sample(request, 1, version)
        if request in self.dying:
            self.dying.discard(request)
            yield convert.results_to_pb([Failure("r", EngineLost("it died"))])
            return
        yield sample(request, 0, version)


def sample(request: bytes, index: int, version: int) -> pb.Results:
    text, spans = f"{request.decode()}/{index}@{version}", [pb.VersionSpan(version=version, start=0, stop=1)]
    return pb.Results(completions=[pb.Completion(sample_index=index, text=text, spans=spans)])


def stored(completion: bytes, version: int, engine: str = "e") -> FinishedSample:
    return FinishedSample(completion, version, version, engine)


def texts(group: TakenGroup) -> tuple[str, ...]:
    return tuple(pb.Completion.FromString(data).text for data in group.completions)


def rollouts(engines: Engines, bound: RolloutBound, journal: Journal | None = None) -> RolloutQueue:
    return RolloutQueue(journal or Journal(), bound, engines.version, engines)


def prompts(*names: str) -> dict[str, tuple[bytes, int]]:
    return {name: (name.encode(), 2) for name in names}


def sync(engines: Engines, queue: RolloutQueue) -> None:
    engines.version += 1
    queue.on_commit(engines.version)


async def after_a_batch(tmp_path: Path, bound: RolloutBound) -> tuple[Engines, Journal, RolloutQueue]:
    """Of six prompts, a to f, the first two were taken."""
    engines, journal = Engines(), Journal(tmp_path / "journal.sqlite")
    queue = rollouts(engines, bound, journal)
    queue.submit(prompts(*"abcdef"))
    await queue.take(0, 2, 5)
    return engines, journal, queue


def test_groups_are_taken_in_order_and_once() -> None:
    async def main() -> None:
        engines = Engines()
        queue = rollouts(engines, RolloutBound(0, 3))
        assert queue.submit(prompts("a", "b", "c", "d")) == 4
        assert queue.submit(prompts("b", "a")) == 0  # again
        first = await queue.take(0, 3, 5)
        assert [(t.position, t.id, t.age, texts(t)) for t in first] == [
            (1, "a", 0, ("a/0@0", "a/1@0")),
            (2, "b", 0, ("b/0@0", "b/1@0")),
            (3, "c", 0, ("c/0@0", "c/1@0")),
        ]
        assert await queue.take(0, 3, 5) == first  # the answer was lost: the same again
        with pytest.raises(StaleRollouts):
            await queue.take(3, 1, 5)
        sync(engines, queue)
        (last,) = await queue.take(3, 1, 5)
        assert (last.position, last.id, last.version) == (4, "d", 1) and texts(last) == ("d/0@1", "d/1@1")
        with pytest.raises(RolloutError, match="asked for 1 groups, but only 0 submitted prompts are left"):
            await queue.take(4, 1, 5)
        assert check(queue._journal, 0) == []

    asyncio.run(main())


def test_who_asks_for_more_than_a_batch_gets_more_of_the_same_version(tmp_path: Path) -> None:
    async def main() -> None:
        engines, journal, queue = await after_a_batch(tmp_path, RolloutBound(0, 2))
        engines.slow = {b"d"}
        with pytest.raises(DeadlineExceeded):
            await queue.take(2, 2, 0.2, more=True)
        assert queue.counts["taken"] == 2 and b"e" not in engines.begun, "as many as were asked for, and no more"
        engines.hold.set()
        found = await queue.take(2, 2, 5, more=True)
        assert [(t.id, t.version, t.age) for t in found] == [("c", 0, 0), ("d", 0, 0)]
        await queue.close()
        journal.close()
        again = rollouts(engines, RolloutBound(0, 2), Journal(tmp_path / "journal.sqlite"))
        with pytest.raises(StaleRollouts, match="more=True"):
            await again.take(4, 1, 5)
        (found,) = await again.take(4, 1, 5, more=True)  # of a gateway that was started again, too
        assert (found.id, found.version) == ("e", 0)
        sync(engines, again)
        (found,) = await again.take(5, 1, 5)
        assert (found.id, found.version) == ("f", 1) and check(again._journal, 0) == []

    asyncio.run(main())


def test_what_a_version_generated_is_not_taken_while_engines_are_checked(tmp_path: Path) -> None:
    async def main() -> None:
        engines, _, queue = await after_a_batch(tmp_path, RolloutBound(1, 2))
        while queue.counts["finished"] < 2:
            await asyncio.sleep(0.01)
        sync(engines, queue)
        queue.hold(1)
        assert [t.id for t in await queue.take(2, 2, 5)] == ["c", "d"], "groups of the version before are sound"
        with pytest.raises(DeadlineExceeded):
            await queue.take(4, 2, 0.2, version=2)
        queue.hold(None)
        assert [t.id for t in await queue.take(4, 2, 5, version=2)] == ["e", "f"]

    asyncio.run(main())


def test_an_engine_that_dies_makes_nothing_twice() -> None:
    async def main() -> None:
        engines = Engines()
        engines.dying = {b"a"}
        queue = rollouts(engines, RolloutBound(0, 2))
        queue.submit(prompts("a", "b"))
        taken = await queue.take(0, 2, 5)
        assert [texts(t) for t in taken] == [("a/0@0", "a/1@0"), ("b/0@0", "b/1@0")]
        assert engines.begun.count(b"a") == 2 and check(queue._journal, 0) == []

    asyncio.run(main())


def test_a_prompt_that_kills_engines_fails_and_those_that_shared_them_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_queue, "RETRY_SECONDS", 0.01)
    attempts: list[bytes] = []
    deaths = 0

    async def generate(request: bytes) -> AsyncGenerator[pb.Results, None]:
        """An engine that serves `bad` is lost after a moment, with whatever else it serves."""
        nonlocal deaths
        attempts.append(request)
        before = deaths
        for _ in range(5):
            await asyncio.sleep(0.01)
            deaths += request == b"bad"
            if deaths > before:
                yield convert.results_to_pb([Failure("r", EngineLost("it died"))])
                return
        yield sample(request, 0, 0)
        yield sample(request, 1, 0)

    async def main() -> None:
        queue = RolloutQueue(Journal(), RolloutBound(0, 3), 0, generate)
        queue.submit(prompts("bad", "b", "c"))
        bad, *others = sorted(await queue.take(0, 3, 30), key=lambda group: group.id != "bad")
        assert pb.Error.FromString(bad.error).kind == "SuspectRequest" and attempts.count(b"bad") == 6
        assert [len(group.completions) for group in others] == [2, 2]

    asyncio.run(main())


def test_more_prompts_than_memory_is_meant_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_queue, "MAX_WAITING", 2)

    async def main() -> None:
        engines = Engines()
        queue = rollouts(engines, RolloutBound(0, 1))
        queue.submit(prompts("a", "b", "c"))  # one of them starts
        with pytest.raises(Overloaded, match="2 prompts wait"):
            queue.submit(prompts("d"))
        assert queue.submit(prompts("a", "c")) == 0, "a trainer that was restarted submits the same again"
        await queue.take(0, 1, 5)
        sync(engines, queue)
        assert queue.submit(prompts("d")) == 1

    asyncio.run(main())


def test_a_refusal_is_an_error_in_its_place_and_never_a_row() -> None:
    async def main() -> None:
        queue = rollouts(Engines(), RolloutBound(0, 2))
        queue.submit(prompts("bad", "good"))
        bad, good = await queue.take(0, 2, 5)
        assert (bad.id, bad.completions, pb.Error.FromString(bad.error).message) == ("bad", (), "too long")
        assert (good.id, len(good.completions), good.error) == ("good", 2, b"")
        assert check(queue._journal, 0) == []

    asyncio.run(main())


def test_engines_run_ahead_no_further_than_the_bound() -> None:
    async def main() -> None:
        engines = Engines()
        queue = rollouts(engines, RolloutBound(1, 2))
        queue.submit(prompts(*"abcdefgh"))
        await queue.take(0, 2, 5)
        await asyncio.sleep(0)
        assert engines.begun == [b"a", b"b", b"c", b"d"]  # two versions' worth, and no more before the sync
        sync(engines, queue)
        taken = await queue.take(2, 2, 5)
        assert [(t.id, t.version, t.age) for t in taken] == [("c", 1, 1), ("d", 1, 1)]
        while len(engines.begun) < 6:
            await asyncio.sleep(0)
        assert engines.begun == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert check(queue._journal, 1) == [] and check(queue._journal, 0) != []

    asyncio.run(main())


@pytest.mark.parametrize("late", ["renew", "deliver"])
def test_a_straggler_that_is_too_old_is_made_anew_or_delivered_with_its_age(late) -> None:
    async def main() -> None:
        engines = Engines()
        engines.slow = {b"a"}
        queue = rollouts(engines, RolloutBound(1, 1, late))
        queue.submit(prompts(*"abcde"))
        assert [t.id for t in await queue.take(0, 1, 5)] == ["b"]
        sync(engines, queue)
        if late == "renew":
            with pytest.raises(DeadlineExceeded, match=r"1 of 1 groups .* 1 more must be among them"):
                await queue.take(1, 1, 0.05)  # c is finished, but the next sync would make a too old
        else:
            assert [t.id for t in await queue.take(1, 1, 5)] == ["c"]
        sync(engines, queue)  # a was begun two versions ago
        engines.hold.set()
        if late == "renew":
            assert [t.id for t in await queue.take(1, 2, 5)] == ["c", "a"]  # c is the older by now
        taken = (await queue.take(2, 1, 5))[0]
        if late == "renew":
            assert (taken.id, taken.age, texts(taken)) == ("a", 0, ("a/0@2", "a/1@2")), taken
            assert engines.begun.count(b"a") == 2 and check(queue._journal, 1) == []
        else:
            assert (taken.id, taken.age, texts(taken)) == ("a", 2, ("a/0@0", "a/1@0")), taken
            assert engines.begun.count(b"a") == 1

    asyncio.run(main())


def test_taking_has_a_deadline_and_then_takes_nothing() -> None:
    async def main() -> None:
        engines = Engines()
        engines.slow = {b"b"}
        queue = rollouts(engines, RolloutBound(0, 2))
        queue.submit(prompts("a", "b"))
        with pytest.raises(DeadlineExceeded, match=r"1 of 2 groups finished within 0.1 s \(.*1 running, 1 finished"):
            await queue.take(0, 2, 0.1)
        engines.hold.set()
        assert [t.id for t in await queue.take(0, 2, 5)] == ["a", "b"]

    asyncio.run(main())


def test_groups_for_a_version_are_taken_before_it_serves() -> None:
    async def main() -> None:
        engines = Engines()
        queue = rollouts(engines, RolloutBound(1, 2))
        queue.submit(prompts(*"abcdefgh"))
        assert [(t.id, t.version) for t in await queue.take(0, 2, 5)] == [("a", 0), ("b", 0)]
        found = await queue.take(2, 2, 5, version=1)
        assert [(t.id, t.version, t.age) for t in found] == [("c", 1, 1), ("d", 1, 1)]
        assert queue.counts == {"waiting": 4, "running": 0, "finished": 0, "taken": 4}, "no room before the sync"
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for version 1, and the fleet still serves 0"):
            await queue.take(4, 2, 0.1, version=2)
        ahead = asyncio.create_task(
            queue.take(4, 2, 5, version=1)
        )  # more than a batch: for these there is room after the sync
        await asyncio.sleep(0.05)
        assert not ahead.done()
        sync(engines, queue)
        assert [(t.id, t.version, t.age) for t in await ahead] == [("e", 1, 0), ("f", 1, 0)]

    asyncio.run(main())


def test_on_policy_nothing_is_taken_before_its_version_serves() -> None:
    async def main() -> None:
        engines = Engines()
        queue = rollouts(engines, RolloutBound(0, 2))
        queue.submit(prompts(*"abcd"))
        await queue.take(0, 2, 5)
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for version 1, and the fleet still serves 0"):
            await queue.take(2, 2, 0.1, version=1)
        ahead = asyncio.create_task(queue.take(2, 2, 5, version=1))
        sync(engines, queue)
        assert [(t.id, t.version, t.age) for t in await ahead] == [("c", 1, 0), ("d", 1, 0)]

    asyncio.run(main())


def test_a_gateway_that_comes_back_knows_what_was_taken_ahead(tmp_path: Path) -> None:
    async def main() -> None:
        engines, journal, queue = await after_a_batch(tmp_path, RolloutBound(1, 2))
        await queue.take(2, 2, 5, version=1)
        again = rollouts(engines, RolloutBound(1, 2), journal)
        assert again.counts["waiting"] == 2 and not again.counts["running"]
        sync(engines, again)
        assert [(t.id, t.version, t.age) for t in await again.take(4, 2, 5)] == [("e", 1, 0), ("f", 1, 0)]
        assert check(journal, max_staleness=1) == []

    asyncio.run(main())


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        engines = Engines()
        journal = Journal(tmp_path / "journal.sqlite")
        queue = rollouts(engines, RolloutBound(0, 2), journal)
        engines.slow = {b"d"}
        queue.submit(prompts(*"abcdef"))
        first = await queue.take(0, 2, 5)
        sync(engines, queue)
        while not queue._finished:  # c is finished, d runs, e and f wait
            await asyncio.sleep(0.01)
        await queue.close()
        journal.close()
        engines.hold.set()
        again = rollouts(engines, RolloutBound(0, 2), Journal(tmp_path / "journal.sqlite"))
        assert await again.take(0, 2, 5) == first
        assert again.submit(prompts(*"abcdef")) == 0
        assert [t.id for t in await again.take(2, 2, 5)] == ["c", "d"]
        with pytest.raises(StaleRollouts):
            await again.take(4, 1, 5)  # what was taken before the restart counts
        sync(engines, again)
        assert [t.id for t in await again.take(4, 2, 5)] == ["e", "f"]
        assert check(again._journal, 0) == [] and engines.begun.count(b"c") == 1

    asyncio.run(main())


def test_what_was_made_for_older_weights_is_made_anew_by_the_next_gateway(tmp_path: Path) -> None:
    async def main() -> None:
        engines = Engines()
        journal = Journal(tmp_path / "journal.sqlite")
        queue = rollouts(engines, RolloutBound(0, 1), journal)
        queue.submit(prompts("a"))
        while not queue._finished:
            await asyncio.sleep(0.01)
        await queue.close()
        journal.close()
        engines.version = 5  # the trainer went on, and the fleet with it
        again = rollouts(engines, RolloutBound(0, 1), Journal(tmp_path / "journal.sqlite"))
        (taken,) = await again.take(0, 1, 5)
        assert (taken.age, texts(taken)) == (0, ("a/0@5", "a/1@5"))

    asyncio.run(main())


def test_ids_mean_one_prompt_each() -> None:
    async def main() -> None:
        queue = rollouts(Engines(), RolloutBound(0, 1))
        queue.submit(prompts("a"))
        with pytest.raises(RequestError, match="'a' was accepted before with other tokens or sampling params"):
            queue.submit({"b": (b"b", 2), "a": (b"other", 2)})
        assert queue.counts["waiting"] + queue.counts["running"] == 1  # b was not accepted either
        with pytest.raises(RolloutError, match="two prompts have the id 'x'"):
            prompts_by_id([Request("x", (token,), SamplingParams(seed=1)) for token in (1, 2)])

    asyncio.run(main())


@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 3))
def test_any_order_of_events_keeps_the_history_clean(seed: int, bound: int, batch: int) -> None:
    """Engines that finish, die and stall at random; a trainer that takes, crashes, replays and syncs."""

    async def main() -> None:
        random_ = random.Random(seed)
        engines, names = Engines(), [str(i) for i in range(4 * batch)]
        engines.slow = {n.encode() for n in names if random_.random() < 0.3}
        engines.dying = {n.encode() for n in names if random_.random() < 0.3}
        journal = Journal()
        queue = rollouts(engines, RolloutBound(bound, batch), journal)
        queue.submit(prompts(*names))
        position, seen = 0, []
        while position < len(names):
            for _ in range(random_.randint(0, 3)):
                await asyncio.sleep(0)
            if random_.random() < 0.3:
                engines.hold.set()
                engines.slow = set()
            if random_.random() < 0.2:  # the gateway crashes
                await queue.close()
                queue = rollouts(engines, RolloutBound(bound, batch), journal)
            try:
                taken = await queue.take(position, batch, 0.01)
            except DeadlineExceeded:
                continue
            assert [t.position for t in taken] == list(range(position + 1, position + batch + 1))
            if random_.random() < 0.3:
                assert await queue.take(position, batch, 0.01) == taken
            position, seen = position + batch, [*seen, *taken]
            assert all(t.age <= bound for t in taken)
            sync(engines, queue)
        assert sorted(t.id for t in seen) == sorted(names) and check(journal, bound) == []
        await queue.close()

    journals_again = 0.001
    import slipstream.gateway.rollout_queue as module

    before, module.RETRY_SECONDS = module.RETRY_SECONDS, journals_again
    try:
        asyncio.run(main())
    finally:
        module.RETRY_SECONDS = before


# --- the file ---


def test_what_the_trainer_has_saved_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        engines, journal = Engines(), Journal(tmp_path / "journal.sqlite")
        queue = rollouts(engines, RolloutBound(1, 2), journal)
        queue.submit(prompts(*"abcdef"))
        await queue.take(0, 2, 5)
        sync(engines, queue)
        second = await queue.take(2, 2, 5, saved=3)  # no more than what it goes on from
        assert journal.forgotten == 2 and await queue.take(2, 2, 5) == second
        with pytest.raises(JournalError, match="continues from position 0, but reported position 2 as saved"):
            await queue.take(0, 2, 5)
        sync(engines, queue)
        await queue.take(4, 2, 5, saved=4)
        await queue.close()
        again = Journal(tmp_path / "journal.sqlite")
        assert again.forgotten == 4 and check(again, 1) == []
        assert len(again.taken(4, 10)) == 2 and again.accept(prompts("a")) == []  # it was, and stays, accepted
        size = again._db.execute("SELECT count(*) FROM samples").fetchone()
        assert size == (4,)
        kept = [id for (id,) in again._db.execute("SELECT id FROM groups WHERE length(request) ORDER BY number")]
        assert kept == ["e", "f"]

    asyncio.run(main())


WRITER = """
import sys
from slipstream.gateway.journal import Group, Journal, FinishedSample
journal = Journal(__import__("pathlib").Path(sys.argv[1]))
known = {g.id: g for g in journal.waiting()}
first = journal.num_groups()
for i in range(first, first + 10_000):
    for group in journal.accept({f"p{i}": (b"x" * 200, 2)}):
        journal.finish(group, {0: FinishedSample(b"y" * 500, 0, 0, "e"), 1: FinishedSample(b"z" * 500, 0, 0, "e")})
        journal.take([group.number], 0)
        print(group.number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_journal_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    random_ = random.Random(3)
    for _ in range(6):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout is not None
            for _ in range(random_.randint(1, 40)):
                said = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        journal = Journal(path)
        assert states(journal)[said][0] == "taken" and check(journal) == []  # what was said has happened
        for group in journal.waiting():  # what had begun can be brought to its end
            assert journal.finish(group, {0: stored(b"", 0), 1: stored(b"", 0)}) == 0
        journal.take(journal.finished(), 0)
        assert check(journal) == [] and all(state == "taken" for state, _ in states(journal).values())
        journal.close()


def test_the_checker_sees_what_is_wrong() -> None:
    def broken(*events: tuple[str, int, int, int, int]) -> list[str]:
        journal = Journal()
        (group,) = journal.accept({"a": (b"", 1)})
        journal.finish(group, {0: stored(b"", 3)})
        journal.take([group.number], 3)
        for event in events:
            journal._event(*event)
        return check(journal, 0)

    assert broken() == []
    assert "taken twice" in broken(("take", 1, 2, 0, 3))[0]
    assert "accepted twice" in broken(("accept", 1, -1, 0, -1))[0]
    assert "renewed after" in broken(("renew", 1, -1, 1, -1))[0]
    assert "came twice" in broken(("sample", 1, 0, 0, 3))[0]
    assert "went back" in broken(("sync", 0, -1, 0, 5), ("sync", 0, -1, 0, 4))[0]
    journal = Journal()
    (group,) = journal.accept({"a": (b"", 1)})
    journal.finish(group, {0: stored(b"", 1)})
    journal.take([group.number], 3)
    assert check(journal, 2) == [] and "older than 1" in check(journal, 1)[0]


def test_samples_of_an_attempt_that_was_given_up_are_dropped() -> None:
    journal = Journal()
    (group,) = journal.accept({"a": (b"", 2)})
    renewed = journal.renew(group.number)
    assert renewed is not None and renewed.attempt == 1
    assert journal.finish(group, {0: stored(b"old", 0), 1: stored(b"old", 0)}) is None and journal.finished() == {}
    assert journal.finish(renewed, {0: stored(b"new", 1)}) is None  # one is missing
    assert journal.finish(renewed, {0: stored(b"new", 1), 5: stored(b"what?", 1)}) is None
    assert journal.finish(renewed, {0: stored(b"new", 1), 1: stored(b"new", 2)}) == 1
    assert journal.finish(renewed, {0: stored(b"twice", 1), 1: stored(b"twice", 1)}) is None and journal.finished() == {
        1: 1
    }
    journal.take([1], 2)
    assert journal.renew(1) is None and journal.taken(0, 9)[0].completions == (b"new", b"new")
    with pytest.raises(JournalError, match="group 1 cannot be taken"):
        journal.take([1], 2)
    assert not journal.fail(renewed, b"late")


def test_what_is_no_journal_is_said(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(os.urandom(4096))
    with pytest.raises(JournalError, match="is not a rollout journal"):
        Journal(path)
    path.unlink()
    Journal(path).remember(format="99")
    with pytest.raises(JournalError, match="has format 99"):
        Journal(path)
