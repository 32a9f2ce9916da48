"""Settings of a training run: task, algorithm, rewards, engines, logging.

`TrainConfig` holds all of them, as `slipstream train` loads it (`config.load`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from slipstream.config import DeviceGroups, DeviceNames, EmbeddedConfig, EngineConfig, PathName, Settings
from slipstream.errors import ConfigError
from slipstream.types import InFlight

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
    """Custom reward functions and how to run them (`rl/rewards/rewarder.py`)."""

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
    take_turns: bool = False
    """Trainer and engines share devices: engines sleep and release their memory while the trainer trains."""
    task: TaskConfig = TaskConfig()
    """The task to learn."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The RL algorithm."""
    engine: EngineConfig = EmbeddedConfig(max_num_seqs=256)
    """The engines that generate completions."""
    logging: LoggingConfig = LoggingConfig()
    """Loggers."""
    reward: RewardConfig = RewardConfig()
    """Custom reward functions; without any, the task scores completions."""

    @property
    def bound(self) -> int:
        """Maximum number of versions that a token may be behind."""
        return {"sync": 0, "one_step_off": 1}.get(self.mode, self.max_staleness)

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
        self.algorithm.check_shares(max(1, self.devices))
        return self
