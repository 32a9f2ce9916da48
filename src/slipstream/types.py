"""The vocabulary: what crosses a boundary between trainer, gateway and engine. Plain frozen data, no behaviour
beyond checks and derived properties, and no import of JAX, gRPC or torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.errors import InvalidPrompt, InvalidSampling, SlipstreamError

Prompt: TypeAlias = str | Sequence[int]
"""What a user may pass as a prompt: text (tokenised by the engine) or token ids."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: an end-of-sequence or stop token came (it is the last token). `length`: `max_tokens` or the context ended it."""

InFlight: TypeAlias = Literal["keep", "finish"]
"""What a commit does with running requests. `keep`: they go on from their KV cache under the new weights, at the next
token. `finish`: they finish under the old weights first, and the swap waits for them."""

PROTOCOL_VERSION = 1


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw completions. `SamplingParams(max_tokens=64, temperature=0.8, n=8, seed=7)`.

    Sample `i` of a request draws its token at position `p` from a key made of `(seed, i, p)`, so what else is in the
    batch does not enter into it. (It may enter through the last bits of float rounding, when batch shapes differ.)"""

    max_tokens: int = 64
    """Most tokens to generate, the stop token included."""
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach p; 1 keeps all."""
    n: int = 1
    """Samples per prompt (a GRPO group)."""
    seed: int | None = None
    """None draws a fresh seed per prompt. With a seed, equal prompts give equal samples."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence tokens (benchmarks)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, low, kind in (("max_tokens", 1, int), ("top_k", 0, int), ("n", 1, int)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or value < low:
                raise InvalidSampling(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.n > MAX_SAMPLES:
            raise InvalidSampling(
                f"n must be at most {MAX_SAMPLES}, got {self.n}: send the prompt several times instead"
            )
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise InvalidSampling(f"{name} must be a finite number, got {value!r}")
        if self.temperature < 0:
            raise InvalidSampling(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidSampling(f"top_p must be in (0, 1], got {self.top_p}; 1 switches it off")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise InvalidSampling(f"seed must be None or an integer in [0, 2**63), got {self.seed!r}")
        if any(not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise InvalidSampling(f"stop_token_ids must be token ids (0 or more), got {self.stop_token_ids!r}")


MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way to an engine, its seed drawn, so that whoever runs it draws the same tokens."""

    id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams

    def __post_init__(self) -> None:
        check_prompt(self.prompt)


def check_prompt(prompt: Prompt) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPrompt("the prompt is empty; give at least one token (a beginning-of-sequence token will do)")
        return
    if not len(prompt):
        raise InvalidPrompt("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidPrompt(
                f"a prompt is text or a sequence of token ids (Python ints, 0 or more); found {token!r}"
            )


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, stop)` of a completion were produced by policy `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt.

    Example: a prompt sampled under version 3, with version 4 committed after its second token:
    `Completion(..., token_ids=(5, 9, 2), spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))`."""

    request_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    """Decoded completion, without the stop token; empty when the engine has no tokenizer."""
    logprobs: tuple[float, ...]
    """Of each token under the distribution it was drawn from: after temperature, top-k and top-p. What an importance
    ratio needs. Greedy tokens (temperature 0) carry their raw logprobs."""
    raw_logprobs: tuple[float, ...]
    """Of each token under the model itself: temperature 1, nothing truncated."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    engine: str = ""
    prompt_index: int = 0
    """Position of the prompt in the list given to `generate`."""

    @property
    def version(self) -> int:
        """The oldest policy version that produced a token of this completion."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended without a completion, and why. Never a row with zero reward."""

    request_id: str
    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class Score:
    """Raw logprobs of a given sequence under one policy version. `logprobs[i]` is that of `token_ids[i + 1]` given
    the tokens before it, so there is one fewer than there are tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    engine: str = ""


# --- weights ----------------------------------------------------------------------------------------------------------

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: `(start, stop)` for each dimension. `((0, 4), (2, 8))` is rows 0–3, columns 2–7."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole (unsharded) tensor under its Hugging Face name, as the model family defines it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a named tensor, and where it lands in an engine's local parameter.

    The local box may have leading dimensions of size 1 more than the tensor's: the matrix of expert 3 lands in
    `((3, 4), (0, 48), (0, 32))` of a parameter that stacks the experts."""

    tensor: str
    tensor_box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class Parameter:
    """A live parameter as one rank of an engine holds it. A fused parameter has several parts:
    `qkv_proj` on rank 1 of 2 is rows of q, then of k, then of v, each a `Part`."""

    name: str
    rank: int
    shape: tuple[int, ...]
    """Local shape on this rank."""
    parts: tuple[Part, ...]
    padding: tuple[Box, ...] = ()
    """Local rectangles that no tensor fills (rows of a padded vocabulary); they are zero."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself when it registers."""

    name: str
    kind: str
    """`embedded`, `vllm`, …"""
    model: str
    """Fingerprint of the model's shape (`ModelConfig.fingerprint`): trainer and engine must agree on it."""
    dtype: str
    num_ranks: int
    """Ranks that receive weights (tensor-parallel size)."""
    tensors: tuple[TensorSpec, ...]
    """What a trainer must provide."""
    parameters: tuple[Parameter, ...]
    """What the ranks hold, and which part of which tensor goes where."""
    transports: tuple[str, ...]
    """Data planes this engine can receive from, e.g. `("memory", "shm")`."""
    host: str
    """Identity of the machine: equal on two processes that can share memory."""
    max_model_len: int
    max_concurrency: int
    """Sequences generated at once."""
    version: int
    """Policy version it serves; -1 before it has weights."""
    pid: int = 0
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Offer:
    """What a trainer sends an engine to begin an update: the plan, and how the bytes will come."""

    plan: bytes
    """The serialised plan, or empty when the engine has it already (it is kept by fingerprint)."""
    fingerprint: str
    transport: str
    """`memory`, `shm`, `tcp` or `disk:/directory`."""
    fresh: bool = True
    """The trainer has no links to this engine: old landings are of no use to it."""
    hashed: bool = True
    """Whether the bytes are checksummed."""


@dataclass(frozen=True, slots=True)
class Berths:
    """Where an engine wants an update to land."""

    links: tuple[tuple[bytes, ...], ...]
    """Per rank, per slot: the description that opens a landing; empty where there is none (yet)."""
    slots: bytes
    """Per parameter, in the order of their names' first appearance: the slot to write, 0 or 1."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """An engine has received and verified a version, and does not use it yet."""

    num_bytes: int
    verify_seconds: float
    """Until all bytes were there and their checksums were right."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """An engine now generates with the new version."""

    pause_seconds: float
    """For how long the engine could not run a step."""
    wait_seconds: float
    """From the commit's arrival to the step boundary at which it was applied."""


@dataclass(frozen=True, slots=True)
class EngineSync:
    """One engine's part of a `SyncReport`."""

    engine: str
    transport: str
    stage: StageReport
    commit: CommitReport


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one `bridge.sync` did and how long each phase took, as the trainer saw it."""

    version: int
    num_bytes: int
    """Bytes that left the trainer."""
    plan_seconds: float
    send_seconds: float
    """Packing, checksumming and handing over the bytes."""
    stage_seconds: float
    """From the last byte sent until every engine had verified."""
    commit_seconds: float
    total_seconds: float
    engines: tuple[EngineSync, ...]
    lost: tuple[str, ...] = ()
    """Engines that did not come along: they died before they could commit, or failed and were to be left behind."""
    best_bytes_per_second: float = 0.0
    """The fastest transfer that this bridge has seen, this one included: what the link can do."""

    @property
    def bytes_per_second(self) -> float:
        """Of the transfer: from the first byte until every engine had verified."""
        return self.num_bytes / max(self.send_seconds + self.stage_seconds, 1e-9)

    @property
    def link_share(self) -> float:
        """This transfer's speed as a share of the best one's; 1 when nothing was sent."""
        return self.bytes_per_second / self.best_bytes_per_second if self.num_bytes else 1.0

    @property
    def pause_seconds(self) -> float:
        """The longest time that any engine could not generate."""
        return max((e.commit.pause_seconds for e in self.engines), default=0.0)


# --- the fleet --------------------------------------------------------------------------------------------------------

EngineState: TypeAlias = Literal["empty", "ready", "stale", "lost"]
"""`empty`: has no weights yet. `ready`: serves the committed version. `stale`: missed an update, gets no traffic until
it is synced. `lost`: its lease ran out or its connection broke."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    info: EngineInfo
    state: EngineState
    num_requests: int
    """Requests the gateway has sent to it and not heard back from."""
    seconds_since_heartbeat: float
    note: str = ""
    """Why it is not ready."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    version: int
    """Committed policy version; -1 before the first."""
    uptime_seconds: float
    num_completions: int
    """Completions delivered since the gateway started."""
    engines: tuple[EngineStatus, ...] = field(default_factory=tuple)
