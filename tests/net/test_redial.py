"""A worker whose data connection fails says so. (`make conformance` breaks all connections.)"""

import contextlib
import socket
from dataclasses import replace

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes
QUICK = Settings(ping=0.1, lost_after=0.4, shared_memory=False)


def test_a_user_is_told_that_nothing_published_comes(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        wrong = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        made = Publisher("tcp://127.0.0.1:0", settings=replace(QUICK, advertise=wrong))
        publisher, target = stack.enter_context(made), {"w": np.zeros(4, np.uint8)}
        worker = Subscriber(publisher.address, {"m": target}, name="w", settings=QUICK)
        stack.enter_context(worker).start()
        publisher.wait_for_workers(1, timeout=SECONDS)
        publisher.publish("m", {"w": np.ones(4, np.uint8)}, timeout=SECONDS)
        wait_for(lambda: "nothing published has come" in caplog.text, "a warning", SECONDS)
        assert f"is {wrong} let through" in caplog.text
