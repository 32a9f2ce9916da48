import json

import pytest

from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.rl.tokens import CHARACTERS, EOS, SPECIAL, Codec, small_model, write_small_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    write_small_model(path)
    return path


def test_every_character_is_a_token_and_comes_back(directory):
    codec, text = Codec(directory), CHARACTERS + CHARACTERS[::-1]
    (ids,) = codec.answers([text])
    assert len(ids) == len(text) and codec.decode([ids]) == [text]
    assert len(set(ids)) == len(CHARACTERS) == small_model().vocab_size - len(SPECIAL)


def test_prompts_begin_with_bos_and_answers_do_not(directory):
    codec, config = Codec(directory), small_model()
    (prompt,), (answer,) = codec.prompts(["r12="]), codec.answers(["r12="])
    assert prompt == (config.bos_token_id, *answer)
    assert codec.decode([[*prompt, *config.eos_token_ids, config.pad_token_id]]) == ["r12="]


def test_the_directory_is_one_that_our_config_and_transformers_read(directory):
    from transformers import AutoConfig, AutoTokenizer

    assert ModelConfig.read(directory) == small_model()
    assert AutoConfig.from_pretrained(directory).model_type == "llama"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("r12=\n ~").input_ids == list(Codec(directory).prompts(["r12=\n ~"])[0])
    assert tokenizer.eos_token == EOS and (tokenizer.eos_token_id,) == small_model().eos_token_ids
    assert tokenizer.pad_token_id == small_model().pad_token_id
    assert json.loads((directory / "tokenizer_config.json").read_text())["bos_token"] == "<bos>"


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        Codec(tmp_path)
