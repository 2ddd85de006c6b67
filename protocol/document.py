"""Generate the tables on the pages of the protocol's document from the description.

A table is found by its head and its section. Its rows keep the order of the page, and a new row is
put after the row that precedes it in the description. Errors are: a row that only the page has; a
new row without a table; and a number in a sentence that differs from its limit.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import description as d

Row = tuple[str, ...]

PATHS: Final = {page: f"docs/protocol/{page}.md" for page in d.PAGES} | {
    "LIMITS": "docs/LIMITS.md",
    "vectors": "tests/vectors/README.md",
}
FIELDS: Final = ("field", "type", "default", "meaning")
ADDED: Final = ("message", *FIELDS)
OVERVIEWS: Final = (
    ("message", "from", "to", "purpose"),
    ("message", "from", "to", "over", "purpose"),
)
ARROWS: Final = ("next", "events")  # the head of a table of transitions, after the state
LIMITS: Final = ("limit", "value", "meaning")
TIMES: Final = ("time", "default", "side", "meaning")
CODES: Final = {  # the page and the head of each table of codes
    "refuse": ("index", ("code", "in answer to", "meaning", "effect")),
    "failed": ("index", ("code", "tried again", "meaning")),
    "verified": ("observing", ("code", "sent by", "meaning")),
}
ANY: Final = "*"  # stands for any text in a cell of a head
IN_SENTENCE: Final = re.compile(r"([\d,]+)(?: s)? \(`([A-Z_]+)`\)")


@dataclass(frozen=True)
class Found:
    """A table on a page: its section, head and rows, and the index of the line of its first row."""

    section: str
    head: Row
    rows: list[Row]
    line: int


@dataclass(frozen=True)
class Made:
    """The rows that the tables with a head must show, in one section or on the whole page.

    `keys` is the number of cells that identify a row. A `partial` table may have other rows, too.
    """

    head: Row
    rows: list[Row]
    section: str = ""
    keys: int = 1
    partial: bool = False

    def matches(self, table: Found) -> bool:
        """Return whether a table on the page is one of these tables."""
        if self.section not in ("", table.section) or len(self.head) != len(table.head):
            return False
        return all(a in (ANY, b) for a, b in zip(self.head, table.head, strict=True))


def files(protocol: d.Protocol, root: Path = d.FOLDER.parent) -> dict[str, str]:
    """Return the text of each page, by its path in the repository."""
    found: dict[str, str] = {}
    for page, path in PATHS.items():
        text = (root / path).read_text(encoding="utf-8")
        _check_sentences(protocol, page, text)
        found[path] = _replaced(path, text, list(_tables_of(protocol, page, text)))
    return found


# The rows of the description.


def _tables_of(protocol: d.Protocol, page: str, text: str) -> Iterator[Made]:
    messages = list(protocol.messages.values())
    for struct in (*messages, *protocol.objects.values()):
        if struct.page == page:
            kind = "" if isinstance(struct, d.Message) else "The object "
            rows = list(_field_rows(protocol, struct))
            if rows:
                yield Made(FIELDS, rows, f"{kind}`{struct.name}`")
    here = [message for message in messages if message.page == page]
    if any(message.over for message in here):
        yield Made(OVERVIEWS[1], [_overview(m, m.over) for m in here if m.over])
    if any(not message.over for message in here):
        yield Made(OVERVIEWS[0], [_overview(m) for m in here if not m.over])
    added = [
        (f"`{message.name}`", *_cells(protocol, each))
        for message in messages
        for each in message.fields
        if each.page == page != message.page
    ]
    if added:
        yield Made(ADDED, added, keys=2)
    limits = [each for each in protocol.limits.values() if each.page == page and not each.sentence]
    if limits:
        rows = [(f"`{each.name}`", each.written, each.meaning) for each in limits]
        yield Made(LIMITS, rows, partial=page == "LIMITS")
    timers = [each for each in protocol.timers.values() if each.page == page]
    if timers:
        yield Made(TIMES, [(f"`{t.name}`", f"{t.default:g}", t.side, t.meaning) for t in timers])
    for message, (where, head) in CODES.items():
        if where == page:
            yield Made(head, list(_code_rows(protocol, message)))
    yield from _phases_of([t for t in protocol.tables.values() if t.page == page], text)


def _field_rows(protocol: d.Protocol, struct: d.Struct) -> Iterator[Row]:
    if struct.of_version:
        names = ", ".join(f"`{name}`" for name in d.VERSION_FIELDS)
        yield names, "", "", struct.version_meaning
    for each in struct.fields[len(d.VERSION_FIELDS) if struct.of_version else 0 :]:
        if each.page == struct.page:
            yield _cells(protocol, each)


def _cells(protocol: d.Protocol, each: d.Field) -> Row:
    default = "" if each.default is d.REQUIRED else f"`{json.dumps(each.default)}`"
    return f"`{each.name}`", _shown(each.type, protocol.limits), default, each.meaning


SHOWN: Final = {
    d.Integer: "{least} to {most}",
    d.Boolean: "boolean",
    d.Name: "name",
    d.Text: "at most {most} characters",
    d.Base64: "base64 of at most {most} bytes",
    d.Object: "{name}",
    d.Nullable: "{inner} or null",
    d.Array: "array, at most {most}: {item}",
    d.Map: "object, at most {most}: {key} → {value}",
}


def _shown(kind: d.Type, limits: Mapping[str, d.Limit]) -> str:
    """Return the text of a type in the document, which has numbers instead of limits."""

    def number(bound: str) -> str:
        name = re.fullmatch(r"([A-Z_]+)([+-]\d+)?", bound)
        if name is None:
            return bound
        limit = limits[name[1]]
        if name[2] == "-1" and limit.written.startswith("2^"):
            return f"{limit.written}-1"
        return str(limit.value + int(name[2])) if name[2] else limit.written

    match kind:
        case d.Integer(least_name="0", most_name="INTEGER_MAX"):
            return "integer"
        case d.Text(most_name="TEXT_MAX"):
            return "text"
        case d.Hex():
            return f"{kind.digits} hex digits{' or empty' if kind.empty else ''}"
        case d.OneOf():
            return ", ".join(f"`{word}`" for word in kind.words)
        case _:
            return d.spelled(kind, SHOWN, lambda inner: _shown(inner, limits), number)


def _overview(message: d.Message, *over: str) -> Row:
    link = f"[`{message.name}`](#{message.name})"
    return link, message.sender, message.receiver, *over, message.purpose


def _code_rows(protocol: d.Protocol, message: str) -> Iterator[Row]:
    for code in protocol.codes[message].values():
        name = code.name if " " in code.name else f"`{code.name}`"
        match message:
            case "refuse":
                yield name, code.cells["answers"], code.meaning, code.cells["effect"]
            case "failed":
                yield name, "yes" if code.cells["again"] else "no", code.meaning
            case _:
                yield name, code.cells["by"], code.meaning


def _phases_of(tables: list[d.Table], text: str) -> Iterator[Made]:
    """Yield tables of states, events and transitions.

    A page explains states and events in a table, or in sentences, where each is in italics.
    """
    found = list(_found(text))
    events: dict[str, str] = {}
    for table in tables:
        arrows: list[Row] = [
            (state, after, ", ".join(e for e, then in row.items() if then == after))
            for state, row in table.arrows.items()
            for after in dict.fromkeys(row.values())
        ]
        yield Made((table.head, *ARROWS), arrows, keys=2)
        states = Made((table.head, ANY), list(table.states.items()))
        if any(map(states.matches, found)):
            yield states
        if _explained(found) & set(table.events):
            events |= table.events
    if events:
        yield Made(("event", ANY), list(events.items()))


def _explained(tables: Iterable[Found]) -> set[str]:
    return {row[0] for table in tables if len(table.head) == 2 for row in table.rows}


# The sentences of a page.


def _check_sentences(protocol: d.Protocol, page: str, text: str) -> None:
    def fail(reason: str, at: int = 0) -> d.DescriptionError:
        return d.DescriptionError(f"{PATHS[page]}:{text.count(chr(10), 0, at) + 1}: {reason}")

    defined: set[str] = set()
    for match in IN_SENTENCE.finditer(text):
        limit = protocol.limits.get(match[2])
        if limit is None or limit.page != page or not limit.sentence or limit.name in defined:
            raise fail(f"limits.toml has no {match[2]} for a sentence here", match.start())
        if int(match[1].replace(",", "")) != limit.value:
            raise fail(f"{limit.name} is {match[1]}; limits.toml: {limit.value}", match.start())
        defined.add(limit.name)
    for limit in protocol.limits.values():
        if limit.page == page and limit.sentence and limit.name not in defined:
            raise fail(f"no sentence defines `{limit.name}`")
    for feature in protocol.features.values():
        if feature.page == page and not re.search(rf"`{feature.name}[.`]", text):
            raise fail(f"the page does not mention the feature `{feature.name}`")
    emphasised = {word.lower() for word in re.findall(r"\*([A-Za-z-]+)\*", text)}
    explained = emphasised | _explained(_found(text))
    for table in protocol.tables.values():
        for word in (*table.states, *table.events):
            if table.page == page and word not in explained:
                raise fail(f"no table explains {word!r} of {table.name}, and it is not in italics")


# The tables on a page.


def _cells_of(line: str) -> Row:
    return tuple(cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|"))


def _line_of(row: Row) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in row)


def _found(text: str) -> Iterator[Found]:
    section = ""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("#"):
            section = line.lstrip("#").strip()
        if line.startswith("|") and not lines[number - 1].startswith("|"):
            end = number + 2
            while "".join(lines[end : end + 1]).startswith("|"):
                end += 1
            rows = [_cells_of(each) for each in lines[number + 2 : end]]
            yield Found(section, _cells_of(line), rows, number + 2)


def _replaced(path: str, text: str, made: list[Made]) -> str:
    found = list(_found(text))
    changed: dict[int, list[Row]] = {}  # by the line of the table
    for each in made:
        tables = [table for table in found if each.matches(table)]
        for table, rows in zip(tables, _filled(path, each, tables), strict=True):
            changed[table.line] = rows
    heads = {FIELDS, ADDED, *OVERVIEWS, LIMITS, TIMES, *(head for _, head in CODES.values())}
    for table in found:
        described = table.head in heads or table.head[1:] == ARROWS
        if described and table.line not in changed:
            raise d.DescriptionError(
                f"{path}:{table.line - 1}: the description has no such table for this section"
            )
    lines = text.split("\n")
    for table in reversed(found):
        if table.line in changed:
            rows = changed[table.line]
            lines[table.line : table.line + len(table.rows)] = map(_line_of, rows)
    return "\n".join(lines)


def _filled(path: str, made: Made, tables: list[Found]) -> list[list[Row]]:
    """Return the new rows of each table, in the order of the page."""
    wanted = {row[: made.keys]: row for row in made.rows}
    filled: list[list[Row]] = []
    for table in tables:
        rows: list[Row] = []
        for number, row in enumerate(table.rows):
            key = row[: made.keys]
            if key not in wanted and not made.partial:
                name = " ".join(key)
                where = f"{path}:{table.line + number + 1}"
                raise d.DescriptionError(f"{where}: the description has no row {name}; delete it")
            rows.append(wanted.get(key, row))
        filled.append(rows)
    shown = [row[: made.keys] for rows in filled for row in rows]
    for key in shown:
        if shown.count(key) > 1:
            raise d.DescriptionError(f"{path}: {' '.join(key)} has two rows")
    before: Row = ()
    for key, row in wanted.items():
        if key not in shown:
            place = next((r for r in filled for each in r if each[: made.keys] == before), None)
            if place is None and (not tables or made.partial):
                head = " | ".join(made.head)
                where = f"section {made.section!r}: " if made.section else ""
                raise d.DescriptionError(
                    f"{path}: {where}no table | {head} | shows {' '.join(key)}; add the table"
                )
            place = filled[0] if place is None else place
            index = [each[: made.keys] for each in place].index(before) + 1 if before else 0
            place.insert(index, row)
        before = key
    return filled
