"""Convert a GGUF file's tokenizer (byte-level BPE, as in GPT-2) to `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.model.checkpoints.gguf.file import GgufFile
from slipstream.model.checkpoints.gguf.weights import token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slipstream.model.config import ModelConfig

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(file: GgufFile, vocabulary: int) -> Tokenizer:
    """Build the tokenizer for `vocabulary` ids. Raise `ConfigError` with the name of an invalid field."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    if (model := file.string("tokenizer.ggml.model")) != "gpt2":
        raise file.error(f"field tokenizer.ggml.model is {model!r}; only byte-level BPE (gpt2) is supported")
    tokens, kinds = file.strings("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    if len(tokens) != vocabulary or len(kinds) != vocabulary:
        raise file.error(
            f"tokenizer.ggml.tokens and tokenizer.ggml.token_type have {len(tokens)} and {len(kinds)} entries, but the "
            f"embedding has {vocabulary} rows"
        )
    # Unused ids pad the embedding; HF tokenizers leave them out.
    used = [(token, i, kind) for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind != _UNUSED]
    vocab = {token: i for token, i, _ in used}
    if len(vocab) < len(used):
        twice = next(token for token, i, _ in used if vocab[token] != i)
        raise file.error(f"field tokenizer.ggml.tokens has {twice!r} twice")
    merges = _merges(file, vocab)
    pre_tokenizer, normalizer = _pre_tokenizer(file)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    for token, _, kind in used:
        if kind != _NORMAL and token:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind in (_UNKNOWN, _CONTROL))])
    ends = {key: token_id(file, key, vocabulary) for key in ("bos", "eos")}
    added = {key: i for key, i in ends.items() if i is not None and file.flag(f"tokenizer.ggml.add_{key}_token", False)}
    if added:
        named = [(tokens[i], i) for i in added.values()]
        parts = [tokens[added["bos"]] if "bos" in added else "", "$A", tokens[added["eos"]] if "eos" in added else ""]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in parts if part], special_tokens=sorted(set(named))
        )
    return tokenizer


def tokenizer_config(file: GgufFile, config: ModelConfig) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`."""
    tokens = file.strings("tokenizer.ggml.tokens")
    special = {name: token_id(file, key, len(tokens)) for name, key in _SPECIAL.items()}
    settings: dict[str, Any] = {
        # This class uses tokenizer.json unchanged; others replace its pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    settings |= {name: tokens[i] for name, i in special.items() if i is not None}
    if file.has("tokenizer.chat_template"):
        settings["chat_template"] = file.string("tokenizer.chat_template")
    return settings


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(file.strings("tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise file.error(
                f"field tokenizer.ggml.merges: number {index}, {merge!r}, does not join two tokens to a third"
            )
        merges.append((left, right))
    return merges


def _pre_tokenizer(file: GgufFile) -> tuple[Any, Any]:
    """Return the pre-tokenizer, and the normalizer or None."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    def byte_level(use_regex: bool) -> Any:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

    name = file.string("tokenizer.ggml.pre", "default")
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]), None
    if name == "gpt-2":
        return byte_level(True), None
    if name == "qwen2":
        split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        return pre_tokenizers.Sequence([split, byte_level(False)]), normalizers.NFC()
    raise file.error(f"field tokenizer.ggml.pre is {name!r}; supported: smollm, gpt-2, qwen2")
