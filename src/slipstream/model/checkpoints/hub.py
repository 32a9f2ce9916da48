"""Models by name: `org/name` or `org/name@revision` comes from the Hugging Face Hub, through its cache.

`huggingface_hub` downloads, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean elsewhere. A directory
that exists is never looked up."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.errors import ConfigError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@[\w./-]+)?")
_DESCRIPTION = ("*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_COPIES = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")
"""The weights once more, in other formats."""


def hub_name(model: str | Path) -> str:
    """Return the name on the Hub, without a revision; empty if `model` is a directory."""
    found = _NAME.fullmatch(str(model))
    return "" if found is None or Path(model).exists() else found[1]


def absolute_model(model: str | Path) -> str:
    """Return what names the same model in another working directory."""
    return str(model) if hub_name(model) else str(Path(model).absolute())


def model_directory(model: str | Path, *, weights: bool = True) -> Path:
    """Return the directory of a model. What is missing of a model of the Hub is downloaded, with its `weights` or without."""
    if not hub_name(model):
        return Path(model)
    name, _, revision = str(model).partition("@")
    from huggingface_hub import constants, errors, snapshot_download

    hub, wanted = constants.ENDPOINT, [*_DESCRIPTION, "*.safetensors"] if weights else [*_DESCRIPTION]
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=[*_COPIES])
        )
    except errors.GatedRepoError:
        why = f"access to {name} must be granted; ask for it at {hub}/{name}, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = f"{hub} has no model {name}, or it is private; check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = f"{hub} has no revision {revision!r} of {name}"
    except (errors.HfHubHTTPError, OSError) as error:
        cannot = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"cannot be downloaded from {hub}: {_first(error)}"
        )
        why = f"it is not in the cache {constants.HF_HUB_CACHE}, and {cannot}"
    raise ConfigError(f"there is no directory {model}; as a model of the Hub: {why}")


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
