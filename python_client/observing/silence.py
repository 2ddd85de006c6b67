"""Why nothing comes, for the user of a worker: nobody lets it in, or nobody applies what it has."""

import logging
import threading
import time
from contextlib import suppress
from functools import partial

from ...bus.net.ready_queue import ReadyQueue
from ...bus.units import span
from ...bus.worker.machine import WorkerMachine
from ...codecs.words import printable
from .obstacles import reach

log = logging.getLogger("weightbus.worker")

REACH = 0.5  # of the patience: what it takes at most to find out who is at an address


class Silence:
    """What a worker waits for in vain. It is looked for in the worker's thread, and told once.

    Args:
        address: The publisher's.
        machine: The worker.
        handoff: Where its versions are left.
        keyed: Whether it has keys.
    """

    def __init__(
        self, address: str, machine: WorkerMachine, ready_queue: ReadyQueue, *, keyed: bool
    ) -> None:
        self._address, self._machine, self._ready_queue = address, machine, ready_queue
        self._name, self._keyed = machine.identity.name, keyed
        self._patience = machine.timing.hint_after
        self._outside_since: float | None = None
        self._ready_since: float | None = None
        self._told_outside = self._told_ready = False

    def look(self) -> None:
        """Say what has lasted too long by now; takes no time."""
        now = time.monotonic()
        if self._machine.inside:
            self._outside_since, self._told_outside = None, False
        elif self._ready_queue.refused:  # which says why
            self._outside_since = None
        elif self._outside_since is None:
            self._outside_since = now
        elif not self._told_outside and now - self._outside_since >= self._patience:
            self._told_outside = True
            say = partial(self._say_who_is_there, now - self._outside_since)
            with suppress(RuntimeError):  # there are too many threads
                threading.Thread(target=say, name="weightbus-reach", daemon=True).start()
        if not self._told_ready:
            self._look_at_what_is_ready(now)

    def _look_at_what_is_ready(self, now: float) -> None:
        ready = self._ready_queue.unasked
        if ready is None:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        elif now - self._ready_since >= self._patience:
            self._told_ready = True
            log.warning(
                "worker %s has version %d of %s, and nothing applies it: call start(), or "
                "receive() where weights may change",
                *(self._name, ready.version, ready.model),
            )

    def _say_who_is_there(self, seconds: float) -> None:
        """Find out who is at the address. (In a thread of its own.)"""
        found = reach(self._address, keyed=self._keyed, timeout=REACH * self._patience)
        if self._machine.inside or self._ready_queue.refused or self._ready_queue.closed:
            return
        wrong = next((f"{f.text}; {f.advice}" for f in found if f.state == "problem"), "")
        if not wrong and self._keyed:
            return  # which of the keys is wrong is told as a refusal
        if not wrong:
            wrong = (
                f"ZeroMQ answers at {self._address}, and no publisher of weightbus; is that "
                "another program, or is its process busy, or stopped?"
            )
        text = (
            f"worker {self._name} has found no publisher for {span(seconds)}, and tries on: {wrong}"
        )
        log.warning("%s", printable(text))
