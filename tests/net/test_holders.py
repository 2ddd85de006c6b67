"""An address that is in use: which process holds it, and whether waiting for it makes sense."""

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from weightbus import AddressError, Publisher
from weightbus.bus.net import listening, processes
from weightbus.tests.client.settling import settled
from weightbus.tests.net.ports import lasting_address, lasting_ports

pytestmark = pytest.mark.skipif(not processes.PROC.exists(), reason="needs Linux")


@contextlib.contextmanager
def a_connection() -> Generator[tuple[socket.socket, int]]:
    """Yield an outgoing connection and its port; the port below is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = next(filter(None, (_beside(server.getsockname()) for _ in range(100))))
        # Otherwise the kernel would keep the closed connection's port for a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with connection:
            yield connection, connection.getsockname()[1]


def _beside(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection from a port above a free port; None if that fails now."""
    with socket.socket() as below:
        below.bind(("127.0.0.1", 0))
        own = ("127.0.0.1", below.getsockname()[1] + 1)
        with contextlib.suppress(OSError, OverflowError):
            return socket.create_connection(address, source_address=own)
    return None


@contextlib.contextmanager
def a_listener(address: str) -> Generator[int]:
    """Yield the pid of another process that listens."""
    how = (
        "import socket, sys; where = sys.argv[1].split('://')[1]; unix = sys.argv[1][:3] == 'ipc'\n"
        "kind = socket.AF_UNIX if unix else socket.AF_INET; s = socket.socket(kind)\n"
        "s.bind(where if unix else ('127.0.0.1', int(where.split(':')[1]))); s.listen()\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", how, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


LONG = 60.0  # seconds; no test waits that long for a port that stays in use
PORTS: list[Callable[[int], dict[str, str]]] = [
    lambda port: {"address": f"tcp://127.0.0.1:{port}", "data": "tcp://127.0.0.1:0"},
    lambda port: {"address": f"tcp://127.0.0.1:{port - 1}"},
    lambda port: {"data": f"tcp://127.0.0.1:{port}"},
]
WHICH = pytest.mark.parametrize("at", PORTS, ids=["control", "data beside", "data"])


@WHICH
def test_a_port_that_a_connection_has_for_the_moment_is_waited_for(
    at: Callable[[int], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[processes.SocketHolder | None]()
    with a_connection() as (connection, port):

        def look(endpoint: str) -> processes.SocketHolder | None:
            looks.append(processes.holder_of(endpoint))
            connection.close()
            return looks[-1]

        monkeypatch.setattr(listening, "holder_of", look)
        with Publisher(**settled(at(port))) as publisher:  # pyright: ignore
            assert str(port) in publisher.address + publisher.data_address
    assert looks
    assert looks[0] is not None
    assert (looks[0].listens, looks[0].pid) == (False, os.getpid())


def test_a_port_that_stays_taken_is_said_with_who_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "BIND_SECONDS", 0.1)
    with a_connection() as (_, port), pytest.raises(AddressError) as told:
        Publisher(f"tcp://127.0.0.1:{port - 1}")  # its data beside
    text = str(told.value)
    assert f":{port} is in use by an outgoing connection of " in text
    assert re.search(rf"\(process {os.getpid()}\), and stayed so for [\d.]+ s: pass another ", text)
    assert "the kernel gives ports of " in text


def test_of_several_at_a_port_the_one_that_has_it_for_longest_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = {"over": "06", "living": "01", "listening": "0A"}

    def held_by(*kinds: str) -> str:
        lines = [f"0: 0100007F:1388 0200007F:0001 {rows[kind]} 0 0 0 0 0 0" for kind in kinds]
        (tmp_path / "tcp").write_text("\n".join(["head", *lines]))
        return str(processes.holder_of("tcp://127.0.0.1:5000"))

    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert "is over" in held_by("over")
    assert held_by("over", "living") == held_by("living", "over") == held_by("living")
    assert held_by("over", "living", "listening") == held_by("listening") == "another process"


def test_a_connection_that_is_over_is_called_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        port = connection.getsockname()[1]
        connection.shutdown(socket.SHUT_WR)  # whoever closes first
        other.recv(1)
        other.close()
        connection.recv(1)
        connection.close()
        holder = processes.holder_of(f"tcp://127.0.0.1:{port}")
    assert holder is not None
    assert "is over, whose port the kernel keeps" in str(holder)


@pytest.mark.parametrize("ipc", [False, True], ids=["tcp", "ipc"])
def test_who_listens_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ipc: bool
) -> None:
    monkeypatch.setattr(listening, "BIND_SECONDS", LONG)
    address = f"ipc://{tmp_path}/bus" if ipc else lasting_address()
    with a_listener(address) as pid:
        before = time.monotonic()
        with pytest.raises(AddressError, match=f"in use by python.* .process {pid}., which lis"):
            Publisher(address)
        assert time.monotonic() - before < LONG / 2


def test_a_publisher_of_this_process_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "BIND_SECONDS", LONG)
    address, before = lasting_address(), time.monotonic()
    with Publisher(address), pytest.raises(AddressError, match=r"of this process: close\(\) it"):
        Publisher(address)
    assert time.monotonic() - before < LONG / 2


def test_a_dropped_publisher_that_waits_for_the_garbage_collector_makes_room() -> None:
    def drop(address: str) -> None:
        publisher: Any = Publisher(address)
        publisher.itself = publisher  # a cell that failed keeps it so, in a traceback

    address = lasting_address()
    drop(address)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        Publisher(address).close()


@pytest.fixture(name="six")
def _six() -> Iterator[socket.socket]:
    try:
        with socket.create_server(("::1", lasting_ports(1)[0]), family=socket.AF_INET6) as server:
            yield server
    except OSError:
        pytest.skip("this host has no IPv6")


def test_whoever_listens_at_another_host_is_not_in_the_way(six: socket.socket) -> None:
    port = six.getsockname()[1]
    assert processes.holder_of(f"tcp://127.0.0.1:{port}") is None
    found = processes.holder_of(f"tcp://[::1]:{port}")
    assert found is not None
    assert found.listens
    assert found.pid == os.getpid()
