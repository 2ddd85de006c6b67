"""What a command shows: words, tables and bars for people, or lines of JSON for programs.

People read standard output; bars and errors go to standard error, so that a pipe gets neither. With
`--json` standard output carries JSON only, one object a line, the last of them the result, and the
words go to standard error. Every object has a `kind`.
"""

import contextlib
import json
import sys
from collections.abc import Generator, Mapping

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ...codecs.words import printable

GOOD, BAD, DIM = "green", "red", "bright_black"
PIPE_COLUMNS = 240
SAID_SHOWN = 40  # characters of each text of metadata: a commit has so many

STATE_STYLES = {
    "applied": GOOD,
    "skipped": GOOD,
    "staged": "yellow",
    "behind": "yellow",
    "failed": BAD,
    "lost": BAD,
    "left": DIM,
}


class Screen:
    """Where a command's output goes.

    Args:
        as_json: Whether standard output is for a program.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._errors = Console(stderr=True, highlight=False)
        out = Console(highlight=False)
        if not out.is_terminal:  # nothing is cut off in a file or a pipe
            out = Console(highlight=False, width=PIPE_COLUMNS)
        self._people = self._errors if as_json else out

    def say(self, text: str, style: str = "") -> None:
        """Show a line of words."""
        self._people.print(Text(visible(text), style=style), soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """Show something larger, to people only."""
        if not self.as_json:
            self._people.print(what)

    def warn(self, text: str) -> None:
        """Show what is odd but does not end the command."""
        self._errors.print(f"[yellow]warning:[/] {escape(visible(text))}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show what happens meanwhile, beside bars and whatever waits."""
        self._errors.print(Text(visible(text), style=DIM), soft_wrap=True)

    def error(self, text: str) -> None:
        """Show what went wrong."""
        self._errors.print(f"[bold red]error:[/] {escape(visible(text))}", soft_wrap=True)

    def emit(self, kind: str, **fields: object) -> None:
        """Write an object, to programs only."""
        if self.as_json:
            sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
            sys.stdout.flush()

    @contextlib.contextmanager
    def waiting(self, text: str) -> Generator["Waiting"]:
        """Show that something is awaited, for as long as the block runs."""
        with Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}"),
            console=self._errors,
            transient=True,
            disable=not self._errors.is_terminal,  # a log wants no animation
        ) as progress:
            yield Waiting(progress, text)

    @contextlib.contextmanager
    def bars(self) -> Generator["Bars"]:
        """Show bars with rate and time left, for as long as the block runs."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", style=DIM),
            console=self._errors,
            transient=True,
            disable=not self._errors.is_terminal,  # a log wants no animation
        ) as progress:
            yield Bars(progress)


class Waiting:
    """A spinner with words."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress = progress
        self._task = progress.add_task(escape(printable(text)), total=None)

    def say(self, text: str) -> None:
        """Show other words."""
        self._progress.update(self._task, description=escape(printable(text)))


class Bars:
    """Bars of bytes, each under a name."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def move(self, name: str, done: int, total: int, note: str = "") -> None:
        """Set a bar to so many bytes of a total."""
        self._progress.update(self._task(name, total), completed=done, note=escape(printable(note)))

    def advance(self, name: str, by: int, total: int) -> None:
        """Move a bar on by so many bytes."""
        self._progress.update(self._task(name, total), advance=by)

    def _task(self, name: str, total: int) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                escape(printable(name)), total=total, note=""
            )
        return self._tasks[name]


def visible(text: str) -> str:
    """Return a text, of which others may have supplied a part, without what moves a cursor."""
    return "\n".join(printable(line) for line in text.split("\n"))


def plain(text: str, style: str = "") -> Text:
    """Return one line of somebody else's words, none of which is markup."""
    return Text(printable(text), style)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table in the house's style; columns named in `right` hold numbers."""
    made = Table(box=None, padding=(0, 3, 0, 0), header_style=DIM, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def counted(number: int, noun: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Return bytes as people read them."""
    return decimal(nbytes)


def said_of(metadata: Mapping[str, str]) -> str:
    """Return what is said of a version in one line: of a long text, its beginning."""
    return " ".join(
        f"{printable(name)}={printable(text, SAID_SHOWN)}" for name, text in metadata.items()
    )
