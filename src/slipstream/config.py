"""Settings: one frozen class per role, read from TOML, changed by dotted overrides (`train.steps=50`).

Each class checks itself when it is built, so a mistake is found before a process starts. A key that does not exist is
refused, with the nearest one that does."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from slipstream.errors import ConfigError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine: the embedded JAX engine, vLLM, or a vLLM server that is up already."""

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
    """Address at which weights arrive when they come over tcp; nothing listens before they do."""
    certificate: str = ""
    """PEM file of a certificate, needed to listen beyond loopback; the trainer is told its fingerprint."""
    key: str = ""
    """PEM file of the certificate's key."""
    url: str = ""
    """For `remote`: where a `vllm serve` listens, as https://host:8000; http on loopback only. `certificate` is then the PEM
    file of its certificate or of who signed it, where the system does not know it."""
    token_file: str = ""
    """For `remote`: a file with the server's API key; else it is read from SLIPSTREAM_VLLM_TOKEN. None of them is fine."""

    def __post_init__(self) -> None:
        _at_least(self, max_concurrency=1, max_model_len=0, tp=1, page_size=1, kv_cache_tokens=0, prefill_tokens=0)
        _at_least(self, decode_steps=0, speculative_tokens=1, memory_share=0.0)
        if self.memory_share > 1:
            raise ConfigError(f"memory_share is a share of a device's memory, at most 1; got {self.memory_share}")
        if self.kind == "vllm":
            self._check_vllm()
        if self.kind == "remote":
            self._check_remote()
        elif self.url or self.token_file:
            raise ConfigError(f"url and token_file are for an engine of kind 'remote'; this one is {self.kind!r}")
        if (self.speculation == "draft") != bool(self.draft_model):
            raise ConfigError(
                f"speculation is {self.speculation!r} and draft_model is {self.draft_model!r}: a draft needs both, "
                'speculation="draft" and the directory of the draft model'
            )
        if self.listen not in LOOPBACK and not (self.certificate and self.key):
            raise ConfigError(f"listening for weights on {self.listen} needs TLS: give a certificate and its key")

    def _check_vllm(self) -> None:
        """What only the embedded engine knows, and would be ignored."""
        ours = ("page_size", "decode_steps", "deterministic", "attention", "speculation", "speculative_tokens")
        if name := self._first_set(*ours):
            raise ConfigError(f"{name} is a setting of the embedded engine; an engine of kind 'vllm' has none such")

    def _check_remote(self) -> None:
        ours = ("kind", "url", "token_file", "certificate", "max_concurrency", "max_model_len")
        if name := self._first_set(*(f.name for f in dataclasses.fields(self) if f.name not in ours)):
            raise ConfigError(f"{name} is decided by the vLLM server; of an engine of kind 'remote' it cannot be set")
        try:
            parts = urlsplit(self.url)
            secret, good = parts.username or parts.password, parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, secret, good = urlsplit(""), None, None
        if secret:
            raise ConfigError(
                "url holds a name or a password; put the key in a file (token_file), or in SLIPSTREAM_VLLM_TOKEN"
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
    port: int = 0
    """0 takes a free port; the address is written to `gateway.json` in the run directory."""
    lease_seconds: float = 10.0
    """An engine silent for this long is lost. Engines send a heartbeat four times as often."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Larger control messages are refused. Weights never travel through the gateway."""

    def __post_init__(self) -> None:
        _at_least(self, port=0, lease_seconds=0.1, max_message_bytes=1 << 10)
        if self.host not in LOOPBACK:
            raise ConfigError(
                f"gateway.host is {self.host!r}: the gateway listens on loopback only (127.0.0.1, localhost, ::1); "
                "to reach it from another machine, forward the port over SSH"
            )


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

    def __post_init__(self) -> None:
        _at_least(self, port=0, max_body_bytes=1 << 10, request_seconds=0.1, body_seconds=0.1)
        if self.host not in LOOPBACK:
            raise ConfigError(
                f"http.host is {self.host!r}: the HTTP front listens on loopback only (127.0.0.1, localhost, ::1); to reach "
                "it from another machine, forward the port over SSH, or put a proxy with TLS before it"
            )


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """What the policy learns: a digit task, or `reasoning_gym:<name>` where that package is installed."""

    name: str = "reverse"
    digits: int = 3
    holdout: float = 0.1
    """Share of the prompts kept out of training, for evaluation."""

    def __post_init__(self) -> None:
        _at_least(self, digits=1, holdout=0.0)
        if self.holdout >= 1:
            raise ConfigError(f"task.holdout must be below 1, got {self.holdout}")


AlgorithmKind: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "ppo", "reinforce++"]
Advantage: TypeAlias = Literal["group", "centred", "leave_one_out", "batch", "gae"]
Aggregation: TypeAlias = Literal["sequence", "token", "constant"]


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    kind: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1e-3
    """After the warm-up, before the decay."""
    warmup_steps: int = 0
    """The rate rises linearly over these steps; the last of them has all of it."""
    decay: Literal["none", "linear", "cosine"] = "none"
    decay_steps: int = 0
    """How long it falls after the warm-up; then it stays at `final_share`."""
    final_share: float = 0.0
    """Of the learning rate, when the decay is over."""
    gradient_clip: float = 1.0
    """The gradient's largest norm, over all parameters together; 0 clips nothing."""
    weight_decay: float = 0.0
    """For `adamw`, on matrices; norms and biases are left alone."""
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        _at_least(self, learning_rate=0.0, warmup_steps=0, decay_steps=0, final_share=0.0, gradient_clip=0.0)
        _at_least(self, weight_decay=0.0, beta1=0.0, beta2=0.0)
        for name in ("final_share", "beta1", "beta2"):
            if getattr(self, name) > 1 or (name != "final_share" and getattr(self, name) == 1):
                raise ConfigError(f"optimiser.{name} must be below 1, got {getattr(self, name)}")
        if (self.decay == "none") != (self.decay_steps == 0):
            raise ConfigError(
                f"optimiser.decay is {self.decay!r} and decay_steps is {self.decay_steps}: a decay needs both, "
                'decay="linear" or "cosine" and how many steps it takes'
            )
        if self.weight_decay and self.kind == "adam":
            raise ConfigError('optimiser.weight_decay is for kind="adamw"; plain adam has none')


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """What to do where the engine's policy is not the trainer's: `rl/correction.py`."""

    kind: Literal["none", "tis", "mis", "decoupled"] = "none"
    """`none`: the clipped ratio is that of trainer to engine. For the others it is that of the trainer to itself before the
    update, and gains are weighted by trainer over engine: `tis` by `cap` at most, `mis` by 0 outside [`low`, `high`],
    `decoupled` by whatever it is."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight: each token's, the product over its sequence, or the geometric mean over its sequence."""
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _at_least(self, cap=1.0, low=0.0, high=1.0)
        if self.low > 1:
            raise ConfigError(
                f"correction.low must be at most 1, got {self.low}: trainer and engine that agree have weight 1"
            )


@dataclass(frozen=True, slots=True)
class KlConfig:
    """A pull towards the policy that training started from. In the reward where advantages are made token by token (`ppo`,
    `reinforce++`), in the loss elsewhere."""

    weight: float = 0.0
    """0: none, and no reference policy is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """In the loss. In the reward it is always k1."""

    def __post_init__(self) -> None:
        _at_least(self, weight=0.0)


@dataclass(frozen=True, slots=True)
class ValueConfig:
    """The critic of `ppo`."""

    weight: float = 0.5
    """Of its loss."""
    clip: float = 0.2
    """How far values may move in an update; 0 does not clip."""
    gamma: float = 1.0
    """Discount of what comes one token later."""
    lam: float = 0.95
    """λ of generalised advantage estimation: 0 trusts the values, 1 the rewards."""

    def __post_init__(self) -> None:
        _at_least(self, weight=0.0, clip=0.0, gamma=0.0, lam=0.0)
        for name in ("gamma", "lam"):
            if getattr(self, name) > 1:
                raise ConfigError(f"value.{name} must be at most 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """An algorithm spelled out: what its paper chose, where the config does not say otherwise."""

    advantage: Advantage
    aggregation: Aggregation
    clip_high: float
    """The low side is `AlgorithmConfig.clip`."""
    filter_groups: bool

    @property
    def token_rewards(self) -> bool:
        """Advantages are made token by token, and the KL penalty is part of the reward."""
        return self.advantage in ("batch", "gae")

    @property
    def critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """How the policy learns. `kind` names a paper's choices (`recipe`); settings that are None follow it."""

    kind: AlgorithmKind = "grpo"
    prompts: int = 32
    """Prompts per step."""
    group: int = 8
    """Samples per prompt; for most kinds their rewards are each other's baseline."""
    max_tokens: int = 8
    temperature: float = 1.0
    clip: float = 0.2
    """The ratio to the old policy is clipped to [1 − clip, 1 + clip_high]."""
    clip_high: float | None = None
    """None: 0.28 for `dapo`, as much as `clip` for the others."""
    advantage: Advantage | None = None
    """What a completion's reward is compared with: `group` its group, in units of its deviation; `centred` its group;
    `leave_one_out` the others of its group; `batch` the whole batch; `gae` a value head's expectations."""
    aggregation: Aggregation | None = None
    """How tokens are averaged: `sequence` each completion alike, `token` each token alike, `constant` divided by
    `max_tokens`, whatever the length."""
    filter_groups: bool | None = None
    """Leave out groups whose rewards are all equal."""
    entropy_weight: float = 0.0
    """Of the entropy bonus."""
    micro_batches: int = 1
    """Parts in which a batch goes through the model, their gradients summed: less memory, the same update."""
    kl: KlConfig = field(default_factory=KlConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)

    def __post_init__(self) -> None:
        _at_least(self, prompts=1, group=1, max_tokens=1, micro_batches=1, entropy_weight=0.0)
        if self.temperature <= 0:
            raise ConfigError(
                f"algorithm.temperature must be positive, got {self.temperature}: greedy samples are all alike"
            )
        if not 0 < self.clip < 1:
            raise ConfigError(f"algorithm.clip must be in (0, 1), got {self.clip}")
        if self.clip_high is not None and self.clip_high <= 0:
            raise ConfigError(f"algorithm.clip_high must be positive, got {self.clip_high}")
        recipe = self.recipe
        if self.group < 2 and (not recipe.token_rewards or recipe.filter_groups):
            raise ConfigError(
                f"algorithm.group must be at least 2, got {self.group}: {self.kind!r} compares the samples of a prompt; "
                "'ppo' and 'reinforce++' do not"
            )
        if self.kl.weight and not recipe.token_rewards and self.kl.estimator == "k1":
            raise ConfigError(
                "kl.estimator 'k1' in the loss has a gradient of mean zero and would only add noise; take 'k3' or 'k2'"
            )
        if (self.prompts * self.group) % self.micro_batches:
            raise ConfigError(
                f"algorithm.micro_batches is {self.micro_batches}, but a step has prompts × group = "
                f"{self.prompts * self.group} completions, which it does not divide"
            )

    @property
    def recipe(self) -> Recipe:
        default = _RECIPES[self.kind]
        return Recipe(
            advantage=default.advantage if self.advantage is None else self.advantage,
            aggregation=default.aggregation if self.aggregation is None else self.aggregation,
            clip_high=self.clip_high or default.clip_high or self.clip,
            filter_groups=default.filter_groups if self.filter_groups is None else self.filter_groups,
        )


_RECIPES: dict[AlgorithmKind, Recipe] = {
    "grpo": Recipe("group", "sequence", 0.0, False),
    "dr_grpo": Recipe("centred", "constant", 0.0, False),
    "dapo": Recipe("group", "token", 0.28, True),
    "ppo": Recipe("gae", "token", 0.0, False),
    "reinforce++": Recipe("batch", "token", 0.0, False),
}
"""With `clip_high` 0 where it is to be as `clip`."""


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Where a run's records go besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Event files in `tensorboard/` of the run directory."""
    wandb_project: str = ""
    """Weights & Biases project; empty sends nothing anywhere."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Reward functions of one's own, and how they are run (`rl/rewards.py`)."""

    functions: dict[str, float] = field(default_factory=dict)
    """Weights by name: `{"my_rewards:exact" = 1.0, "my_rewards:brevity" = 0.1}`. A completion's reward is the weighted sum."""
    timeout: float = 30.0
    """Seconds that one call may take."""
    workers: int = 1
    """Processes per function, so that a function that hangs or crashes takes nobody along; 0 runs it in the trainer's own."""
    on_error: Literal["raise", "drop"] = "raise"
    """`drop` leaves samples that could not be judged out of their group, and counts them."""
    memory_limit: int = 0
    """Most bytes of address space for a worker process; 0 sets no limit."""

    def __post_init__(self) -> None:
        _at_least(self, timeout=1e-3, workers=0, memory_limit=0)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`slipstream train CONFIG`: everything about a run."""

    model: str = ""
    """HF model directory; empty makes the demo's small decoder and tokenizer on the spot."""
    run_dir: str = ""
    """Where logs, plot and checkpoint go; empty makes `runs/<time>`."""
    steps: int = 300
    target_accuracy: float = 0.0
    """Stop once the sampled accuracy (mean of the last 10 steps) reaches this; 0 runs all steps."""
    min_steps: int = 0
    """Do not stop before this step, however well it goes."""
    warmup_steps: int = 25
    """Supervised steps before RL, so that there is a reward to climb."""
    eval_every: int = 25
    save_every: int = 25
    """Steps from one checkpoint to the next, and one at the end: the same command goes on from the last. 0 makes none."""
    keep_checkpoints: int = 2
    """Of those, how many stay on disk."""
    seed: int = 0
    engines: int = 1
    """Engine processes; 0 generates in the trainer's own process."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """`sync`: a step's completions are made by the weights of the step before it. `one_step_off`: engines generate the next
    step's while the trainer trains, so that they are one version older. `async`: engines never wait, up to
    `max_staleness`."""
    max_staleness: int = 2
    """For `async`: how many versions older than the trainer's the weights may be that made a token it learns from."""
    late: Literal["renew", "deliver"] = "renew"
    """What becomes of completions that are too old: made anew, or delivered with their age."""
    generate_timeout: float = 600.0
    """Seconds that a step's completions may take."""
    patience: float = 60.0
    """Seconds that engines or gateway may be gone: what dies is started again, and the run goes on. 0 ends it at once."""
    diagnose_every: int = 10
    """Steps from one diagnosis of the mismatch between the trainer's logprobs and the engines' to the next; 0 makes none."""
    take_turns: bool = False
    """Trainer and engines share the devices: engines sleep while the trainer trains, and give it their memory."""
    task: TaskConfig = field(default_factory=TaskConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_concurrency=256))
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Functions of one's own; without any, the task judges."""

    @property
    def bound(self) -> int:
        """How many versions old a token may be."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    def __post_init__(self) -> None:
        _at_least(self, max_staleness=1, generate_timeout=1.0, patience=0.0, diagnose_every=0)
        if self.take_turns and self.mode != "sync":
            raise ConfigError(
                f"take_turns lets engines sleep while the trainer trains, and mode {self.mode!r} does not"
            )
        if self.reward.functions and self.reward.on_error == "drop":
            raise ConfigError('reward.on_error = "drop" is for batches of your own; a training run needs every reward')
        _at_least(self, steps=1, min_steps=0, warmup_steps=0, eval_every=1, seed=0, engines=0, target_accuracy=0.0)
        _at_least(self, save_every=0, keep_checkpoints=1)
        if self.target_accuracy > 1:
            raise ConfigError(f"target_accuracy is a share of right answers, at most 1; got {self.target_accuracy}")


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


def _at_least(config: Any, **bounds: float) -> None:
    for name, low in bounds.items():
        if getattr(config, name) < low:
            raise ConfigError(f"{name} must be at least {low}, got {getattr(config, name)}")
