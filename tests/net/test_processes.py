"""Which process is at the other end of a connection, and whether it has ended."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from weightbus.bus.net import processes
from weightbus.bus.net.processes import (
    Process,
    SocketSearch,
    peer_inode,
    peer_process,
    process_of,
)
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than any step here takes
HOSTS = ("127.0.0.1", "::1", "::ffff:127.0.0.1")  # the last one: IPv4 to a server for both


def process_with(pid: int, inode: int) -> Process | None:
    """Search a process for a socket, a few files at a time."""
    search = SocketSearch(pid, inode)
    while not search.step(3):
        pass
    return search.found


@contextlib.contextmanager
def connected(host: str) -> Generator[tuple[socket.socket, socket.socket]]:
    """Yield the accepted and the dialled end of a connection within this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        both = "ffff" in host
        server = stack.enter_context(
            socket.create_server(("::" if both else host, 0), family=family, dualstack_ipv6=both)
        )
        port = server.getsockname()[1]
        dialled = stack.enter_context(
            socket.create_connection((host.replace("::ffff:", ""), port), SECONDS)
        )
        accepted = stack.enter_context(server.accept()[0])
        yield accepted, dialled


def other_end(accepted: socket.socket) -> int:
    """Return the inode of the other end of a connection, which must be known."""
    inode = peer_inode(accepted)
    assert inode is not None
    return inode


@contextlib.contextmanager
def sleeper() -> Generator[subprocess.Popen[bytes]]:
    """Yield a process that waits to be ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        yield popen
        popen.kill()


@pytest.mark.parametrize("host", HOSTS)
def test_who_has_the_other_end_is_found(host: str) -> None:
    with connected(host) as (accepted, dialled):
        inode = other_end(accepted)
        assert inode == os.fstat(dialled.fileno()).st_ino
        found = process_with(os.getpid(), inode)
        assert found == process_of(os.getpid())
        assert found is not None
        assert not found.ended


def test_whoever_says_it_is_another_process_is_not_believed() -> None:
    """A worker in a container reports its pid there, which is another process's pid here."""
    with connected("127.0.0.1") as (accepted, _), sleeper() as other:
        inode = other_end(accepted)
        for pid in (other.pid, 0, -1, 2**40):
            assert process_with(pid, inode) is None


def test_who_has_too_many_files_is_not_searched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FILES_MAX", 0)
    with connected("127.0.0.1") as (accepted, _):
        assert process_with(os.getpid(), other_end(accepted)) is None


def test_of_what_is_gone_nothing_is_seen() -> None:
    with connected("127.0.0.1") as (accepted, dialled):
        dialled.close()
        accepted.shutdown(socket.SHUT_RDWR)
        assert peer_inode(accepted) is None


def test_where_the_kernel_cannot_be_asked_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected("127.0.0.1") as (accepted, _):
        monkeypatch.delattr(socket, "AF_NETLINK")
        assert peer_inode(accepted) is None


def test_over_ipc_the_kernel_names_who_connected(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); input()"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:  # noqa: S603
            with server.accept()[0] as accepted:
                found = peer_process(accepted)
            other.kill()
    assert found is not None
    assert found.pid == other.pid
    assert found.ended


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    with sleeper() as other:
        found = process_of(other.pid)
        assert found is not None
        assert not found.ended
        other.kill()
        wait_for(lambda: found.ended, "its end, as a zombie", SECONDS)
        assert Path(f"/proc/{other.pid}").exists()
    assert found.ended
    assert process_of(other.pid) is None


def test_another_process_of_that_number_is_not_the_same() -> None:
    found = process_of(os.getpid())
    assert found is not None
    assert Process(found.pid, "1").ended
