"""OpenTelemetry traces: one for each prompt, from its submission to the update that trains on it (docs/operations.md).

They are on if the standard variables name an exporter (OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT), or if the program
has set a tracer provider of OpenTelemetry's SDK. Otherwise nothing of OpenTelemetry is imported, and every function here
returns at once. A span's place in its trace travels as a W3C `traceparent` text, with the request it is about."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

_R = TypeVar("_R", bound=Any)

_tracer: Any = None
_EXPORTERS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def start(process: str, provider: Any = None) -> None:
    """Switch tracing on, if it is configured or a provider is given. `process` names this one, such as `engine-0`."""
    global _tracer
    if _tracer is not None and provider is None:
        return
    provider = provider or _program_provider() or _configured_provider(process)
    if provider is not None:
        from slipstream import __version__

        _tracer = provider.get_tracer("slipstream", __version__)


def stop() -> None:
    """Switch tracing off. The provider is its owner's to shut down."""
    global _tracer
    _tracer = None


def is_on() -> bool:
    return _tracer is not None


class TraceSpan:
    """A span that has begun. Without tracing, and after its end, calls do nothing."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The context for the span's children; empty without tracing."""
        return "" if self._span is None else _traceparent(self._span)

    def end(self, error: BaseException | None = None, **attributes: Any) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.set_attributes(_named(attributes))
            if error is not None:
                span.record_exception(error)
            span.end()


_OFF = TraceSpan()


def begin(name: str, parent: str | None = None, start_ns: int | None = None, **attributes: Any) -> TraceSpan:
    """Begin a span below `parent`, a traceparent; by default below the current span, and below none if it is empty."""
    if _tracer is None:
        return _OFF
    return TraceSpan(_tracer.start_span(name, _context(parent), attributes=_named(attributes), start_time=start_ns))


@contextlib.contextmanager
def span(name: str, parent: str | None = None, **attributes: Any) -> Iterator[dict[str, Any]]:
    """Run the body in a span, which is the current one meanwhile. Yields a dict for attributes known at its end."""
    more: dict[str, Any] = {}
    if _tracer is None:
        yield more
        return
    with _tracer.start_as_current_span(name, _context(parent), attributes=_named(attributes)) as current_span:
        try:
            yield more
        finally:
            current_span.set_attributes(_named(more))


@contextlib.contextmanager
def span_each(name: str, parents: Sequence[str], **attributes: Any) -> Iterator[None]:
    """Add a span for the body to several traces."""
    spans = begin_each(name, parents, **attributes)
    try:
        yield
    finally:
        end_each(spans)


def begin_each(name: str, parents: Sequence[str], **attributes: Any) -> list[TraceSpan]:
    now = time.time_ns()
    return [begin(name, parent, now, **attributes) for parent in parents if parent]


def end_each(spans: Sequence[TraceSpan], **attributes: Any) -> None:
    for each in spans:
        each.end(**attributes)


def current() -> str:
    """The traceparent of the current span; empty if there is none."""
    if _tracer is None:
        return ""
    from opentelemetry import trace

    return _traceparent(trace.get_current_span())


def traced(requests: Sequence[_R]) -> Sequence[_R]:
    """Return requests with the current span as their parent, if there is one and they have none."""
    if not (parent := current()):
        return requests
    return [r if r.traceparent else dataclasses.replace(r, traceparent=parent) for r in requests]


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------


def _context(parent: str | None) -> Any:
    if parent is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # A text that is not a traceparent, from a client of the HTTP server, begins a new trace.
    return TraceContextTextMapPropagator().extract({"traceparent": parent}, context=Context())


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"slipstream.{name}": value for name, value in attributes.items()}


def _program_provider() -> Any:
    """Return the provider that the program has set, if it uses OpenTelemetry's SDK."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import get_tracer_provider

    found = get_tracer_provider()
    return found if isinstance(found, TracerProvider) else None


def _configured_provider(process: str) -> Any:
    """Return a provider with the exporters that the environment names; None if it names none."""
    default = "otlp" if any(map(os.environ.get, _EXPORTERS)) else "none"
    names = [name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or default).split(",")]
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or set(names) <= {"none", ""}:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processors = [BatchSpanProcessor(_exporter(name)) for name in names if name != "none"]
    except ImportError:
        log.warning("OTEL_* variables ask for traces, which need: pip install 'slipstream-rl[otel]'")
        return None
    facts = {"service.instance.id": f"{socket.gethostname()}:{os.getpid()}", "slipstream.process": process}
    own_name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "slipstream"}
    provider = TracerProvider(resource=Resource.create(own_name | facts))
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def _exporter(name: str) -> Any:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if name != "otlp" or protocol not in (None, "", "http/protobuf"):
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER={name} with protocol {protocol or 'http/protobuf'} is not supported; use otlp with "
            "http/protobuf, or console"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
