"""Tiny models with the chat templates of Qwen3, Llama 3 and Gemma 3: random weights, and the families' own tokenizers if they
are at hand, or else small ones with the same special tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig

TEMPLATES = Path(__file__).with_name("chat_templates")
MERGES = ("t h", "th e", "i n", "e r", "a n", "o n", "r e", "an d", "o u", "s t", "l l", "Ġ t", "Ġt h", "Ġ a", "in g")
"""Merges of the small tokenizers: with them, text has several encodings, as with real ones."""


@dataclass(frozen=True)
class Family:
    specials: tuple[str, ...]
    end_of_turn: str
    bos: str | None = None
    has_tools: bool = False


FAMILIES = {
    "qwen3": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", has_tools=True),
    "llama3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "gemma3": Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<bos>"),
}


def write_chat_model(directory: Path, family: str, tokenizers: Path | None = None, context: int = 1024) -> Path:
    """Write config, tokenizer and template. `tokenizers` holds `FAMILY/tokenizer.json`."""
    from tokenizers import Tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    facts = FAMILIES[family]
    if tokenizers is not None:
        shutil.copy(tokenizers / family / "tokenizer.json", directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    else:
        tokenizer = small_tokenizer(facts.specials)
        tokenizer.save(str(directory / "tokenizer.json"))
    shutil.copy(TEMPLATES / f"{family}.jinja", directory / "chat_template.jinja")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": facts.end_of_turn, "bos_token": facts.bos}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_ids=(int(tokenizer.token_to_id(facts.end_of_turn) or 0),),
    )
    (directory / "config.json").write_text(json.dumps(to_hf(config)))
    return directory


def small_tokenizer(specials: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer
