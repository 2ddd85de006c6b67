"""A publisher and a worker in a process that forks.

    python -m weightbus.tests.faults.forking ADDRESS

The child must find none of their descriptors but the memory of versions, and can do the same anew;
the parent notices nothing.
"""

import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np

from weightbus import Publisher, Subscriber
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0  # far more than anything here takes


def descriptors() -> dict[str, str]:
    """Return the descriptors of this process, and what each of them is."""
    found = dict[str, str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found[link.name] = str(link.readlink())
    return found


def weights(value: float) -> dict[str, np.ndarray]:
    return {"m": np.full(1000, value, np.float32)}


def is_subscribed(publisher: Publisher, worker: str) -> bool:
    """Return whether published messages are known to reach a worker."""
    machine = vars(vars(publisher)["_loop"])["_machine"]
    return bool(machine.state.roster.by_name(worker).subscribed)


@contextlib.contextmanager
def a_pair(address: str) -> Generator[tuple[Publisher, Subscriber, dict[str, np.ndarray]]]:
    target = weights(0)
    with (
        Publisher(address) as publisher,
        Subscriber(publisher.address, {"m": target}, name="w").start() as worker,
    ):
        publisher.wait_for_workers(1, timeout=SECONDS)
        publisher.publish("m", weights(1), timeout=SECONDS)
        # That may have come over the control channel, while the other one is being connected.
        wait_for(lambda: is_subscribed(publisher, "w"), "the data connection", SECONDS)
        yield publisher, worker, target


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked child, which then ends as any Python process does; its status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, of course
        child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    ended = os.pidfd_open(child)
    try:
        if not select.select([ended], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(address: str) -> None:
    """Fork between two versions, twice."""
    before = descriptors()
    with a_pair(address) as (publisher, worker, target):

        def look() -> None:
            inherited = {n: what for n, what in descriptors().items() if n not in before}
            left = [what for what in inherited.values() if "memfd:weightbus" not in what]
            assert not left, left
            publisher.close()  # does nothing here
            worker.close()
            with a_pair("tcp://127.0.0.1:0") as (_, _, own):
                assert own["m"][0] == 1

        for value in (2, 3):
            assert in_child(look) == 0
            publisher.publish("m", weights(value), timeout=SECONDS)
            assert target["m"][0] == value
        for path in [address.removeprefix("ipc://")] * address.startswith("ipc://"):
            assert Path(path).exists()
            assert Path(f"{path}.data").exists()


if __name__ == "__main__":
    main(sys.argv[1])
