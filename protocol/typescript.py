"""Generate the TypeScript worker's messages, limits, codes and tables from the description."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from . import description as d

SOURCES: Final = "node_client/src"
WIDTH: Final = 98  # of comments without their indent, since the formatter does not wrap comments

LEFT_OUT: Final = {  # messages that this worker neither reads nor sends, and why
    "prepare": "Node has no flock, so the worker uses no shared memory",
    "check": "the worker lacks the feature `checking`: it does not read back its weights",
    "checked": "like `check`",
}
OTHERS: Final = ("publisher", "observing", "LIMITS")  # pages with limits of the other sides


def files(protocol: d.Protocol) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    made = {
        "messages.ts": _messages(protocol),
        "protocol_limits.ts": _limits(protocol),
        "codes.ts": _codes(protocol),
        "phases.ts": _phases(protocol),
    }
    return {f"{SOURCES}/{name}": "\n".join(lines) + "\n" for name, lines in made.items()}


# Text.


def _head(summary: str) -> list[str]:
    return ["/**", f" * {summary}", " *", " * Made by `make protocol`; do not edit.", " */", ""]


def _sentence(meaning: str) -> str:
    """Return a meaning without links and emphasis, as a sentence."""
    plain = d.plain(meaning)
    first = plain[:1] if plain.startswith(("null:", "false:", "true:")) else plain[:1].upper()
    return f"{first}{plain[1:].removesuffix('.')}."


def _comment(text: str, rows: Sequence[str] = ()) -> list[str]:
    """Return a comment: a text, and a list of the rows."""
    wrapper = textwrap.TextWrapper(WIDTH - len(" * "), break_on_hyphens=False)
    body = wrapper.wrap(text) + [""][: len(rows)]
    wrapper.subsequent_indent = "  "
    for row in rows:
        body += wrapper.wrap(f"- {row}")
    if len(body) == 1 and len(f"/** {body[0]} */") <= WIDTH:
        return [f"/** {body[0]} */"]
    return ["/**", *(f" * {line}".rstrip() for line in body), " */"]


def _union(name: str, members: Sequence[str]) -> str:
    return f"export type {name} = {' | '.join(members)};"


def _number(value: int) -> str:
    return f"{value:_}" if value >= 10_000 else str(value)


def _bound(written: str) -> str:
    """Return a bound or a limit, such as `CHUNKS_MAX-1`, as an expression."""
    spaced = re.sub(r"([+-])", r" \1 ", written).replace("^", " ** ")
    return re.sub(r"\b\d+\b", lambda digits: _number(int(digits[0])), spaced)


def _quoted(words: Iterable[str]) -> list[str]:
    return [f'"{word}"' for word in words]


def _key(word: str) -> str:
    return word if word.isidentifier() else f'"{word}"'


# Messages.


def _messages(protocol: d.Protocol) -> list[str]:
    kept = [m for m in protocol.messages.values() if m.name not in LEFT_OUT]
    received = [m for m in kept if m.sender != "worker" and m.receiver in ("worker", "either")]
    sent = [m for m in kept if m.sender in ("worker", "either")]
    types: list[str] = []
    for struct in (*protocol.objects_in([*received, *sent]), *received):
        types += _interface(struct, struct.class_name)
    for message in sent:
        types += _interface(message, _sent_name(message), sent=True)
    readers = ["// How the fields of a publisher's messages are read.", ""]
    for struct in protocol.objects_in(received):
        readers.append(f"const {_const(struct)}: f.Field<{struct.class_name}> = f.object({{")
        readers += [*_readers(struct), "});"]
    readers += ["", *_comment("The messages of a publisher and their fields.")]
    key = 'readonly [M in PublisherMessage as M["type"]]'
    readers.append(f"export const FROM_PUBLISHER: {{ {key}: f.FieldsOf<M> }} = {{")
    for message in received:
        readers += [f"{message.name}: {{", *_readers(message), "},"]
    limits = protocol.limits.keys() & re.findall(r"\w+", "\n".join(readers))
    payloads = [f"{m.name}: [{m.payloads[0]}, {m.payloads[1]}]" for m in received if m.payloads[1]]
    return [
        *_head("The messages of WBP/1 that a worker receives or sends, and the objects in them."),
        'import * as f from "./fields.js";',
        f'import {{ {", ".join(sorted(limits, key=str.lower))} }} from "./protocol_limits.js";',
        "",
        *types,
        _union("PublisherMessage", [m.class_name for m in received]),
        "",
        *_comment("The messages of a worker. A field at its default may be omitted."),
        _union("WorkerMessage", [_sent_name(m) for m in sent]),
        "",
        *readers,
        *("};", ""),
        *_comment("The least and greatest number of payload frames; 0 of the other messages."),
        "export const PAYLOADS: {",
        '  readonly [T in PublisherMessage["type"]]?: readonly [least: number, most: number];',
        f"}} = {{ {', '.join(payloads)} }};",
        *("", "// Optional features."),
        *(f'export const {e.constant} = "{e.name}";' for e in protocol.features.values()),
    ]


def _sent_name(message: d.Message) -> str:
    """Return the name of the type of a sent message, whose fields may be omitted."""
    return f"Worker{message.class_name}" if message.sender == "either" else message.class_name


def _const(struct: d.Struct | d.Object) -> str:
    """Return the name of the constant that reads an object."""
    return struct.class_name[0].lower() + struct.class_name[1:]


def _interface(struct: d.Struct, name: str, *, sent: bool = False) -> list[str]:
    lines = [*_comment(struct.summary), f"export interface {name} {{"]
    if isinstance(struct, d.Message):
        lines.append(f'readonly type: "{struct.name}";')
    for each in struct.fields:
        lines += _comment(_sentence(each.meaning)) if each.meaning else []
        may, or_not = ("?", " | undefined") if sent and not each.required else ("", "")
        lines.append(f"readonly {each.name}{may}: {_type(each.type)}{or_not};")
    return [*lines, "}", ""]


TYPES: Final = {
    **dict.fromkeys((d.Name, d.Hex, d.Text), "string"),
    d.Integer: "number",
    d.Boolean: "boolean",
    d.Base64: "Uint8Array",
    d.Object: "{class_name}",
    d.Nullable: "{inner} | null",
    d.Map: "ReadonlyMap<string, {value}>",
}
READERS: Final = {  # the functions of fields.ts
    d.Integer: "f.integer({least}, {most})",
    d.Boolean: "f.boolean",
    d.Name: "f.name",
    d.Hex: "f.hex({digits})",
    d.Text: "f.text({most})",
    d.Base64: "f.base64({most})",
    d.OneOf: "f.oneOf({words})",
    d.Nullable: "f.nullable({inner})",
    d.Array: "f.array({item}, {most})",
    d.Map: "f.map({key}, {value}, {most})",
}


def _type(kind: d.Type) -> str:
    match kind:
        case d.OneOf():
            return " | ".join(_quoted(kind.words))
        case d.Array():
            item = _type(kind.item)
            return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
        case _:
            return d.spelled(kind, TYPES, _type)


def _reader(kind: d.Type) -> str:
    match kind:
        case d.Integer(least=0, most_name="INTEGER_MAX"):
            return "f.count"
        case d.Integer(least=1, most_name="INTEGER_MAX"):
            return "f.positive"
        case d.Hex(empty=True):
            return f"f.hexOrEmpty({kind.digits})"
        case d.Object():
            return _const(kind)
        case _:
            return d.spelled(kind, READERS, _reader, _bound)


def _readers(struct: d.Struct) -> Iterator[str]:
    for each in struct.fields:
        reader = _reader(each.type)
        if not each.required:
            default = "new Map()" if each.default == {} else json.dumps(each.default)
            reader = f"f.optional({reader}, {default})"
        yield f"{each.name}: {reader},"


# Limits, codes, states.


def _limits(protocol: d.Protocol) -> list[str]:
    lines = _head("The limits of WBP/1 that a worker keeps, and its times.")
    for limit in protocol.limits.values():
        if limit.page not in OTHERS:
            lines += _comment(_sentence(limit.meaning)) if limit.meaning else []
            lines.append(f"export const {limit.name} = {_bound(limit.written)};")
    lines += ["", *_comment("The times of a worker, in milliseconds."), "export interface Timing {"]
    for timer in protocol.timers.values():
        if timer.side != "publisher":
            first, *words = timer.name.split("_")
            name = first + "".join(map(str.title, words))
            lines += [*_comment(_sentence(timer.meaning)), f"readonly {name}: number;"]
    return [*lines, "}"]


def _codes(protocol: d.Protocol) -> list[str]:
    failed, refused = protocol.codes["failed"], protocol.codes["refuse"]
    again = [code.name for code in failed.values() if code.cells["again"]]
    ends = [code.name for code in refused.values() if code.cells["effect"] == "ends"]
    return [
        *_head("The codes of WBP/1 that tell a worker what to do."),
        *_comment(
            "The codes of `failed`:",
            [_sentence(f"`{code.name}`: {code.meaning}") for code in failed.values()],
        ),
        _union("FailedCode", _quoted(failed)),
        "",
        *_comment("The codes of `failed` with which a version is tried again."),
        f"export const TRANSIENT: ReadonlySet<string> = new Set([{', '.join(_quoted(again))}]);",
        "",
        *_comment("The codes of `refuse` that end the session and are reported to the user."),
        f"export const TURNED_AWAY: ReadonlySet<string> = new Set([{', '.join(_quoted(ends))}]);",
    ]


def _phases(protocol: d.Protocol) -> list[str]:
    lines = [
        *_head("The tables of states of a worker: each event leads from a state to the next."),
        *_comment("Maps each state and event to the next state. Other events change nothing."),
        "export type Table<S extends string, E extends string> = Record<S, Partial<Record<E, S>>>;",
    ]
    for table in protocol.tables.values():
        if table.side != "worker":
            continue
        name = table.name.title()
        for kind, rows in (("State", table.states), ("Event", table.events)):
            shown = [_sentence(f"`{word}`: {meaning}") for word, meaning in rows.items()]
            lines += ["", *_comment(f"{table.summary}: the {kind.lower()}s.", shown)]
            lines.append(_union(name + kind, _quoted(rows)))
        const = f"{table.name.upper()}_ARROWS: Table<{name}State, {name}Event>"
        lines += ["", f"export const {const} = {{"]
        for state, arrows in table.arrows.items():
            items = ", ".join(f'{_key(event)}: "{target}"' for event, target in arrows.items())
            lines.append(f"{_key(state)}: {{ {items} }},")
        lines.append("};")
    return lines
