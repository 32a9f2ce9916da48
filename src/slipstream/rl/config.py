"""Settings of a training run: task, algorithm, rewards, engines, logging.

`TrainConfig` holds all of them, as `slipstream train` loads it (`config.load`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from slipstream.config import (
    AdapterConfig,
    DeviceGroups,
    DeviceNames,
    EmbeddedConfig,
    EngineConfig,
    LocalEngineConfig,
    Names,
    PathName,
    RecordConfig,
    Settings,
)
from slipstream.errors import ConfigError
from slipstream.types import InFlight, Lora

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class TaskConfig(Settings):
    """The task: a built-in digit task, or `reasoning_gym:<name>` if that package is installed."""

    name: str = "reverse"
    """Name of the task."""
    digits: PositiveInt = 3
    """Number of digits in the prompts of a digit task."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of prompts held out for evaluation."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a reasoning-gym task, for example `{max_terms = 3, max_digits = 1}`."""
    extract: Literal["tags", "number"] = "tags"
    """The part of a completion that a reasoning-gym task scores: the text in `<answer>` tags (all text, if there are none),
    or the last number."""
    chat: bool = False
    """Format the prompt as a user message with the model's chat template."""
    system: str = ""
    """System message, with `chat`; empty leaves it to the template."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.system and not self.chat:
            raise ConfigError("system is a chat message; set chat = true")
        return self


class DataConfig(Settings):
    """Your own prompts: a JSONL or Parquet file, or a dataset of the Hugging Face Hub (`rl/data/rows.py`)."""

    path: PathName = ""
    """`maths.jsonl`, `maths.parquet`, or `org/name` or `org/name@revision` on the Hub. Empty uses the task instead. A file is
    looked up in the working directory, then beside the TOML file."""
    subset: str = ""
    """Configuration of a Hub dataset."""
    split: str = "train"
    """Split of a Hub dataset to train on."""
    eval_path: PathName = ""
    """File with the held-out rows; empty holds out `holdout` of the rows."""
    eval_split: str = ""
    """Split of a Hub dataset with the held-out rows."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the rows held out for evaluation, chosen by the seed; without `eval_path` and `eval_split`."""
    prompt: str = "prompt"
    """Column with the prompt."""
    messages: str = ""
    """Column with a conversation, a list of `{role, content}`, instead of `prompt`; needs a chat template."""
    template: str = ""
    """Prompt made of several columns, instead of `prompt`: `"{question}\nAnswer:"`."""
    answer: str | None = None
    """Column with a right answer; None uses the column `answer`, if there is one."""
    extract: Literal["all", "tags", "number"] = "all"
    """The part of a completion that is compared with the answer, without reward functions: all text, the text in `<answer>`
    tags, or the last number."""
    chat: bool = False
    """Format the prompt as a user message with the model's chat template."""
    system: str = ""
    """System message, with `chat` or `messages`; empty leaves it to the template."""
    overlong: Literal["raise", "skip"] = "raise"
    """Prompts that leave no room for a completion: end with an error, or leave them out and count them."""
    order: Literal["shuffle", "file", "easy_first"] = "shuffle"
    """Order of the rows in an epoch: shuffled by the seed, as in the file, or by pass rate, highest first."""
    pass_rate: str = ""
    """Column with pass rates measured before, for `order` and the filters; otherwise those of this run."""
    skip_solved: bool = False
    """Skip prompts of which every sample was solved the last time."""
    skip_unsolved: bool = False
    """Skip prompts of which no sample was solved the last time."""
    recheck: PositiveInt = 4
    """Epochs after which a skipped prompt is tried again."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.messages and self.template:
            raise ConfigError("messages and template both make the prompt; set one of them")
        if self.system and not (self.chat or self.messages):
            raise ConfigError("system is a chat message; set chat = true")
        return self

    @property
    def uses_pass_rates(self) -> bool:
        return self.skip_solved or self.skip_unsolved or self.order == "easy_first"


class EnvironmentConfig(Settings):
    """Rollouts of several turns with an environment (`rl/agents/environments.py`)."""

    name: str = ""
    """`my_module:MyEnvironment`, `verifiers:<taskset>`, or `openenv:<url of a server>`. Empty: completions of prompts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's class; for verifiers the settings of its `[env]` section, for OpenEnv those of `reset`."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy, each of at most `algorithm.max_tokens`."""
    max_tokens: PositiveInt = 1024
    """Maximum length of an episode in tokens: prompt, turns and observations."""
    chat: bool = False
    """Format observations as user messages with the model's chat template; verifiers environments always use it."""
    system: str = ""
    """System message, with `chat`; empty leaves it to the template."""
    tools: str = "hermes"
    """Format of tool calls in the policy's text: `hermes` (Qwen, Hermes), `llama`, or a function `my_module:parse` that returns
    the text without calls, and a list of `slipstream.model.tool_calls.ToolCall`."""
    workers: NonNegativeInt = 2
    """Processes in which environments run, isolated from the trainer; 0 runs them in the trainer process."""
    episodes_per_worker: PositiveInt = 32
    """Episodes at once in a process."""
    python: PathName = ""
    """Interpreter of the processes, for environments whose dependencies conflict; empty uses the trainer's."""
    start_timeout: PositiveFloat = 300.0
    """Time limit for a process to import the environment, and to start its tools, in seconds."""
    step_timeout: PositiveFloat = 60.0
    """Time limit of each `reset` and `step` in seconds."""
    episode_timeout: PositiveFloat = 600.0
    """Time limit of an episode in seconds, from its first observation; the policy's turns count."""
    on_error: Literal["drop", "raise"] = "drop"
    """Episodes whose environment failed: leave them out and count them, or end the run. They never have a reward of 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.system and not self.chat:
            raise ConfigError("system is a chat message; set chat = true")
        return self


AlgorithmKind: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "ppo", "reinforce++"]
Advantage: TypeAlias = Literal["group", "centered", "leave_one_out", "batch", "gae"]
Aggregation: TypeAlias = Literal["sequence", "token", "constant"]


class OptimizerConfig(Settings):
    """Optimizer and learning rate schedule. The schedule counts updates; a training step may make several."""

    kind: Literal["adam", "adamw"] = "adam"
    """Optimizer."""
    learning_rate: NonNegativeFloat = 1e-3
    """Peak learning rate: after warm-up, before decay."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up; the last one uses the full rate."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """Shape of the learning rate decay after warm-up."""
    decay_steps: NonNegativeInt = 0
    """Updates over which the rate decays; afterwards it stays at `final_share`."""
    final_share: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""
    gradient_clip: NonNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of `adamw`, applied to matrices; norms and biases are exempt."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay rate of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay rate of the second moment."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.decay == "none") != (self.decay_steps == 0):
            raise ConfigError(
                f"decay is {self.decay!r} and decay_steps is {self.decay_steps}: a decay needs both, "
                'decay = "linear" or "cosine" and decay_steps'
            )
        if self.weight_decay and self.kind == "adam":
            raise ConfigError('weight_decay needs kind = "adamw"; adam has none')
        return self


class CorrectionConfig(Settings):
    """Importance-sampling correction for the mismatch of trainer and engine policies (`rl/algorithm/correction.py`)."""

    kind: Literal["none", "tis", "mis", "decoupled"] = "none"
    """`none`: the clipped ratio is trainer over engine. Otherwise it is the trainer over itself before the step, and
    advantages are weighted by trainer over engine: `tis` truncates the weight at `cap`, `mis` masks weights outside
    [`low`, `high`], `decoupled` uses the weight unchanged."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight per token, product over the sequence, or geometric mean over the sequence."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight of `tis`."""
    low: Fraction = 0.5
    """Smallest weight that `mis` keeps; at most 1, the weight of equal policies."""
    high: Annotated[float, Field(ge=1)] = 5.0
    """Largest weight that `mis` keeps."""


class KlConfig(Settings):
    """KL penalty towards the initial policy. It is part of the reward for advantages per token (`ppo`, `reinforce++`), and
    part of the loss otherwise."""

    weight: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 disables it, and no reference policy is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator in the loss. The reward always uses k1."""
    scored_by: Literal["trainer", "engine"] = "trainer"
    """Where the reference policy runs: in the trainer, or in a second fleet of engines with their dtype
    (`rl/trainer/reference.py`), which takes no memory or time of the trainer's devices."""

    @property
    def by_engine(self) -> bool:
        """Whether engines score the reference policy."""
        return self.weight > 0 and self.scored_by == "engine"


Dtype: TypeAlias = Literal["float32", "bfloat16"]


class ComputeConfig(Settings):
    """How the trainer computes an update: precision, memory and attention. "auto" depends on platform and size
    (`rl/algorithm/compute.py`)."""

    dtype: Literal["auto"] | Dtype = "auto"
    """Data type of activations and matrix products. `auto`: bfloat16 on accelerators, that of the weights on CPU. Softmax,
    norms and the loss are in float32 in any case."""
    param_dtype: Literal["auto"] | Dtype = "auto"
    """Data type of the trainer's weights (the master weights) and of the optimizer state. `auto`: float32 on accelerators, that
    of the checkpoint on CPU. Engines get the weights in their own dtype."""
    accumulate_dtype: Dtype = "float32"
    """Data type in which the gradients of micro-batches are added."""
    remat: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward pass computes again, to save memory: `none`; `selective`, all but the results of matrix
    products; `full`, all but the inputs of layers. `auto`: the first that keeps at most 8 GiB."""
    scan_layers: bool | None = None
    """Compile one program for repeated layers, instead of one for each layer. None: on accelerators."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """`xla`: chunks of queries if the scores of all take more than 1 GiB. `cudnn`: cuDNN's flash attention in bfloat16, where
    it supports the layer. `auto`: `xla`."""
    logits_chunk: NonNegativeInt = 0
    """Positions of each row whose logits are computed at a time. 0: all if their logits take at most 1 GiB, else as many as
    take half of that."""


class ValueConfig(Settings):
    """The critic of `ppo`."""

    weight: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    clip: NonNegativeFloat = 0.2
    """Maximum change of a value in one update; 0 disables clipping."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """λ of generalized advantage estimation: 0 trusts the values, 1 the rewards."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The choices that make up an algorithm: its paper's, unless the config overrides them."""

    advantage: Advantage
    aggregation: Aggregation
    clip_high: float
    """Upper clip of the ratio; the lower one is `AlgorithmConfig.clip`."""
    filter_groups: bool
    resample: int

    @property
    def token_rewards(self) -> bool:
        """Whether advantages are computed per token, with the KL penalty in the reward."""
        return self.advantage in ("batch", "gae")

    @property
    def critic(self) -> bool:
        """Whether a value head is trained."""
        return self.advantage == "gae"


class AlgorithmConfig(Settings):
    """The RL algorithm. `kind` selects the choices of a paper (`recipe`); settings left at None follow it."""

    kind: AlgorithmKind = "grpo"
    """Algorithm."""
    prompts: PositiveInt = 32
    """Prompts per step."""
    group: PositiveInt = 8
    """Samples per prompt; for most kinds they are each other's baseline."""
    max_tokens: PositiveInt = 8
    """Maximum number of tokens per completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; 0 is not allowed, since greedy samples of a prompt are all equal."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio to the old policy is clipped to [1 − clip, 1 + clip_high]."""
    clip_high: PositiveFloat | None = None
    """None: 0.28 for `dapo`, the value of `clip` for the others."""
    advantage: Advantage | None = None
    """Baseline of a completion's reward: `group`, the group's mean, in units of its standard deviation; `centered`, the
    group's mean; `leave_one_out`, the mean of the others in the group; `batch`, the batch's mean; `gae`, a value head."""
    aggregation: Aggregation | None = None
    """Average of the loss over tokens: `sequence` weighs completions equally, `token` tokens equally, `constant` divides by
    `max_tokens` regardless of length."""
    filter_groups: bool | None = None
    """Drop groups whose rewards are all equal."""
    resample: NonNegativeInt | None = None
    """How often a step samples further prompts to replace dropped groups. None: 3 for `dapo`, 0 for the others and without
    `filter_groups`."""
    overlong_tokens: NonNegativeInt = 0
    """DAPO's soft overlong punishment: over the last `overlong_tokens` before `max_tokens`, the reward falls linearly by up
    to 1. 0 disables it."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    epochs: PositiveInt = 1
    """Passes over a step's completions."""
    minibatches: PositiveInt = 1
    """Updates per epoch, each on an equal share of the completions, reshuffled every epoch."""
    micro_batches: PositiveInt = 1
    """Gradient accumulation: parts in which an update's rows pass through the model. Saves memory, same update."""
    row_tokens: NonNegativeInt = 0
    """Pack several sequences into rows of this many tokens, to save padding. A row must hold the longest prompt plus
    `max_tokens`. 0 gives each sequence its own row."""
    kl: KlConfig = KlConfig()
    """KL penalty."""
    value: ValueConfig = ValueConfig()
    """Critic of `ppo`."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance-sampling correction."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate schedule."""
    compute: ComputeConfig = ComputeConfig()
    """Precision, memory and attention of the trainer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.overlong_tokens > self.max_tokens:
            raise ConfigError(
                f"overlong_tokens must be at most max_tokens ({self.max_tokens}), got {self.overlong_tokens}"
            )
        if self.row_tokens and self.row_tokens <= self.max_tokens:
            raise ConfigError(
                f"row_tokens is {self.row_tokens}, but a row must hold a prompt and {self.max_tokens} tokens of completion "
                "(max_tokens); make it longer, or 0 for one row per sequence"
            )
        recipe = self.recipe
        if self.resample and not recipe.filter_groups:
            raise ConfigError(f"resample is {self.resample}, which needs filter_groups = true (as 'dapo' has)")
        if self.group < 2 and (not recipe.token_rewards or recipe.filter_groups):
            raise ConfigError(
                f"group must be at least 2, got {self.group}: {self.kind!r} compares the samples of a prompt; "
                "'ppo' and 'reinforce++' do not"
            )
        if self.kl.weight and not recipe.token_rewards and self.kl.estimator == "k1":
            raise ConfigError("kl.estimator 'k1' has a gradient of mean zero in the loss; use 'k3' or 'k2'")
        if self.kl.by_engine and self.temperature != 1:
            raise ConfigError(
                f"kl.scored_by 'engine' needs temperature = 1, since engines score at temperature 1, got "
                f"{self.temperature}; use 'trainer'"
            )
        self.check_shares(1)
        return self

    def check_shares(self, num_devices: int) -> None:
        """Raise `ConfigError` unless minibatches, micro-batches and devices divide a step's completions.

        Packed rows need not divide by micro-batches and devices: they are padded with empty rows."""
        shares = {"minibatches": self.minibatches}
        if not self.row_tokens:
            shares |= {"micro_batches": self.micro_batches, "devices": num_devices}
        if (self.prompts * self.group) % math.prod(shares.values()):
            divisors = " × ".join(f"{name} {share}" for name, share in shares.items() if share > 1)
            raise ConfigError(
                f"prompts × group = {self.prompts * self.group} completions per step are not divisible by {divisors}"
            )

    @property
    def num_updates(self) -> int:
        """Optimizer updates per step."""
        return self.epochs * self.minibatches

    @property
    def recipe(self) -> Recipe:
        """The choices of `kind`, with overrides applied."""
        default = _RECIPES[self.kind]
        filters = default.filter_groups if self.filter_groups is None else self.filter_groups
        return Recipe(
            advantage=default.advantage if self.advantage is None else self.advantage,
            aggregation=default.aggregation if self.aggregation is None else self.aggregation,
            clip_high=self.clip_high or default.clip_high or self.clip,
            filter_groups=filters,
            resample=default.resample * filters if self.resample is None else self.resample,
        )


_RECIPES: dict[AlgorithmKind, Recipe] = {
    "grpo": Recipe("group", "sequence", 0.0, False, 0),
    "dr_grpo": Recipe("centered", "constant", 0.0, False, 0),
    "dapo": Recipe("group", "token", 0.28, True, 3),
    "ppo": Recipe("gae", "token", 0.0, False, 0),
    "reinforce++": Recipe("batch", "token", 0.0, False, 0),
}
"""`clip_high` 0 means the value of `clip`."""


class LoggingConfig(Settings):
    """Loggers besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run directory."""
    wandb_project: str = ""
    """Weights & Biases project; empty disables it."""


class RewardConfig(Settings):
    """Custom reward functions and how to run them (`rl/rewards/rewarder.py`), and a reward model."""

    function: str = ""
    """One reward function, `my_rewards:exact`: short for `functions` with one entry of weight 1."""
    functions: dict[str, float] = Field(default_factory=dict)
    """Weights by function: `{"my_rewards:exact" = 1.0, "my_rewards:brevity" = 0.1}`. The reward is the weighted sum."""
    timeout: Annotated[float, Field(ge=1e-3)] = 30.0
    """Time limit of one call in seconds."""
    workers: NonNegativeInt = 1
    """Worker processes per function, which isolate hangs and crashes; 0 runs it in the trainer process."""
    on_error: Literal["raise", "drop"] = "raise"
    """`drop` removes samples that could not be scored, and groups left with fewer than two samples, and counts them. A step
    with nothing left ends the run."""
    memory_limit: NonNegativeInt = 0
    """Maximum address space of a worker process in bytes; 0 is unlimited."""
    solved: float = 1.0
    """Reward from which a completion counts as solved: for accuracy and pass rates."""
    model: PathName = ""
    """Reward model: a directory or Hub name of a model for sequence classification, which engines of its own serve
    (`rl/rewards/reward_model.py`)."""
    model_weight: float = 1.0
    """Weight of the model's score, besides those of functions."""
    model_label: NonNegativeInt = 0
    """The output of the model that is the reward, if it has several."""
    model_engines: NonNegativeInt = 1
    """Engine processes of the reward model; 0 runs it in the trainer process."""
    model_engine: LocalEngineConfig = EmbeddedConfig()
    """The engines of the reward model."""

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.function and self.functions:
            raise ConfigError("set reward.function, or reward.functions with a weight for each; not both")
        if not self.model_engines and self.model_engine.kind != "embedded":
            raise ConfigError(
                "model_engines = 0 runs the reward model in the trainer process, which needs model_engine.kind = 'embedded', "
                f"got {self.model_engine.kind!r}"
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weights by function."""
        return {self.function: 1.0} if self.function else self.functions


class LoraConfig(Settings):
    """Train a LoRA adapter of the model instead of the model itself (docs/lora.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapter; 0 trains the whole model."""
    alpha: PositiveFloat = 16.0
    """The adapter's change of a projection is scaled by alpha / rank."""
    targets: Names = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Projections that it changes, in all layers."""
    name: str = "policy"
    """Name by which engines serve it."""
    path: PathName = ""
    """PEFT directory of an adapter to start from; it must have this rank, alpha and targets."""

    @property
    def adapter(self) -> Lora | None:
        return Lora(self.name, self.rank, self.alpha, self.targets) if self.rank else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rank and self.model_fields_set:
            raise ConfigError(
                "lora.rank is missing: with 0 the whole model is trained, and the other settings do nothing"
            )
        self.adapter  # noqa: B018  # raises for values that an adapter cannot have
        return self


class TrainConfig(Settings):
    """A whole training run: what `slipstream train` loads and `slipstream.train` runs.

    Example:
        config = TrainConfig(model="my-model", steps=100, engine=VllmConfig(), algorithm=AlgorithmConfig(kind="dapo"))
    """

    model: PathName = ""
    """HF model directory; empty creates the demo's small decoder and tokenizer."""
    run_dir: PathName = ""
    """Directory for logs, plot and checkpoints; empty creates `runs/<time>`."""
    steps: PositiveInt = 300
    """Training steps."""
    target_accuracy: Fraction = 0.0
    """Stop when the sampled accuracy (mean of the last 10 steps) reaches this; 0 runs all steps."""
    min_steps: NonNegativeInt = 0
    """Minimum number of steps before `target_accuracy` can stop the run."""
    warmup_steps: NonNegativeInt = 25
    """Supervised steps before RL, so that some rewards are not zero."""
    eval_every: PositiveInt = 25
    """Steps between evaluations."""
    eval_prompts: PositiveInt = 128
    """Prompts per split in an evaluation; four samples and a greedy completion each."""
    save_every: NonNegativeInt = 25
    """Steps between checkpoints, with one more at the end; the same command resumes from the last. 0 disables them."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept on disk."""
    seed: NonNegativeInt = 0
    """Random seed."""
    engines: NonNegativeInt = 1
    """Engine processes; 0 generates in the trainer process."""
    devices: NonNegativeInt = 1
    """Trainer devices that share parameters, optimizer state and rows (`rl/algorithm/sharding.py`); 0 uses all of this host."""
    engine_devices: Literal["auto"] | DeviceNames | DeviceGroups | None = None
    """GPUs of the engines, as for `launch(devices=…)`: "auto", GPUs to divide among them, or a list for each engine."""
    trainer_devices: DeviceNames | None = None
    """GPUs of the trainer, which "auto" leaves alone; by default those in CUDA_VISIBLE_DEVICES."""
    share_gpus: bool = False
    """Let several ranks, or a rank and the trainer, be on one GPU."""
    mode: Literal["sync", "partial", "one_step_off", "async"] = "sync"
    """`sync`: completions of a step come from the weights of the step before it. `partial`: as `sync`, but a step starts
    more prompts than it needs and does not wait for the slowest, which continue in the next step. `one_step_off`: engines
    generate the next step while the trainer trains, one version behind. `async`: engines never wait, up to
    `max_staleness`."""
    max_staleness: PositiveInt = 2
    """For `partial` and `async`: maximum number of versions that a token's weights may be behind the trainer's."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """For `partial`: fraction of running prompts that a step waits for. With 0.8, a batch of 32 is the first 32 of 40. To
    wait for all, use `sync`."""
    in_flight: InFlight = "keep"
    """What a sync does with running completions: continue from their KV cache (`keep`), recompute it with the new weights
    (`recompute`), restart them (`requeue`), or wait for them (`finish`)."""
    late: Literal["renew", "deliver"] = "renew"
    """`renew`: the trainer waits for completions that would become too stale. `deliver`: it takes them when they arrive, and
    reports their age."""
    generate_timeout: Annotated[float, Field(ge=1)] = 600.0
    """Time limit for a step's completions in seconds."""
    patience: NonNegativeFloat = 60.0
    """Seconds to wait for lost engines or a lost gateway, which are restarted; 0 ends the run at once."""
    diagnose_every: NonNegativeInt = 10
    """Steps between diagnoses of the mismatch between trainer and engine logprobs; 0 disables them."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens when the loss or gradient of an update is NaN or infinite. The weights stay as they are in any case.
    `stop` ends the run with an error that names the batch. `skip` goes on with the next update, and ends the run after ten
    steps in a row without one."""
    deterministic: bool = False
    """Compute the trainer's logprobs with the embedded engine's programs, and set `engine.deterministic`: logprobs of tokens
    that the current weights sampled are then equal to the engines' to the bit (docs/on-policy.md says where)."""
    replay_routes: bool = False
    """Routing replay for models with experts: updates send each token to the experts that the engine sent it to, and
    `engine.record_routes` is set (docs/on-policy.md)."""
    take_turns: bool = False
    """Trainer and engines share devices: engines sleep and release their memory while the trainer trains."""
    task: TaskConfig = TaskConfig()
    """The task to learn, without `data` and `environment`."""
    data: DataConfig = DataConfig()
    """Your own prompts."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """An environment with which the policy takes turns."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The RL algorithm."""
    lora: LoraConfig = LoraConfig()
    """The adapter to train, if any."""
    engine: EngineConfig = EmbeddedConfig(max_num_seqs=256)
    """The engines that generate completions. With `lora`, they get room for its adapter."""
    logging: LoggingConfig = LoggingConfig()
    """Loggers."""
    record: RecordConfig = RecordConfig()
    """What is recorded for the dashboard."""
    reward: RewardConfig = RewardConfig()
    """Custom reward functions; without any, the task scores completions."""

    @property
    def bound(self) -> int:
        """Maximum number of versions that a token may be behind."""
        return {"sync": 0, "one_step_off": 1}.get(self.mode, self.max_staleness)

    def beside(self, directory: Path) -> Self:
        """The config with data files that are not in the working directory, but in `directory`, by their path there."""

        def found(path: str) -> str:
            is_there = path and not Path(path).exists() and (directory / path).exists()
            return str(directory / path) if is_there else path

        data = self.data
        if (paths := (found(data.path), found(data.eval_path))) == (data.path, data.eval_path):
            return self
        return self.replace(data=data.replace(path=paths[0], eval_path=paths[1]))

    @property
    def max_completion(self) -> int:
        """Maximum number of tokens after a prompt: of a completion, or of a whole episode."""
        return self.environment.max_tokens if self.environment.name else self.algorithm.max_tokens

    @property
    def subject(self) -> str:
        """What the run trains on, for display: the environment, the data or the task."""
        return self.environment.name or self.data.path or self.task.name

    @property
    def adapter(self) -> str:
        """Name of the adapter that generates; empty if the whole model is trained."""
        return self.lora.name if self.lora.rank else ""

    @property
    def surplus(self) -> int | None:
        """Prompts running beyond those of a step in mode `partial`; None in other modes, which `bound` limits."""
        if self.mode != "partial":
            return None
        return math.ceil(self.algorithm.prompts / self.quantile) - self.algorithm.prompts

    @property
    def steps_ahead(self) -> int:
        """Number of future steps whose prompts are already submitted."""
        return self.bound if self.surplus is None else math.ceil(self.surplus / self.algorithm.prompts)

    @property
    def syncs_meanwhile(self) -> bool:
        """Whether the trainer continues while engines receive new weights."""
        return self.mode in ("one_step_off", "async")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.take_turns and self.mode not in ("sync", "partial"):
            raise ConfigError(
                f"take_turns needs mode 'sync' or 'partial', got {self.mode!r}: engines sleep while the trainer trains"
            )
        if self.take_turns and self.algorithm.kl.by_engine:
            raise ConfigError(
                "take_turns gives the trainer the engines' memory, but algorithm.kl.scored_by = 'engine' starts a second "
                "fleet that keeps its own; use 'trainer'"
            )
        if self.take_turns and self.in_flight == "finish":
            raise ConfigError(
                "in_flight 'finish' waits for running completions, but with take_turns engines sleep until the sync is "
                "over; use 'keep', 'recompute' or 'requeue'"
            )
        if not self.engines and self.engine.kind != "embedded":
            raise ConfigError(
                f"engines = 0 generates in the trainer process, which needs engine.kind = 'embedded', got {self.engine.kind!r}"
            )
        if self.deterministic:
            if self.engine.kind != "embedded":
                raise ConfigError(
                    "deterministic makes trainer and engines compute with the same programs, which needs engine.kind = "
                    f"'embedded', got {self.engine.kind!r}; for results of vLLM that do not depend on the batch, set "
                    "engine.deterministic instead"
                )
            object.__setattr__(self, "engine", self.engine.replace(deterministic=True))
        if (lora := self.lora.adapter) is not None:
            if self.deterministic:
                raise ConfigError("deterministic does not work with lora: engines compute an adapter in another way")
            if self.engine.kind == "remote":
                raise ConfigError(
                    "lora needs engine.kind = 'embedded' or 'vllm': a server takes no adapters, got 'remote'"
                )
            if self.engine.kind == "vllm" and self.in_flight == "recompute":
                raise ConfigError(
                    "in_flight is 'recompute', which vLLM cannot do for the requests of an adapter (lora); use 'keep' or "
                    "'requeue'"
                )
            if self.engine.adapters is None:
                room = AdapterConfig(slots=1, rank=lora.rank, targets=lora.targets)
                object.__setattr__(self, "engine", self.engine.replace(adapters=room))
        if self.replay_routes:
            if self.engine.kind != "embedded":
                raise ConfigError(
                    "replay_routes needs the experts that engines chose, which only engine.kind = 'embedded' returns, got "
                    f"{self.engine.kind!r} (vLLM returns them from its V2 model runner only; docs/on-policy.md)"
                )
            object.__setattr__(self, "engine", self.engine.replace(record_routes=True))
        self.algorithm.check_shares(max(1, self.devices))
        self._check_subject()
        return self

    def _check_subject(self) -> None:
        chosen = [
            name
            for name, is_set in (
                ("task", self.task != TaskConfig()),
                ("data", bool(self.data.path)),
                ("environment", bool(self.environment.name)),
            )
            if is_set
        ]
        if len(chosen) > 1:
            raise ConfigError(
                f"a run trains on one of task, data and environment; this config sets {' and '.join(chosen)}"
            )
        if not self.data.path and self.data != DataConfig():
            raise ConfigError(
                "data.path is missing: name the file or the Hub dataset that the [data] section describes"
            )
        if not self.environment.name and self.environment != EnvironmentConfig():
            raise ConfigError(
                "environment.name is missing: name the environment that the [environment] section describes"
            )
        if not self.environment.name:
            return
        if self.warmup_steps:
            raise ConfigError(
                "warmup_steps imitates right answers, which an environment does not have; set warmup_steps = 0"
            )
        if self.reward.weights or self.reward.model:
            raise ConfigError(
                "an environment gives the rewards of its episodes; remove reward.function and reward.model"
            )
        if self.algorithm.overlong_tokens:
            raise ConfigError(
                "overlong_tokens is for completions of one turn; an environment can punish long answers itself"
            )
