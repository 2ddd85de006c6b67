"""What a relay says of itself: to its user, in its log, to observers and in metrics."""

import gc
import logging
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from weightbus import AddressError, ClosedError, RefusedError, Relay, Settings
from weightbus.python_client.observing import diagnosis
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.relay.test_relay import CHUNKED, SECONDS, SOON, WHOLE, Tree, arrays
from weightbus.types import HeldVersion, WorkerEvent

pytest.importorskip("prometheus_client")
from weightbus.python_client.observing.metrics import METRICS
from weightbus.tests.observing.test_metrics import Samples, samples, shown_in

BUSY_SECONDS = 5.0  # for which a busy host may delay a thread
NOWHERE = "tcp://127.0.0.1:1"
ANY = "tcp://127.0.0.1:0"


@pytest.fixture(name="tree")
def _tree() -> Generator[Tree]:
    with ExitStack() as stack:
        yield Tree(stack)


def whole(relay: Relay, key: tuple[int, int]) -> HeldVersion | None:
    """Return a version of `m`, once it is whole at the relay."""
    held = relay.status().versions.get("m", ())
    return next((v for v in held if (v.epoch, v.version) == key and v.whole), None)


@pytest.mark.parametrize(("size", "chunks"), [(WHOLE, 1), (CHUNKED, 3)])
def test_a_relay_says_what_it_has_and_received(tree: Tree, size: int, chunks: int) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    assert relay.wait_joined(SECONDS)
    publisher.publish("m", arrays(1, size), metadata={"step": "7"})
    key = publisher.epoch, 1
    found = wait_for(lambda: whole(relay, key), "it is whole", SECONDS)
    digest = publisher.publish("m", arrays(1, size), settings=Settings(verify=True)).digest
    assert found == HeldVersion(
        *key, 4 * size, whole=True, progress=(chunks, chunks), digest=digest, metadata={"step": "7"}
    )
    status = relay.status()
    assert (status.upstream, status.joined, status.lost_s) == (publisher.address, True, None)
    assert status.epoch == publisher.epoch
    wait_for(lambda: relay.status().received == {"m": 8 * size}, "both are counted", SECONDS)


def test_a_version_that_only_has_a_new_name_is_not_received_twice(
    tree: Tree, tmp_path: Any
) -> None:
    address = lasting_address()
    publisher = tree.publisher(address=address, state=tmp_path)
    relay = tree.relay(publisher)
    first = tree.publishes(publisher, 1)
    wait_for(lambda: whole(relay, first), "it is whole", SECONDS)
    wait_for(lambda: publisher.history("m"), "it is on disk", SECONDS)
    publisher.close()
    again = tree.publisher(address=address, state=tmp_path)
    wait_for(lambda: whole(relay, (again.epoch, 1)), "its new name", SECONDS)
    assert relay.status().received == {"m": 4 * CHUNKED}


def test_a_relay_names_its_workers_as_a_publisher_does(tree: Tree) -> None:
    publisher = tree.publisher()
    relay = tree.relay(publisher)
    events = list[WorkerEvent]()
    end = relay.on_worker(events.append)
    worker = tree.worker(relay, CHUNKED)
    key = tree.publishes(publisher, 1)
    tree.receives(worker, key)
    wait_for(lambda: relay.workers()["worker"].running == {"m": key}, "it runs it", SECONDS)
    assert [(event.kind, event.worker) for event in events] == [("joined", "worker")]
    end()


def test_a_relay_without_its_publisher_says_so(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weightbus")
    address = lasting_address()
    publisher = tree.publisher(address=address)
    relay = tree.relay(publisher)
    publisher.publish_async("m", arrays(1, WHOLE))
    epoch = publisher.epoch
    wait_for(lambda: whole(relay, (epoch, 1)), "it is whole", SECONDS)
    publisher.close()
    with Observer(relay.address) as observer:

        def told() -> str:
            assert observer.look(SECONDS)
            return diagnosis.cut_off_text(observer.view)

        text = wait_for(told, "it is cut off", SECONDS)
        assert text == (
            f"relay {relay.name} has no publisher: {address} does not answer; workers get the "
            "versions that it has (m 1)"
        )
        assert text in [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        trouble = diagnosis.Trouble("problem", text, diagnosis.FIND_PUBLISHER)
        assert diagnosis.troubles(observer.view, [], 0.0)[0] == trouble
        assert text in [finding.text for finding in diagnosis.diagnose(observer.view, 0.0, None)]
        status = relay.status()
        assert not status.joined
        assert status.lost_s is not None
        assert status.epoch == epoch
        tree.publisher(address=address)
        wait_for(lambda: not told(), "it has joined again", SECONDS)
    wait_for(lambda: relay.status().joined, "it has joined again", SECONDS)
    assert f"relay {relay.name} has joined the publisher at {address}" in caplog.messages


@pytest.mark.parametrize("relays", [1, 2])
def test_a_worker_says_that_there_is_no_publisher_above_its_relay(
    tree: Tree, caplog: pytest.LogCaptureFixture, relays: int
) -> None:
    caplog.set_level(logging.INFO, "weightbus")
    address = lasting_address()
    with ExitStack() as stack:
        publisher = stack.enter_context(_process_of_a_publisher(address, "m"))
        relay = last = stack.enter_context(Relay(address, ANY, ["m"], name="relay", settings=SOON))
        if relays == 2:
            last = stack.enter_context(Relay(relay.address, ANY, ["m"], name="last", settings=SOON))
        worker = tree.worker(last, WHOLE).start()
        observer = stack.enter_context(Observer(last.address))
        assert worker.wait_for_version("m", 1, timeout=SECONDS)
        assert worker.cut_off_s is None

        def seen() -> str:
            assert observer.look(SECONDS)
            return diagnosis.cut_off_text(observer.view)

        assert not seen()
        publisher.kill()
        at = time.monotonic()
        wait_for(lambda: worker.cut_off_s is not None, "the worker says so", SECONDS)
        took = time.monotonic() - at
        # the silence, two pings of the relay, and for each level below a ping
        assert took < SOON.lost_after + 2 * SOON.ping + relays * SOON.ping + BUSY_SECONDS
        at_worker, at_relay = worker.cut_off_s, last.status().cut_off_s
        assert at_worker is not None
        assert at_relay is not None
        assert abs(at_worker - at_relay) < BUSY_SECONDS
        lost = f"{relay.upstream} does not answer"
        lost = lost if relays == 1 else f"the relay at {relay.address} has none"
        held = "; workers get the versions that it has (m 1)"
        assert seen() == f"relay {last.name} has no publisher: {lost}{held}"
        assert last.status().joined is (relays == 2)
        assert "cut-off: there has been no publisher above its relay for" in caplog.text
        again = stack.enter_context(_process_of_a_publisher(address))
        wait_for(lambda: worker.cut_off_s is None, "the worker knows of it", SECONDS)
        wait_for(lambda: not seen(), "observers know of it", SECONDS)
        assert "rejoined: there is a publisher above its relay again" in caplog.text
        again.kill()


PUBLISHES = """
import sys
import numpy as np
import weightbus
address, *models = sys.argv[1:]
settings = weightbus.Settings(ping=0.1, lost_after=1.0)
with weightbus.Publisher(address, settings=settings) as publisher:
    for model in models:
        publisher.publish(model, {"w": np.zeros(10, np.float32)}, require=0)
    print("ready", flush=True)
    sys.stdin.read()
"""


def _process_of_a_publisher(address: str, *models: str) -> "subprocess.Popen[str]":
    """Return the process of a publisher, once it has published a version of each of the models."""
    process = subprocess.Popen(  # noqa: S603 - our own
        [sys.executable, "-c", PUBLISHES, address, *models],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_metrics_of_a_relay(tree: Tree) -> None:
    publisher = tree.publisher()
    with Relay(
        publisher.address, ANY, ["m"], name="r", metrics="127.0.0.1:0", settings=SOON
    ) as relay:
        worker = tree.worker(relay, CHUNKED)
        assert worker.wait_joined(SECONDS)
        publisher.publish_async("m", arrays(1, CHUNKED), metadata={"step": "1"})
        tree.receives(worker, (publisher.epoch, 1))

        def text() -> str:
            with urllib.request.urlopen(relay.shown.metrics, timeout=SECONDS) as answer:  # noqa: S310
                return str(answer.read().decode())

        def current() -> Samples | None:
            found = samples(text())
            runs = found.get(("weightbus_worker_version", (*model, ("worker", "worker"))))
            return found if runs == 1 else None

        model = (("model", "m"),)
        found = wait_for(current, "its worker runs the version", SECONDS)
        assert found is not None
        assert found["weightbus_relay_upstream_up", ()] == 1
        assert found["weightbus_relay_upstream_epoch", ()] == publisher.epoch
        assert found["weightbus_relay_received_bytes_total", model] == 4 * CHUNKED
        assert found["weightbus_relay_versions", (*model, ("state", "whole"))] == 1
        assert found["weightbus_relay_versions", (*model, ("state", "arriving"))] == 0
        assert found["weightbus_relay_bytes", model] == 4 * CHUNKED
        shown = shown_in(text())
        assert shown.keys() == METRICS.keys()
        own = [row for row in METRICS.values() if row.name.startswith("weightbus_relay_")]
        assert own
        assert all(shown[r.name] == (r.kind, {*r.labels}, r.help) for r in own)
        publisher.close()
        wait_for(lambda: "weightbus_relay_upstream_up 0.0" in text(), "it is cut off", SECONDS)


def test_two_relays_of_one_name_are_refused(tree: Tree) -> None:
    publisher = tree.publisher()
    with Relay(publisher.address, ANY, ["m"], name="same", settings=SOON) as first:
        assert first.wait_joined(SECONDS)
        with (
            Relay(publisher.address, ANY, ["m"], name="same", settings=SOON) as second,
            pytest.raises(RefusedError, match=r"refuses relay 'same' \(name-taken\)"),
        ):
            second.wait_joined(SECONDS)


def test_a_relay_says_what_it_cannot_pass_on(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    publisher = tree.publisher()
    small = replace(SOON, bytes_max=4 * WHOLE)
    with Relay(publisher.address, ANY, ["m"], name="r", settings=small) as relay:
        assert relay.wait_joined(SECONDS)
        publisher.publish("m", arrays(1, WHOLE))
        wait_for(lambda: whole(relay, (publisher.epoch, 1)), "it is whole", SECONDS)
        publisher.publish("m", arrays(2, CHUNKED))
        text = "relay r cannot pass it on: m version 2 cannot be applied here (too-large)"
        wait_for(lambda: text in caplog.text, "it says so", SECONDS)


def test_a_relay_has_a_name_by_default(tree: Tree) -> None:
    publisher = tree.publisher()
    with Relay(publisher.address, ANY, ["m"], settings=SOON) as relay:
        assert relay.wait_joined(SECONDS)
        assert list(publisher.workers()) == [relay.name]
        assert repr(relay) == f"<Relay {relay.name} of {publisher.address} at {relay.address}>"


@pytest.mark.parametrize(
    ("upstream", "address"),
    [
        ("tcp://127.0.0.1:{port}", "tcp://127.0.0.1:{port}"),
        ("tcp://localhost:{port}", "tcp://127.0.0.1:{port}"),
        ("tcp://localhost:{port}", "tcp://0.0.0.0:{port}"),
        ("ipc://{path}", "ipc://{path}"),
    ],
)
def test_a_relay_is_not_its_own_publisher(upstream: str, address: str, tmp_path: Any) -> None:
    about = {"port": lasting_address().rpartition(":")[2], "path": tmp_path / "bus"}
    with pytest.raises(AddressError, match="relay r would be its own publisher"):
        Relay(upstream.format(**about), address.format(**about), ["m"], name="r", insecure=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, "give a list of 1 to"),
        ({"models": "policy"}, "models='policy': give a list"),
        ({"models": ["a b"]}, "model 'a b': a name is"),
        ({"name": "a b"}, "relay 'a b': a name is"),
        ({"settings": Settings(chunk_bytes=1024)}, "is a setting of a Publisher, not of a Relay"),
    ],
)
def test_what_can_never_be_relayed(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"upstream": NOWHERE, "address": ANY, "models": ["m"], "name": "r"}
    with pytest.raises(ValueError, match=words):
        Relay(**options | changes)


def test_a_closed_relay_says_so() -> None:
    relay = Relay(NOWHERE, ANY, ["m"], name="r")
    assert not relay.wait_joined(0)
    relay.close()
    relay.close()
    for call in (relay.status, relay.workers, lambda: relay.wait_joined(0)):
        with pytest.raises(ClosedError, match="this relay is closed"):
            call()


def test_a_dropped_relay_ends(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    relays = [Relay(NOWHERE, ANY, ["m"], name="r")]
    what = f"{relays[0]!r} was dropped without close(): call it, or use a with block"

    def drop() -> None:
        relays.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was dropped without close"):
        drop()
    assert [m for m in caplog.messages if "dropped" in m] == [what], "once"
    wait_for(lambda: threading.active_count() == before, "its threads end", SECONDS)


def test_a_forked_child_is_told_to_make_its_own() -> None:
    with Relay(NOWHERE, ANY, ["m"], name="r") as relay:
        relay._mark_as_copy()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        for call in (relay.status, relay.workers, lambda: relay.wait_joined(0)):
            with pytest.raises(ClosedError, match="Make a Relay here"):
                call()
        relay._is_forked_copy = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
