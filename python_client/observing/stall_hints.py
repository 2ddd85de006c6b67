"""Warns the user of a worker that finds no publisher, or whose versions the user never applies."""

import logging
import threading
import time
from contextlib import suppress
from functools import partial

from ...bus.net.ready_queue import ReadyQueue
from ...bus.units import span
from ...bus.worker.machine import WorkerMachine
from ...codecs.words import printable
from .connection_checks import reach

log = logging.getLogger("weightbus.worker")

REACH = 0.5  # fraction of `hint_after` that the check of the address may take


class StallHints:
    """Logs a warning if a worker finds no publisher, or applies no version.

    The first warning is logged once for each time outside a session, the second once.

    Args:
        addresses: The publisher's addresses.
        machine: The worker's machine.
        ready_queue: The queue of the worker's versions that are ready to be applied.
        keyed: Whether the worker has keys.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        machine: WorkerMachine,
        ready_queue: ReadyQueue,
        *,
        keyed: bool,
    ) -> None:
        self._addresses, self._machine, self._ready_queue = addresses, machine, ready_queue
        self._name, self._keyed = machine.identity.name, keyed
        self._patience = machine.timing.hint_after
        self._outside_since: float | None = None  # since when there is no session
        self._ready_since: float | None = None  # since when a version waits to be applied
        self._hinted_outside = self._hinted_ready = False

    def look(self) -> None:
        """Log a warning if a stall has lasted longer than `hint_after`. This does not block."""
        now = time.monotonic()
        if self._machine.in_session:
            self._outside_since, self._hinted_outside = None, False
        elif self._ready_queue.refused:  # the refusal itself says why
            self._outside_since = None
        elif self._outside_since is None:
            self._outside_since = now
        elif not self._hinted_outside and now - self._outside_since >= self._patience:
            self._hinted_outside = True
            warn = partial(self._warn_of_no_publisher, now - self._outside_since)
            with suppress(RuntimeError):  # the system has too many threads
                threading.Thread(target=warn, name="weightbus-reach", daemon=True).start()
        if not self._hinted_ready:
            self._warn_if_nothing_applies(now)

    def _warn_if_nothing_applies(self, now: float) -> None:
        # Log a warning if a version has been ready for long, and no thread ever waited for one.
        ready = self._ready_queue.unasked
        if ready is None:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        elif now - self._ready_since >= self._patience:
            self._hinted_ready = True
            log.warning(
                "worker %s has version %d of %s, and nothing applies it: call start(), or "
                "receive() where weights may change",
                *(self._name, ready.version, ready.model),
            )

    def _warn_of_no_publisher(self, seconds: float) -> None:
        """Check what answers at the addresses, and log a warning. (In a separate thread.)"""
        problems = {each: self._problem(each) for each in self._addresses}
        if self._machine.in_session or self._ready_queue.refused or self._ready_queue.closed:
            return
        if not all(problems.values()):
            return  # if the keys are wrong, the worker reports a refusal
        what = "; ".join(f"{each}: {text}" for each, text in problems.items())
        what = what if len(problems) > 1 else problems[self._addresses[0]]
        text = (
            f"worker {self._name} has found no publisher for {span(seconds)}, and keeps trying: "
            f"{what}"
        )
        log.warning("%s", printable(text))

    def _problem(self, address: str) -> str:
        # Return the problem with an address; empty if only the keys can be wrong.
        found = reach(address, keyed=self._keyed, timeout=REACH * self._patience)
        problem = next((f"{f.text}; {f.advice}" for f in found if f.state == "problem"), "")
        if problem or self._keyed:
            return problem
        return (
            f"ZeroMQ answers at {address}, but no publisher of weightbus does: is it another "
            "program, or is the publisher's process busy or stopped?"
        )
