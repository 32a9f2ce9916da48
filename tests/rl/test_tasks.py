import sys
from types import ModuleType

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.rl.config import TaskConfig
from slipstream.rl.tasks import DigitTask, extract_answer, task_named


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
def test_prompts_have_one_form_and_one_length(name):
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


def test_held_out_prompts_are_spread_over_all_of_them():
    numbers = [int(p[1:-1]) for p in DigitTask("reverse", 3, 0.1).prompts(rng(), 100, "heldout")]
    assert min(np.bincount(np.array(numbers) // 100, minlength=10)) >= 5


def test_large_spaces_are_drawn_from_without_being_listed():
    task = DigitTask("add", 9, 0.1)
    train, heldout = set(task.prompts(rng(), 200)), set(task.prompts(rng(), 200, "heldout"))
    assert len(train) == len(heldout) == 200 and not train & heldout
    with pytest.raises(ConfigError, match="1 to 9, got 10"):
        DigitTask("add", 10)


def test_a_small_split_repeats_itself_only_when_used_up():
    prompts = DigitTask("reverse", 1, 0.0).prompts(rng(), 25)
    assert len(prompts) == 25 and len(set(prompts[:10])) == 10


def test_unknown_tasks_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'reverse'"):
        task_named(TaskConfig(name="revers"))
    with pytest.raises(ConfigError, match="known tasks: reverse, sort, add, reasoning_gym:<name>"):
        task_named(TaskConfig(name="zzz"))


def test_reasoning_gym_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[reasoning-gym\]'"):
        task_named(TaskConfig(name="reasoning_gym:leg_counting"))


class Legs:
    """A dataset with reasoning-gym's interface: items by index, partial credit for text around the answer."""

    def __init__(self, size, seed):
        self._size, self._rng = size, np.random.default_rng(seed)
        self._counts = self._rng.integers(1, 400, size)

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        dogs = int(self._counts[index])
        return {"question": f"How many legs have {dogs} dogs?", "answer": str(4 * dogs), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        return len(entry["answer"]) / len(answer) if answer and entry["answer"] in answer else 0.0


@pytest.fixture
def gym(monkeypatch):
    module = ModuleType("reasoning_gym")

    def create_dataset(name, size, seed):
        if name != "leg_counting":
            raise ValueError(f"Dataset '{name}' not registered")
        return Legs(size, seed)

    module.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


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
    task = task_named(TaskConfig(name="reasoning_gym:leg_counting", holdout=0.2))  # many of its questions are equal
    train, heldout = (set(task.prompts(rng(), 4000, split)) for split in ("train", "heldout"))
    assert train and heldout and not train & heldout
    assert len(heldout) == round(0.2 * len(train | heldout))
    assert task.answer(next(iter(heldout)))


def test_an_unknown_reasoning_gym_task_is_a_config_error(gym):
    with pytest.raises(ConfigError, match="no task 'leg_count'"):
        task_named(TaskConfig(name="reasoning_gym:leg_count"))


def test_extract_answer():
    assert extract_answer(" 4 \n") == "4"
    assert extract_answer("<answer>\n1\n2 </answer> <answer>3") == "1\n2"
