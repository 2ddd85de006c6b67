"""A publisher that breaks the rules of shared memory: it writes where a worker copies."""

import os
import subprocess
import sys
from pathlib import Path

from weightbus.tests.conformance.decisions import heard_twice_more
from weightbus.tests.conformance.driver import Driver, Event
from weightbus.tests.conformance.publishing import expect
from weightbus.tests.conformance.rules import LOST, Fate, Passing
from weightbus.tests.conformance.stage import Stage
from weightbus.tests.conformance.weights import spec, uniform

LARGE = spec(t=("F32", [2**24]))  # 64 MiB: a copy takes long enough to be met in the middle
ATTEMPTS = 60  # versions; most copies are met among the first few
SPOILER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("spoiler.py")))
END_SECONDS = 10.0
MODEST = 10  # niceness, beside ours


class Ambush:
    """Has the stamp of each announced segment overwritten while a worker copies from it."""

    def __init__(self, worker: Driver) -> None:
        self._worker = worker
        for thread in os.listdir(f"/proc/{worker.pid}/task"):  # of two, the ambush is to run
            os.setpriority(os.PRIO_PROCESS, int(thread), os.nice(0) + MODEST)
        self._spoiler: subprocess.Popen[str] | None = None
        self.met = 0  # copies that were under way before and after the stamp went
        self.torn = False

    def rule(self, passing: Passing) -> Fate | None:
        """Lie in wait before a worker hears of a version; once one is torn, let it fetch none."""
        if passing.type == "failed" and passing.header.get("intact") is False:
            self.torn = True
        if passing.type == "fetch" and self.torn:
            return LOST
        shared = passing.header.get("shared") if passing.type == "announce" else None
        if shared and self._spoiler is None:
            self._spoiler = subprocess.Popen(  # noqa: S603 - a script of ours
                [*SPOILER, shared["path"], str(self._worker.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._spoiler.stdout is not None
            self._spoiler.stdout.readline()
        return None

    def end(self) -> None:
        """See what became of it; the next version is met by another."""
        if self._spoiler is not None:
            told, _ = self._spoiler.communicate(timeout=END_SECONDS)
            self.met += "met" in told
            self._spoiler = None


def shared_memory_overwritten(stage: Stage) -> None:
    """runs no version, and says so, where what it copies is overwritten; takes the next"""
    stage.open()
    stage.may_fail = {"apply"}
    worker = stage.worker(shared=True, in_place={"m": LARGE})
    stage.proxy.wait_answered(lambda p: p.header.get("shared") is True)
    stage.publish(uniform(LARGE, 1))
    ambush, byte = Ambush(worker), 1
    stage.proxy.rules = [ambush.rule]
    while not ambush.torn:
        byte += 1
        expect(
            byte <= ATTEMPTS,
            f"{ambush.met} versions were overwritten while they were copied; it never said so",
        )
        stage.submit(uniform(LARGE, byte), require=0)
        if _word_of(worker, byte)["event"] == "failed":
            stage.proxy.wait_seen("failed")
        ambush.end()
    heard_twice_more(stage, "w")  # what it says with its pings counts
    running = stage.publisher.workers()["w"].running
    expect("m" not in running, f"it runs parts of two versions, workers() says {running}")
    applied = worker.those("applied", version=byte)
    expect(not applied, f"it says that it runs what it could not copy: {applied}")
    stage.proxy.rules = []
    stage.publish(uniform(LARGE, byte + 1))
    worker.wait_applied("m", stage.publisher.epoch, byte + 1)


def _word_of(worker: Driver, version: int) -> Event:
    """Wait for what a worker says of a version."""

    def found(events: list[Event]) -> Event | None:
        said = (e for e in events if e["event"] in ("applied", "failed"))
        return next((e for e in said if e["version"] == version), None)

    return worker.wait(f"word of version {version}", found)
