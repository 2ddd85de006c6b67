"""Warns the user of a worker that has found no publisher, or whose versions nothing applies."""

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
    """Logs a warning if a worker finds no publisher, or applies no versions: once for each stall.

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
        self._outside_since: float | None = None
        self._ready_since: float | None = None
        self._hinted_outside = self._hinted_ready = False

    def look(self) -> None:
        """Log a warning if a stall has lasted longer than `hint_after`. Must not block."""
        now = time.monotonic()
        if self._machine.in_session:
            self._outside_since, self._hinted_outside = None, False
        elif self._ready_queue.refused:  # the refusal itself says why
            self._outside_since = None
        elif self._outside_since is None:
            self._outside_since = now
        elif not self._hinted_outside and now - self._outside_since >= self._patience:
            self._hinted_outside = True
            say = partial(self._say_what_answers, now - self._outside_since)
            with suppress(RuntimeError):  # the system has too many threads
                threading.Thread(target=say, name="weightbus-reach", daemon=True).start()
        if not self._hinted_ready:
            self._warn_if_nothing_applies(now)

    def _warn_if_nothing_applies(self, now: float) -> None:
        # Log a warning if a version has been ready for long, and nothing requested to apply it.
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

    def _say_what_answers(self, seconds: float) -> None:
        """Check what answers at the addresses, and log a warning. (In a separate thread.)"""
        wrong = {each: self._wrong(each) for each in self._addresses}
        if self._machine.in_session or self._ready_queue.refused or self._ready_queue.closed:
            return
        if not all(wrong.values()):
            return  # if the keys are wrong, the worker reports a refusal
        what = "; ".join(f"{each}: {text}" for each, text in wrong.items())
        what = what if len(wrong) > 1 else wrong[self._addresses[0]]
        text = (
            f"worker {self._name} has found no publisher for {span(seconds)}, and tries on: {what}"
        )
        log.warning("%s", printable(text))

    def _wrong(self, address: str) -> str:
        # Return what is wrong with an address; empty if only the keys can be wrong.
        found = reach(address, keyed=self._keyed, timeout=REACH * self._patience)
        wrong = next((f"{f.text}; {f.advice}" for f in found if f.state == "problem"), "")
        if wrong or self._keyed:
            return wrong
        return (
            f"ZeroMQ answers at {address}, and no publisher of weightbus; is that another "
            "program, or is its process busy, or stopped?"
        )
