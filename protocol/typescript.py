"""Make the messages, limits, codes and tables of states of the worker in TypeScript.

The text has the form that Biome gives it: `biome check` is part of the worker's tests.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from . import description as d

SOURCES: Final = "node_client/src"
WIDTH: Final = 100

LEFT_OUT: Final = {  # messages that this worker neither reads nor sends, and why
    "prepare": "Node has no flock, so the worker uses no shared memory",
    "check": "the worker lacks the feature `checking`: it does not read back its weights",
    "checked": "the same",
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


def _comment(text: str, rows: Sequence[str] = (), pad: str = "") -> list[str]:
    """Return a comment: a text and, in a list, some rows."""
    wrapper = textwrap.TextWrapper(WIDTH - len(pad) - len(" * "), break_on_hyphens=False)
    body = wrapper.wrap(text) + [""][: len(rows)]
    wrapper.subsequent_indent = "  "
    for row in rows:
        body += wrapper.wrap(f"- {row}")
    if len(body) == 1 and len(pad) + len(f"/** {body[0]} */") <= WIDTH:
        return [f"{pad}/** {body[0]} */"]
    return [f"{pad}/**", *(f"{pad} * {line}".rstrip() for line in body), f"{pad} */"]


def _list(head: str, items: Sequence[str], tail: str, space: str = "", pad: str = "") -> list[str]:
    """Return a list on one line if it fits there, else with a line for each item."""
    line = f"{pad}{head}{space}{', '.join(items)}{space}{tail}"
    if len(line) <= WIDTH:
        return [line]
    return [pad + head, *(f"{pad}  {item}," for item in items), pad + tail]


def _call(head: str, call: str, pad: str) -> list[str]:
    """Return the entry of a table whose value is a call: arguments that do not fit have lines."""
    line = f"{pad}{head}{call},"
    if len(line) <= WIDTH:
        return [line]
    name, arguments = call[:-1].split("(", 1)
    lines: list[str] = []
    whole = ""  # the present argument: a comma inside its parentheses does not end it
    for part in arguments.split(", "):
        whole += f", {part}" if whole else part
        if whole.count("(") == whole.count(")"):
            lines += _call("", whole, pad + "  ")
            whole = ""
    return [f"{pad}{head}{name}(", *lines, f"{pad}),"]


def _union(name: str, members: Sequence[str]) -> list[str]:
    line = f"export type {name} = {' | '.join(members)};"
    if len(line) <= WIDTH:
        return [line]
    lines = [f"export type {name} =", *(f"  | {member}" for member in members)]
    return [*lines[:-1], lines[-1] + ";"]


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
    for struct in _objects(protocol, [*received, *sent]):
        types += _interface(protocol, struct, struct.class_name)
    for message in received:
        types += _interface(protocol, message, message.class_name)
    for message in sent:
        types += _interface(protocol, message, _sent_name(message), sent=True)
    readers = ["// How the fields of a publisher's messages are read.", ""]
    for struct in _objects(protocol, received):
        name = struct.class_name
        readers.append(f"const {_const(struct)}: f.Field<{name}> = f.object({{")
        readers += [*_readers(protocol, struct, "  "), "});"]
    readers += ["", *_comment("The messages of a publisher and their fields.")]
    key = 'readonly [M in PublisherMessage as M["type"]]'
    readers.append(f"export const FROM_PUBLISHER: {{ {key}: f.FieldsOf<M> }} = {{")
    for message in received:
        readers += [f"  {message.name}: {{", *_readers(protocol, message, "    "), "  },"]
    limits = protocol.limits.keys() & re.findall(r"\w+", "\n".join(readers))
    payloads = [f"{m.name}: [{m.payloads[0]}, {m.payloads[1]}]" for m in received if m.payloads[1]]
    return [
        *_head("The messages of WBP/1 that a worker receives or sends, and the objects in them."),
        'import * as f from "./fields.js";',
        *_list("import {", sorted(limits, key=str.lower), '} from "./protocol_limits.js";', " "),
        "",
        *types,
        *_union("PublisherMessage", [m.class_name for m in received]),
        "",
        *_comment("The messages of a worker. A field at its default may be omitted."),
        *_union("WorkerMessage", [_sent_name(m) for m in sent]),
        "",
        *readers,
        *("};", ""),
        *_comment("The least and greatest number of payload frames; 0 of the other messages."),
        "export const PAYLOADS: {",
        '  readonly [T in PublisherMessage["type"]]?: readonly [least: number, most: number];',
        *_list("} = {", payloads, "};", space=" "),
    ]


def _sent_name(message: d.Message) -> str:
    """Return the name of a worker's message, whose fields may be omitted."""
    return f"Worker{message.class_name}" if message.sender == "either" else message.class_name


def _const(struct: d.Struct) -> str:
    """Return the name of the constant that reads an object."""
    return struct.class_name[0].lower() + struct.class_name[1:]


def _objects(protocol: d.Protocol, messages: Sequence[d.Message]) -> list[d.Struct]:
    """Return the objects in some messages, each after the objects in it."""
    used = {name for message in messages for name in _inside(protocol, message)}
    return sorted(
        (each for each in protocol.objects.values() if each.name in used),
        key=lambda each: len(set(_inside(protocol, each))),
    )


def _inside(protocol: d.Protocol, struct: d.Struct) -> Iterator[str]:
    for name in (name for each in struct.fields for name in d.objects_in(each.type)):
        yield name
        yield from _inside(protocol, protocol.objects[name])


def _interface(
    protocol: d.Protocol, struct: d.Struct, name: str, *, sent: bool = False
) -> list[str]:
    lines = [*_comment(struct.summary), f"export interface {name} {{"]
    if isinstance(struct, d.Message):
        lines.append(f'  readonly type: "{struct.name}";')
    for each in struct.fields:
        lines += _comment(_sentence(each.meaning), pad="  ") if each.meaning else []
        may, or_not = ("?", " | undefined") if sent and not each.required else ("", "")
        lines.append(f"  readonly {each.name}{may}: {_type(protocol, each.type)}{or_not};")
    return [*lines, "}", ""]


def _type(protocol: d.Protocol, kind: d.Type) -> str:
    match kind:
        case d.Integer():
            return "number"
        case d.Boolean():
            return "boolean"
        case d.Name() | d.Hex() | d.Text():
            return "string"
        case d.Base64():
            return "Uint8Array"
        case d.OneOf():
            return " | ".join(_quoted(kind.words))
        case d.Object():
            return protocol.objects[kind.name].class_name
        case d.Nullable():
            return f"{_type(protocol, kind.inner)} | null"
        case d.Array():
            item = _type(protocol, kind.item)
            return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
        case d.Map():
            return f"ReadonlyMap<string, {_type(protocol, kind.value)}>"


def _readers(protocol: d.Protocol, struct: d.Struct, pad: str) -> list[str]:
    lines: list[str] = []
    for each in struct.fields:
        reader = _reader(protocol, each.type)
        if not each.required:
            default = "new Map()" if each.default == {} else json.dumps(each.default)
            reader = f"f.optional({reader}, {default})"
        lines += _call(f"{each.name}: ", reader, pad)
    return lines


def _reader(protocol: d.Protocol, kind: d.Type) -> str:
    match kind:
        case d.Integer(least=0, most_name="INTEGER_MAX"):
            return "f.count"
        case d.Integer(least=1, most_name="INTEGER_MAX"):
            return "f.positive"
        case d.Integer():
            return f"f.integer({_bound(kind.least_name)}, {_bound(kind.most_name)})"
        case d.Boolean():
            return "f.boolean"
        case d.Name():
            return "f.name"
        case d.Hex():
            return f"f.{'hexOrEmpty' if kind.empty else 'hex'}({kind.digits})"
        case d.Text():
            return f"f.text({_bound(kind.most_name)})"
        case d.Base64():
            return f"f.base64({_bound(kind.most_name)})"
        case d.OneOf():
            return f"f.oneOf({', '.join(_quoted(kind.words))})"
        case d.Object():
            return _const(protocol.objects[kind.name])
        case d.Nullable():
            return f"f.nullable({_reader(protocol, kind.inner)})"
        case d.Array():
            return f"f.array({_reader(protocol, kind.item)}, {_bound(kind.most_name)})"
        case d.Map():
            key, value = _reader(protocol, kind.key), _reader(protocol, kind.value)
            return f"f.map({key}, {value}, {_bound(kind.most_name)})"


# Limits, codes, states.


def _limits(protocol: d.Protocol) -> list[str]:
    lines = _head("The limits of WBP/1 that a worker keeps.")
    for limit in protocol.limits.values():
        if limit.page not in OTHERS:
            lines += _comment(_sentence(limit.meaning)) if limit.meaning else []
            lines.append(f"export const {limit.name} = {_bound(limit.written)};")
    return lines


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
        *_union("FailedCode", _quoted(failed)),
        "",
        *_comment("The codes of `failed` with which a version is tried again."),
        *_list("export const TRANSIENT: ReadonlySet<string> = new Set([", _quoted(again), "]);"),
        "",
        *_comment("The codes of `refuse` that end the session and are reported to the user."),
        *_list("export const TURNED_AWAY: ReadonlySet<string> = new Set([", _quoted(ends), "]);"),
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
            lines += _union(name + kind, _quoted(rows))
        const = f"{table.name.upper()}_ARROWS: Table<{name}State, {name}Event>"
        lines += ["", f"export const {const} = {{"]
        for state, arrows in table.arrows.items():
            items = [f'{_key(event)}: "{target}"' for event, target in arrows.items()]
            head = f"{_key(state)}: {{"
            lines += _list(head, items, "},", " ", "  ") if items else [f"  {head}}},"]
        lines.append("};")
    return lines
