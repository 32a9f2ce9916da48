"""Shape and weights of tiny models of any architecture, for transformers."""

from __future__ import annotations

from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
PROMPT = (5, 6, 7)


def new_weights(model: Any, seed: int) -> None:
    """Weights large enough that logits differ. Left at zero and one, biases and norms that are not loaded would pass."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.data.copy_(0.2 * noise if parameter.ndim > 1 else 1 + 0.3 * noise if is_norm else 0.5 * noise)
