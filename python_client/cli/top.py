"""`weightbus top`: shows a live table of workers, the worst first; keys sort, filter and quit.

`rich` draws the table, since the command line needs `rich` anyway. While the table is shown, the
terminal is in cbreak mode.
"""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ...bus.units import span
from ..observing.diagnosis import Trouble, troubles
from ..observing.observer import Observer
from ..observing.view import VERDICTS, Standing
from .outcome import DONE, NOT_ACHIEVED
from .screen import BAD, DIM, GOOD, Screen, counted, metadata_text, plain
from .status import fields, observer_of, rows_of, show, show_models, unread

POLL_SECONDS = 0.5  # seconds between two requests
OTHER_LINES = 6  # lines of the screen that are not rows: titles, head and keys
TROUBLE_STYLES = {"problem": BAD, "note": "yellow"}
KEYS = "q quit   s sort   / filter, then Enter   Esc all"

SORTS: dict[str, Callable[[Standing], tuple[object, ...]]] = {
    "trouble": lambda s: (VERDICTS.index(s.verdict), -s.lag, s.model, s.worker),
    "worker": lambda s: (s.worker, s.model),
    "model": lambda s: (s.model, s.worker),
    "lag": lambda s: (-s.lag, s.worker),
    "rate": lambda s: (-s.rate, s.worker),
}


@dataclass
class Choice:
    """The rows that the user wants to see, and their order; pressed keys change it.

    Attributes:
        sort: The name of the order, a key of `SORTS`.
        text: The text that rows must contain.
        typing: Whether the user is typing `text`.
        over: Whether the user has quit.
    """

    sort: str = "trouble"
    text: str = ""
    typing: bool = False
    over: bool = field(default=False)

    def press(self, key: str) -> None:
        if key == "\x1b":
            self.text, self.typing = "", False
        elif self.typing:
            self._type(key)
        elif key == "q":
            self.over = True
        elif key == "s":
            names = [*SORTS]
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
        elif key == "/":
            self.typing = True

    def _type(self, key: str) -> None:
        if key in "\r\n":
            self.typing = False
        elif key == "\x7f":
            self.text = self.text[:-1]
        elif key.isprintable():
            self.text += key

    def of(self, standings: list[Standing]) -> list[Standing]:
        """Return the rows that the user wants to see, sorted."""
        return sorted(filter(self._wanted, standings), key=SORTS[self.sort])

    def _wanted(self, s: Standing) -> bool:
        words = (s.worker, s.model, s.verdict, s.host, s.language, s.way, s.error)
        return self.text.lower() in " ".join(words).lower()


def top(
    screen: Screen,
    address: str,
    choice: Choice,
    *,
    once: bool,
    timeout: float,
    keys: Path | None = None,
) -> int:
    """Show the workers, once or until the user quits; return the exit code."""
    with observer_of(address, keys) as observer:
        reached = observer.look(timeout)
        if not reached:
            screen.warn(unread(observer, address, timeout))
        if not (once or screen.as_json or sys.stdout.isatty()):
            screen.warn("no terminal to draw on: shown once; --json shows it again and again")
            once = True
        if once:
            _show_once(screen, observer, choice)
            return DONE if reached else NOT_ACHIEVED
        if screen.as_json:
            _stream(screen, observer, choice)
        with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
            while not choice.over:
                rows = max(1, live.console.height - OTHER_LINES)
                live.update(_picture(observer, address, choice, rows), refresh=True)
                for key in pressed(POLL_SECONDS):
                    choice.press(key)
                observer.look(POLL_SECONDS)
    return DONE


def _show_once(screen: Screen, observer: Observer, choice: Choice) -> None:
    now = time.monotonic()
    every = observer.view.standings(now)
    standings, found = choice.of(every), troubles(observer.view, every, now)
    for trouble in found:
        screen.say(trouble.text, TROUBLE_STYLES.get(trouble.state, ""))
    screen.say(_summary(observer, every), DIM if found else GOOD)
    show(screen, standings)
    models = show_models(screen, observer.view, now)
    rows = [fields(standing) for standing in standings]
    problems = [asdict(trouble) for trouble in found]
    screen.emit("top", epoch=observer.view.epoch, troubles=problems, models=models, workers=rows)


def _stream(screen: Screen, observer: Observer, choice: Choice) -> None:
    """Write a JSON object every second, until a signal ends the command."""
    while True:
        _show_once(screen, observer, choice)
        until = time.monotonic() + 2 * POLL_SECONDS
        while time.monotonic() < until:
            observer.look(POLL_SECONDS)
            select.select([], [], [], POLL_SECONDS)


def _summary(observer: Observer, standings: list[Standing]) -> str:
    counts = [(verdict, sum(s.verdict == verdict for s in standings)) for verdict in VERDICTS]
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts if count) or "none joined"
    silent = time.monotonic() - (observer.heard_at or 0.0)
    lost = f"; nothing has answered for {span(silent)}" if silent > 4 * POLL_SECONDS else ""
    return f"{counted(len(observer.view.workers), 'worker')}: {words}{lost}"


def _picture(observer: Observer, address: str, choice: Choice, rows: int) -> Group:
    # Return the live table, with at most `rows` rows.
    now = time.monotonic()
    every = observer.view.standings(now)
    standings, found = choice.of(every), troubles(observer.view, every, now)
    models = ", ".join(
        f"{name} {row.version}"
        + ("" if age is None else f" ({span(age)} ago)")
        + (f" {metadata_text(row.metadata)}" if row.metadata else "")
        for name, (row, age) in observer.view.models(now).items()
    )
    rows = max(1, rows - len(found))
    more = f"{len(standings) - rows} more rows" if len(standings) > rows else ""
    chosen = f"sorted by {choice.sort}" + (f", with “{choice.text}”" if choice.text else "")
    chosen += " (typing)" if choice.typing else ""
    return Group(
        Text(f"{address}  {_summary(observer, every)}", "bold"),
        *(_line(trouble) for trouble in found),
        plain(models or "nothing is published yet"),
        rows_of(standings[:rows]),
        Text(more, DIM),
        Text(f"{KEYS}   {chosen}", DIM),
    )


def _line(trouble: Trouble) -> Text:
    """Return a problem as one line, cut at the width of the terminal."""
    line = plain(trouble.text, TROUBLE_STYLES.get(trouble.state, ""))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], str]]:
    """Yield a function that waits for pressed keys and returns them, with the terminal in cbreak.

    The function's argument is the longest wait in seconds. If standard input is not a terminal, the
    function waits and returns no keys.
    """
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 64).decode(errors="ignore") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> str:
    select.select([], [], [], seconds)
    return ""
