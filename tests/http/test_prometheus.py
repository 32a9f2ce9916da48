"""`/metrics` of a real gateway, scraped by Prometheus, and the Grafana dashboard that is made of these metrics."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import slipstream
from slipstream.config import GatewayConfig, HttpConfig
from slipstream.gateway import server
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.service import Service
from slipstream.gateway.staleness import RolloutBound
from slipstream.gateway.tokens import TokenTable
from slipstream.http.server import companion_server
from slipstream.runtime import event_loop
from slipstream.types import Request, SamplingParams
from tests.gateway.scripted import ScriptedEngine, attached

DASHBOARD = Path(__file__).parents[2] / "docs/assets/grafana.json"

PROMETHEUS = os.environ.get("SLIPSTREAM_PROMETHEUS") or shutil.which("prometheus") or ""


@contextlib.asynccontextmanager
async def busy_gateway():
    """A gateway with two engines that has synced, failed to sync, generated for HTTP, and had groups taken, one of them old."""
    engines, config = [ScriptedEngine(f"e{i}") for i in range(2)], GatewayConfig()
    service, tokens = Service(config.lease_seconds), TokenTable("a-token")
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(server.running(config, tokens, service))
        for engine in engines:
            await stack.enter_async_context(attached(engine, address, "a-token"))
        http = companion_server(HttpConfig(), config)(service, address, tokens, {})
        url = (await stack.enter_async_context(http))["http"]
        fleet = GatewayFleet(address, "a-token", 60.0, 1 << 20)
        stack.push_async_callback(fleet.close)
        bound = RolloutBound(1, 2)
        requests = [Request(f"p{i}", (1, 2), SamplingParams(n=2, seed=i)) for i in range(4)]
        await fleet.submit(bound, requests)
        await fleet.take(bound, 0, 2, 60.0)
        await sync(fleet, engines, 1)
        await fleet.take(bound, 2, 2, 60.0)
        engines[0].fail_stage = True
        with contextlib.suppress(slipstream.SlipstreamError):
            await sync(fleet, engines, 2)
        await fleet.quarantine("e1", "an operator says so")
        yield url


async def sync(fleet, engines, version):
    from slipstream.types import Offer, UpdateSteps

    await fleet.refresh()
    offer = Offer(b"", "f", "memory", False, False)
    await fleet.send_steps({e.name: UpdateSteps(version, offer) for e in engines})
    await fleet.receive_reports()
    manifests = [[b""]]
    await fleet.send_steps({e.name: UpdateSteps(version, manifests=manifests, in_flight="keep") for e in engines})
    await fleet.receive_reports()


@pytest.fixture(scope="module")
def url():
    started, ending, found = threading.Event(), threading.Event(), []

    async def serve():
        import asyncio

        async with busy_gateway() as url:
            found.append(url)
            started.set()
            await asyncio.to_thread(ending.wait, 300)

    serving = event_loop.start(serve())
    while not started.wait(0.1):
        assert not serving.done() or serving.result()
    yield found[0]
    ending.set()
    serving.result(60)


HEADERS = {"Authorization": "Bearer a-token"}


def scrape(url):
    return httpx.get(f"{url}/metrics", headers=HEADERS, timeout=60).text


def test_the_metrics_say_what_happened(url):
    httpx.post(
        f"{url}/v1/completions", headers=HEADERS, json={"prompt": [1], "max_tokens": 2}, timeout=60
    ).raise_for_status()
    samples = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(scrape(url))
        for sample in family.samples
    }
    assert samples["slipstream_rollout_groups_taken_total",] == 4
    assert samples["slipstream_rollout_groups", "waiting"] == samples["slipstream_rollout_groups", "finished"] == 0
    assert samples["slipstream_rollout_staleness_bucket", "0"] == 2, "two groups were a version old"
    assert samples["slipstream_rollout_staleness_bucket", "+Inf"] == samples["slipstream_rollout_staleness_count",] == 4
    assert samples["slipstream_rollout_staleness_sum",] == 2 and samples["slipstream_rollout_max_staleness",] == 1
    assert samples["slipstream_syncs_total", "committed"] == 1 == samples["slipstream_syncs_total", "rolled_back"]
    assert samples["slipstream_sync_seconds_count", "total"] == 1
    assert samples["slipstream_sync_seconds_sum", "verify"] == pytest.approx(0.002)
    assert samples["slipstream_sync_bytes_total",] == 16 and samples["slipstream_policy_version",] == 1
    assert samples["slipstream_engine_decisions_total", "quarantine"] == 1
    assert samples["slipstream_engine_decisions_total", "drain"] == 0
    assert samples["slipstream_engines", "quarantined"] == 1 == samples["slipstream_engines", "ready"]
    tokens = [samples["slipstream_engine_generated_tokens_total", name] for name in ("e0", "e1")]
    assert sum(tokens) == 2 * (4 * 2 + 1), "of both engines, the HTTP request's too"


def names_of(text):
    return set(re.findall(r"\bslipstream_\w+", text))


def test_every_metric_of_the_dashboard_exists(url):
    httpx.get(f"{url}/ready", headers=HEADERS, timeout=60)
    scraped = names_of(scrape(url))
    text = DASHBOARD.read_text()
    assert len(names_of(text)) > 20 and names_of(text) <= scraped
    labels = set(re.findall(r'(\w+)=~?"', scrape(url))) | {"job"}
    used = re.findall(r"by \(([\w, ]+)\)", text) + re.findall(r'(\w+)=~?\\"', text)
    assert {name.strip() for names in used for name in names.split(",")} <= labels


def test_the_dashboard_is_one_for_grafana():
    """Its own schema, as Grafana publishes it in a package."""
    schema = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    written = json.loads(DASHBOARD.read_text())
    read = schema.Dashboard.from_json(written)
    assert read.title == "Slipstream fleet" and len(read.panels) == len(written["panels"]) == 24
    known = {json.dumps(panel["gridPos"], sort_keys=True) for panel in written["panels"]}
    assert len(known) == 24 and len({panel["id"] for panel in written["panels"]}) == 24
    back = json.loads(json.dumps(read, default=lambda value: value.to_json()))
    for before, after in zip(written["panels"], back["panels"]):
        assert {k: after.get(k) for k in ("type", "title", "gridPos")} == {
            k: before[k] for k in ("type", "title", "gridPos")
        }


@pytest.mark.skipif(not PROMETHEUS, reason="prometheus is not installed (Debian's package of that name)")
def test_prometheus_scrapes_it_and_the_dashboards_queries_run(url, tmp_path):
    promtool = Path(PROMETHEUS).with_name("promtool")
    checked = subprocess.run([promtool, "check", "metrics"], input=scrape(url), capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "token").write_text("a-token")
    (tmp_path / "prometheus.yml").write_text(
        f"""
        global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
        scrape_configs:
          - job_name: slipstream
            authorization: {{credentials_file: {tmp_path}/token}}
            static_configs: [{{targets: ['{url.removeprefix("http://")}']}}]
        """
    )
    with open(tmp_path / "log", "w+") as log:
        command = [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
        try:
            own = listens_on(process, tmp_path / "log")

            def ask(query):
                answer = httpx.get(f"{own}/api/v1/query", params={"query": query}).json()
                assert answer["status"] == "success", (query, answer)
                return answer["data"]["result"]

            deadline = time.monotonic() + 60
            while len(ask("slipstream_rollout_groups_taken_total[1m]") or [{}]) and not any(
                len(series["values"]) > 2 for series in ask("slipstream_rollout_groups_taken_total[1m]")
            ):
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
            assert ask('up{job="slipstream"}')[0]["value"][1] == "1"
            for panel in json.loads(DASHBOARD.read_text())["panels"]:
                for target in panel["targets"]:
                    query = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*")
                    result = ask(query)
                    if "> 0" not in query and " / " not in query:
                        assert result, f"{panel['title']}: {query} has no data"
        finally:
            process.kill()
            process.wait()


def listens_on(process, log):
    """Return the URL of a server that takes a free port."""
    deadline = time.monotonic() + 60
    while not (found := re.search(r'msg="Listening on" address=(\S+)', log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return f"http://{found[1]}"
