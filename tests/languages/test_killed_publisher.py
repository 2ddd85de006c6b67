"""A publisher of the Rust core is killed whatever it is at, and comes back with its state folder.

    make examples

Its epochs are so far ahead that no clock helps: its folder alone says which comes next.
"""

import contextlib
import os
import random
import signal
import subprocess
import threading
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from weightbus.bus.limits import Timing
from weightbus.python_client.files.state_folder import PARTIAL, TABLE, StateFolder
from weightbus.tests.chaos.content import CHUNK_BYTES, LARGE, weights
from weightbus.tests.chaos.judge import Judge
from weightbus.tests.conformance.driver import Driver, Fault, Options
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.languages import chosen
from weightbus.tests.languages.test_examples import SECONDS, need
from weightbus.types import Receipt

FAR = 2**42  # an epoch of the year 2109
LIVES = 12
STARTING, SENDING = 0.01, 0.02  # seconds that a start takes, and what is published then
PYTHON, RUST = chosen("python,rust")

pytestmark = pytest.mark.timeout(600)  # compiling


class Lives:
    """A publisher that is killed and started again, and workers that live on."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self._folder, self._state, self._address = folder, folder / "state", f"ipc://{folder}/bus"
        self._undo, self._judge, self._serial = undo, Judge("mixed"), 0
        self._epochs, self._late = [FAR], list[tuple[int, int]]()
        self.interrupted = 0
        with closing(StateFolder(self._state)) as state:
            state.begin(FAR)
        self.workers = [
            undo.enter_context(closing(Driver(command, self._address, name, options, folder)))
            for name, command in (("p", PYTHON.command), ("r", RUST.command))
            for options in [Options((LARGE,))]
        ]

    def start(self) -> ProcessPublisher:
        """Start a publisher."""
        told = [e["epoch"] for worker in self.workers for e in worker.those("joined")]
        before = max([*self._epochs, *told])
        publisher = ProcessPublisher(
            RUST.command,
            folder=self._folder,
            address=self._address,
            chunk_bytes=CHUNK_BYTES,
            timing=Timing(ping=0.1, lost_after=5.0),
            state=str(self._state),
        )
        self._undo.callback(self._end, publisher)
        self._epochs.append(publisher.epoch)
        if publisher.epoch <= before:
            self._late.append((publisher.epoch, before))
        return publisher

    def _end(self, publisher: ProcessPublisher) -> None:
        with contextlib.suppress(Fault):  # it was killed
            publisher.close()

    def kill_at_its_start(self, seconds: float) -> None:
        """Start one that is killed before anybody could say what it has done by then."""
        words = ["publisher", self._address, "--state", str(self._state), "--keys", ""]
        process = subprocess.Popen(  # noqa: S603 - our own driver
            [*RUST.command, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        threading.Event().wait(seconds)
        process.kill()
        process.communicate()

    def kill(self, publisher: ProcessPublisher, open_calls: "list[Future[Receipt]]") -> None:
        """Kill one in the middle of what it does."""
        os.kill(publisher.pid, signal.SIGKILL)
        self._end(publisher)
        self.interrupted += any(isinstance(call.exception(SECONDS), Fault) for call in open_calls)

    def leave_half_a_table(self, rng: random.Random) -> None:
        """Leave what one leaves that is killed while it writes its epoch down."""
        table = (self._state / TABLE).read_bytes()
        (self._state / (TABLE + PARTIAL)).write_bytes(table[: rng.randrange(len(table))])

    def publish(self, publisher: ProcessPublisher, **options: Any) -> "Future[Receipt]":
        """Publish what workers can be held to, byte for byte."""
        self._serial += 1
        self._judge.serials[LARGE].add(self._serial)
        content = weights(LARGE, self._serial, "mixed")
        return publisher.publish_async(LARGE, content, timeout=SECONDS, **options)

    def check(self) -> None:
        """Nobody has gone back, seen parts of two versions, or refused a publisher."""
        assert self._late == []
        for worker in self.workers:
            assert list(self._judge.faults(worker)) == []
            assert worker.those("refused") == []
            joined = [event["epoch"] for event in worker.those("joined")]
            assert joined == sorted(joined)


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_in_the_middle_of_publishes(tmp_path: Path, seed: int) -> None:
    need(*RUST.tools)
    RUST.build()
    rng = random.Random(seed)
    with ExitStack() as undo:
        lives = Lives(tmp_path, undo)
        for _ in range(LIVES):
            if rng.random() < 0.3:
                lives.kill_at_its_start(rng.uniform(0, STARTING))
                lives.leave_half_a_table(rng)
                continue
            publisher = lives.start()
            if rng.random() < 0.8:
                publisher.wait_until(
                    lambda there: "" if len(there) == len(lives.workers) else f"{there}", SECONDS
                )
            commit = rng.choice(["auto", "auto", "together"])
            calls = [lives.publish(publisher, commit=commit) for _ in range(rng.randint(1, 4))]
            threading.Event().wait(rng.uniform(0, SENDING))
            lives.kill(publisher, calls)
        publisher = (
            lives.start()
        )  # where all were quick, this one is still at it: nobody else comes
        lives.kill(publisher, [lives.publish(publisher, expect=len(lives.workers) + 1)])
        with closing(lives.start()) as publisher:
            receipt = lives.publish(publisher, expect=len(lives.workers)).result(SECONDS)
            assert receipt.in_state("applied") == ["p", "r"]
            for worker in lives.workers:
                worker.wait_applied(LARGE, receipt.epoch, receipt.version)
        lives.check()
        assert lives.interrupted
    with closing(StateFolder(tmp_path / "state")) as state:
        assert state.epoch == receipt.epoch
