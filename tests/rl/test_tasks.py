import re
import sys

import numpy as np
import pytest

from slipstream.config import load
from slipstream.errors import ConfigError
from slipstream.rl.config import TaskConfig, TrainConfig
from slipstream.rl.data import answers
from slipstream.rl.data.tasks import DigitTask, task_named
from tests.rl import gyms


def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [("reverse", "r120=", "021"), ("sort", "s312=", "123"), ("add", "a012+034=", "0046"), ("add", "a999+999=", "1998")],
)
def test_answers_and_exact_rewards(name, prompt, answer):
    task = task_named(TaskConfig(name=name))
    assert task.answer(prompt) == answer
    assert task.reward(prompt, answer) == 1.0
    for wrong in ("", answer[:-1], answer + "0", f" {answer}"):
        assert task.reward(prompt, wrong) == 0.0


@pytest.mark.parametrize("name", ["reverse", "sort", "add"])
def test_prompts_have_constant_length(name):
    task = task_named(TaskConfig(name=name, digits=2))
    prompts = task.prompts(rng(), 50)
    assert len(set(prompts)) == 50 and len({len(p) for p in prompts}) == 1
    assert all(p[0] == name[0] and p[-1] == "=" for p in prompts)
    assert task.prompts(rng(), 50) == prompts != task.prompts(np.random.default_rng(1), 50)


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("holdout", [0.0, 0.001, 0.1, 0.999])
def test_splits_are_disjoint_complete_and_of_the_right_size(digits, holdout):
    task = DigitTask("reverse", digits, holdout)
    heldout, train = (set(task.prompts(rng(), 2 * task.num_prompts, split)) for split in ("heldout", "train"))
    assert not heldout & train
    assert heldout | train == {f"r{i:0{digits}d}=" for i in range(10**digits)}
    assert len(heldout) == task.num_heldout
    assert bool(heldout) == bool(holdout) and train


def test_held_out_prompts_are_spread_evenly():
    numbers = [int(p[1:-1]) for p in DigitTask("reverse", 3, 0.1).prompts(rng(), 100, "heldout")]
    assert min(np.bincount(np.array(numbers) // 100, minlength=10)) >= 5


def test_large_tasks_are_sampled_without_enumeration():
    task = DigitTask("add", 9, 0.1)
    train, heldout = set(task.prompts(rng(), 200)), set(task.prompts(rng(), 200, "heldout"))
    assert len(train) == len(heldout) == 200 and not train & heldout
    with pytest.raises(ConfigError, match="1 to 9, got 10"):
        DigitTask("add", 10)


def test_a_small_split_repeats_only_when_exhausted():
    prompts = DigitTask("reverse", 1, 0.0).prompts(rng(), 25)
    assert len(prompts) == 25 and len(set(prompts[:10])) == 10


def test_unknown_tasks_are_rejected_with_suggestions():
    with pytest.raises(ConfigError, match="did you mean 'reverse'"):
        task_named(TaskConfig(name="revers"))
    with pytest.raises(ConfigError, match="known tasks: reverse, sort, add, reasoning_gym:<name>"):
        task_named(TaskConfig(name="zzz"))


def test_missing_reasoning_gym_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[reasoning-gym\]'"):
        task_named(TaskConfig(name="reasoning_gym:leg_counting"))


@pytest.fixture
def gym(monkeypatch):
    gyms.install(monkeypatch)


def test_reasoning_gym_answers_are_extracted_before_they_are_scored(gym):
    task = task_named(TaskConfig(name="reasoning_gym:leg_counting"))
    prompt = task.prompts(rng(), 1)[0]
    answer = task.answer(prompt)
    assert task.name == "reasoning_gym:leg_counting" and prompt.startswith("How many legs")
    assert task.reward(prompt, f"  {answer}\n") == 1.0
    assert task.reward(prompt, f"I count. <answer>9</answer> No: <answer> {answer} </answer>!") == 1.0
    assert 0 < task.reward(prompt, f"it is {answer}") < 1
    assert task.reward(prompt, "none") == task.reward(prompt, "") == 0.0


def test_reasoning_gym_splits_never_share_a_question(gym):
    task = task_named(TaskConfig(name="reasoning_gym:leg_counting", holdout=0.2))  # has many equal questions
    train, heldout = (set(task.prompts(rng(), 4000, split)) for split in ("train", "heldout"))
    assert train and heldout and not train & heldout
    assert len(heldout) == round(0.2 * len(train | heldout))
    assert task.answer(next(iter(heldout)))


def test_an_unknown_reasoning_gym_task_is_a_config_error(gym):
    with pytest.raises(ConfigError, match="no task 'leg_count'"):
        task_named(TaskConfig(name="reasoning_gym:leg_count"))


def test_task_options(gym):
    small = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    task = task_named(TaskConfig(name="reasoning_gym:chain_sum", options=small, extract="number"))
    prompts = task.prompts(rng(), 40)
    assert all(re.fullmatch(r"\d \+ \d =\n", prompt) for prompt in prompts)
    assert task.reward(prompts[0], f"{prompts[0]} {task.answer(prompts[0])}.") == 1.0  # the last number of the text
    assert task.reward(prompts[0], "I do not know") == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_term": 3},
            r"'chain_sum' has no option 'max_term' \(task.options.max_term\); did you mean 'max_terms'\?",
        ),
        ({"zzz": 3}, "it takes min_terms, max_terms, min_digits, max_digits, allow_negation"),
        ({"seed": 3}, "no option 'seed'"),
        ({"min_terms": 9}, r"rejects task.options \{'min_terms': 9\}: max_terms must be >= min_terms"),
    ],
)
def test_invalid_options_are_rejected_with_a_hint(gym, options, message):
    with pytest.raises(ConfigError, match=message):
        task_named(TaskConfig(name="reasoning_gym:chain_sum", options=options))


def test_options_of_digit_tasks_are_rejected():
    with pytest.raises(ConfigError, match="apply to reasoning_gym tasks only; the settings of 'reverse'"):
        task_named(TaskConfig(options={"max_terms": 3}))
    with pytest.raises(ConfigError, match="apply to reasoning_gym tasks only; the settings of 'reverse'"):
        task_named(TaskConfig(extract="number"))


def test_options_come_from_a_file_and_from_the_command_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[task]\nname = "reasoning_gym:chain_sum"\n[task.options]\nmax_terms = 3\noperators = ["+"]\n')
    config = load(TrainConfig, path, ["task.options.max_terms=4", "task.extract=number"])
    assert config.task.options == {"max_terms": 4, "operators": ["+"]} and config.task.extract == "number"
    with pytest.raises(ConfigError, match=r"task\.extract must be 'tags' or 'number'"):
        load(TrainConfig, path, ["task.extract=digits"])


def test_tagged_answers():
    assert answers.tagged(" 4 \n") == "4"
    assert answers.tagged("<answer>\n1\n2 </answer> <answer>3") == "1\n2"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", "12"),
        ("8 - 13 = -5", "-5"),
        ("9-4", "4"),
        ("1,250 in all", "1250"),
        ("about 3.50!", "3.50"),
        ("first 8, 9", "9"),
        ("<answer>7</answer>, and not 8", "7"),
        ("none", ""),
        ("", ""),
    ],
)
def test_last_number(text, number):
    assert answers.last_number(text) == number
