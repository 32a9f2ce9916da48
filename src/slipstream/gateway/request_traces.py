"""The spans of requests that an engine generates, and of groups on their way through the rollout queue."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runtime import tracing
from slipstream.runtime.tracing import TraceSpan
from slipstream.types import Completion, Failure, Progress, Request


class GenerateTraces:
    """One span, `engine.generate`, per traced request that an engine serves."""

    def __init__(self, requests: Sequence[Request], engine: str) -> None:
        self._spans: dict[str, TraceSpan] = {}
        self._missing: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        for request in requests:
            if request.traceparent and tracing.is_on():
                self._spans[request.id] = tracing.begin("engine.generate", request.traceparent, engine=engine)
                self._missing[request.id], self._tokens[request.id] = request.sampling.n, 0

    def see(self, results: Sequence[Completion | Failure | Progress]) -> None:
        """End the spans of requests that are answered."""
        for result in results if self._spans else ():
            id = result.request_id
            if isinstance(result, Failure) and id in self._spans:
                self._spans.pop(id).end(result.error)
            elif isinstance(result, Completion) and id in self._spans:
                self._missing[id] -= 1
                self._tokens[id] += len(result.token_ids)
                if not self._missing[id]:
                    versions = sorted({span.version for span in result.spans})
                    self._spans.pop(id).end(tokens=self._tokens[id], versions=versions)

    def close(self) -> None:
        """End the spans of requests that were cancelled."""
        for span in self._spans.values():
            span.end(cancelled=True)


class QueueTraces:
    """The spans `gateway.queue`, until a group starts, and `gateway.generate`, by the number of its group."""

    def __init__(self) -> None:
        self._parents: dict[int, str] = {}
        self._waiting: dict[int, TraceSpan] = {}

    def accepted(self, number: int, parent: str) -> None:
        if parent and tracing.is_on():
            self._parents[number] = parent
            self._waiting[number] = tracing.begin("gateway.queue", parent)

    def started(self, number: int, version: int) -> str:
        """End the wait of a group; return the parent of its generation, empty if it is not traced."""
        if (span := self._waiting.pop(number, None)) is not None:
            span.end(version=version)
        return self._parents.get(number, "")

    def taken(self, number: int) -> None:
        self._parents.pop(number, None)
