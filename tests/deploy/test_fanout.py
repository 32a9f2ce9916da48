"""`slipstream fanout`: bad lines, failures, crashes, resuming."""

import asyncio
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import GatewayConfig
from slipstream.deploy.fanout.dispatch import FanOut
from slipstream.deploy.fanout.display import fan_out_display, summary
from slipstream.deploy.fanout.prompt_file import CompletionFile, count_prompts, read_prompts
from slipstream.deploy.fanout.run import FleetChoice
from slipstream.deploy.fleet import connect, launch
from slipstream.errors import ConfigError, EngineFailure, InvalidPrompt, LaunchFailed, NotReady
from slipstream.gateway.server import running
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.runtime import event_loop
from slipstream.types import Failure, SamplingParams
from tests.conformance.engines import Subject, greedy_reference
from tests.engines.sglang_stand_in import standing_in
from tests.engines.test_remote import drawn
from tests.engines.vllm_server import Script, serving
from tests.gateway.scripted import ScriptedEngine, attached
from tests.tiny import random_params, tiny_config, write_config, write_tokenizer

TOKEN = "secret"
SAMPLING = SamplingParams()


class Picky(ScriptedEngine):
    """Fails for marked prompts."""

    async def generate(self, requests):
        bad = {"fail": EngineFailure("it broke"), "wrong": InvalidPrompt("no such token")}
        failed = [Failure(r.id, bad[r.prompt]) for r in requests if r.prompt in bad]
        if failed:
            yield failed
        if rest := [r for r in requests if r.prompt not in bad]:
            async for batch in super().generate(rest):
                yield batch


@contextlib.contextmanager
def fleet(*engines):
    """A bridge to scripted engines behind a real gateway."""
    stack = contextlib.AsyncExitStack()

    async def start():
        address = await stack.enter_async_context(running(GatewayConfig(), TOKEN))
        for engine in engines:
            await stack.enter_async_context(attached(engine, address, TOKEN))
        return address

    try:
        with connect(event_loop.run(start()), token=TOKEN) as bridge:
            yield bridge
    finally:
        event_loop.run(stack.aclose())


def fan_out(bridge, prompts, output, ordered=False, sampling=SAMPLING, **options):
    with CompletionFile(output, ordered=ordered) as file:
        return asyncio.run(FanOut(bridge, file, patience=0.5, **options).run(read_prompts(prompts, sampling)))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(100)))
    return path


# --- the files --------------------------------------------------------------------------------------------------------


def test_lines_are_text_or_json_with_settings_of_their_own(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n\n{not json}\r\n")
    assert [(r.index, r.id, r.prompt) for r in read_prompts(text, SamplingParams())] == [
        (0, "0", "one"),
        (2, "2", "{not json}"),
    ]
    assert count_prompts(text) == 2
    lines = tmp_path / "b.jsonl"
    lines.write_text(
        '{"prompt": [1, 2], "id": "x", "n": 4, "stop": ["a"], "logit_bias": {"3": 1.5}}\n{"prompt": "é"}\n'
    )
    one, two = read_prompts(lines, SamplingParams(max_tokens=9), seed=7)
    assert (one.prompt, one.id, one.sampling.n, one.sampling.max_tokens, one.sampling.seed) == ((1, 2), "x", 4, 9, 7)
    assert one.sampling.logit_bias == ((3, 1.5),) and one.sampling.stop == ("a",)
    assert two.sampling.seed == 8 and two.key != one.key


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "the line is not JSON"),
        ("[1]", "must be an object"),
        ("{}", "prompt must be"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": []}', "no tokens"),
        ('{"prompt": [1, "a"]}', "integers"),
        ('{"prompt": [-1]}', "0 or more"),
        ('{"prompt": "x", "max_token": 3}', "unknown field 'max_token'"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens must be"),
        ('{"prompt": "x", "seed": "a"}', "seed must be"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias maps"),
    ],
)
def test_a_bad_line_is_an_error_in_its_place(tmp_path, line, said):
    path = tmp_path / "b.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    good, bad = read_prompts(path, SamplingParams())
    assert good.error is None and bad.index == 1 and said in str(bad.error)


def test_files_that_cannot_be_read_or_are_something_else_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        count_prompts(tmp_path / "none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_prompts(tmp_path / "binary.txt", SamplingParams()))
    other = tmp_path / "notes.md"
    other.write_text("# Precious notes\nand more\n")
    with pytest.raises(ConfigError, match=r"line 1 of .* is not a line of completions"):
        CompletionFile(other)
    assert other.read_text() == "# Precious notes\nand more\n"
    with CompletionFile(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="another process is writing"):
        CompletionFile(tmp_path / "out.jsonl")


# --- with engines that count ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_all_prompts_are_completed_once_and_shared_out(tmp_path, prompts, ordered):
    output, a, b = tmp_path / "out.jsonl", Picky("a"), Picky("b")
    with fleet(a, b) as bridge:
        stats = fan_out(bridge, prompts, output, ordered, SamplingParams(n=2))
    found = rows(output)
    assert sorted(row["index"] for row in found) == list(range(100))
    assert not ordered or [row["index"] for row in found] == list(range(100))
    assert all(len(row["completions"]) == 2 for row in found)
    assert (stats.num_rows, stats.num_skipped, stats.samples.total(), stats.tokens.total()) == (100, 0, 200, 400)
    assert set(stats.samples) == {"a", "b"} and not stats.failed
    assert {c["engine"] for row in found for c in row["completions"]} == {"a", "b"}


def test_what_fails_is_an_error_in_its_line_and_is_tried_again_next_time(tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": "good"}',
        '{"prompt": "wrong"}',
        '{"prompt": "fail"}',
        "nonsense",
        '{"prompt": "good", "id": "e"}',
    ]
    prompts.write_text("\n".join(lines))
    with fleet(Picky("a")) as bridge:
        stats = fan_out(bridge, prompts, output)
    assert stats.failed == {"InvalidPrompt": 2, "EngineFailure": 1} and stats.num_rows == 2
    by_index = {row["index"]: row for row in rows(output)}
    assert by_index[1]["error"] == {"kind": "InvalidPrompt", "message": "no such token"}
    assert "error" in by_index[3] and by_index[4]["id"] == "e" and len(by_index) == 5
    healthy = ScriptedEngine("b")  # it takes any prompt
    with fleet(healthy) as bridge:
        stats = fan_out(bridge, prompts, output)
    assert (stats.num_skipped, stats.num_rows, stats.failed) == (2, 2, {"InvalidPrompt": 1})
    assert sorted(row["index"] for row in rows(output)) == [0, 1, 2, 3, 4]
    assert [row["index"] for row in rows(output) if "error" in row] == [3]


def test_a_run_that_was_cut_off_anywhere_goes_on_and_ends_as_if_it_had_not_been(tmp_path, prompts):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    with fleet(Picky("a")) as bridge:
        fan_out(bridge, prompts, whole, ordered=True)
        expected = whole.read_bytes()
        for cut in (0, 1, len(expected) // 3, len(expected) - 1, len(expected)):
            output.write_bytes(expected[:cut])
            stats = fan_out(bridge, prompts, output, ordered=True)
            assert output.read_bytes() == expected
            assert stats.num_skipped == expected[:cut].count(b"\n") == 100 - stats.num_rows


def test_completions_of_other_prompts_or_settings_are_not_gone_on_with(tmp_path, prompts):
    output = tmp_path / "out.jsonl"
    with fleet(Picky("a")) as bridge:
        fan_out(bridge, prompts, output)
        before = output.read_bytes()
        with pytest.raises(ConfigError, match="other settings"):
            fan_out(bridge, prompts, output, sampling=SamplingParams(temperature=0.5))
        prompts.write_text("something else\n")
        with pytest.raises(ConfigError, match="another prompt 0"):
            fan_out(bridge, prompts, output)
    assert output.read_bytes() == before


def test_no_more_is_asked_for_at_once_than_allowed(tmp_path, prompts):
    engine = Picky("a")
    most = running_now = 0
    serve = engine.generate

    async def counted(requests):
        nonlocal most, running_now
        running_now += len(requests)
        most = max(most, running_now)
        async for batch in serve(requests):
            yield batch
        running_now -= len(requests)

    engine.generate = counted
    with fleet(engine) as bridge:
        fan_out(bridge, prompts, tmp_path / "out.jsonl", in_flight=40)
    assert 16 <= most <= 40


def test_a_fleet_that_is_gone_ends_the_run_and_keeps_what_is_finished(tmp_path, prompts):
    output = tmp_path / "out.jsonl"
    with fleet(Picky("a", version=-1)) as bridge, pytest.raises(NotReady, match="a: empty"):
        fan_out(bridge, prompts, output)
    assert output.read_bytes() == b""
    with fleet(Picky("a")) as bridge:
        assert fan_out(bridge, prompts, output).num_rows == 100


def test_one_prompt_that_spoils_a_call_does_not_spoil_its_neighbours(tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    huge = json.dumps({"prompt": "x" * 2_000_000})
    prompts.write_text("\n".join(['{"prompt": "a"}', huge, '{"prompt": "b"}']))
    stack = contextlib.AsyncExitStack()

    async def start():
        address = await stack.enter_async_context(running(GatewayConfig(max_message_bytes=1 << 20), TOKEN))
        await stack.enter_async_context(attached(Picky("a"), address, TOKEN))
        return address

    try:
        with connect(event_loop.run(start()), token=TOKEN) as bridge:
            stats = fan_out(bridge, prompts, output)
    finally:
        event_loop.run(stack.aclose())
    assert stats.num_rows == 2 and stats.failed == {"MessageTooLarge": 1}


def test_what_is_said_of_a_run(tmp_path, prompts):
    console = Console(file=io.StringIO(), width=120)
    with fleet(Picky("a"), Picky("b")) as bridge, fan_out_display(console, 100) as show:
        console.print(summary(fan_out(bridge, prompts, tmp_path / "out.jsonl", on_row=show)))
    said = console.file.getvalue()
    assert "10 of 100 prompts" in said and "100 of 100 prompts" in said and "200 tokens" in said
    assert "tokens/s" in said and "%" in said


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"gateway": "h:1", "model": "m"},
        {"run_dir": "d", "options": ("tensor_parallel_size=2",)},
        {"run_dir": "d", "servers": ("u",)},
    ],
)
def test_a_fleet_must_be_said_once(choice):
    with pytest.raises(ConfigError, match="--model DIR"):
        FleetChoice(**choice)


def test_servers_at_several_addresses_are_a_fleet_and_one_that_is_busy_is_passed_over(tmp_path):
    model = write_config(tmp_path / "model", tiny_config())
    with serving(Script()) as one, serving(Script()) as two:
        one.fail["/v1/completions"] = (429, {"error": {"message": "too many requests"}})
        with FleetChoice(model=model, servers=(one.url, two.url)).open() as bridge:
            prompts = [(5 + i, 6, 7) for i in range(8)]
            sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
            found = bridge.generate(prompts, sampling)
            assert [c.token_ids for c in found] == [drawn(prompt, 3) for prompt in prompts]
            status = bridge.status()
            assert {c.engine for c in found} == {"engine-0", "engine-1"} and status.num_retried == 1
            assert [(e.info.kind, e.circuit, e.num_faults) for e in status.engines] == [("remote", "closed", 0)] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("kv_cache_tokens=4096",), "kv_cache_tokens is a setting of EmbeddedConfig and VllmConfig"),
        (
            ("dialect=sglang", "tensor_parallel_size=2"),
            "tensor_parallel_size is a setting of EmbeddedConfig and VllmConfig",
        ),
        (("dialect=tgi",), "dialect must be 'vllm' or 'sglang'"),
        (
            ("url=http://127.0.0.1:9000",),
            "--server is http://127.0.0.1:8000, but the setting url is 'http://127.0.0.1:9000'",
        ),
        (("kind=vllm",), "kind must be 'remote'"),
    ],
)
def test_settings_that_are_not_for_a_server_are_refused(options, said):
    fleet = FleetChoice(model=Path("model"), servers=("http://127.0.0.1:8000",), options=options)
    with pytest.raises(ConfigError, match=re.escape(said)):
        fleet.open()


def saved(directory, seed):
    """A model with weights."""
    config = tiny_config()
    hf_weights.save(directory, random_params(config, seed), config)
    return directory


def test_the_command_generates_through_an_sglang_server_with_a_key(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.delenv("SLIPSTREAM_SGLANG_TOKEN", raising=False)
    model = saved(tmp_path / "model", seed=0)
    prompts, key, config = tmp_path / "p.jsonl", tmp_path / "key", read_config(model)
    asked = [(5 + i, 6, 7) for i in range(3)]
    prompts.write_text("".join(json.dumps({"prompt": prompt, "ignore_eos": True}) + "\n" for prompt in asked))
    key.write_text("sesame\n")
    subject = Subject(None, config, hf_weights.load(model, config))
    expected = [list(greedy_reference(subject, prompt, 4)) for prompt in asked]
    with standing_in(model, tmp_path) as server:
        command = ["fanout", str(prompts), "--model", str(model), "--server", server.url, "--max-tokens", "4"]
        command += ["--temperature", "0", "--ordered"]

        def run(name, *settings):
            output = tmp_path / f"{name}.jsonl"
            done = CliRunner().invoke(app, [*command, "-o", str(output), *settings])
            if done.exit_code:
                raise done.exception
            return [row["completions"][0] for row in rows(output)]

        server.tell(key="sesame")
        with pytest.raises(LaunchFailed, match=r"Unauthorized.*token_file"):
            run("locked", "dialect=sglang")
        found = run("key", "dialect=sglang", f"token_file={key}")
        assert [completion["token_ids"] for completion in found] == expected
        assert {completion["engine"] for completion in found} == {"engine-0"}


# --- with real engines ------------------------------------------------------------------------------------------------


def test_the_command_is_killed_and_goes_on_with_a_checkpoint_of_its_own(tmp_path):
    model, tuned = saved(tmp_path / "model", seed=0), saved(tmp_path / "tuned", seed=1)
    write_tokenizer(model)
    prompts, output = tmp_path / "p.txt", tmp_path / "p.txt.out.jsonl"
    prompts.write_text("".join(f"say {chr(97 + i % 26)} {i}\n" for i in range(120)))
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "fanout",
        str(prompts),
        "--max-tokens",
        "24",
        "--temperature",
        "0",
    ]
    with launch(model) as bridge:
        command += ["--run-dir", bridge.run_dir, "--in-flight", "8"]
        process = subprocess.Popen([*command, "--weights", str(tuned)], stderr=subprocess.DEVNULL)
        while not output.exists() or output.read_bytes().count(b"\n") < 10:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        num_done = output.read_bytes().count(b"\n")
        assert 10 <= num_done < 120
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = rows(output)
        assert [row["index"] for row in sorted(found, key=lambda row: row["index"])] == list(range(120))
        assert {c["version"] for row in found for c in row["completions"]} == {1}, "the checkpoint's, all of them"
        alone = bridge.generate(
            [line.strip() for line in prompts.open()][:5], SamplingParams(max_tokens=24, temperature=0.0)
        )
        by_index = {row["index"]: row["completions"][0]["token_ids"] for row in found}
        assert [list(c.token_ids) for c in alone] == [by_index[i] for i in range(5)]
        assert f"{num_done} prompts" in done.stderr
