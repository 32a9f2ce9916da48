"""What all sides of `benchmarks/grpo_step.py` read and return."""

import json

import pytest

from slipstream.rl.data.tokens import Codec


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("grpo_step")


def test_prompts_have_exactly_their_number_of_tokens(benchmark, tmp_path):
    benchmark.write_tokenizer(tmp_path, 50)
    benchmark.write_prompts(tmp_path / "prompts.jsonl", count=6, length=7, vocab_size=50)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    encoded = Codec(tmp_path).prompts(texts)
    assert encoded == [tuple(map(int, text.split())) for text in texts]
    assert {len(ids) for ids in encoded} == {7} and len(set(encoded)) == 6


def test_figures_are_medians_after_the_warm_up(benchmark):
    job = benchmark.Job(
        "", "", "", False, "float32", 2, 2, 8, 16, rows=2, steps=4, learning_rate=0.0, options={"settings": {}}
    )
    steps = [{"generate": 90.0, "train": 90.0}] + [{"generate": g, "train": 3.0, "rest": 1.0} for g in (1.0, 2.0, 9.0)]
    found = benchmark.summary({"steps": steps}, job, benchmark.TINY, "NVIDIA H200", warm_up=1)
    assert found["seconds"] == dict.fromkeys(benchmark.PHASES, 0.0) | {
        "generate": 2.0,
        "train": 3.0,
        "rest": 1.0,
        "step": 6.0,
    }
    assert found["steps_per_hour"] == 600
    flops = benchmark.training_flops(benchmark.TINY, [24] * 4)
    assert found["mfu"] == pytest.approx(flops / 3.0 / benchmark.peak_flops("NVIDIA H200"))
    assert benchmark.compare({"ours": found, "trl": found | {"steps_per_hour": 200}}) == {"ours": 3.0}
