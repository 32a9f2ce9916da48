"""Reward functions in this process and in worker processes: results, failures, isolation."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import load
from slipstream.errors import ConfigError, DeadlineExceeded, RequestError, RewardFailed, RewardTimeout
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.rl.config import RewardConfig
from slipstream.rl.data.tokens import Codec
from slipstream.rl.rewards.functions import Reward, RewardRequest, import_function, import_name
from slipstream.rl.rewards.groups import survivors
from slipstream.rl.rewards.rewarder import Rewarder, reward_requests
from slipstream.rl.rewards.worker_pool import parse_reply
from slipstream.types import Completion, VersionSpan
from tests.rl import reward_samples as samples

HERE, APART = 0, 1
HOME = "tests.rl.reward_samples"
LONG, SHORT = 60.0, 2.0


def request(completion="1", prompt_index=0, sample_index=0, **more):
    return RewardRequest("r12=", completion, prompt_index=prompt_index, sample_index=sample_index, **more)


def batch(*completions, group=2):
    return [request(text, i // group, i % group) for i, text in enumerate(completions)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids(rewarder):
    return [w._process.pid for f in rewarder._functions for w in f.runner.workers if w._process]


@pytest.fixture(scope="module")
def apart():
    """One worker process, shared by tests that may kill it."""
    with Rewarder(f"{HOME}:by_completion", workers=1, timeout=LONG) as rewarder:
        yield rewarder


@pytest.mark.parametrize("workers", [HERE, APART])
@pytest.mark.parametrize(
    ("name", "requests", "values"),
    [
        ("exact", [request("21", answer="21"), request("12", answer="21")], (1.0, 0.0)),
        ("length", [request("abc"), request("")], (3.0, 0.0)),
        ("later", [request("0.5"), request("-2")], (0.5, -2.0)),
        ("returns_awaitable", [request("0.5"), request("-2")], (0.5, -2.0)),
        ("an_object", [request("0.5"), request("-2")], (0.5, -2.0)),
        ("numpy_scalar", [request()], (0.5,)),
        ("by_completion_async", [request("0.5")], (0.5,)),
    ],
)
def test_functions_of_every_kind(workers, name, requests, values):
    with Rewarder(f"{HOME}:{name}", workers=workers, timeout=LONG) as rewarder:
        rewards = rewarder.score(requests)
    assert rewards.values == values and rewards.kept == tuple(range(len(values)))
    assert not rewards.errors and rewards.num_dropped == 0 and all(type(v) is float for v in rewards.values)


@pytest.mark.parametrize("workers", [HERE, APART])
def test_functions_get_every_fact(workers):
    facts = RewardRequest("r12=", "12", (1, 2), (5, 6), "length", "21", 3, 4, {"hint": {"x": [1]}, "timeout": 5})
    with Rewarder(samples.facts, workers=workers, timeout=LONG) as rewarder:
        assert rewarder.score([facts]).values == (34.0,)
    with pytest.raises(ConfigError, match="answer"):
        RewardRequest("p", "c", extra={"answer": 1})


@pytest.mark.parametrize("workers", [HERE, APART])
def test_weighted_sums_and_parts(workers):
    weights = {f"{HOME}:parts": 2.0, f"{HOME}:length": -0.5}
    with Rewarder(weights, workers=workers, timeout=LONG) as rewarder:
        rewards = rewarder.score([request("abcd")])
    assert rewards.values == (2 * 3.0 - 0.5 * 4,)
    assert rewards.parts == (
        {f"{HOME}:parts": 3.0, f"{HOME}:parts.a": 1.0, f"{HOME}:parts.b": 2.0, f"{HOME}:length": 4.0},
    )


def test_overflowing_sums_are_rejected():
    with (
        Rewarder(lambda prompt, completion: {"a": 1e308, "b": 1e308}) as rewarder,
        pytest.raises(RewardFailed, match="inf"),
    ):
        rewarder.score([request()])
    with Rewarder({samples.length: 1e308}) as rewarder, pytest.raises(RewardFailed, match="weights"):
        rewarder.score([request("abc")])


@pytest.mark.parametrize("workers", [HERE, APART])
def test_invalid_return_values_are_reported(workers):
    with Rewarder(samples.odd, workers=workers, timeout=LONG, on_error="drop") as rewarder:
        for name, value in samples.ODD.items():
            with pytest.raises(RewardFailed) as caught:
                rewarder.score([request(name, 7, 3)])
            said = str(caught.value)
            assert "odd" in said and "sample 3 of prompt 7" in said and "returned" in said and "Likely fix" in said
            if not isinstance(value, dict):
                assert type(value).__name__ in said
        with pytest.raises(RewardFailed, match="for 'bad'"):
            rewarder.score([request("bad part")])


@pytest.mark.parametrize("function", ["by_completion", "by_completion_async"])
@pytest.mark.parametrize("workers", [HERE, APART])
def test_exceptions_are_reported_with_their_traceback(function, workers):
    with Rewarder(f"{HOME}:{function}", workers=workers, timeout=LONG) as rewarder:
        for what, error in (
            ("raise", "ValueError: no digits in it"),
            ("timeout", "TimeoutError: a server's own"),
            ("cancelled", "CancelledError"),
            ("exit", "SystemExit: 3"),
            ("not a number", "ValueError: could not convert"),
        ):
            with pytest.raises(RewardFailed) as caught:
                rewarder.score([request("1"), request(what, 2, 1)])
            said = str(caught.value)
            assert f"{HOME}:{function}" in said and "sample 1 of prompt 2" in said and error in said
            assert "reward_samples.py" in said and "by_completion" in said
        assert rewarder.score([request("1")]).values == (1.0,)  # the next call works


@pytest.mark.parametrize("function", ["by_completion", "by_completion_async"])
@pytest.mark.parametrize("workers", [HERE, APART])
def test_a_hanging_call_times_out(function, workers):
    with Rewarder(f"{HOME}:{function}", workers=workers, timeout=SHORT) as rewarder:
        with pytest.raises(RewardTimeout, match=f"{function}.*within 2 s.*sample 1 of prompt 2"):
            rewarder.score([request("hang", 2, 1)])
        rewarder.close()  # may be called twice
    with Rewarder(f"{HOME}:{function}", workers=workers, timeout=SHORT, on_error="drop") as rewarder:
        rewards = rewarder.score(batch("1", "2", "hang", group=3))
        assert rewards.kept == (0, 1) and [type(e) for e in rewards.errors] == [RewardTimeout]


def test_a_function_that_holds_the_gil_is_killed():
    with Rewarder(samples.by_completion, workers=1, timeout=SHORT) as rewarder:
        (pid,) = pids(rewarder)
        with pytest.raises(RewardTimeout, match="killed"):
            rewarder.score([request("regex")])
        assert not alive(pid)


@pytest.mark.parametrize(
    ("how", "said"),
    [("os._exit", "exit code 3"), ("segfault", "SIGSEGV"), ("kill", "(?s)SIGKILL.*about to go")],
)
def test_a_function_that_ends_its_process_is_isolated(apart, how, said):
    (before,) = pids(apart)
    with pytest.raises(RewardFailed, match=said) as caught:
        apart.score([request(how, 4, 2)])
    assert "sample 2 of prompt 4" in str(caught.value)
    after = apart.score([request("pid")]).values[0]
    assert after not in (before, os.getpid()) and not alive(before)


def test_a_worker_killed_while_idle_is_replaced_without_error(apart):
    before = int(apart.score([request("pid")]).values[0])
    os.kill(before, signal.SIGKILL)
    assert int(apart.score([request("pid")]).values[0]) != before


def test_output_of_a_function_is_not_a_reply(apart):
    assert apart.score(batch("print", "1", "print", "2")).values == (0.25, 1.0, 0.25, 2.0)


def test_memory_limit():
    with Rewarder(samples.by_completion, workers=1, timeout=LONG, memory_limit=4 << 30) as rewarder:
        with pytest.raises(RewardFailed, match=r"MemoryError|SIGKILL"):
            rewarder.score([request("memory")])
        assert rewarder.score([request("2")]).values == (2.0,)


def test_child_processes_of_a_function_are_killed(tmp_path):
    note = tmp_path / "pids"
    with Rewarder(samples.leaves_a_child, workers=1, timeout=2.0) as rewarder:
        with pytest.raises(RewardTimeout):
            rewarder.score([RewardRequest(str(note), "")])
        wait_until(lambda: not any(alive(pid) for pid in note.read_text().split()))


def test_workers_share_a_batch_and_keep_their_state(apart):
    with Rewarder(samples.by_completion, workers=2, timeout=LONG) as rewarder:
        rewarder.score(batch(*["count"] * 8))
        assert sum(rewarder.score(batch(*["count"] * 2)).values) > 2  # functions keep state between calls
        assert samples.CALLS == 0
        both = pids(rewarder)
    assert all(not alive(pid) for pid in both)


def test_failed_samples_are_dropped_not_zero():
    with Rewarder(samples.by_completion, on_error="drop") as rewarder:
        # Groups of three that lose one, two and none: the second is left with one sample, which has no baseline.
        rewards = rewarder.score(batch("1", "raise", "3", "raise", "5", "raise", "7", "8", "9", group=3))
        assert rewards.kept == (0, 2, 6, 7, 8) and rewards.values == (1.0, 3.0, 7.0, 8.0, 9.0)
        assert len(rewards.errors) == 3 and rewards.num_dropped == 4 and len(rewards.parts) == 5
        with pytest.raises(RewardFailed, match="none of 4 samples is left"):
            rewarder.score(batch("raise", "1", "2", "raise"))
        assert rewarder.score([]).values == () and rewarder.score([request("1")]).kept == (0,)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_survivors(rows):
    groups, failed = [g for g, _ in rows], {i for i, (_, bad) in enumerate(rows) if bad}
    kept = survivors(groups, failed)
    for group in set(groups):
        all_of_it = [i for i, g in enumerate(groups) if g == group]
        good = [i for i in all_of_it if i not in failed]
        assert [i for i in kept if groups[i] == group] == (good if len(good) > 1 or good == all_of_it else [])


def test_an_error_cancels_the_other_calls_of_a_batch(tmp_path):
    with Rewarder(samples.by_completion, workers=2, timeout=LONG) as rewarder:
        rewarder.score(batch(*["1"] * 8))
        with pytest.raises(RewardFailed, match="no digits"):
            rewarder.score(batch("hang", "raise"))  # does not wait for the one that hangs
        assert rewarder.score(batch("1", "2")).values == (1.0, 2.0)


def test_async_call_on_another_event_loop():
    async def both():
        with Rewarder(samples.later) as rewarder:
            return await asyncio.gather(*(rewarder.ascore([request(text)]) for text in ("1", "2")))

    assert [r.values for r in asyncio.run(both())] == [(1.0,), (2.0,)]


def test_functions_without_a_name_run_in_process_only():
    with Rewarder(lambda prompt, completion: 1.5) as rewarder:
        assert rewarder.score([request()]).values == (1.5,)
    with pytest.raises(ConfigError, match="workers=0"):
        Rewarder(lambda prompt, completion: 1.5, workers=1)
    assert import_function(import_name(samples.exact)) is samples.exact


def test_extra_facts_must_be_json_for_workers(apart):
    with pytest.raises(RewardFailed, match="extra"):
        apart.score([request("1", extra={"x": object()})])


@pytest.mark.parametrize(
    ("workers", "name", "said"),
    [
        (APART, f"{HOME}:exakt", "did you mean 'exact'"),  # the same code looks for the name in both places
        (APART, "zq_no_such_package:f", "no module 'zq_no_such_package'; is its directory on PYTHONPATH"),
        (HERE, f"{HOME}:exakt", "did you mean 'exact'"),
        (HERE, f"{HOME}:zzzzz", "it has .*exact"),
        (HERE, f"{HOME}s:exact", f"no module '{HOME}s'; did you mean 'reward_samples'"),
        (HERE, "zq_no_such_package:f", "no module 'zq_no_such_package'; is its directory on PYTHONPATH"),
        (HERE, "slipstreem:f", "did you mean 'slipstream'"),
        (HERE, f"{HOME}:not_a_function", "not a function but 3"),
        (HERE, f"{HOME}.exact", f"did you mean '{HOME}:exact'"),
        (HERE, "exact", "my_module:my_reward"),
        (HERE, ":f", "my_module:my_reward"),
    ],
)
def test_wrong_names_are_reported_with_suggestions(workers, name, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Rewarder(name, workers=workers)


@pytest.mark.parametrize("workers", [HERE, APART])
def test_a_module_in_the_working_directory(workers, tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def f(prompt, completion):\n    return 4.5\n")
    (tmp_path / "needs_another.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with Rewarder("rewards_of_mine:f", workers=workers, timeout=LONG) as rewarder:
        assert rewarder.score([request()]).values == (4.5,)
    with pytest.raises(ConfigError, match=r"(?s)importing needs_another failed.*no_such_module_at_all"):
        Rewarder("needs_another:f", workers=workers)


def test_a_module_that_hangs_or_dies_when_imported(tmp_path, monkeypatch):
    (tmp_path / "hangs_on_import.py").write_text("import time\nprint('still here', flush=True)\ntime.sleep(3600)\n")
    (tmp_path / "dies_on_import.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"(?s)hangs_on_import:f"):
        Rewarder("hangs_on_import:f", workers=1, start_timeout=2.0)
    with pytest.raises(ConfigError, match="exit code 7 while importing"):
        Rewarder("dies_on_import:f", workers=1)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"workers": -1}, {"on_error": "zero"}, {"concurrency": 0}])
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Rewarder(samples.exact, **wrong)


@pytest.mark.parametrize("functions", [[], {}, [samples.exact, samples.exact], {f"{HOME}:exact": float("nan")}])
def test_invalid_functions_are_rejected(functions):
    with pytest.raises(ConfigError, match=r"only once|finite"):
        Rewarder(functions)


def test_from_toml(tmp_path):
    path = tmp_path / "reward.toml"
    path.write_text(
        f'workers = 1\ntimeout = 60\non_error = "drop"\n[functions]\n"{HOME}:length" = 2\n"{HOME}:parts" = 0.5\n'
    )
    with Rewarder.from_config(load(RewardConfig, path)) as rewarder:
        assert rewarder.score([request("ab")]).values == (2 * 2 + 0.5 * 2.0,)
    with pytest.raises(ConfigError, match=r"functions\.f must be a valid number"):
        load(RewardConfig, None, ["functions.f=text"])
    with pytest.raises(ConfigError, match="functions must be a valid dictionary"):
        load(RewardConfig, None, ["functions=3"])


def test_reward_requests(tmp_path):
    write_sample_config(tmp_path)
    codec = Codec(tmp_path)
    (ids,) = codec.answers(["21"])
    made = Completion("x", 1, (1, 9), (*ids, 2), "", (), (), "stop", (VersionSpan(0, 0, 3),), prompt_index=1)
    (found,) = reward_requests(["a", "r12="], [made], codec, answer=lambda prompt: prompt[::-1])
    assert found == RewardRequest("r12=", "21", (1, 9), (*ids, 2), "stop", "=21r", 1, 1)


def test_a_function_that_corrupts_the_workers_pipe_is_reported(apart):
    with pytest.raises(RewardFailed, match="invalid reply"):
        apart.score([request("garble")])
    assert apart.score([request("3")]).values == (3.0,)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["value", "parts", "what", "fix", "detail", "x"]), JSON))
def test_parsed_replies_have_finite_rewards(said):
    found = parse_reply(said)
    if isinstance(found, Reward):
        assert math.isfinite(found.value) and all(math.isfinite(part) for part in found.parts.values())
    assert found is None or said.keys() <= {"value", "parts", "what", "fix", "detail"}


def test_a_closed_rewarder_raises(apart):
    for workers in (HERE, APART):
        with Rewarder(samples.length, workers=workers) as rewarder:
            pass
        with pytest.raises(RequestError, match="closed"):
            rewarder.score([request()])


_TRAINER = f"""
import sys
from slipstream.rl.rewards.rewarder import Rewarder
from slipstream.rl.rewards.functions import RewardRequest
with Rewarder("{HOME}:leaves_a_child", workers=1, timeout=3600) as rewarder:
    rewarder.score([RewardRequest(sys.argv[1], "")])
"""


def test_workers_die_with_the_trainer(tmp_path):
    note = tmp_path / "pids"
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, str(note)])
    try:
        wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
    finally:
        trainer.kill()
        trainer.wait()
    worker, child = (int(pid) for pid in note.read_text().split())
    try:
        wait_until(lambda: not alive(worker))
        assert not alive(worker)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_workers_import_nothing_heavy():
    code = "import slipstream.rl.rewards.worker, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not any(f"'{heavy}'" in said for heavy in ("jax", "numpy", "grpc", "torch", "optax"))
