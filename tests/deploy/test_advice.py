"""Recommended topology and transport: decisions at their boundaries; constants equal to the benchmark results."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import load
from slipstream.deploy.advice import topology as chosen
from slipstream.deploy.advice.sync_cost import FleetShape, SyncCost, TrainerMesh, estimate, kinds_named
from slipstream.deploy.advice.topology import TRAINER_BYTES, USABLE_MEMORY, Scenario, Workload, choose, sync_seconds
from slipstream.engines.remote.vllm import VllmDialect
from slipstream.engines.vllm.direct_loader import DirectLoader
from slipstream.engines.vllm.reload_loader import ReloadLoader
from slipstream.errors import ConfigError
from slipstream.weights.update.transport_choice import TRANSPORTS as EMBEDDED

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def scenario(parameters=1e9, trainer=1, engines=1, tp=1, **work):
    size = int(2 * parameters)
    found = SyncCost(int(parameters), size, size // tp, size // trainer, 1, 1, size * engines, engines - 1)
    return Scenario(found, TrainerMesh(trainer), FleetShape(engines, tp), Workload(**work))


@pytest.mark.parametrize(
    ("facts", "topology", "transport"),
    [
        (dict(parameters=1e8), "in-process", "memory"),
        (dict(parameters=1e8, max_staleness=1), "one machine", "shm"),
        (dict(parameters=1e8, max_staleness=1, cores=1), "in-process", "memory"),
        (dict(parameters=1e8, engine="vllm"), "one machine", "shm"),
        (dict(device="gpu"), "in-process", "memory"),
        (dict(device="gpu", max_staleness=1), "in-process", "memory"),
        (dict(device="gpu", engine="vllm"), "one machine", "cuda"),
        (dict(device="gpu", devices=2), "one machine", "shm"),
        (dict(device="gpu", devices=2, engine="vllm"), "one machine", "cuda"),
        (dict(device="gpu", devices=2, engines=2), "in-process", "memory"),
        (dict(device="gpu", hosts=2), "fan-out", "tcp"),
        (dict(device="gpu", hosts=2, engine="vllm"), "fan-out", "nccl"),
        (dict(device="gpu", hosts=2, ray=True), "ray", "tcp"),
        (dict(device="gpu", hosts=2, ray=True, engine="vllm"), "ray", "nccl"),
        (dict(device="gpu", hosts=1, devices=2, ray=True, engine="vllm"), "one machine", "cuda"),
        (dict(device="gpu", hosts=2, network_gbps=0), "fan-out", "disk"),
        (dict(parameters=1e8, hosts=2), "fan-out", "tcp"),
        (dict(parameters=1e8, hosts=2, ray=True), "ray", "tcp"),
        (dict(device="gpu", servers=True, engines=8), "fan-out", "vllm-nccl"),
    ],
)
def test_what_fits(facts, topology, transport):
    choice = choose(scenario(**facts))
    assert (choice.topology, choice.transport) == (topology, transport)
    assert len(choice.reasons) >= 2 and all(choice.reasons)


@given(
    st.sampled_from(["cpu", "gpu"]), st.sampled_from(["embedded", "vllm"]), st.integers(1, 3), st.integers(1, 4),
    st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_no_engine_is_given_a_transport_that_it_does_not_take(
    device, engine, hosts, devices, stale, ray, servers, network
):
    work = dict(device=device, engine=engine, hosts=hosts, devices=devices, max_staleness=stale, ray=ray)
    try:
        choice = choose(scenario(1e8, servers=servers, network_gbps=network, **work))
    except ConfigError as refused:
        assert "over NCCL only" in str(refused) and (servers or engine == "vllm")
        return
    vllm = ReloadLoader.transports if device == "cpu" else DirectLoader.transports
    takes = VllmDialect.transports if servers else vllm if engine == "vllm" else EMBEDDED
    assert choice.transport in takes
    assert choice.transport not in ("memory", "shm", "cuda") or (hosts == 1 and not servers)


def test_two_that_do_not_fit_together_take_turns():
    memory = 80.0
    most = USABLE_MEMORY * memory * 1e9 / (TRAINER_BYTES + 2)  # an engine on the same GPU holds two bytes per parameter
    below, above = (scenario(most * share, device="gpu", memory_gb=memory) for share in (0.999, 1.001))
    assert choose(below).topology == "in-process"
    assert choose(above).topology == "one machine" and "bridge.sleep" in choose(above).reasons[0]


def test_what_cannot_work_is_refused_with_what_would():
    fits = USABLE_MEMORY * 141e9 / TRAINER_BYTES
    assert choose(scenario(fits * 0.999, device="gpu", devices=2))
    with pytest.raises(ConfigError, match=r"--trainer fsdp=2"):
        choose(scenario(fits * 1.001, device="gpu", devices=2))
    with pytest.raises(ConfigError, match=r"more devices \(--tp 2\)"):
        choose(scenario(70e9, trainer=16, device="gpu", devices=32))
    assert choose(scenario(70e9, trainer=16, tp=4, device="gpu", devices=32)).topology == "one machine"
    with pytest.raises(ConfigError, match="there are 4 device"):
        choose(scenario(trainer=8, device="gpu", hosts=2, devices=2))
    with pytest.raises(ConfigError, match="engines 8, but there are 4"):
        choose(scenario(engines=8, device="gpu", devices=4))
    for wrong in ("hosts=0", "device=tpu", "sync_every=0", "tokens=-1", "hostss=2", "memory_gb=-1"):
        with pytest.raises(ConfigError):
            load(Workload, overrides=[wrong])


def test_what_an_iteration_takes():
    work = dict(device="gpu", engine="vllm", hosts=2, tokens_per_second=1000.0, train_tokens_per_second=500.0)
    work |= dict(prompts=10, group=10, prompt_tokens=10, tokens=100, network_gbps=2.0)
    choice = choose(scenario(1e9, **work))
    assert choice.generate_seconds == pytest.approx(10, rel=0.01) and choice.train_seconds == pytest.approx(22)
    assert choice.sync_seconds == pytest.approx(1.0, abs=0.03), "two gigabytes at two a second"
    assert choice.iteration_seconds == pytest.approx(33, rel=0.01)
    assert choice.iterations_per_day == pytest.approx(86400 / choice.iteration_seconds)
    ahead = choose(scenario(1e9, **work, max_staleness=1))
    assert ahead.iteration_seconds == pytest.approx(23, rel=0.01), "the slower of the two"
    rarely = choose(scenario(1e9, **work, max_staleness=1, sync_every=10))
    assert rarely.iteration_seconds == pytest.approx(22.1, rel=0.01)


@given(
    st.floats(1e6, 5e9), st.sampled_from(["cpu", "gpu"]), st.integers(1, 4), st.integers(1, 8), st.integers(1, 64),
    st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
def test_more_work_takes_longer_and_more_engines_do_not(
    parameters, device, hosts, devices, prompts, stale, ray, servers, engines, sync_every
):
    asked = scenario(
        parameters, 1, engines, device=device, hosts=hosts, devices=devices, prompts=prompts, max_staleness=stale,
        ray=ray, servers=servers, sync_every=sync_every, memory_gb=1e4,
    )  # fmt: skip
    try:
        choice = choose(asked)
    except ConfigError:
        assert (servers and device == "cpu") or (engines > hosts * devices and not servers)
        return
    more = choose(replace(asked, work=asked.work.replace(prompts=2 * prompts)))
    assert (more.topology, more.transport) == (choice.topology, choice.transport)
    assert more.iteration_seconds > choice.iteration_seconds and more.sync_seconds == choice.sync_seconds
    rare = choose(replace(asked, work=asked.work.replace(sync_every=sync_every + 1)))
    assert rare.iteration_seconds < choice.iteration_seconds
    other = choose(replace(asked, fleet=FleetShape(engines, 2))) if servers else choice
    assert other.generate_seconds <= choice.generate_seconds
    assert min(choice.generate_seconds, choice.train_seconds, choice.sync_seconds) > 0


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_constants_are_those_that_were_measured():
    near = {"rel": 0.05}
    cpu, gpu = measured("decode_cpu"), measured("decode_gpu")
    for device, found, case in (("cpu", cpu, "groups"), ("gpu", gpu, "512")):
        seconds = min(found["sides"]["ours"]["cases"][case]["seconds"])
        rate = found["cases"][case]["num_tokens"] / seconds * found["model"]["parameters"]
        assert rate == pytest.approx(chosen.DECODE[device], **near)
    loop = measured("loop")
    assert loop["in_process"]["train"] / loop["in_process"]["generate"] == pytest.approx(chosen.TRAIN_COST, **near)
    assert loop["step_ratio"] == pytest.approx(chosen.SEPARATE_PROCESS, **near)
    assert measured("async_rl")["speedup"] == pytest.approx(chosen.OVERLAP, **near)
    host = measured("weight_sync")
    for name in ("shm", "tcp"):
        seconds, fixed = (host["median_seconds"][f"{name}, checksums on{how}"] for how in ("", ", nothing changed"))
        assert chosen.SYNC[name] == (
            pytest.approx(fixed, rel=0.2),
            pytest.approx(host["num_bytes"] / seconds / 1e9, **near),
        )
    copied = host["num_bytes"] / host["median_seconds"]["memcpy"] / 1e9
    assert chosen.SYNC["memory"] == (
        pytest.approx(loop["in_process"]["sync"] / 1e3, **near),
        pytest.approx(copied, **near),
    )
    shape = measured("weight_sync_gpu")["shapes"]["1.2B"]
    for name, key in (("cuda", "cuda"), ("nccl", "nccl"), ("vllm-nccl", "native")):
        rows = shape["seconds"][key]
        transfer, sync = (statistics.median(row[what] for row in rows) for what in ("transfer", "sync"))
        speed = shape["num_bytes"] / transfer / 1e9
        assert chosen.SYNC[name] == (pytest.approx(sync - transfer, **near), pytest.approx(speed, **near))
    doors = measured("topologies")["overhead"]
    for name, door in (("in-process", "in-process"), ("one machine", "gRPC"), ("fan-out", "gRPC"), ("ray", "gRPC")):
        assert doors[door]["one of 64, ms"] / 1e3 == pytest.approx(chosen.REQUEST_SECONDS[name], **near)


def test_a_slow_network_bounds_what_crosses_it_and_nothing_else():
    asked = scenario(device="gpu", hosts=2, network_gbps=1.0)
    assert sync_seconds(asked, "nccl") == pytest.approx(2.0, abs=0.03)
    near = replace(asked, work=asked.work.replace(hosts=1))
    assert sync_seconds(near, "nccl") < 0.1 and sync_seconds(near, "cuda") < 0.02
    assert sync_seconds(asked, "disk") == pytest.approx(4.0), "written once, read once"


def test_replicas_cost_the_trainer_nothing_where_they_pass_weights_on():
    asked = [scenario(8e9, trainer=8, engines=count, device="gpu", hosts=9, devices=8) for count in (1, 4, 64)]
    for transport in ("tcp", "nccl"):
        first, *more = (sync_seconds(q, transport) for q in asked)
        assert all(first < seconds < 1.2 * first for seconds in more), "a chunk for each hop"
    assert sync_seconds(asked[2], "shm") > 7 * sync_seconds(asked[0], "shm"), "the trainer copies to each"
    kinds = kinds_named("llama-8b")
    one, many = (estimate(kinds, TrainerMesh(8), FleetShape(count, 2), "bfloat16") for count in (1, 64))
    assert one.trainer_rank_bytes == many.trainer_rank_bytes and 64 * one.total_bytes == many.total_bytes


def test_the_command_answers_in_words_and_in_figures():
    run = CliRunner().invoke
    arguments = ["plan", "llama-8b", "--trainer", "fsdp=8", "--engines", "4", "engine=vllm"]
    arguments += ["device=gpu", "hosts=2", "devices=8"]
    said = run(app, arguments).output
    assert "fan-out" in said and "nccl" in said and "per day" in said
    found = json.loads(run(app, [*arguments, "--json"]).output)
    assert found["recommendation"]["topology"] == "fan-out" and found["recommendation"]["iterations_per_day"] > 0
    assert "recommendation" not in json.loads(run(app, ["plan", "llama-8b", "--json"]).output)
    refused = run(app, ["plan", "llama-8b", "device=gpu"]).exception
    assert isinstance(refused, ConfigError) and "fsdp=2" in str(refused)
