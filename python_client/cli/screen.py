"""Writes the output of a command: text, tables and progress bars, or lines of JSON for programs.

Text goes to standard output. Progress bars and errors go to standard error, so that they do not go
into a pipe. With `--json`, standard output has only JSON, one object per line, and text goes to
standard error. Every object has a `kind`; the last object is the result.
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
PIPE_COLUMNS = 240  # width of tables in a file or a pipe
METADATA_SHOWN = 40  # characters shown of each metadata text: the length of a commit hash

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
    """Writes the output of a command.

    Args:
        as_json: Whether standard output is JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._errors = Console(stderr=True, highlight=False)
        out = Console(highlight=False)
        if not out.is_terminal:  # do not cut lines in a file or a pipe
            out = Console(highlight=False, width=PIPE_COLUMNS)
        self._text = self._errors if as_json else out

    def say(self, text: str, style: str = "") -> None:
        """Show a line of text."""
        self._text.print(Text(visible(text), style=style), soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """Show a table or another renderable; do nothing with `--json`."""
        if not self.as_json:
            self._text.print(what)

    def warn(self, text: str) -> None:
        """Show a warning, on standard error."""
        self._errors.print(f"[yellow]warning:[/] {escape(visible(text))}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show an event on standard error, above any progress bar or spinner."""
        self._errors.print(Text(visible(text), style=DIM), soft_wrap=True)

    def error(self, text: str) -> None:
        """Show an error, on standard error."""
        self._errors.print(f"[bold red]error:[/] {escape(visible(text))}", soft_wrap=True)

    def emit(self, kind: str, **fields: object) -> None:
        """Write a JSON object; do nothing without `--json`."""
        if self.as_json:
            sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
            sys.stdout.flush()

    @contextlib.contextmanager
    def waiting(self, text: str) -> Generator["Waiting"]:
        """Show a spinner with a text during the block."""
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
        """Show progress bars, with rate and remaining time, during the block."""
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
    """A spinner with a text."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress = progress
        self._task = progress.add_task(escape(printable(text)), total=None)

    def say(self, text: str) -> None:
        """Change the text."""
        self._progress.update(self._task, description=escape(printable(text)))


class Bars:
    """Progress bars that count bytes, each with a name."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def move(self, name: str, done: int, total: int, note: str = "") -> None:
        """Set a bar to `done` of `total` bytes."""
        self._progress.update(self._task(name, total), completed=done, note=escape(printable(note)))

    def advance(self, name: str, by: int, total: int) -> None:
        """Advance a bar by `by` bytes."""
        self._progress.update(self._task(name, total), advance=by)

    def _task(self, name: str, total: int) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                escape(printable(name)), total=total, note=""
            )
        return self._tasks[name]


def visible(text: str) -> str:
    """Return a text with control characters escaped, since peers may have sent parts of it."""
    return "\n".join(printable(line) for line in text.split("\n"))


def plain(text: str, style: str = "") -> Text:
    """Return a peer's text as one line, with control characters escaped and without markup."""
    return Text(printable(text), style)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns in `right` are right-aligned."""
    empty = Table(box=None, padding=(0, 3, 0, 0), header_style=DIM, pad_edge=False)
    for column in columns:
        empty.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return empty


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: "1 worker", "2 workers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Return a number of bytes with a decimal unit, such as "1.5 MB"."""
    return decimal(nbytes)


def metadata_text(metadata: Mapping[str, str]) -> str:
    """Return the metadata of a version in one line, with long texts cut."""
    return " ".join(
        f"{printable(name)}={printable(text, METADATA_SHOWN)}" for name, text in metadata.items()
    )
