"""What the sides of `decode.py` share: the work, the rounds, and how a result goes back. Standard library only, because each
side runs in an environment of its own.

A side is a script: `decode_<side>.py JOB RESULT`. It reads the job, runs it, and writes the result; lines that `say` prints
are shown while it runs."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SAID = "decode> "
"""Begins the lines that are meant for people; whatever else a side prints is shown only if it fails."""

READY, GO, TURN_SECONDS = "ready", "go", 900


@dataclass(frozen=True)
class Case:
    """`lengths` are tokens to generate, no more and no fewer, one sample each. `group` neighbours share a prompt."""

    name: str
    lengths: list[int]
    group: int
    prompt_tokens: int

    @property
    def num_prompts(self) -> int:
        return len(self.lengths) // self.group

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def prompts(self, vocab_size: int, round_index: int) -> list[list[int]]:
        """One prompt for each sample. Every round has new ones: a prefix cache must not know them from the round before."""
        source = random.Random(f"{self.name} {round_index}")
        tokens = range(vocab_size)
        distinct = [source.choices(tokens, k=self.prompt_tokens) for _ in range(self.num_prompts)]
        return [distinct[i // self.group] for i in range(len(self.lengths))]


@dataclass(frozen=True)
class Job:
    directory: str
    """HF directory of the model."""
    dtype: Literal["float32", "bfloat16"]
    vocab_size: int
    rounds: int
    """Measured ones; one more goes before them to compile and warm up."""
    cases: list[Case]
    options: dict[str, Any] = field(default_factory=dict)
    """For this side alone."""
    turn: str = ""
    """Where it waits for its turn before every round, if it must; see `await_turn`."""

    @property
    def max_model_len(self) -> int:
        return max(case.prompt_tokens + max(case.lengths) for case in self.cases)

    @property
    def max_samples(self) -> int:
        return max(len(case.lengths) for case in self.cases)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str | Path) -> Job:
        fields = json.loads(Path(path).read_text())
        return cls(**fields | {"cases": [Case(**case) for case in fields["cases"]]})


@dataclass
class Round:
    seconds: float
    lengths: list[int]
    """Tokens that came back, by sample."""
    mean_logprob: float
    """Of the tokens, as this side reports it: sides that sample from the same model agree."""
    stats: dict[str, Any] = field(default_factory=dict)
    """What the engine counted during this round."""


def say(text: str) -> None:
    print(SAID + text, flush=True)


def run_rounds(
    job: Job, generate: Callable[[Case, list[list[int]]], Round], warm_up: Callable[[Case], None] | None = None
) -> dict[str, Any]:
    """For every case, `job.rounds` measured rounds after one that is not, or after `warm_up` where that is enough. Fails if
    a side made more or fewer tokens than asked."""
    found = {}
    for case in job.cases:
        start = time.perf_counter()
        if warm_up is None:
            _one_round(job, case, 0, generate)
        else:
            warm_up(case)
        warmup_seconds = time.perf_counter() - start
        rounds = [_one_round(job, case, index, generate) for index in range(1, job.rounds + 1)]
        found[case.name] = {
            "warmup_seconds": warmup_seconds,
            "seconds": [r.seconds for r in rounds],
            "mean_logprob": sum(r.mean_logprob for r in rounds) / len(rounds),
            "stats": rounds[-1].stats,
        }
    return found


def await_turn(folder: Path) -> None:
    """Says `ready`, and waits for `go`: both are files."""
    end = time.monotonic() + TURN_SECONDS
    (folder / READY).touch()
    while not (folder / GO).exists():
        if time.monotonic() > end:
            raise SystemExit(f"its turn did not come within {TURN_SECONDS} s")
        time.sleep(0.005)
    (folder / GO).unlink()


def _one_round(job: Job, case: Case, index: int, generate: Callable[[Case, list[list[int]]], Round]) -> Round:
    if job.turn:
        await_turn(Path(job.turn))
    done = generate(case, case.prompts(job.vocab_size, index))
    if done.lengths != case.lengths:
        raise SystemExit(f"{case.name}: wanted completions of {case.lengths} tokens, got {done.lengths}")
    what = f"round {index}" if index else "warm-up"
    say(f"{case.name}, {what}: {done.seconds:.2f} s, {case.num_tokens / done.seconds:,.0f} tokens/s")
    return done


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """The main function of a side. `run` returns what `decode.py` reads: `versions`, `start_seconds`, `cases`."""
    _, job, result = sys.argv
    Path(result).write_text(json.dumps(run(Job.read(job))))
