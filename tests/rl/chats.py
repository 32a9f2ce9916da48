"""Chat models for tests: SmolLM2's template, and a tiny model with a matching tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.model.checkpoints.sample_model import write_sample_config

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chat_model(directory: Path, template: str = SMOLLM2) -> Path:
    """The demo's decoder over characters, two of whose special tokens are those of ChatML. The end of a turn is not the
    model's end of sequence."""
    config = write_sample_config(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    renamed = {"<bos>": "<|im_start|>", "<unk>": "<|im_end|>"}
    text = json.dumps(tokenizer)
    for old, new in renamed.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    (directory / "tokenizer.json").write_text(text)
    path = directory / "tokenizer_config.json"
    facts = json.loads(path.read_text()) | {"chat_template": template, "bos_token": "<|im_start|>"}
    path.write_text(json.dumps(facts | {"unk_token": "<|im_end|>"}))
    assert config.eos_token_ids == (2,)
    return directory
