"""Sealed over real sockets: everybody gets it, what is on the wire tells nothing, damage mends."""

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.memory.snapshots import SealedMemory
from weightbus.bus.trust.keys import WorkerKeys
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.tunnel import Tunnel
from weightbus.tests.trust.sealed_bus import keys_in

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


def run(publisher: Publisher, address: str, tap: Tunnel, keys: WorkerKeys | None) -> None:
    """Push versions, small ones that go with their announcements, and have one fetched."""
    here, small, alone = weights(0.0), weights(0.0, SMALL), weights(0.0)
    targets = {"policy": here, "small": small, "alone": alone}
    with Subscriber(
        address, targets, name="w", settings=Settings(shared_memory=False), keys=keys
    ) as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)

        def pushed() -> bool:  # and not fetched, as long as it has not subscribed
            before = len(tap.told)
            publisher.publish("small", weights(1.0, SMALL), timeout=SECONDS)
            return len(tap.told) - before > 4 * SMALL

        wait_for(pushed, "a version on the data channel", SECONDS)
        for value in (1.0, 2.0):  # its layout was not there before
            publisher.publish("policy", weights(value), timeout=SECONDS)
            publisher.publish("small", weights(value, SMALL), timeout=SECONDS)
            check(here, value)
            check(small, value)
        publisher.publish("alone", weights(1.0), workers=["w"], timeout=SECONDS)  # as is its layout
        check(alone, 1.0)


@pytest.mark.parametrize("sealed", [False, True])
def test_neither_channel_tells_names_weights_or_layouts(sealed: bool, tmp_path: Path) -> None:
    with closing(Tunnel()) as control, closing(Tunnel()) as data:
        folder, own = keys_in(tmp_path) if sealed else (None, None)
        with Publisher(
            settings=Settings(shared_memory=False, advertise=data.address, chunk_bytes=2**16),
            keys=folder,
        ) as publisher:
            data.lead_to(publisher.data_address)
            control.lead_to(publisher.address)
            run(publisher, control.address, data, own)
    ramp, bias = weights(1.0).values()
    words = [b"secret", b"layer", b"data_offsets", b'"F32"', b"digest", b"layout_bytes", b"whole"]
    values = [ramp[100:108].tobytes(), ramp[-20:].tobytes(), bias.tobytes(), ramp[:8].tobytes()]
    for tap in (control, data):
        seen = tap.heard + tap.told
        found = [text for text in (*words, *values) if text in seen]
        assert not found if sealed else len(found) > 7
        assert len(seen) > 4 * 70_000, "nothing was captured"
    assert b"policy/ctl" in data.told + data.heard, "models are named, by topics"


@pytest.mark.parametrize("count", [SMALL, 70_000])
def test_what_is_damaged_on_the_way_is_fetched(count: int, tmp_path: Path) -> None:
    folder, own = keys_in(tmp_path)
    with (
        closing(Tunnel()) as tap,
        Publisher(
            settings=Settings(shared_memory=False, advertise=tap.address), keys=folder
        ) as publisher,
    ):
        tap.lead_to(publisher.data_address)
        here = weights(0.0, count)
        with Subscriber(
            publisher.address, {"m": here}, settings=Settings(shared_memory=False), keys=own
        ) as worker:
            worker.start()
            publisher.wait_for_workers(1, SECONDS)
            tap.spoil = 3

            def damaged() -> bool:
                value = float(tap.spoil + 1)
                publisher.publish("m", weights(value, count), timeout=SECONDS)
                check(here, value)
                return tap.spoil == 0

            wait_for(damaged, "damage", SECONDS)


def test_want_of_memory_for_sealed_bytes_ends_no_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, own = keys_in(tmp_path)
    scarce, take = threading.Event(), SealedMemory.take

    def taken(memory: SealedMemory, model: str, nbytes: int) -> NDArray[np.uint8]:
        if scarce.is_set():
            raise MemoryError
        return take(memory, model, nbytes)

    monkeypatch.setattr(SealedMemory, "take", taken)
    here, quick = weights(0.0), Settings(ping=0.1, lost_after=2.0)
    with Publisher(settings=replace(quick, shared_memory=False), keys=folder) as publisher:
        publisher.publish("m", weights(1.0), timeout=SECONDS)
        scarce.set()
        worker = Subscriber(
            publisher.address, {"m": here}, settings=replace(quick, shared_memory=False), keys=own
        )
        with worker.start():
            wait_for(lambda: "no memory to seal" in caplog.text, "a fetch in vain", SECONDS)
            scarce.clear()
            publisher.publish("m", weights(2.0), timeout=SECONDS)
            check(here, 2.0)
            loop = publisher._loop  # noqa: SLF001 # pyright: ignore
            sends = lambda: loop.known.sends("m", None, shared=False)  # noqa: E731
            wait_for(sends, "somebody to push to", SECONDS)
            scarce.set()
            with pytest.raises(MemoryError):
                publisher.publish("m", weights(3.0), timeout=SECONDS)
            check(here, 2.0)
            scarce.clear()
            publisher.publish("m", weights(4.0), timeout=SECONDS)
            check(here, 4.0)


def test_a_group_key_lives_for_some_time() -> None:
    with pytest.raises(ValueError, match="rekey"):
        Publisher(settings=Settings(rekey=0))
