"""A file of prompts in, a file of completions out, line by line: what is there already is not done again.

In: a text per line; or JSON per line (`.jsonl`), where all but `prompt` may be missing, and settings of `SamplingParams` are
for this prompt alone. Out, a line for each prompt, in JSON:

    {"prompt": "text" or [token ids], "id": "mine", "max_tokens": 8, …}

    {"index": 3, "id": "mine", "key": "…",
     "completions": [{"text": …, "token_ids": […], "finish_reason": …, "version": …, "engine": …}]}
    {"index": 4, "id": "4", "key": "…", "error": {"kind": "InvalidPrompt", "message": …}}

`key` is a checksum of prompt and settings: a file of completions is gone on with only for the prompts that it was made of."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import xxhash

from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, SlipstreamError, to_wire
from slipstream.types import Completion, Prompt, SamplingParams, check_prompt, plain_ids

SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A line of the input."""

    index: int
    id: str
    prompt: Prompt
    sampling: SamplingParams
    key: str
    error: SlipstreamError | None = None
    """Why it is no prompt; then the fields between are of no use."""


def read_prompts(path: Path, sampling: SamplingParams, seed: int = 0) -> Iterator[PromptRow]:
    """`sampling` is for what a line does not say itself. A line without a seed has one made of `seed` and its index, so that it
    is completed alike whenever it is. Empty lines count, and are skipped."""
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    try:
        with open(path, encoding="utf-8") as file:
            for index, line in enumerate(file):
                if line.strip():
                    yield _row(index, line.rstrip("\r\n"), is_json, sampling, seed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts cannot be read from {path}: {error}") from None


def count_prompts(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"the prompts cannot be read from {path}: {error}") from None


def _row(index: int, line: str, is_json: bool, sampling: SamplingParams, seed: int) -> PromptRow:
    id = str(index)
    try:
        given = _fields(line) if is_json else {"prompt": line}
        id = str(given.pop("id", id))
        prompt = given.pop("prompt", None)
        if not isinstance(prompt, (str, list)):
            raise InvalidPrompt(f"line {index + 1}: prompt should be a text or a list of token ids, got {prompt!r:.80}")
        prompt = prompt if isinstance(prompt, str) else plain_ids(prompt)
        check_prompt(prompt)
        own = dataclasses.replace(sampling, **_settings(index, given))
        if own.seed is None:
            own = own.with_seed((seed + index) % 2**63)
        return PromptRow(index, id, prompt, own, _key(prompt, own))
    except SlipstreamError as error:
        return PromptRow(index, id, "", sampling, xxhash.xxh3_64_hexdigest(line.encode()), error)


def _fields(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPrompt(f"not a line of JSON ({error}): {line[:80]!r}") from None
    if not isinstance(found, dict):
        raise InvalidPrompt(f'a line should be an object like {{"prompt": "…"}}, got {line[:80]!r}')
    return found


def _settings(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(given.keys() - set(SETTINGS)):
        raise InvalidSampling(
            f"line {index + 1}: unknown field {unknown[0]!r}; known: id, prompt, {', '.join(SETTINGS)}"
        )
    found = dict(given)
    if isinstance(bias := found.get("logit_bias"), dict):  # JSON's keys are texts
        found["logit_bias"] = {int(token) if token.isdigit() else token: value for token, value in bias.items()}
    return found


def _key(prompt: Prompt, sampling: SamplingParams) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([prompt, dataclasses.astuple(sampling)]).encode())


class CompletionFile:
    """The output. One process at a time; a line is written whole or, if the machine dies, taken off by the next one."""

    def __init__(self, path: Path, *, ordered: bool = False, logprobs: bool = False) -> None:
        """With `ordered`, lines come in the order of the prompts, each held back until those before it are written."""
        self._path, self._ordered, self._logprobs = path, ordered, logprobs
        self._held: dict[int, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _locked(path, "ab+")
        self.done: dict[int, str] = {}
        """Of the prompts that have their completions: the key, by index."""
        self.num_skipped = 0
        """Prompts that were found to be done."""
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise

    def _take_up(self) -> None:
        """What a run before has left. Errors are taken off, to be tried again, and so is a line that it did not finish."""
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
                f"{self._path}, line {number + 1}, is no line of completions; choose another file to write to"
            ) from None
        if is_kept:
            self.done[index] = key
        return is_kept

    def missing(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        """Those that are not done. Raises `ConfigError` when the file was made of other prompts or settings."""
        for row in rows:
            key = self.done.get(row.index)
            if key is None:
                yield row
            elif key != row.key:
                raise ConfigError(
                    f"{self._path} holds the completion of another prompt {row.index}, or of other settings; "
                    "choose another file, or remove it"
                )
            else:
                self.num_skipped += 1

    def expect(self, row: PromptRow) -> None:
        """It is being sent: with `ordered`, its line comes behind those of the ones that were sent before."""
        if self._ordered:
            self._held[row.index] = ""

    def write(self, row: PromptRow, outcome: Sequence[Completion] | SlipstreamError) -> None:
        line = json.dumps({"index": row.index, "id": row.id, "key": row.key} | self._said(outcome)) + "\n"
        if not self._ordered:
            self._put(line)
            return
        self._held[row.index] = line
        while self._held and (first := self._held[next(iter(self._held))]):
            self._put(first)
            del self._held[next(iter(self._held))]

    def _said(self, outcome: Sequence[Completion] | SlipstreamError) -> dict[str, Any]:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locked(path: Path, mode: str) -> IO[bytes]:
    file = open(path, mode)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process is writing {path}; wait for it, or choose another file") from None
    return file
