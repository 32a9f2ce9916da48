"""Packet capture, run by tests: `python host_sniffer.py FILE` records all packets on the switch until it is killed."""

import socket
import sys

EVERYTHING = 3
with (
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING)) as wire,
    open(sys.argv[1], "wb") as file,
):
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
    print("listening", flush=True)
    while True:
        file.write(wire.recv(1 << 17))
        file.flush()
