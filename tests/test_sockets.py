"""The worker's data connection moves with what the publisher tells, and back again."""

import contextlib
from collections.abc import Iterator

import pytest

from weightbus.bus.errors import AddressError
from weightbus.bus.sockets import PublisherSockets, WorkerSockets

SECONDS = 30.0  # far more than anything here takes


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[PublisherSockets, WorkerSockets]]:
    with contextlib.ExitStack() as stack:
        publisher = PublisherSockets("tcp://127.0.0.1:0", None)
        stack.callback(publisher.close)
        worker = WorkerSockets(publisher.address)
        stack.callback(worker.close)
        yield publisher, worker


def test_an_address_that_failed_does_not_hide_the_one_before(
    pair: tuple[PublisherSockets, WorkerSockets],
) -> None:
    publisher, worker = pair
    worker.subscribe(b"a/ctl", on=True)
    worker.connect_data(publisher.data_address)
    assert publisher.poll(SECONDS).data, "it has subscribed"
    assert publisher.receive_subscription() == (True, b"a/ctl")
    with pytest.raises(AddressError, match="cannot connect to data"):
        worker.connect_data("ipc:///" + "x" * 200)
    worker.connect_data(publisher.data_address)
    heard: list[tuple[bool, bytes] | None] = []
    while (True, b"a/ctl") not in heard:  # it leaves, and comes back
        assert publisher.poll(SECONDS).data, "it has not come back"
        heard.append(publisher.receive_subscription())
    publisher.broadcast([b"a/ctl", b"again"])
    assert worker.poll(SECONDS).data
    assert [bytes(frame) for frame in worker.receive_published() or ()] == [b"a/ctl", b"again"]


def test_whoever_is_gone_is_reported_so(pair: tuple[PublisherSockets, WorkerSockets]) -> None:
    publisher, worker = pair
    assert worker.poll(SECONDS, writable=True).writable
    worker.send([b"hello"])
    assert publisher.poll(SECONDS).control
    received = publisher.receive()
    assert received is not None
    identity, frames = received
    assert [bytes(frame) for frame in frames] == [b"hello"]
    assert publisher.send(identity, [b"welcome"])
    assert not publisher.send(b"nobody", [b"welcome"])
