"""Generate Rust's messages, limits, timers, codes and tables of states from the description."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from . import description as d

FOLDER: Final = "rust_client/src/protocol"
WIDTH: Final = 92  # of comments without indent and slashes, since rustfmt does not wrap comments
MADE: Final = "// Made by `make protocol`; do not edit.\n"

# The enums of messages: sender, receiver, and whether Rust also reads the messages.
ENUMS: Final = {
    "FromWorker": ("worker", "publisher", True),
    "FromPublisher": ("publisher", "worker", True),
    "FromObserver": ("observer", "publisher", True),
    "ToObserver": ("publisher", "observer", False),
}
# The types of limits that are not `usize`. Limits that bound an integer field are `u64` anyway.
LIMIT_TYPES: Final = {
    "MESSAGE_BYTES_MAX": "u64",
    "WHOLE_BYTES_MAX": "u64",
    "PUSH_CHUNKS": "u64",
    "TICKET_SECONDS": "u64",
    "APPLIES_MAX": "u32",
    "TRIES_MAX": "u32",
    "RENEWAL_PAUSES": "u32",
}
# For each table: the names of the types of its states and events, and of the table.
TABLES: Final = {
    "worker.version": ("Phase", "Event", "TRANSITIONS"),
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


def files(protocol: d.Protocol) -> dict[str, str]:
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
    """Return Markdown as a sentence of a comment: without links and emphasis."""
    text = " ".join(d.plain(text).split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _comment(text: str) -> str:
    """Return a documentation comment; "" for an empty text."""
    lines = textwrap.wrap(_sentence(text), WIDTH, break_on_hyphens=False) if text else []
    return "".join(f"/// {line}\n" for line in lines)


def _impl(head: str, signature: str, body: str, comment: str = "") -> str:
    """Return an `impl` block with one function."""
    return f"\nimpl {head} {{\n{_comment(comment)}{signature} {{\n{body}\n}}\n}}\n"


# Limits and times.


def _limits(protocol: d.Protocol) -> str:
    bounds = {
        bound.partition("-")[0].partition("+")[0]
        for struct in (*protocol.messages.values(), *protocol.objects.values())
        for each in struct.fields
        for kind in d.types_in(each.type)
        if isinstance(kind, d.Integer)
        for bound in (kind.least_name, kind.most_name)
    }

    def const(limit: d.Limit) -> str:
        wide = limit.name in bounds or limit.value >= 2**32
        kind = LIMIT_TYPES.get(limit.name, "u64" if wide else "usize")
        value = _number(limit.written)
        return f"{_comment(limit.meaning)}pub const {limit.name}: {kind} = {value};\n"

    return "//! The limits of the protocol.\n\n" + "".join(map(const, protocol.limits.values()))


def _number(written: str) -> str:
    """Return a number, a power of two or a limit as Rust writes it."""
    if match := re.fullmatch(r"2\^(\d+)(-1)?", written):
        return f"(1 << {match[1]}) - 1" if match[2] else f"1 << {match[1]}"
    return f"{int(written):_}" if written.isdecimal() and len(written) > 4 else written


def _timers(timers: Mapping[str, d.Timer]) -> str:
    times = [each for each in timers.values() if each.name != "report"]
    fields = (f"{_comment(each.meaning)}pub {each.name}: Duration,\n" for each in times)
    values = (f"{each.name}: Duration::from_{_seconds(each.default)}" for each in times)
    return (
        "//! The times of the protocol.\n\nuse std::time::Duration;\n\n"
        "/// The intervals and timeouts of workers and publishers.\n#[derive(Clone, Copy, Debug)]\n"
        f"pub struct Timing {{\n{''.join(fields)}}}\n"
        + _impl(
            "Default for Timing",
            "fn default() -> Timing",
            f"Timing {{ {', '.join(values)} }}",
        )
    )


def _seconds(time: float) -> str:
    return f"secs({time:g})" if time == int(time) else f"millis({round(time * 1000)})"


# Codes.


def _codes(protocol: d.Protocol) -> str:
    failed = protocol.codes["failed"]
    meanings = {
        name: code.meaning
        for message in ("failed", "refuse")
        for name, code in protocol.codes[message].items()
        if name != "any other"
    } | LOCAL_CODES
    texts = "".join(f'Code::{_camel(name)} => "{name}",\n' for name in meanings)
    words = "".join(f'"{name}" => Code::{_camel(name)},\n' for name in meanings)
    again = [f'"{name}"' for name, code in failed.items() if code.cells["again"]]
    return (
        "//! The codes of the protocol, for programs. Texts beside them are for people.\n\n"
        "use std::fmt;\n\n"
        "/// The codes of `failed` after which a worker tries the version again.\n"
        f"pub const TRANSIENT: [&str; {len(again)}] = [{', '.join(again)}];\n\n"
        "/// Why a version was rejected, or a worker was refused.\n"
        "#[derive(Clone, Debug, PartialEq, Eq, Hash)]\n#[non_exhaustive]\npub enum Code {\n"
        f"{_variants(meanings)}"
        "/// A code that this crate does not know; the protocol may add codes.\nOther(String),\n}\n"
        + _impl(
            "Code",
            "pub fn as_str(&self) -> &str",
            f"match self {{\n{texts}Code::Other(text) => text,\n}}",
            "Returns the code as it is in messages.",
        )
        + _impl(
            "From<&str> for Code",
            "fn from(text: &str) -> Code",
            f"match text {{\n{words}other => Code::Other(other.to_owned()),\n}}",
        )
        + _impl(
            "fmt::Display for Code",
            "fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result",
            "f.write_str(self.as_str())",
        )
    )


# Tables of states.


def _phases(protocol: d.Protocol) -> str:
    head = (
        "//! The tables of states: from a state, by an event, to a state. An event without a\n"
        "//! transition changes nothing.\n\nuse serde::{Deserialize, Serialize};\n"
    )
    return head + "".join(_table(name, table) for name, table in protocol.tables.items())


def _table(key: str, table: d.Table) -> str:
    state, event, arrows = TABLES[key]
    names = "".join(f'{state}::{_camel(name)} => "{name}",\n' for name in table.states)
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
            f"match self {{\n{names}}}",
            "Returns the name of the state, which is the same in all languages.",
        )
        + f"\n{_comment(table.summary + ': its events.')}"
        "#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]\n"
        f'#[serde(rename_all = "kebab-case")]\npub enum {event} {{\n{_variants(table.events)}}}\n'
        f"\n{_comment(table.summary + ': its transitions.')}"
        f"pub const {arrows}: &[({state}, {event}, {state})] = &[{', '.join(rows)}];\n"
    )


def _variants(meanings: Mapping[str, str], default: str = "") -> str:
    return "".join(
        f"{_comment(meaning)}{'#[default] ' if name == default else ''}{_camel(name)},\n"
        for name, meaning in meanings.items()
    )


# Messages.

TYPES: Final = {
    **dict.fromkeys((d.Name, d.Hex, d.Text, d.Base64), "String"),
    d.Boolean: "bool",
    d.Object: "{class_name}",
    d.Nullable: "Option<{inner}>",
    d.Array: "Vec<{item}>",
    d.Map: "BTreeMap<String, {value}>",
}
READERS: Final = {  # the functions of fields.rs
    d.Integer: "within({least}..={most})",
    d.Boolean: "boolean",
    d.Name: "name",
    d.Hex: "hex({digits})",
    d.Text: "text({most})",
    d.Base64: "base64({most})",
    d.OneOf: "word",
    d.Object: "object({class_name}::read)",
    d.Nullable: "nullable({inner})",
    d.Array: "array({most}, {item})",
    d.Map: "map({most}, {key}, {value})",
}


def _reader(kind: d.Type) -> str:
    """Return the Rust function that reads a value of a type."""
    match kind:
        case d.Integer(least_name="0", most_name="INTEGER_MAX"):
            return "count"
        case d.Integer(least_name="1", most_name="INTEGER_MAX"):
            return "positive"
        case d.Integer(least_name="0", most_name="2^32-1"):
            return "uint32"
        case d.Hex(empty=True):
            return f"hex_or_empty({kind.digits})"
        case d.OneOf() if "" in kind.words:
            return "word_or_empty"
        case _:
            return d.spelled(kind, READERS, _reader, _number)


class Messages:
    """Generates the structs of the messages, their readers, and the enums of messages."""

    def __init__(self, protocol: d.Protocol) -> None:
        self.protocol = protocol
        self.words: dict[frozenset[str], str] = {}  # by words of a field: the name of the enum
        self.tests: list[str] = []  # functions that test for defaults other than the type's default
        received = [each for enum, row in ENUMS.items() if row[2] for each in self._sent(enum)]
        self.read = {each.name for each in (*received, *protocol.objects_in(received))}

    def text(self) -> str:
        """Return the text of the file."""
        structs = (*self.protocol.objects.values(), *self.protocol.messages.values())
        words = self._words(structs[::-1])  # messages first: their fields name the enums
        body = "".join(map(self._struct, structs))
        enums = "".join(self._messages(name) for name in ENUMS)
        features = "".join(
            f'{_comment(each.meaning)}pub const {each.constant}: &str = "{each.name}";\n'
            for each in self.protocol.features.values()
        )
        return (
            "//! The messages of WBP/1, and the objects in them: structs, and their readers.\n\n"
            "use crate::fields::*;\nuse crate::messages::Received;\n"
            "use crate::protocol::limits::*;\nuse serde::{Deserialize, Serialize};\n"
            "use std::collections::BTreeMap;\nuse std::ops::RangeInclusive;\n"
            f"{words}{body}{enums}{''.join(self.tests)}\n{features}"
        )

    def _sent(self, enum: str) -> list[d.Message]:
        """Return the messages of an enum. `either` in the description excludes observers."""
        sides = ENUMS[enum][:2]
        either = ("either", "either") if "observer" not in sides else sides
        return [
            message
            for message in self.protocol.messages.values()
            if (message.sender, message.receiver) in (sides, either)
        ]

    def _words(self, structs: Sequence[d.Struct]) -> str:
        """Return an enum for each set of words, named after the first field with these words."""
        fields: dict[frozenset[str], list[tuple[d.Struct, d.Field, d.OneOf]]] = {}
        for struct, each in ((one, each) for one in structs for each in one.fields):
            for kind in d.types_in(each.type):
                if isinstance(kind, d.OneOf):
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
                "#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]\n"
                f'#[serde(rename_all = "kebab-case")]\npub enum {name} {{\n'
                f"{_variants(dict.fromkeys(listed, ''), default)}}}\n"
            )
        return text

    def _struct(self, struct: d.Struct) -> str:
        plain = all(self._plain(each) for each in struct.fields)
        derived = ["Clone", "Debug", *(["Default"] if plain else []), "PartialEq", "Serialize"]
        fields = "".join(self._field(struct, each) for each in struct.fields)
        name = struct.class_name
        text = (
            f"\n{_comment(struct.summary)}#[derive({', '.join(derived)})]\n"
            f"pub struct {name} {{\n{fields}}}\n"
        )
        if not plain:
            values = [
                f"{each.name}: "
                + ("Default::default()" if self._plain(each) else _value(each.default))
                for each in struct.fields
            ]
            body = f"{name} {{ {', '.join(values)} }}"
            text += _impl(f"Default for {name}", f"fn default() -> {name}", body)
        if struct.name in self.read:
            reads = [self._reading(each) for each in struct.fields]
            signature = f"fn read({'' if reads else '_'}fields: &Fields) -> Result<{name}, Fault>"
            text += _impl(name, signature, f"Ok({name} {{ {', '.join(reads)} }})")
        return text

    def _plain(self, each: d.Field) -> bool:
        """Return whether a field's default is the default of its type in Rust."""
        usual = each.default in (None, 0, "", [], {})
        return each.required or usual or isinstance(each.type, d.OneOf)

    def _field(self, struct: d.Struct, each: d.Field) -> str:
        meaning = each.meaning
        if not meaning and struct.of_version and struct.version_meaning and each.name == "version":
            meaning = struct.version_meaning
        attribute = ""
        if not each.required:
            test = "is_default" if self._plain(each) else self._test(struct, each)
            attribute = f'#[serde(skip_serializing_if = "{test}")]\n'
        return f"{_comment(meaning)}{attribute}pub {each.name}: {self._type(each.type)},\n"

    def _test(self, struct: d.Struct, each: d.Field) -> str:
        """Return the name of a function that reports whether a value is the field's default."""
        name = f"is_default_{struct.name}_{each.name}"
        value = "*value" if each.default is True else f"*value == {_literal(each.default)}"
        head = f"fn {name}(value: &{self._type(each.type)}) -> bool"
        self.tests.append(f"\n{head} {{\n{value}\n}}\n")
        return name

    def _type(self, kind: d.Type) -> str:
        match kind:
            case d.Integer():
                return "u32" if kind.most == 2**32 - 1 else "u64"
            case d.OneOf():
                name = self.words[frozenset(word for word in kind.words if word)]
                return f"Option<{name}>" if "" in kind.words else name
            case _:
                return d.spelled(kind, TYPES, self._type)

    def _reading(self, each: d.Field) -> str:
        reader = _reader(each.type)
        if each.required:
            return f'{each.name}: fields.required("{each.name}", {reader})?'
        if self._plain(each):
            return f'{each.name}: fields.optional("{each.name}", {reader})?'
        return f'{each.name}: fields.or("{each.name}", {_value(each.default)}, {reader})?'

    def _messages(self, enum: str) -> str:
        sender, receiver, read = ENUMS[enum]
        sent = self._sent(enum)
        variants = "".join(f"{_camel(m.name)}({m.class_name}),\n" for m in sent)
        text = (
            f"\n/// A message from {_a(sender)} to {_a(receiver)}.\n"
            "#[derive(Clone, Debug, PartialEq, Serialize)]\n"
            '#[serde(tag = "type", rename_all = "snake_case")]\n'
            # a message is handled as soon as it is read, and not kept in lists
            "#[allow(clippy::large_enum_variant)]\n"
            f"pub enum {enum} {{\n{variants}}}\n"
        )
        if not read:
            return text
        arms = "".join(
            f'"{m.name}" => {enum}::{_camel(m.name)}({m.class_name}::read(fields)?),\n'
            for m in sent
        )
        return text + (
            f"\nimpl Received for {enum} {{\n"
            f"fn read(kind: &str, fields: &Fields) -> Result<Option<{enum}>, Fault> {{\n"
            f"Ok(Some(match kind {{\n{arms}_ => return Ok(None),\n}}))\n}}\n\n"
            "fn payloads(&self) -> RangeInclusive<usize> {\n"
            f"{_payloads(enum, sent)}\n}}\n}}\n"
        )


def _payloads(enum: str, sent: Sequence[d.Message]) -> str:
    found: dict[tuple[int, int], list[str]] = {}
    for message in sent:
        if message.payloads != (0, 0):
            found.setdefault(message.payloads, []).append(f"{enum}::{_camel(message.name)}(_)")
    arms = (f"{' | '.join(each)} => {low}..={high},\n" for (low, high), each in found.items())
    return f"match self {{\n{''.join(arms)}_ => 0..=0,\n}}" if found else "0..=0"


def _a(side: str) -> str:
    return f"an {side}" if side == "observer" else f"a {side}"


def _literal(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default).lower()


def _value(default: object) -> str:
    return _literal(default) + (".to_owned()" if isinstance(default, str) else "")
