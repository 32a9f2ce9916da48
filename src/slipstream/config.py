"""Settings: one frozen class per role, read from TOML, changed by dotted overrides (`train.steps=50`).

Each class checks itself when it is built, so a mistake is found before a process starts. A key that does not exist is
refused, with the nearest one that does. What describes a training run is in `rl/config.py`."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from slipstream.errors import ConfigError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("", "0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine: the embedded JAX engine, vLLM, or a vLLM or SGLang server that is up already."""

    kind: Literal["embedded", "vllm", "remote"] = "embedded"
    python: str = ""
    """For `vllm`: the interpreter of an environment that has it; empty takes the one made by `slipstream setup vllm`, or this
    one."""
    max_concurrency: int = 64
    """Sequences generated at once."""
    max_model_len: int = 0
    """Longest prompt plus completion; 0 takes the model's own limit."""
    tp: int = 1
    """Devices over which the weights and the KV cache are split."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and the KV cache."""
    page_size: int = 32
    """Tokens per page of the KV cache."""
    kv_cache_tokens: int = 0
    """Tokens that fit into the KV cache; 0 takes what `max_concurrency` sequences of `max_model_len` need, or as much of it
    as memory allows."""
    memory_share: float = 0.4
    """For `vllm` on a GPU, where `kv_cache_tokens` is 0: how much of the device's memory the engine may take, KV cache
    included. A trainer on the same GPU needs the rest."""
    eager: bool = False
    """For `vllm` on a GPU: start without compiling and without CUDA graphs. Starts faster, generates slower."""
    prefix_cache: bool = True
    """Keep the KV cache of prompts and completions, for prompts that begin alike."""
    prefill_tokens: int = 0
    """Most prompt tokens computed between two decode steps; 0 chooses by platform."""
    decode_steps: int = 0
    """Most tokens per sequence drawn in one round trip to the device; 0 chooses by platform."""
    deterministic: bool = False
    """Bit-identical results whatever else is in the batch, on accelerators too. On CPU they always are."""
    attention: Literal["auto", "naive", "blockwise", "pallas"] = "auto"
    """How to look at the KV cache; `auto` takes what measured fastest on the platform."""
    speculation: Literal["off", "prompt_lookup", "draft"] = "off"
    """Guess several tokens and check them at once. Tokens and their distribution stay what they are without."""
    speculative_tokens: int = 4
    """Most tokens guessed at a time."""
    draft_model: str = ""
    """HF directory of the draft model, for `speculation = "draft"`; it must have the policy's vocabulary."""
    listen: str = "127.0.0.1"
    """Name or address of this machine at which weights arrive when they come over tcp; nothing listens before they do."""
    certificate: str = ""
    """PEM file of a certificate, needed to listen beyond loopback (docs/hosts.md); the trainer is told its fingerprint."""
    key: str = ""
    """PEM file of the certificate's key."""
    url: str = ""
    """For `remote`: where the server listens, as https://host:8000; http on loopback only. `certificate` is then the PEM
    file of its certificate or of who signed it, where the system does not know it."""
    token_file: str = ""
    """For `remote`: a file with the server's API key; else it is read from SLIPSTREAM_VLLM_TOKEN, or SLIPSTREAM_SGLANG_TOKEN.
    None of them is fine."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """For `remote`: whose server it is."""

    def __post_init__(self) -> None:
        at_least(self, max_concurrency=1, max_model_len=0, tp=1, page_size=1, kv_cache_tokens=0, prefill_tokens=0)
        at_least(self, decode_steps=0, speculative_tokens=1, memory_share=0.0)
        if self.memory_share > 1:
            raise ConfigError(f"memory_share is a share of a device's memory, at most 1; got {self.memory_share}")
        if self.kind == "vllm":
            self._check_vllm()
        if self.kind == "remote":
            self._check_remote()
        elif name := self._first_set("url", "token_file", "dialect"):
            raise ConfigError(f"{name} is for an engine of kind 'remote'; this one is {self.kind!r}")
        if (self.speculation == "draft") != bool(self.draft_model):
            raise ConfigError(
                f"speculation is {self.speculation!r} and draft_model is {self.draft_model!r}: a draft needs both, "
                'speculation="draft" and the directory of the draft model'
            )
        if self.kind != "remote":
            check_listening("listen", self.listen, certificate=self.certificate, key=self.key)

    def _check_vllm(self) -> None:
        """What only the embedded engine knows, and would be ignored."""
        ours = ("page_size", "decode_steps", "deterministic", "attention", "speculation", "speculative_tokens")
        if name := self._first_set(*ours):
            raise ConfigError(f"{name} is a setting of the embedded engine; an engine of kind 'vllm' has none such")

    def _check_remote(self) -> None:
        ours = ("kind", "url", "token_file", "dialect", "certificate", "max_concurrency", "max_model_len")
        maker = {"vllm": "vLLM", "sglang": "SGLang"}[self.dialect]
        if name := self._first_set(*(f.name for f in dataclasses.fields(self) if f.name not in ours)):
            raise ConfigError(
                f"{name} is decided by the {maker} server; of an engine of kind 'remote' it cannot be set"
            )
        try:
            parts = urlsplit(self.url)
            secret, good = parts.username or parts.password, parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, secret, good = urlsplit(""), None, None
        if secret:
            raise ConfigError(
                "url holds a name or a password; put the key in a file (token_file), or in "
                f"SLIPSTREAM_{maker.upper()}_TOKEN"
            )
        if parts.scheme not in ("http", "https") or not good or parts.query or parts.fragment:
            raise ConfigError(f"url is {self.url!r}; an engine of kind 'remote' needs one like https://host:8000")
        if parts.scheme == "http" and parts.hostname not in LOOPBACK:
            raise ConfigError(
                f"url is {self.url!r}: beyond loopback only https is spoken; give the server a certificate "
                "(--ssl-certfile, --ssl-keyfile), or forward its port over SSH"
            )

    def _first_set(self, *names: str) -> str:
        """The first of these that is not at its default; empty if all are."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return next((name for name in names if getattr(self, name) != defaults[name]), "")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    """Name or address of this machine that the others dial; beyond loopback only with TLS."""
    port: int = 0
    """0 takes a free port; the address is written to `gateway.json` in the run directory."""
    lease_seconds: float = 10.0
    """An engine silent for this long is lost. Engines send a heartbeat four times as often."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Larger control messages are refused. Weights never travel through the gateway."""
    certificate: str = ""
    """PEM file of the gateway's certificate, for `host`; `slipstream certificates` makes one (docs/hosts.md)."""
    key: str = ""
    """PEM file of the certificate's key."""
    ca: str = ""
    """PEM file of who signed it. Whoever joins by the run directory is told to trust this one and no other."""

    def __post_init__(self) -> None:
        at_least(self, port=0, lease_seconds=0.1, max_message_bytes=1 << 10)
        check_listening("gateway.host", self.host, certificate=self.certificate, key=self.key, ca=self.ca)


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Gateway and engines as actors of a Ray cluster (docs/ray.md)."""

    address: str = ""
    """Of the cluster, as `ray.init` takes it; empty takes what RAY_ADDRESS names, a cluster of this machine, or makes one."""
    cpus: float = 1.0
    """Of an engine: what Ray sets aside for it. So are `gpus`, of which it sees no others."""
    gpus: float = 0.0
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Engines on as many nodes as possible, or on as few; strictly: each on its own, or all on one, or not at all."""
    max_restarts: int = -1
    """How often Ray starts an actor again that has died; -1 as often as it takes. One that does not come up is not tried
    again."""

    def __post_init__(self) -> None:
        at_least(self, cpus=0, gpus=0, max_restarts=-1)
        if not self.cpus and not self.gpus:
            raise ConfigError("an engine on Ray needs cpus or gpus; both are 0")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP front of a gateway: OpenAI's interface, vLLM's for RL, and a plain one for local trainers (docs/http.md)."""

    port: int = 0
    """0 takes a free port; the address is written to `gateway.json` in the run directory."""
    model: str = ""
    """HF directory whose tokenizer and chat template are used. Without one there is no chat, and tokens have no text of
    their own. `launch` fills in the model that it serves."""
    model_name: str = ""
    """What requests call the model; empty takes the name of its directory."""
    weights: str = ""
    """Checkpoints under this directory may be made the policy over HTTP; empty: none may."""
    host: str = "127.0.0.1"
    max_body_bytes: int = 16 << 20
    """Larger requests are refused."""
    request_seconds: float = 600.0
    """A generation that takes longer has failed, also while the engines are paused."""
    body_seconds: float = 30.0
    """A client that takes longer to send its request is sent away."""
    certificate: str = ""
    """PEM file of the front's certificate, needed beyond loopback: then it speaks HTTPS."""
    key: str = ""
    """PEM file of the certificate's key."""

    def __post_init__(self) -> None:
        at_least(self, port=0, max_body_bytes=1 << 10, request_seconds=0.1, body_seconds=0.1)
        check_listening("http.host", self.host, certificate=self.certificate, key=self.key)


def load(cls: type[T], path: str | Path | None = None, overrides: Iterable[str] = ()) -> T:
    """Builds `cls` from a TOML file (or its defaults) and `dotted.key=value` overrides, which win."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"config file {path} does not exist") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _set(tree, override)
    return build(cls, tree)


def build(cls: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """A config object from nested mappings, every key and type checked."""
    hints, values = get_type_hints(cls), {}
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key, value in tree.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown setting {path!r}; {hint}")
        values[key] = _fit(hints[key], value, path)
    return cls(**values)


def _set(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override!r} is not of the form key.subkey=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = dotted.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    tree[last] = value


def _fit(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is a section with settings of its own, got {value!r}")
        return build(hint, value, path)  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{path} must be one of {', '.join(map(repr, get_args(hint)))}; got {value!r}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is a table of names and values, got {value!r}")
        return {key: _fit(get_args(hint)[1], each, f"{path}.{key}") for key, each in value.items()}
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        return _fit(next(a for a in get_args(hint) if a is not type(None)), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{path} must be of type {hint.__name__}, got {value!r}")
    return value


def check_listening(what: str, host: str, **files: str) -> None:
    """`ConfigError` unless something may listen here: on loopback, or with TLS at an address that others can dial. `files` are
    those of TLS; all are needed, or none."""
    if missing := [name for name, file in files.items() if not file]:
        if host not in LOOPBACK:
            raise ConfigError(
                f"{what} is {host!r}: beyond loopback ({', '.join(LOOPBACK)}) it needs TLS, and {', '.join(missing)} is not "
                "given; `slipstream certificates` makes what is needed, or forward the port over SSH"
            )
        if len(missing) < len(files):
            raise ConfigError(f"TLS at {what} needs {', '.join(files)} together; {', '.join(missing)} is not given")
    if host in EVERYWHERE:
        raise ConfigError(
            f"{what} is {host!r}, which is every address of this machine and says none that others could dial; name one"
        )


def at_least(config: Any, **bounds: float) -> None:
    """`ConfigError` unless each setting that is named has at least this value."""
    for name, low in bounds.items():
        if getattr(config, name) < low:
            raise ConfigError(f"{name} must be at least {low}, got {getattr(config, name)}")
