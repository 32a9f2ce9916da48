"""Data types exchanged between trainer, gateway and engines: frozen dataclasses with checks and derived properties.

Imports neither JAX, gRPC nor torch."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, NotReady, SlipstreamError

Prompt: TypeAlias = str | Sequence[int]
"""A prompt: text, which the engine tokenizes, or token ids."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation that awaits an answer: `[{"role": "user", "content": "Hi"}]`. The model's chat template renders it."""

Prompts: TypeAlias = Sequence[Prompt | Messages] | Messages
"""Prompts, or the messages of one conversation."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: ended by an end-of-sequence token, stop token (then the last token) or stop text. `length`: ended by `max_tokens` or
the context length."""

InFlight: TypeAlias = Literal["keep", "finish", "recompute", "requeue"]
"""What a commit does with running requests. `keep`: they continue from their KV cache with the new weights, at the next token.
`finish`: the commit waits until they finish with the old weights. `recompute`: they keep their tokens, and their KV cache is
recomputed with the new weights. `requeue`: they drop their tokens and restart from the prompt."""

MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""Memory that a sleeping engine has released and `wake` restores."""

PROTOCOL_VERSION = 7


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample completions.

    Logits are processed in this order: bias, penalties, banned stop tokens (until `min_tokens`), temperature, top-k, top-p,
    min-p. The random number for position `p` of sample `i` depends on `(seed, i, p)` only, not on the batch.

    Example:
        SamplingParams(max_tokens=64, temperature=0.8, n=8, seed=7)
    """

    max_tokens: int = 64
    """Maximum number of tokens to generate, the stop token included."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least p; 1 keeps all."""
    n: int = 1
    """Samples per prompt."""
    seed: int | None = None
    """Random seed; None draws a new one per prompt. With a seed, equal prompts give equal samples."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens, for benchmarks."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, at most 16 of 1,000 characters. Its text excludes the stop text; its tokens include the one
    that completed it."""
    min_tokens: int = 0
    """Ban end-of-sequence and stop tokens, and ignore stop texts, before this many tokens."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or completion by this; 1 disables it."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens in the completion."""
    frequency_penalty: float = 0.0
    """Subtract this times the token's count in the completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token id, value added to its logit)` pairs, or a dict; at most 64."""
    top_logprobs: int = 0
    """Also return raw logprobs of this many most likely tokens at each position; at most 20."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _tuple_of("stop_token_ids", self.stop_token_ids, "token ids"))
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", stop, "texts"))
        bias: Any = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        pairs = _tuple_of("logit_bias", bias, "pairs of a token id and a number")
        if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs):
            raise InvalidSampling(f"logit_bias maps token ids to finite numbers, got {reprlib.repr(self.logit_bias)}")
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in pairs))
        for name, (low, high, advice) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(low, int):
                if not _is_int(value) or not low <= value <= high:
                    limit = f"of at least {low}" if value.__class__ is not int or value < low else f"of at most {high}"
                    raise InvalidSampling(f"{name} must be an integer {limit}, got {value!r}{advice}")
            elif not _is_number(value) or not low <= value <= high:
                raise InvalidSampling(f"{name} must be a finite number in [{low:g}, {high:g}], got {value!r}{advice}")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise InvalidSampling(f"{name} must be greater than 0, got 0; 1 disables it")
        _check_seed(self.seed)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidSampling(f"at most {MAX_STOP_TOKENS} stop_token_ids, got {len(self.stop_token_ids)}")
        if any(not _is_int(t) or t < 0 for t in self.stop_token_ids):
            raise InvalidSampling(f"stop_token_ids must be token ids (0 or more), got {self.stop_token_ids!r}")
        if len(self.stop) > MAX_STOP_TEXTS:
            raise InvalidSampling(f"at most {MAX_STOP_TEXTS} stop texts, got {len(self.stop)}")
        if any(not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidSampling(
                f"stop must be non-empty texts of at most {MAX_STOP_CHARACTERS} characters, got {reprlib.repr(self.stop)}"
            )
        if any(not _is_int(t) or t < 0 or not _is_number(b) for t, b in self.logit_bias[: MAX_BIASES + 1]):
            raise InvalidSampling(f"logit_bias maps token ids to finite numbers, got {reprlib.repr(self.logit_bias)}")
        if len(self.logit_bias) > MAX_BIASES or len({t for t, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidSampling(f"logit_bias takes at most {MAX_BIASES} tokens, each once")
        if self.min_tokens > self.max_tokens:
            raise InvalidSampling(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")

    @property
    def is_plain(self) -> bool:
        """Whether tokens are sampled from the model's unmodified distribution."""
        return self.temperature == 1 and self.is_plain_or_greedy

    @property
    def is_plain_or_greedy(self) -> bool:
        """Whether tokens are drawn from the model's own distribution, or are its likeliest. Then both kinds of logprobs are the
        same, and a completion can be continued by another request."""
        keeps_all = (self.top_k, self.top_p, self.min_p) == (0, 1, 0)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        edits = penalties != (1, 0, 0) or self.logit_bias or self.min_tokens
        return self.temperature in (0, 1) and keeps_all and not edits

    def with_seed(self, seed: int | None) -> SamplingParams:
        """Return a copy with another seed. Skips the other checks, since this runs several times per request."""
        _check_seed(seed)
        other = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        return other


def _tuple_of(name: str, value: Any, what: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise InvalidSampling(f"{name} must be a sequence of {what}, got {value!r}; write ({value!r},)") from None


MAX_SAMPLES, MAX_BIASES, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS = 4096, 64, 16, 20
MAX_STOP_TEXTS, MAX_STOP_CHARACTERS = 16, 1000
MAX_STOPS = MAX_STOP_TOKENS + 8
"""Stop tokens of a request plus those of the model."""

_LIMITS: Mapping[str, tuple[float, float, str]] = {
    "max_tokens": (1, 2**31 - 1, ""),
    "top_k": (-1, 2**31 - 1, ""),
    "n": (1, MAX_SAMPLES, "; for more, repeat the prompt"),
    "min_tokens": (0, 2**31 - 1, ""),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, ""),
    "temperature": (0.0, 1e6, "; 0 is greedy"),
    "top_p": (0.0, 1.0, "; 1 disables it"),
    "min_p": (0.0, 1.0, ""),
    "repetition_penalty": (0.0, 1e6, "; 1 disables it"),
    "presence_penalty": (-1e6, 1e6, ""),
    "frequency_penalty": (-1e6, 1e6, ""),
}
"""Least and greatest value, and advice for other values. Settings with integer limits are integers."""


def _check_seed(seed: int | None) -> None:
    if seed is not None and not (_is_int(seed) and 0 <= seed < 2**63):
        raise InvalidSampling(f"seed must be None or an integer in [0, 2**63), got {seed!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its sampling params. The seed is already drawn, so that every engine samples the same tokens."""

    id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower values run first; calls of equal priority share the engine fairly."""
    progress: bool = False
    """Also stream tokens as `Progress` while they are generated, if the engine can."""
    traceparent: str = field(default="", compare=False)
    """W3C trace context of the prompt; empty if it is not traced."""
    adapter: str = ""
    """Name of the adapter to compute with; empty is the base model."""

    def __post_init__(self) -> None:
        check_prompt(self.prompt)


def check_prompt(prompt: Prompt) -> None:
    """Raise `InvalidPrompt` unless `prompt` is text or token ids, and not empty."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPrompt(
                "the prompt is empty; it needs at least one token, such as the beginning-of-sequence token"
            )
        return
    if not len(prompt):
        raise InvalidPrompt("the prompt has no tokens; it needs at least one, such as the beginning-of-sequence token")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0:  # ten times faster than the loop below
        return
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InvalidPrompt(
                f"a prompt must be text or a sequence of token ids (Python ints, 0 or more), got {token!r}"
            )


def checked_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Convert token ids to plain ints as `plain_ids` does, and check them."""
    ids = plain_ids(tokens)
    check_prompt(ids)
    return ids


def plain_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Convert token ids from a list, numpy or JAX array to plain ints. `Request` checks their values."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError:
        raise InvalidPrompt(f"token ids must be integers, got {tokens!r:.80}") from None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Policy `version` generated tokens `[start, stop)` of a completion."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one position with their raw logprobs, most likely first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """The experts to which a model sent the tokens of prompt and completion, except the last token, which it has not read.

    Example, two tokens in a model with one layer of experts, of which it chooses two:
        ExpertRoutes(bytes([3, 0, 2, 3]), num_layers=1, num_chosen=2, item_size=1)
    """

    experts: bytes
    """Numbers of the experts, little-endian, `[tokens, num_layers, num_chosen]`."""
    num_layers: int
    """Layers with experts."""
    num_chosen: int
    """Experts per token and layer."""
    item_size: int
    """Bytes per number: 1 or 2. The largest number stands for an expert that is not known."""

    @property
    def num_tokens(self) -> int:
        return len(self.experts) // max(1, self.num_layers * self.num_chosen * self.item_size)

    def followed_by(self, longer: ExpertRoutes) -> ExpertRoutes:
        """Return these routes and those of the tokens after them from a longer sequence that starts with the same tokens."""
        return replace(longer, experts=self.experts + longer.experts[len(self.experts) :])


EndReason: TypeAlias = Literal["done", "max_turns", "too_long", "failed"]
"""`done`: the environment ended the episode. `max_turns`: the policy used all its turns. `too_long`: the last observation would
have left no room for an answer, and is not part of the episode. `failed`: the environment raised, hung or died."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """How an episode ended: `EpisodeOutcome((0.0, 1.0), "done")`."""

    rewards: tuple[float, ...]
    """The reward of each turn of the policy."""
    end: EndReason
    error: str = ""
    """Why a failed episode failed."""

    @property
    def reward(self) -> float:
        """The sum of the rewards; NaN if the episode failed, which is not a reward of 0."""
        return math.nan if self.end == "failed" else math.fsum(self.rewards)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt.

    Example, started with version 3, with version 4 committed after the second token:
        Completion(..., token_ids=(5, 9, 2), spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))
    """

    request_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    """Decoded completion without the stop token; empty if the engine has no tokenizer."""
    logprobs: tuple[float, ...]
    """Logprob of each token under the distribution it was sampled from, after temperature, top-k and so on; use these for
    importance ratios. Greedy tokens (temperature 0) have their raw logprobs."""
    raw_logprobs: tuple[float, ...]
    """Logprob of each token under the unmodified model: temperature 1, no truncation."""
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    """Policy versions that generated the tokens, in order."""
    engine: str = ""
    prompt_index: int = 0
    """Index of the prompt in the list passed to `generate`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token, if requested."""
    adapter: str = ""
    """Adapter that it was computed with; empty is the base model."""
    episode: EpisodeOutcome | None = None
    """Set if this is an episode with an environment, whose text is among the tokens: `spans` cover the policy's tokens only,
    and the logprobs of the others are 0."""
    routes: ExpertRoutes | None = None
    """Set by engines with `record_routes`."""

    @property
    def version(self) -> int:
        """The oldest policy version that generated a token."""
        return min(span.version for span in self.spans)


class Completions(list[Completion]):
    """The result of `generate`: the samples of the first prompt, then those of the second, and so on."""

    def by_prompt(self) -> list[list[Completion]]:
        """Return one list of samples per prompt."""
        groups: dict[int, list[Completion]] = {}
        for completion in self:
            groups.setdefault(completion.prompt_index, []).append(completion)
        return [groups[index] for index in sorted(groups)]


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of an unfinished sample (`Request.progress`).

    A sample that restarts, after the loss of an engine or a `requeue`, streams from its first token again. The final
    `Completion` is authoritative."""

    request_id: str
    sample_index: int
    start: int
    """Position of the first token in the completion."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As in `Completion`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token, if requested and already known."""
    prompt_index: int = 0
    """As in a completion."""
    version: int = -1
    """Policy version that drew the tokens."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that a sample has just drawn (`Bridge.stream_tokens`).

    A character whose bytes are not all drawn yet, and what may be the start of a stop text, comes with a later event."""

    request_id: str
    prompt_index: int
    """As in `Completion`."""
    sample_index: int
    token_ids: tuple[int, ...]
    """The new tokens."""
    text: str
    """What they add to the text. A bridge without the model's tokenizer has all of it in the last event."""
    logprobs: tuple[float, ...]
    """As in `Completion`, for the new tokens."""
    version: int
    """Policy version that drew the last of them."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token, if requested."""
    restarted: bool = False
    """The sample began anew with other tokens, after the loss of an engine or a `requeue`: discard its earlier events."""
    completion: Completion | None = None
    """The whole sample, with its last event."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended; None before its last event."""
        return self.completion.finish_reason if self.completion is not None else None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, with its error. It has no reward, which is not a reward of zero."""

    request_id: str
    error: SlipstreamError
    prompt_index: int = 0
    """As in `Completion`."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of a prompt, as `bridge.rollouts` returns them, or the error that prevented them."""

    id: str
    """Id given at submission."""
    position: int
    """Position in the order of taking, from 1. A trainer that saves it can resume after it."""
    version: int
    """Policy version being trained when the group was taken."""
    age: int
    """Number of versions that the oldest token is behind `version`."""
    completions: tuple[Completion, ...]
    """Samples in order of their index."""
    error: SlipstreamError | None = None
    traceparent: str = field(default="", compare=False)
    """W3C trace context of the prompt; empty if it is not traced."""


@dataclass(frozen=True, slots=True)
class Score:
    """Raw logprobs of a given sequence under one policy version.

    `logprobs[i]` belongs to `token_ids[i + 1]`, given the tokens before it: there is one fewer than there are tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    engine: str = ""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per logprob, if requested."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Device memory of an engine, in bytes."""

    weights: int
    kv_cache: int
    in_use: int
    """Total for this process, as the runtime counts it."""
    asleep: tuple[MemoryTag, ...] = ()
    """Memory that is released at the moment."""


# --- weights ----------------------------------------------------------------------------------------------------------

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: `(start, stop)` for each dimension. `((0, 4), (2, 8))` is rows 0–3, columns 2–7."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole (unsharded) tensor with its Hugging Face name, as the model family defines it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A box of a named tensor and its place in an engine's local parameter.

    The local box may have additional leading dimensions of size 1: in a parameter that stacks experts, the matrix of expert 3
    is at `((3, 4), (0, 48), (0, 32))`."""

    tensor: str
    tensor_box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the memory of one engine rank.

    A fused parameter has several parts: `qkv_proj` on rank 1 of 2 has rows of q, then of k, then of v."""

    name: str
    rank: int
    shape: tuple[int, ...]
    """Local shape on this rank."""
    parts: tuple[ParameterPart, ...]
    padding: tuple[Box, ...] = ()
    """Local boxes that no tensor fills, such as rows of a padded vocabulary; they are zero."""


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter without its weights. A projection `W` becomes `W + alpha / rank * B @ A`.

    In the tree of its weights, the projection `model.layers.0.self_attn.q_proj` has `lora_A.weight` `[rank, in]` and
    `lora_B.weight` `[out, rank]`, as in PEFT.

    Example:
        Lora("math", rank=8, alpha=16, targets=("q_proj", "v_proj"))
    """

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Projections that it changes, in all layers, by the last part of their names; sorted."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _ADAPTER_NAME.fullmatch(self.name):
            raise ConfigError(
                "the name of an adapter has 1 to 200 letters, digits and ._:/@- and begins with a letter or digit, got "
                f"{self.name!r:.220}"
            )
        if not _is_int(self.rank) or self.rank < 1:
            raise ConfigError(f"the rank of adapter {self.name!r} must be a positive integer, got {self.rank!r}")
        if not _is_number(self.alpha) or self.alpha <= 0:
            raise ConfigError(f"alpha of adapter {self.name!r} must be a positive number, got {self.alpha!r}")
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(
                f'targets of adapter {self.name!r} must be names of projections, such as ("q_proj", "v_proj"), got '
                f"{self.targets!r}"
            )
        object.__setattr__(self, "targets", tuple(sorted(set(self.targets))))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """The adapters that an engine can serve beside its base model."""

    slots: int
    """How many at a time."""
    max_rank: int
    targets: tuple[str, ...]
    """Projections that they may change; sorted."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of an engine, sent when it registers."""

    name: str
    kind: str
    """Backend: `embedded`, `vllm` or `remote`."""
    model: str
    """Fingerprint of the model's shape (`ModelConfig.fingerprint`), which must equal the trainer's."""
    dtype: str
    """Data type of the weights."""
    num_ranks: int
    """Number of ranks that receive weights (tensor-parallel size)."""
    tensors: tuple[TensorSpec, ...]
    """Tensors that a trainer must provide."""
    parameters: tuple[Parameter, ...]
    """Parameters of all ranks, and the tensors they are made of."""
    transports: tuple[str, ...]
    """Data planes that the engine can receive weights with, such as `("memory", "shm")`."""
    host: str
    """Identity of the machine; equal for processes that can share memory."""
    max_model_len: int
    """Maximum length of prompt plus completion."""
    max_num_seqs: int
    """Maximum number of sequences generated concurrently."""
    version: int
    """Policy version of its weights; -1 without weights."""
    pid: int = 0
    protocol: int = PROTOCOL_VERSION
    vocab_size: int = 0
    """Token ids are below this; 0 if not known."""
    weights_epoch: int = 0
    """Counts how often the gateway stopped trusting the engine's weights; a trainer then sends all of them again."""
    devices: tuple[str, ...] = ()
    """GPU of each rank, as in the engine's config, or else the GPUs that its process sees."""
    not_held: tuple[str, ...] = ()
    """Promises that the engine does not keep with its settings, each with the reason (docs/vllm.md)."""
    takes_all: bool = False
    """An update must bring all tensors or none: a loader that is not ours fills whole layers."""
    adapters: AdapterSupport | None = None
    """None if it serves no adapters."""

    @property
    def weights(self) -> str:
        return "no weights" if self.version < 0 else f"version {self.version}"


@dataclass(frozen=True, slots=True)
class Offer:
    """Begins an update: the transfer plan and the transport that will carry the bytes."""

    plan: bytes
    """The serialized plan; empty if the engine has it already."""
    fingerprint: str
    transport: str
    """`memory`, `shm`, `tcp`, `disk:/directory`, `vllm-nccl:` plus a communicator id, `sglang-gloo:` plus a rendezvous address,
    or `shared:` plus the memory."""
    fresh: bool = True
    """The trainer has no connections to this engine; destinations of earlier updates are useless to it."""
    hashed: bool = True
    """Whether the bytes have checksums."""
    adapters: tuple[Lora, ...] = ()
    """Adapters that the update brings (`weights/adapters.py`). The others stay as they are."""
    only_adapters: bool = False
    """The update brings no tensors of the base model."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where an engine wants the bytes of an update."""

    links: tuple[tuple[bytes, ...], ...]
    """For each rank and slot, a transport-specific description of the destination; empty if there is none yet."""
    slots: bytes
    """For each parameter, in order of the first appearance of its name, the slot to write: 0 or 1."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """An engine has received and verified a version, but does not use it yet."""

    num_bytes: int
    verify_seconds: float
    """Time until all bytes had arrived and their checksums were verified."""
    receive_seconds: float = 0.0
    """Time from the first byte to the last on the slowest rank; 0 for transports that do not receive."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """An engine generates with the new version."""

    pause_seconds: float
    """Time in which the engine could not run a step."""
    wait_seconds: float
    """Time from the arrival of the commit to the step boundary at which it was applied."""
    load_seconds: float = 0.0
    """Part of the pause that moved the weights to where the engine uses them; 0 if they arrived there."""
    tokens_per_second: float = 0.0
    """How fast the engine drew tokens in its last steps before the pause. 0 if no request would have drawn any, and for servers
    that are not Slipstream's, which do not say."""
    redrawn_tokens: int = 0
    """Tokens that were dropped, to be drawn again under the new version (`in_flight="requeue"`)."""

    @property
    def lost_tokens(self) -> float:
        """Tokens that the commit cost: what the engine would have drawn in the pause, and what it draws again. Prompts that are
        computed again, and rows that stay empty while an engine commits with `in_flight="finish"`, do not count."""
        return self.pause_seconds * self.tokens_per_second + self.redrawn_tokens


@dataclass(frozen=True, slots=True)
class UpdateSteps:
    """One or more consecutive steps of a weight update on one engine, sent as one message.

    The steps are begin, stage and commit; the engine runs those that are present, in this order. In the steady state all
    three travel together: `UpdateSteps(version, offer, expected, manifests, "keep")`."""

    version: int
    offer: Offer | None = None
    """Begin: the plan and the transport."""
    expected: Destinations | None = None
    """Where the trainer assumes the bytes go; the engine refuses with `FleetChanged` if begin answers anything else."""
    manifests: Sequence[Sequence[bytes]] | None = None
    """Stage: per engine rank, the checksums from each trainer process."""
    in_flight: InFlight | None = None
    """Commit: what happens to running requests."""


@dataclass(frozen=True, slots=True)
class UpdateReports:
    """An engine's answer to `UpdateSteps`, with the results of the steps that were sent."""

    destinations: Destinations | None = None
    """Result of begin; None if `expected` was given and is right."""
    stage: StageReport | None = None
    commit: CommitReport | None = None


@dataclass(frozen=True, slots=True)
class EngineSync:
    """One engine's part of a `SyncReport`."""

    engine: str
    transport: str
    stage: StageReport
    commit: CommitReport
    checksummed: bool = False
    """Whether the engine compared checksums of the bytes that it received. A server that is not Slipstream's cannot."""
    canary_gap: float | None = None
    """Mean difference in nats between logprobs of engine and trainer, with `bridge.sync(canary=...)`; None if not known."""
    encoding: Literal["dense", "delta"] = "dense"
    """`delta` if only what changed in the tensors was sent (`SyncOptions.delta`)."""
    wire_bytes: int = 0
    """Bytes that this trainer process sent for it; the same bytes for replicas that pass them on."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of `bridge.sync`, with the time of each phase as the trainer measured it."""

    version: int
    num_bytes: int
    """Bytes sent by the trainer; once for replicas that pass them on (`EngineSync.stage` has what each engine received)."""
    plan_seconds: float
    send_seconds: float
    """Time to pack, checksum and send the bytes."""
    stage_seconds: float
    """Time from the last byte sent until every engine had verified."""
    commit_seconds: float
    total_seconds: float
    engines: tuple[EngineSync, ...]
    lost: tuple[str, ...] = ()
    """Engines without the new version: they died before the commit, or failed and were dropped (`drop_failed`)."""
    started: float = 0.0
    """When it began, in Unix seconds."""
    adapter: str = ""
    """The adapter that was synced; empty for the base model."""

    @property
    def bytes_per_second(self) -> float:
        """Transfer speed, from the first byte until every engine had verified, or committed for transports that deliver with
        the commit (`vllm-nccl`, `sglang-gloo`)."""
        late = any(engine.transport in ("vllm-nccl", "sglang-gloo") for engine in self.engines)
        seconds = self.send_seconds + self.stage_seconds + (self.commit_seconds if late else 0.0)
        return self.num_bytes / max(seconds, 1e-9)

    @property
    def pause_seconds(self) -> float:
        """Longest pause of any engine."""
        return max((e.commit.pause_seconds for e in self.engines), default=0.0)

    @property
    def lost_tokens(self) -> float:
        """Tokens that all engines together lost to this sync (`CommitReport.lost_tokens`)."""
        return sum(e.commit.lost_tokens for e in self.engines)


@dataclass(frozen=True, slots=True)
class ParameterChecksums:
    """Checksums of one parameter on one engine rank: an xxh3 hash for each of `Parameter.parts`, in order.

    A hash covers the bytes of the box, row by row, in the engine's dtype; padding is not hashed. `parts` is empty if the engine
    cannot read the parameter as the tensors that it is made of."""

    name: str
    rank: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums of the weights that an engine generates with."""

    version: int
    parameters: tuple[ParameterChecksums, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A box of a tensor that differs between trainer and engine.

    Example, where rank 1 has wrong rows of q in a fused parameter, and right ones of k and v:
        Difference("engine-0", 1, "layers.0.qkv_proj.weight", "layers.0.q_proj.weight", ((16, 32), (0, 32)))
    """

    engine: str
    rank: int
    parameter: str
    tensor: str
    tensor_box: Box


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A tensor that could not be compared, and the reason."""

    engine: str
    tensor: str
    """Name of the tensor; empty for all tensors of the engine."""
    why: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `bridge.verify`, which compares the weights of engines with the trainer's."""

    versions: tuple[tuple[str, int], ...]
    """Engines that were compared, with the version that each served."""
    num_parts: int
    """Number of boxes compared, over all engines and ranks."""
    differences: tuple[Difference, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether everything compared is equal byte for byte, and anything was compared. See `unchecked` for the rest."""
        return not self.differences and self.num_parts > 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that differ anywhere."""
        return tuple(sorted({d.tensor for d in self.differences}))


# --- the fleet --------------------------------------------------------------------------------------------------------

EngineState: TypeAlias = Literal["empty", "ready", "asleep", "stale", "quarantined", "draining", "drained", "lost"]
"""`empty`: has no weights yet. `ready`: serves the committed version. `asleep`: has released memory; receives no requests while
another engine is awake, but takes part in updates. `stale`: missed an update; receives no requests until it is synced.
`quarantined`: returned wrong results, or is far slower than its peers; receives no requests until it passes a probe, but takes
part in updates. `draining`, `drained`: taken out of use by an operator, with and without unfinished requests; takes part in
updates. `lost`: its lease expired or its connection broke."""

Circuit: TypeAlias = Literal["closed", "open", "half-open"]
"""State of an engine's circuit breaker. `closed`: it receives requests. `open`: it failed several times in a row and receives
none for a while, if other engines can take them. `half-open`: it receives one request at a time."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of one engine, as the gateway sees it."""

    info: EngineInfo
    state: EngineState
    num_requests: int
    """Requests in flight to this engine."""
    seconds_since_heartbeat: float
    note: str = ""
    """Reason for a state other than `ready`."""
    is_paused: bool = False
    circuit: Circuit = "closed"
    num_faults: int = 0
    """Failed calls blamed on the engine since it first registered."""
    looked_up_tokens: int = 0
    """Prompt tokens looked up in the prefix cache since the engine started; 0 if it does not count them."""
    hit_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    speed: float = 0.0
    """Tokens per second and sequence, relative to the median of the other engines; 0 if not known."""
    num_tokens: int = 0
    """Tokens generated since it registered."""
    kv_use: float = 0.0
    """Share of the KV cache that holds tokens, cached prefixes included; 0 if not known."""
    activity: str = ""
    """What keeps the engine from answering, such as a compilation; empty otherwise."""
    adapters: tuple[str, ...] = ()
    """Adapters that it has loaded."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gateway decided about an engine."""

    kind: str
    """`suspect`, `quarantine`, `probe`, `release`, `slow`, `not slow`, `drain` or `undrain`; see `gateway/quarantine.py`."""
    engine: str
    reason: str
    version: int
    """Version that the fleet served."""
    seconds_ago: float


class FleetMembers(NamedTuple):
    """The fleet as a weight update sees it."""

    engines: tuple[EngineInfo, ...]
    """Those that can take part in an update."""
    version: int
    """Committed policy version; -1 before the first sync."""
    next_version: int
    """Number of the next update. A number that an engine may have committed is not used again."""


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The rollout queue of a run, in numbers of groups (prompts with all their samples)."""

    waiting: int = 0
    running: int = 0
    finished: int = 0
    """Generated and not taken."""
    taken: int = 0
    """Taken since the run began."""
    failed: int = 0
    """Ended with an error since the gateway started."""
    renewed: int = 0
    """Generated again since the gateway started, because they were too old or their engine was wrong."""
    max_staleness: int = 0
    batch: int = 0
    """Groups that the trainer takes between two syncs."""
    taken_by_age: tuple[int, ...] = ()
    """Groups taken since the gateway started; the index is their age in versions, and the last entry counts older ones, too."""


@dataclass(frozen=True, slots=True)
class UpdatePhases:
    """Seconds of the phases of a weight update, each of the slowest engine."""

    total: float = 0.0
    """From the first step at the gateway until the version was committed or rolled back."""
    receive: float = 0.0
    verify: float = 0.0
    wait: float = 0.0
    load: float = 0.0
    pause: float = 0.0

    def __add__(self, other: UpdatePhases) -> UpdatePhases:
        return UpdatePhases(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """A weight update as the gateway saw it."""

    version: int
    num_engines: int
    num_bytes: int
    """Bytes that the engines received."""
    phases: UpdatePhases
    seconds_ago: float
    error: str = ""
    """Why it was rolled back; empty if it was committed."""


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Weight updates since the gateway started."""

    committed: int = 0
    failed: int = 0
    """Rolled back."""
    num_bytes: int = 0
    phases: UpdatePhases = field(default_factory=UpdatePhases)
    """Sums over the committed updates."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """State of a fleet: `bridge.status()`."""

    version: int
    """Committed policy version; -1 before the first sync."""
    uptime_seconds: float
    num_completions: int
    """Completions delivered since the gateway started."""
    engines: tuple[EngineStatus, ...] = field(default_factory=tuple)
    num_retried: int = 0
    """Requests retried on another engine, because the first died or failed."""
    decisions: tuple[Decision, ...] = ()
    """The last decisions about engines, oldest first. The journal has all of them."""
    rollouts: RolloutStatus | None = None
    """None until a trainer has submitted prompts."""
    updates: tuple[UpdateRecord, ...] = ()
    """The last weight updates, oldest first."""
    update_totals: UpdateTotals = field(default_factory=UpdateTotals)
    decision_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of decisions about engines since the gateway started, by kind."""

    @property
    def present(self) -> tuple[EngineStatus, ...]:
        """The engines that are not lost."""
        return tuple(engine for engine in self.engines if engine.state != "lost")

    def no_engines(self, purpose: str) -> NotReady:
        """Return the error of a call that needs engines and found none. `purpose` completes "no engine", as "to sync to"."""
        lost = "; ".join(f"{e.info.name}: {e.note}" for e in self.engines if e.state == "lost")
        if not lost:
            return NotReady(f"there is no engine {purpose}: none has registered; start one with `slipstream engine`")
        return NotReady(
            f"there is no engine {purpose}: all are lost ({lost}); see their logs. An engine that registers takes their place"
        )
