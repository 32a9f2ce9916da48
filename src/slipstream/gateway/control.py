"""Calls to several engines at once, and the control verbs: pause, resume, sleep, wake, memory, verify, reset, unload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from slipstream.errors import ProtocolMismatch, SlipstreamError
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.engine_stream import EngineLink

T = TypeVar("T")


async def control(
    links: Mapping[str, EngineLink],
    verb: pb.Control,
    timeout: float,
    on_done: Callable[[Collection[str]], None] = lambda names: None,
) -> pb.ControlReply:
    """Run a control verb on every engine in `links`. If some engines fail, the others have still done it and the error names
    both; the verbs are idempotent, so the caller may repeat them. `on_done` is called with the engines that succeeded."""
    doing = verb.WhichOneof("verb")
    if doing is None:
        raise ProtocolMismatch("a control call came without a verb")

    async def call(link: EngineLink) -> pb.FromEngine:
        return await link.ask(pb.ToEngine(control=verb), timeout, doing)

    done, failed = await call_all({name: call(link) for name, link in links.items()})
    on_done(done.keys())
    if failed:
        raise combined_error(failed, f"{doing} failed on {', '.join(failed)}; done on {', '.join(done) or 'no engine'}")
    if doing == "verify":
        return pb.ControlReply(checksums={name: answer.checksums for name, answer in done.items()})
    return pb.ControlReply(engines={name: answer.memory for name, answer in done.items()})


async def call_all(calls: Mapping[str, Coroutine[Any, Any, T]]) -> tuple[dict[str, T], dict[str, SlipstreamError]]:
    """Await all calls; return `(results, errors)` by engine."""
    outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    done: dict[str, T] = {}
    failed: dict[str, SlipstreamError] = {}
    for name, outcome in zip(calls, outcomes):
        if isinstance(outcome, SlipstreamError):
            failed[name] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            done[name] = outcome
    return done, failed


def combined_error(failed: Mapping[str, SlipstreamError], what: str) -> SlipstreamError:
    """Return one error, of the first error's class, that lists all of them."""
    first = next(iter(failed.values()))
    return type(first)(f"{what}. " + " | ".join(f"[{name}] {error}" for name, error in failed.items()))
