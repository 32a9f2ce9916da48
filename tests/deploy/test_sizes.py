"""How GPUs are split between trainer and engines, and the cost model behind it."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.deploy.advice import step_cost
from slipstream.deploy.advice.sizes import HARDWARE, ITEM, Cluster, choose_sizes, hardware_named
from slipstream.deploy.advice.step_cost import ModelShape, PlannedBatch
from slipstream.deploy.advice.sync_cost import config_named
from slipstream.deploy.advice.topology import TRAINER_BYTES, USABLE_MEMORY
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig, MoeConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BATCH = PlannedBatch(samples=512, prompt_tokens=512, completion_tokens=1024, group=8)
H200 = HARDWARE["h200-vllm"]


def split(name="llama-8b", gpus=16, batch=BATCH, max_staleness=1, **cluster):
    return choose_sizes(ModelShape.of(config_named(name)), batch, Cluster(gpus, H200, **cluster), max_staleness)


@pytest.mark.parametrize(
    ("name", "gpus"), [("llama-8b", 4), ("llama-8b", 64), ("llama-70b", 64), ("qwen3-235b-a22b", 256)]
)
def test_a_split_fits_and_the_fastest_comes_first(name, gpus):
    found, size = split(name, gpus), ModelShape.of(config_named(name)).parameters
    assert [s.step_seconds for s in found] == sorted(s.step_seconds for s in found)
    for sizes in found:
        assert sizes.trainer_gpus + sizes.engines * sizes.tp <= gpus and sizes.rows >= 1
        memory = USABLE_MEMORY * H200.memory
        assert TRAINER_BYTES * size / sizes.trainer_gpus <= memory and 2 * ITEM * size / sizes.tp < memory
        busy = max(sizes.generate_seconds, sizes.train_seconds)
        assert sizes.step_seconds == pytest.approx(busy + sizes.sync_seconds) and sizes.bound
        assert sizes.bound.startswith("generation") == (sizes.generate_seconds >= sizes.train_seconds)


def test_more_hardware_and_less_work_are_never_slower():
    best = split()[0].step_seconds
    assert split(gpus=32)[0].step_seconds < best < split(max_staleness=0)[0].step_seconds
    for change in ({"samples": 1024}, {"completion_tokens": 2048}, {"prompt_tokens": 4096}):
        assert split(batch=dataclasses.replace(BATCH, **change))[0].step_seconds > best
    assert split(gpus=32, network=1e9)[0].sync_seconds > 10 * split(gpus=32)[0].sync_seconds


def test_generation_gets_more_gpus_where_it_is_the_longer_part():
    short, long = (split(gpus=64, batch=PlannedBatch(1024, 2048, tokens, 8))[0] for tokens in (64, 8192))
    assert short.trainer_gpus > long.trainer_gpus


def test_one_gpu_takes_turns():
    (sizes,) = choose_sizes(
        ModelShape.of(config_named("llama-8b")), BATCH, Cluster(1, dataclasses.replace(H200, memory=1e12))
    )
    assert (sizes.trainer_gpus, sizes.engines, sizes.tp) == (1, 1, 1)
    parts = sizes.generate_seconds + sizes.train_seconds + sizes.sync_seconds
    assert sizes.step_seconds == pytest.approx(parts)


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(ConfigError, match=r"8.0B parameters do not fit 1 GPU\(s\) of 141 GB: .* at least 3 are needed"):
        split(gpus=1)
    assert split(gpus=3)


def test_work_is_what_a_naive_count_gives():
    config = ModelConfig("llama", 100, 8, 16, 3, num_heads=2, num_kv_heads=1, head_dim=4)
    shape, batch = ModelShape.of(config), PlannedBatch(6, prompt_tokens=5, completion_tokens=4, group=3)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert shape.parameters == 2 * 100 * 8 + 3 * layer + 8 and shape.active == 100 * 8 + 3 * layer + 8
    decode = step_cost.decode_work(shape, batch, rows=3, item=2)
    flops = sum(2 * shape.active + 4 * 3 * 8 * (5 + 4 / 2) for _ in range(6 * 4))
    assert (decode.steps, decode.layers, decode.tokens, decode.flops) == (8, 24, 24, pytest.approx(flops))
    assert decode.bytes == 8 * 2 * (shape.parameters + 3 * 7 * 2 * 3 * 4)
    prompts, operations = step_cost.prefill_work(shape, batch, 2)
    assert (prompts.steps, prompts.tokens, operations.tokens) == (1, 0, 2 * 5)
    assert operations.flops == pytest.approx(2 * 5 * (2 * shape.active + 4 * 3 * 8 * 2.5))
    training = step_cost.train_work(shape, batch, 16)
    assert training.tokens == 6 * (5 + 4)
    assert training.flops == pytest.approx(3 * 54 * (2 * shape.active + 4 * 3 * 8 * 4.5))


def test_a_step_reads_the_experts_that_its_rows_are_sent_to():
    config = ModelConfig("qwen3_moe", 100, 8, 16, 2, 2, 1, 4, moe=MoeConfig(8, 2, 16))
    shape = ModelShape.of(config)
    assert shape.expert_parameters == 2 * 8 * 3 * 8 * 16
    assert shape.parameters - shape.read_parameters(1) == pytest.approx(0.75 * shape.expert_parameters)
    assert shape.read_parameters(100) == pytest.approx(shape.parameters)


LLAMA_1B = ModelConfig("llama", 128_256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True)


@pytest.mark.parametrize(("side", "hardware"), [("ours", "h200"), ("vLLM", "h200-vllm")])
@pytest.mark.parametrize("case", ["64", "512", "1024", "groups"])
def test_generation_takes_what_was_measured_on_an_h200(side, hardware, case):
    """The rates are fitted to 64 and 512 sequences, those of the embedded engine to groups, too. 1,024 are fitted by neither."""
    measured, rates, shape = (
        json.loads((RESULTS / "decode_gpu.json").read_text()),
        HARDWARE[hardware],
        ModelShape.of(LLAMA_1B),
    )
    facts = measured["cases"][case]
    samples = facts["prompts"] * facts["group"]
    batch = PlannedBatch(samples, facts["prompt_tokens"], facts["mean_length"], facts["group"])
    prompts, operations = step_cost.prefill_work(shape, batch, ITEM)
    decode = step_cost.decode_work(shape, batch, samples, ITEM) + prompts
    seconds = max(rates.decode.seconds(decode), rates.host.seconds(decode)) + rates.prefill.seconds(operations)
    assert seconds == pytest.approx(statistics.median(measured["sides"][side]["cases"][case]["seconds"]), rel=0.2)


def test_rates_are_saved_and_read(tmp_path):
    H200.save(tmp_path / "mine.json")
    assert hardware_named(str(tmp_path / "mine.json")) == H200
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not hold rates of hardware"):
        hardware_named(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="one of h200, h200-vllm, or a file"):
        hardware_named("h2000")


def test_the_command_says_sizes_step_and_bound():
    run = CliRunner().invoke
    arguments = ["plan", "llama-8b", "--gpus", "16", "--batch", "256", "--completion-tokens", "2048"]
    said = " ".join(run(app, arguments).stdout.split())
    assert "trainer" in said and "tensor parallelism" in said and "bound by" in said and "per day" in said
    best = json.loads(run(app, [*arguments, "--json"]).stdout)[0]
    assert best["trainer_gpus"] + best["engines"] * best["tp"] <= 16 and best["steps_per_day"] > 0
    for ignored in (["--tp", "2"], ["--ep"], ["--dtype", "float32"], ["--gbps", "5"]):
        refused = run(app, [*arguments, *ignored]).exception
        assert isinstance(refused, ConfigError) and "--gpus chooses" in str(refused)
