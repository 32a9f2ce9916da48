"""What a training run says about itself: one record per event, the same for the display, the plot and the log file."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, get_args, get_origin, get_type_hints

from slipstream.errors import ConfigError
from slipstream.rl.loss import Metrics
from slipstream.types import SyncReport


@dataclass(frozen=True, slots=True)
class WarmupRecord:
    """One supervised step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Where a step's wall time went, as the trainer saw it."""

    prepare: float
    """Drawing and encoding prompts."""
    generate: float
    """From the prompts' departure to the last completion's arrival."""
    reward: float
    """Decoding, rewards, advantages, padding into arrays."""
    train: float
    """Forward, backward and optimiser, until the new weights are computed."""
    sync: float
    """Until every engine generates with the new weights."""
    sleep: float = 0.0
    """Putting engines to sleep before training."""
    wake: float = 0.0
    """Waking them again, before and after the sync."""
    diagnose: float = 0.0
    """Comparing the trainer's logprobs with the engines'."""

    @property
    def total(self) -> float:
        return (
            self.prepare + self.generate + self.reward + self.train + self.sync + self.sleep + self.wake + self.diagnose
        )


class Stopwatch:
    """Laps that leave no gap: each begins where the one before it ended."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Two laps of one name are added."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of reinforcement learning. All but `seconds` and `sync` follow from config and seed."""

    step: int
    """From 1."""
    version: int
    """The policy version that was being trained; `staleness` says how much older those are that made the tokens."""
    reward: float
    """Mean over the step's completions that were judged, as they were judged."""
    accuracy: float
    """Share of those with full reward."""
    num_tokens: int
    """Tokens generated."""
    metrics: Metrics
    seconds: PhaseSeconds
    sync: SyncReport
    """Of the update that ended the step; where the trainer does not wait for it, of the last that has ended."""
    staleness: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tokens by their age in versions: `{"0": 1200, "1": 300}`."""
    mismatch: str = ""
    """What explains the gap between the trainer's logprobs and the engines', in a sentence; empty where nobody looked."""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    """Where trainer and engines take turns: bytes that engines held, at each point of the step."""
    num_dropped: int = 0
    """Completions that nothing was learned from, because they, or too many of their group, could not be judged."""
    num_resampled: int = 0
    """Groups that were asked for in place of others, which taught nothing."""

    @property
    def tokens_per_second(self) -> float:
        """Of the whole step: engines that run ahead have made them while the trainer trained."""
        return self.num_tokens / self.seconds.total


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Share of right answers, drawn as in training (`sampled`) and with the likeliest token each time (`greedy`), on
    prompts of the training split and on prompts that training never sees. None where a split has no prompts."""

    step: int
    """RL steps done before it: 0 is the policy after the warm-up."""
    version: int
    sampled_train: float
    greedy_train: float
    sampled_heldout: float | None
    greedy_heldout: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """The end of a run: its last policy as an HF checkpoint."""

    directory: str


Record: TypeAlias = WarmupRecord | StepRecord | Evaluation | Saved


class Log(Protocol):
    def __call__(self, record: Record) -> None: ...


@contextmanager
def json_lines(path: Path) -> Iterator[Log]:
    """Appends each record to a file as a line of JSON with its class as `kind`, flushed, so that it can be followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:

        def write(record: Record) -> None:
            file.write(_line(record))
            file.flush()

        yield write


def read_records(path: Path) -> list[Record]:
    """What `json_lines` wrote. A last line that was cut off, by a process that was killed, is left out."""
    *lines, last = path.read_text().split("\n")
    if last:
        lines += [last] if _is_json(last) else []
    kinds = {kind.__name__: kind for kind in get_args(Record)}
    found: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            found.append(_revive(kinds[fields.pop("kind")], fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is no record of this release ({error!r}): {line[:80]!r}"
            ) from None
    return found


def write_records(path: Path, records: Iterable[Record]) -> None:
    """The file anew, whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.writelines(map(_line, records))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _line(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **dataclasses.asdict(record)}) + "\n"


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _revive(hint: Any, value: Any) -> Any:
    """A value from JSON as its type says: dataclasses, and tuples of one type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{name: _revive(hints[name], part) for name, part in value.items()})
    if get_origin(hint) is tuple:
        return tuple(_revive(get_args(hint)[0], part) for part in value)
    return value
