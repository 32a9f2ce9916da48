"""Chat templates compared with transformers, and incremental detokenization."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.bridge.incremental_text import IncrementalDetokenizer
from slipstream.errors import ConfigError, InvalidPrompt, Unsupported
from tests.http.fakes import completion, progress
from tests.http.served import TEMPLATE
from tests.tiny import write_tokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nyou are kind<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOLS = """{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}
{% for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
    {% if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
{% endfor %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{{- eos_token if not add_generation_prompt }}{{ style | default('plain') }}{{ dict(a=1).a }}"""
MESSAGES = [
    {"role": "user", "content": " hi <there> & 'you' "},
    {"role": "assistant", "content": "hé", "reasoning": "hm"},
    {"role": "skip", "content": "no"},
]


def directory(path, template, in_settings=False):
    write_tokenizer(path)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
    }
    if in_settings:
        settings["chat_template"] = template
    else:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, TOOLS], ids=["plain", "chatml", "tools"])
@pytest.mark.parametrize("in_settings", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path, template, in_settings, prompt):
    path = directory(tmp_path, template, in_settings)
    reference = AutoTokenizer.from_pretrained(path)
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b"}}]
    tokenizer, more = ChatTokenizer.read(path), {"style": "fancy"}
    wanted = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=prompt, **more)
    assert tokenizer.render_chat(MESSAGES, tools, more, prompt) == wanted
    ids = reference.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, return_dict=False, **more)
    assert list(tokenizer.encode_chat(4096, MESSAGES, tools, more, prompt)) == list(ids)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('system comes first') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% for _ in range(999999999) %}x{% endfor %}",
    ],
)
def test_a_template_that_raises_or_escapes_the_sandbox_is_an_error(tmp_path, template):
    with pytest.raises(InvalidPrompt):
        ChatTokenizer.read(directory(tmp_path, template)).render_chat(MESSAGES)


def test_invalid_messages_and_templates(tmp_path):
    tokenizer = ChatTokenizer.read(directory(tmp_path, TEMPLATE))
    for bad in ({}, {"role": 1}, {"role": "user", "content": 5}, {"role": "user", "content": [{"type": "image_url"}]}):
        with pytest.raises(InvalidPrompt, match=r"messages\[0\]"):
            tokenizer.encode_chat(4096, [bad])
    with pytest.raises(ConfigError, match="chat template"):
        ChatTokenizer.read(directory(tmp_path, "{% if %}"))
    with pytest.raises(Unsupported, match="no chat template"):
        ChatTokenizer().encode_chat(4096, MESSAGES)
    with pytest.raises(ConfigError, match="is not a directory"):
        ChatTokenizer.read(tmp_path / "nowhere")


# --- incremental detokenization --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Each token is a byte, so that characters come in pieces."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return tokenizer


@pytest.mark.parametrize("width", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("text", ["plain", "größer als 😀, größer", "  spaces  ", "日本語"])
def test_text_is_emitted_in_whole_characters(byte_tokenizer, text, width):
    tokens = byte_tokenizer.encode(text).ids
    detokenizer, emitted = IncrementalDetokenizer(ChatTokenizer(byte_tokenizer), ()), []
    for start in range(0, len(tokens), width):
        emitted.append(detokenizer.add(progress("r/0", start, tokens[start : start + width])).text)
        assert text.startswith("".join(emitted))
    emitted.append(detokenizer.finish(completion("r/0", tokens, text)).text)
    assert "".join(emitted) == text


def test_a_possible_stop_string_is_held_back(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(ChatTokenizer(byte_tokenizer), ("###", "END"))
    tokens = byte_tokenizer.encode("a#b##cEN").ids
    emitted = [detokenizer.add(progress("r/0", i, [token])).text for i, token in enumerate(tokens)]
    assert emitted == ["a", "", "#b", "", "", "##c", "", ""]
    assert detokenizer.finish(completion("r/0", [*tokens, 5], "a#b##c")).text == ""


def test_tokens_that_contradict_emitted_ones_begin_anew(byte_tokenizer):
    a, b, c, d = byte_tokenizer.encode("abcd").ids
    detokenizer = IncrementalDetokenizer(ChatTokenizer(byte_tokenizer), ())
    assert detokenizer.add(progress("r/0", 0, [a, b])).text == "ab"
    assert detokenizer.add(progress("r/0", 0, [a, b])) is None
    assert detokenizer.add(progress("r/0", 5, [d])) is None, "after a gap"
    other = detokenizer.add(progress("r/0", 0, [a, c]))
    assert (other.restarted, other.text, other.token_ids) == (True, "ac", (a, c))
    in_the_middle = detokenizer.add(progress("r/0", 1, [b, d]))
    assert (in_the_middle.restarted, in_the_middle.text, in_the_middle.token_ids) == (True, "", ())
    last = detokenizer.finish(completion("r/0", [a, b, d], "abd"))
    assert (last.restarted, last.text, last.token_ids) == (False, "abd", (a, b, d))
    assert detokenizer.add(progress("r/0", 0, [a, b])).text == "ab"
    shorter = detokenizer.finish(completion("r/0", [a], "a"))
    assert (shorter.restarted, shorter.text, shorter.token_ids) == (True, "a", (a,))
