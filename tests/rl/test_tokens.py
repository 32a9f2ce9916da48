import json

import pytest

from slipstream.errors import ConfigError
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import CHARACTERS, EOS, SPECIAL, sample_config, write_sample_config
from slipstream.rl.data.tokens import Codec


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    write_sample_config(path)
    return path


def test_characters_round_trip(directory):
    codec, text = Codec(directory), CHARACTERS + CHARACTERS[::-1]
    (ids,) = codec.answers([text])
    assert len(ids) == len(text) and codec.decode([ids]) == [text]
    assert len(set(ids)) == len(CHARACTERS) == sample_config().vocab_size - len(SPECIAL)


def test_prompts_begin_with_bos_and_answers_do_not(directory):
    codec, config = Codec(directory), sample_config()
    (prompt,), (answer,) = codec.prompts(["r12="]), codec.answers(["r12="])
    assert prompt == (config.bos_token_id, *answer)
    assert codec.decode([[*prompt, *config.eos_token_ids, config.pad_token_id]]) == ["r12="]


def test_transformers_reads_the_sample_directory(directory):
    from transformers import AutoConfig, AutoTokenizer

    assert read_config(directory) == sample_config()
    assert AutoConfig.from_pretrained(directory).model_type == "llama"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("r12=\n ~").input_ids == list(Codec(directory).prompts(["r12=\n ~"])[0])
    assert tokenizer.eos_token == EOS and (tokenizer.eos_token_id,) == sample_config().eos_token_ids
    assert tokenizer.pad_token_id == sample_config().pad_token_id
    assert json.loads((directory / "tokenizer_config.json").read_text())["bos_token"] == "<bos>"


def test_a_directory_without_tokenizer_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        Codec(tmp_path)
