"""What ends libzmq's process from outside, and what keeps that from happening.

Up to 4.3.5 libzmq aborts if a connection ends that it does not read for now, and a ping of ZMTP's
own is in what it has read ahead. So no client of ours says such pings on the control channel, and
with keys nobody can who is not allowed.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import zmq

from weightbus.bus.net.zmtp import GREETING
from weightbus.bus.trust.keys import generate

BROKEN = (4, 3, 5)  # the last version that aborts, as far as it is known
ATTACKS = 30
SECONDS = 60.0
UNREAD = 20  # messages, of which libzmq takes a few while nobody takes them from it
DEALER = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PING = b"\x04\x07\x04PING\x00\x10"
# Its thread stands still while this one holds the interpreter's lock, and libzmq's own reads ahead.
CHILD = """
import ctypes, sys, weightbus
with weightbus.Publisher("tcp://127.0.0.1:0", keys=sys.argv[1], shared_memory=False) as publisher:
    print(publisher.address, flush=True)
    while sys.stdin.readline():
        print("held", flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        print("free", len(publisher.workers()), flush=True)
"""


@contextlib.contextmanager
def publisher(keys: str) -> Generator["subprocess.Popen[str]"]:
    """A publisher in a process of its own, until the block ends."""
    command = [sys.executable, "-c", CHILD, keys]
    pipe = subprocess.PIPE
    with subprocess.Popen(  # noqa: S603 - ourselves
        command, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: "subprocess.Popen[str]", word: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is dead
        os.write(process.stdin.fileno(), word)


def until(connection: socket.socket, word: bytes) -> None:
    """Read on until a word was said, or the other side has hung up."""
    said = b""
    while word not in said and (more := connection.recv(1024)):
        said += more


def attack(process: "subprocess.Popen[str]", address: tuple[str, int]) -> bool:
    """Have a connection end at the worst moment; return whether the process is still there."""
    assert process.stdout is not None
    say(process, b"\n")
    if process.stdout.readline() != "held\n":
        return False
    with contextlib.suppress(OSError), socket.create_connection(address, SECONDS) as stranger:
        stranger.settimeout(SECONDS)
        stranger.sendall(GREETING + DEALER)
        until(stranger, b"READY")
        stranger.sendall(PING + UNREAD * b"\x00\x01x" + PING + b"\x00\x01x")
        until(stranger, b"PONG")  # then all that came with that ping has been read, too
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    say(process, b"x")
    return process.stdout.readline().startswith("free")


def port_of(process: "subprocess.Popen[str]") -> tuple[str, int]:
    assert process.stdout is not None
    return "127.0.0.1", int(process.stdout.readline().rsplit(":", 1)[1])


@pytest.mark.skipif(zmq.zmq_version_info() > BROKEN, reason="not known of this libzmq")
def test_without_keys_a_stranger_can_end_a_publisher() -> None:
    """Once this fails, `docs/guides/failures.md` and `SECURITY.md` promise too little."""
    with publisher("") as process:
        address = port_of(process)
        assert not all(attack(process, address) for _ in range(ATTACKS))
        assert process.wait(SECONDS) == -signal.SIGABRT
        assert process.stderr is not None
        assert "Assertion failed: !_io_error (src/stream_engine_base.cpp" in process.stderr.read()


def test_with_keys_a_stranger_cannot_end_a_publisher(tmp_path: Path) -> None:
    generate(tmp_path / "keys", {"w": "worker"})
    with publisher(str(tmp_path / "keys")) as process:
        address = port_of(process)
        assert all(attack(process, address) for _ in range(ATTACKS))
        assert process.poll() is None
