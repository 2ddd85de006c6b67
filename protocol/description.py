"""Read and check the description of the protocol WBP/1: `read()` returns a `Protocol`.

The TOML files in this folder are the only source of the protocol's messages, limits, timers, codes,
features and tables of states. `README.md` explains how to write them. A mistake in a file raises a
`DescriptionError` with the file and the line.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

FOLDER: Final = Path(__file__).resolve().parent
PAGES: Final = (
    *("index", "worker", "publisher", "shared-memory", "keys", "patches", "extras", "observing"),
    "relays",
    *("sources", "parts"),
    *("LIMITS", "vectors"),  # docs/LIMITS.md, and the README of the vectors
)
SENDERS: Final = ("worker", "publisher", "observer", "either")
SIDES: Final = ("worker", "publisher", "both")
CHANNELS: Final = ("control", "data", "both")
PAYLOADS: Final = ((0, 0), (0, 1), (1, 1))
RESERVED: Final = ("wbp", "type")  # fields that every header has
TEXTS: Final = ("meaning", "summary", "purpose", "type", "class", "head", "answers", "effect", "by")
IDENTIFIER: Final = re.compile(r"[a-z][a-z0-9_]*")
WORD: Final = re.compile(r"[a-z][a-z0-9-]*")


class DescriptionError(Exception):
    """A mistake in the description. Its text begins with the file and the line."""


# Types of fields. A bound is a number; `*_name` is the bound's text in the description, such as
# `CHUNKS_MAX-1`.


@dataclass(frozen=True)
class Integer:
    """An integer from `least` to `most`."""

    least: int
    most: int
    least_name: str
    most_name: str


@dataclass(frozen=True)
class Boolean:
    """`true` or `false`."""


@dataclass(frozen=True)
class Name:
    """A string of 1 to 128 of the characters `A-Z a-z 0-9 . _ -`."""


@dataclass(frozen=True)
class Hex:
    """A string of `digits` characters of `0-9 a-f`; if `empty`, also the empty string."""

    digits: int
    empty: bool = False


@dataclass(frozen=True)
class Text:
    """A string of at most `most` Unicode code points."""

    most: int
    most_name: str


@dataclass(frozen=True)
class Base64:
    """At most `most` bytes, in base64 with padding."""

    most: int
    most_name: str


@dataclass(frozen=True)
class OneOf:
    """One of these strings."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Object:
    """An object of the description, with its name there and the name of its class."""

    name: str
    class_name: str


@dataclass(frozen=True)
class Nullable:
    """A value of a type, or null."""

    inner: "Type"


@dataclass(frozen=True)
class Array:
    """An array of at most `most` values of a type."""

    most: int
    most_name: str
    item: "Type"


@dataclass(frozen=True)
class Map:
    """An object of at most `most` entries, with keys and values of these types."""

    most: int
    most_name: str
    key: "Type"
    value: "Type"


Type = Integer | Boolean | Name | Hex | Text | Base64 | OneOf | Object | Nullable | Array | Map

REQUIRED: Final = object()  # the default of a field without one


@dataclass(frozen=True)
class Field:
    """A field of a message or an object.

    `page` is the page of the document with the field's row. If `programs` is true, the field is a
    text for programs, such as a path; all other texts are for people.
    """

    name: str
    type: Type
    default: Any
    meaning: str
    page: str
    programs: bool = False

    @property
    def required(self) -> bool:
        """Return whether the field has no default."""
        return self.default is REQUIRED


@dataclass(frozen=True)
class Struct:
    """A message, or an object in a message."""

    name: str
    class_name: str
    page: str
    summary: str
    fields: tuple[Field, ...]
    of_version: bool = False  # the first fields are model, epoch and version
    version_meaning: str = ""  # the meaning of these three fields


@dataclass(frozen=True)
class Message(Struct):
    """A message. `payloads` has the least and greatest number of payload frames."""

    sender: str = ""
    receiver: str = ""
    over: str = ""
    purpose: str = ""
    payloads: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Limit:
    """A limit. `written` is the text of the value in the document, such as `2^20`.

    If `sentence` is true, a sentence of the page defines the limit; otherwise a table does.
    """

    name: str
    value: int
    written: str
    page: str
    meaning: str
    sentence: bool = False


@dataclass(frozen=True)
class Timer:
    """A time in seconds."""

    name: str
    default: float
    side: str
    page: str
    meaning: str


@dataclass(frozen=True)
class Code:
    """A code of a failure or refusal. `cells` has the other cells of its row by name."""

    name: str
    cells: Mapping[str, Any]
    meaning: str


@dataclass(frozen=True)
class Feature:
    """An optional feature. `side` is the side that names it in its first message."""

    name: str
    side: str
    page: str
    meaning: str

    @property
    def constant(self) -> str:
        """Return the name of the feature's constant: `delta-1` is DELTA."""
        return self.name.partition("-")[0].upper()


@dataclass(frozen=True)
class Table:
    """A table of states, events and transitions: `arrows[state][event]` is the next state."""

    name: str
    side: str
    summary: str
    page: str
    head: str
    initial: str
    final: tuple[str, ...]
    states: Mapping[str, str]
    events: Mapping[str, str]
    arrows: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Protocol:
    """The whole description. All mappings have the order of the files."""

    messages: Mapping[str, Message]
    objects: Mapping[str, Struct]
    limits: Mapping[str, Limit]
    timers: Mapping[str, Timer]
    codes: Mapping[str, Mapping[str, Code]]  # by the message that has them, and by name
    features: Mapping[str, Feature]
    tables: Mapping[str, Table]  # by "side.name"

    def sent_by(self, side: str) -> list[Message]:
        """Return the messages that a worker, a publisher or an observer sends."""
        return [m for m in self.messages.values() if m.sender in (side, "either")]

    def objects_in(self, structs: Iterable[Struct]) -> list[Struct]:
        """Return the objects that some structs contain; inner objects come before outer ones."""
        found: dict[str, Struct] = {}
        for each in (each for struct in structs for each in struct.fields):
            for inner in (self.objects[name] for name in objects_in(each.type)):
                found |= {one.name: one for one in (*self.objects_in([inner]), inner)}
        return list(found.values())

    def start_of(self, struct: Struct) -> Struct | None:
        """Return an object whose fields are the first fields of `struct`, or None."""
        fields = [(each.name, each.type) for each in struct.fields]
        for other in self.objects.values():
            start = [(each.name, each.type) for each in other.fields]
            if len(start) < len(fields) and fields[: len(start)] == start:
                return other
        return None


def read(folder: Path = FOLDER) -> Protocol:
    """Read the description from the files of a folder.

    Raises:
        DescriptionError: The description has a mistake.
    """
    limits = _limits(Source(folder / "limits.toml"))
    features = _features(Source(folder / "features.toml"))
    messages, objects = _structs(Source(folder / "messages.toml"), limits)
    return Protocol(
        messages=messages,
        objects=objects,
        limits=limits,
        timers=_timers(Source(folder / "timers.toml")),
        codes=_codes(Source(folder / "codes.toml")),
        features=features,
        tables=_tables(Source(folder / "phases.toml")),
    )


def plain(meaning: str) -> str:
    """Return a meaning without links and emphasis, as the text of a comment."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning)
    return re.sub(r"(?<![\w`*])\*(\w[^*]*)\*", r"\1", text)


@dataclass
class Source:
    """A file of the description: its values, and the line of each value."""

    path: Path
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        try:
            self.values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"at line (\d+)", str(error))
            where = line[1] if line else text.count("\n")
            raise DescriptionError(f"{self.path.name}:{where}: {error}") from None
        self._lines = text.splitlines()

    def fail(self, text: str, *keys: str) -> DescriptionError:
        """Return an error with the line of a key or, if the key has no line, of its table."""
        return DescriptionError(f"{self.path.name}:{self._line(keys)}: {text}")

    def _line(self, keys: tuple[str, ...]) -> int:
        for depth in range(len(keys), -1, -1):  # the deepest table with a header of its own
            name = re.escape(".".join(keys[:depth]))
            headers = (n for n, line in enumerate(self._lines) if re.match(rf"\[{name}[].]", line))
            start = next(headers, None) if depth else 0
            if start is None:
                continue
            for number in range(start, len(self._lines)):
                line = self._lines[number]
                if depth and number > start and line.startswith("["):
                    break
                if depth < len(keys) and re.match(rf'"?{re.escape(keys[depth])}"?\s*=', line):
                    return number + 1
            return start + 1
        return 1

    def check_keys(self, table: Mapping[str, Any], allowed: str, *keys: str) -> None:
        """Check the keys of a table: `allowed` lists them, with a `?` after optional keys."""
        if not isinstance(cast("object", table), Mapping):
            raise self.fail(f"{'.'.join(keys)} is not a table", *keys)
        known = {word.rstrip("?") for word in allowed.split()}
        for key in table:
            if key not in known:
                raise self.fail(f"unknown key {key!r}; known are {', '.join(sorted(known))}", *keys)
            if key in TEXTS and not isinstance(table[key], str):
                raise self.fail(f"{key!r} is {table[key]!r}, which is not a text", *keys, key)
        for word in allowed.split():
            if not word.endswith("?") and word not in table:
                raise self.fail(f"{'.'.join(keys)} has no {word!r}", *keys)

    def one_of(self, value: object, allowed: tuple[Any, ...], what: str, *keys: str) -> Any:
        """Return a value, which must be one of the allowed values."""
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise self.fail(f"{what} {value!r} is not one of {names}", *keys)
        return value

    def check_name(self, value: str, pattern: re.Pattern[str], what: str, *keys: str) -> None:
        """Check that a name matches the pattern of names of its kind."""
        if not pattern.fullmatch(value):
            raise self.fail(f"the {what} {value!r} does not match {pattern.pattern}", *keys)

    def page(self, value: object, *keys: str) -> str:
        """Return the name of a page, which must be one of `PAGES`."""
        page: str = self.one_of(value, PAGES, "page", *keys)
        return page


# Limits, timers, codes, features.

_POWER = re.compile(r"2\^(\d+)(-1)?")


def parse_number(written: str) -> int:
    """Return the number of a text such as `64`, `2^20` or `2^53-1`."""
    if match := _POWER.fullmatch(written):
        return (1 << int(match[1])) - (1 if match[2] else 0)
    if not written.isdecimal():
        raise ValueError(f"{written!r} is not a number; write 64, 2^20 or 2^53-1")
    return int(written)


def _limits(source: Source) -> dict[str, Limit]:
    found: dict[str, Limit] = {}
    for name, table in source.values.items():
        source.check_keys(table, "value page meaning sentence?", name)
        source.check_name(name, re.compile(r"[A-Z][A-Z_]*"), "limit", name)
        written = str(table["value"])
        try:
            value = parse_number(written)
        except ValueError as error:
            raise source.fail(f"{name}: {error}", name) from None
        page = source.page(table["page"], name)
        sentence = table.get("sentence", False)
        found[name] = Limit(name, value, written, page, table["meaning"], sentence)
    return found


def _timers(source: Source) -> dict[str, Timer]:
    found: dict[str, Timer] = {}
    for name, table in source.values.items():
        source.check_keys(table, "default side page meaning", name)
        if not isinstance(table["default"], int | float) or table["default"] <= 0:
            raise source.fail(f"{name} is {table['default']!r}; a time must be above zero", name)
        side = source.one_of(table["side"], SIDES, "side", name)
        page = source.page(table["page"], name)
        found[name] = Timer(name, table["default"], side, page, table["meaning"])
    return found


def _codes(source: Source) -> dict[str, dict[str, Code]]:
    cells = {"refuse": "answers effect", "failed": "again", "verified": "by"}
    found: dict[str, dict[str, Code]] = {}
    for message, codes in source.values.items():
        source.one_of(message, tuple(cells), "the message of the codes,", message)
        found[message] = {}
        for name, table in codes.items():
            source.check_keys(table, f"{cells[message]} meaning?", message, name)
            if name != "any other":
                source.check_name(name, WORD, "code", message, name)
            others = {key: value for key, value in table.items() if key != "meaning"}
            found[message][name] = Code(name, others, table.get("meaning", ""))
    return found


def _features(source: Source) -> dict[str, Feature]:
    found: dict[str, Feature] = {}
    for name, table in source.values.items():
        source.check_keys(table, "side page meaning", name)
        source.check_name(name, WORD, "feature", name)
        side = source.one_of(table["side"], SIDES, "side", name)
        found[name] = Feature(name, side, source.page(table["page"], name), table["meaning"])
    return found


# Messages and objects.


def _structs(
    source: Source, limits: Mapping[str, Limit]
) -> tuple[dict[str, Message], dict[str, Struct]]:
    source.check_keys(source.values, "message object")
    classes: dict[str, str] = {}
    for name, table in source.values["object"].items():
        if name in source.values["message"]:
            raise source.fail(f"{name} is a message and an object", "object", name)
        source.check_name(name, IDENTIFIER, "object", "object", name)
        source.check_keys(table, "page class? summary fields", "object", name)
        classes[name] = _class_name(name, table)
    messages: dict[str, Message] = {}
    objects: dict[str, Struct] = {}
    for name, table in source.values["message"].items():
        at = ("message", name)
        source.check_keys(
            table,
            "page class? from to over? purpose payloads? summary of_version? fields?",
            *at,
        )
        source.check_name(name, IDENTIFIER, "message", *at)
        payloads = table.get("payloads", [0, 0])
        source.one_of(payloads, tuple(map(list, PAYLOADS)), "payloads", *at, "payloads")
        messages[name] = Message(
            **_struct(source, at, table, classes, limits),
            sender=source.one_of(table["from"], SENDERS, "sender", *at, "from"),
            receiver=source.one_of(table["to"], SENDERS, "receiver", *at, "to"),
            over=source.one_of(table.get("over", ""), ("", *CHANNELS), "channel", *at, "over"),
            purpose=table["purpose"],
            payloads=(payloads[0], payloads[1]),
        )
    for name, table in source.values["object"].items():
        objects[name] = Struct(**_struct(source, ("object", name), table, classes, limits))
    _check_classes(source, [*messages.values(), *objects.values()])
    _check_spelling(source, [*messages.values(), *objects.values()])
    _check_use(source, messages, objects)
    return messages, objects


def _struct(
    source: Source,
    at: tuple[str, str],
    table: Mapping[str, Any],
    classes: Mapping[str, str],
    limits: Mapping[str, Limit],
) -> dict[str, Any]:
    """Return the arguments of `Struct`, which `Message` has, too."""
    page = source.page(table["page"], *at, "page")
    fields: list[Field] = []
    if table.get("of_version"):
        for name, written in VERSION_FIELDS.items():
            fields.append(Field(name, type_of(written, classes, limits), REQUIRED, "", page))
    for name, row in table.get("fields", {}).items():
        keys = (*at, "fields", name)
        source.check_keys(row, "type meaning default? page? programs?", *keys)
        source.check_name(name, IDENTIFIER, "field", *keys)
        if at[0] == "message" and name in RESERVED:
            raise source.fail(f"every message has {name!r} already", *keys)
        if any(each.name == name for each in fields):
            raise source.fail(f"{name!r} is a field of each version already", *keys)
        try:
            kind = type_of(row["type"], classes, limits)
            default = _default(kind, row)
        except ValueError as error:
            raise source.fail(f"{at[1]}.{name}: {error}", *keys) from None
        fields.append(
            Field(
                name,
                kind,
                default,
                row["meaning"],
                source.page(row.get("page", page), *keys),
                row.get("programs", False),
            )
        )
    of_version = table.get("of_version", False)
    return {
        "name": at[1],
        "class_name": _class_name(at[1], table),
        "page": page,
        "summary": table["summary"],
        "fields": tuple(fields),
        "of_version": bool(of_version),
        "version_meaning": of_version if isinstance(of_version, str) else "",
    }


def _class_name(name: str, table: Mapping[str, Any]) -> str:
    written: str = table.get("class", name.title().replace("_", ""))
    return written


VERSION_FIELDS: Final = {"model": "name", "epoch": "integer", "version": "1 to INTEGER_MAX"}


def _default(kind: Type, row: Mapping[str, Any]) -> Any:
    if isinstance(kind, Nullable):
        if "default" in row:
            raise ValueError("the default of a value that may be null is null; leave it out")
        return None
    if "default" not in row:
        return REQUIRED
    default = row["default"]
    if not fits(kind, default):
        raise ValueError(f"the default {default!r} is not of the type {row['type']!r}")
    return default


def fits(kind: Type, value: object) -> bool:
    """Return whether a default is of a type; arrays and objects can only be empty by default."""
    match kind:
        case Integer():
            number = isinstance(value, int) and not isinstance(value, bool)
            return number and kind.least <= value <= kind.most  # type: ignore[operator]
        case Boolean():
            return isinstance(value, bool)
        case Text():
            return isinstance(value, str) and len(value) <= kind.most
        case OneOf():
            return value in kind.words
        case Hex():
            return kind.empty and value == ""
        case Array():
            return value == []
        case Map():
            return value == {}
        case _:
            return False


def type_of(written: str, classes: Mapping[str, str], limits: Mapping[str, Limit]) -> Type:
    """Return the type of a text such as `name`; `classes` has the class of each object.

    Raises:
        ValueError: The text is not a type, or a bound is unknown, or the bounds are reversed.
    """

    def inner(text: str) -> Type:
        return type_of(text, classes, limits)

    def bound(text: str) -> int:
        name = re.fullmatch(r"([A-Z_]+)([+-]\d+)?", text)
        if name is None:
            return parse_number(text)
        if name[1] not in limits:
            raise ValueError(f"no limit has the name {name[1]}")
        return limits[name[1]].value + int(name[2] or 0)

    if match := re.fullmatch(r"array, at most (\S+): (.+)", written):
        return Array(bound(match[1]), match[1], inner(match[2]))
    if match := re.fullmatch(r"object, at most (\S+): (.+?) -> (.+)", written):
        if not isinstance(key := inner(match[2]), Name | Text | Hex | OneOf):
            raise ValueError(f"a key of an object is a string, but {match[2]!r} is not")
        return Map(bound(match[1]), match[1], key, inner(match[3]))
    if written.endswith(" or null"):
        if isinstance(kind := inner(written.removesuffix(" or null")), Nullable):
            raise ValueError(f"{written!r} has null twice")
        return Nullable(kind)
    if written == "integer":
        return inner("0 to INTEGER_MAX")
    if written == "text":
        return inner("at most TEXT_MAX characters")
    if written == "boolean":
        return Boolean()
    if written == "name":
        return Name()
    if match := re.fullmatch(r"(\d+) hex digits( or empty)?", written):
        return Hex(int(match[1]), bool(match[2]))
    if match := re.fullmatch(r"at most (\S+) characters", written):
        return Text(bound(match[1]), match[1])
    if match := re.fullmatch(r"base64 of at most (\S+) bytes", written):
        return Base64(bound(match[1]), match[1])
    if written.startswith("one of "):
        words = [word.strip().strip('"') for word in written.removeprefix("one of ").split(",")]
        if len(set(words)) < max(len(words), 2):
            raise ValueError(f"{written!r} needs at least two different words")
        return OneOf(tuple(words))
    if match := re.fullmatch(r"(\d\S*|[A-Z]\S*) to (\d\S*|[A-Z]\S*)", written):
        least, most = bound(match[1]), bound(match[2])
        if least > most:
            raise ValueError(f"the bounds {written!r} are reversed: {least:,} is above {most:,}")
        return Integer(least, most, match[1], match[2])
    if written in classes:
        return Object(written, classes[written])
    raise ValueError(f"unknown type {written!r}; README.md lists the types")


def _check_classes(source: Source, structs: list[Struct]) -> None:
    first: dict[str, str] = {}
    for struct in structs:
        if first.setdefault(struct.class_name, struct.name) != struct.name:
            kind = "message" if isinstance(struct, Message) else "object"
            both = f"{struct.name} and {first[struct.class_name]}"
            raise source.fail(f"{both} have the class {struct.class_name}", kind, struct.name)


def _check_spelling(source: Source, structs: list[Struct]) -> None:
    """Reject fields whose names differ only in underscores: one of the names is misspelt."""
    first: dict[str, tuple[str, str]] = {}
    for struct in structs:
        for each in struct.fields:
            letters = each.name.replace("_", "")
            name, where = first.setdefault(letters, (each.name, struct.name))
            if name != each.name:
                kind = "message" if isinstance(struct, Message) else "object"
                raise source.fail(
                    f"{struct.name} has a field {each.name!r}, but {where} has {name!r}: use one "
                    "name for one thing",
                    *(kind, struct.name, "fields", each.name),
                )


def types_in(kind: Type) -> Iterator[Type]:
    """Yield a type and all types that it contains."""
    yield kind
    for part in vars(kind).values():
        if isinstance(part, Type):
            yield from types_in(part)


def objects_in(kind: Type) -> Iterator[str]:
    """Yield the names of the objects that a type contains."""
    return (each.name for each in types_in(kind) if isinstance(each, Object))


def spelled(
    kind: Type,
    forms: Mapping[type, str],
    part: Callable[[Type], str],
    bound: Callable[[str], str] = str,
) -> str:
    """Return the text of a type in a programming language.

    `forms` has a format string for each kind of type; `part` returns the text of an inner type.
    """
    texts: dict[str, object] = {}
    for name, value in vars(kind).items():
        if name in ("least_name", "most_name"):
            texts[name.removesuffix("_name")] = bound(value)
        elif isinstance(value, Type):
            texts[name] = part(value)
        elif name == "words":
            texts[name] = ", ".join(f'"{word}"' for word in value)
        else:
            texts.setdefault(name, value)
    return forms[type(kind)].format(**texts)


def _check_use(
    source: Source, messages: Mapping[str, Message], objects: Mapping[str, Struct]
) -> None:
    structs = (*messages.values(), *objects.values())
    used = {name for struct in structs for each in struct.fields for name in objects_in(each.type)}
    for name in objects:
        if name not in used:
            raise source.fail(f"no message has the object {name!r}", "object", name)
    for name in objects:
        _check_nesting(source, objects, name, ())


def _check_nesting(
    source: Source, objects: Mapping[str, Struct], name: str, above: tuple[str, ...]
) -> None:
    for each in objects[name].fields:
        for inner in objects_in(each.type):
            if inner in (*above, name):
                at = ("object", name, "fields", each.name)
                raise source.fail(f"the object {inner!r} contains itself", *at)
            _check_nesting(source, objects, inner, (*above, name))


# Tables of states.


def _tables(source: Source) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for side, tables in source.values.items():
        source.one_of(side, ("worker", "publisher"), "side", side)
        for name, table in tables.items():
            at = (side, name)
            source.check_keys(table, "summary page head initial final states events arrows", *at)
            source.page(table["page"], *at, "page")
            states, events, arrows = table["states"], table["events"], table["arrows"]
            final = tuple(table["final"])
            for state in states:
                source.check_name(state, WORD, "state", *at, "states", state)
            for event in events:
                source.check_name(event, WORD, "event", *at, "events", event)
            named = {"initial": [table["initial"]], "final": final, "arrows": arrows}
            for key, each in named.items():
                for state in each:
                    if state not in states:
                        where = (*at, key, state) if key == "arrows" else (*at, key)
                        raise source.fail(f"{name}: there is no state {state!r}", *where)
            for state, after in arrows.items():
                for event, target in after.items():
                    if event not in events:
                        text = f"{name}: there is no event {event!r}"
                        raise source.fail(text, *at, "arrows", state)
                    if target not in states:
                        text = f"{name}: {event!r} leads to {target!r}, which is not a state"
                        raise source.fail(text, *at, "arrows", state)
            for state in states:
                if not arrows.get(state) and state not in final:
                    raise source.fail(
                        f"{name}: no event leaves {state!r}; if that is meant, add it to `final`",
                        *(*at, "states", state),
                    )
                if arrows.get(state) and state in final:
                    text = f"{name}: {state!r} is final, but an event leaves it"
                    raise source.fail(text, *at, "arrows", state)
            for event in events:
                if not any(event in after for after in arrows.values()):
                    text = f"{name}: no state has a transition by {event!r}"
                    raise source.fail(text, *at, "events", event)
            reached = _reached(table["initial"], arrows)
            for state in states:
                if state not in reached:
                    text = f"{name}: no transitions lead from {table['initial']!r} to {state!r}"
                    raise source.fail(text, *at, "states", state)
            found[f"{side}.{name}"] = Table(
                name=name,
                side=side,
                summary=table["summary"],
                page=table["page"],
                head=table["head"],
                initial=table["initial"],
                final=final,
                states=states,
                events=events,
                arrows={state: arrows.get(state, {}) for state in states},
            )
    return found


def _reached(initial: str, arrows: Mapping[str, Mapping[str, str]]) -> set[str]:
    reached, pending = {initial}, [initial]
    while pending:
        for target in arrows.get(pending.pop(), {}).values():
            if target not in reached:
                reached.add(target)
                pending.append(target)
    return reached
