"""One trace from a prompt to its place in an update: trainer, a real gateway over gRPC, and an embedded engine."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, GatewayConfig, HttpConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.gateway import server
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.service import Service
from slipstream.gateway.tokens import TokenTable
from slipstream.http.server import companion_server
from slipstream.model.checkpoints.sample_model import write_sample_model
from slipstream.rl.config import AlgorithmConfig, TaskConfig, TrainConfig
from slipstream.rl.reporting.records import StepRecord
from slipstream.rl.trainer.loop import training_loop
from slipstream.runtime import event_loop, tracing
from tests.gateway.scripted import attached

CONFIG = TrainConfig(
    steps=2,
    warmup_steps=0,
    eval_prompts=2,
    engines=1,
    mode="async",
    max_staleness=1,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=2, group=2, max_tokens=4),
    engine=EmbeddedConfig(max_num_seqs=8, max_model_len=16),
)
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.start("test", provider)
    yield exporter
    tracing.stop()


@contextlib.contextmanager
def fleet(model):
    """A bridge to a gateway in this process, with an engine that is attached over gRPC, and the URL of its HTTP server."""
    up, ending, found = threading.Event(), threading.Event(), []

    async def serve():
        import asyncio

        config = GatewayConfig()
        service, tokens = Service(config.lease_seconds), TokenTable("a-token")
        engine = EmbeddedEngine.from_directory(model, name="engine-0", options=CONFIG.engine)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(engine.close)
            address = await stack.enter_async_context(server.running(config, tokens, service))
            http = companion_server(HttpConfig(model=str(model)), config)(service, address, tokens, {})
            found.append((await stack.enter_async_context(http))["http"])
            await stack.enter_async_context(attached(engine, address, "a-token", 30.0))
            found.append(GatewayFleet(address, "a-token", 60.0, 1 << 24))
            up.set()
            await asyncio.to_thread(ending.wait, 500)

    serving = event_loop.start(serve())
    while not up.wait(0.1):
        assert not serving.done() or serving.result()
    try:
        with Bridge(found[1]) as bridge:
            yield bridge, found[0]
    finally:
        ending.set()
        serving.result(60)


def test_a_prompts_trace_leads_from_its_submission_to_the_version_it_made(exporter, tmp_path):
    write_sample_model(tmp_path / "model")
    with fleet(tmp_path / "model") as (bridge, url):
        records = list(training_loop(CONFIG, bridge, tmp_path / "model", tmp_path / "run"))
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": [5, 6], "max_tokens": 2},
            headers={"Authorization": "Bearer a-token", "traceparent": CALLER},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
    steps = [record for record in records if isinstance(record, StepRecord)]
    spans = exporter.get_finished_spans()
    submitted = [span for span in spans if span.name == "rollout.submit"]
    assert len(submitted) == CONFIG.steps * CONFIG.algorithm.prompts and all(span.parent is None for span in submitted)
    trained = []
    for root in submitted:
        trace = [span for span in spans if span.context.trace_id == root.context.trace_id]
        by_name = {span.name: span for span in trace}
        assert len(by_name) == len(trace), f"each part once: {[span.name for span in trace]}"
        parents = {span.name: span.parent and span.parent.span_id for span in trace}
        assert parents["engine.generate"] == by_name["gateway.generate"].context.span_id
        for name in ("gateway.queue", "gateway.generate", "rollout.take", "train.reward", "train.update", "train.sync"):
            assert parents[name] == root.context.span_id, name
        order = ["rollout.submit", "gateway.queue", "gateway.generate", "engine.generate", "train.update", "train.sync"]
        starts = [by_name[name].start_time for name in order]
        assert starts == sorted(starts)
        generated, update = by_name["engine.generate"].attributes, by_name["train.update"].attributes
        assert generated["slipstream.engine"] == "engine-0" and 2 <= generated["slipstream.tokens"] <= 8
        version = by_name["train.sync"].attributes["slipstream.version"]
        assert set(generated["slipstream.versions"]) < set(range(version))
        trained.append((update["slipstream.step"], version))
    assert sorted(trained) == sorted((step.step, step.version + 1) for step in steps for _ in range(2))
    request = next(span for span in spans if span.name == "http.request")
    assert tracing._traceparent(request).startswith(CALLER[:36]) and request.parent.span_id == int(CALLER[36:52], 16)
    served = next(s for s in spans if s.name == "engine.generate" and s.context.trace_id == request.context.trace_id)
    assert (
        served.parent.span_id == request.context.span_id and request.attributes["slipstream.path"] == "/v1/completions"
    )


def test_a_client_cannot_break_tracing_and_a_span_ends_with_its_error(exporter):
    for text in ("nonsense", "00-0-0-0", "x" * 10_000):
        with tracing.span("http.request", text):
            assert tracing.current().startswith("00-")
    with contextlib.suppress(ValueError), tracing.span("fails", ""):
        raise ValueError("no")
    tracing.begin("lost", "").end(ValueError("gone"))
    *_, failed, lost = exporter.get_finished_spans()
    assert all(span.parent is None for span in exporter.get_finished_spans())
    assert not failed.status.is_ok and lost.events[0].name == "exception"


def python(code, **environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    source = str(Path(tracing.__file__).parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=own | environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )


def test_without_configuration_nothing_is_imported():
    code = """
import os, sys
from slipstream.runtime import tracing
import slipstream.deploy.fleet, slipstream.gateway.server  # FastAPI imports OpenTelemetry's API by itself
for environment in (
    {},
    {"OTEL_TRACES_EXPORTER": "none"},
    {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"},
):
    os.environ.update(environment)
    tracing.start("trainer")
    with tracing.span("a") as facts, tracing.span_each("b", ["", ""]):
        facts["c"] = tracing.begin("d", "").traceparent + tracing.current()
    assert not any(name.startswith("opentelemetry") for name in sys.modules), environment
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


SPAN = 'from slipstream.runtime import tracing\ntracing.start("engine-3")\nwith tracing.span("x"): pass\n'


def test_the_standard_variables_choose_the_exporter():
    console = python(SPAN, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine")
    assert '"name": "x"' in console.stderr and '"slipstream.process": "engine-3"' in console.stderr
    assert '"service.name": "mine"' in console.stderr
    wrong = python(SPAN, OTEL_TRACES_EXPORTER="zipkin")
    assert "ConfigError: OTEL_TRACES_EXPORTER=zipkin" in wrong.stderr
    missing = python("import sys\nsys.modules['opentelemetry.sdk'] = None\n" + SPAN, OTEL_TRACES_EXPORTER="console")
    assert missing.returncode == 0 and "pip install 'slipstream-rl[otel]'" in missing.stderr


def test_spans_leave_over_otlp():
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        done = python(SPAN, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_COMPRESSION="none")
        collector.shutdown()
    assert done.returncode == 0 and received, done.stderr
    message = ExportTraceServiceRequest.FromString(received[0])
    assert message.resource_spans[0].scope_spans[0].spans[0].name == "x"
