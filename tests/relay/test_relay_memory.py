"""The memory of a relay: its buffers are used again, and none before all have sent from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus.bus.memory import pages
from weightbus.bus.net import worker_loop
from weightbus.python_client.relay import Relay
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.relay.test_relay import CHUNKED, SECONDS, Tree, tree, whole

__all__ = ["tree"]  # a fixture


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the buffers that workers have allocated."""
    sizes, memory_of = list[int](), pages.memory_of

    def counted(nbytes: int) -> NDArray[np.uint8]:
        sizes.append(nbytes)
        return memory_of(nbytes)

    monkeypatch.setattr(worker_loop, "memory_of", counted)
    return sizes


def versions_of(relay: Relay) -> Any:
    return relay._below._machine.state.store["m"]  # noqa: SLF001 # pyright: ignore


def test_a_stream_through_a_relay_needs_no_new_memory(tree: Tree, allocated: list[int]) -> None:
    publisher = tree.publisher()
    worker = tree.worker(tree.relay(publisher), CHUNKED)
    assert worker.wait_joined(SECONDS)
    for value in range(1, 13):
        tree.receives(worker, tree.publishes(publisher, value))
        assert (tree.targets[worker]["w"] == value).all()
    worker_buffers, relay_buffers = 2, 3  # that of the latest version is on loan meanwhile
    assert len(allocated) <= worker_buffers + relay_buffers


def test_a_version_that_is_no_longer_offered_is_kept_for_its_next_name(
    tree: Tree, tmp_path: Path
) -> None:
    address = lasting_address()
    publisher = tree.publisher(address=address, state=tmp_path)
    relay = tree.relay(publisher)
    tree.publishes(publisher, 1)
    wait_for(lambda: whole(relay), "the relay has it", SECONDS)
    (kept,) = versions_of(relay)
    assert relay._below.make_room("m", [kept.snapshot], True, SECONDS)  # noqa: SLF001 # pyright: ignore
    wait_for(lambda: publisher.history("m"), "it is on disk", SECONDS)
    publisher.close()
    again = tree.publisher(address=address, state=tmp_path)
    follower = relay._above._machine.followers["m"]  # noqa: SLF001 # pyright: ignore
    wait_for(
        lambda: follower.running is not None and follower.running.epoch == again.epoch,
        "the relay hears of the new name",
        SECONDS,
    )
    worker = tree.worker(relay, CHUNKED)
    tree.receives(worker, (again.epoch, 1))
    assert (tree.targets[worker]["w"] == 1).all()
