"""The rows of a dataset: JSONL and Parquet files, and datasets of the Hugging Face Hub.

`datasets` downloads from the Hub, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hub import hub_name

Row: TypeAlias = Mapping[str, Any]


def read_rows(path: str, subset: str = "", split: str = "train") -> list[Row]:
    """Read a file, or a split of a Hub dataset. Raises `ConfigError` unless there is at least one row."""
    if Path(path).is_dir():
        raise ConfigError(f"data.path {path} is a directory; name one file, or convert them to one")
    if Path(path).exists() or not hub_name(path):
        rows = _read_file(Path(path))
    else:
        rows = _read_hub(path, subset, split)
    if not rows:
        raise ConfigError(f"{path} is empty: it has no rows to train on")
    return rows


def _read_file(path: Path) -> list[Row]:
    if not path.exists():
        raise ConfigError(
            f"data.path {path} does not exist, neither in {Path.cwd()} nor beside the TOML file; as a dataset of the Hub it "
            "would be org/name"
        )
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ConfigError(
        f"{path} is neither JSONL nor Parquet: its name ends in {path.suffix!r}, not in .jsonl or .parquet"
    )


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number} is not JSON: {error}: {line.strip():.80}") from None
                if not isinstance(row, dict):
                    raise ConfigError(
                        f"{path}, line {number} is not an object with columns, but {type(row).__name__}: {line.strip():.80}"
                    )
                rows.append(row)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 after line {len(rows)}: {error}") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{path} is a Parquet file, and reading it needs pyarrow; install it with: pip install 'slipstream-rl[parquet]'"
        ) from None
    try:
        return _plain(parquet.read_table(path).to_pylist())
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from None


def _read_hub(path: str, subset: str, split: str) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"there is no file {path}; as a dataset of the Hub it needs the package datasets; install it with: pip install "
            "'slipstream-rl[datasets]'"
        ) from None
    from huggingface_hub import constants

    name, _, revision = path.partition("@")
    try:
        return _plain(datasets.load_dataset(name, subset or None, split=split, revision=revision or None).to_list())
    except ValueError as error:  # an unknown split or subset; the message lists those there are
        raise ConfigError(f"dataset {path} of the Hub: {error}") from None
    except (
        Exception
    ) as error:  # what is raised depends on the layer that failed: datasets, huggingface_hub, fsspec, httpx
        first = (str(error).splitlines() or [type(error).__name__])[0]
        cannot = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} did not give it: {first}"
        )
        raise ConfigError(
            f"there is no file {path}; as a dataset of the Hub it is not in the cache, and {cannot}. Check the name, and set "
            "HF_TOKEN if it is private or gated"
        ) from None


def _plain(rows: Any) -> list[Row]:
    """Rows with JSON values only, as reward functions in other processes get them: times and bytes become text."""
    return list(json.loads(json.dumps(rows, default=str)))
