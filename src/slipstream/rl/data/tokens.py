"""Tokenization in the trainer.

The trainer sends token ids, never text, and so trains on exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from slipstream.errors import ConfigError, InvalidPrompt
from slipstream.model.chat_template import TEMPLATE_FILE, TOKENIZER_FILE, ChatTemplate
from slipstream.rl.config import DataConfig, EnvironmentConfig, TaskConfig
from slipstream.rl.data.chat import Chat, Conversations


def codec_of(
    settings: TaskConfig | DataConfig | EnvironmentConfig,
    directory: str | Path,
    conversations: Conversations = MappingProxyType({}),
) -> Codec:
    """The codec of a task for the model in `directory`: plain prompts, or chat. `conversations` are the messages of prompts
    that stand for several."""
    if not settings.chat and not conversations:
        return Codec(directory)
    setting = "data.messages" if conversations else f"{type(settings).__name__.removesuffix('Config').lower()}.chat"
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(
            f"{setting} is set, but {directory} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
            f"{TOKENIZER_FILE}. For a base model, remove {setting}"
        )
    try:
        return Codec(directory, Chat(template, settings.system, conversations))
    except InvalidPrompt as error:  # the template rejects the messages of this task
        raise ConfigError(str(error)) from None


def chat_of(directory: str | Path) -> Chat | None:
    """The chat of a model that may have no template."""
    template = ChatTemplate.read(directory)
    return None if template is None else Chat(template)


class Codec:
    """Encodes prompts and answers and decodes completions, with the tokenizer of a model directory."""

    def __init__(self, directory: str | Path, chat: Chat | None = None) -> None:
        """With `chat`, every prompt is rendered as a conversation."""
        from tokenizers import Tokenizer

        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; training needs the model's tokenizer next to its config.json")
        self._tokenizer, self.chat = Tokenizer.from_file(str(path)), chat
        self.stops: tuple[int, ...] = self._end_of_turn(chat) if chat else ()
        """Stop tokens, besides the model's end-of-sequence tokens."""

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode prompts, with the special tokens that the model expects at the start."""
        if self.chat:
            return self.answers([self.chat.prompt(text) for text in texts])  # the template adds the special tokens
        return [tuple(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def answers(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode text without adding special tokens."""
        return [tuple(e.ids) for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode to text without special tokens."""
        return self._tokenizer.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=True)

    def _end_of_turn(self, chat: Chat) -> tuple[int, ...]:
        """The special token that the template puts after an answer, if any."""
        (ids,) = self.answers([chat.after_answer()])
        special = [i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]
        return ids[:1] if ids[:1] and ids[0] in special else ()
