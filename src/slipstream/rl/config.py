"""Settings of a training run: what is learned, how, from which rewards, and how it is watched.

`TrainConfig` is all of it, as `slipstream train` reads it (`config.load`). Each class checks itself when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from slipstream.config import EngineConfig, at_least
from slipstream.errors import ConfigError
from slipstream.types import InFlight


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """What the policy learns: a digit task, or `reasoning_gym:<name>` where that package is installed."""

    name: str = "reverse"
    digits: int = 3
    holdout: float = 0.1
    """Share of the prompts kept out of training, for evaluation."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a reasoning-gym task, which knows its own: `{max_terms = 3, max_digits = 1}`."""
    extract: Literal["tags", "number"] = "tags"
    """What of a completion a reasoning-gym task scores: what stands in `<answer>` tags, or all of it where there are none;
    or the last number."""
    chat: bool = False
    """Ask through the model's chat template, the prompt as the user's message."""
    system: str = ""
    """With `chat`: the message before it; empty leaves it to the template."""

    def __post_init__(self) -> None:
        at_least(self, digits=1, holdout=0.0)
        if self.system and not self.chat:
            raise ConfigError("task.system is a message of a chat, and task.chat is not set")
        if self.holdout >= 1:
            raise ConfigError(f"task.holdout must be below 1, got {self.holdout}")


AlgorithmKind: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "ppo", "reinforce++"]
Advantage: TypeAlias = Literal["group", "centred", "leave_one_out", "batch", "gae"]
Aggregation: TypeAlias = Literal["sequence", "token", "constant"]


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    kind: Literal["adam", "adamw"] = "adam"
    learning_rate: float = 1e-3
    """After the warm-up, before the decay. Both are counted in updates, of which a training step may make several."""
    warmup_steps: int = 0
    """The rate rises linearly over these updates; the last of them has all of it."""
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
        at_least(self, learning_rate=0.0, warmup_steps=0, decay_steps=0, final_share=0.0, gradient_clip=0.0)
        at_least(self, weight_decay=0.0, beta1=0.0, beta2=0.0)
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
    step, and gains are weighted by trainer over engine: `tis` by `cap` at most, `mis` by 0 outside [`low`, `high`],
    `decoupled` by whatever it is."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight: each token's, the product over its sequence, or the geometric mean over its sequence."""
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        at_least(self, cap=1.0, low=0.0, high=1.0)
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
    scored_by: Literal["trainer", "engine"] = "trainer"
    """Who holds that policy: the trainer, or a second fleet of engines, in their dtype (`rl/reference.py`). The latter takes no
    memory and no time of the trainer's devices."""

    @property
    def by_engine(self) -> bool:
        return self.weight > 0 and self.scored_by == "engine"

    def __post_init__(self) -> None:
        at_least(self, weight=0.0)


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
        at_least(self, weight=0.0, clip=0.0, gamma=0.0, lam=0.0)
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
    resample: int

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
    resample: int | None = None
    """Where that leaves fewer than `prompts`: how many more times a step asks as many prompts, until it has enough that teach
    something. None: 3 for `dapo`, 0 for the others and where nothing is left out."""
    overlong_tokens: int = 0
    """Of the last tokens before `max_tokens`, each costs a completion an equal part of a reward of 1, so that answers end in
    time (DAPO's soft overlong punishment). 0: none."""
    entropy_weight: float = 0.0
    """Of the entropy bonus."""
    epochs: int = 1
    """How often a step goes through its completions."""
    minibatches: int = 1
    """Updates per epoch, each from an equal share of the completions, drawn anew in every epoch."""
    micro_batches: int = 1
    """Parts in which an update's rows go through the model, their gradients summed: less memory, the same update."""
    row_tokens: int = 0
    """Several sequences share rows of this many tokens, so that short ones do not pay for the padding of long ones; it must
    hold the longest prompt with `max_tokens` more. 0: each sequence has a row of its own."""
    kl: KlConfig = field(default_factory=KlConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)

    def __post_init__(self) -> None:
        at_least(self, prompts=1, group=1, max_tokens=1, micro_batches=1, entropy_weight=0.0)
        at_least(self, epochs=1, minibatches=1, row_tokens=0, overlong_tokens=0)
        if self.overlong_tokens > self.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_tokens is {self.overlong_tokens}: they are the last of max_tokens = {self.max_tokens}, "
                "and cannot be more"
            )
        if self.row_tokens and self.row_tokens <= self.max_tokens:
            raise ConfigError(
                f"algorithm.row_tokens is {self.row_tokens}: a row holds a prompt and {self.max_tokens} tokens of its "
                "completion at least; make it longer, or 0 for a row per sequence"
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"algorithm.temperature must be positive, got {self.temperature}: greedy samples are all alike"
            )
        if not 0 < self.clip < 1:
            raise ConfigError(f"algorithm.clip must be in (0, 1), got {self.clip}")
        if self.clip_high is not None and self.clip_high <= 0:
            raise ConfigError(f"algorithm.clip_high must be positive, got {self.clip_high}")
        recipe = self.recipe
        if self.resample is not None and (self.resample < 0 or (self.resample and not recipe.filter_groups)):
            raise ConfigError(
                f"algorithm.resample is {self.resample}: it is how often a step asks again in place of groups that are left "
                "out; 0 or more, with filter_groups (which 'dapo' has) above 0"
            )
        if self.group < 2 and (not recipe.token_rewards or recipe.filter_groups):
            raise ConfigError(
                f"algorithm.group must be at least 2, got {self.group}: {self.kind!r} compares the samples of a prompt; "
                "'ppo' and 'reinforce++' do not"
            )
        if self.kl.weight and not recipe.token_rewards and self.kl.estimator == "k1":
            raise ConfigError(
                "kl.estimator 'k1' in the loss has a gradient of mean zero and would only add noise; take 'k3' or 'k2'"
            )
        if self.kl.by_engine and self.temperature != 1:
            raise ConfigError(
                f"kl.scored_by is 'engine', and engines score at temperature 1; with algorithm.temperature = "
                f"{self.temperature} take 'trainer'"
            )
        self.check_shares(1)

    def check_shares(self, num_devices: int) -> None:
        """`ConfigError` unless a step's completions can be shared out over minibatches, micro-batches and devices. Packed
        rows can always be shared out by the latter two: empty ones are added."""
        shares = {"minibatches": self.minibatches}
        if not self.row_tokens:
            shares |= {"micro_batches": self.micro_batches, "devices": num_devices}
        if (self.prompts * self.group) % math.prod(shares.values()):
            asked = " × ".join(f"{name} {share}" for name, share in shares.items() if share > 1)
            raise ConfigError(
                f"a step has prompts × group = {self.prompts * self.group} completions, which {asked} does not divide; choose "
                "numbers that do"
            )

    @property
    def num_updates(self) -> int:
        """Of the weights, in a step."""
        return self.epochs * self.minibatches

    @property
    def recipe(self) -> Recipe:
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
    "dr_grpo": Recipe("centred", "constant", 0.0, False, 0),
    "dapo": Recipe("group", "token", 0.28, True, 3),
    "ppo": Recipe("gae", "token", 0.0, False, 0),
    "reinforce++": Recipe("batch", "token", 0.0, False, 0),
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
    """`drop` leaves samples that could not be judged out of their group, and groups with fewer than two others, and counts
    them; a step of which nothing is left ends the run."""
    memory_limit: int = 0
    """Most bytes of address space for a worker process; 0 sets no limit."""

    def __post_init__(self) -> None:
        at_least(self, timeout=1e-3, workers=0, memory_limit=0)


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
    eval_prompts: int = 128
    """Of each split, every time; four samples and a greedy answer each."""
    save_every: int = 25
    """Steps from one checkpoint to the next, and one at the end: the same command goes on from the last. 0 makes none."""
    keep_checkpoints: int = 2
    """Of those, how many stay on disk."""
    seed: int = 0
    engines: int = 1
    """Engine processes; 0 generates in the trainer's own process."""
    devices: int = 1
    """Of the trainer, over which parameters, optimiser state and rows are cut (`rl/sharding.py`); 0 takes all of this host."""
    mode: Literal["sync", "partial", "one_step_off", "async"] = "sync"
    """`sync`: a step's completions are made by the weights of the step before it. `partial`: like `sync`, but a step begins
    more prompts than it takes, and does not wait for the slowest: those go on in the next step from the tokens that they
    have. `one_step_off`: engines generate the next step's while the trainer trains, so that they are one version older.
    `async`: engines never wait, up to `max_staleness`."""
    max_staleness: int = 2
    """For `partial` and `async`: how many versions older than the trainer's the weights may be that made a token it learns
    from."""
    quantile: float = 0.8
    """For `partial`: which share of the prompts that run a step waits for. With 0.8 a batch of 32 is the first 32 of 40."""
    in_flight: InFlight = "keep"
    """What a sync does with completions that are under way: they go on from their KV cache (`keep`), it is computed anew
    under the new weights (`recompute`), they begin again (`requeue`), or the sync waits for them (`finish`)."""
    late: Literal["renew", "deliver"] = "renew"
    """`renew`: the trainer waits for completions that would become too old. `deliver`: it takes them when they come, with their
    age."""
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
        return {"sync": 0, "one_step_off": 1}.get(self.mode, self.max_staleness)

    @property
    def surplus(self) -> int | None:
        """Prompts that run beyond a step's; None where `bound` alone says how many."""
        if self.mode != "partial":
            return None
        return math.ceil(self.algorithm.prompts / self.quantile) - self.algorithm.prompts

    @property
    def steps_ahead(self) -> int:
        """How many steps' prompts are submitted besides those of the step that is taken."""
        return self.bound if self.surplus is None else math.ceil(self.surplus / self.algorithm.prompts)

    @property
    def syncs_meanwhile(self) -> bool:
        """Whether the trainer goes on while engines take its new weights."""
        return self.mode in ("one_step_off", "async")

    def __post_init__(self) -> None:
        at_least(self, max_staleness=1, generate_timeout=1.0, patience=0.0, diagnose_every=0)
        if not 0 < self.quantile < 1:
            raise ConfigError(
                f"quantile must be in (0, 1), got {self.quantile}: it is the share of what runs that a step of mode "
                "'partial' waits for; to wait for all of it is mode 'sync'"
            )
        if self.take_turns and self.mode not in ("sync", "partial"):
            raise ConfigError(
                f"take_turns lets engines sleep while the trainer trains, and mode {self.mode!r} does not; take 'sync' or "
                "'partial'"
            )
        if self.take_turns and self.algorithm.kl.by_engine:
            raise ConfigError(
                "take_turns gives the trainer the engines' memory, and with kl.scored_by = 'engine' a second fleet would "
                "keep its own; take 'trainer'"
            )
        if self.take_turns and self.in_flight == "finish":
            raise ConfigError(
                "in_flight 'finish' has a sync wait until running completions are finished, and with take_turns engines "
                "sleep until it is over; take 'keep', 'recompute' or 'requeue'"
            )
        at_least(self, steps=1, min_steps=0, warmup_steps=0, eval_every=1, eval_prompts=1, seed=0, engines=0)
        at_least(self, target_accuracy=0.0)
        at_least(self, save_every=0, keep_checkpoints=1, devices=0)
        self.algorithm.check_shares(max(1, self.devices))
        if self.target_accuracy > 1:
            raise ConfigError(f"target_accuracy is a share of right answers, at most 1; got {self.target_accuracy}")
