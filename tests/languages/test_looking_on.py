"""Who looks on at a publisher of the Rust core sees what its receipts say.

make examples
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import RefusedError, Subscriber
from weightbus.bus.limits import Timing
from weightbus.bus.trust.keys import WorkerKeys, generate
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.languages import chosen
from weightbus.tests.languages.test_examples import SECONDS, need

(RUST,) = chosen("rust")

pytestmark = pytest.mark.timeout(600)  # compiling


@pytest.fixture(name="keys", params=[False, True], ids=["open", "keys"])
def _keys(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if not request.param:
        return None
    generate(tmp_path / "keys", {"w": "worker", "eye": "observer"})
    return tmp_path / "keys"


@pytest.fixture(name="publisher")
def _publisher(keys: Path | None, tmp_path: Path) -> Iterator[ProcessPublisher]:
    need(*RUST.tools)
    RUST.build()
    timing = Timing(ping=0.1, lost_after=2.0)
    made = ProcessPublisher(
        RUST.command, folder=tmp_path, chunk_bytes=2**12, timing=timing, keys=keys
    )
    with closing(made) as publisher:
        yield publisher


def file_of(keys: Path | None, name: str) -> Path | None:
    return keys and keys / "workers" / f"{name}.json"


def weights(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(10_000, value, np.float32), "b": np.full(3, value, np.float32)}


def command(name: str, publisher: ProcessPublisher, keys: Path | None) -> tuple[int, Any]:
    words = [sys.executable, "-m", "weightbus", name, publisher.address, "--json"]
    words += ["--keys", str(file_of(keys, "eye"))] if keys is not None else []
    done = subprocess.run(  # noqa: S603
        words, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_the_roster_is_what_receipts_say(publisher: ProcessPublisher, keys: Path | None) -> None:
    eye, own = file_of(keys, "eye"), file_of(keys, "w")
    subscriber = Subscriber(publisher.address, {"m": weights(0)}, name="w", keys=own or "")
    observer = Observer(publisher.address, WorkerKeys.read(eye) if eye is not None else None)
    with observer, subscriber:
        subscriber.start()
        for value in (1, 2):
            receipt = publisher.publish_async("m", weights(value), expect=1).result(SECONDS)
            assert observer.look(SECONDS)
            (standing,) = observer.view.standings(0)
            assert (standing.worker, standing.verdict) == ("w", "current")
            assert (standing.epoch, standing.version) == (receipt.epoch, receipt.version)
            assert standing.took_s > 0
        status, told = command("status", publisher, keys)
        assert (status, told["achieved"]) == (0, True)
        assert [row["version"] for row in told["workers"]] == [2]
        assert set(publisher.workers()) == {"w"}, "an observer is not a worker"
        subscriber.close()
        wait_for(lambda: observer.look(1) and not observer.view.workers, "it has left", SECONDS)


def test_a_worker_that_changed_its_weights_is_found_by_name(
    publisher: ProcessPublisher, keys: Path | None
) -> None:
    target, own = weights(0), file_of(keys, "w")
    with Subscriber(publisher.address, {"m": target}, name="w", keys=own or "").start():
        publisher.publish_async("m", weights(1), expect=1).result(SECONDS)
        status, told = command("verify", publisher, keys)
        assert (status, [row["verdict"] for row in told["workers"]]) == (0, ["same"])
        target["b"][0] = 7
        status, told = command("verify", publisher, keys)
        (row,) = told["workers"]
        assert (status, row["verdict"], row["compared"]) == (1, "differs", 2)
        assert [each["name"] for each in row["differences"]] == ["b"]


@pytest.mark.parametrize("keys", [True], indirect=True)
def test_a_workers_key_looks_at_nothing(publisher: ProcessPublisher, keys: Path) -> None:
    with (
        Observer(publisher.address, WorkerKeys.read(keys / "workers" / "w.json")) as observer,
        pytest.raises(RefusedError, match="only an observer's key may watch"),
    ):
        observer.look(SECONDS)
