"""The dashboard's JSON: live, finished, killed and empty runs; filters; bounds; hostile content."""

import itertools
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path

import anyio
import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from starlette.testclient import TestClient

from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.observe.dashboard import api as dashboard_api
from slipstream.observe.dashboard import rollout_queries, timeline
from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.local_server import create_local_app
from slipstream.observe.dashboard.pieces import pieces, token_bytes
from tests.observe.recorded import START, rollouts, write_fleet, write_run

STEPS = 8
HOSTILE = "<script>alert(1)</script>\u202e\x00\x1b[31m"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "one"
    write_sample_config(path / "model")
    texts = [["alpha", "beta" + "b" * 300 + "needle", "gamma"], [HOSTILE, "", "straße"]]
    write_run(path, STEPS, texts=texts, parts=True, tokenizer=path / "model" / "tokenizer.json")
    write_fleet(path)
    return path


class Api:
    def __init__(self, *run_dirs):
        access = Access(lambda token: "viewer", "127.0.0.1")
        self._client = TestClient(
            create_local_app(run_dirs, access), base_url="http://127.0.0.1:1", headers={"Authorization": "Bearer x"}
        )

    def __call__(self, path="", status=200, **parameters):
        run = self.runs()[0]["id"]
        response = self._client.get(f"/dashboard/api/runs/{run}{path}", params=parameters)
        assert response.status_code == status, response.text
        return response.json()

    def runs(self):
        response = self._client.get("/dashboard/api/runs")
        assert response.status_code == 200, response.text
        return response.json()["runs"]

    def raw(self, path):
        return self._client.get(f"/dashboard/api/runs/{self.runs()[0]['id']}{path}")


@pytest.fixture(scope="module")
def api(run_dir):
    return Api(run_dir)


def test_a_finished_run(api):
    (run,) = api.runs()
    assert (run["state"], run["steps"], run["last_step"], run["total_steps"]) == ("finished", STEPS, STEPS, 8)
    assert run["latest"]["reward"] == 0.8 and run["engines"] == 2 and run["config"]["group"] == 3
    more = api()
    assert more["rollout_steps"] == [1, STEPS] and "train_kl" in more["metrics"] and more["settings"]["seed"] == 5
    assert more["evaluations"]["sampled_train"] == [0.1] and more["evaluations"]["greedy_heldout"] == [None]


def test_empty_missing_live_and_killed_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "killed", finish=False)
    with sqlite3.connect(tmp_path / "killed/record/run.sqlite") as db:
        db.execute("UPDATE processes SET pid = ?, ended = NULL", (2**22 + 1,))
    write_run(tmp_path / "live", finish=False)
    with sqlite3.connect(tmp_path / "live/record/run.sqlite") as db:
        db.execute("UPDATE processes SET ended = NULL")
    (tmp_path / "cut/record").mkdir(parents=True)
    (tmp_path / "cut/record/run.sqlite").write_bytes(b"")
    names = ("empty", "missing", "killed", "live", "cut")
    api = Api(*(tmp_path / name for name in names))
    assert [run["state"] for run in api.runs()] == ["empty", "empty", "dead", "live", "empty"]
    assert [run["recording"] for run in api.runs()] == [False, False, False, True, False]
    empty = Api(tmp_path / "missing")
    assert empty("/steps")["step"] == [] and empty("/rollouts")["total"] == 0 and empty("/fleet")["engines"] == []
    assert empty("/timeline")["spans"]["start"] == [] and empty("/mismatch")["worst"] == [] and empty("/syncs") == {}
    assert empty("/rollouts/1.0.0", status=404)["error"]["code"] == "not_recorded"
    assert empty()["rollout_steps"] is None and empty.raw("/trace").status_code == 200


def test_runs_in_a_directory_are_found(tmp_path, run_dir):
    for name in ("a", "b"):
        shutil.copytree(run_dir / "record", tmp_path / name / "record")
    assert [run["name"] for run in Api(tmp_path).runs()] == ["a", "b"]


def damaged(record, _):
    (record / "run.sqlite").write_bytes(os.urandom(8192))
    return "not a database"


def of_another_release(record, _):
    with sqlite3.connect(record / "fleet.sqlite") as db:
        db.execute("UPDATE facts SET value = '99' WHERE name = 'format'")
    return "record format 99"


def of_another_user(record, monkeypatch):
    """As the tests may run as root, who may see everything."""
    stat = Path.stat

    def refuse(path, **how):
        if path.is_relative_to(record):
            raise PermissionError(f"not allowed: {path}")
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse)
    return "not allowed"


@pytest.mark.parametrize("spoil", [damaged, of_another_release, of_another_user])
def test_an_unreadable_run_does_not_hide_the_others(spoil, tmp_path, run_dir, monkeypatch):
    shutil.copytree(run_dir / "record", tmp_path / "spoiled/record")
    reason = spoil(tmp_path / "spoiled/record", monkeypatch)
    run_dirs = [tmp_path / "spoiled", run_dir]
    api = Api(*run_dirs)
    spoiled, good = api.runs()
    assert spoiled["state"] == "unreadable" and reason in spoiled["stopped"] and spoiled["steps"] == 0
    assert good["state"] == "finished"
    (event,) = news(run_dirs, "live")
    assert [run["state"] for run in event["runs"].values()] == ["unreadable", "finished"]
    assert api(status=503)["error"]["code"] == "unreadable"


def test_steps_are_thinned_out_with_their_extremes(api):
    whole = api("/steps", columns="rollout_reward,train_kl")
    assert whole["stride"] == 1 and whole["step"] == list(range(1, STEPS + 1))
    values = whole["series"]["train_kl"]["mean"]
    np.testing.assert_allclose(values, [1 / step for step in range(1, STEPS + 1)])
    thin = api("/steps", columns="train_kl", points=3)
    assert thin["stride"] == 3 and thin["step"] == [1, 4, 7]
    for point, low in enumerate((0, 3, 6)):
        part = values[low : low + 3]
        found = [thin["series"]["train_kl"][name][point] for name in ("mean", "min", "max")]
        np.testing.assert_allclose(found, [np.mean(part), min(part), max(part)])
    assert api("/steps", **{"from": 3, "to": 5})["step"] == [3, 4, 5]
    error = api("/steps", status=400, columns='train_kl"); DROP TABLE steps; --')["error"]
    assert error["code"] == "unknown_column"


def listed(api, **parameters):
    return api("/rollouts", view="samples", **{"from": 1}, **parameters)


def naive(condition):
    """Ids of samples, newest step first."""
    found = []
    for step in range(STEPS, 0, -1):
        taken = rollouts(step)
        for group, rewards in zip(taken.groups, taken.rewards):
            number = taken.groups.index(group)
            for c, reward in zip(group.completions, rewards):
                if condition(step, number, c, reward):
                    found.append(f"{step}.{number}.{c.sample_index}")
    return found


FILTERS = {
    "reward": (dict(min_reward=0.5), lambda step, group, c, reward: reward >= 0.5),
    "length": (dict(min_length=2, max_length=4), lambda step, group, c, reward: 2 <= len(c.token_ids) <= 4),
    "finish": (dict(finish="length"), lambda step, group, c, reward: c.finish_reason == "length"),
    "engine": (dict(engine="engine-1"), lambda step, group, c, reward: c.engine == "engine-1"),
    "zero variance": (dict(zero_variance=True), lambda step, group, c, reward: group == 1),
    "staleness": (dict(min_staleness=2), lambda step, group, c, reward: False),
    "head": (dict(text="ALPHA"), lambda step, group, c, reward: (group, c.sample_index) == (0, 0)),
    "text beyond the head": (dict(text="needle"), lambda step, group, c, reward: (group, c.sample_index) == (0, 1)),
    "case folding": (dict(text="STRASSE"), lambda step, group, c, reward: (group, c.sample_index) == (1, 2)),
    "prompt": (dict(text="prompt 1 of 3"), lambda step, group, c, reward: (step, group) == (3, 1)),
    "markup": (dict(text="<script>"), lambda step, group, c, reward: (group, c.sample_index) == (1, 0)),
    "SQL": (dict(text="' OR 1=1 --"), lambda step, group, c, reward: False),
    "wildcards": (dict(text="%"), lambda step, group, c, reward: False),
    "two": (
        dict(min_reward=0.5, engine="engine-1"),
        lambda step, group, c, reward: reward > 0 and c.engine == "engine-1",
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(name, api):
    parameters, condition = FILTERS[name]
    found = listed(api, **parameters)
    expected = naive(condition)
    assert found["rows"].get("id", []) == expected and found["total"] == len(expected)
    groups = api("/rollouts", **{"from": 1}, **parameters)["rows"].get("id", [])
    assert groups == list(dict.fromkeys(id.rpartition(".")[0] for id in expected))


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", ["reward", "length", "gap", "advantage", "engine", "step", "staleness"])
def test_sorting_and_pages(sort, order, api):
    whole = listed(api, sort=sort, order=order, limit=200)["rows"]
    values = whole[sort]
    assert len(values) == STEPS * 6 and values == sorted(values, reverse=order == "desc")
    pages = [listed(api, sort=sort, order=order, limit=20, offset=offset)["rows"]["id"] for offset in (0, 20, 40)]
    assert list(itertools.chain(*pages)) == whole["id"]


def test_a_list_ends_at_the_newest_step(api):
    found = listed(api, to=10**6)
    assert found["to"] == found["scanned"]["to"] == STEPS and found["total"] == STEPS * 6


def test_a_search_that_takes_too_long_ends_early(api, monkeypatch):
    monkeypatch.setattr(rollout_queries, "BUDGET_SECONDS", -1.0)
    monkeypatch.setattr(rollout_queries, "OPERATIONS", 1000)
    found = listed(api)
    assert not found["scanned"]["complete"] and not found["total_is_exact"] and found["total"] < STEPS * 6


def test_groups_have_their_samples(api):
    rows = api("/rollouts", step=3, sort="reward_std")["rows"]
    assert rows["id"] == ["3.0", "3.1"] and rows["zero_variance"] == [0, 1] and rows["samples"] == [3, 3]
    assert rows["rewards"][0] == [0, 1, 0] and rows["lengths"][1] == [3, 2, 4]
    np.testing.assert_allclose(rows["reward_std"], [np.std([0, 1, 0]), 0])
    one = api("/rollouts/3.0")
    assert one["prompt"] == "prompt 0 of 3" and one["samples"]["id"] == ["3.0.0", "3.0.1", "3.0.2"]


def test_a_sample_with_its_tokens(api):
    taken = rollouts(4)
    c, trainer = taken.groups[1].completions[2], taken.trained.trainer_logprobs()
    found = api("/rollouts/4.1.2")
    tokens = found["tokens"]
    assert tokens["id"] == list(c.token_ids) and found["text"] == "straße" and found["count"] == 4
    np.testing.assert_allclose(tokens["engine_logprob"], c.logprobs, atol=1e-5)
    start = len(c.prompt_token_ids) - 1
    np.testing.assert_allclose(tokens["trainer_logprob"], trainer[5, start : start + 4], atol=1e-4)
    assert tokens["version"] == [[s.version, s.start, s.stop] for s in c.spans]
    assert tokens["advantage"] == 5 / 4 and tokens["mask"] == 1 and tokens["raw_logprob"] is None
    assert (found["previous"], found["next"]) == ("4.1.1", None)
    assert found["reward_parts"] == {"exact": 5.0, "exact.part": 0.5}
    assert len(found["prompt"]["pieces"]) == found["prompt"]["tokens"] == len(c.prompt_token_ids)
    part = api("/rollouts/4.1.2", **{"from": 1, "to": 3})
    assert part["tokens"]["id"] == list(c.token_ids[1:3]) and (part["from"], part["to"]) == (1, 3)
    assert api("/rollouts/4.0.1")["text"].endswith("needle")


@pytest.mark.parametrize("row", ["9.0.0", "4.7", "0.0.0"])
def test_what_is_not_recorded(row, api):
    assert api(f"/rollouts/{row}", status=404)["error"]["code"] == "not_recorded"


@pytest.mark.parametrize(
    "path, parameters",
    [
        ("/rollouts/x", {}),
        ("/rollouts/1.2.3.4", {}),
        ("/rollouts/99999999999999999999.0.0", {}),
        ("/rollouts", {"limit": 100000}),
        ("/rollouts", {"offset": 10**9}),
        ("/rollouts", {"sort": "id; DROP TABLE samples"}),
        ("/rollouts", {"min_reward": "nan"}),
        ("/rollouts", {"text": "x" * 1000}),
        ("/steps", {"points": 10**6}),
        ("/timeline", {"spans": 10**6}),
        ("/timeline", {"from": "inf"}),
        ("/fleet", {"points": 0}),
    ],
)
def test_bad_parameters(path, parameters, api):
    assert api(path, status=400, **parameters)["error"]["status"] == 400


def test_hostile_content_arrives_as_data(api):
    response = api.raw("/rollouts/1.1.0")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["text"] == HOSTILE


def test_the_fleet(api):
    fleet = api("/fleet")
    first, second = fleet["engines"]
    assert (first["name"], first["state"], first["version"], first["tokens"]) == ("engine-0", "ready", 2, 100)
    assert second["version"] == 1
    assert [kind for kind in fleet["events"]["kind"] if kind in ("joined", "lost", "retry")] == [
        "joined",
        "joined",
        "lost",
        "retry",
    ]
    facts = [text for text in fleet["events"]["detail"] if "pid" in text]
    assert facts == ["embedded, pid 1, no weights", "embedded, pid 1, version 1"]
    assert fleet["commits"] == {"version": [2], "first": fleet["commits"]["first"], "engines": {"engine-0": [0.0]}}
    assert fleet["series"]["engines"]["engine-0"]["version"][-1] == 2


def test_what_engines_do_now(tmp_path):
    """One has generated for 30 seconds, which are 30 spans; the other has been idle for 6 of the last 8."""
    write_fleet(tmp_path)
    now = time.time() + 1
    spans = [(now - n - 1, now - n, "engine-0", "generate", 0, 1, "") for n in range(30)]
    spans.append((now - 32, now - 31, "engine-0", "generate", 0, 1, ""))
    with sqlite3.connect(tmp_path / "record/fleet.sqlite") as db:
        db.execute("DELETE FROM status")
        db.executemany(
            'INSERT INTO spans (start, "end", lane, name, depth, count, detail) VALUES (?,?,?,?,?,?,?)', spans
        )
        status = [(now, "engine-0", 0), (now - 8, "engine-1", 0), (now - 6, "engine-1", 80)]
        db.executemany("INSERT INTO status (at, engine, tokens) VALUES (?, ?, ?)", status)
    first, second = Api(tmp_path)("/fleet")["engines"]
    assert first["doing"] == "generate" and first["doing_since"] == pytest.approx(now - 30, abs=0.01)
    assert second["tokens_per_second"] == pytest.approx(10)


def test_a_timeline_of_many_spans_has_all_lanes_up_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "CANDIDATES", 100)
    write_fleet(tmp_path)
    spans = [(at, at + 0.001, f"engine-{n}", "generate", 0, 1, "") for n in range(8) for at in np.arange(0, 30, 0.1)]
    spans += [(1, 29, "trainer", "long", n, 1, "") for n in range(5)]
    with sqlite3.connect(tmp_path / "record/fleet.sqlite") as db:
        db.executemany(
            'INSERT INTO spans (start, "end", lane, name, depth, count, detail) VALUES (?,?,?,?,?,?,?)', spans
        )
    whole = Api(tmp_path)("/timeline", **{"from": 0, "to": 30})
    ends = dict(zip(whole["spans"]["lane"], whole["spans"]["end"]))
    assert whole["lanes"] == ["trainer", *(f"engine-{n}" for n in range(8))]
    assert [ends[n] for n in range(1, 9)] == pytest.approx([29.901] * 8)


def test_the_last_seconds_of_the_timeline(api):
    found = api("/timeline", to=START + 8, seconds=3)
    assert found["from"] == START + 5
    assert api("/timeline", seconds=0.5, status=400) and api("/timeline", seconds=3601, status=400)


def test_the_timeline_and_the_syncs(api):
    whole = api("/timeline", **{"from": 0, "to": START + 100})
    spans = whole["spans"]
    trainer = [name for name, lane in zip(spans["name"], spans["lane"]) if whole["lanes"][lane] == "trainer"]
    assert trainer.count("train") == STEPS and trainer.count("send") == STEPS and whole["lanes"][0] == "trainer"
    few = api("/timeline", spans=5, **{"from": 0, "to": START + 100})
    assert len(few["spans"]["name"]) == 5 and few["aggregated"] and few["resolution"] > 0
    part = api("/timeline", **{"from": START + 2.895, "to": START + 3})
    assert {"sync", "plan", "send"} <= set(part["spans"]["name"]) and "warm-up" not in part["spans"]["name"]
    engines = api("/timeline")
    assert {"generate", "stage", "commit", "receive", "pause"} <= set(engines["spans"]["name"])
    assert "lost" in engines["marks"]["name"]
    listed = api("/syncs", limit=3)
    assert listed["version"] == [8, 7, 6] and api("/syncs", before=6)["version"][0] == 5
    report = api("/syncs/3")
    assert report["phases"] == {"plan": 0.001, "send": 0.002, "stage": 0.003, "commit": 0.004, "total": 0.01}
    assert [engine["engine"] for engine in report["engines"]] == ["engine-0", "engine-1"]
    assert [engine["lost_tokens"] for engine in report["engines"]] == [0.5, 1.5]
    assert api("/syncs/99", status=404)


def test_mismatch(api, run_dir):
    found = api("/mismatch", points=4)
    assert found["step"] == [1, 3, 5, 7] and set(found["by_engine"]) == {"engine-0", "engine-1"}
    assert sum(found["histogram"]["tokens"]) == STEPS * 22
    assert found["diagnoses"] == {"step": [2], "sentence": ["They agree."]}
    gaps = [abs(row["gap"]) for row in found["worst"]]
    assert gaps == sorted(gaps, reverse=True) and len(gaps) == 3 * STEPS
    worst = found["worst"][0]
    tokens = api(f"/rollouts/{worst['id']}")["tokens"]
    assert tokens["id"][worst["position"]] == worst["token_id"] and tokens["piece"][worst["position"]] == worst["token"]


def test_the_trace_has_spans_that_began_before(api):
    """Step 4 generates from 3 to 3.4."""
    part = api._client.get(f"/dashboard/api/runs/{api.runs()[0]['id']}/trace?from={START + 3.2}&to={START + 3.3}")
    assert b"generate" in part.content


def test_perfetto_reads_the_trace(api):
    response = api.raw("/trace")
    assert response.headers["content-disposition"].endswith('.perfetto-trace"')
    trace = perfetto_trace_pb2.Trace.FromString(response.content)
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    names = {track.name for track in tracks.values()}
    assert {"one", "trainer", "engine-0", "train", "commit"} <= names
    opened = {}
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert event.track_uuid in tracks
        if event.type == event.TYPE_SLICE_BEGIN:
            opened[event.track_uuid] = packet.timestamp, event
        elif event.type == event.TYPE_SLICE_END:
            begun, begin = opened.pop(event.track_uuid)  # slices of a track follow each other
            assert packet.timestamp >= begun and begin.name == tracks[event.track_uuid].name
    assert not opened
    steps = [
        annotation.int_value
        for packet in trace.packet
        for annotation in packet.track_event.debug_annotations
        if packet.track_event.name == "train" and annotation.name == "step"
    ]
    assert steps == list(range(1, STEPS + 1))


def news(run_dirs, path):
    """The events of a stream, which goes on for a moment after its first one."""
    received = []

    async def main():
        begun, disconnected = anyio.Event(), anyio.Event()

        async def receive():
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body" and message["body"]:
                received.append(message["body"])
                begun.set()

        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/dashboard/api/{path}",
            "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer x")],
            "query_string": b"",
            "root_path": "",
        }
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    create_local_app(run_dirs, Access(lambda token: "viewer", "127.0.0.1")), scope, receive, send
                )
                await begun.wait()
                await anyio.sleep(0.3)
                disconnected.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard_api, "POLL_SECONDS", 0.02)
        anyio.run(main)
    assert all(event.startswith(b"event: change\ndata: ") for event in received)
    return [json.loads(event.split(b"data: ")[1]) for event in received]


def test_news_of_a_run(run_dir):
    """The first event says where the run stands; there is no other unless it changes, though time goes on."""
    run = Api(run_dir).runs()[0]
    (event,) = news([run_dir], f"runs/{run['id']}/live")
    assert event["last_step"] == STEPS and event["now"] > run["now"] > time.time() - 60
    (event,) = news([run_dir], "live")
    assert event["runs"][run["id"]]["now"] > run["now"]


def test_pieces_join_to_the_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    text = "héllo 🙂 <0x41> done"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "bytes.json"))
    ids = tokenizer.encode(text).ids
    found = pieces(ids, token_bytes(tmp_path / "bytes.json", 0.0))
    assert "".join(found) == text and len(found) == len(text.encode())
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x99>": 5, "<0x82>": 6}
    metaspace = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    metaspace.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    metaspace.save(str(tmp_path / "words.json"))
    assert pieces([1, 2, 3, 4, 5, 6, 99], token_bytes(tmp_path / "words.json", 0.0)) == [
        " a",
        "b",
        "",
        "",
        "",
        "🙂",
        "<99>",
    ]
