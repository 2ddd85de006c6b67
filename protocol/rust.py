"""Make the files of Rust from the description: messages, limits, timers, codes, tables of states.

The texts are as rustfmt writes them, so that no formatter runs.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from .description import (
    Array,
    Base64,
    Boolean,
    Field,
    Hex,
    Integer,
    Limit,
    Map,
    Message,
    Name,
    Nullable,
    Object,
    OneOf,
    Protocol,
    Struct,
    Table,
    Text,
    Timer,
    Type,
    objects_in,
    plain,
)

FOLDER: Final = "rust_client/src/protocol"
WIDTH: Final = 110  # of rustfmt.toml
COMMENT_WIDTH: Final = 100
MADE: Final = "// Made by `make protocol`; do not edit.\n"

# Messages by their senders and receivers: the enum, and whether Rust reads it.
ENUMS: Final = {
    "FromWorker": ("worker", "publisher", True),
    "FromPublisher": ("publisher", "worker", True),
    "FromObserver": ("observer", "publisher", True),
    "ToObserver": ("publisher", "observer", False),
}
# The types of limits that are not `usize`, beside those that bound an integer.
LIMIT_TYPES: Final = {
    "MESSAGE_BYTES_MAX": "u64",
    "WHOLE_BYTES_MAX": "u64",
    "PUSH_CHUNKS": "u64",
    "TICKET_SECONDS": "u64",
    "APPLIES_MAX": "u32",
    "TRIES_MAX": "u32",
    "RENEWAL_PAUSES": "u32",
}
# The names of the tables of states: the state, the event, and the table.
TABLES: Final = {
    "worker.version": ("Phase", "Event", "ARROWS"),
    "worker.model": ("Mode", "ModeEvent", "MODES"),
    "worker.session": ("Session", "Change", "SESSIONS"),
    "worker.announced": ("Lack", "LackEvent", "LACKS"),
    "worker.arriving": ("Coming", "Way", "COMING"),
    "publisher.worker": ("PeerPhase", "PeerEvent", "WORKERS"),
    "publisher.target": ("Outcome", "TargetEvent", "TARGETS"),
    "publisher.decision": ("Decision", "DecisionEvent", "DECISIONS"),
    "publisher.version": ("VersionPhase", "VersionEvent", "VERSIONS"),
}
LOCAL_CODES: Final = {"keys": "a handshake failed because of keys; the text has the likely reason"}


def files(protocol: Protocol) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    modules = {
        "codes": _codes(protocol),
        "limits": _limits(protocol),
        "messages": Messages(protocol).text(),
        "phases": _phases(protocol),
        "timers": _timers(protocol.timers),
    }
    listed = "".join(f"pub mod {name};\n" for name in modules)
    modules["mod"] = f"//! The protocol WBP/1, as `protocol/` describes it.\n\n{listed}"
    return {f"{FOLDER}/{name}.rs": MADE + text for name, text in modules.items()}


# Names and comments.


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in re.split("[_-]", name))


def _sentence(text: str) -> str:
    """Return Markdown as the text of a comment: without links and emphasis."""
    text = " ".join(plain(text).split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _comment(text: str, indent: str = "") -> str:
    """Return a comment of documentation; nothing for no text."""
    width = COMMENT_WIDTH - len(indent) - 4
    lines = textwrap.wrap(_sentence(text), width, break_on_hyphens=False) if text else []
    return "".join(f"{indent}/// {line}\n" for line in lines)


def _block(indent: str, head: str, items: Sequence[str], tail: str, pad: str = " ") -> str:
    """Return items between a head and a tail, on one line where they fit, as rustfmt does."""
    line = f"{indent}{head}{pad}{', '.join(items)}{pad}{tail}"
    if not items or len(line) <= WIDTH:
        return (line if items else f"{indent}{head}{tail}") + "\n"
    lines = "".join(_broken(f"{indent}    ", f"{item},") for item in items)
    return f"{indent}{head}\n{lines}{indent}{tail}\n"


def _broken(indent: str, line: str) -> str:
    """Return a line of a block, broken before its method where it is too long."""
    if len(indent) + len(line) > WIDTH:
        line = line.replace("fields.", f"fields\n{indent}    .", 1)
    return f"{indent}{line}\n"


def _impl(head: str, signature: str, body: str, comment: str = "") -> str:
    """Return an implementation with one function."""
    return f"\nimpl {head} {{\n{_comment(comment, '    ')}    {signature} {{\n{body}    }}\n}}\n"


# Limits and timers.


def _limits(protocol: Protocol) -> str:
    structs = (*protocol.messages.values(), *protocol.objects.values())
    bounds = {
        name for struct in structs for each in struct.fields for name in _integer_bounds(each.type)
    }

    def const(limit: Limit) -> str:
        wide = limit.name in bounds or limit.value >= 2**32
        kind = LIMIT_TYPES.get(limit.name, "u64" if wide else "usize")
        value = _number(limit.written)
        return f"{_comment(limit.meaning)}pub const {limit.name}: {kind} = {value};\n"

    return "//! The limits of the protocol.\n\n" + "".join(map(const, protocol.limits.values()))


def _one_ofs(kind: Type) -> Iterator[OneOf]:
    match kind:
        case OneOf():
            yield kind
        case Nullable():
            yield from _one_ofs(kind.inner)
        case Array():
            yield from _one_ofs(kind.item)
        case Map():
            yield from _one_ofs(kind.value)
        case _:
            pass


def _integer_bounds(kind: Type) -> Iterator[str]:
    match kind:
        case Integer():
            for name in (kind.least_name, kind.most_name):
                yield re.sub(r"[+-]\d+$", "", name)
        case Nullable():
            yield from _integer_bounds(kind.inner)
        case Array():
            yield from _integer_bounds(kind.item)
        case Map():
            yield from _integer_bounds(kind.value)
        case _:
            pass


def _number(written: str) -> str:
    """Return a number, a power of two or a limit as Rust writes it."""
    if match := re.fullmatch(r"2\^(\d+)(-1)?", written):
        return f"(1 << {match[1]}) - 1" if match[2] else f"1 << {match[1]}"
    if written.isdecimal():
        number = int(written)
        return f"{number:_}" if number >= 10_000 else str(number)
    return re.sub(r"([+-])", r" \1 ", written)


def _timers(timers: Mapping[str, Timer]) -> str:
    def const(timer: Timer) -> str:
        whole = timer.default == int(timer.default)
        value = f"secs({int(timer.default)})" if whole else f"millis({round(timer.default * 1000)})"
        comment = _comment(timer.meaning)
        return f"{comment}pub const {timer.name.upper()}: Duration = Duration::from_{value};\n"

    head = "//! The default times of the protocol.\n\nuse std::time::Duration;\n\n"
    return head + "".join(map(const, timers.values()))


# Codes.


def _codes(protocol: Protocol) -> str:
    failed = protocol.codes["failed"]
    meanings = {
        name: code.meaning
        for message in ("failed", "refuse")
        for name, code in protocol.codes[message].items()
        if name != "any other"
    } | LOCAL_CODES
    variants = "".join(
        f"{_comment(meaning, '    ')}    {_camel(name)},\n" for name, meaning in meanings.items()
    )
    texts = "".join(f'            Code::{_camel(n)} => "{n}",\n' for n in meanings)
    words = "".join(f'            "{n}" => Code::{_camel(n)},\n' for n in meanings)
    again = [f'"{name}"' for name, code in failed.items() if code.cells["again"]]
    return (
        "//! The codes of the protocol, for programs. Texts beside them are for people.\n\n"
        "use std::fmt;\n\n"
        "/// The codes of `failed` after which a worker tries the version again.\n"
        + _block("", f"pub const TRANSIENT: [&str; {len(again)}] = [", again, "];", pad="")
        + "\n/// Why a version was rejected, or a worker was refused.\n"
        "#[derive(Clone, Debug, PartialEq, Eq, Hash)]\n#[non_exhaustive]\npub enum Code {\n"
        f"{variants}    /// A code that this crate does not know; the protocol may add codes.\n"
        "    Other(String),\n}\n"
        + _impl(
            "Code",
            "pub fn as_str(&self) -> &str",
            f"        match self {{\n{texts}            Code::Other(text) => text,\n        }}\n",
            "Returns the code as it is in messages.",
        )
        + _impl(
            "From<&str> for Code",
            "fn from(text: &str) -> Code",
            f"        match text {{\n{words}            other => Code::Other(other.to_owned()),\n"
            "        }\n",
        )
        + _impl(
            "fmt::Display for Code",
            "fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result",
            "        f.write_str(self.as_str())\n",
        )
    )


# Tables of states.


def _phases(protocol: Protocol) -> str:
    head = (
        "//! The tables of states: from a state, by an event, to a state. An event without an\n"
        "//! arrow from a state changes nothing.\n\nuse serde::{Deserialize, Serialize};\n"
    )
    return head + "".join(_table(name, table) for name, table in protocol.tables.items())


def _table(key: str, table: Table) -> str:
    state, event, arrows = TABLES[key]
    names = "".join(f'            {state}::{_camel(n)} => "{n}",\n' for n in table.states)
    rows = [
        f"({state}::{_camel(source)}, {event}::{_camel(by)}, {state}::{_camel(target)})"
        for source, after in table.arrows.items()
        for by, target in after.items()
    ]
    return (
        f"\n{_comment(table.summary + ': its states.')}"
        "#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, "
        "Serialize, Deserialize)]\n"
        f'#[serde(rename_all = "kebab-case")]\npub enum {state} {{\n'
        f"{_variants(table.states, table.initial)}}}\n"
        + _impl(
            state,
            "pub fn name(self) -> &'static str",
            f"        match self {{\n{names}        }}\n",
            "Returns the name of the state, which is the same in all languages.",
        )
        + f"\n{_comment(table.summary + ': its events.')}"
        "#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]\n"
        f'#[serde(rename_all = "kebab-case")]\npub enum {event} {{\n{_variants(table.events)}}}\n'
        f"\n{_comment(table.summary + ': its arrows.')}"
        + _block("", f"pub const {arrows}: &[({state}, {event}, {state})] = &[", rows, "];", pad="")
    )


def _variants(meanings: Mapping[str, str], default: str = "") -> str:
    return "".join(
        _comment(meaning, "    ")
        + ("    #[default]\n" if name == default else "")
        + f"    {_camel(name)},\n"
        for name, meaning in meanings.items()
    )


# Messages.


class Messages:
    """The text of the messages: structs, their readers, and enums of what a side sends."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.words: dict[frozenset[str], str] = {}  # the enum of the words of a field
        self.tests: list[str] = []  # of defaults that are not those of their types
        self.readers: set[str] = set()  # functions of `fields.rs` that are used
        self.read = self._read()

    def text(self) -> str:
        """Return the text of the file."""
        structs = (*self.protocol.objects.values(), *self.protocol.messages.values())
        words = self._words(structs[::-1])  # a field of a message names its words
        body = "".join(map(self._struct, structs))
        enums = "".join(self._messages(name) for name in ENUMS)
        limits = sorted({n for n in self.protocol.limits if re.search(rf"\b{n}\b", body)})
        readers = sorted({*self.readers, "is_default", "Fault", "Fields"}, key=_by_version)
        return (
            "//! The messages of WBP/1, and the objects in them: structs, and their readers.\n\n"
            "use crate::fields::{\n" + _wrapped(readers) + "};\n"
            "use crate::messages::Received;\n"
            "use crate::protocol::limits::{\n" + _wrapped(limits) + "};\n"
            "use serde::{Deserialize, Serialize};\n"
            "use std::collections::BTreeMap;\n"
            "use std::ops::RangeInclusive;\n" + words + body + enums + "".join(self.tests)
        )

    def _sent(self, enum: str) -> list[Message]:
        """Return the messages of an enum. No observer is `either` of two sides."""
        sides = ENUMS[enum][:2]
        either = ("either", "either") if "observer" not in sides else sides
        return [
            message
            for message in self.protocol.messages.values()
            if (message.sender, message.receiver) in (sides, either)
        ]

    def _read(self) -> set[str]:
        """Return the messages and objects that Rust reads."""
        found: set[str] = set()
        left: list[Struct] = [m for enum, row in ENUMS.items() if row[2] for m in self._sent(enum)]
        while left:
            struct = left.pop()
            found.add(struct.name)
            inside = [name for each in struct.fields for name in objects_in(each.type)]
            left += [self.protocol.objects[name] for name in inside]
        return found

    def _words(self, structs: Sequence[Struct]) -> str:
        """Give each set of words an enum, named after the first field that has them."""
        fields: dict[frozenset[str], list[tuple[Struct, Field, OneOf]]] = {}
        for struct in structs:
            for each in struct.fields:
                for kind in _one_ofs(each.type):
                    alike = fields.setdefault(frozenset(kind.words) - {""}, [])
                    alike.append((struct, each, kind))
        text = ""
        for words, alike in fields.items():
            struct, first, kind = alike[0]
            self.words[words] = name = f"{struct.class_name}{_camel(first.name)}"
            defaults = {each.default for _, each, _ in alike if each.default in words}
            if len(defaults) > 1:
                raise ValueError(f"two defaults of the same words: {', '.join(sorted(defaults))}")
            listed = [word for word in kind.words if word]
            default = next(iter(defaults), listed[0])
            text += (
                f"\n/// The words of the field `{first.name}`.\n"
                "#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]\n"
                f'#[serde(rename_all = "kebab-case")]\npub enum {name} {{\n'
                f"{_variants(dict.fromkeys(listed, ''), default)}}}\n"
            )
        return text

    def _struct(self, struct: Struct) -> str:
        plain = all(self._plain(each) for each in struct.fields)
        derived = ["Clone", "Debug", *(["Default"] if plain else []), "PartialEq", "Serialize"]
        fields = "".join(self._field(struct, each) for each in struct.fields)
        text = (
            f"\n{_comment(struct.summary)}#[derive({', '.join(derived)})]\n"
            f"pub struct {struct.class_name} {{{chr(10) + fields if fields else ''}}}\n"
        )
        if not plain:
            values = [
                f"{each.name}: Default::default()"
                if self._plain(each)
                else f"{each.name}: {_value(each.default)}"
                for each in struct.fields
            ]
            text += _impl(
                f"Default for {struct.class_name}",
                f"fn default() -> {struct.class_name}",
                _block("        ", f"{struct.class_name} {{", values, "}"),
            )
        if struct.name in self.read:
            reads = [self._reading(each) for each in struct.fields]
            parameter = "fields" if reads else "_fields"
            text += _impl(
                struct.class_name,
                f"fn read({parameter}: &Fields) -> Result<{struct.class_name}, Fault>",
                _block("        ", f"Ok({struct.class_name} {{", reads, "})"),
            )
        return text

    def _plain(self, each: Field) -> bool:
        """Return whether a field's default is that of its type."""
        usual = each.default in (None, 0, "", [], {})
        return each.required or usual or isinstance(each.type, OneOf)

    def _field(self, struct: Struct, each: Field) -> str:
        meaning = each.meaning
        if not meaning and struct.of_version and struct.version_meaning and each.name == "version":
            meaning = struct.version_meaning
        attribute = ""
        if not each.required:
            test = "is_default" if self._plain(each) else self._test(struct, each)
            attribute = f'    #[serde(skip_serializing_if = "{test}")]\n'
        comment = _comment(meaning, "    ")
        return f"{comment}{attribute}    pub {each.name}: {self._type(each.type)},\n"

    def _test(self, struct: Struct, each: Field) -> str:
        """Return the function that tells whether a value is a default that is not of its type."""
        name = f"is_default_{struct.name}_{each.name}"
        value = "*value" if each.default is True else f"*value == {_literal(each.default)}"
        head = f"fn {name}(value: &{self._type(each.type)}) -> bool"
        self.tests.append(f"\n{head} {{\n    {value}\n}}\n")
        return name

    def _type(self, kind: Type) -> str:
        match kind:
            case Integer():
                return "u32" if kind.most == 2**32 - 1 else "u64"
            case Boolean():
                return "bool"
            case OneOf():
                name = self.words[frozenset(word for word in kind.words if word)]
                return f"Option<{name}>" if "" in kind.words else name
            case Object():
                return self.protocol.objects[kind.name].class_name
            case Nullable():
                return f"Option<{self._type(kind.inner)}>"
            case Array():
                return f"Vec<{self._type(kind.item)}>"
            case Map():
                return f"BTreeMap<String, {self._type(kind.value)}>"
            case _:
                return "String"

    def _reading(self, each: Field) -> str:
        reader = self._reader(each.type)
        if each.required:
            return f'{each.name}: fields.required("{each.name}", {reader})?'
        if self._plain(each):
            return f'{each.name}: fields.optional("{each.name}", {reader})?'
        return f'{each.name}: fields.or("{each.name}", {_value(each.default)}, {reader})?'

    def _reader(self, kind: Type) -> str:
        """Return the function of `fields.rs` that reads a type."""
        name, *arguments = self._call(kind)
        self.readers.add(name)
        return f"{name}({', '.join(arguments)})" if arguments else name

    def _call(self, kind: Type) -> list[str]:
        match kind:
            case Integer(least_name="0", most_name="INTEGER_MAX"):
                return ["count"]
            case Integer(least_name="1", most_name="INTEGER_MAX"):
                return ["positive"]
            case Integer(least_name="0", most_name="2^32-1"):
                return ["uint32"]
            case Integer():
                return ["within", f"{_number(kind.least_name)}..={_number(kind.most_name)}"]
            case Boolean():
                return ["boolean"]
            case Name():
                return ["name"]
            case Hex():
                return ["hex_or_empty" if kind.empty else "hex", str(kind.digits)]
            case Text():
                return ["text", _number(kind.most_name)]
            case Base64():
                return ["base64", _number(kind.most_name)]
            case OneOf():
                return ["word_or_empty" if "" in kind.words else "word"]
            case Object():
                return ["object", f"{self._type(kind)}::read"]
            case Nullable():
                return ["nullable", self._reader(kind.inner)]
            case Array():
                return ["array", _number(kind.most_name), self._reader(kind.item)]
            case Map():
                most, key = _number(kind.most_name), self._reader(kind.key)
                return ["map", most, key, self._reader(kind.value)]

    def _messages(self, enum: str) -> str:
        sender, receiver, read = ENUMS[enum]
        sent = self._sent(enum)
        variants = "".join(f"    {_camel(m.name)}({m.class_name}),\n" for m in sent)
        text = (
            f"\n/// A message from {_a(sender)} to {_a(receiver)}.\n"
            "#[derive(Clone, Debug, PartialEq, Serialize)]\n"
            f'#[serde(tag = "type", rename_all = "snake_case")]\npub enum {enum} {{\n{variants}}}\n'
        )
        if not read:
            return text
        arms = "".join(
            f'            "{m.name}" => {enum}::{_camel(m.name)}({m.class_name}::read(fields)?),\n'
            for m in sent
        )
        return text + (
            f"\nimpl Received for {enum} {{\n"
            f"    fn read(kind: &str, fields: &Fields) -> Result<Option<{enum}>, Fault> {{\n"
            f"        Ok(Some(match kind {{\n{arms}            _ => return Ok(None),\n"
            "        }))\n    }\n\n"
            "    fn payloads(&self) -> RangeInclusive<usize> {\n"
            f"{_payloads(enum, sent)}    }}\n}}\n"
        )


def _payloads(enum: str, sent: Sequence[Message]) -> str:
    found: dict[tuple[int, int], list[str]] = {}
    for message in sent:
        if message.payloads != (0, 0):
            found.setdefault(message.payloads, []).append(f"{enum}::{_camel(message.name)}(_)")
    if not found:
        return "        0..=0\n"
    arms = "".join(
        f"            {' | '.join(names)} => {least}..={most},\n"
        for (least, most), names in found.items()
    )
    return f"        match self {{\n{arms}            _ => 0..=0,\n        }}\n"


def _a(side: str) -> str:
    return f"an {side}" if side == "observer" else f"a {side}"


def _literal(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default).lower()


def _value(default: object) -> str:
    return _literal(default) + (".to_owned()" if isinstance(default, str) else "")


def _by_version(name: str) -> tuple[bool, str]:
    """Sort as rustfmt sorts imports: functions before types."""
    return name[:1].isupper(), name


def _wrapped(names: Sequence[str]) -> str:
    lines = textwrap.wrap(", ".join(names) + ",", WIDTH - 5)
    return "".join(f"    {line}\n" for line in lines)
