"""Simulated machines on a private network. Each has its own address, loopback, `/etc/hosts` and shared memory, so that
only the network connects them.

`python -m tests.deploy.lan REPORT` lists the tests that pytest skipped for lack of network namespaces, from its
`--junitxml`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = "several hosts need network namespaces"
_NOT_PERMITTED = (OSError, subprocess.CalledProcessError)
_ENTER = (
    'unset SLIPSTREAM_SHM_DIR && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"'
)


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    inside: tuple[str, ...]
    """Prefix of commands that run in this machine's network."""
    switch: tuple[str, ...]
    """Prefix of commands that run in the switch, which sees all traffic."""
    hosts_file: Path

    def command(self, *command: str) -> list[str]:
        return [*self.inside, "sh", "-c", _ENTER, "sh", str(self.hosts_file), *command]

    def slipstream(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, "-m", "slipstream.cli", *arguments)

    def start(self, command: Sequence[str], log: Path, **over: str) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(over))

    def run(self, command: Sequence[str], **over: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(over), check=False)


def environment(over: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment, with this checkout importable."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **(over or {})}


@contextlib.contextmanager
def lan(directory: Path, *names: str) -> Iterator[list[Machine]]:
    """Skip if namespaces cannot be made, as root or in a user namespace, unless SLIPSTREAM_REQUIRE_NETNS requires them."""
    with contextlib.ExitStack() as held:
        try:
            machines = held.enter_context(_connected(directory, names, []))
        except _NOT_PERMITTED as plain:
            try:
                machines = held.enter_context(_connected(directory, names, held.enter_context(_room())))
            except _NOT_PERMITTED as own:
                why = f"{NEEDS}: {_said(plain)}; as root of a user namespace: {_said(own)}"
                if os.environ.get("SLIPSTREAM_REQUIRE_NETNS") == "1":
                    pytest.fail(why)
                pytest.skip(why)
        yield machines


@contextlib.contextmanager
def _room() -> Iterator[list[str]]:
    """Prefix of commands that run as root of a user namespace, which needs no root. The namespace ends with this process."""
    hold = "mount -t tmpfs tmpfs /run && echo made && exec cat"  # `ip netns` keeps its names in /run
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", hold]
    pipe = subprocess.PIPE
    with subprocess.Popen(unshare, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            if holder.stdout.readline() != "made\n":
                raise OSError(holder.stderr.read())
            yield ["nsenter", f"--target={holder.pid}", "--user", "--preserve-credentials", "--net", "--mount", "--wd"]
        finally:
            holder.stdin.close()


@contextlib.contextmanager
def _connected(directory: Path, names: Sequence[str], room: Sequence[str]) -> Iterator[list[Machine]]:
    prefix = f"slipstream-{os.getpid()}"
    switch, spaces = f"{prefix}-switch", [f"{prefix}-{name}" for name in names]
    enter = (*room, "ip", "netns", "exec")
    machines = [
        Machine(name, f"10.77.0.{index}", (*enter, space), (*enter, switch), directory / "hosts")
        for index, (name, space) in enumerate(zip(names, spaces, strict=True), 1)
    ]
    lines = ["127.0.0.1 localhost", *(f"{machine.address} {machine.name}" for machine in machines)]
    (directory / "hosts").write_text("\n".join(lines) + "\n")

    def ip(*arguments: str) -> None:
        subprocess.run([*room, "ip", *arguments], check=True, capture_output=True, text=True)

    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, (machine, space) in enumerate(zip(machines, spaces, strict=True)):
            ip("netns", "add", space)
            port = f"port{index}"
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            subprocess.run(machine.command("true"), check=True, capture_output=True, text=True)
        yield machines
    finally:
        for space in (switch, *spaces):
            with contextlib.suppress(*_NOT_PERMITTED):
                ip("netns", "del", space)


def _said(error: Exception) -> str:
    return (getattr(error, "stderr", "") or str(error)).strip()


def not_run(report: Path) -> list[str]:
    return [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if any(NEEDS in skipped.get("message", "") for skipped in case.iter("skipped"))
    ]


if __name__ == "__main__":
    print("\n".join(not_run(Path(sys.argv[1]))))
