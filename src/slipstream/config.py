"""Configuration: one frozen pydantic model per role, loaded from TOML with `dotted.key=value` overrides.

Every problem is raised as a `ConfigError` when a model is built, before any process starts. It names the setting by its
dotted key, what was given and what is allowed. The settings of a training run are in `rl/config.py`."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args, overload
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from slipstream.errors import ConfigError
from slipstream.vllm_arguments import LORA_RANKS, check_arguments, draft_model

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
MAX_REQUESTS, MAX_BUFFERED_BYTES = 65_536, 1 << 30
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARDS = ("", "0.0.0.0", "::", "*")
Snapshot: TypeAlias = Literal["reference", "copy", "none"]
DeltaMode: TypeAlias = Literal["auto", "always", "device", "never"]
"""What a bridge keeps of a sync, to send it to engines that start or come back before the next one. `reference`: the arrays
themselves, if they are JAX arrays; donated ones are lost. `copy`: a copy in host memory, made in each sync. `none`: nothing."""

TRANSPORT_NAMES = ("memory", "device", "shm", "tcp", "disk", "cuda", "nccl", "vllm-nccl", "sglang-gloo")
"""Data planes of weights, by the names that a trainer can ask for."""

PathName: TypeAlias = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]
"""A path as a string; `pathlib.Path` is accepted."""

_AsTuple = BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
Names: TypeAlias = Annotated[tuple[str, ...], _AsTuple]
"""Strings; a list is accepted, as in TOML."""

Device: TypeAlias = NonNegativeInt | str
"""A GPU: its number as `nvidia-smi` shows it, or its UUID (`GPU-…`)."""
DeviceNames: TypeAlias = Annotated[tuple[Device, ...], _AsTuple]
DeviceGroups: TypeAlias = Annotated[tuple[DeviceNames, ...], _AsTuple]


class Settings(BaseModel):
    """Base of all settings: immutable, strictly typed, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(type(self), error) from None

    # As in pydantic.RootModel: nested models are validated in place, so that errors keep their full location.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes` applied, validated (unlike `model_copy`)."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


class _EngineSettings(Settings):
    """Settings of every engine backend."""

    max_num_seqs: PositiveInt = 64
    """Maximum number of sequences generated concurrently."""
    max_model_len: NonNegativeInt = 0
    """Maximum length of prompt plus completion; 0 uses the model's limit."""
    plugins: Names = ()
    """Modules to import first, which register model families (docs/add-a-family.md)."""


class AdapterConfig(Settings):
    """LoRA adapters that an engine serves beside its base model (docs/lora.md)."""

    slots: PositiveInt = 8
    """How many at a time. Each takes the memory of an adapter of the largest rank and all targets."""
    rank: PositiveInt = 16
    """Largest rank of an adapter."""
    targets: Names = ()
    """Projections that adapters may change, such as `q_proj`; empty allows all outside of experts."""


class _LocalEngineSettings(_EngineSettings):
    """Settings of backends that run the model in a process of this library."""

    tensor_parallel_size: PositiveInt = 1
    """Number of devices that share the weights and the KV cache."""
    devices: DeviceNames = ()
    """GPU of each rank: its number as `nvidia-smi` shows it, or its UUID. The process sees no others. Empty: it sees those of
    its environment (CUDA_VISIBLE_DEVICES). `launch(devices=…)` fills this in for each engine."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; `auto` uses the checkpoint's."""
    kv_cache_tokens: NonNegativeInt = 0
    """KV cache capacity in tokens; 0 sizes it for `max_num_seqs` sequences of `max_model_len`, as far as memory allows."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of earlier prompts and completions for prompts with the same prefix."""
    max_num_batched_tokens: NonNegativeInt = 0
    """Maximum number of prompt tokens computed between two decode steps; 0 chooses by platform."""
    adapters: AdapterConfig | None = None
    """Room for LoRA adapters; None serves none."""
    listen: str = "127.0.0.1"
    """Host name or address at which this engine receives weights over TCP. The port opens with the first transfer."""
    certificate: PathName = ""
    """PEM certificate, required to listen beyond loopback (docs/hosts.md). The trainer pins its fingerprint."""
    key: PathName = ""
    """PEM private key of the certificate."""

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        check_listening("listen", self.listen, certificate=self.certificate, key=self.key)
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.devices and len(self.devices) != self.num_ranks:
            raise ConfigError(
                f"devices names {len(self.devices)} GPU(s), {list(self.devices)}, but the engine has {self.num_ranks} rank(s); "
                "name one per rank"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Number of devices that the engine computes on."""
        return self.tensor_parallel_size

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process sees `devices` and no other GPUs."""
        if not self.devices:
            return {}
        visible = ",".join(dict.fromkeys(map(str, self.devices)))
        return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    @property
    def device_names(self) -> tuple[str, ...]:
        """The GPU of each rank, or else those that this process sees."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return tuple(map(str, self.devices)) or tuple(filter(None, visible.split(",")))

    def resolve_dtype(self, checkpoint_dtype: str) -> Self:
        """Return this config with `dtype="auto"` replaced by the checkpoint's dtype (`ModelConfig.dtype`)."""
        if self.dtype != "auto":
            return self
        if checkpoint_dtype not in get_args(type(self).model_fields["dtype"].annotation):
            raise ConfigError(
                f'dtype is "auto" and the checkpoint is {checkpoint_dtype}, which engines do not support; '
                'set dtype="bfloat16" (or "float32")'
            )
        return self.replace(dtype=checkpoint_dtype)


class EmbeddedConfig(_LocalEngineSettings):
    """The embedded JAX engine.

    Example:
        slipstream.launch("my-model", engine=EmbeddedConfig(max_num_seqs=128, tensor_parallel_size=2))
    """

    kind: Literal["embedded"] = "embedded"
    """Engine backend."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and KV cache; `auto` uses the checkpoint's."""
    block_size: PositiveInt = 32
    """Tokens per KV cache page."""
    decode_steps: NonNegativeInt = 0
    """Maximum number of tokens per sequence sampled in one call to the device; 0 chooses by platform."""
    deterministic: bool = False
    """Make results on accelerators independent of the batch, bit for bit. On CPU they always are."""
    attention: Literal["auto", "naive", "blockwise", "pallas"] = "auto"
    """Paged attention implementation; `auto` chooses the fastest one measured for the platform."""
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    """Speculative decoding: propose several tokens and verify them in one step. The distribution of samples is unchanged."""
    num_speculative_tokens: PositiveInt = 4
    """Maximum number of tokens proposed at a time."""
    draft_model: PathName = ""
    """Directory or name on the Hub of the draft model for `speculation="draft"`; it must have the policy's vocabulary."""
    record_routes: bool = False
    """Return with each completion the experts that its tokens were sent to, for `replay_routes` of a training run. For models
    with experts."""

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"devices is {list(self.devices)}: JAX runs one rank per GPU; vLLM can run several")
        return self

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if (self.speculation == "draft") != bool(self.draft_model):
            raise ConfigError(
                f"speculation is {self.speculation!r} and draft_model is {self.draft_model!r}: a draft model needs both "
                'speculation="draft" and draft_model'
            )
        return self


class VllmConfig(_LocalEngineSettings):
    """A vLLM engine, started by this library in its own process.

    Example:
        slipstream.launch("my-model", engine=VllmConfig(tensor_parallel_size=2, gpu_memory_utilization=0.6), engines=2)
    """

    kind: Literal["vllm"] = "vllm"
    """Engine backend."""
    python: PathName = ""
    """Interpreter of an environment that has vLLM; empty uses the one made by `slipstream setup vllm`, or the current one."""
    gpu_memory_utilization: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Share of GPU memory for the engine, KV cache included, when `kv_cache_tokens` is 0. A trainer on the same GPU needs
    the rest."""
    enforce_eager: bool = False
    """Start on a GPU without compilation and CUDA graphs: faster to start, slower to generate."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `{"pipeline_parallel_size": 2}`; docs/vllm.md says which of them
    keep which promise."""
    share_weights: bool = False
    """Keep the weights in memory that a PyTorch trainer on the same GPU can map and train in (docs/torch.md). The engine cannot
    sleep then."""

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.share_weights and self.num_ranks > 1:
            raise ConfigError(
                f"share_weights=True needs an engine of one rank, got {self.num_ranks}: ranks hold parts of tensors"
            )
        if self.share_weights and self.draft_model:
            raise ConfigError("share_weights=True needs an engine without a draft model (vllm.speculative_config)")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapters is None:
            return self
        if self.adapters.rank > LORA_RANKS[-1]:
            raise ConfigError(
                f"adapters.rank is {self.adapters.rank}; vLLM serves adapters up to rank {LORA_RANKS[-1]}"
            )
        for setting, is_set in (
            ("share_weights", self.share_weights),
            ("deterministic", self.deterministic),
            ("vllm.speculative_config", "speculative_config" in self.vllm),
        ):
            if is_set:
                raise ConfigError(f"adapters and {setting} have not been tried together in vLLM; drop one of the two")
        return self

    deterministic: bool = False
    """Make results independent of the batch, bit for bit, with vLLM's batch-invariant mode: on NVIDIA GPUs from compute
    capability 8.0. Slower."""

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        check_arguments(self.vllm)
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages, from `vllm`."""
        stages = self.vllm.get("pipeline_parallel_size", 1)
        return stages if type(stages) is int and stages > 0 else 1  # `check_arguments` refuses anything else

    @property
    def draft_model(self) -> str:
        """Directory or name on the Hub of the draft model, from `vllm`; empty if there is none."""
        return draft_model(self.vllm)


class RemoteConfig(_EngineSettings):
    """A running vLLM or SGLang server, used over HTTP.

    Example:
        slipstream.launch("my-model", engine=RemoteConfig(url="https://gpu-7:8000", certificate="ca.pem"))
    """

    kind: Literal["remote"] = "remote"
    """Engine backend."""
    url: str
    """Base URL of the server, such as https://host:8000; plain http is allowed on loopback only."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """The server's API."""
    token_file: PathName = ""
    """File with the server's API key; empty reads SLIPSTREAM_VLLM_TOKEN or SLIPSTREAM_SGLANG_TOKEN, if set."""
    certificate: PathName = ""
    """PEM file of the server's certificate or of its CA, if the system does not trust it."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        try:
            parts = urlsplit(self.url)
            has_secret = bool(parts.username or parts.password)
            is_valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, has_secret, is_valid = urlsplit(""), False, False
        if has_secret:
            raise ConfigError(
                "url holds a user name or a password; put the API key into a file (token_file), or into "
                f"SLIPSTREAM_{self.dialect.upper()}_TOKEN"
            )
        if parts.scheme not in ("http", "https") or not is_valid or parts.query or parts.fragment:
            raise ConfigError(f"url must look like https://host:8000, got {self.url!r}")
        if parts.scheme == "http" and parts.hostname not in LOOPBACK:
            raise ConfigError(
                f"url is {self.url!r}, and http is allowed on loopback only; give the server a certificate "
                "(--ssl-certfile, --ssl-keyfile) and use https, or forward its port over SSH"
            )
        return self


_BACKENDS: dict[str, type[_EngineSettings]] = {"embedded": EmbeddedConfig, "vllm": VllmConfig, "remote": RemoteConfig}


def _with_kind(value: Any) -> Any:
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "embedded", **value} if isinstance(value, Mapping) else value


EngineConfig: TypeAlias = Annotated[
    EmbeddedConfig | VllmConfig | RemoteConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)
]
"""The config of any engine backend. In TOML and overrides, `kind` chooses the backend; the default is
`embedded`. A string is short for a config with that `kind`."""

LocalEngineConfig: TypeAlias = Annotated[
    EmbeddedConfig | VllmConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)
]
"""The config of a backend that runs the model in a process of this library."""


def checked(value: Any, kind: type[T], name: str) -> T:
    """Return `value` if it is of this kind. `name` is the argument's."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def engine_config(engine: EngineConfig | str | None) -> EngineConfig:
    """Return `engine`, or the defaults of the backend that it names ("embedded", "vllm"); None means "embedded"."""
    if isinstance(engine, _EngineSettings):
        return engine
    if engine not in (None, "embedded", "vllm"):
        raise ConfigError(
            f"engine must be an EmbeddedConfig, VllmConfig or RemoteConfig, or 'embedded' or 'vllm'; got {engine!r}"
        )
    return VllmConfig() if engine == "vllm" else EmbeddedConfig()


class GatewayConfig(Settings):
    """The gateway, which routes requests from trainers to engines."""

    host: str = "127.0.0.1"
    """Host name or address that clients and engines dial; beyond loopback TLS is required."""
    port: NonNegativeInt = 0
    """Port; 0 takes a free one. The address is written to `gateway.json` in the run directory."""
    lease_seconds: Annotated[float, Field(ge=0.1)] = 10.0
    """An engine silent for this long is considered lost. Engines send four heartbeats per lease."""
    max_message_bytes: Annotated[int, Field(ge=1 << 10)] = MAX_MESSAGE_BYTES
    """Maximum size of a control message. Weights never pass through the gateway."""
    max_requests: PositiveInt = MAX_REQUESTS
    """Prompts accepted and not answered yet. A caller over its share of them is refused with `Overloaded`; bridges retry."""
    max_buffered_bytes: Annotated[int, Field(ge=1 << 20)] = MAX_BUFFERED_BYTES
    """Size of these prompts, plus that of results which callers have not read yet."""
    certificate: PathName = ""
    """PEM certificate of the gateway for `host`; `slipstream certificates` makes one (docs/hosts.md)."""
    key: PathName = ""
    """PEM private key of the certificate."""
    ca: PathName = ""
    """PEM certificate of the signing CA. Clients that join by the run directory trust this CA and no other."""
    mutual_tls: bool = False
    """Require trainers and engines, too, to show a certificate signed by `ca` (docs/hosts.md)."""
    record: bool = False
    """Record what happens in the fleet, for the dashboard (docs/recorder.md). With an HTTP server it always is."""

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        check_listening("host", self.host, certificate=self.certificate, key=self.key, ca=self.ca)
        if self.mutual_tls and not self.ca:
            raise ConfigError("mutual_tls needs certificate, key and ca; `slipstream certificates` makes the files")
        return self


class RecordConfig(Settings):
    """What a training run records for the dashboard (docs/recorder.md). Metrics and fleet events are always all kept."""

    enabled: bool = True
    """Record steps, completions, syncs and the fleet in `record/` of the run directory."""
    keep_steps: NonNegativeInt = 0
    """Keep the completions of at least this many last steps and drop older ones; 0 keeps all."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the prompts of each step whose completions are recorded."""
    max_bytes: Annotated[int, Field(ge=1 << 20)] = 16 << 30
    """Maximum size of the recorded completions; the oldest are dropped."""


class RayConfig(Settings):
    """Run gateway and engines as actors of a Ray cluster (docs/ray.md)."""

    address: str = ""
    """Cluster address, as `ray.init` takes it; empty uses RAY_ADDRESS, a cluster on this machine, or starts one."""
    cpus: NonNegativeFloat = 1.0
    """CPUs reserved per engine."""
    gpus: NonNegativeFloat = 0.0
    """GPUs reserved per engine, which sees no others; a fraction is a share. `launch(devices="auto")` reserves one per rank."""
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Placement over nodes: as many as possible, or as few; strict: one engine per node, or all on one node, or fail."""
    max_restarts: Annotated[int, Field(ge=-1)] = -1
    """How often Ray restarts an actor that died; -1 is unlimited. An actor that fails to start is not retried."""

    @model_validator(mode="after")
    def _check_resources(self) -> Self:
        if not self.cpus and not self.gpus:
            raise ConfigError("an engine on Ray needs cpus or gpus; both are 0")
        return self


class HttpConfig(Settings):
    """The gateway's HTTP server: OpenAI's API, vLLM's API for RL, and a simple API for local trainers (docs/http.md)."""

    host: str = "127.0.0.1"
    """Host name or address to listen on; beyond loopback TLS is required."""
    port: NonNegativeInt = 0
    """Port; 0 takes a free one. The address is written to `gateway.json` in the run directory."""
    model: PathName = ""
    """HF directory with the tokenizer and chat template. Without it, chat is off and tokens have no text. `launch` fills in
    the model that it serves."""
    model_name: str = ""
    """Model name in requests; empty uses the name of its directory."""
    weights: PathName = ""
    """Directory of checkpoints that may be loaded over HTTP; empty allows none."""
    nccl_python: PathName = ""
    """Python interpreter of an environment with vLLM and a GPU, for trainers such as TRL that broadcast weights over NCCL as to
    vLLM's workers. They are received into `weights`; choose a directory in `/dev/shm`. Empty refuses such trainers."""
    tokenless: bool = False
    """Serve `/generate` and `/bridge/…` without a token, for trainers that know none. On loopback only: every process of every
    user of this machine may then generate, pause the engines and load checkpoints from `weights`."""
    max_body_bytes: Annotated[int, Field(ge=1 << 10)] = 16 << 20
    """Maximum size of a request body."""
    max_requests: PositiveInt = 4096
    """Generations accepted and not answered yet. Further ones are answered with 429 and `Retry-After`."""
    max_buffered_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Size of bodies received, plus that of results which clients have not read yet; beyond it calls are answered with 429."""
    max_connections: PositiveInt = 8192
    """Open connections. Further ones are answered with 503 and closed."""
    request_seconds: Annotated[float, Field(ge=0.1)] = 600.0
    """Time limit of a generation, time with paused engines included."""
    body_seconds: Annotated[float, Field(ge=0.1)] = 30.0
    """Time limit for a client to send the headers of its request, and again for the body."""
    max_sessions: PositiveInt = 4096
    """Open sessions of agents (docs/agents.md). Further ones are answered with 429."""
    max_session_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Size of the tokens of all open sessions; beyond it their next turns are answered with 429."""
    session_seconds: Annotated[float, Field(ge=0.1)] = 3600.0
    """A session that is not used for this long is closed."""
    certificate: PathName = ""
    """PEM certificate, required beyond loopback; with one the server speaks HTTPS."""
    key: PathName = ""
    """PEM private key of the certificate."""

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        check_listening("host", self.host, certificate=self.certificate, key=self.key)
        if self.tokenless and self.host not in LOOPBACK:
            raise ConfigError(
                f"tokenless is set and host is {self.host!r}: without a token only loopback ({', '.join(LOOPBACK)}) is served; "
                "drop one of the two"
            )
        return self


SYNC_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How a trainer sends its weights to the engines."""

    transport: str | None = None
    """Data plane to use, such as `shm`, `tcp` or `disk:/directory`; None chooses the fastest one that works."""
    checksums: bool = True
    """Verify a checksum of every tensor on arrival. `EngineSync.checksummed` tells where that is not possible."""
    check_finite: bool = True
    """Refuse weights with NaN or infinity."""
    process_index: int = 0
    """Index of this trainer process, as `jax.process_index()`."""
    process_count: int = 1
    """Number of trainer processes that take part in every sync, as `jax.process_count()`."""
    snapshot: Snapshot = "reference"
    """What is kept of a sync for engines that start later."""
    timeout: float = SYNC_SECONDS
    """Time limit in seconds for each step of a sync and for each score."""
    delta: DeltaMode = "auto"
    """Whether `tcp` and `disk` carry only the elements that changed, to engines with 16-bit weights. `auto` does so where it is
    faster than sending all; `device` is `always`, with the changes of JAX arrays found where they are. It needs checksums, and
    keeps what was sent: 2 bytes per parameter that this process sends."""
    delta_bytes: int | None = None
    """Limit of the memory for that; tensors beyond it are sent whole."""

    def __post_init__(self) -> None:
        if self.snapshot not in get_args(Snapshot):
            raise ConfigError(f"snapshot must be one of {', '.join(get_args(Snapshot))}, got {self.snapshot!r}")
        if self.delta not in get_args(DeltaMode):
            raise ConfigError(f"delta must be one of {', '.join(get_args(DeltaMode))}, got {self.delta!r}")
        if self.delta not in ("auto", "never") and not self.checksums:
            raise ConfigError(
                f"delta is {self.delta!r} and checksums are off: without them a delta that does not fit would go unnoticed; "
                "drop one of the two"
            )
        if self.delta_bytes is not None and checked(self.delta_bytes, int, "delta_bytes") < 0:
            raise ConfigError(f"delta_bytes must not be negative, got {self.delta_bytes}")
        if self.transport is not None:
            name, _, where = checked(self.transport, str, "transport").partition(":")
            if name not in TRANSPORT_NAMES:
                raise ConfigError(
                    f"transport must be one of {', '.join(TRANSPORT_NAMES)}, or None, got {self.transport!r}"
                )
            if (name == "disk") != bool(where):
                raise ConfigError(
                    f"transport is {self.transport!r}: 'disk' needs a directory that both sides see, as in 'disk:/directory'; "
                    "other transports take none"
                )
        if not 0 <= self.process_index < self.process_count:
            raise ConfigError(
                f"process_index must be in [0, process_count), got process_index={self.process_index} and "
                f"process_count={self.process_count}"
            )


@overload
def load(cls: type[T], path: str | Path | None = None, overrides: Iterable[str] = ()) -> T: ...
@overload
def load(cls: Any, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Any: ...
def load(cls: Any, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Any:
    """Load settings from a TOML file, if given, and `dotted.key=value` overrides, which win.

    Example:
        config = load(TrainConfig, "run.toml", ["steps=50", "engine.kind=vllm"])
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"config file {path} does not exist") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as error:
        raise _config_error(cls, error) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override!r} is not of the form key.subkey=value")
    value = parse_value(text)
    *parents, last = dotted.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    tree[last] = value


def parse_value(text: str) -> Any:
    """Parse TOML, or else a JSON object, as vLLM's command line takes; anything else is a string."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def _config_error(cls: Any, error: ValidationError) -> ConfigError:
    return ConfigError("; ".join(_describe(cls, problem) for problem in error.errors(include_url=False)))


def _describe(cls: Any, problem: Any) -> str:
    """Describe one problem found by pydantic, in terms of dotted keys."""
    section, keys = cls, []
    for part in problem["loc"]:
        if (tagged := _backend(section, part)) is not None:
            section = tagged  # pydantic adds the discriminator to the location
            continue
        keys.append(str(part))
        if isinstance(section, type) and issubclass(section, Settings) and part in section.model_fields:
            section = section.model_fields[part].annotation
    path, kind, context = ".".join(keys), problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _describe_unknown(section, path, keys[-1])
    if kind == "union_tag_invalid":
        key = ".".join([*keys, "kind"])
        return f"{key} must be one of {context['expected_tags']}, got {context['tag']!r}"
    if kind == "missing":
        return f"{path} is required"
    if kind == "value_error":
        return f"{path}: {context['error']}" if path else str(context["error"])
    return f"{problem['msg'].replace('Input should', f'{path} must', 1)}, got {problem['input']!r}"


def _backend(section: Any, part: Any) -> type[Settings] | None:
    return _BACKENDS.get(part) if EmbeddedConfig in get_args(section) or section is EngineConfig else None


def _describe_unknown(section: type[Settings], path: str, key: str) -> str:
    known = list(section.model_fields)
    if issubclass(section, _EngineSettings):
        others = [cls.__name__ for cls in _BACKENDS.values() if key in cls.model_fields]
        if others:
            return f"{path} is a setting of {' and '.join(others)}; {section.__name__} does not have it"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown setting {path!r}; {hint}"


def check_listening(setting: str, host: str, **tls_files: str) -> None:
    """Raise `ConfigError` unless `host` is loopback, or an address that others can dial and TLS is configured.

    TLS needs all of `tls_files` or none."""
    if missing := [name for name, file in tls_files.items() if not file]:
        if host not in LOOPBACK:
            raise ConfigError(
                f"{setting} is {host!r}: beyond loopback ({', '.join(LOOPBACK)}) TLS is required, and "
                f"{', '.join(missing)} is not set; `slipstream certificates` makes the files, or forward the port over SSH"
            )
        if len(missing) < len(tls_files):
            raise ConfigError(f"TLS at {setting} needs {', '.join(tls_files)}; {', '.join(missing)} is not set")
    if host in WILDCARDS:
        raise ConfigError(
            f"{setting} is {host!r}, a wildcard that other hosts cannot dial; set one address of this host"
        )
