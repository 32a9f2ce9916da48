"""A tiny model to try things with: a decoder over characters with random weights, a tokenizer and a chat template."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.model.checkpoints.hf_config import generation_config, to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.families import tensors
from slipstream.model.tree import unflatten

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slipstream.model.transformer.decoder import Params

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""ChatML in form; role markers are spelled in characters, and each message ends with the end-of-sequence token."""


def sample_config() -> ModelConfig:
    """Return the config of the demo's decoder, 152,384 parameters.

    Heads have 32 dimensions because vLLM's CPU attention supports none smaller; there are four because a single head does not
    learn to reverse digits."""
    return ModelConfig(
        family="llama",
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BOS),
        eos_token_ids=(SPECIAL.index(EOS),),
    )


def sample_params(config: ModelConfig, seed: int) -> Params:
    """Draw random weights for a model of this size: matrices normal with standard deviation 0.06, norms one.

    The usual 0.02 suits hidden sizes in the thousands; at 64 the layers' outputs would start near zero, and the warm-up
    would take twice as many steps. Drawn with numpy, because JAX would compile a program for every shape."""
    import jax.numpy as jnp
    import numpy as np

    rng, leaves = np.random.default_rng(seed), {}
    for spec in tensors(config):
        values = rng.normal(0.0, 0.06, spec.shape) if len(spec.shape) > 1 else np.ones(spec.shape)
        leaves[spec.name] = jnp.asarray(values.astype(np.float32))
    return unflatten(leaves)


def character_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per printable ASCII character; encoding prepends the beginning-of-sequence token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return tokenizer


def write_sample_model(directory: str | Path, *, seed: int = 0) -> ModelConfig:
    """Write a complete HF model directory: config, tokenizer, chat template and random weights drawn from `seed`."""
    from slipstream.model.checkpoints import hf_weights

    config = write_sample_config(directory)
    hf_weights.save(directory, sample_params(config, seed), config)
    return config


def write_sample_config(directory: str | Path) -> ModelConfig:
    """Write the same directory without weights, for a fleet whose first sync brings them."""
    directory, config = Path(directory), sample_config()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, contents in (
        ("config.json", to_hf(config)),
        ("generation_config.json", generation_config(config)),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / name).write_text(json.dumps(contents, indent=2) + "\n")
    character_tokenizer().save(str(directory / "tokenizer.json"))
    return config
