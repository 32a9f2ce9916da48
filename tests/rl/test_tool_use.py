"""The tool-use example and its environment."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "tool_use.py"
    spec = importlib.util.spec_from_file_location("tool_use", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator_environment(example):
    environment = example.Calculator()
    asked = environment.reset(7).text
    assert asked == f"{example.question(7)}=" and asked == environment.reset(7).text
    observation, reward, done = environment.step(asked[:-1] + "?")
    assert (observation.text, reward, done) == (f"{eval(asked[:-1]):02d};", 0.2, False)
    assert environment.step(observation.text[:-1])[1:] == (1.0, True)
    environment.reset(7)
    assert environment.step("what?")[0].text == "??;" and environment.step("??")[1:] == (0.0, True)


def test_the_example_runs(example, capsys):
    rewards = example.main(["--steps", "3", "--warmup", "30"])
    said = capsys.readouterr().out
    assert len(rewards) == 3 and 0 < max(rewards) <= 1.2
    assert "step   1" in said and "step   3" in said and "ratio 1.0000" in said
