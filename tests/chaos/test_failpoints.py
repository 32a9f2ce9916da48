"""Faults that a process carries out itself."""

from __future__ import annotations

import socket
import subprocess
import sys

CUT_OFF = """
import socket, sys, time
from slipstream.runtime import failpoints
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
failpoints.PARTITION_SECONDS = 3.0
failpoints.fail("engine.sample", "partition")
time.sleep(0.2)
peer.sendall(b"I")
peer.settimeout(0.5)
try:
    print(peer.recv(1))
except TimeoutError:
    peer.settimeout(30)
    print("nothing, then", peer.recv(1))
"""


def test_a_process_that_is_cut_off_hears_its_peers_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", CUT_OFF, str(server.getsockname()[1])], stdout=subprocess.PIPE, text=True
        )
        with child, server.accept()[0] as connection:
            assert connection.recv(1) == b"I"
            connection.sendall(b"A")
            assert child.stdout is not None
            assert child.stdout.read() == "nothing, then b'A'\n"
