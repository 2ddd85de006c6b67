"""Who takes nothing of what it is sent costs the others nothing, for as long as that lasts."""

import socket
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.memory import snapshots
from weightbus.bus.memory.snapshots import MemoryBlock
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.zmtp import GREETING
from weightbus.tests.faults.bus_process import model

SECONDS = 60.0  # far more than anything here takes
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
LARGE, SMALL = 2**22, 2**17  # one is pushed in chunks, the other goes along with its announcement


@pytest.mark.parametrize("nbytes", [LARGE, SMALL])
def test_a_connection_that_is_never_read_takes_no_memory(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way to it is let go soon, so that one block serves all versions."""
    made: list[MemoryBlock] = []

    def make(nbytes: int, **how: Any) -> MemoryBlock:
        made.append(MemoryBlock(nbytes, **how))
        return made[-1]

    monkeypatch.setattr(snapshots, "MemoryBlock", make)
    monkeypatch.setattr(snapshots, "REUSE_PATIENCE", SECONDS)  # with less, it would take another
    weights, published = model(nbytes, 0), model(nbytes, 0)
    with (
        Publisher(
            settings=Settings(shared_memory=False, ping=0.1, lost_after=SECONDS)
        ) as publisher,
        socket.socket() as stuck,
        Subscriber(publisher.address, {"m": weights}, name="quick") as quick,
    ):
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(host_and_port(publisher.data_address))
        stuck.sendall(GREETING + READY + b"\x00\x03\x01m/")
        quick.start()
        publisher.wait_for_workers(1, SECONDS, "m")
        for value in range(1, 1 + 8 * 2**22 // nbytes):  # many times what both buffers hold
            published = model(nbytes, value % 256)
            receipt = publisher.publish("m", published, timeout=SECONDS)
            assert receipt.in_state("applied") == ["quick"]
        assert all(np.array_equal(weights[name], published[name]) for name in weights)
        assert len(made) == 1
