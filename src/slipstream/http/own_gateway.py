"""The fleet of the gateway in whose process the HTTP server runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from slipstream.gateway import convert
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.service import Service
from slipstream.runtime import tracing
from slipstream.types import Completion, Failure, Progress, Request

CALLER = "HTTP"


class OwnGateway(GatewayFleet):
    """An ordinary client of the gateway, except that generations do not travel through a socket to the same process: that
    would double the work of the event loop, and queue calls where nobody can refuse them."""

    def __init__(self, service: Service, *arguments: Any, **more: Any) -> None:
        """The arguments after the first are those of `GatewayFleet`."""
        super().__init__(*arguments, **more)
        self._service = service

    async def generate(
        self, requests: Sequence[Request], engine: str = ""
    ) -> AsyncGenerator[list[Completion | Failure | Progress], None]:
        """Without room for the requests it raises `Overloaded` at once: the HTTP client decides when to try again."""
        message = convert.requests_to_pb(tracing.traced(requests), engine)
        async with contextlib.aclosing(self._service.generate(message, CALLER)) as batches:
            async for results in batches:
                yield [*convert.progress_from_pb(results), *convert.results_from_pb(results)]
