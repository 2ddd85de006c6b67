"""The main loop of a worker process of the demo, which ends when the trainer ends."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from weightbus import Settings, Subscriber

from .policy import MODEL, Weights

# Workers use TCP, as on another host: with shared memory, the demo would not show a transfer.
NETWORK = Settings(shared_memory=False)


def stdin_ended() -> threading.Event:
    """Return an event that is set when stdin ends: the trainer has closed it, or has ended."""
    ended = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        ended.set()

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return ended


def follow(address: str, name: str, weights: Weights, line: Callable[[Subscriber], bytes]) -> None:
    """Write lines, each made with the newest weights, until stdin ends or stdout is closed."""
    ended = stdin_ended()
    with (
        contextlib.suppress(BrokenPipeError),
        Subscriber(address, {MODEL: weights}, name=name, settings=NETWORK).start() as bus,
    ):
        while not ended.is_set():
            if bus.error is not None:
                raise bus.error  # the trainer will repeat it to the user
            if bus.wait_for_version(MODEL, timeout=0.1) is not None:
                sys.stdout.buffer.write(line(bus))
                sys.stdout.buffer.flush()


def started(run: Callable[[str, str, int], None], description: str | None) -> None:
    """Run one worker with the command line's arguments; the demo starts workers this way."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("address", help="the publisher's address")
    parser.add_argument("--name", required=True, help="what this worker is called")
    parser.add_argument("--seed", type=int, default=0, help="of its episodes and actions")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer ends its workers
    run(given.address, given.name, given.seed)
    # Stdout may be a broken pipe, about which the interpreter would print an error when it flushes.
    os._exit(0)
