"""The result: what each language made of each row, for a terminal and as `docs/CONFORMANCE.md`.

There is no date, no machine and no time in it: it changes when results do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["right", "wrong", "unsupported", "not run"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one language made of one row.

    Attributes:
        verdict: `wrong` makes the whole run fail.
        text: What stands in the table, if more than a mark.
        reason: Why it is unsupported or was not run.
        faults: What is wrong.
    """

    verdict: Verdict
    text: str = ""
    reason: str = ""
    faults: tuple[str, ...] = ()


NOT_RUN = Cell("not run")
MARKS: Mapping[Verdict, str] = {
    "right": "yes",
    "wrong": "**NO**",
    "unsupported": "no",
    "not run": "not run",
}
PLAIN: Mapping[Verdict, str] = {"right": "ok", "wrong": "RED", "unsupported": "-", "not run": "."}
FAULTS_SHOWN = 5  # of one cell, on a terminal

HEAD = """\
# What every client can do

`make conformance` writes this page: each client against the
[golden vectors](../tests/vectors/README.md), and in live scenarios with the Python publisher behind
a proxy that loses, delays, doubles, damages and cuts. What must hold in each, and how a client is
added, stands in [`tests/conformance/`](../tests/conformance/README.md).
"""


CORE = """\
## Scenarios, published by the Rust core

The same, with the publisher of the [Rust client](../rust_client/README.md#publishing) in a process
of its own, which C and C++ have, too.
"""


@dataclass
class Matrix:
    """All cells, by section (`vectors`, `scenarios`), row and language.

    Attributes:
        languages: The titles, in order.
        vectors, scenarios, core: What each language made of each row; `core` of scenarios in which
            the Rust core publishes.
        titles: By scenario, what a worker does in it.
    """

    languages: Sequence[str]
    vectors: dict[str, dict[str, Cell]] = field(default_factory=dict[str, dict[str, Cell]])
    scenarios: dict[str, dict[str, Cell]] = field(default_factory=dict[str, dict[str, Cell]])
    core: dict[str, dict[str, Cell]] = field(default_factory=dict[str, dict[str, Cell]])
    titles: Mapping[str, str] = field(default_factory=dict[str, str])

    def add(self, section: str, row: str, language: str, cell: Cell) -> None:
        """Put a cell into the table."""
        sections = {"vectors": self.vectors, "scenarios": self.scenarios, "core": self.core}
        sections[section].setdefault(row, {})[language] = cell

    def cells(self) -> list[tuple[str, str, Cell]]:
        """Return all cells, each with its row and language."""
        return [
            (row, language, cell)
            for rows in (self.vectors, self.scenarios, self.core)
            for row, by_language in rows.items()
            for language, cell in by_language.items()
        ]

    @property
    def wrong(self) -> bool:
        """Whether any cell is red."""
        return any(cell.verdict == "wrong" for _, _, cell in self.cells())

    def plain(self) -> str:
        """Return the table for a terminal, and below it what is wrong, and why things are left."""

        def shown(cell: Cell) -> str:
            return f"{PLAIN[cell.verdict]} {cell.text}".strip()

        lines: list[str] = []
        for rows in (self.vectors, self.scenarios, self.core):
            width = max(map(len, rows), default=0)
            columns = [
                max([len(name), *(len(shown(r.get(name, NOT_RUN))) for r in rows.values())])
                for name in self.languages
            ]
            heading = [n.ljust(c) for n, c in zip(self.languages, columns, strict=True)]
            lines += ["  ".join(["".ljust(width), *heading]).rstrip()] if rows else []
            for row, cells in rows.items():
                texts = [shown(cells.get(name, NOT_RUN)) for name in self.languages]
                padded = [t.ljust(c) for t, c in zip(texts, columns, strict=True)]
                lines.append("  ".join([row.ljust(width), *padded]).rstrip())
            lines += [""] if rows else []
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        reasons = {(c.reason, language): None for _, language, c in self.cells() if c.reason}
        lines = [f"left out: {language}: {reason}" for reason, language in reasons]
        for row, language, cell in self.cells():
            if cell.verdict == "wrong":
                more = len(cell.faults) - FAULTS_SHOWN
                lines += [f"RED {language}, {row}: {f}" for f in cell.faults[:FAULTS_SHOWN]]
                lines += [f"RED {language}, {row}: and {more} more"] if more > 0 else []
        return lines

    def page(self) -> str:
        """Return `docs/CONFORMANCE.md`."""
        notes: list[str] = []

        def shown(cell: Cell) -> str:
            mark = cell.text or MARKS[cell.verdict]
            if cell.verdict == "wrong" and cell.text:
                mark = f"**{cell.text}**"
            if not cell.reason:
                return mark
            if cell.reason not in notes:
                notes.append(cell.reason)
            return f"{mark}<sup>{notes.index(cell.reason) + 1}</sup>"

        parts = [HEAD, "## Golden vectors\n"]
        parts.append(self._table("file", self.vectors, lambda row: f"`{row}`", shown))
        parts.append("## Scenarios\n")
        parts.append(self._table("a worker", self.scenarios, self._title, shown))
        if self.core:
            parts.append(CORE)
            parts.append(self._table("a worker", self.core, self._title, shown))
        parts += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
        return "\n".join(parts).rstrip() + "\n"

    def _title(self, scenario: str) -> str:
        return f"{self.titles.get(scenario, '')} (`{scenario}`)"

    def _table(
        self,
        corner: str,
        rows: Mapping[str, Mapping[str, Cell]],
        title: Callable[[str], str],
        shown: Callable[[Cell], str],
    ) -> str:
        lines = [f"| {corner} | {' | '.join(self.languages)} |"]
        lines.append("|---" * (1 + len(self.languages)) + "|")
        for row, cells in rows.items():
            texts = [shown(cells.get(name, NOT_RUN)) for name in self.languages]
            lines.append(f"| {title(row)} | {' | '.join(texts)} |")
        return "\n".join(lines) + "\n"
