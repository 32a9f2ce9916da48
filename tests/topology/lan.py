"""Machines on a network of their own, as far as one kernel can pretend: each has an address, a loopback, an `/etc/hosts` and a
shared memory that no other sees, so that nothing but the network connects them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ENTER = 'mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    space: str
    hosts_file: Path

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.space, "sh", "-c", _ENTER, "sh", str(self.hosts_file), *command]

    def slipstream(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, "-m", "slipstream.cli", *arguments)

    def start(self, command: Sequence[str], log: Path, **over: str) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(over))

    def run(self, command: Sequence[str], **over: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(over), check=False)


def environment(over: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, with this checkout importable, and without what names shared memory of this machine."""
    own = {key: value for key, value in os.environ.items() if key != "SLIPSTREAM_SHM_DIR"}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [own.get("PYTHONPATH")])])
    return {**own, **(over or {})}


@contextlib.contextmanager
def lan(directory: Path, *names: str) -> Iterator[list[Machine]]:
    """Skips where it is not permitted (it takes root), unless SLIPSTREAM_REQUIRE_NETNS says that it must be."""
    prefix = f"slipstream-{os.getpid()}"
    machines = [
        Machine(name, f"10.77.0.{index}", f"{prefix}-{name}", directory / "hosts")
        for index, name in enumerate(names, 1)
    ]
    lines = ["127.0.0.1 localhost", *(f"{machine.address} {machine.name}" for machine in machines)]
    (directory / "hosts").write_text("\n".join(lines) + "\n")
    switch = f"{prefix}-switch"
    try:
        try:
            _connect(switch, machines)
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"several hosts need root, `ip netns` and mounts: {getattr(error, 'stderr', '') or error}"
            if os.environ.get("SLIPSTREAM_REQUIRE_NETNS") == "1":
                pytest.fail(why)
            pytest.skip(why)
        yield machines
    finally:
        for space in (switch, *(machine.space for machine in machines)):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _connect(switch: str, machines: Sequence[Machine]) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for index, machine in enumerate(machines):
        _ip("netns", "add", machine.space)
        port = f"port{index}"
        _ip("-n", machine.space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", machine.space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", machine.space, "link", "set", "eth0", "up")
        _ip("-n", machine.space, "link", "set", "lo", "up")
        subprocess.run(machine.command("true"), check=True, capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
