"""The JSON API of the dashboard: every answer is bounded, whatever the size of the run."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from slipstream.observe.dashboard import columns, fleet_view, perfetto, sample_view, timeline
from slipstream.observe.dashboard.recorded_run import UNREADABLE, RecordedRun, facts, opened_rollouts
from slipstream.observe.dashboard.rollout_queries import (
    MAX_LIMIT,
    MAX_OFFSET,
    Order,
    RolloutQuery,
    Sort,
    View,
    rollouts,
)
from slipstream.runtime.clock import now

T = TypeVar("T")

MAX_POINTS = 5000
MAX_STREAMS = 64
"""Event streams that are open at a time."""
POLL_SECONDS, PING_SECONDS = 0.5, 15.0
_ROW_ID = re.compile(r"(\d{1,9})\.(\d{1,6})(?:\.(\d{1,6}))?")


class ApiError(Exception):
    """Answered as `{"error": {"status": …, "code": …, "message": …}}`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def json_response(value: Any, status: int = 200) -> Response:
    """NaN and infinities become null."""
    body = to_json(value, inf_nan_mode="null")
    return Response(body, status, {"Cache-Control": "no-store"}, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response({"error": {"status": error.status, "code": error.code, "message": str(error)}}, error.status)


@dataclass
class RunList:
    """The runs that are shown. `find` looks for them anew."""

    find: Callable[[], list[RecordedRun]]
    num_streams: int = 0

    def get(self, id: str) -> RecordedRun:
        for run in self.find():
            if run.id == id:
                return run
        raise ApiError(404, "no_such_run", f"there is no run {id[:40]!r} here; the list of runs has their ids")


Points = Annotated[int, Query(ge=1, le=MAX_POINTS)]
Step = Annotated[int, Query(ge=0, le=1 << 40)]
Seconds = Annotated[float, Query(ge=0, le=1e11, allow_inf_nan=False)]
Number = Annotated[float, Query(allow_inf_nan=False)]


def router(runs: RunList) -> APIRouter:
    """The endpoints below `/dashboard/api`."""
    api = APIRouter()

    @api.get("/runs")
    async def list_runs() -> Response:
        return await _answer(lambda: {"runs": [run.entry() for run in runs.find()]})

    @api.get("/live")
    async def live_runs(request: Request) -> Response:
        return _stream(
            runs, request, lambda: {run.id: _news(run) for run in runs.find()}, lambda found: {"runs": found}
        )

    @api.get("/runs/{id}")
    async def one_run(id: str) -> Response:
        return await _answer(lambda: _details(runs.get(id)))

    @api.get("/runs/{id}/live")
    async def live(id: str, request: Request) -> Response:
        run = runs.get(id)
        return _stream(runs, request, lambda: {run.id: _news(run)}, lambda found: found[run.id])

    @api.get("/runs/{id}/steps")
    async def steps(
        id: str,
        first: Annotated[Step | None, Query(alias="from")] = None,
        last: Annotated[Step | None, Query(alias="to")] = None,
        points: Points = 1000,
        names: Annotated[str | None, Query(alias="columns", max_length=4000)] = None,
    ) -> Response:
        return await _answer(lambda: _steps(runs.get(id), first, last, points, names))

    @api.get("/runs/{id}/mismatch")
    async def mismatch(
        id: str,
        first: Annotated[Step | None, Query(alias="from")] = None,
        last: Annotated[Step | None, Query(alias="to")] = None,
        points: Points = 500,
    ) -> Response:
        return await _answer(lambda: _mismatch(runs.get(id), first, last, points))

    @api.get("/runs/{id}/rollouts")
    async def list_rollouts(
        id: str,
        view: View = "groups",
        step: Step | None = None,
        first: Annotated[Step | None, Query(alias="from")] = None,
        last: Annotated[Step | None, Query(alias="to")] = None,
        min_reward: Number | None = None,
        max_reward: Number | None = None,
        min_length: Number | None = None,
        max_length: Number | None = None,
        min_staleness: Number | None = None,
        max_staleness: Number | None = None,
        finish: Annotated[str | None, Query(max_length=40)] = None,
        engine: Annotated[str | None, Query(max_length=200)] = None,
        text: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
        zero_variance: bool | None = None,
        used: bool | None = None,
        sort: Sort = "step",
        order: Order = "desc",
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
        offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    ) -> Response:
        low = _known(reward=min_reward, length=min_length, staleness=min_staleness)
        high = _known(reward=max_reward, length=max_length, staleness=max_staleness)

        def list_them() -> dict[str, Any]:
            run = runs.get(id)
            newest = _last_step(run)
            start, stop = (step, step) if step is not None else (newest if first is None else first, last)
            if first is None and last is not None and step is None:
                start = 0
            stop = newest if stop is None else min(stop, max(start, newest))
            query = RolloutQuery(
                *(view, start, stop, low, high),
                finish=finish,
                engine=engine,
                text=text,
                zero_variance=zero_variance,
                used=used,
                sort=sort,
                order=order,
                limit=limit,
                offset=offset,
            )
            return rollouts(run, query) | {"engines": _engine_names(run)}

        return await _answer(list_them)

    @api.get("/runs/{id}/rollouts/{row}")
    async def one_rollout(
        id: str,
        row: str,
        first: Annotated[int, Query(alias="from", ge=0)] = 0,
        last: Annotated[int | None, Query(alias="to", ge=0)] = None,
    ) -> Response:
        match = _ROW_ID.fullmatch(row)
        if match is None:
            raise ApiError(400, "bad_id", f"a sample's id is step.group.sample, such as 120.3.0; got {row[:40]!r}")
        step, number, index = (int(part) if part else None for part in match.groups())
        assert step is not None and number is not None

        def look_up() -> dict[str, Any]:
            run = runs.get(id)
            if index is None:
                found = sample_view.group(run, step, number)
            else:
                found = sample_view.sample(run, step, number, index, first, last)
            if found is None:
                raise ApiError(404, "not_recorded", f"{row} is not recorded, or not kept any more")
            return found

        return await _answer(look_up)

    @api.get("/runs/{id}/fleet")
    async def fleet(
        id: str,
        start: Annotated[Seconds | None, Query(alias="from")] = None,
        end: Annotated[Seconds | None, Query(alias="to")] = None,
        points: Points = 300,
    ) -> Response:
        return await _answer(lambda: fleet_view.fleet(runs.get(id), start, end, min(points, 2000)))

    @api.get("/runs/{id}/timeline")
    async def spans(
        id: str,
        start: Annotated[Seconds | None, Query(alias="from")] = None,
        end: Annotated[Seconds | None, Query(alias="to")] = None,
        limit: Annotated[int, Query(alias="spans", ge=1, le=timeline.MAX_SPANS)] = 2000,
        seconds: Annotated[float, Query(ge=1, le=3600, allow_inf_nan=False)] = timeline.DEFAULT_SECONDS,
    ) -> Response:
        return await _answer(lambda: timeline.timeline(runs.get(id), start, end, limit, seconds))

    @api.get("/runs/{id}/syncs")
    async def syncs(id: str, before: Step | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        return await _answer(lambda: timeline.syncs(runs.get(id), before, limit))

    @api.get("/runs/{id}/syncs/{version}")
    async def sync(id: str, version: int) -> Response:
        def look_up() -> dict[str, Any]:
            found = timeline.sync(runs.get(id), version) if abs(version) < 1 << 62 else None
            if found is None:
                raise ApiError(404, "not_recorded", f"the sync of version {version} is not recorded")
            return found

        return await _answer(look_up)

    @api.get("/runs/{id}/trace")
    async def trace(
        id: str,
        start: Annotated[Seconds | None, Query(alias="from")] = None,
        end: Annotated[Seconds | None, Query(alias="to")] = None,
    ) -> Response:
        run = runs.get(id)
        body = await run_in_threadpool(_guarded, lambda: perfetto.trace(run, start, end))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", run.path.name) or "run"
        headers = {"Content-Disposition": f'attachment; filename="{name}.perfetto-trace"', "Cache-Control": "no-store"}
        return Response(body, 200, headers, "application/octet-stream")

    return api


async def _answer(make: Callable[[], Any]) -> Response:
    return json_response(await run_in_threadpool(_guarded, make))


def _guarded(make: Callable[[], T]) -> T:
    """Errors of files become answers: a record may be damaged, or be deleted meanwhile."""
    try:
        return make()
    except UNREADABLE as error:
        raise ApiError(503, "unreadable", f"the record cannot be read: {error}") from None


def _known(**bounds: float | None) -> dict[str, float]:
    return {name: value for name, value in bounds.items() if value is not None}


def _details(run: RecordedRun) -> dict[str, Any]:
    found = run.summary()
    files = run.rollout_files()
    metrics: list[str] = []
    evaluations: list[dict[str, Any]] = []
    resumes: list[dict[str, Any]] = []
    with run.run_file() as db:
        if db is not None:
            metrics = columns.metrics(db)
            evaluations = [dict(row) for row in db.execute("SELECT * FROM evaluations ORDER BY step LIMIT 5000")]
            starts = db.execute("SELECT started AS at, step FROM processes ORDER BY started LIMIT 1000")
            resumes = [dict(row) for row in starts]
            found["dropped"] = int(facts(db).get("dropped", "0"))
    names = ("step", "at", "version", "sampled_train", "greedy_train", "sampled_heldout", "greedy_heldout")
    return found | {
        "settings": run.settings(),
        "has_rollouts": bool(files),
        "has_fleet": found["engines"] > 0,
        "rollout_steps": [min(files), _last_step(run)] if files else None,
        "metrics": metrics,
        "evaluations": {name: [row[name] for row in evaluations] for name in names},
        "resumes": resumes,
    }


def _steps(run: RecordedRun, first: int | None, last: int | None, points: int, names: str | None) -> dict[str, Any]:
    with run.run_file() as db:
        if db is None:
            return {"from": 0, "to": 0, "stride": 1, "step": [], "at": [], "series": {}}
        known = columns.metrics(db)
        wanted = known[: columns.MAX_COLUMNS] if names is None else list(dict.fromkeys(filter(None, names.split(","))))
        if unknown := [name for name in wanted if name not in known]:
            raise ApiError(
                400, "unknown_column", f"this run has no column {unknown[0][:60]!r}; it has {', '.join(known)}"
            )
        return columns.steps(db, columns.buckets(db, first, last, points), wanted)


def _mismatch(run: RecordedRun, first: int | None, last: int | None, points: int) -> dict[str, Any]:
    dtype = ""
    with run.fleet_file() as db:
        if db is not None:
            row = db.execute("SELECT dtype FROM engines LIMIT 1").fetchone()
            dtype = row["dtype"] if row else ""
    with run.run_file() as db:
        if db is None:
            return {"from": 0, "to": 0, "stride": 1, "step": [], "series": {}, "worst": []}
        found = columns.mismatch(db, columns.buckets(db, first, last, points), dtype)
    sample_view.add_pieces(run, found["worst"])
    return found


def _last_step(run: RecordedRun) -> int:
    """The last step whose completions are recorded."""
    for path in reversed(run.rollout_files().values()):
        with opened_rollouts(path) as db:
            last = db.execute("SELECT max(step) FROM groups").fetchone()[0] if db is not None else None
            if last is not None:
                return int(last)
    return 0


def _engine_names(run: RecordedRun) -> list[str]:
    with run.fleet_file() as db:
        if db is not None:
            return [row[0] for row in db.execute("SELECT name FROM engines ORDER BY name LIMIT 256")]
    with run.run_file() as db:
        if db is not None:
            return [row[0] for row in db.execute("SELECT DISTINCT engine FROM sync_engines ORDER BY 1 LIMIT 256")]
    return []


def _news(run: RecordedRun) -> dict[str, Any]:
    """What tells a page that something has changed."""
    found = run.entry()
    news = {name: found[name] for name in ("state", "stopped", "last_step", "version", "updated")}
    with contextlib.suppress(*UNREADABLE), run.fleet_file() as db:
        if db is not None:
            news["fleet_at"] = db.execute("SELECT max(at) FROM status").fetchone()[0]
            news["events"] = db.execute("SELECT max(rowid) FROM events").fetchone()[0] or 0
    return news


def _stream(
    runs: RunList,
    request: Request,
    look: Callable[[], dict[str, dict[str, Any]]],
    show: Callable[[dict[str, dict[str, Any]]], dict[str, Any]],
) -> Response:
    """Server-sent events: one at the start, and one whenever what `look` returns, the news by run, has changed. `show` makes
    the event of it."""
    if runs.num_streams >= MAX_STREAMS:
        raise ApiError(503, "too_many_streams", f"at most {MAX_STREAMS} pages are kept up to date; close some")

    async def events() -> AsyncIterator[bytes]:
        runs.num_streams += 1
        try:
            last: dict[str, dict[str, Any]] = {}
            silent = 0.0
            while not await request.is_disconnected():
                try:
                    news = await run_in_threadpool(_guarded, look)
                except ApiError:
                    news = last  # it is being written for the first time
                if news != last:
                    dated = show({id: own | {"now": now()} for id, own in news.items()})
                    yield b"event: change\ndata: " + to_json(dated, inf_nan_mode="null") + b"\n\n"
                    last, silent = news, 0.0
                elif silent >= PING_SECONDS:
                    yield b": ping\n\n"
                    silent = 0.0
                await asyncio.sleep(POLL_SECONDS)
                silent += POLL_SECONDS
        finally:
            runs.num_streams -= 1

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
