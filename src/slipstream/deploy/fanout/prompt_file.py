"""The files of a fan-out: prompts in, completions out, one per line. Prompts that have completions already are skipped.

Input lines are text, or JSON in a `.jsonl` file. In JSON only `prompt` is required; settings of `SamplingParams` apply to this
prompt only:

    {"prompt": "text" or [token ids], "id": "mine", "max_tokens": 8, …}

Output lines are JSON, one per prompt:

    {"index": 3, "id": "mine", "key": "…",
     "completions": [{"text": …, "token_ids": […], "finish_reason": …, "version": …, "engine": …}]}
    {"index": 4, "id": "4", "key": "…", "error": {"kind": "InvalidPrompt", "message": …}}

`key` is a checksum of prompt and settings. A run resumes only with the prompts and settings that the file was made with."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, SlipstreamError, to_wire
from slipstream.types import Completion, Prompt, SamplingParams, check_prompt, plain_ids

SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line of the input."""

    index: int
    id: str
    prompt: Prompt
    sampling: SamplingParams
    key: str
    error: SlipstreamError | None = None
    """Why the line is not a valid prompt; `prompt` and `sampling` are then meaningless."""


def read_prompts(path: Path, sampling: SamplingParams, seed: int = 0) -> Iterator[PromptRow]:
    """Read prompts. `sampling` holds the defaults. A line without a seed gets one derived from `seed` and its index, so that a
    resumed run gives the same completions. Empty lines are skipped, but count in the index."""
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    try:
        with open(path, encoding="utf-8") as file:
            for index, line in enumerate(file):
                if line.strip():
                    yield _row(index, line.rstrip("\r\n"), is_json, sampling, seed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None


def count_prompts(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None


def _row(index: int, line: str, is_json: bool, sampling: SamplingParams, seed: int) -> PromptRow:
    id = str(index)
    try:
        given = _fields(line) if is_json else {"prompt": line}
        id = str(given.pop("id", id))
        prompt = given.pop("prompt", None)
        if not isinstance(prompt, (str, list)):
            raise InvalidPrompt(f"line {index + 1}: prompt must be a string or a list of token ids, got {prompt!r:.80}")
        prompt = prompt if isinstance(prompt, str) else plain_ids(prompt)
        check_prompt(prompt)
        row_sampling = dataclasses.replace(sampling, **_settings(index, given))
        if row_sampling.seed is None:
            row_sampling = row_sampling.with_seed((seed + index) % 2**63)
        return PromptRow(index, id, prompt, row_sampling, _key(prompt, row_sampling))
    except SlipstreamError as error:
        return PromptRow(index, id, "", sampling, xxhash.xxh3_64_hexdigest(line.encode()), error)


def _fields(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"the line is not JSON ({error}): {line[:80]!r}") from None
    if not isinstance(found, dict):
        raise InvalidPrompt(f'a line must be an object like {{"prompt": "…"}}, got {line[:80]!r}')
    return found


def _settings(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(given.keys() - set(SETTINGS)):
        raise InvalidSampling(
            f"line {index + 1}: unknown field {unknown[0]!r}; known: id, prompt, {', '.join(SETTINGS)}"
        )
    found = dict(given)
    if isinstance(bias := found.get("logit_bias"), dict):  # keys are strings in JSON
        found["logit_bias"] = {int(token) if token.isdigit() else token: value for token, value in bias.items()}
    return found


def _key(prompt: Prompt, sampling: SamplingParams) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([prompt, dataclasses.astuple(sampling)]).encode())


class CompletionFile:
    """The output file, locked for one process. A line that was cut off by a crash is removed by the next run."""

    def __init__(self, path: Path, *, ordered: bool = False, logprobs: bool = False) -> None:
        """With `ordered`, lines are written in the order of the prompts; each waits for those before it."""
        self._path, self._ordered, self._logprobs = path, ordered, logprobs
        self._held: dict[int, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _locked(path, "ab+")
        self.done: dict[int, str] = {}
        """Keys of the completed prompts by index."""
        self.num_skipped = 0
        """Number of prompts that were already completed."""
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _resume(self) -> None:
        """Load the output of an earlier run. Remove errors, whose prompts are tried again, and an unfinished last line."""
        self._file.seek(0)
        if all(self._is_kept(number, line) for number, line in enumerate(self._file)):
            return
        beside = self._path.with_name(self._path.name + ".part")
        part = _locked(beside, "wb")
        self._file.seek(0)
        part.writelines(line for number, line in enumerate(self._file) if self._is_kept(number, line))
        part.flush()
        os.fsync(part.fileno())
        beside.replace(self._path)
        self._file.close()
        self._file = part

    def _is_kept(self, number: int, line: bytes) -> bool:
        if not line.endswith(b"\n"):
            return False
        try:
            row = json.loads(line)
            index, key, is_kept = int(row["index"]), str(row["key"]), "completions" in row
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"line {number + 1} of {self._path} is not a line of completions; choose another output file"
            ) from None
        if is_kept:
            self.done[index] = key
        return is_kept

    def missing(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        """Yield rows that are not completed. Raise `ConfigError` if the file was made with other prompts or settings."""
        for row in rows:
            key = self.done.get(row.index)
            if key is None:
                yield row
            elif key != row.key:
                raise ConfigError(
                    f"{self._path} was made with another prompt {row.index} or other settings; choose another output file, "
                    "or remove it"
                )
            else:
                self.num_skipped += 1

    def expect(self, row: PromptRow) -> None:
        """Reserve the place of a row that is being sent; used with `ordered`."""
        if self._ordered:
            self._held[row.index] = ""

    def write(self, row: PromptRow, outcome: Sequence[Completion] | SlipstreamError) -> None:
        line = json.dumps({"index": row.index, "id": row.id, "key": row.key} | self._fields(outcome)) + "\n"
        if not self._ordered:
            self._put(line)
            return
        self._held[row.index] = line
        while self._held and (first := self._held[next(iter(self._held))]):
            self._put(first)
            del self._held[next(iter(self._held))]

    def _fields(self, outcome: Sequence[Completion] | SlipstreamError) -> dict[str, Any]:
        if isinstance(outcome, SlipstreamError):
            kind, message = to_wire(outcome)
            return {"error": {"kind": kind, "message": message}}
        names = ("text", "token_ids", "finish_reason", "version", "engine", *(("logprobs",) if self._logprobs else ()))
        return {"completions": [{name: getattr(c, name) for name in names} for c in outcome]}

    def _put(self, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> CompletionFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path, mode: str) -> IO[bytes]:
    file = open(path, mode)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process is writing {path}; wait for it, or choose another file") from None
    return file
