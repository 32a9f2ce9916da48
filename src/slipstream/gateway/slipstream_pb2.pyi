from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Error(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "n", "stop_token_ids", "ignore_eos", "stop", "min_tokens", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_ids", "bias_values", "top_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    n: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    min_tokens: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., n: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., stop: _Optional[_Iterable[str]] = ..., min_tokens: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "text", "tokens", "sampling", "seed", "priority", "progress", "traceparent", "adapter")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    tokens: TokenIds
    sampling: int
    seed: int
    priority: int
    progress: bool
    traceparent: str
    adapter: str
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[int] = ..., seed: _Optional[int] = ..., priority: _Optional[int] = ..., progress: bool = ..., traceparent: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("sampling", "requests", "engine")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    sampling: _containers.RepeatedCompositeFieldContainer[Sampling]
    requests: _containers.RepeatedCompositeFieldContainer[Request]
    engine: str
    def __init__(self, sampling: _Optional[_Iterable[_Union[Sampling, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[Request, _Mapping]]] = ..., engine: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "stop")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    stop: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("width", "token_ids", "logprobs")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    width: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, width: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("request_id", "sample_index", "prompt_token_ids", "token_ids", "text", "logprobs", "raw_logprobs", "finish_reason", "spans", "engine", "top_logprobs", "episode", "routes", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    raw_logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: str
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    engine: str
    top_logprobs: TopLogprobs
    episode: EpisodeOutcome
    routes: ExpertRoutes
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[float]] = ..., raw_logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., engine: _Optional[str] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., episode: _Optional[_Union[EpisodeOutcome, _Mapping]] = ..., routes: _Optional[_Union[ExpertRoutes, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class ExpertRoutes(_message.Message):
    __slots__ = ("experts", "num_layers", "num_chosen", "item_size")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ITEM_SIZE_FIELD_NUMBER: _ClassVar[int]
    experts: bytes
    num_layers: int
    num_chosen: int
    item_size: int
    def __init__(self, experts: _Optional[bytes] = ..., num_layers: _Optional[int] = ..., num_chosen: _Optional[int] = ..., item_size: _Optional[int] = ...) -> None: ...

class EpisodeOutcome(_message.Message):
    __slots__ = ("rewards", "end", "error")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    end: str
    error: str
    def __init__(self, rewards: _Optional[_Iterable[float]] = ..., end: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request_id", "sample_index", "start", "token_ids", "logprobs", "top_logprobs", "version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: TopLogprobs
    version: int
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: Error
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Results(_message.Message):
    __slots__ = ("completions", "failures", "progress")
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    def __init__(self, completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ...) -> None: ...

class RolloutBound(_message.Message):
    __slots__ = ("max_staleness", "batch", "late", "surplus")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    batch: int
    late: str
    surplus: int
    def __init__(self, max_staleness: _Optional[int] = ..., batch: _Optional[int] = ..., late: _Optional[str] = ..., surplus: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("bound", "prompts")
    BOUND_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    bound: RolloutBound
    prompts: GenerateRequest
    def __init__(self, bound: _Optional[_Union[RolloutBound, _Mapping]] = ..., prompts: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("num_new",)
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    num_new: int
    def __init__(self, num_new: _Optional[int] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("bound", "after", "count", "timeout_seconds", "saved", "version", "more")
    BOUND_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    bound: RolloutBound
    after: int
    count: int
    timeout_seconds: float
    saved: int
    version: int
    more: bool
    def __init__(self, bound: _Optional[_Union[RolloutBound, _Mapping]] = ..., after: _Optional[int] = ..., count: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., saved: _Optional[int] = ..., version: _Optional[int] = ..., more: bool = ...) -> None: ...

class TakenGroup(_message.Message):
    __slots__ = ("position", "id", "version", "age", "completions", "error", "also")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    position: int
    id: str
    version: int
    age: int
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    error: Error
    also: _containers.RepeatedCompositeFieldContainer[TakenGroup]
    def __init__(self, position: _Optional[int] = ..., id: _Optional[str] = ..., version: _Optional[int] = ..., age: _Optional[int] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., also: _Optional[_Iterable[_Union[TakenGroup, _Mapping]]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("sequences", "engine", "top_k", "adapter")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    engine: str
    top_k: int
    adapter: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., engine: _Optional[str] = ..., top_k: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("token_ids", "logprobs", "version", "engine", "top_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    version: int
    engine: str
    top_logprobs: TopLogprobs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., version: _Optional[int] = ..., engine: _Optional[str] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class ParameterPart(_message.Message):
    __slots__ = ("tensor", "tensor_box", "local_box")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BOX_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BOX_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    tensor_box: _containers.RepeatedCompositeFieldContainer[Span]
    local_box: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, tensor: _Optional[str] = ..., tensor_box: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., local_box: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "rank", "shape", "parts", "padding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[ParameterPart]
    padding: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[ParameterPart, _Mapping]]] = ..., padding: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class AdapterSupport(_message.Message):
    __slots__ = ("slots", "max_rank", "targets")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    slots: int
    max_rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, slots: _Optional[int] = ..., max_rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("name", "kind", "model", "dtype", "num_ranks", "tensors", "parameters", "transports", "host", "max_model_len", "max_num_seqs", "version", "pid", "protocol", "vocab_size", "weights_epoch", "devices", "not_held", "takes_all", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NOT_HELD_FIELD_NUMBER: _ClassVar[int]
    TAKES_ALL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    model: str
    dtype: str
    num_ranks: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    transports: _containers.RepeatedScalarFieldContainer[str]
    host: str
    max_model_len: int
    max_num_seqs: int
    version: int
    pid: int
    protocol: int
    vocab_size: int
    weights_epoch: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    not_held: _containers.RepeatedScalarFieldContainer[str]
    takes_all: bool
    adapters: AdapterSupport
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., num_ranks: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., version: _Optional[int] = ..., pid: _Optional[int] = ..., protocol: _Optional[int] = ..., vocab_size: _Optional[int] = ..., weights_epoch: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., not_held: _Optional[_Iterable[str]] = ..., takes_all: bool = ..., adapters: _Optional[_Union[AdapterSupport, _Mapping]] = ...) -> None: ...

class FleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FleetReply(_message.Message):
    __slots__ = ("engines", "version", "epoch", "next_version")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    version: int
    epoch: int
    next_version: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., next_version: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("info", "state", "num_requests", "seconds_since_heartbeat", "note", "is_paused", "circuit", "num_faults", "looked_up_tokens", "hit_tokens", "speed", "num_tokens", "kv_use", "activity", "adapters")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    NUM_FAULTS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    state: str
    num_requests: int
    seconds_since_heartbeat: float
    note: str
    is_paused: bool
    circuit: str
    num_faults: int
    looked_up_tokens: int
    hit_tokens: int
    speed: float
    num_tokens: int
    kv_use: float
    activity: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., state: _Optional[str] = ..., num_requests: _Optional[int] = ..., seconds_since_heartbeat: _Optional[float] = ..., note: _Optional[str] = ..., is_paused: bool = ..., circuit: _Optional[str] = ..., num_faults: _Optional[int] = ..., looked_up_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., speed: _Optional[float] = ..., num_tokens: _Optional[int] = ..., kv_use: _Optional[float] = ..., activity: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("kind", "engine", "reason", "version", "seconds_ago")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    kind: str
    engine: str
    reason: str
    version: int
    seconds_ago: float
    def __init__(self, kind: _Optional[str] = ..., engine: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ..., seconds_ago: _Optional[float] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("waiting", "running", "finished", "taken", "failed", "renewed", "max_staleness", "batch", "taken_by_age")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BY_AGE_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    finished: int
    taken: int
    failed: int
    renewed: int
    max_staleness: int
    batch: int
    taken_by_age: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., finished: _Optional[int] = ..., taken: _Optional[int] = ..., failed: _Optional[int] = ..., renewed: _Optional[int] = ..., max_staleness: _Optional[int] = ..., batch: _Optional[int] = ..., taken_by_age: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdatePhases(_message.Message):
    __slots__ = ("total", "receive", "verify", "wait", "load", "pause")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    total: float
    receive: float
    verify: float
    wait: float
    load: float
    pause: float
    def __init__(self, total: _Optional[float] = ..., receive: _Optional[float] = ..., verify: _Optional[float] = ..., wait: _Optional[float] = ..., load: _Optional[float] = ..., pause: _Optional[float] = ...) -> None: ...

class UpdateRecord(_message.Message):
    __slots__ = ("version", "num_engines", "num_bytes", "phases", "seconds_ago", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_engines: int
    num_bytes: int
    phases: UpdatePhases
    seconds_ago: float
    error: str
    def __init__(self, version: _Optional[int] = ..., num_engines: _Optional[int] = ..., num_bytes: _Optional[int] = ..., phases: _Optional[_Union[UpdatePhases, _Mapping]] = ..., seconds_ago: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class UpdateTotals(_message.Message):
    __slots__ = ("committed", "failed", "num_bytes", "phases")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    committed: int
    failed: int
    num_bytes: int
    phases: UpdatePhases
    def __init__(self, committed: _Optional[int] = ..., failed: _Optional[int] = ..., num_bytes: _Optional[int] = ..., phases: _Optional[_Union[UpdatePhases, _Mapping]] = ...) -> None: ...

class FleetStatus(_message.Message):
    __slots__ = ("version", "uptime_seconds", "num_completions", "engines", "num_retried", "decisions", "rollouts", "updates", "update_totals", "decision_counts")
    class DecisionCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIED_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TOTALS_FIELD_NUMBER: _ClassVar[int]
    DECISION_COUNTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    uptime_seconds: float
    num_completions: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    num_retried: int
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    rollouts: RolloutStatus
    updates: _containers.RepeatedCompositeFieldContainer[UpdateRecord]
    update_totals: UpdateTotals
    decision_counts: _containers.ScalarMap[str, int]
    def __init__(self, version: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., num_completions: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., num_retried: _Optional[int] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., rollouts: _Optional[_Union[RolloutStatus, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[UpdateRecord, _Mapping]]] = ..., update_totals: _Optional[_Union[UpdateTotals, _Mapping]] = ..., decision_counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("engine", "reason", "since")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    reason: str
    since: int
    def __init__(self, engine: _Optional[str] = ..., reason: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class QuarantineReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine", "undo", "hand_back", "force")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    HAND_BACK_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    undo: bool
    hand_back: bool
    force: bool
    def __init__(self, engine: _Optional[str] = ..., undo: bool = ..., hand_back: bool = ..., force: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pause(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sleep(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class Wake(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Verify(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("pause", "resume", "sleep", "wake", "memory", "verify", "reset_prefix_cache", "unload_adapter")
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    pause: Pause
    resume: Resume
    sleep: Sleep
    wake: Wake
    memory: Memory
    verify: Verify
    reset_prefix_cache: ResetPrefixCache
    unload_adapter: UnloadAdapter
    def __init__(self, pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., sleep: _Optional[_Union[Sleep, _Mapping]] = ..., wake: _Optional[_Union[Wake, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCache, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("control", "engine", "timeout_seconds")
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    control: Control
    engine: str
    timeout_seconds: float
    def __init__(self, control: _Optional[_Union[Control, _Mapping]] = ..., engine: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class MemoryReport(_message.Message):
    __slots__ = ("weights", "kv_cache", "in_use", "asleep")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    weights: int
    kv_cache: int
    in_use: int
    asleep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, weights: _Optional[int] = ..., kv_cache: _Optional[int] = ..., in_use: _Optional[int] = ..., asleep: _Optional[_Iterable[str]] = ...) -> None: ...

class ParameterChecksums(_message.Message):
    __slots__ = ("name", "rank", "parts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class Checksums(_message.Message):
    __slots__ = ("version", "parameters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterChecksums]
    def __init__(self, version: _Optional[int] = ..., parameters: _Optional[_Iterable[_Union[ParameterChecksums, _Mapping]]] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("engines", "checksums")
    class EnginesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MemoryReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MemoryReport, _Mapping]] = ...) -> None: ...
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Checksums
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Checksums, _Mapping]] = ...) -> None: ...
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.MessageMap[str, MemoryReport]
    checksums: _containers.MessageMap[str, Checksums]
    def __init__(self, engines: _Optional[_Mapping[str, MemoryReport]] = ..., checksums: _Optional[_Mapping[str, Checksums]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("name", "rank", "alpha", "targets")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    alpha: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("plan", "fingerprint", "transport", "fresh", "hashed", "adapters", "only_adapters")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    HASHED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ONLY_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    fingerprint: str
    transport: str
    fresh: bool
    hashed: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Lora]
    only_adapters: bool
    def __init__(self, plan: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., transport: _Optional[str] = ..., fresh: bool = ..., hashed: bool = ..., adapters: _Optional[_Iterable[_Union[Lora, _Mapping]]] = ..., only_adapters: bool = ...) -> None: ...

class Links(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, slots: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Destinations(_message.Message):
    __slots__ = ("ranks", "slots")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[Links]
    slots: bytes
    def __init__(self, ranks: _Optional[_Iterable[_Union[Links, _Mapping]]] = ..., slots: _Optional[bytes] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("offer", "expected")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    expected: Destinations
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., expected: _Optional[_Union[Destinations, _Mapping]] = ...) -> None: ...

class RankManifests(_message.Message):
    __slots__ = ("senders",)
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    senders: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, senders: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Manifests(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankManifests]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankManifests, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: str
    def __init__(self, in_flight: _Optional[str] = ...) -> None: ...

class UpdateSteps(_message.Message):
    __slots__ = ("version", "begin", "stage", "commit")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    version: int
    begin: Begin
    stage: Manifests
    commit: Commit
    def __init__(self, version: _Optional[int] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., stage: _Optional[_Union[Manifests, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class UpdateMessage(_message.Message):
    __slots__ = ("timeout_seconds", "engines", "epoch", "drop_failed", "rollback")
    class EnginesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: UpdateSteps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[UpdateSteps, _Mapping]] = ...) -> None: ...
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DROP_FAILED_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    engines: _containers.MessageMap[str, UpdateSteps]
    epoch: int
    drop_failed: bool
    rollback: Rollback
    def __init__(self, timeout_seconds: _Optional[float] = ..., engines: _Optional[_Mapping[str, UpdateSteps]] = ..., epoch: _Optional[int] = ..., drop_failed: bool = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("num_bytes", "verify_seconds", "receive_seconds")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    verify_seconds: float
    receive_seconds: float
    def __init__(self, num_bytes: _Optional[int] = ..., verify_seconds: _Optional[float] = ..., receive_seconds: _Optional[float] = ...) -> None: ...

class CommitReport(_message.Message):
    __slots__ = ("pause_seconds", "wait_seconds", "load_seconds", "tokens_per_second", "redrawn_tokens")
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REDRAWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pause_seconds: float
    wait_seconds: float
    load_seconds: float
    tokens_per_second: float
    redrawn_tokens: int
    def __init__(self, pause_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., redrawn_tokens: _Optional[int] = ...) -> None: ...

class UpdateReports(_message.Message):
    __slots__ = ("begin", "stage", "commit")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: Destinations
    stage: StageReport
    commit: CommitReport
    def __init__(self, begin: _Optional[_Union[Destinations, _Mapping]] = ..., stage: _Optional[_Union[StageReport, _Mapping]] = ..., commit: _Optional[_Union[CommitReport, _Mapping]] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ("engines", "rolled_back", "error")
    class EnginesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: UpdateReports
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[UpdateReports, _Mapping]] = ...) -> None: ...
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.MessageMap[str, UpdateReports]
    rolled_back: bool
    error: Error
    def __init__(self, engines: _Optional[_Mapping[str, UpdateReports]] = ..., rolled_back: bool = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class TrainerProcess(_message.Message):
    __slots__ = ("index", "count", "id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    id: str
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("heartbeat_seconds", "fleet_version")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FLEET_VERSION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    fleet_version: int
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., fleet_version: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToEngine(_message.Message):
    __slots__ = ("call", "registered", "generate", "cancel", "score", "update", "rollback", "control", "release", "also")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    call: int
    registered: Registered
    generate: GenerateRequest
    cancel: Cancel
    score: ScoreRequest
    update: UpdateSteps
    rollback: Rollback
    control: Control
    release: Release
    also: _containers.RepeatedCompositeFieldContainer[ToEngine]
    def __init__(self, call: _Optional[int] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., score: _Optional[_Union[ScoreRequest, _Mapping]] = ..., update: _Optional[_Union[UpdateSteps, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., control: _Optional[_Union[Control, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., also: _Optional[_Iterable[_Union[ToEngine, _Mapping]]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("version", "looked_up_tokens", "hit_tokens", "kv_use", "activity", "adapters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    looked_up_tokens: int
    hit_tokens: int
    kv_use: float
    activity: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., looked_up_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., kv_use: _Optional[float] = ..., activity: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("call", "register", "heartbeat", "results", "scores", "updated", "done", "error", "memory", "checksums", "also")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    call: int
    register: EngineInfo
    heartbeat: Heartbeat
    results: Results
    scores: ScoreReply
    updated: UpdateReports
    done: Done
    error: Error
    memory: MemoryReport
    checksums: Checksums
    also: _containers.RepeatedCompositeFieldContainer[FromEngine]
    def __init__(self, call: _Optional[int] = ..., register: _Optional[_Union[EngineInfo, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., results: _Optional[_Union[Results, _Mapping]] = ..., scores: _Optional[_Union[ScoreReply, _Mapping]] = ..., updated: _Optional[_Union[UpdateReports, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., memory: _Optional[_Union[MemoryReport, _Mapping]] = ..., checksums: _Optional[_Union[Checksums, _Mapping]] = ..., also: _Optional[_Iterable[_Union[FromEngine, _Mapping]]] = ...) -> None: ...
