"""The text of single tokens, such that the pieces of a sequence joined are its text."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.lru_cache(maxsize=4)
def token_bytes(path: Path, stamp: float) -> Callable[[int], bytes]:
    """A function from token ids to bytes, by a tokenizer.json that was changed at the time `stamp`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    added = {id: token.content.encode() for id, token in tokenizer.get_added_tokens_decoder().items()}
    is_byte_level = "ByteLevel" in _kinds(tokenizer)

    @functools.lru_cache(maxsize=1 << 18)
    def piece(token: int) -> bytes:
        if token in added:
            return added[token]
        text = tokenizer.id_to_token(token)
        if text is None:
            return f"<{token}>".encode()
        if is_byte_level and (raw := _from_byte_level(text)) is not None:
            return raw
        if match := _BYTE.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    return piece


def pieces(tokens: Sequence[int], to_bytes: Callable[[int], bytes]) -> list[str]:
    """The text of each token. A character whose bytes several tokens share is in the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    whole: dict[int, str | None] = {}  # by token: its text, None if that is not whole characters
    found: list[str] = []
    is_open = False  # the last token ended in the middle of a character
    for token in tokens:
        if token not in whole:
            try:
                whole[token] = to_bytes(token).decode()
            except UnicodeDecodeError:
                whole[token] = None
        text = whole[token]
        if text is None or is_open:
            text = decoder.decode(to_bytes(token))
            is_open = bool(decoder.getstate()[0])
        found.append(text)
    if found and (rest := decoder.decode(b"", final=True)):
        found[-1] += rest
    return found


def _kinds(tokenizer: Tokenizer) -> str:
    """The names of the decoder's parts."""
    return repr(tokenizer.decoder) if tokenizer.decoder is not None else ""


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _from_byte_level(text: str) -> bytes | None:
    alphabet = _alphabet()
    return bytes(alphabet[c] for c in text) if all(c in alphabet for c in text) else None


def unknown(token: int) -> bytes:
    """The piece of a token if there is no tokenizer."""
    return f"<{token}>".encode()
