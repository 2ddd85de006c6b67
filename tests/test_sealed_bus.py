"""Sealed over real sockets: everybody gets it, what is on the wire tells nothing, damage mends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import numpy as np
import pytest

from weightbus import Publisher, Subscriber
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.sealed_bus import sealer, sealing

SECONDS = 20.0
SMALL = 12_000  # elements of a model that goes with its announcement
Weights = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def weights(value: float, count: int = 70_000) -> Weights:
    """Return a model that has a name and bytes one would find again."""
    ramp = np.arange(count, dtype=np.float32) + value
    return {"secret.layer.weight": ramp, "secret.layer.bias": np.full(16, value, np.float32)}


def check(here: Weights, value: float) -> None:
    """Check that a model is what was published."""
    for name, expected in weights(value, len(here["secret.layer.weight"])).items():
        np.testing.assert_array_equal(here[name], expected)


class Tap:
    """A relay in front of a data address, that keeps what passes, and may change it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.target: tuple[str, int] = ("", 0)
        self.seen, self.spoil = bytearray(), 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.target)
            except OSError:
                return
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, from_: socket.socket, to: socket.socket) -> None:
        try:
            while piece := bytearray(from_.recv(2**16)):
                self.seen += piece
                if self.spoil and len(piece) > 2**15:  # in the midst of a chunk
                    self.spoil -= 1
                    piece[len(piece) // 2] ^= 16
                to.sendall(piece)
        except OSError:
            pass

    def close(self) -> None:
        """Hang up on everybody."""
        for each in (self._listener, *self._sockets):
            each.close()


@contextmanager
def tapped(tap: Tap, chunk_bytes: int) -> Iterator[Publisher]:
    """Have a publisher whose data passes a tap."""
    with Publisher(
        shared_memory=False, advertise=tap.address, chunk_bytes=chunk_bytes
    ) as publisher:
        host, _, port = publisher.data_address.removeprefix("tcp://").rpartition(":")
        tap.target = host, int(port)
        yield publisher


def run(tap: Tap) -> bytes:
    """Push versions, and small ones that go with their announcements; return what was captured."""
    with tapped(tap, chunk_bytes=2**16) as publisher:
        here, small = weights(0.0), weights(0.0, SMALL)
        targets = {"policy": here, "small": small}
        with Subscriber(publisher.address, targets, shared_memory=False) as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)

            def pushed() -> bool:  # and not fetched, as long as it has not subscribed
                before = len(tap.seen)
                publisher.publish("small", weights(1.0, SMALL), timeout=SECONDS)
                return len(tap.seen) - before > 4 * SMALL

            wait_for(pushed, "a version on the data channel", SECONDS)
            for value in (1.0, 2.0):  # its layout was not there before
                publisher.publish("policy", weights(value), timeout=SECONDS)
                publisher.publish("small", weights(value, SMALL), timeout=SECONDS)
                check(here, value)
                check(small, value)
    return bytes(tap.seen)


@pytest.mark.parametrize("sealed", [False, True])
def test_the_data_channel_tells_no_names_weights_or_layouts(sealed: bool) -> None:
    with closing(Tap()) as tap, sealing() if sealed else nullcontext():
        seen = run(tap)
    ramp, bias = weights(1.0).values()
    words = [b"secret", b"layer", b"data_offsets", b"F32", b"digest", b"layout_bytes", b"whole"]
    values = [ramp[100:108].tobytes(), ramp[-20:].tobytes(), bias.tobytes(), ramp[:8].tobytes()]
    found = [text for text in (*words, *values) if text in seen]
    assert found == ([] if sealed else [*words, *values])
    assert b"policy/ctl" in seen, "models are named, by topics"


@pytest.mark.parametrize("count", [SMALL, 70_000])
def test_what_is_damaged_on_the_way_is_fetched(count: int) -> None:
    with closing(Tap()) as tap, sealing(), tapped(tap, chunk_bytes=2**17) as publisher:
        here = weights(0.0, count)
        with Subscriber(publisher.address, {"m": here}, shared_memory=False) as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)
            for value in (1.0, 2.0, 3.0):
                tap.spoil = 2
                assert publisher.publish("m", weights(value, count), timeout=SECONDS)
                check(here, value)
                wait_for(lambda: publisher.publish("m", here) and tap.spoil < 2, "damage", SECONDS)


def test_a_worker_that_comes_late_and_one_that_stays_get_what_is_under_another_key() -> None:
    with sealing(), Publisher(shared_memory=False, chunk_bytes=2**16) as publisher:
        here, later = weights(0.0), weights(0.0)
        with Subscriber(publisher.address, {"m": here}, name="here", shared_memory=False) as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)
            publisher.publish("m", weights(1.0), timeout=SECONDS)
            for value in (2.0, 3.0):
                publisher._loop.rekey()  # noqa: SLF001 - as who revokes a key does
                publisher.publish("m", weights(value), timeout=SECONDS)
                check(here, value)
            publisher._loop.rekey()  # noqa: SLF001 - as who revokes a key does
            with Subscriber(publisher.address, {"m": later}, shared_memory=False) as other:
                assert other.receive(SECONDS)
                check(later, 3.0)


def test_a_worker_with_another_group_key_learns_nothing() -> None:
    with sealing(told=sealer()), Publisher(shared_memory=False) as publisher:
        here = weights(0.0)
        with Subscriber(publisher.address, {"m": here}, name="w", shared_memory=False) as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)
            receipt = publisher.publish("m", weights(1.0), timeout=1.0, require=0)
            assert receipt.workers["w"].state != "applied"
            check(here, 0.0)
