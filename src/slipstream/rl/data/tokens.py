"""Tokenization in the trainer.

The trainer sends token ids, never text, and so trains on exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import ConfigError, InvalidPrompt
from slipstream.model.chat_template import TEMPLATE_FILE, TOKENIZER_FILE, ChatTemplate
from slipstream.rl.config import TaskConfig
from slipstream.rl.data.chat import Chat


def codec_of(task: TaskConfig, directory: str | Path) -> Codec:
    """The codec of a task for the model in `directory`: plain prompts, or chat."""
    if not task.chat:
        return Codec(directory)
    template = ChatTemplate.read(directory)
    if template is None:
        raise ConfigError(
            f"task.chat is set, but {directory} has no chat template: neither {TEMPLATE_FILE} nor chat_template in "
            f"{TOKENIZER_FILE}. For a base model, remove task.chat"
        )
    try:
        return Codec(directory, Chat(template, task.system))
    except InvalidPrompt as error:  # the template rejects the messages of this task
        raise ConfigError(str(error)) from None


class Codec:
    """Encodes prompts and answers and decodes completions, with the tokenizer of a model directory."""

    def __init__(self, directory: str | Path, chat: Chat | None = None) -> None:
        """With `chat`, every prompt is rendered as a conversation."""
        from tokenizers import Tokenizer

        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; training needs the model's tokenizer next to its config.json")
        self._tokenizer, self._chat = Tokenizer.from_file(str(path)), chat
        self.stops: tuple[int, ...] = self._end_of_turn(chat) if chat else ()
        """Stop tokens, besides the model's end-of-sequence tokens."""

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode prompts, with the special tokens that the model expects at the start."""
        if self._chat:
            return self.answers([self._chat.prompt(text) for text in texts])  # the template adds the special tokens
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
