"""The fleet of the gateway in whose process the HTTP server runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.client import GatewayFleet
from slipstream.gateway.service import Service
from slipstream.types import Request

CALLER = "HTTP"


class OwnGateway(GatewayFleet):
    """An ordinary client of the gateway, except that generations do not travel through a socket to the same process: that
    would double the work of the event loop, and queue calls where nobody can refuse them."""

    def __init__(self, service: Service, *arguments: Any, **more: Any) -> None:
        """The arguments after the first are those of `GatewayFleet`."""
        super().__init__(*arguments, **more)
        self._service = service

    async def _results(self, requests: Sequence[Request], engine: str = "") -> AsyncGenerator[pb.Results, None]:
        message = convert.requests_to_pb(requests, engine)
        async with contextlib.aclosing(self._service.generate(message, CALLER)) as batches:
            async for results in batches:
                yield results
