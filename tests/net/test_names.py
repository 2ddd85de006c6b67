"""Hosts by name: unknown names are reported within seconds; no call waits for a name server."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import AddressError, Publisher, Settings, Subscriber
from weightbus.bus.net import names
from weightbus.tests.cli.test_cli import result_of, run
from weightbus.tests.compose.waiting import wait_for

SECONDS = 60.0
HOST = "trainer.invalid"


class NameServer:
    """A name server that answers for one name; other names are resolved as usual."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: str | None = None
        self.answers = threading.Event()
        self.answers.set()
        look = socket.getaddrinfo

        def looked_up(host: Any, *about: Any, **more: Any) -> Any:
            if host != HOST:
                return look(host, *about, **more)
            assert self.answers.wait(SECONDS)
            if self.address is None:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return look(self.address, *about, **more)

        monkeypatch.setattr(socket, "getaddrinfo", looked_up)
        monkeypatch.setattr(names, "PATIENCE_SECONDS", 0.3)


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(monkeypatch)
    yield server
    server.answers.set()


def worker(port: str) -> Subscriber:
    return Subscriber(f"tcp://{HOST}:{port}", {"m": {"w": np.zeros(3)}}, name="w")


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "unknown"])
def test_a_name_that_is_not_found_is_said_until_it_is(
    server: NameServer, caplog: pytest.LogCaptureFixture, *, silent: bool
) -> None:
    if silent:
        server.answers.clear()
    why = "does not answer" if silent else "Name or service not known"
    with Publisher() as publisher, worker(publisher.address.rpartition(":")[2]) as late:
        before = time.monotonic()
        with pytest.raises(AddressError, match=f"no address of host '{HOST}' is found .*{why}"):
            late.receive(SECONDS)
        assert time.monotonic() - before < names.PATIENCE_SECONDS + SECONDS / 4
        with pytest.raises(AddressError, match=HOST):
            late.wait_joined(SECONDS)
        assert f"no address of host '{HOST}' is found" in caplog.text
        server.address = "127.0.0.1"
        server.answers.set()

        def joined() -> bool:
            try:
                return late.wait_joined(1)
            except AddressError:
                return False

        wait_for(joined, "its host is found", SECONDS)
        future = publisher.publish_async("m", {"w": np.ones(3)}, timeout=SECONDS)
        assert late.receive(SECONDS) is not None
        assert future.result(SECONDS).in_state("applied") == ["w"]


def test_closing_does_not_wait_for_a_name_server(server: NameServer) -> None:
    server.answers.clear()
    subscriber = worker("5555").start()
    wait_for(
        lambda: any(each.name == "weightbus-lookup" for each in threading.enumerate()),
        "a look-up",
        SECONDS,
    )
    before = time.monotonic()
    subscriber.close()
    assert time.monotonic() - before < SECONDS / 12


def test_one_that_applies_in_the_background_logs_it_and_does_not_spin(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.address is None
    with caplog.at_level(logging.WARNING), worker("5555").start() as subscriber:
        wait_for(lambda: subscriber.error is not None, "its error", SECONDS)
        assert isinstance(subscriber.error, AddressError)
        count = len(caplog.records)
    assert count < 10


def test_a_host_that_has_moved_is_followed(server: NameServer) -> None:
    """A container that is made anew has another address under the same name."""
    server.address = "127.0.0.1"
    with Publisher("tcp://127.0.0.1:0") as first:
        port = first.address.rpartition(":")[2]
        subscriber = worker(port)
        assert subscriber.wait_joined(SECONDS)
        subscriber.receive(0)
    with subscriber:
        server.address = "127.0.0.2"
        with Publisher(
            f"tcp://127.0.0.2:{port}", settings=Settings(data="tcp://127.0.0.2:0")
        ) as second:
            second.wait_for_workers(1, SECONDS)


def test_subscribe_warns_goes_on_and_says_why_in_the_end(
    server: NameServer, tmp_path: Path
) -> None:
    assert server.address is None
    result = run(
        *("subscribe", f"tcp://{HOST}:5555", "--model", "m", "--out", tmp_path / "out"),
        *("--once", "--timeout", 3, "--json"),
    )
    assert result.exit_code == 1
    assert result.stderr.count("warning: ") == 1
    assert f"no address of host '{HOST}' is found" in result_of(result)["text"]


def test_which_addresses_are_looked_up() -> None:
    named = ("tcp://trainer:1", "tcp://localhost:1")
    numbers = ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://[fe80::1%eth0]:1", "ipc:///trainer")
    assert all(map(names.is_name, named))
    assert not any(map(names.is_name, numbers))
