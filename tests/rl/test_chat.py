"""Prompts through a chat template, held against `transformers`; and a run of the examples' shape with a tiny model."""

import json
from pathlib import Path

import pytest

from slipstream.config import load
from slipstream.demo import run_train
from slipstream.errors import ConfigError
from slipstream.model.chat import ChatTemplate
from slipstream.rl.chat import Chat, codec_of
from slipstream.rl.config import TaskConfig, TrainConfig
from slipstream.rl.records import Evaluation, StepRecord, read_records
from slipstream.rl.tokens import Codec
from tests.rl import gyms
from tests.rl.chats import SMOLLM2, write_chat_model

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA3 = """{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n' + message['content'] | trim + eos_token }}
    {%- if loop.last and message['role'] == 'tool' %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n' }}
{%- endif %}
"""


@pytest.fixture
def directory(tmp_path):
    return write_chat_model(tmp_path / "model")


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3, "{{ messages | tojson(indent=1) }}<{{ 'ä' | tojson }}>"])
@pytest.mark.parametrize("system", ["", "Answer with the number only. <b>"])
def test_a_template_is_rendered_as_transformers_does(tmp_path, template, system):
    from transformers import AutoTokenizer

    directory = write_chat_model(tmp_path / "model", template)
    reference = AutoTokenizer.from_pretrained(directory)
    told = [{"role": "system", "content": system}] if system else []
    chat = [*told, {"role": "user", "content": "What is 2 + 3?"}]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert Chat(ChatTemplate.read(directory), system).prompt(" What is 2 + 3?\n") == expected
    ids = reference(expected, add_special_tokens=False).input_ids
    assert codec_of(TaskConfig(chat=True, system=system), directory).prompts(["What is 2 + 3?\n"]) == [tuple(ids)]


def test_a_template_in_a_file_of_its_own_is_the_one_that_counts(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert Chat(ChatTemplate.read(directory)).prompt("1+1") == "1+1<eos>"


def test_of_several_templates_the_default_one_is_taken(directory):
    path = directory / "tokenizer_config.json"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    path.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "<eos>"}}))
    template = ChatTemplate.read(directory)
    assert template.source == "yes" and template.special_tokens == {"eos_token": "<eos>"}


def test_the_token_behind_an_answer_ends_it(directory):
    codec = codec_of(TaskConfig(chat=True), directory)
    (end,) = codec.stops
    assert codec.answers(["<|im_end|>"]) == [(end,)] and codec.decode([(end,)]) == [""]
    assert Codec(directory).stops == ()
    plain = write_chat_model(directory.parent / "plain", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert codec_of(TaskConfig(chat=True), plain).stops == ()  # the model's own end of sequence is all there is


def test_what_a_chat_needs_is_said(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"task\.system is a message of a chat, and task\.chat is not set"):
        TaskConfig(system="hello")
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no chat template"):
        codec_of(TaskConfig(chat=True), directory)
    strict = write_chat_model(tmp_path / "strict", "{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match=r"does not take messages of system, user.*: no system role"):
        codec_of(TaskConfig(chat=True, system="x"), strict)
    broken = write_chat_model(tmp_path / "broken", "{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        codec_of(TaskConfig(chat=True), broken)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="unsafe"):
        codec_of(TaskConfig(chat=True), write_chat_model(tmp_path, escape))


@pytest.mark.parametrize("example", ["smollm_grpo.toml", "smollm_grpo_cpu.toml"])
def test_a_run_of_the_examples_shape(example, directory, tmp_path, monkeypatch):
    """The files as they are, but for the model, its size and the engine."""
    gyms.install(monkeypatch)
    run_dir = tmp_path / "run"
    small = ["steps=2", "eval_every=2", "eval_prompts=4", "save_every=0", "diagnose_every=0", "engines=0"]
    small += ["algorithm.prompts=2", "algorithm.group=4", "algorithm.micro_batches=1", "algorithm.max_tokens=6"]
    small += ["engine.kind=embedded", "engine.dtype=float32", "engine.max_concurrency=8", "engine.max_model_len=256"]
    small += ["engine.kv_cache_tokens=0", f"model={directory}", f"run_dir={run_dir}"]
    config = load(TrainConfig, EXAMPLES / example, small)
    assert config.task.chat and config.task.options and config.warmup_steps == 0
    assert run_train(config) == 0
    records = read_records(run_dir / "metrics.jsonl")
    evaluations = [r for r in records if isinstance(r, Evaluation)]
    assert [e.step for e in evaluations] == [0, 2] and None not in [e.greedy_heldout for e in evaluations]
    assert len([r for r in records if isinstance(r, StepRecord)]) == 2
    assert ChatTemplate.read(run_dir / "checkpoint") == ChatTemplate.read(directory)  # it can be asked in chats, too
