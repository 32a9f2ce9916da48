"""What an engine must know of a model that another program computes, such as vLLM, which knows more models than our decoder.

Of a model that is not in `families`, the tensors are those of its checkpoint. Without weights, `transformers` is asked."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, UnknownArchitecture
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import num_labels, read_config, read_json, token_ids, with_generation_ends
from slipstream.model.config import ModelConfig
from slipstream.tensors.safetensors_dir import stored_tensors
from slipstream.types import TensorSpec


@dataclass(frozen=True)
class ServedModel:
    """A model by its tensors."""

    kind: str
    """`model_type` in `config.json`."""
    tensors: tuple[TensorSpec, ...]
    """The tensors of the checkpoint, which a trainer must provide."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Dtype of the checkpoint's weights."""
    config: ModelConfig | None = None
    """What our decoder would compute it with; None if it does not know the architecture."""
    num_labels: int = 0
    """Outputs of a model for sequence classification, such as a reward model; 0 for a language model."""

    def fingerprint(self) -> str:
        """Return a hash that is equal for models with interchangeable weights."""
        if self.config is not None:
            return self.config.fingerprint()
        shapes = json.dumps(sorted((t.name, t.shape) for t in self.tensors))
        return f"{self.kind}-{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


def served_model(directory: str | Path) -> ServedModel:
    """Read a model directory. Raise `ConfigError` if its tensors cannot be known."""
    try:
        config = read_config(directory)
    except UnknownArchitecture as unknown:
        return _by_tensors(Path(directory), unknown)
    tensors = families.tensors(config)
    ends, labels = config.eos_token_ids, config.num_labels
    return ServedModel(config.family, tensors, config.vocab_size, ends, config.dtype, config, labels)


def _by_tensors(directory: Path, unknown: UnknownArchitecture) -> ServedModel:
    hf = read_json(directory / "config.json")
    if hf.get("quantization_config"):
        raise ConfigError("config.json: quantized checkpoints are not supported; use an unquantized one")
    text = hf.get("text_config")
    settings = {
        **(text if isinstance(text, Mapping) else {}),
        **{n: value for n, value in hf.items() if value is not None},
    }
    if any(directory.glob("*.safetensors")):
        stored = stored_tensors(directory)
        tensors = {name: tensor.shape for name, tensor in stored.items()}
        ((dtype, _),) = Counter(str(tensor.dtype) for tensor in stored.values()).most_common(1)
    else:
        tensors, dtype = _tensors_of_transformers(directory, unknown), "float32"
    return ServedModel(
        kind=str(hf.get("model_type")),
        tensors=tuple(TensorSpec(name, shape) for name, shape in tensors.items()),
        vocab_size=int(settings.get("vocab_size") or 0),
        eos_token_ids=with_generation_ends(directory, token_ids(settings.get("eos_token_id"))),
        dtype=str(settings.get("dtype") or settings.get("torch_dtype") or dtype).removeprefix("torch."),
        num_labels=num_labels(hf),
    )


def _tensors_of_transformers(directory: Path, unknown: UnknownArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the tensors that `transformers` would save, without allocating the model."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"{unknown}. Its tensors are not known here: {directory} has no weights, and transformers is not installed"
        ) from None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, local_files_only=True))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{unknown}. transformers does not know its tensors either: {error}") from None
    return {name: tuple(tensor.shape) for name, tensor in as_stored(model, dict(model.named_parameters())).items()}


def as_stored(module: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a torch module as its checkpoint has them: transformers 5 renames some, and fuses experts."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return parameters
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return parameters
    return dict(revert_weight_conversion(module, parameters))
