"""Text to tokens on the trainer's side, and the small model of the demo: a decoder over characters.

The trainer sends token ids, never text: what it trains on is then exactly what the engine saw."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.tree import unflatten
from slipstream.weights.families import tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slipstream.model.decoder import Params
    from slipstream.rl.chat import Chat

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def small_model() -> ModelConfig:
    """The demo's decoder, 152,384 parameters. Heads of 32 because vLLM's CPU attention takes none smaller; one head alone
    does not learn to reverse."""
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


def init_small(config: ModelConfig, seed: int) -> Params:
    """Random weights for a model of this size: matrices normal with deviation 0.06, norms one.

    The usual deviation of 0.02 is meant for hidden sizes of thousands: at 64 every layer would start close to silence,
    and the warm-up would take twice as many steps. Drawn by numpy, since JAX compiles a program for every shape."""
    import jax.numpy as jnp
    import numpy as np

    rng, leaves = np.random.default_rng(seed), {}
    for spec in tensors(config):
        values = rng.normal(0.0, 0.06, spec.shape) if len(spec.shape) > 1 else np.ones(spec.shape)
        leaves[spec.name] = jnp.asarray(values, jnp.float32)
    return unflatten(leaves)


def character_tokenizer() -> Tokenizer:
    """One token per printable ASCII character; encoding puts the beginning-of-sequence token in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return tokenizer


def write_small_model(directory: str | Path) -> ModelConfig:
    """An HF model directory without weights: config.json, tokenizer.json, tokenizer_config.json."""
    directory, config = Path(directory), small_model()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    character_tokenizer().save(str(directory / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")
    return config


class Codec:
    """Encodes prompts and answers, decodes completions, with the tokenizer of a model directory."""

    def __init__(self, directory: str | Path, chat: Chat | None = None) -> None:
        """`chat` makes a conversation of every prompt; without, prompts are encoded as they are."""
        from tokenizers import Tokenizer

        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; training needs the model's tokenizer beside its config.json")
        self._tokenizer, self._chat = Tokenizer.from_file(str(path)), chat
        self.stops: tuple[int, ...] = self._end_of_turn(chat) if chat else ()
        """Tokens that end an answer, beside the model's own end-of-sequence tokens."""

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """With the special tokens that the model expects in front."""
        if self._chat:
            return self.answers([self._chat.prompt(text) for text in texts])  # the template has put them there
        return [tuple(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def answers(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Without special tokens."""
        return [tuple(e.ids) for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Text without special tokens."""
        return self._tokenizer.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=True)

    def _end_of_turn(self, chat: Chat) -> tuple[int, ...]:
        """The special token that the template puts behind an answer; none where it puts no such token there."""
        (ids,) = self.answers([chat.after_answer()])
        special = [i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]
        return ids[:1] if ids[:1] and ids[0] in special else ()
