"""Secret files are removed when their process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.processes.run_dir import read_run_dir
from slipstream.deploy.ray.actors import JoinCredentials
from slipstream.deploy.ray.secret_file import SecretFile

LENDER = """
import sys
from pathlib import Path
from slipstream.deploy.ray.actors import JoinCredentials

kept = JoinCredentials("127.0.0.1:9", "127.0.0.1", "secret-token", "CA", "PEM", "secret-key").write(Path(sys.argv[1]))
print("left", flush=True)
sys.stdin.read()
"""


def holding(directory: Path, text: str) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.name for path in files if text in path.read_text())


def test_what_a_killed_process_lent_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "engine-0.joins"
    command = [sys.executable, "-c", LENDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdout is not None and lender.stdout.readline() == "left\n"
        assert read_run_dir(directory) == ("127.0.0.1:9", "secret-token", str(directory / "ca.pem"))
        assert holding(directory, "secret-") == ["engine.key", "token"]
        assert (directory / "token").stat().st_mode & 0o077 == 0
        lender.kill()
    assert holding(tmp_path, "secret-") == [] and holding(tmp_path, "PEM") == ["engine.pem"]
    again = JoinCredentials("127.0.0.1:9", "127.0.0.1", "another").write(directory)
    assert read_run_dir(directory)[1] == "another"
    for lent in again:
        lent.close()
        lent.close()
    assert not (directory / "token").is_symlink()


@pytest.mark.parametrize("has_nameless_files", [True, False])
def test_lent_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_nameless_files: bool) -> None:
    if not has_nameless_files:
        monkeypatch.delattr("os.memfd_create")
    link = tmp_path / "token"
    link.symlink_to("/proc/0/fd/0")  # left by a killed process
    first = SecretFile(link, "one")
    assert link.read_text() == link.read_text() == "one" and link.is_symlink() == has_nameless_files
    assert link.stat().st_mode & 0o077 == 0
    second = SecretFile(link, "two")
    assert link.read_text() == "two"
    second.close()
    assert list(tmp_path.iterdir()) == []
    first.close()
