"""Records of a training run, one per event, for display, plot and log file alike."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from slipstream.errors import ConfigError
from slipstream.observe.recorder.run_recorder import Phase
from slipstream.runtime.clock import unix_time
from slipstream.types import SyncReport


@dataclass(frozen=True, slots=True)
class WarmupRecord:
    """One supervised step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Wall time of a step by phase, as the trainer sees it."""

    prepare: float
    """Drawing and encoding prompts."""
    generate: float
    """Waiting for completions."""
    reward: float
    """Decoding, rewards, advantages, padding."""
    train: float
    """Forward, backward and optimizer, until the new weights are computed."""
    sync: float
    """Waiting until every engine generates with the new weights."""
    sleep: float = 0.0
    """Putting engines to sleep before training."""
    wake: float = 0.0
    """Waking engines, before and after the sync."""
    diagnose: float = 0.0
    """Comparing the trainer's logprobs with the engines'."""

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """The means of an update (`Objective` in `algorithm/loss.py`), and the gradient norm before clipping."""

    loss: float
    ratio: float
    clip_share: float
    kl: float
    entropy: float
    gap: float
    gradient_norm: float
    equal_share: float = 0.0
    reference_kl: float = 0.0
    value_loss: float = 0.0
    correction: float = 1.0
    dropped: float = 0.0
    route_agreement: float = 0.0
    num_skipped: int = 0
    """Updates that changed nothing because their loss or gradient is not finite. The other fields are of the rest, if any."""


class Stopwatch:
    """Consecutive laps: each starts where the last one ended."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.phases: list[Phase] = []
        """Each lap with its start and end."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap. Laps of the same name add up."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self.phases.append(Phase(name, unix_time(self._last), unix_time(now)))
        self._last = now


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One RL step. In `sync` mode, all but `seconds`, `sync` and `mfu` are determined by config and seed."""

    step: int
    """From 1."""
    version: int
    """The policy version being trained. `staleness` says how far the tokens are behind it."""
    reward: float
    """Mean reward of the step's scored completions, without the overlong penalty."""
    accuracy: float
    """Share of scored completions with reward 1 or more."""
    num_tokens: int
    metrics: UpdateMetrics
    seconds: PhaseSeconds
    sync: SyncReport
    """The sync at the end of the step; in modes that do not wait for it, the last one that finished."""
    staleness: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tokens by age in versions: `{"0": 1200, "1": 300}`."""
    mismatch: str = ""
    """Diagnosis of the gap between trainer and engine logprobs, in a sentence; empty if not diagnosed in this step."""
    kl_without_replay: float | None = None
    """With `replay_routes`, in steps with a diagnosis: KL(engine ‖ θ) at temperature 1 if the trainer chose the experts."""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    """With `take_turns`: bytes in use by engines at each phase of the step."""
    num_dropped: int = 0
    """Completions left out because they, or too many of their group, could not be scored."""
    num_resampled: int = 0
    """Groups sampled in addition, to replace uninformative ones."""
    mfu: float | None = None
    """Model FLOPs utilization of the phase `train` (`algorithm/utilization.py`); None if the device's peak is not known, as on
    CPU."""

    @property
    def tokens_per_second(self) -> float:
        """Over the whole step, since engines that run ahead generate while the trainer trains."""
        return self.num_tokens / self.seconds.total


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy with the sampling of training (`sampled`) and with greedy decoding (`greedy`), on training prompts and on
    held-out prompts. None if a split has no prompts."""

    step: int
    """RL steps done: 0 is the policy after the warm-up."""
    version: int
    sampled_train: float
    greedy_train: float
    sampled_heldout: float | None
    greedy_heldout: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """The end of a run: the final policy as an HF checkpoint."""

    directory: str


Record: TypeAlias = WarmupRecord | StepRecord | Evaluation | Saved


Log: TypeAlias = Callable[[Record], None]


@contextmanager
def json_lines(path: Path) -> Iterator[Log]:
    """Append each record to a file as a JSON line with its class as `kind`, and flush it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:

        def write(record: Record) -> None:
            file.write(_line(record))
            file.flush()

        yield write


def read_records(path: Path) -> list[Record]:
    """Read what `json_lines` wrote. A last line cut off by a kill is ignored."""
    *lines, last = path.read_text().split("\n")
    if last:
        lines += [last] if _is_json(last) else []
    kinds = {kind.__name__: kind for kind in get_args(Record)}
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            records.append(_revive(kinds[fields.pop("kind")], fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is not a record of this release ({error!r}): {line[:80]!r}"
            ) from None
    return records


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Replace the file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        file.writelines(map(_line, records))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _line(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **dataclasses.asdict(record)}) + "\n"


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _revive(hint: Any, value: Any) -> Any:
    """Convert a JSON value to its type: dataclasses and homogeneous tuples."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{name: _revive(hints[name], part) for name, part in value.items()})
    if get_origin(hint) is tuple:
        return tuple(_revive(get_args(hint)[0], part) for part in value)
    return value
