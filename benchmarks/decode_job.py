"""Shared by the sides of `decode.py`: cases, rounds, and the files for jobs and results.

A side is a script, `decode_<side>.py JOB RESULT`, which reads the job, runs it, and writes the result. Lines printed by
`say` are shown while it runs. This module needs only the standard library, because each side runs in its own
environment."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PROGRESS_PREFIX = "decode> "
"""Prefix of progress lines. Other output of a side is shown only if the side fails."""

READY, GO, TURN_SECONDS = "ready", "go", 900


@dataclass(frozen=True)
class Case:
    """A workload: prompts, and completion lengths."""

    name: str
    lengths: list[int]
    """Exact number of tokens to generate, by sample."""
    group: int
    """Consecutive samples that share a prompt."""
    prompt_tokens: int

    @property
    def num_prompts(self) -> int:
        return len(self.lengths) // self.group

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def prompts(self, vocab_size: int, round_index: int) -> list[list[int]]:
        """Return one prompt per sample. They differ between rounds, so that no prefix cache contains them."""
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
    """Measured rounds, which follow one warm-up round."""
    cases: list[Case]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this side."""
    turn: str = ""
    """Folder for `await_turn`, which precedes every round; empty to run without waiting."""

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
    """Number of generated tokens, by sample."""
    mean_logprob: float
    """Mean logprob that this side reports for its tokens. Sides that sample from the same model agree."""
    stats: dict[str, Any] = field(default_factory=dict)
    """The engine's statistics for this round."""


def say(text: str) -> None:
    print(PROGRESS_PREFIX + text, flush=True)


def run_rounds(
    job: Job, generate: Callable[[Case, list[list[int]]], Round], warm_up: Callable[[Case], None] | None = None
) -> dict[str, Any]:
    """Run `job.rounds` measured rounds of each case, after `warm_up`, or after an unmeasured round if it is None.

    Exits if the side generated a different number of tokens than requested."""
    results = {}
    for case in job.cases:
        start = time.perf_counter()
        if warm_up is None:
            _one_round(job, case, 0, generate)
        else:
            warm_up(case)
        warmup_seconds = time.perf_counter() - start
        rounds = [_one_round(job, case, index, generate) for index in range(1, job.rounds + 1)]
        results[case.name] = {
            "warmup_seconds": warmup_seconds,
            "seconds": [r.seconds for r in rounds],
            "mean_logprob": sum(r.mean_logprob for r in rounds) / len(rounds),
            "stats": rounds[-1].stats,
        }
    return results


def await_turn(folder: Path) -> None:
    """Create the file `ready`, and wait for the file `go`."""
    end = time.monotonic() + TURN_SECONDS
    (folder / READY).touch()
    while not (folder / GO).exists():
        if time.monotonic() > end:
            raise SystemExit(f"no {folder / GO} within {TURN_SECONDS} s")
        time.sleep(0.005)
    (folder / GO).unlink()


def _one_round(job: Job, case: Case, index: int, generate: Callable[[Case, list[list[int]]], Round]) -> Round:
    if job.turn:
        await_turn(Path(job.turn))
    done = generate(case, case.prompts(job.vocab_size, index))
    if done.lengths != case.lengths:
        raise SystemExit(f"{case.name}: expected completions of {case.lengths} tokens, got {done.lengths}")
    what = f"round {index}" if index else "warm-up"
    say(f"{case.name}, {what}: {done.seconds:.2f} s, {case.num_tokens / done.seconds:,.0f} tokens/s")
    return done


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Main function of a side. `run` returns the keys that `decode.py` reads: `versions`, `start_seconds`, `cases`."""
    _, job, result = sys.argv
    Path(result).write_text(json.dumps(run(Job.read(job))))
