"""The vocabulary: what crosses a boundary between trainer, gateway and engine. Plain frozen data, no behaviour
beyond checks and derived properties, and no import of JAX, gRPC or torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slipstream.errors import InvalidPrompt, InvalidSampling, NotReady, SlipstreamError

Prompt: TypeAlias = str | Sequence[int]
"""What a user may pass as a prompt: text (tokenised by the engine) or token ids."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: an end-of-sequence or stop token came (it is the last token). `length`: `max_tokens` or the context ended it."""

InFlight: TypeAlias = Literal["keep", "finish", "recompute", "requeue"]
"""What a commit does with running requests. `keep`: they go on from their KV cache under the new weights, at the next
token. `finish`: they finish under the old weights first, and the swap waits for them. `recompute`: they keep their
tokens, and their KV cache is computed anew under the new weights. `requeue`: their tokens are thrown away, and they start
again from the prompt."""

MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""What an engine that sleeps has given up, and `wake` brings back."""

PROTOCOL_VERSION = 4


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw completions. `SamplingParams(max_tokens=64, temperature=0.8, n=8, seed=7)`.

    Sample `i` of a request draws its token at position `p` with a number made of `(seed, i, p)`, so what else is in the
    batch does not enter into it.

    Logits pass, in this order: bias, penalties, banned stop tokens (until `min_tokens`), temperature, top-k, top-p,
    min-p."""

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
    stop: tuple[str, ...] = ()
    """Texts that end a completion: its text ends before the first of them, its tokens with the one that completed it."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is drawn, and no stop text heeded, before this many tokens."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen in prompt or completion are divided (if positive) or multiplied by it; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the completion has the token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token id, what to add to its logit)`; a dict is taken too. At most 64."""
    top_logprobs: int = 0
    """Also report the raw logprobs of this many likeliest tokens at each position; at most 20."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in bias))
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if not _is_int(value) or not low <= value <= high:
                limit = f"of at least {low}" if value.__class__ is not int or value < low else f"of at most {high}"
                raise InvalidSampling(f"{name} must be an integer {limit}, got {value!r}{_ADVICE.get(name, '')}")
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most:
                raise InvalidSampling(
                    f"{name} must be a finite number in [{least:g}, {most:g}], got {value!r}{_ADVICE.get(name, '')}"
                )
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise InvalidSampling(f"{name} must be more than 0, got 0; 1 switches it off")
        _check_seed(self.seed)
        if any(not _is_int(t) or t < 0 for t in self.stop_token_ids):
            raise InvalidSampling(f"stop_token_ids must be token ids (0 or more), got {self.stop_token_ids!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidSampling(f"at most {MAX_STOP_TOKENS} stop_token_ids, got {len(self.stop_token_ids)}")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidSampling(f"stop must be texts of at least one character, got {self.stop!r}")
        if any(not _is_int(t) or t < 0 or not _is_number(b) for t, b in self.logit_bias):
            raise InvalidSampling(f"logit_bias maps token ids to finite numbers, got {self.logit_bias!r}")
        if len(self.logit_bias) > MAX_BIASES or len({t for t, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidSampling(f"logit_bias takes at most {MAX_BIASES} tokens, each once")
        if self.min_tokens > self.max_tokens:
            raise InvalidSampling(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}); they contradict"
            )

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution, unchanged."""
        kept = self.temperature == 1 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return kept and not (penalised or self.logit_bias or self.min_tokens)

    def with_seed(self, seed: int | None) -> SamplingParams:
        """The same but for the seed. The rest is not checked again: every request passes here several times."""
        _check_seed(seed)
        other = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        return other


MAX_SAMPLES, MAX_BIASES, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS = 4096, 64, 16, 20
MAX_STOPS = MAX_STOP_TOKENS + 8
"""A request's stop tokens and the model's own."""

_INTEGERS = (
    ("max_tokens", 1, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("n", 1, MAX_SAMPLES),
    ("min_tokens", 0, 2**31 - 1),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS),
)
_NUMBERS = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
)
_ADVICE = {
    "temperature": "; 0 is greedy",
    "top_p": "; 1 switches it off",
    "n": "; send the prompt several times for more",
    "repetition_penalty": "; 1 switches it off",
}


def _check_seed(seed: int | None) -> None:
    if seed is not None and not (_is_int(seed) and 0 <= seed < 2**63):
        raise InvalidSampling(f"seed must be None or an integer in [0, 2**63), got {seed!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way to an engine, its seed drawn, so that whoever runs it draws the same tokens."""

    id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower goes first; equal ones share fairly between calls."""
    progress: bool = False
    """Also tell the tokens while they are drawn, where the engine can."""

    def __post_init__(self) -> None:
        check_prompt(self.prompt)


def check_prompt(prompt: Prompt) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPrompt("the prompt is empty; give at least one token (a beginning-of-sequence token will do)")
        return
    if not len(prompt):
        raise InvalidPrompt("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0:  # a tenth of the time of the loop that finds the culprit
        return
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidPrompt(
                f"a prompt is text or a sequence of token ids (Python ints, 0 or more); found {token!r}"
            )


def checked_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """As `plain_ids`, where no `Request` is made of them."""
    ids = plain_ids(tokens)
    check_prompt(ids)
    return ids


def plain_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Plain ints, from lists, numpy or JAX arrays. A `Request` checks what they are."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError:
        raise InvalidPrompt(f"token ids must be integers, got {tokens!r:.80}") from None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, stop)` of a completion were produced by policy `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens at one position, likeliest first, with their raw logprobs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


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
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """For each token, where asked for."""

    @property
    def version(self) -> int:
        """The oldest policy version that produced a token of this completion."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a sample that goes on, for requests that ask for it (`Request.progress`). A sample that began anew, because an
    engine died or a commit said so, is told from its first token again; the completion is what counts."""

    request_id: str
    sample_index: int
    start: int
    """Position in the completion of the first of these tokens."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As in a completion."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """For each token, where asked for and known already."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended without a completion, and why. Never a row with zero reward."""

    request_id: str
    error: SlipstreamError
    prompt_index: int = 0
    """As in a completion."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A prompt's samples as a trainer takes them (`bridge.rollouts`), or the error that is in their place."""

    id: str
    """As it was submitted."""
    position: int
    """In the order of taking, from 1. A trainer that saves it goes on behind it after a crash."""
    version: int
    """What was being trained when it was taken."""
    age: int
    """Versions between the oldest token's and that one."""
    completions: tuple[Completion, ...]
    """By sample index."""
    error: SlipstreamError | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Raw logprobs of a given sequence under one policy version. `logprobs[i]` is that of `token_ids[i + 1]` given
    the tokens before it, so there is one fewer than there are tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    engine: str = ""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """As long as `logprobs`, where asked for."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What an engine holds on its devices, in bytes."""

    weights: int
    kv_cache: int
    in_use: int
    """All that the runtime counts for this process, by its own figures."""
    asleep: tuple[MemoryTag, ...] = ()
    """What has been given up."""


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
    """`embedded`, `vllm`, `remote`, …"""
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
    """`memory`, `shm`, `tcp`, `disk:/directory`, `vllm-nccl:` with the id of a communicator, `sglang-gloo:` with the place of a
    meeting, or `shared:` with the memory."""
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
    receive_seconds: float = 0.0
    """What it took the bytes to come, in the slowest rank, from the first to the last; 0 where nobody receives them."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """An engine now generates with the new version."""

    pause_seconds: float
    """For how long the engine could not run a step."""
    wait_seconds: float
    """From the commit's arrival to the step boundary at which it was applied."""
    load_seconds: float = 0.0
    """Of the pause: what it took to bring the weights to where the engine computes with them; 0 where they had landed there."""


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
        """Of the transfer: from the first byte until every engine had verified; where an engine takes its bytes with the
        commit (`vllm-nccl`, `sglang-gloo`), until it had committed."""
        late = any(engine.transport in ("vllm-nccl", "sglang-gloo") for engine in self.engines)
        seconds = self.send_seconds + self.stage_seconds + (self.commit_seconds if late else 0.0)
        return self.num_bytes / max(seconds, 1e-9)

    @property
    def link_share(self) -> float:
        """This transfer's speed as a share of the best one's; 1 when nothing was sent."""
        return self.bytes_per_second / self.best_bytes_per_second if self.num_bytes else 1.0

    @property
    def pause_seconds(self) -> float:
        """The longest time that any engine could not generate."""
        return max((e.commit.pause_seconds for e in self.engines), default=0.0)


@dataclass(frozen=True, slots=True)
class ParameterChecksums:
    """What a rank of an engine holds of one parameter: an xxh3 checksum for each of `Parameter.parts`, in their order, of that
    rectangle's bytes, row by row, in the engine's dtype. Padding is no part, and in no checksum. No checksums at all where
    the engine cannot read the parameter as the tensors that it is made of."""

    name: str
    rank: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checksums:
    """The weights that an engine generates with."""

    version: int
    parameters: tuple[ParameterChecksums, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A rectangle of a tensor that an engine does not hold as the trainer has it.

    `Difference("engine-0", 1, "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_proj.weight",
    ((16, 32), (0, 32)))`: on rank 1 the rows of q inside the fused parameter are wrong, those of k and v are right."""

    engine: str
    rank: int
    parameter: str
    tensor: str
    tensor_box: Box


@dataclass(frozen=True, slots=True)
class Unchecked:
    """What could not be compared, and why."""

    engine: str
    tensor: str
    """Empty for all of the engine's."""
    why: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `bridge.verify` found."""

    versions: tuple[tuple[str, int], ...]
    """The engines that were compared, and the version that each served at that moment."""
    num_parts: int
    """Rectangles compared, over all engines and ranks."""
    differences: tuple[Difference, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whatever was compared is the same, byte for byte, and something was. See `unchecked` for the rest."""
        return not self.differences and self.num_parts > 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that differ anywhere."""
        return tuple(sorted({d.tensor for d in self.differences}))


# --- the fleet --------------------------------------------------------------------------------------------------------

EngineState: TypeAlias = Literal["empty", "ready", "asleep", "stale", "lost"]
"""`empty`: has no weights yet. `ready`: serves the committed version. `asleep`: has given up memory, and gets no traffic
while another engine is awake; it takes part in updates. `stale`: missed an update, gets no traffic until
it is synced. `lost`: its lease ran out or its connection broke."""

Circuit: TypeAlias = Literal["closed", "open", "half-open"]
"""`closed`: it gets requests. `open`: it failed several times in a row and is left alone for a while, if others can take
them. `half-open`: it is tried with one request at a time."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    info: EngineInfo
    state: EngineState
    num_requests: int
    """Requests the gateway has sent to it and not heard back from."""
    seconds_since_heartbeat: float
    note: str = ""
    """Why it is not ready."""
    is_paused: bool = False
    """It was told to pause, and not to resume since."""
    circuit: Circuit = "closed"
    num_faults: int = 0
    """Calls that it failed by its own doing, since the gateway first saw it."""
    looked_up_tokens: int = 0
    """Of prompts, since the engine's start; 0 where it does not count."""
    hit_tokens: int = 0
    """And those of them that it had computed before."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    version: int
    """Committed policy version; -1 before the first."""
    uptime_seconds: float
    num_completions: int
    """Completions delivered since the gateway started."""
    engines: tuple[EngineStatus, ...] = field(default_factory=tuple)
    num_retried: int = 0
    """Requests that were sent to another engine, because the first died or failed."""

    @property
    def present(self) -> tuple[EngineStatus, ...]:
        """The engines that are not lost."""
        return tuple(engine for engine in self.engines if engine.state != "lost")

    def nobody(self, needed: str) -> NotReady:
        """For a call that needs engines, and found none. `needed` says what for: "to sync to"."""
        lost = "; ".join(f"{e.info.name}: {e.note}" for e in self.engines if e.state == "lost")
        if not lost:
            return NotReady(
                f"no engine has registered, so there is nobody {needed}; start one with `slipstream engine`"
            )
        return NotReady(
            f"all engines are lost ({lost}), so there is nobody {needed}; their logs say why, and the next one that "
            "registers takes their place"
        )
