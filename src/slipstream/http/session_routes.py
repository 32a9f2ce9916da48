"""Sessions of agents: open, close, list, and take their trajectories (docs/agents.md)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import Field
from pydantic_core import to_json

from slipstream.gateway.session_journal import TakenSession, trajectories
from slipstream.http import openai_dialect
from slipstream.http.errors import JSON
from slipstream.http.generation import MAX_INT, NumTokens, TokenId
from slipstream.http.limits import LimitedRoute
from slipstream.http.openai_choices import finite
from slipstream.http.request_models import JsonModel
from slipstream.http.state import CurrentFront
from slipstream.types import Completion

router = APIRouter(tags=["Sessions"], route_class=LimitedRoute)


class SessionSampling(JsonModel):
    """Replaces these fields of every request in the session."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    max_tokens: NumTokens | None = None
    stop_token_ids: list[TokenId] | None = None


class OpenSession(JsonModel):
    id: str = ""
    """Random by default."""
    sampling: SessionSampling = SessionSampling()


class CloseSession(JsonModel):
    reward: float | None = None


class TakeSession(JsonModel):
    saved: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Position up to which the trainer will never take again; those sessions are deleted."""


@router.post("/v1/sessions")
async def open_session(
    front: CurrentFront, body: Annotated[OpenSession, Body(default_factory=OpenSession)]
) -> dict[str, Any]:
    """Open a session. Not needed unless its requests are to be sampled differently from what they say."""
    sampling = body.sampling.model_dump(exclude_none=True)
    if "max_tokens" in sampling:
        sampling["max_completion_tokens"] = sampling["max_tokens"]
    session = front.sessions.open(body.id, sampling, (await front.fleet.status()).version)
    return {"id": session.id, "turns": len(session.turns), "model": front.model_name}


@router.get("/v1/sessions")
async def list_sessions(front: CurrentFront) -> dict[str, Any]:
    """List the open sessions, and the ids of those that are closed and not taken."""
    rows = [
        {
            "id": session.id,
            "turns": len(session.turns),
            "branches": session.num_branches,
            "tokens": session.num_tokens,
            "busy": session.is_busy,
        }
        for session in front.sessions.all_open()
    ]
    return {"open": rows, "closed": list(front.sessions.journal.closed)}


@router.post("/v1/sessions/{session}/close")
async def close_session(
    front: CurrentFront, session: str, body: Annotated[CloseSession, Body(default_factory=CloseSession)]
) -> dict[str, Any]:
    """End a session, with its reward if there is one. May be repeated."""
    front.sessions.close(session, body.reward, (await front.fleet.status()).version)
    return {"id": session, "reward": body.reward}


@router.post("/v1/sessions/{session}/take")
async def take_session(
    front: CurrentFront, session: str, body: Annotated[TakeSession, Body(default_factory=TakeSession)]
) -> Response:
    """Take the trajectories of a closed session, one per branch. Taken again, they are the same and have the same position."""
    version = (await front.fleet.status()).version
    return Response(to_json(_taken(front.sessions.take(session, version, body.saved))), media_type=JSON)


@router.get("/sessions/{session}/v1/models")
async def models_of_session(front: CurrentFront, session: str) -> dict[str, Any]:
    """`/v1/models`, for clients whose base URL names a session."""
    return await openai_dialect.models(front)


def _taken(taken: TakenSession) -> dict[str, Any]:
    return {
        "id": taken.session.id,
        "position": taken.position,
        "reward": taken.reward,
        "trajectories": [
            {
                "branch": branch,
                "token_ids": tokens,
                "turns": [_turn(start, completion) for start, completion in turns],
            }
            for branch, tokens, turns in trajectories(taken)
        ],
    }


def _turn(start: int, completion: Completion) -> dict[str, Any]:
    return {
        "start": start,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": [finite(logprob) for logprob in completion.logprobs],
        "raw_logprobs": [finite(logprob) for logprob in completion.raw_logprobs],
        "finish_reason": completion.finish_reason,
        "version_spans": [{"version": s.version, "start": s.start, "stop": s.stop} for s in completion.spans],
        "engine": completion.engine,
    }
