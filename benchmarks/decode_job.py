"""Shared by the sides of `decode.py`: cases, rounds, and the files for jobs and results.

A side is a script, `decode_<side>.py JOB RESULT`, which reads the job, runs it, and writes the result. Lines printed by
`say` are shown while it runs. This module needs only the standard library, because each side runs in its own
environment."""

from __future__ import annotations

import functools
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
    prompt_lengths: list[int]
    """By prompt. Consecutive samples share a prompt, `group` at a time."""
    temperature: float = 1.0
    logprobs: bool = True
    """Whether vLLM is asked for logprobs. The embedded engine always returns them."""
    walks: bool = False
    """Prompts and completions follow `walk`, and completions are compared with it. Otherwise, prompts are random."""
    goal: float | None = None
    """Minimum ratio of the embedded engine's tokens per second to vLLM's."""

    @property
    def group(self) -> int:
        return len(self.lengths) // len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def sampling(self) -> list[dict[str, Any]]:
        """Return the sampling parameters of each sample, which have the same names everywhere."""
        return [{"max_tokens": n, "temperature": self.temperature, "ignore_eos": True} for n in self.lengths]

    def prompts(self, num_ids: int, round_index: int) -> list[list[int]]:
        """Return one prompt per sample. They differ between rounds, so that no prefix cache contains them."""
        if self.walks:
            return [quoting_prompt(answer, num_ids) for answer in self.answers(num_ids, round_index)]
        source = random.Random(f"{self.name} {round_index}")
        distinct = [source.choices(range(num_ids), k=length) for length in self.prompt_lengths]
        return [distinct[i // self.group] for i in range(len(self.lengths))]

    def answers(self, num_ids: int, round_index: int) -> list[list[int]]:
        """Return the completions of a case that `walks`."""
        source, tokens = random.Random(f"{self.name} {round_index}"), walk(num_ids)
        starts = [source.randrange(num_ids) for _ in self.lengths]
        return [[tokens[(start + i) % num_ids] for i in range(n)] for start, n in zip(starts, self.lengths)]


@functools.cache
def walk(num_ids: int) -> list[int]:
    """Return all tokens in the order in which a model of `decode_workloads.write_walking_model` generates them, in a circle."""
    tokens = list(range(num_ids))
    random.Random(0).shuffle(tokens)
    return tokens


BLOCK, QUOTED = 64, 48
"""Of each `BLOCK` tokens of an answer, the first `QUOTED` are in its prompt."""


def quoting_prompt(answer: list[int], num_ids: int) -> list[int]:
    """Return a prompt which this answer quotes, and whose last token it follows in the walk."""
    tokens = walk(num_ids)
    quoted = [token for i, token in enumerate(answer) if i % BLOCK < QUOTED]
    return [*quoted, tokens[tokens.index(answer[0]) - 1]]


@dataclass(frozen=True)
class Job:
    directory: str
    """HF directory of the model."""
    dtype: Literal["float32", "bfloat16"]
    num_ids: int
    """Prompts consist of token ids below this."""
    rounds: int
    """Measured rounds, which follow one warm-up round."""
    cases: list[Case]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this side."""
    turn: str = ""
    """Folder for `await_turn`, which precedes every round; empty to run without waiting."""

    @property
    def max_model_len(self) -> int:
        return max(max(case.prompt_lengths) + max(case.lengths) for case in self.cases)

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
    token_ids: list[list[int]]
    """The generated tokens, by sample."""
    mean_logprob: float | None
    """Mean logprob, before temperature, that this side reports for its tokens; None without logprobs. Sides that sample from
    the same model agree."""
    stats: dict[str, Any] = field(default_factory=dict)
    """The engine's statistics for this round."""


def say(text: str) -> None:
    print(PROGRESS_PREFIX + text, flush=True)


def run_rounds(
    job: Job, generate: Callable[[Case, list[list[int]]], Round], warm_up: Callable[[Case], None] | None = None
) -> dict[str, Any]:
    """Run `job.rounds` measured rounds of each case, after `warm_up`, or after an unmeasured round if it is None.

    Exits if the side generated a different number of tokens than requested, or other tokens than `Case.answers`."""
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
            "mean_logprob": mean([r.mean_logprob for r in rounds if r.mean_logprob is not None]),
            "stats": rounds[-1].stats,
        }
    return results


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
    done = generate(case, case.prompts(job.num_ids, index))
    lengths = [len(tokens) for tokens in done.token_ids]
    if lengths != case.lengths:
        raise SystemExit(f"{case.name}: expected completions of {case.lengths} tokens, got {lengths}")
    if case.walks and done.token_ids != case.answers(job.num_ids, index):
        raise SystemExit(f"{case.name}: the completions differ from the walk that the weights prescribe")
    what = f"round {index}" if index else "warm-up"
    say(f"{case.name}, {what}: {done.seconds:.2f} s, {case.num_tokens / done.seconds:,.0f} tokens/s")
    return done


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Main function of a side. `run` returns the keys that `decode.py` reads: `versions`, `start_seconds`, `cases`."""
    imported = time.monotonic()  # one clock for all processes
    _, job, result = sys.argv
    Path(result).write_text(json.dumps({"imported": imported, **run(Job.read(job))}))
