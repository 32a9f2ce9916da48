"""Node lists, roles and the batch script of SLURM jobs. SLURM itself is not needed."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.config import VllmConfig
from slipstream.deploy.slurm.job import JobNode, SlurmJob, expand, script, this_node
from slipstream.deploy.slurm.node import NodeRole
from slipstream.errors import ConfigError, DeadlineExceeded


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", "login"),
        ("gpu1,gpu7", "gpu1 gpu7"),
        ("gpu[1-3]", "gpu1 gpu2 gpu3"),
        ("gpu[08-11]", "gpu08 gpu09 gpu10 gpu11"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[001,3-4,09-10]", "gpu001 gpu3 gpu4 gpu09 gpu10"),
        ("rack[1-2]-n[01-02]", "rack1-n01 rack1-n02 rack2-n01 rack2-n02"),
        ("a[1-2][3-4].x", "a13.x a14.x a23.x a24.x"),
        ("n[1,3]-ib,head,c[2]", "n1-ib n3-ib head c2"),
        (" gpu[1-2]\n", "gpu1 gpu2"),
    ],
)
def test_node_lists(nodelist, hosts):
    assert expand(nodelist) == hosts.split()


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "a,",
        "a[",
        "a]",
        "a[]",
        "a[1-]",
        "a[x]",
        "a[3-1]",
        "a[1-2",
        "a[1[2]]",
        "a b",
        "a[1 ]",
        "a[-1]",
        "a[1--2]",
    ],
)
def test_lists_that_cannot_be_read(nodelist):
    with pytest.raises(ConfigError, match="node list"):
        expand(nodelist)


@pytest.mark.parametrize("nodelist", ["a[0-999999999]", "a[0-999][0-999]", "a[1-" + "9" * 5000 + "]"])
def test_a_list_that_is_too_long_is_refused_at_once(nodelist):
    with pytest.raises(ConfigError):
        expand(nodelist)


names = st.text("abcxyz-.", min_size=1, max_size=4)
numbers = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
"""First number, how many more, and the minimum number of digits."""


@given(
    st.lists(st.lists(st.tuples(names, st.lists(numbers, max_size=3)), min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_expanding_undoes_writing(words):
    """Write a list from its parts, and enumerate its hosts by hand."""
    texts, hosts = [], []
    for word in words:
        text, found = "", [""]
        for name, ranges in word:
            text += name
            found = [host + name for host in found]
            if ranges:
                items, choices = [], []
                for first, more, width in ranges:
                    low = f"{first:0{width}d}"
                    items.append(low if more == 0 else f"{low}-{first + more}")
                    choices += [f"{number:0{len(low)}d}" for number in range(first, first + more + 1)]
                text += f"[{','.join(items)}]"
                found = [host + choice for host, choice in itertools.product(found, choices)]
        texts.append(text)
        hosts += found
    assert expand(",".join(texts)) == hosts


@given(st.text("ab01,[]- \n", max_size=20))
@example("[1]")
def test_any_text_is_a_list_of_names_or_refused(text):
    try:
        found = expand(text)
    except ConfigError:
        return
    assert found and all(name and not set(name) & set("[], \n") for name in found)


# --- roles ------------------------------------------------------------------------------------------------------------


def job(nodelist="gpu[1-4]", node=0, **more):
    return {"SLURM_JOB_NODELIST": nodelist, "SLURM_NODEID": str(node), **more}


def test_the_trainer_is_first_and_the_last_nodes_hold_engines():
    roles = [this_node(job(node=node), 2) for node in range(4)]
    assert roles[0].trainers == ("gpu1", "gpu2") and roles[0].inference == ("gpu3", "gpu4")
    assert [(role.name, role.is_head, role.is_trainer) for role in roles] == [
        ("gpu1", True, True),
        ("gpu2", False, True),
        ("gpu3", False, False),
        ("gpu4", False, False),
    ]
    assert not any(role.is_alone for role in roles)


def test_no_inference_nodes_means_one_machine():
    assert (
        this_node({}, 0) == JobNode(("localhost",), 0, 0) and this_node({}, 0).is_alone and this_node({}, 0).is_trainer
    )
    assert this_node(job("gpu7"), 0).is_alone and this_node(job("gpu7"), 0).name == "gpu7"


@pytest.mark.parametrize(
    ("environ", "num_inference", "said"),
    [
        ({}, 1, "SLURM_JOB_NODELIST is not set"),
        (job(), 0, "one machine, but the job has 4"),
        (job(), 4, "leave none for the trainer"),
        (job(), -1, "at least 0"),
        (job("gpu1,gpu1"), 1, "twice"),
        (job(node="4"), 1, "SLURM_NODEID is '4'"),
        (job(node="-1"), 1, "SLURM_NODEID is '-1'"),
        (job(node=""), 1, "srun"),
        (job(SLURM_LOCALID="1"), 1, "once per node"),
        (job(SLURMD_NODENAME="gpu3"), 1, "SLURMD_NODENAME is 'gpu3'"),
    ],
)
def test_jobs_that_cannot_be(environ, num_inference, said):
    with pytest.raises(ConfigError, match=said):
        this_node(environ, num_inference)


@pytest.mark.parametrize(
    ("alone", "devices", "trainer", "placed", "trainers"),
    [
        (False, None, (), [(4, 5), (6, 7)], ()),
        (False, "auto", (), [(4, 5), (6, 7)], ()),
        (False, [[7, 6], [5, 4]], (), [(7, 6), (5, 4)], ()),
        (True, "auto", (), [(5, 6), (7, 0)], (4,)),
        (True, "auto", (4, 5), "3 are not the trainer's", (4, 5)),
        (True, None, (), "0 are not the trainer's", ()),
        (True, [[0, 1], [2, 3]], (4,), [(0, 1), (2, 3)], (4,)),
    ],
)
def test_engines_of_a_node_take_gpus_of_its_allocation(monkeypatch, alone, devices, trainer, placed, trainers):
    monkeypatch.setenv("SLIPSTREAM_PRETEND_GPUS", "8")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7" if not alone else "4,5,6,7,0")
    engine = VllmConfig(python=sys.executable, tensor_parallel_size=2)
    node = JobNode(("a",), 0, 0) if alone else JobNode(("a", "b"), 1, 1)
    role = NodeRole(node, Path(), Path(), ["true"], engine, 2, devices=devices, trainer_devices=trainer)
    assert tuple(role.trainer_gpus) == trainers
    if isinstance(placed, str):
        with pytest.raises(ConfigError, match=placed):
            role._placed(engine)
    else:
        assert [config.devices for config in role._placed(engine)] == placed
    if alone and devices == "auto" and not trainer:
        with pytest.raises(
            ConfigError, match=r"3 engine\(s\) of 2 rank\(s\) leave none of the 5 GPU\(s\) of a for the trainer"
        ):
            replace(role, engines_per_node=3).trainer_gpus


@pytest.mark.parametrize(("index", "waits_for"), [(1, "all engines"), (2, "the gateway")])
def test_a_node_that_never_sees_the_others_says_so(tmp_path, index, waits_for):
    part = NodeRole(JobNode(("a", "b", "c"), index, 1), tmp_path, tmp_path / "model", ["true"], start_seconds=0.2)
    with pytest.raises(DeadlineExceeded, match=rf"{waits_for} in .*file system shared with a\?"):
        part.run()


def test_a_trainers_further_node_runs_its_command_and_passes_on_the_signal_to_end(tmp_path):
    (tmp_path / "c-0.ready").touch()  # the engine has registered
    trainer = "sleep 60 & trap 'kill $!; exit 7' TERM; echo $SLIPSTREAM_PROCESS_INDEX/$SLIPSTREAM_PROCESS_COUNT $SLIPSTREAM_RUN_DIR; wait"
    options = ["--run-dir", str(tmp_path), "--model", "none", "--inference-nodes", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "role", *options, "--", "bash", "-c", trainer],
        env={**os.environ, **job("a,b,c", 1)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == f"1/2 {tmp_path}\n"
        process.terminate()
        assert process.wait(30) == 7
    finally:
        process.kill()
        process.stdout.close()


# --- the script -------------------------------------------------------------------------------------------------------


def test_the_script_says_what_was_asked_for(tmp_path):
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$SLIPSTREAM_RUN_DIR" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    asked = SlurmJob(
        ["python", "train.py", "--name", "it's"],
        "/models/a b",
        "/runs/x y",
        2,
        3,
        4,
        ["tensor_parallel_size=2"],
        sbatch=["--partition=gpu"],
    )
    text = script(asked)
    assert (
        text.startswith("#!/bin/bash\n#SBATCH")
        and "\n#SBATCH --nodes=5\n" in text
        and "\n#SBATCH --partition=gpu\n" in text
    )
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NAME": "n",
        "SLURM_JOB_ID": "9",
        "SLURM_RESTART_COUNT": "1",
    }
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=True)
    run_dir, *words = done.stdout.splitlines()
    assert run_dir == "/runs/x y/n-9-1"
    options = [
        "--model",
        "/models/a b",
        "--inference-nodes",
        "3",
        "--engines-per-node",
        "4",
        "--engine",
        "tensor_parallel_size=2",
    ]
    command = ["python", "train.py", "--name", "it's"]
    assert words == ["--kill-on-bad-exit=1", "slipstream", "role", *options, "--", *command]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"command": []}, "no trainer command"),
        ({"num_trainers": 0}, "at least 1 trainer node"),
        ({"num_trainers": 2, "num_inference": 0}, "one machine"),
        ({"sbatch": ["partition"]}, "not an option of sbatch"),
        ({"sbatch": ["--x\nrm -rf"]}, "not an option of sbatch"),
        ({"name": "a\nb"}, "not a valid job name"),
    ],
)
def test_scripts_that_cannot_be(over, said):
    with pytest.raises(ConfigError, match=said):
        SlurmJob(**{"command": ["true"], "model": "m", "run_dir": "r", **over})
