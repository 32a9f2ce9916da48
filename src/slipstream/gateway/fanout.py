"""One call to several engines at once: who did it, who did not and why, and the control verbs that need no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from slipstream.errors import ProtocolMismatch, SlipstreamError
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.attach import EngineLink

T = TypeVar("T")


async def control(
    links: Mapping[str, EngineLink],
    verb: pb.Control,
    timeout: float,
    on_done: Callable[[Collection[str]], None] = lambda names: None,
) -> pb.ControlReply:
    """Pause, resume, sleep, wake, forget, memory or verify on all of `links`. If some fail, the others have done it all the
    same, and the error names both: these verbs may be repeated. `on_done` hears who has done it, in any case."""
    doing = verb.WhichOneof("verb")
    if doing is None:
        raise ProtocolMismatch("a control call without a verb came")

    async def one(link: EngineLink) -> pb.FromEngine:
        return await link.ask(pb.ToEngine(control=verb), timeout, doing)

    done, failed = await each({name: one(link) for name, link in links.items()})
    on_done(done.keys())
    if failed:
        raise together(failed, f"{doing} failed on {', '.join(failed)}; done on {', '.join(done) or 'no engine'}")
    if doing == "verify":
        return pb.ControlReply(checksums={name: answer.checksums for name, answer in done.items()})
    return pb.ControlReply(engines={name: answer.memory for name, answer in done.items()})


async def each(calls: Mapping[str, Coroutine[Any, Any, T]]) -> tuple[dict[str, T], dict[str, SlipstreamError]]:
    """Awaits all; `(results, errors)` by name."""
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


def together(failed: Mapping[str, SlipstreamError], what: str) -> SlipstreamError:
    """One error of the first one's kind that tells of all."""
    first = next(iter(failed.values()))
    return type(first)(f"{what}. " + " | ".join(f"[{name}] {error}" for name, error in failed.items()))
