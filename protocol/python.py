"""Generate Python's messages, limits and tables of states from the description."""

import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Final

from . import description as d

WIDTH: Final = 100
MADE: Final = "Made by `make protocol`; do not edit."
OBSERVING: Final = "observing"  # the page of messages that only some workers and publishers know

# Names of types in the module of the messages. A type may contain those above it.
ALIASES: Final = {
    "Name": "name",
    "Text": "text",
    "Label": "at most LABEL_MAX characters",
    "Error": "at most ERROR_MAX characters",
    "Hex16": "16 hex digits",
    "Hex32": "32 hex digits",
    "Hex64": "64 hex digits",
    "Digest": "64 hex digits or empty",
    "Count": "integer",
    "Positive": "1 to INTEGER_MAX",
    "Index": "0 to CHUNKS_MAX-1",
    "Crc": "0 to 2^32-1",
    "Models": "object, at most MODELS_MAX: name -> integer",
    "MetadataName": "at most METADATA_NAME_MAX characters",
    "Metadata": "object, at most METADATA_MAX: at most METADATA_NAME_MAX characters -> text",
    "Phase": 'one of "", applying, receiving, staged',
    "Transport": "one of pulled, pushed, shared",
}
# The texts for people that their messages do not sanitize, and why.
PRINTABLE_WHERE_USED: Final = {
    ("applied", "note"): "made printable where it is used, since it is mostly empty"
}

# The limits that the codecs use, which import nothing from the bus.
OF_CODECS: Final = {
    *("INTEGER_MAX", "CHUNKS_MAX", "CHUNK_BYTES_MIN", "CHUNK_BYTES_MAX", "LAYOUT_BYTES_MAX"),
    *("TENSORS_MAX", "NAME_BYTES_MAX", "RANK_MAX"),
    *("METADATA_MAX", "METADATA_NAME_MAX", "METADATA_BYTES_MAX"),
}

# For each table: the names of the types of its states and events, and of the table.
TABLES: Final = {
    "worker.version": ("Phase", "Event", "TRANSITIONS"),
    "worker.model": ("Mode", "ModeEvent", "MODES"),
    "worker.session": ("SessionPhase", "Change", "SESSIONS"),
    "worker.announced": ("Lack", "LackEvent", "LACKS"),
    "worker.arriving": ("Coming", "Way", "COMING"),
    "publisher.worker": ("WorkerPhase", "WorkerEvent", "WORKERS"),
    "publisher.target": ("State", "TargetEvent", "TARGETS"),
    "publisher.decision": ("Decision", "DecisionEvent", "DECISIONS"),
    "publisher.version": ("VersionPhase", "VersionEvent", "VERSIONS"),
}
FORMS: Final = {
    d.Integer: "Annotated[int, msgspec.Meta(ge={least}, le={most})]",
    d.Boolean: "bool",
    d.Name: "Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]",
    d.Hex: r'Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{{{digits}}}\Z")]',
    d.Text: "Annotated[str, msgspec.Meta(max_length={most})]",
    d.Base64: "Annotated[bytes, msgspec.Meta(max_length={most})]",
    d.OneOf: "Literal[{words}]",
    d.Object: "{class_name}",
    d.Nullable: "{inner} | None",
    d.Array: "Annotated[list[{item}], msgspec.Meta(max_length={most})]",
    d.Map: "Annotated[dict[{key}, {value}], msgspec.Meta(max_length={most})]",
}
ELSEWHERE: Final = {"State": "..receipt"}  # a type that users import


def files(protocol: d.Protocol) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    limits = protocol.limits.values()
    return {
        "codecs/protocol_limits.py": _limits(
            "The limits of the protocol for layouts, chunks and metadata.",
            [limit for limit in limits if limit.name in OF_CODECS],
        ),
        "bus/protocol_limits.py": _limits(
            "The limits of the protocol for messages, publishers and workers.",
            [limit for limit in limits if limit.name not in OF_CODECS],
        ),
        "bus/messages.py": _Messages(protocol).text(),
        "bus/worker/tables.py": _tables(protocol, "worker", _codes(protocol)),
        "bus/publisher/tables.py": _tables(protocol, "publisher", ""),
    }


# Text.


def _wrapped(text: str, indent: str = "", lead: str = "# ") -> str:
    """Return a text as the lines of a comment, or with another lead than `# `."""
    return textwrap.fill(text, WIDTH, initial_indent=indent + lead, subsequent_indent=indent + lead)


def _commented(line: str, comment: str) -> str:
    """Return a line with a comment: at the end of the line if it fits there, else above it."""
    whole = f"{line}  # {comment}" if comment else line
    if not comment or len(whole) <= WIDTH:
        return whole
    indent = line[: len(line) - len(line.lstrip())]
    return f"{_wrapped(comment, indent)}\n{line}"


def _docstring(text: str, indent: str = "") -> str:
    one = f'{indent}"""{text}"""'
    if len(one) <= WIDTH:
        return one
    first, _, rest = text.partition(". ")
    return f'{indent}"""{first}.\n\n{_wrapped(rest, indent, "")}\n{indent}"""'


def _fitted(start: str, rest: str) -> str:
    """Return a line of two parts; the second is in parentheses if they do not fit one line."""
    return f"{start} {rest}" if len(start) + 1 + len(rest) <= WIDTH else f"{start} ({rest})"


def _import(module: str, names: Iterable[str]) -> str:
    """Return the import of some names, or nothing if there are none."""
    found = sorted(names, key=lambda name: (not name.isupper(), name.replace("_", " ")))
    return _fitted(f"from {module} import", ", ".join(found)) + "\n" if found else ""


def _union(name: str, members: list[str]) -> str:
    return _fitted(f"{name} =", " | ".join(members))


def _number(written: str) -> str:
    """Return a bound such as `64`, `2^20`, `2^53-1` or `CHUNKS_MAX-1` in Python."""
    spaced = re.sub(r"([+-])", r" \1 ", written.replace("^", "**"))
    return f"{int(spaced):_}" if spaced.isdigit() and int(spaced) >= 10_000 else spaced


# Limits.


def _limits(subject: str, limits: list[d.Limit]) -> str:
    lines = [
        _commented(f"{limit.name}: Final = {_number(limit.written)}", d.plain(limit.meaning))
        for limit in limits
    ]
    head = [_docstring(f"{subject} {MADE}"), "", "from typing import Final", ""]
    return "\n".join([*head, *lines, ""])


# Tables of states.


def _tables(protocol: d.Protocol, side: str, more: str) -> str:
    """Return the module with the tables of a side."""
    named = [
        (protocol.tables[key], *names)
        for key, names in TABLES.items()
        if key.startswith(f"{side}.")
    ]
    parts = [_docstring(f"The tables of states of a {side}. {MADE}")]
    typing = ["Final", "Literal"] if more else ["Literal"]
    imports = _import("typing", typing)
    for name, module in ELSEWHERE.items():
        if any(state == name for _, state, _, _ in named):
            imports += "\n" + _import(module, [name])
    parts.append(imports.rstrip("\n"))
    for table, state, event, arrows in named:
        if state not in ELSEWHERE:
            parts.append(f"# {table.summary}.\n{_words(state, table.states)}")
        parts += [_words(event, table.events), _arrows(table, state, event, arrows)]
    return "\n\n".join([*parts, more] if more else parts) + "\n"


def _words(name: str, meanings: Mapping[str, str]) -> str:
    """Return a `Literal` type of words, each with its meaning as a comment."""
    lines = [_commented(f'    "{word}",', d.plain(text)) for word, text in meanings.items()]
    return "\n".join([f"{name} = Literal[", *lines, "]"])


def _arrows(table: d.Table, state: str, event: str, name: str) -> str:
    lines = [f"{name}: dict[{state}, dict[{event}, {state}]] = {{"]
    lines += [f'"{word}": {json.dumps(after)},' for word, after in table.arrows.items()]
    return "\n".join([*lines, "}"])


def _codes(protocol: d.Protocol) -> str:
    """Return the sets of codes of `refuse` and `failed` that a worker treats in a special way."""
    ends = [c for c in protocol.codes["refuse"].values() if c.cells["effect"] == "ends"]
    again = [c for c in protocol.codes["failed"].values() if c.cells["again"]]
    refused = f"# Codes of `refuse` that end a session.\n{_set('TURNED_AWAY', ends)}"
    failed = (
        f"# Codes of `failed` after which a version is tried again.\n{_set('TRANSIENT', again)}"
    )
    return f"{refused}\n\n{failed}"


def _set(name: str, codes: list[d.Code]) -> str:
    lines = [_commented(f'    "{code.name}",', d.plain(code.meaning)) for code in codes]
    return "\n".join([f"{name}: Final = {{", *lines, "}"])


# Messages.


class _Messages:
    """Generates the module of the messages and the objects in them."""

    def __init__(self, protocol: d.Protocol) -> None:
        self._protocol = protocol
        self._aliases = {
            d.type_of(text, {}, protocol.limits): name for name, text in ALIASES.items()
        }
        self._used: set[str] = set()

    def text(self) -> str:
        """Return the module."""
        known = self._protocol.messages.values()
        first = [message for message in known if message.page != OBSERVING]
        last = [message for message in known if message.page == OBSERVING]
        parts = [
            self._alias_lines(),
            VERSIONED,
            "# Objects in messages.",
            *map(self._struct, self._protocol.objects_in(known)),
            "# Worker to publisher.",
            *(self._struct(message) for message in first if message.sender == "worker"),
            "# Both ways.",
            *(self._struct(message) for message in first if message.sender == "either"),
            "# Publisher to worker.",
            *(self._struct(message) for message in first if message.sender == "publisher"),
            "# To and from observers, and the sums of weights that an observer requests.",
            *(self._struct(message) for message in last),
        ]
        body = "\n\n\n".join(parts) + "\n\n\n" + self._unions(first, last) + "\n"
        if unused := [name for name in ALIASES if name not in self._used]:
            raise ValueError(f"ALIASES in python.py names types that no field has: {unused}")
        return self._head(body) + body

    def _head(self, body: str) -> str:
        """Return the docstring and the imports of the module."""
        limits = {name for name in self._protocol.limits if re.search(rf"\b{name}\b", body)}
        return "\n".join(
            [
                f'"""The messages of WBP/1, and the objects in them. {MADE}\n\n{ABOUT}\n"""\n',
                _import("typing", ["Annotated", "Final", "Literal"]),
                "import msgspec\n",
                _import("..codecs.protocol_limits", limits & OF_CODECS)
                + _import(".protocol_limits", limits - OF_CODECS)
                + _import(".structs", ["Message", "SanitizedText"]),
                "",
            ]
        )

    def _alias_lines(self) -> str:
        lines = [r'NAME_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}\Z"', ""]
        lines += [f"{name} = {self._spelled(kind)}" for kind, name in self._aliases.items()]
        return "\n".join(lines)

    def _struct(self, struct: d.Struct) -> str:
        """Return the class of a message or an object."""
        base, options, fields = "msgspec.Struct", ["frozen=True"], struct.fields
        if isinstance(struct, d.Message):
            base = "Versioned" if struct.of_version else "Message"
            options = [f'tag="{struct.name}"', "frozen=True", "kw_only=True"]
            fields = fields[len(d.VERSION_FIELDS) if struct.of_version else 0 :]
        elif start := self._protocol.start_of(struct):
            base, fields = start.class_name, fields[len(start.fields) :]
        if not (isinstance(struct, d.Message) or all(each.required for each in fields)):
            options.append("omit_defaults=True")
        bases = [base, "SanitizedText"] if _sanitized(struct) else [base]
        if len(bases) > 1 and base == "msgspec.Struct":
            bases.remove(base)
        lines = [f"class {struct.class_name}({', '.join([*bases, *options])}):"]
        lines.append(_docstring(struct.summary, "    "))
        if fields:
            ordered = sorted(fields, key=lambda each: not each.required)
            lines += ["", *(self._field(struct, each) for each in ordered)]
        return "\n".join(lines)

    def _field(self, struct: d.Struct, each: d.Field) -> str:
        kind, default = self._named(each.type), ""
        if not each.required:
            text = isinstance(each.default, str)
            default = f' = "{each.default}"' if text else f" = {each.default!r}"
        line = f"    {each.name}: {kind}{default}"
        return _commented(line, PRINTABLE_WHERE_USED.get((struct.name, each.name), ""))

    def _named(self, kind: d.Type) -> str:
        """Return the name of a type, or the type spelled out if it has no name."""
        name = self._aliases.get(kind, "")
        self._used.add(name)
        return name or self._spelled(kind)

    def _spelled(self, kind: d.Type) -> str:
        if isinstance(kind, d.Hex) and kind.empty:
            return rf'Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{{{kind.digits}}})?\Z")]'
        return d.spelled(kind, FORMS, self._named, _number)

    def _unions(self, first: list[d.Message], last: list[d.Message]) -> str:
        def classes(messages: list[d.Message], side: str) -> list[str]:
            return [each.class_name for each in messages if each.sender in (side, "either")]

        def to(messages: list[d.Message], side: str) -> list[str]:
            return [each.class_name for each in messages if each.receiver == side]

        known = self._protocol.messages.values()
        indexed = [m for m in known if any(field.name == "index" for field in m.fields)]
        chunks = [each.class_name for each in indexed if each.payloads == (1, 1)]
        payloads = [
            f"    {each.class_name}: {each.payloads}," for each in known if each.payloads != (0, 0)
        ]
        features = [
            _commented(f'{each.constant}: Final = "{each.name}"', d.plain(each.meaning))
            for each in self._protocol.features.values()
        ]
        return "\n".join(
            [
                _union("WorkerMessage", classes(first, "worker")),
                _union("PublisherMessage", classes(first, "publisher")),
                _union("ToPublisher", ["WorkerMessage", *to(last, "publisher")]),
                _union("ToWorker", ["PublisherMessage", *to(last, "worker")]),
                _union("AnyChunk", chunks),
                "",
                "# The least and greatest number of payload frames; other types have none.",
                "PAYLOADS: Final[dict[type[Message], tuple[int, int]]] = {",
                *payloads,
                "}",
                "",
                "# Optional features.",
                *features,
            ]
        )


def _sanitized(struct: d.Struct) -> bool:
    """Return whether a struct has texts for people, which must be made printable."""
    texts = [each for each in struct.fields if isinstance(each.type, d.Text)]
    people = [each for each in texts if not each.programs]
    people = [each for each in people if (struct.name, each.name) not in PRINTABLE_WHERE_USED]
    if people and len(people) < len(texts):
        text = f"{struct.name}: Python makes all texts of a message printable, or none"
        raise d.DescriptionError(f"messages.toml: {text}")
    return bool(people)


ABOUT: Final = """\
Decoding checks the types and bounds below, so a machine never gets a value out of bounds, and
ignores unknown fields, so that the protocol can grow. `headers.py` encodes and decodes messages;
`docs/protocol` has the meaning of each field."""

VERSIONED: Final = '''class Versioned(Message, frozen=True, kw_only=True):
    """A message about one version."""

    model: Name
    epoch: Count
    version: Positive'''
