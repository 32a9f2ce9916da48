"""The trainer's side of sessions: open them for agents that speak OpenAI's API, and take what was sampled in them.

sessions = AgentSessions.of(bridge)
endpoint = sessions.open(SamplingParams(max_tokens=64))
reward = play(endpoint.base_url, endpoint.api_key)         an agent, here or elsewhere
sessions.close(endpoint.session, reward)
trajectories = sessions.take(endpoint.session)             exact tokens, masks, logprobs and versions; train on them"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bridge.gateway_http import GatewayHttp
from slipstream.errors import ConfigError
from slipstream.types import Completion, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from slipstream.bridge.bridge import Bridge

CALL_SECONDS = 120.0
_TAKEN_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """What an agent needs: `openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)`."""

    base_url: str
    """The session is part of it, so clients need no header."""
    api_key: str
    model: str
    session: str
    seed: int = 0
    """Seed of the episode, for agents that draw their task by it."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One branch of a session: what the policy read, and what it sampled."""

    session: str
    branch: int
    position: int
    """Position of the session in the order of taking; a trainer saves it with its checkpoint."""
    reward: float | None
    """The session's; None if it was closed without one."""
    token_ids: tuple[int, ...]
    turns: tuple[tuple[int, Completion], ...]
    """What was sampled in this branch, each turn with its position in `token_ids`. Turns that it shares with an earlier branch
    are part of that one, and context here."""

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each token, whether it is the policy's and part of this trajectory."""
        mask = [False] * len(self.token_ids)
        for start, completion in self.turns:
            mask[start : start + len(completion.token_ids)] = [True] * len(completion.token_ids)
        return tuple(mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """For each token; 0 if it is not sampled."""
        values = [0.0] * len(self.token_ids)
        for start, completion in self.turns:
            values[start : start + len(completion.token_ids)] = completion.logprobs
        return tuple(values)

    @property
    def versions(self) -> tuple[int | None, ...]:
        """For each token the policy version that sampled it, or None."""
        values: list[int | None] = [None] * len(self.token_ids)
        for start, completion in self.turns:
            for span in completion.spans:
                values[start + span.start : start + span.stop] = [span.version] * (span.stop - span.start)
        return tuple(values)


class AgentSessions:
    """Calls of a gateway's HTTP server. May be used by several threads."""

    def __init__(self, url: str, token: str, api_key: str = "", ca: str = "") -> None:
        """`token` is a trainer's. `api_key` is what agents get, by default the same; one of the role `client` permits only
        generation (`slipstream token client`)."""
        self._url, self._api_key = url.rstrip("/"), api_key or token
        self._http = GatewayHttp(self._url, token, CALL_SECONDS, ca)

    @classmethod
    def of(cls, bridge: Bridge, api_key: str = "") -> AgentSessions:
        """Use the HTTP server of a bridge's gateway."""
        if not bridge.http_url:
            raise ConfigError(
                "agents need the gateway's HTTP server, and this bridge knows none; start it with launch(..., http=True)"
            )
        return cls(bridge.http_url, (Path(bridge.run_dir) / "token").read_text().strip(), api_key)

    def open(self, sampling_params: SamplingParams | None = None, session: str = "", seed: int = 0) -> AgentEndpoint:
        """Open a session. Its requests are sampled with `sampling_params`, whatever they say; None leaves that to the agent."""
        sampling: dict[str, Any] = {}
        if sampling_params is not None:
            sampling = {name: getattr(sampling_params, name) for name in _TAKEN_FIELDS}
            sampling = {name: value for name, value in sampling.items() if value not in (None, ())}
        opened = self._http.call("/v1/sessions", {"id": session, "sampling": sampling})
        base_url = f"{self._url}/sessions/{opened['id']}/v1"
        return AgentEndpoint(base_url, self._api_key, opened["model"], opened["id"], seed)

    def close(self, session: str, reward: float | None = None) -> None:
        """End a session with its reward. May be repeated with the same reward."""
        self._http.call(f"/v1/sessions/{session}/close", {"reward": reward})

    def take(self, session: str, saved: int = 0) -> list[Trajectory]:
        """Take a closed session: one trajectory per branch. Each sampled token is in one of them.

        Taken again, a session is the same and has the same position. A trainer that has saved a position passes it as `saved`:
        sessions up to it are deleted."""
        taken = self._http.call(f"/v1/sessions/{session}/take", {"saved": saved})
        return [
            Trajectory(
                session,
                row["branch"],
                taken["position"],
                taken["reward"],
                tuple(row["token_ids"]),
                tuple((turn["start"], _completion(session, row["token_ids"], turn)) for turn in row["turns"]),
            )
            for row in taken["trajectories"]
        ]


def _completion(session: str, tokens: list[int], turn: Mapping[str, Any]) -> Completion:
    return Completion(
        request_id=session,
        sample_index=0,
        prompt_token_ids=tuple(tokens[: turn["start"]]),
        token_ids=tuple(turn["token_ids"]),
        text=turn["text"],
        logprobs=tuple(turn["logprobs"]),
        raw_logprobs=tuple(turn["raw_logprobs"]),
        finish_reason=turn["finish_reason"],
        spans=tuple(VersionSpan(s["version"], s["start"], s["stop"]) for s in turn["version_spans"]),
        engine=turn["engine"],
    )
