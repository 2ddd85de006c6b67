"""Drivers against real publishers with keys: keys.py DRIVER...

Each case has publishers and workers of its own, over TCP and ipc; all drivers play it at once.
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightbus import Publisher, Settings
from weightbus.bus.trust.keys import generate
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance.driver import Driver, Options
from weightbus.tests.conformance.publishing import expect

SECONDS = 60.0
TIMING = Settings(ping=0.2, lost_after=5.0)
LARGE = 5 * 2**20 + 12  # several chunks, the last of which is short


@dataclass
class Bench:
    """What a case is made with: folders of keys, and publishers and workers that end with it."""

    driver: str
    folder: Path
    undo: ExitStack
    made: int = 0

    def keys(self) -> Path:
        """Make a publisher's folder of keys, of workers w and gpu-*."""
        self.made += 1
        folder = self.folder / f"keys-{self.made}"
        generate(folder, {"w": "worker", "gpu-*": "worker"})
        return folder

    def publisher(
        self, keys: Path | None, address: str = "tcp://127.0.0.1:0", **told: object
    ) -> Publisher:
        """Have a publisher; without keys if there are none."""
        told = settled({"keys": keys or "", "settings": TIMING, **told})
        return self.undo.enter_context(Publisher(address, **told))  # type: ignore[arg-type]

    def worker(
        self, publisher: Publisher, file: Path | None, name: str = "w", *, shared: bool = False
    ) -> Driver:
        """Have a worker with the keys of a file; without any if there is none."""
        options = Options(keys=file, shared=shared)
        driver = Driver([self.driver], publisher.address, name, options, self.folder)
        return self.undo.enter_context(closing(driver))


def publish(publisher: Publisher, fill: int, count: int = LARGE) -> None:
    """Publish one version, which all workers apply."""
    weights = {"w": np.full(count, fill, np.uint8), "b": np.full((), fill, np.float32)}
    receipt = publisher.publish("m", weights, timeout=SECONDS)
    states = {name: worker.state for name, worker in receipt.workers.items()}
    expect(set(states.values()) == {"applied"}, f"{states}")


def file_of(keys: Path, name: str = "w") -> Path:
    """Return a worker's file."""
    return keys / "workers" / f"{name}.json"


def versions_come(bench: Bench) -> None:
    """over TCP, ipc, and shared memory; under a name of a pattern; small ones whole"""
    for address, shared in (
        ("tcp://127.0.0.1:0", False),
        (f"ipc://{bench.folder}/bus", False),
        (f"ipc://{bench.folder}/shared", True),
    ):
        keys = bench.keys()
        publisher = bench.publisher(keys, address)
        bench.worker(publisher, file_of(keys), shared=shared)
        bench.worker(publisher, file_of(keys, "gpu-+"), "gpu-7", shared=shared)
        publisher.wait_for_workers(2, SECONDS)
        for fill in range(3):
            publish(publisher, fill)
            publish(publisher, fill, 100)


def group_keys_change(bench: Bench) -> None:
    """and nothing is missed, in the middle of versions that follow one another"""
    keys = bench.keys()
    publisher = bench.publisher(keys, rekey=0.3)
    worker = bench.worker(publisher, file_of(keys))
    publisher.wait_for_workers(1, SECONDS)
    sealer = publisher._loop._sealer  # noqa: SLF001
    seen = set[str]()
    fill = 0
    while len(seen) < 6:
        seen.update(sealer.keys)
        fill = fill % 250 + 1
        publish(publisher, fill, LARGE if fill % 5 else 100)
    expect(not worker.those("failed"), worker.story())
    expect(len(worker.those("joined")) == 1, worker.story())


def who_is_revoked(bench: Bench) -> None:
    """is told, runs what it ran, and is let in again"""
    keys = bench.keys()
    publisher = bench.publisher(keys)
    worker = bench.worker(publisher, file_of(keys))
    other = bench.worker(publisher, file_of(keys, "gpu-+"), "gpu-7")
    publisher.wait_for_workers(2, SECONDS)
    publish(publisher, 1)
    allowed, aside = keys / "allowed" / "w.json", keys / "aside.json"
    allowed.rename(aside)
    worker.wait_event("refused", code="revoked")
    publish(publisher, 2)
    other.wait_event("applied", version=2)
    expect(not worker.those("applied", version=2), worker.story())
    aside.rename(allowed)
    publisher.wait_for_workers(2, SECONDS)
    publish(publisher, 3)


def who_is_not_allowed(bench: Bench) -> None:
    """is told what most likely is wrong, goes on dialling, and is let in once it may come"""
    keys, others = bench.keys(), bench.keys()
    allowed, aside = keys / "allowed" / "w.json", keys / "aside.json"
    allowed.rename(aside)
    publisher, plain = bench.publisher(keys), bench.publisher(None)
    cases = (
        (bench.worker(publisher, file_of(keys)), "does not allow this worker's key"),
        (bench.worker(publisher, file_of(others)), "another key than the one"),
        (bench.worker(publisher, None), "asks for keys"),
        (bench.worker(plain, file_of(keys)), "speaks without keys"),
    )
    for worker, why in cases:
        refused = worker.wait_event("refused", code="keys")
        expect(why in refused["text"], f"{refused}")
    wrong = bench.worker(publisher, file_of(keys, "gpu-+"), "cpu-7")
    wrong.wait_event("refused", code="wrong-name")
    aside.rename(allowed)
    publisher.wait_for_workers(1, SECONDS)
    cases[0][0].wait_event("joined")
    expect(publisher.workers().keys() == {"w"}, f"{publisher.workers()}")
    expect(plain.workers() == {}, f"{plain.workers()}")


def a_restart(bench: Bench) -> None:
    """draws another group key, and its workers come back"""
    keys = bench.keys()
    address = f"ipc://{bench.folder}/again"
    with closing(bench.publisher(keys, address)) as publisher:
        worker = bench.worker(publisher, file_of(keys))
        publisher.wait_for_workers(1, SECONDS)
        publish(publisher, 1)
    publisher = bench.publisher(keys, address)
    publisher.wait_for_workers(1, SECONDS)
    publish(publisher, 2)
    wait_for(lambda: len(worker.those("applied")) >= 2, "both to be told", SECONDS)


CASES: tuple[Callable[[Bench], None], ...] = (
    versions_come,
    group_keys_change,
    who_is_revoked,
    who_is_not_allowed,
    a_restart,
)


def play(driver: str, case: Callable[[Bench], None]) -> str:
    """Play a case; return what is wrong, nothing if all is well."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        try:
            case(Bench(driver, Path(folder), undo))
        except Exception as error:  # whatever it is, others are played as well
            return f"{driver}: {case.__name__}: {type(error).__name__}: {error}"
    return ""


def main(drivers: list[str]) -> int:
    """Play all cases with all drivers."""
    played = [(driver, case) for driver in drivers for case in CASES]
    with ThreadPoolExecutor(len(played)) as pool:
        faults = [fault for fault in pool.map(lambda each: play(*each), played) if fault]
    print("\n".join(faults) or f"keys: {len(played)} cases hold")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
