"""A state folder in turns: state.py DRIVER.

What a publisher in Python has left one in Rust offers, and the other way.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.limits import Timing
from weightbus.python_client.files.state_folder import StateFolder
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.publishing import expect

SECONDS = 30.0
ROUNDS = 2
TIMING = Timing(ping=0.2, lost_after=5.0)
Either = Publisher | ProcessPublisher


def weights(value: int) -> dict[str, np.ndarray]:
    """Return a model of all sorts: several chunks, a scalar, and nothing at all."""
    return {
        "w": np.full((70, 100), value, np.float32),
        "s": np.array(value, np.int16),
        "none": np.zeros((0, 3), np.float64),
    }


def start(kind: str, driver: str, folder: Path) -> Either:
    """Start a publisher with the folder; both keep two older versions."""
    if kind == "python":
        few = Settings(ping=TIMING.ping, lost_after=TIMING.lost_after, chunk_bytes=1_000)
        return Publisher(state=folder, settings=few, keys="", history=2)
    state = str(folder)
    return ProcessPublisher(
        [driver], folder=folder.parent, chunk_bytes=2_000, timing=TIMING, state=state, history=2
    )


def check_offered(publisher: Either, value: int, digest: str) -> None:
    """See that a worker gets what was published last, as the first of the epoch."""
    target = weights(0)
    with Subscriber(
        publisher.address, {"m": target}, settings=Settings(shared_memory=False), keys=""
    ) as worker:
        update = worker.receive(SECONDS)
    expect(update is not None, f"what publisher {value} has left is not offered")
    if update is not None:
        found = update.epoch, update.version, update.digest
        expect(found == (publisher.epoch, 1, digest), f"{found} is offered, not {digest}")
        expect(update.metadata == {"value": str(value)}, f"of {value} is said {update.metadata}")
    same = all(np.array_equal(target[name], its) for name, its in weights(value).items())
    expect(same, f"what is offered are not the weights of publisher {value}")


def turn(kind: str, driver: str, folder: Path, value: int, digest: str) -> tuple[int, str]:
    """Have one publisher offer what the one before left, and leave more; its epoch and digest."""
    publisher = start(kind, driver, folder)
    if value > 1:
        check_offered(publisher, value - 1, digest)
    target = weights(0)
    with Subscriber(
        publisher.address, {"m": target}, settings=Settings(shared_memory=False), keys=""
    ) as worker:
        expect(value == 1 or worker.receive(SECONDS) is not None, "nothing is offered")
        said, unheard = {"value": str(value)}, Settings(wait="none")
        future = publisher.publish_async("m", weights(value), metadata=said, settings=unheard)
        future.result(SECONDS)
        update = worker.receive(SECONDS)
    publisher.close()
    with StateFolder(folder, history=2) as kept:
        found = kept.versions("m")
        expect(len(found) == min(value, 3), f"there should be 3 at most: {found}")
        expect(update is not None and update.digest == found[0].digest, f"not the last: {found}")
        return publisher.epoch, found[0].digest


def main(driver: str) -> int:
    """Take turns."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "state"
        epoch, digest = 0, ""
        for value, kind in enumerate(["python", "rust"] * ROUNDS, 1):
            before = epoch
            epoch, digest = turn(kind, driver, folder, value, digest)
            expect(epoch > before, f"epoch {epoch} after {before}")
        with Publisher(state=folder, history=2, keys="") as publisher:  # and back to an older one
            *_, oldest = publisher.history("m")
            receipt = publisher.rollback("m", oldest.key, timeout=SECONDS)
            expect(receipt.digest == oldest.digest, f"{receipt} after going back to {oldest}")
    print(f"{2 * ROUNDS} publishers in turns: each has offered what the one before had published")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
