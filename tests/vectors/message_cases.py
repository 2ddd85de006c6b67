"""The cases of messages: each one whole and minimal, and every way to get it wrong.

The description of the protocol has the fields. Their types say which values are right and wrong.
"""

import copy
from collections.abc import Iterator, Sequence

from weightbus.protocol.description import (
    Array,
    Base64,
    Boolean,
    Field,
    Hex,
    Integer,
    Map,
    Message,
    Name,
    Nullable,
    Object,
    OneOf,
    Text,
    Type,
    objects_in,
)
from weightbus.tests.vectors.parts import PROTOCOL, Json, crc32c, own, padded, text_of

LAYOUT = padded({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}})
DIGEST = "0123456789abcdef" * 4
RUNNING = {"epoch": 1, "version": 2, "digest": DIGEST}
SHARED = {"path": "/proc/4711/fd/12", "token": "00ff" * 8}
WHOLE = {"crc": 7, "digest": DIGEST}
PATCHID = {"encoding": "delta-1", "epoch": 1, "version": 2}
SAMPLES: dict[str, Json] = {  # of objects whose types do not tell enough
    "running": RUNNING,
    "shared": SHARED,
    "whole": WHOLE,
    "patchid": PATCHID,
    "patch": {**PATCHID, "digest": DIGEST, "nbytes": 70_000},
}
NAME_LARGEST = "Az09._-" + "x" * 121
EXTREMES: dict[str, dict[str, Json]] = {  # the same, and what they are called
    "running": {"not hashed": {**RUNNING, "digest": ""}},
    "shared": {"largest": {**SHARED, "path": "\u00e9" * 4096}},
    "patchid": {"of another encoding": {**PATCHID, "encoding": NAME_LARGEST}},
    "patch": {},
}
BAD_NAMES = ["", "a" * 129, "a b", "a/b", "a\n", "\u00fc", "a\u0000"]
UNKNOWN: Json = {"zukunft": [1, {"a": None}], "\u00fc": 0.5}
FITS_BYTES = 60_000  # of a value, so that its header is not too long


def directions() -> Iterator[tuple[str, Message]]:
    """Yield each message with the side that sends it."""
    for side in ("worker", "publisher", "observer"):
        for message in PROTOCOL.sent_by(side):
            if side != "observer" or message.sender == "observer":
                yield f"from_{side}", message


def fields_of(name: str) -> list[Field]:
    """Return the fields of an object."""
    return [*PROTOCOL.objects[name].fields]


def sample(kind: Type) -> object:
    """Return an ordinary value of a type."""
    match kind:
        case Integer():
            return kind.least + 3
        case Boolean():
            return True
        case Name():
            return "policy"
        case Hex():
            return DIGEST if kind.digits == 64 else "00ff" * (kind.digits // 4)
        case Text():
            return "a reason \u00fcber \U0001f69a"
        case Base64():
            return "AAECAwQFBgcICQoLDA0ODw=="
        case OneOf():
            return kind.words[-1]
        case Object():
            made = {field.name: sample(field.type) for field in fields_of(kind.name)}
            return copy.deepcopy(SAMPLES.get(kind.name, made))
        case Nullable():
            return sample(kind.inner)
        case Array():
            return [sample(kind.item)] + [None] * isinstance(kind.item, Nullable)
        case Map():
            others = {"critic": None} if isinstance(kind.value, Nullable) else {}
            return {_key(kind.key): sample(kind.value), **others}


def _key(kind: Type) -> str:
    return str(sample(kind)) if isinstance(kind, Name) else 'a\nb\u0000"\\ \u00fcber'


def greatest(kind: Type) -> object:
    """Return the greatest integer, or an ordinary value of another type."""
    match kind:
        case Integer():
            return kind.most
        case Nullable():
            return greatest(kind.inner)
        case _:
            return sample(kind)


def extremes(kind: Type) -> dict[str, object]:
    """Return what values of a type may just be, and what each is called."""
    found: dict[str, object] = {}
    match kind:
        case Integer():
            found = {str(each): each for each in (kind.least, kind.most)}
        case Name():
            found = {"largest": NAME_LARGEST}
        case Hex():
            found = {"empty": ""} if kind.empty else {}
        case Text():
            found = {"largest": "\u00e9" * kind.most, "empty": ""}
        case OneOf():
            found = {word or "empty": word for word in kind.words}
        case Object():
            whole = {field.name: sample(field.type) for field in fields_of(kind.name)}
            made = {
                f"{field.name} {shown}": {**SAMPLES.get(kind.name, whole), field.name: value}
                for field in fields_of(kind.name)
                for shown, value in extremes(field.type).items()
            }
            found = {**EXTREMES.get(kind.name, made)}
        case Nullable():
            found = {**extremes(kind.inner), "null": None}
        case Array():
            found = {"largest": [greatest(kind.item)] * kind.most}
            found |= {"of none": [None]} if isinstance(kind.item, Nullable) else {}
        case Map():
            found = {"largest": _entries(kind, kind.most, greatest(kind.value)), "empty": {}}
            if isinstance(kind.key, Text) and isinstance(kind.value, Text):
                found["of the longest text"] = {"": "\u00e9" * kind.value.most}
            if [*objects_in(kind.value)]:
                for shown, value in extremes(kind.value).items():
                    found["of none" if value is None else shown] = {_key(kind.key): value}
        case _:
            pass
    return {shown: value for shown, value in found.items() if len(text_of(value)) < FITS_BYTES}


def _entries(kind: Map, count: int, value: object) -> Json:
    width = kind.key.most if isinstance(kind.key, Text) else 1
    return {f"{number:0{width}d}": value for number in range(count)}


def bad_values(kind: Type) -> list[object]:
    """Return values that are none of a type."""
    found: list[object] = []
    match kind:
        case Integer():
            found = [kind.least - 1, kind.most + 1, kind.least + 0.5, str(kind.least), True, None]
        case Boolean():
            found = [0, 1, "true", None]
        case Name():
            found = [*BAD_NAMES, 1, None, ["a"]]
        case Hex():
            bytes_, right = kind.digits // 2, str(sample(kind))
            found = ["00" * (bytes_ - 1), "00" * (bytes_ + 1), "zz" * bytes_, "AB" * bytes_]
            found += [right + "\n", 0, "\n" if kind.empty else "", None]
        case Text():
            found = ["x" * (kind.most + 1), 1, None, ["a"]]
        case Base64():
            found = ["A", "A?==", 1, None]
        case OneOf():
            found = [word for word in ("later", "", 1, None) if word not in kind.words]
        case Object():
            whole = sample(kind)
            assert isinstance(whole, dict)
            found = [DIGEST, [*whole.values()], False, {}, None]
            for field in fields_of(kind.name):
                if field.required:
                    found.append({name: v for name, v in whole.items() if name != field.name})
                found += [{**whole, field.name: bad} for bad in bad_values(field.type)[:3]]
        case Nullable():
            found = [value for value in bad_values(kind.inner) if value is not None]
        case Array():
            found = [sample(kind.item), {}, None, *([bad] for bad in bad_values(kind.item))]
            found.append([greatest(kind.item)] * (kind.most + 1))
        case Map():
            value = sample(kind.value)
            found = [_key(kind.key), [_key(kind.key)], None]
            found += [{bad: value} for bad in bad_values(kind.key) if isinstance(bad, str)]
            found += [{_key(kind.key): bad} for bad in bad_values(kind.value)]
            found.append(_entries(kind, kind.most + 1, value))
    return [value for value in found if len(text_of(value)) < FITS_BYTES]


def payload_of(
    message: Message, *, optional: bool = False, header: Json | None = None
) -> list[bytes]:
    """Return the payload frames that a message must have, or those that it may have as well."""
    if message.payloads == (1, 1):
        return [b"\x00\x01\x02"]
    return [LAYOUT] if message.payloads[1] and (optional or (header or {}).get("whole")) else []


def header_of(message: Message, fields: Sequence[Field], *, full: bool = False) -> Json:
    """Return a header with all of these fields, or with the required ones alone."""
    values = {field.name: sample(field.type) for field in fields if full or field.required}
    if message.name == "chunk":
        values["crc"] = crc32c(payload_of(message)[0])
    return {"wbp": 1, "type": message.name, **values}


def ok(header: Json, fields: Sequence[Field], payloads: int) -> Json:
    """Return what a header must decode to: its known fields, the missing ones by default."""
    defaults = {field.name: field.default for field in fields if not field.required}
    known = {field.name: header[field.name] for field in fields if field.name in header}
    return {"ok": {"type": header["type"], **defaults, **known}, "payloads": payloads}


def case(
    name: str, direction: str, frames: list[bytes], expect: Json, note: str | None = None
) -> Json:
    """Return one case; frames are bytes here and become hexadecimal digits or files later."""
    return {
        "name": name,
        "direction": direction,
        **({"note": note} if note else {}),
        "frames": frames,
        "expect": expect,
    }


MALFORMED: Json = {"error": "malformed"}


def cases() -> Iterator[Json]:
    """Yield those of `messages.json`: what workers of levels 1 to 4 exchange with publishers."""
    for direction, message in directions():
        if message.page in ("index", "worker"):
            yield from _of_message(direction, message)
    yield from _evolution()
    yield from _headers()
    yield from _tolerated()
    yield from _numbers()


def feature_cases(page: str, *sides: str) -> Iterator[Json]:
    """Yield the messages of a page, between workers and publishers or from these sides."""
    for direction, message in directions():
        observed = "observer" in (message.sender, message.receiver)
        if message.page == page and observed == ("observer" in sides):
            yield from _of_message(direction, message)


def applying_cases() -> Iterator[Json]:
    """Yield the fields of workers that can tell that an apply has failed half-way, or waits."""
    message = PROTOCOL.messages["failed"]
    fields = own(message)
    header = {**header_of(message, fields, full=True), "intact": False}
    expect = ok(header, fields, 0)
    yield case("from_worker failed intact false", "from_worker", [text_of(header)], expect)
    yield from further_cases("waits")


def further_cases(*names: str, page: str = "") -> Iterator[Json]:
    """Yield the cases of fields that not everybody knows: of these names, or of a page."""
    for direction, message in directions():
        known = own(message)
        for field in message.fields:
            if field not in known and (field.name in names or field.page == page):
                header = header_of(message, known)
                yield from _field(direction, message, field, header, [*known, field])


def sealing_cases() -> Iterator[Json]:
    """Yield the messages and fields of sides that seal."""
    yield from feature_cases("keys")
    yield from further_cases(page="keys")


def _of_message(direction: str, message: Message) -> Iterator[Json]:
    fields, about = own(message), f"{direction} {message.name}"
    for full in (False, True):
        header = header_of(message, fields, full=full)
        payloads = payload_of(message, optional=full)
        expect = ok(header, fields, len(payloads))
        name = f"{about} {'full' if full else 'minimal'}"
        yield case(name, direction, [text_of(header), *payloads], expect)
    more = {**UNKNOWN, **header, "Type": "x"}
    yield case(f"{about} with unknown fields", direction, [text_of(more), *payloads], expect)
    header, payloads = header_of(message, fields), payload_of(message)
    for field in fields:
        if field.required:
            less = {name: value for name, value in header.items() if name != field.name}
            frames = [text_of(less), *payloads]
            yield case(f"{about} without {field.name}", direction, frames, MALFORMED)
        yield from _field(direction, message, field, header, fields)
    yield case(f"{about} cut short", direction, [text_of(header)[:-1], *payloads], MALFORMED)
    frames = [text_of(header)] + [b"abc"] * (message.payloads[1] + 1)
    yield case(f"{about} one payload too many", direction, frames, MALFORMED)
    if message.payloads[0]:
        yield case(f"{about} without payload", direction, [text_of(header)], MALFORMED)
    if message.name == "announce":
        whole = text_of({**header, "whole": WHOLE})
        yield case(f"{about} whole without payload", direction, [whole], MALFORMED)
        frames = [whole, b"abc", b"abc"]
        yield case(f"{about} whole, two payloads", direction, frames, MALFORMED)


def _field(
    direction: str, message: Message, field: Field, header: Json, known: Sequence[Field]
) -> Iterator[Json]:
    """Yield what a field may just be, given alone, and what it may not be."""
    about = f"{direction} {message.name}"
    values = {} if field in own(message) else {"given": sample(field.type)}
    for shown, value in (values | extremes(field.type)).items():
        if field in own(message) or value != field.default:  # others need not know the field
            changed = {**header, field.name: value}
            payloads = payload_of(message, header=changed)
            expect = ok(changed, known, len(payloads))
            name = f"{about} {field.name} {shown}"
            yield case(name, direction, [text_of(changed), *payloads], expect)
    if [*objects_in(field.type)]:
        value = sample(field.type)
        changed = {**header, field.name: value}
        payloads = payload_of(message, header=changed)
        more = {**header, field.name: _with_unknown(field.type, value)}
        expect = ok(changed, known, len(payloads))
        name = f"{about} {field.name} with unknown fields inside"
        yield case(name, direction, [text_of(more), *payloads], expect)
    for number, value in enumerate(bad_values(field.type)):
        changed = {**header, field.name: value}
        frames = [text_of(changed), *payload_of(message, header=changed)]
        yield case(f"{about} bad {field.name} {number}", direction, frames, MALFORMED)


def _with_unknown(kind: Type, value: object) -> object:
    """Return a value with unknown fields in each of its objects."""
    match kind, value:
        case Object(), dict():
            inner = {
                field.name: _with_unknown(field.type, value[field.name])
                for field in fields_of(kind.name)
                if field.name in value
            }
            return {**UNKNOWN, **inner, next(iter(value)).title(): 1}
        case Nullable(), _:
            return None if value is None else _with_unknown(kind.inner, value)
        case Array(), list():
            return [_with_unknown(kind.item, each) for each in value]
        case Map(), dict():
            return {key: _with_unknown(kind.value, each) for key, each in value.items()}
        case _:
            return value


def _evolution() -> Iterator[Json]:
    """Yield what a newer peer may say: features and codes that nobody knows yet."""
    news: dict[str, tuple[str, object]] = {
        "hello": ("features", ["zukunft", "x.1"]),
        "welcome": ("features", ["zukunft.1"]),
        "failed": ("code", "zukunft"),
        "refuse": ("code", "zukunft"),
    }
    for direction, message in directions():
        if message.name in news:
            field, value = news[message.name]
            header = {**header_of(message, own(message)), field: value}
            expect = ok(header, own(message), 0)
            name = f"evolution {direction} {message.name} unknown {field}"
            yield case(name, direction, [text_of(header)], expect)


EMPTY_FETCH: Json = {"wbp": 1, "type": "fetch", "model": "m", "epoch": 1, "version": 0}
PING_HEADER = b'{"wbp":1,"type":"ping"}'
PING_READ: Json = {
    "ok": {"type": "ping", "token": 0, "subscribed": False, "shared": False},
    "payloads": 0,
}


def _full() -> bytes:
    """Return a header of the greatest length."""
    return PING_HEADER[:-1] + b',"x":"' + b"x" * (65536 - len(PING_HEADER) - 7) + b'"}'


def _headers() -> Iterator[Json]:
    """Yield what concerns the header as such, whatever it says."""
    ping = PING_HEADER
    malformed: dict[str, bytes] = {
        "not JSON": b"ping",
        "an empty header": b"",
        "a zero byte": b"\0",
        "half a header": ping[:-1],
        "text after the object": ping + b"x",
        "two objects": ping + ping,
        "a byte order mark": b"\xef\xbb\xbf" + ping,
        "UTF-16": ping.decode().encode("utf-16-le"),
        "single quotes": b"{'wbp':1,'type':'ping'}",
        "a trailing comma": b'{"wbp":1,"type":"ping",}',
        "an array": b"[1]",
        "a number": b"1",
        "a string": b'"ping"',
        "null": b"null",
        "no type": b'{"wbp":1}',
        "a type that is a number": b'{"wbp":1,"type":1}',
        "an unknown type": b'{"wbp":1,"type":"sing"}',
        "a type in capitals": b'{"wbp":1,"type":"PING"}',
        "a protocol number in a string": b'{"wbp":"1","type":"ping"}',
        "a protocol number that is true": b'{"wbp":true,"type":"ping"}',
        "a header of 65537 bytes": _full()[:-2] + b'x"}',
        "a type twice": b'{"wbp":1,"type":"sing","type":"song"}',
        "a comment": ping + b"//",
        "an unquoted key": b'{wbp:1,"type":"ping"}',
        "a leading zero": b'{"wbp":1,"type":"ping","token":01}',
        "a plus sign": b'{"wbp":1,"type":"ping","token":+1}',
        "a hexadecimal number": b'{"wbp":1,"type":"ping","token":0x1}',
        "not a number": b'{"wbp":1,"type":"ping","token":NaN}',
        "an integer of 10^400": b'{"wbp":1,"type":"ping","token":1' + b"0" * 400 + b"}",
        "a text that is not closed": b'{"wbp":1,"type":"ping","x":"}',
        "an escape that is none": rb'{"wbp":1,"type":"ping","x":"\q"}',
        "a line feed in a text": b'{"wbp":1,"type":"ping","x":"a\nb"}',
        "a colon too few": b'{"wbp":1,"type" "ping"}',
        "a brace too few in an unknown field": b'{"wbp":1,"type":"ping","x":{}',
    }
    for name, header in malformed.items():
        yield case(f"header: {name}", "from_worker", [header], MALFORMED)
        yield case(f"header: {name}, from a publisher", "from_publisher", [header], MALFORMED)
    for direction in ("from_worker", "from_publisher"):
        yield case(f"header: no frames, {direction}", direction, [], MALFORMED)
    text = b'{"wbp":1,"type":"abort","model":"m","epoch":1,"version":1,"text":"\xff\xfe"}'
    yield case("header: a text that is not UTF-8", "from_publisher", [text], MALFORMED)
    welcome = PROTOCOL.messages["welcome"]
    header = text_of(header_of(welcome, own(welcome), full=True))
    yield case("header: a welcome from a worker", "from_worker", [header], MALFORMED)
    fetch = text_of(EMPTY_FETCH)
    yield case("header: a fetch from a publisher", "from_publisher", [fetch], MALFORMED)


def _tolerated() -> Iterator[Json]:
    """Yield headers that look odd: some are right, of some either reading is."""
    many = b"".join(b',"x%d":[%d]' % (index, index) for index in range(1000))
    for name, header in {
        "white space around": b' \r\n\t{ "wbp" : 1 , "type" : "ping" }\n',
        "fields in another order": b'{"type":"ping","wbp":1}',
        "escapes": rb'{"wbp":1,"type":"p\u0069ng"}',
        "a header of 65536 bytes": _full(),
        "nested 15 deep": PING_HEADER[:-1] + b',"x":' + b"[" * 14 + b"]" * 14 + b"}",
        "a thousand unknown fields": PING_HEADER[:-1] + many + b"}",
    }.items():
        yield case(f"header: {name}", "from_worker", [header], PING_READ)
        yield case(f"header: {name}, from a publisher", "from_publisher", [header], PING_READ)
    deep = PING_HEADER[:-1] + b',"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    for name, header in {
        "nested 30000 deep": deep,
        "an unknown field that is not UTF-8": b'{"wbp":1,"type":"ping","x":"\xff"}',
        "half a surrogate pair": rb'{"wbp":1,"type":"ping","x":"\ud800"}',
        "a field twice": b'{"wbp":1,"type":"ping","token":1,"token":0}',
        "an integer with a fraction of zero": b'{"wbp":1,"type":"ping","token":0.0}',
        "minus zero": b'{"wbp":1,"type":"ping","token":-0}',
        "an integer with an exponent": b'{"wbp":1,"type":"ping","token":0e0}',
    }.items():
        note = "a sender must not do this; a receiver may read it or refuse it, but must go on"
        either = {**PING_READ, **MALFORMED}
        yield case(f"header: {name}", "from_worker", [header], either, note)
        yield case(f"header: {name}, from a publisher", "from_publisher", [header], either, note)


def _numbers() -> Iterator[Json]:
    """Yield headers of other protocols, which may look strange in every other respect."""
    headers = {f"protocol number {n}": text_of({"wbp": n, "type": "ping"}) for n in (2, 0, 99)}
    headers |= {
        "no protocol number": b'{"type":"ping"}',
        "an empty object": b"{}",
        "a new type of another protocol": b'{"wbp":2,"type":"new"}',
        "a new type without a protocol number": b'{"type":"new"}',
        "no type, of another protocol": b'{"wbp":2}',
        "a type that is a number, of another protocol": b'{"type":1,"wbp":2}',
        "a missing field, of another protocol": b'{"wbp":2,"type":"fetch"}',
        "a field of another type, of another protocol": b'{"wbp":2,"type":"ping","token":"x"}',
    }
    wrong: Json = {"error": "protocol-version"}
    for name, header in headers.items():
        yield case(f"header: {name}", "from_worker", [header], wrong)
        yield case(f"header: {name}, from a publisher", "from_publisher", [header], wrong)
    frames = [headers["protocol number 2"], b"abc"]
    yield case("header: a payload too many, of another protocol", "from_worker", frames, wrong)
