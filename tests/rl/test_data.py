"""Own data: files and their errors, order, splits, filters by pass rate, and a training run."""

import json
from pathlib import Path

import numpy as np
import pytest

import slipstream
from slipstream.config import EmbeddedConfig, load
from slipstream.errors import ConfigError, RewardFailed
from slipstream.model.checkpoints.sample_model import write_sample_model
from slipstream.rl.config import AlgorithmConfig, DataConfig, RewardConfig, TrainConfig
from slipstream.rl.data.curriculum import FILE, Curriculum
from slipstream.rl.data.data_task import DataTask
from slipstream.rl.data.rows import read_rows
from slipstream.rl.data.tokens import codec_of
from slipstream.rl.trainer import loop
from slipstream.types import Completion, VersionSpan

ROWS = [{"question": f"{i}", "total": i, "kind": "even" if i % 2 == 0 else "odd"} for i in range(20)]
DATA = DataConfig(path="sums.jsonl", template="{question}=", answer="total", holdout=0.2)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(ROWS)
    return tmp_path


def write(rows, name="sums.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_row_is_in_one_split_and_the_seed_decides_which():
    task, same, other = (DataTask.read(DATA, seed) for seed in (1, 1, 2))
    assert len(task.splits["train"]) == 16 and len(task.splits["heldout"]) == 4
    assert not set(task.splits["train"]) & set(task.splits["heldout"])
    assert task.splits == same.splits != other.splits
    assert task.facts("7=") == {"question": "7", "total": 7, "kind": "odd"} and task.answer("7=") == "7"
    assert task.reward("7=", "7") == 1 and task.reward("7=", "8") == 0
    assert set(task.prompts(np.random.default_rng(0), 30, "heldout")) == set(task.splits["heldout"])


def test_held_out_rows_of_another_file_and_rows_that_repeat_a_prompt(caplog):
    write([{"question": "3", "total": 3}, {"question": "99", "total": 99}], "eval.jsonl")
    task = DataTask.read(DATA.replace(eval_path="eval.jsonl"), 0)
    assert list(task.splits["heldout"]) == ["99="] and len(task.splits["train"]) == 20
    assert "1 rows of sums.jsonl repeat the prompt of an earlier row" in caplog.text


def test_parquet_has_the_same_rows_as_jsonl():
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), "sums.parquet")
    assert read_rows("sums.parquet") == read_rows("sums.jsonl") == ROWS
    Path("bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        read_rows("bad.parquet")


def test_a_dataset_of_the_hub_that_cannot_be_had(monkeypatch):
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(
        ConfigError, match="there is no file nobody/nothing; as a dataset of the Hub it is not in the cache"
    ):
        read_rows("nobody/nothing")


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (
            None,
            {"template": "{qestion}="},
            "column 'qestion', which sums.jsonl does not have; its columns are question, total",
        ),
        (None, {"answer": "sum"}, "data.answer names column 'sum'"),
        (None, {"template": "", "prompt": "text"}, "data.prompt names column 'text'"),
        (None, {"template": "{question"}, "is not a valid template"),
        (None, {"path": "sum.jsonl"}, "sum.jsonl does not exist"),
        (None, {"path": "sums.csv"}, "sums.csv does not exist"),
        ("", {}, "sums.jsonl is empty"),
        ("\n\n", {}, "sums.jsonl is empty"),
        ('{"question": "1", "total": 1}\n{"question": \n', {}, "line 2 is not JSON"),
        ('["1"]\n', {}, "line 1 is not an object with columns, but list"),
        ('{"question": "1", "total": 1}\n{"question": "2"}\n', {}, "row 2 of sums.jsonl has no 'total'"),
        (
            '{"question": "1", "total": 1, "chat": "hi"}\n',
            {"messages": "chat", "template": ""},
            "must be a list of messages",
        ),
    ],
)
def test_errors_name_file_line_and_columns(text, settings, message):
    if text is not None:
        Path("sums.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        DataTask.read(DATA.replace(**settings), 0)


def test_prompts_that_are_too_long_are_refused_or_left_out(caplog):
    def encode(prompts):
        return [[0] * len(prompt) for prompt in prompts]

    with pytest.raises(ConfigError, match=r"prompts of sums.jsonl have more than 2 tokens.*overlong = 'skip'"):
        DataTask.read(DATA, 0).fit(encode, 2)
    task = DataTask.read(DATA.replace(overlong="skip"), 0)
    task.fit(encode, 2)
    assert task.num_overlong == 10 and all(len(prompt) == 2 for prompt in task.splits["train"])
    assert "10 prompts of sums.jsonl have more than 2 tokens and are left out" in caplog.text


def test_conversations_are_rendered_with_the_chat_template(directory):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}]
    write([{"chat": chat, "answer": "4"}])
    task = DataTask.read(DataConfig(path="sums.jsonl", messages="chat"), 0)
    write_sample_model(directory / "model")
    codec = codec_of(task.config, directory / "model", task.conversations)
    (prompt,) = task.prompts(np.random.default_rng(0), 1)
    assert prompt == "system: s\nuser: 2+2" and task.answer(prompt) == "4"
    assert codec.decode(codec.prompts([prompt])) == ["<|system|>\ns\n<|user|>\n2+2\n<|assistant|>\n"]


# --- order and filters ---


def batches(curriculum, count):
    return [curriculum.batch(number) for number in range(1, count + 1)]


def test_an_epoch_has_every_prompt_once_in_an_order_of_the_seed():
    task = DataTask.read(DATA, 0)
    drawn = batches(Curriculum(task, 0, 4), 8)
    first, second = ([prompt for batch in half for prompt in batch] for half in (drawn[:4], drawn[4:]))
    assert sorted(first) == sorted(second) == sorted(task.splits["train"]) and first != second
    assert batches(Curriculum(task, 0, 4), 8) == drawn != batches(Curriculum(task, 1, 4), 8)
    assert Curriculum(task, 0, 4).batch(7) == drawn[6]  # without those before
    in_order = Curriculum(DataTask.read(DATA.replace(order="file", holdout=0.0), 0), 0, 4)
    assert in_order.batch(1) == ["0=", "1=", "2=", "3="]


def test_prompts_that_are_always_or_never_solved_are_skipped_and_rechecked(tmp_path):
    config = DATA.replace(holdout=0.0, skip_solved=True, skip_unsolved=True, recheck=2)
    curriculum = Curriculum(DataTask.read(config, 0), 0, 20, tmp_path)
    assert len(set(curriculum.batch(1))) == 20
    curriculum.record(1, {prompt: {0: 0.0, 1: 1.0}.get(int(prompt[:-1]) % 4, 0.5) for prompt in curriculum.batch(1)})
    second = curriculum.batch(2)
    assert {int(prompt[:-1]) % 4 for prompt in second[:10]} == {2, 3}  # epoch 1
    assert {int(prompt[:-1]) % 4 for prompt in curriculum.batch(3)} == {0, 1, 2, 3}  # two epochs later


def test_easy_prompts_come_first_by_a_column_of_pass_rates():
    write([{**row, "rate": row["total"] / 20} for row in ROWS])
    task = DataTask.read(DATA.replace(holdout=0.0, order="easy_first", pass_rate="rate"), 0)
    assert task.epoch(0, 0, task.known_rates())[:3] == ["19=", "18=", "17="]


def test_a_resumed_run_draws_the_same_batches(tmp_path):
    config = DATA.replace(skip_solved=True)
    task = DataTask.read(config, 0)

    def run(directory, steps, start=0):
        curriculum, drawn = Curriculum(task, 0, 4, directory, start), []
        for step in range(start + 1, steps + 1):
            drawn.append(curriculum.batch(step + 1))  # one batch ahead
            rates = {prompt: float(int(prompt[:-1]) % 3 == 0) for prompt in curriculum.batch(step)}
            curriculum.record(step, rates)
        return drawn

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(tmp_path / "a", 12)
    run(tmp_path / "b", 7)  # killed after step 7, whose last checkpoint is of step 5
    with (tmp_path / "b" / FILE).open("a") as file:
        file.write('\n{"batch": 9, "pro')  # cut off
    assert run(tmp_path / "b", 12, start=5) == whole[5:]


# --- training ---

CONFIG = TrainConfig(
    steps=2,
    warmup_steps=2,
    eval_every=2,
    eval_prompts=4,
    save_every=0,
    diagnose_every=0,
    engines=0,
    data=DATA,
    reward=RewardConfig(function="tests.rl.data_rewards:near"),
    algorithm=AlgorithmConfig(prompts=4, group=4, max_tokens=3),
    engine=EmbeddedConfig(max_num_seqs=16, max_model_len=16),
)


def test_a_run_on_own_data_with_an_own_reward(tmp_path):
    result = slipstream.train(CONFIG.replace(run_dir=tmp_path / "run", data=DATA.replace(skip_unsolved=True)))
    assert [step.step for step in result.steps] == [1, 2] and all(0 <= step.reward <= 1 for step in result.steps)
    assert result.evaluations[-1].sampled_heldout is not None
    recorded = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines() if line]
    assert [line["step"] for line in recorded if "step" in line] == [1, 2]


@pytest.mark.parametrize(
    ("function", "question", "message"),
    [
        ("tests.rl.data_rewards:raises", "1", r"raised ValueError: no digits on sample 0 of prompt 0"),
        ("tests.rl.data_rewards:broken", "nan", r"returned nan \(float\) on sample"),
        ("tests.rl.data_rewards:broken", "text", r"returned 'high' \(str\) on sample"),
    ],
)
def test_rewards_that_cannot_be_used_end_the_run(function, question, message, tmp_path):
    write([{"question": question, "total": 1}])
    config = CONFIG.replace(warmup_steps=0, data=DATA.replace(holdout=0.0), reward=RewardConfig(function=function))
    with (
        loop.open_scorer(config, *task_and_codec(config, tmp_path)) as score,
        pytest.raises(RewardFailed, match=message),
    ):
        score([completion()], [f"{question}="])


def task_and_codec(config, tmp_path):
    write_sample_model(tmp_path / "model")
    return loop.open_task(config, tmp_path / "model")


def completion():
    return Completion("r", 0, (4,), (5,), "", (-1.0,), (-1.0,), "stop", (VersionSpan(0, 0, 1),))


def test_data_and_rewards_are_found_beside_the_toml_file(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write(ROWS, "mine/own.jsonl")
    Path("mine/run.toml").write_text(
        '[data]\npath = "own.jsonl"\nprompt = "question"\n[reward]\nfunction = "my_rewards:f"'
    )
    config = load(TrainConfig, "mine/run.toml").beside(Path("mine"))
    assert config.data.path == "mine/own.jsonl" and config.reward.weights == {"my_rewards:f": 1.0}
    assert config.subject == "mine/own.jsonl"
    assert config.beside(Path("elsewhere")) is config


def test_two_ways_to_name_functions_at_once():
    with pytest.raises(ConfigError, match=r"set reward.function, or reward.functions"):
        RewardConfig(function="a:b", functions={"c:d": 1.0})
