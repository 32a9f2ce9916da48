"""Skipped network tests are reported."""

import subprocess
import sys

import pytest

from tests.deploy.lan import NEEDS, environment, lan, not_run

USERS = """\
import pytest
from tests.deploy.lan import lan

@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with lan(tmp_path_factory.mktemp("lan"), "node1") as machines:
        yield machines

def test_first(machines): ...
def test_second(machines): ...
def test_of_something_else(): pytest.skip("no time")
"""


def test_what_was_not_run(tmp_path):
    (tmp_path / "test_users.py").write_text(USERS)
    report = tmp_path / "report.xml"
    own = environment({"SLIPSTREAM_REQUIRE_NETNS": "0", "PATH": ""})  # nothing is there to make it with
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        f"--junitxml={report}",
    ]
    done = subprocess.run([*command, str(tmp_path)], env=own, cwd=tmp_path, capture_output=True, text=True, check=False)
    skipped = ["test_users.py::test_first", "test_users.py::test_second"]
    assert (done.returncode, not_run(report)) == (0, skipped), done.stdout


def test_a_network_that_is_required(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_REQUIRE_NETNS", "1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match=NEEDS), lan(tmp_path, "node1"):
        pass
