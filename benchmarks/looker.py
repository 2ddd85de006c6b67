"""Somebody who looks on, as a process of its own: `... looker observer|dashboard ADDRESS`.

It looks as `weightbus top` does, or reads the stream of a page as a browser does; when told to.
"""

import contextlib
import sys
import threading
import urllib.request
from collections.abc import Callable

from weightbus.python_client.cli.top import LOOK_SECONDS
from weightbus.python_client.observing.observer import Observer

from .process import Answer, Answers

SECONDS = 10.0


class Looker:
    """Looks while it is told to.

    Args:
        look: Looks once, or for a moment.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._on, self._looks = look, threading.Event(), 0
        threading.Thread(target=self._run, daemon=True).start()

    def on(self) -> Answer:
        """Begin."""
        self._on.set()
        return {"looks": self._looks}

    def off(self) -> Answer:
        """Stop; tell how often it has looked."""
        self._on.clear()
        return {"looks": self._looks}

    def _run(self) -> None:
        while True:
            self._on.wait()
            self._look()
            self._looks += 1


def observer(address: str) -> Callable[[], None]:
    """Return what looks as an observer does."""
    looks, pause = Observer(address), threading.Event()

    def look() -> None:
        if not looks.look(SECONDS):
            raise TimeoutError("the publisher tells nothing")
        pause.wait(LOOK_SECONDS)

    return look


def browser(address: str) -> Callable[[], None]:
    """Return what reads the stream of a page, from one event to the next."""
    lines = iter(())  # of the stream, while there is one

    def look() -> None:
        nonlocal lines
        with contextlib.suppress(StopIteration):
            while not next(lines).startswith(b"data:"):
                pass
            return
        lines = iter(urllib.request.urlopen(address + "events", timeout=SECONDS))  # noqa: S310

    return look


if __name__ == "__main__":
    kind, where = sys.argv[1:]
    looker = Looker((observer if kind == "observer" else browser)(where))
    Answers({"on": looker.on, "off": looker.off}).serve()
