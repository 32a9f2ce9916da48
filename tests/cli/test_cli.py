import contextlib
import json
import math
import sqlite3

import click.testing
import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import GROUPS, app
from slipstream.deploy.processes import vllm_environment
from slipstream.errors import ConfigError
from slipstream.gateway.journal import Journal
from slipstream.model import families
from slipstream.model.chat_template import ChatTemplate
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import (
    BOS,
    EOS,
    SPECIAL,
    UNKNOWN,
    write_sample_config,
    write_sample_model,
)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


COMMANDS = [command.__name__.replace("_", "-") for group in GROUPS.values() for command in group]


def test_every_command_has_help():
    built = typer.main.get_command(app)  # once
    assert set(COMMANDS) <= set(built.commands)
    for name in COMMANDS:
        result = click.testing.CliRunner().invoke(built, [name, "--help"])
        assert result.exit_code == 0 and "Usage" in result.output, name


def test_the_list_of_commands_has_one_line_each_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    lines = run("--help").output.splitlines()
    assert max(map(len, lines)) <= 80
    listed = {
        line.split()[1]: line.strip("│ ") for line in lines if line.startswith("│ ") and not line.startswith("│  ")
    }
    assert set(COMMANDS) <= set(listed)
    assert all(listed[command].endswith(".") for command in COMMANDS), "a summary is one sentence on one line"


def test_the_sample_model_generates_and_chats(tmp_path):
    result = run("sample-model", tmp_path / "model", "--seed", 3)
    assert result.exit_code == 0 and f'slipstream.launch("{tmp_path / "model"}")' in "".join(result.output.splitlines())
    assert isinstance(run("sample-model", tmp_path / "model").exception, ConfigError), "it is never overwritten"
    template = ChatTemplate.read(tmp_path / "model")
    prompt = template.render([{"role": "user", "content": "hi"}])
    assert prompt == "<bos><|user|>\nhi<eos>\n<|assistant|>\n"
    ids = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    assert SPECIAL.index(UNKNOWN) not in ids and ids[0] == SPECIAL.index(BOS) and ids.count(SPECIAL.index(EOS)) == 1
    with slipstream.inprocess(
        tmp_path / "model", engine=slipstream.EmbeddedConfig(max_num_seqs=2, max_model_len=32)
    ) as bridge:
        assert bridge.version == 0
        (completion,) = bridge.generate([ids], slipstream.SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(completion.token_ids) == 4
    other = write_sample_model(tmp_path / "other", seed=4)
    same, differs = (hf_weights.read_arrays(tmp_path / name, other) for name in ("model", "other"))
    assert any((same[name] != differs[name]).any() for name in same)


def test_a_damaged_journal_is_reported_and_repaired(tmp_path):
    assert isinstance(run("journal", tmp_path).exception, ConfigError)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.accept({"a": (b"request", 1), "b": (b"request", 1)})
    journal.close()
    whole = run("journal", tmp_path)
    assert whole.exit_code == 0 and "is whole" in whole.output
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db, db:
        db.execute("UPDATE groups SET request = x'00' WHERE number = 1")
    damaged = run("journal", tmp_path)
    assert damaged.exit_code == 1 and "group 1 (id 'a') does not match its checksum" in damaged.output
    repaired = run("journal", tmp_path, "--repair")
    assert repaired.exit_code == 0 and "group 1 is lost" in repaired.output
    assert run("journal", tmp_path).exit_code == 0


def test_plan_counts_the_bytes_that_a_sync_moves(tmp_path):
    write_sample_config(tmp_path)
    config = read_config(tmp_path)
    total = sum(4 * math.prod(t.shape) for t in families.tensors(config))
    norms = sum(4 * math.prod(t.shape) for t in families.tensors(config) if "norm" in t.name)
    result = run("plan", tmp_path, "--tp", 2, "--engines", 3, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["model_bytes"] == total
    assert found["engine_rank_bytes"] == (total + norms) // 2  # norms are replicated
    assert found["total_bytes"] == 3 * found["trainer_rank_bytes"] == 3 * (total + norms)
    assert "an engine rank receives" in run("plan", tmp_path).output
    for arguments in (
        (tmp_path, "--dtype", "int4"),
        (tmp_path, "--tp", 3),
        (tmp_path / "nothing",),
        (tmp_path, "--trainer", "pp=2"),
    ):
        assert isinstance(run("plan", *arguments).exception, ConfigError)


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("kimi-k2", 1026)])
def test_plan_knows_shapes_by_name(name, billions):
    mesh = ("--trainer", "fsdp=32,tp=8", "--engines", 16, "--tp", 4)
    found = json.loads(run("plan", name, *mesh, "--json").output)
    assert found["num_parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["total_bytes"] >= 16 * found["model_bytes"]
    assert found["trainer_rank_bytes"] * 256 >= found["total_bytes"] / 16, "bytes leave the trainer once"
    experts = json.loads(run("plan", name, *mesh, "--ep", "--json").output)
    assert experts["engine_rank_bytes"] <= found["engine_rank_bytes"] * 1.01


def test_doctor_finds_this_machine_fit(monkeypatch):
    monkeypatch.setattr(vllm_environment, "places", list)  # `make test` may still be creating the environment of vLLM
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "JAX devices" in result.output and "shared memory" in result.output


def test_a_gateway_must_be_named():
    assert isinstance(run("status").exception, ConfigError)
    assert isinstance(run("engine", "--model", "x").exception, ConfigError)
