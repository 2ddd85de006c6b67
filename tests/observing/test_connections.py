"""A page's connections: how many there may be, and how long one may be silent."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from weightbus import Http
from weightbus.python_client.observing import connections
from weightbus.python_client.observing.web import HttpServer
from weightbus.tests.cli.starting import python
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
TOKEN = "correct horse"  # noqa: S105
REQUEST = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


async def page(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="here")


@pytest.fixture(name="server")
def _server() -> Iterator[HttpServer]:
    server = HttpServer(Http("127.0.0.1:0", token=TOKEN), {"/": page})
    yield server
    server.close()


def opened(server: HttpServer, said: bytes = b"") -> socket.socket:
    where = urlsplit(server.address)
    connection = socket.create_connection((where.hostname or "", where.port or 0), SECONDS)
    connection.sendall(said)
    return connection


def answer(connection: socket.socket) -> bytes:
    """Return what a page answers to one request, or nothing if it hangs up."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while not found.endswith(b"here"):
            if not (more := connection.recv(4096)):
                break
            found += more
    return found


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(SECONDS)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"])
def test_a_connection_without_a_request_is_closed(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.2)
    silent, used = opened(server, said), opened(server, REQUEST)
    assert answer(used).endswith(b"here")
    silent.settimeout(SECONDS / 3)  # aiohttp closes it later, as one that is idle
    assert answer(silent) == b""
    used.sendall(REQUEST)
    assert answer(used).endswith(b"here"), "it has had access"
    silent.close()
    used.close()


def test_a_request_without_access_keeps_no_connection(server: HttpServer) -> None:
    with opened(server, REQUEST.replace(TOKEN.encode(), b"another horse")) as stranger:
        assert answer(stranger).startswith(b"HTTP/1.1 401 ")
        assert is_closed(stranger)


def test_the_oldest_silent_one_of_a_host_makes_room(server: HttpServer) -> None:
    used = opened(server, REQUEST)
    assert answer(used).endswith(b"here")
    silent = [opened(server) for _ in range(connections.UNPROVEN_MAX + 1)]
    wait_for(lambda: is_closed(silent[0]), "the oldest is closed", SECONDS)
    assert not any(map(is_closed, silent[1:]))
    for _ in range(3):
        with opened(server, REQUEST) as another:
            assert answer(another).endswith(b"here"), "whoever has access always gets in"
    used.sendall(REQUEST)
    assert answer(used).endswith(b"here")
    for each in (*silent, used):
        each.close()


def test_there_are_only_so_many_in_all(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)
    used = [opened(server, REQUEST) for _ in range(4)]
    assert all(answer(each).endswith(b"here") for each in used)
    with opened(server, REQUEST) as late:
        assert answer(late) == b""
    used.pop().close()

    def another() -> bool:
        with opened(server, REQUEST) as connection:
            return answer(connection).endswith(b"here")

    wait_for(another, "there is room again", SECONDS)
    for each in used:
        each.sendall(REQUEST)
        assert answer(each).endswith(b"here")
        each.close()


# In a process of its own, which takes every descriptor that it may have.
SPENT = """
import json, logging, os, resource, socket, threading, time
from aiohttp import web
from weightbus import Http
from weightbus.python_client.observing.connections import Connections
from weightbus.python_client.observing.web import HttpServer
resume, tries, again = Connections._resume, [], threading.Event()
def noted(*arguments):
    tries.append(None)
    if len(tries) == 2: again.set()
    resume(*arguments)
Connections._resume = noted
said = []
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger().addHandler(Keep())
async def page(request): return web.Response(text="here")
server = HttpServer(Http("127.0.0.1:0"), {"/": page})
port = int(server.address.rstrip("/").rpartition(":")[2])
def ask():
    with socket.create_connection(("127.0.0.1", port), 30) as asking:
        asking.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        try:
            return b"".join(iter(lambda: asking.recv(4096), b""))[-4:].decode()
        except ConnectionError:
            return ""
told = [ask()]
most = len(os.listdir("/proc/self/fd")) + 60
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
asking = [socket.socket() for _ in range(8)]
held = []
try:
    while True: held.append(os.open(os.devnull, os.O_RDONLY))
except OSError: pass
for each in asking: each.connect(("127.0.0.1", port))  # nothing can accept them
began = time.process_time()
assert again.wait(30)  # it has tried twice more, each after a pause
spent = time.process_time() - began
for each in asking: each.close()
for each in held[:4]: os.close(each)  # numbers below the last 32
del held[:4]
while told[-1] != "here" or len(told) < 2: told.append(ask())
try:
    while True: held.append(os.open(os.devnull, os.O_RDONLY))
except OSError: pass
held.sort()
for _ in range(3): os.close(held.pop())
told.append(ask())  # of the last ones
print(json.dumps([told[0], told[-2], told[-1], spent, said]))
server.close()
"""


def test_it_neither_spins_nor_takes_one_of_the_last_descriptors() -> None:
    done = python("-c", SPENT, timeout=110)
    before, after, at_last, spent, said = json.loads(done.stdout.splitlines()[-1])
    assert [before, after, at_last] == ["here", "here", ""]
    assert spent < 1.0
    assert len(said) <= 3, said
    assert "connections to the page at http://127.0.0.1" in said[0]
    assert "`ulimit -n`" in said[0]
    assert threading.active_count() < 50
