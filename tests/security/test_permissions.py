"""Files and directories of a run are private, whatever the umask; directories that cannot be used are typed errors."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slipstream
from slipstream.deploy.processes import certificates
from slipstream.errors import ConfigError
from slipstream.gateway.journal import Journal
from slipstream.gateway.server import serve
from slipstream.gateway.tokens import make_token
from slipstream.model.checkpoints.sample_model import write_sample_config
from slipstream.runtime.private_files import private_directory, private_file


def readable_by_others(directory):
    found = [directory, *directory.rglob("*")]
    return [str(path) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink()]


@pytest.fixture
def careless():
    """The umask of most users, with which everybody can read new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_a_gateway_by_hand_leaves_nothing_that_others_can_read(tmp_path, careless):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "journal.sqlite").touch(0o644)  # of an earlier release
    command = [sys.executable, "-m", "slipstream.cli", "gateway", "--run-dir", str(run_dir), "--http", "0"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as gateway:
        try:
            while not (run_dir / "gateway.json").exists():
                assert gateway.poll() is None
                time.sleep(0.02)
            make_token(run_dir, "viewer")
            assert {"token", "tokens", "gateway.json", "journal.sqlite"} <= {path.name for path in run_dir.iterdir()}
            assert readable_by_others(run_dir) == []
        finally:
            gateway.kill()


def test_files_of_this_process_are_private(tmp_path, careless):
    run_dir, made = private_directory(tmp_path / "run", "the run directory"), tmp_path / "certificates"
    Journal(private_file(run_dir / "journal.sqlite")).close()
    certificates.make(made, ["node1"])
    public = [str(made / "ca.pem"), str(made / "node1.pem")]  # not secret, and their directory is private
    assert readable_by_others(run_dir) == [] and sorted(readable_by_others(made)) == public


@pytest.mark.parametrize("make", ["launch", "inprocess", "train", "gateway", "certificates"])
def test_a_directory_that_cannot_be_used_is_named_before_anything_starts(tmp_path, make):
    write_sample_config(tmp_path / "model")
    (tmp_path / "file").touch()
    for where in (
        tmp_path / "file" / "run",
        Path("/proc/run"),
    ):  # a file in the way, and a file system that is read-only
        with pytest.raises(ConfigError, match=rf"{where} cannot be used: .*choose a directory"):
            match make:
                case "launch":
                    slipstream.launch(tmp_path / "model", run_dir=where)
                case "inprocess":
                    slipstream.inprocess(tmp_path / "model", run_dir=where)
                case "train":
                    slipstream.train(slipstream.TrainConfig(run_dir=where, engines=0))
                case "gateway":
                    asyncio.run(serve(slipstream.GatewayConfig(), where, asyncio.Event()))
                case "certificates":
                    certificates.make(where, ["node1"])
