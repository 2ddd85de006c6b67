"""A welcome does not make a worker connect to other hosts, unless its user allows that."""

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.errors import AddressError
from weightbus.bus.net import endpoints
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.hostile import SECONDS, Hostile

QUICK = Settings(ping=0.05, lost_after=5.0, shared_memory=False)

# The address in the welcome, that of the control socket, and its number.
SAME = [
    ("tcp://trainer:2", "tcp://trainer:1", "tcp://10.0.0.1:1"),
    ("tcp://Trainer:2", "tcp://trainer:1", ""),
    ("tcp://10.0.0.1:2", "tcp://trainer:1", "tcp://10.0.0.1:1"),
    ("tcp://[fe80::1]:2", "tcp://[FE80:0::1]:1", ""),
    ("tcp://127.0.0.2:2", "tcp://localhost:1", ""),
    ("tcp://[::1]:2", "tcp://127.0.0.1:1", ""),
    ("tcp://*:2", "tcp://trainer:1", ""),
    ("ipc:///run/c.data", "ipc:///run/c", ""),
    ("ipc:///run/c", "ipc:///run/c", ""),
    ("ipc://@c.data", "ipc://@c", ""),
]
OTHER = [
    ("tcp://10.0.0.2:2", "tcp://trainer:1", "tcp://10.0.0.1:1"),
    ("tcp://169.254.169.254:80", "tcp://10.0.0.1:1", "tcp://10.0.0.1:1"),
    ("tcp://127.0.0.1:2", "tcp://trainer:1", "tcp://10.0.0.1:1"),
    ("tcp://localhost:2", "tcp://10.0.0.1:1", ""),
    ("tcp://trainer.evil:2", "tcp://trainer:1", ""),
    ("tcp://elsewhere:2", "tcp://trainer:1", "tcp://10.0.0.1:1"),
    ("ipc:///run/docker.sock", "tcp://127.0.0.1:1", ""),
    ("ipc:///run/docker.sock", "ipc:///run/c", ""),
    ("ipc:///run/c/../docker.sock", "ipc:///run/c", ""),
    ("ipc:///run/c.d/sock", "ipc:///run/c", ""),
    ("tcp://127.0.0.1:2", "ipc:///run/c", ""),
]


@pytest.mark.parametrize(("data", "control", "dialled"), SAME)
def test_data_on_the_host_of_the_control_address_is_connected_to(
    data: str, control: str, dialled: str
) -> None:
    assert endpoints.resolve(data, control, dialled)


@pytest.mark.parametrize(("data", "control", "dialled"), OTHER)
def test_data_elsewhere_is_connected_to_only_if_the_user_says_so(
    data: str, control: str, dialled: str
) -> None:
    with pytest.raises(AddressError, match=r"Settings\(any_data_host=True\)"):
        endpoints.resolve(data, control, dialled)
    assert endpoints.resolve(data, control, dialled, any_host=True) == data


@pytest.fixture(name="hostile")
def _hostile() -> Iterator[Hostile]:
    hostile = Hostile()
    yield hostile
    hostile.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_hostile_welcome_has_a_worker_connect_to_no_unix_socket(
    hostile: Hostile, tmp_path: Path, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(str(tmp_path / "other"))
        other.listen()
        stack.enter_context(caplog.at_level(logging.WARNING))
        settings = Settings(ping=0.05, lost_after=5.0, shared_memory=False, any_data_host=allowed)
        target = {"m": {"w": np.zeros(1, np.uint8)}}
        worker = Subscriber(hostile.address, target, settings=settings)
        stack.enter_context(worker)
        link = stack.enter_context(hostile.accept())
        link.welcome(f"ipc://{tmp_path}/other")
        if allowed:
            other.settimeout(SECONDS)
            other.accept()[0].close()
            assert "no pushed data" not in caplog.text
            return
        for _ in range(40):  # two seconds of pings: a connection would have come at once
            link.wait_for("ping")
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
        assert caplog.text.count("no pushed data") == 1


def test_a_publisher_with_data_elsewhere_is_fetched_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It also pushes, if the worker's user allows that."""
    about = Settings(ping=0.1, lost_after=5.0, shared_memory=False, data=f"ipc://{tmp_path}/d")
    either = Settings(ping=0.1, lost_after=5.0, shared_memory=False, any_data_host=True)
    with (
        caplog.at_level(logging.WARNING),
        Publisher("tcp://127.0.0.1:0", settings=about) as publisher,
    ):
        for settings in (QUICK, either):
            target = {"w": np.zeros(4, np.uint8)}
            with Subscriber(publisher.address, {"m": target}, settings=settings) as worker:
                worker.start()
                publisher.wait_for_workers(1, timeout=SECONDS)
                if settings is either:
                    subscribed = lambda: any(  # noqa: E731
                        each.road == "pushed" for each in publisher.workers().values()
                    )
                    wait_for(subscribed, "its subscription", SECONDS)
                publisher.publish("m", {"w": np.full(4, 3, np.uint8)}, timeout=SECONDS)
                assert target["w"].tolist() == [3] * 4
        assert caplog.text.count("no pushed data") == 1
