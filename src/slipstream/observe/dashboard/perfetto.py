"""A run's timeline as a Perfetto trace: protobuf `Trace` messages, as ui.perfetto.dev opens them.

The schema is protos/perfetto/trace/perfetto_trace.proto of Perfetto. Few of its fields are needed, so they are encoded here; a
test reads them with Perfetto's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.observe.dashboard.recorded_run import RecordedRun
from slipstream.observe.dashboard.timeline import Span, marks, spans_between

MAX_SPANS = 200_000
_SEQUENCE = 1
_BEGIN, _END, _INSTANT = 1, 2, 3


def trace(run: RecordedRun, start: float | None, end: float | None) -> bytes:
    """The newest `MAX_SPANS` spans between two times."""
    spans = spans_between(run, start, end, MAX_SPANS)
    parts = [b"".join(_descriptor(1, run.path.name))]
    tracks: dict[tuple[str, str], list[tuple[int, float]]] = {}
    lanes: dict[str, int] = {}
    number = 1
    for span in spans:
        if span.lane not in lanes:
            number += 1
            lanes[span.lane] = number
            parts += _descriptor(number, span.lane, parent=1)
        # Slices of a track must be nested. Spans of one name that overlap have several tracks.
        rows = tracks.setdefault((span.lane, span.name), [])
        row = next((n for n, (_, until) in enumerate(rows) if until <= span.start), len(rows))
        if row == len(rows):
            number += 1
            rows.append((number, 0.0))
            parts += _descriptor(number, span.name, parent=lanes[span.lane])
        track = rows[row][0]
        rows[row] = track, max(span.start, span.end)
        parts += _slice(span, track)
    for lane, name, at, detail in marks(run, start or 0.0, end if end is not None else 1e11):
        if lane in lanes:
            parts.append(_packet(at, _event(_INSTANT, lanes[lane], name, {"detail": detail})))
    return b"".join(parts)


def _slice(span: Span, track: int) -> Iterator[bytes]:
    facts = {name: getattr(span, name) for name in ("step", "version", "count", "detail")}
    yield _packet(span.start, _event(_BEGIN, track, span.name, {k: v for k, v in facts.items() if v not in (None, "")}))
    yield _packet(max(span.start, span.end), _event(_END, track))


def _descriptor(uuid: int, name: str, parent: int = 0) -> Iterator[bytes]:
    """A packet with a `TrackDescriptor`."""
    track = _number(1, uuid) + _text(2, name) + (_number(5, parent) if parent else b"")
    yield _bytes(1, _number(10, _SEQUENCE) + _bytes(60, track))


def _packet(at: float, event: bytes) -> bytes:
    """A `TracePacket` with a `TrackEvent`, as a field of `Trace`."""
    return _bytes(1, _number(8, round(at * 1e9)) + _number(10, _SEQUENCE) + _bytes(11, event))


def _event(kind: int, track: int, name: str = "", facts: dict[str, Any] | None = None) -> bytes:
    event = _number(9, kind) + _number(11, track) + (_text(23, name) if name else b"")
    for key, value in (facts or {}).items():
        annotation = _text(10, key) + (_text(6, value) if isinstance(value, str) else _number(4, value))
        event += _bytes(4, annotation)
    return event


# --- protobuf's wire format -------------------------------------------------------------------------------------------


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode(errors="replace"))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
