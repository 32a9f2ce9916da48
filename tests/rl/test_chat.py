"""Chat templates compared with `transformers`, and the example configs with a tiny model."""

import json
from pathlib import Path

import pytest

from slipstream.cli.demo import run_train
from slipstream.config import load
from slipstream.errors import ConfigError
from slipstream.model.chat_template import ChatTemplate
from slipstream.rl.config import TaskConfig, TrainConfig
from slipstream.rl.data.chat import Chat
from slipstream.rl.data.tokens import Codec, codec_of
from slipstream.rl.reporting.records import Evaluation, StepRecord, read_records
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
def test_templates_render_as_in_transformers(tmp_path, template, system):
    from transformers import AutoTokenizer

    directory = write_chat_model(tmp_path / "model", template)
    reference = AutoTokenizer.from_pretrained(directory)
    told = [{"role": "system", "content": system}] if system else []
    chat = [*told, {"role": "user", "content": "What is 2 + 3?"}]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert Chat(ChatTemplate.read(directory), system).prompt(" What is 2 + 3?\n") == expected
    ids = reference(expected, add_special_tokens=False).input_ids
    assert codec_of(TaskConfig(chat=True, system=system), directory).prompts(["What is 2 + 3?\n"]) == [tuple(ids)]


def test_a_template_file_takes_precedence(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert Chat(ChatTemplate.read(directory)).prompt("1+1") == "1+1<eos>"


def test_the_default_template_is_used_of_several(directory):
    path = directory / "tokenizer_config.json"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    path.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "<eos>"}}))
    template = ChatTemplate.read(directory)
    assert template.source == "yes" and template.special_tokens == {"eos_token": "<eos>"}


def test_the_end_of_turn_token_is_a_stop_token(directory):
    codec = codec_of(TaskConfig(chat=True), directory)
    (end,) = codec.stops
    assert codec.answers(["<|im_end|>"]) == [(end,)] and codec.decode([(end,)]) == [""]
    assert Codec(directory).stops == ()
    plain = write_chat_model(directory.parent / "plain", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert codec_of(TaskConfig(chat=True), plain).stops == ()  # only the model's end-of-sequence token


def test_missing_parts_of_a_chat_are_reported(directory, tmp_path):
    with pytest.raises(ConfigError, match="system is a chat message; set chat = true"):
        TaskConfig(system="hello")
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no chat template"):
        codec_of(TaskConfig(chat=True), directory)
    strict = write_chat_model(tmp_path / "strict", "{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match=r"rejects these messages \(roles: system, user.*: no system role"):
        codec_of(TaskConfig(chat=True, system="x"), strict)
    broken = write_chat_model(tmp_path / "broken", "{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        codec_of(TaskConfig(chat=True), broken)


def test_templates_run_in_a_sandbox(tmp_path):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="unsafe"):
        codec_of(TaskConfig(chat=True), write_chat_model(tmp_path, escape))


@pytest.mark.parametrize("example", ["smollm_grpo.toml", "smollm_grpo_cpu.toml"])
def test_the_example_configs_run_with_a_tiny_model(example, directory, tmp_path, monkeypatch):
    """The files unchanged, except for model and engine."""
    gyms.install(monkeypatch)
    run_dir = tmp_path / "run"
    small = ["steps=2", "eval_every=2", "eval_prompts=4", "save_every=0", "diagnose_every=0", "engines=0"]
    small += ["algorithm.prompts=2", "algorithm.group=4", "algorithm.micro_batches=1", "algorithm.max_tokens=6"]
    small += ["engine.kind=embedded", "engine.dtype=float32", "engine.max_num_seqs=8", "engine.max_model_len=256"]
    small += ["engine.kv_cache_tokens=0", f"model={directory}", f"run_dir={run_dir}"]
    config = load(TrainConfig, EXAMPLES / example, small)
    assert config.task.chat and config.task.options and config.warmup_steps == 0
    assert run_train(config) == 0
    records = read_records(run_dir / "metrics.jsonl")
    evaluations = [r for r in records if isinstance(r, Evaluation)]
    assert [e.step for e in evaluations] == [0, 2] and None not in [e.greedy_heldout for e in evaluations]
    assert len([r for r in records if isinstance(r, StepRecord)]) == 2
    assert ChatTemplate.read(run_dir / "checkpoint") == ChatTemplate.read(directory)  # the export has the chat template
