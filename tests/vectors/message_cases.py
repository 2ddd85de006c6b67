"""The cases of `messages.json`: every message, whole and minimal, and every way to get it wrong.

`FIELDS` says once more, independently of the package, what each message holds.
"""

import copy
from collections.abc import Iterator

from weightbus.tests.vectors.parts import INTEGER_MAX, Json, crc32c, padded, text_of

REQUIRED = object()  # a field without a default

Field = tuple[str, object]  # its kind, and its default

LAYOUT = padded({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}})
DIGEST = "0123456789abcdef" * 4
OF_VERSION: dict[str, Field] = {
    "model": ("name", REQUIRED),
    "epoch": ("count", REQUIRED),
    "version": ("positive", REQUIRED),
}
WITH_DIGEST: dict[str, Field] = {**OF_VERSION, "digest": ("hex64", REQUIRED)}
PING: dict[str, Field] = {
    "token": ("count", 0),
    "subscribed": ("boolean", False),
    "shared": ("boolean", False),
}

FROM_WORKER: dict[str, dict[str, Field]] = {
    "hello": {
        "name": ("name", REQUIRED),
        "instance": ("hex32", REQUIRED),
        "models": ("running", REQUIRED),
        "epoch": ("count", 0),
        "age_ms": ("count", 0),
        "features": ("names", []),
        "client": ("label", ""),
        "host": ("label", ""),
        "pid": ("count", 0),
    },
    "fetch": {
        "model": ("name", REQUIRED),
        "epoch": ("count", REQUIRED),
        "version": ("count", REQUIRED),
        "first": ("index", 0),
        "count": ("fetched", 0),
        "layout": ("boolean", False),
    },
    "progress": {**OF_VERSION, "chunks": ("count", REQUIRED), "phase": ("phase", "receiving")},
    "staged": WITH_DIGEST,
    "applied": {**OF_VERSION, "digest": ("digest", REQUIRED)},
    "failed": {
        **OF_VERSION,
        "code": ("name", REQUIRED),
        "text": ("text", REQUIRED),
        "intact": ("boolean", True),
    },
    "bye": {},
    "ping": PING,
    "pong": {"token": ("count", 0), "epoch": ("count", 0), "models": ("versions", {})},
}
FROM_PUBLISHER: dict[str, dict[str, Field]] = {
    "welcome": {
        "epoch": ("count", REQUIRED),
        "data": ("text", REQUIRED),
        "ping_ms": ("ping_ms", REQUIRED),
        "lost_ms": ("lost_ms", REQUIRED),
        "models": ("versions", REQUIRED),
        "shared": ("shared", None),
        "age_ms": ("count", 0),
        "features": ("names", []),
    },
    "announce": {
        **OF_VERSION,
        "layout": ("hex64", REQUIRED),
        "layout_bytes": ("layout_bytes", REQUIRED),
        "nbytes": ("count", REQUIRED),
        "chunk_bytes": ("chunk_bytes", REQUIRED),
        "commit": ("commit", REQUIRED),
        "acknowledge": ("acknowledge", REQUIRED),
        "encoding": ("name", REQUIRED),
        "encryption": ("optional_name", None),
        "shared": ("shared", None),
        "hash": ("boolean", False),
        "whole": ("whole", None),
    },
    "chunk": {**OF_VERSION, "index": ("index", REQUIRED), "crc": ("crc", REQUIRED)},
    "end": WITH_DIGEST,
    "commit": WITH_DIGEST,
    "abort": {**OF_VERSION, "text": ("text", "")},
    "beacon": {
        "model": ("name", REQUIRED),
        "epoch": ("count", REQUIRED),
        "version": ("count", REQUIRED),
    },
    "refuse": {
        "code": ("name", REQUIRED),
        "text": ("text", REQUIRED),
        "model": ("optional_name", None),
        "epoch": ("count", 0),
        "version": ("count", 0),
    },
    "ping": PING,
    "pong": FROM_WORKER["pong"],
}
# Messages of a feature, which others need not know: a table of their own.
MAPPING: dict[str, dict[str, Field]] = {
    "prepare": {
        "model": ("name", REQUIRED),
        "epoch": ("count", REQUIRED),
        "nbytes": ("count", REQUIRED),
        "shared": ("segment", REQUIRED),
    },
}
RENAMING: dict[str, dict[str, Field]] = {
    "rename": {
        "model": ("name", REQUIRED),
        "epoch": ("count", REQUIRED),
        "version": ("positive", REQUIRED),
        "was": ("run", REQUIRED),
    },
}
SEALING: dict[str, dict[str, Field]] = {
    "rekey": {"epoch": ("count", REQUIRED), "keys": ("keys", REQUIRED)},
    "sealed_chunk": {
        **OF_VERSION,
        "index": ("index", REQUIRED),
        "key": ("hex16", REQUIRED),
        "tag": ("hex32", REQUIRED),
    },
    "sealed_message": {
        "key": ("hex16", REQUIRED),
        "count": ("positive", REQUIRED),
        "sealed": ("base64", REQUIRED),
    },
}
# Fields of the feature `delta-1`, of messages that others know without them.
OF_PATCH: dict[str, Field] = {"patch": ("patchid", None)}
PATCHING: dict[tuple[str, str], dict[str, Field]] = {
    ("from_worker", "fetch"): {**OF_PATCH, "unpatched": ("label", "")},
    ("from_worker", "progress"): OF_PATCH,
    ("from_worker", "staged"): OF_PATCH,
    ("from_worker", "applied"): {**OF_PATCH, "decode_us": ("count", 0), "note": ("text", "")},
    ("from_publisher", "announce"): {"keep": ("boolean", False), "patches": ("patches", [])},
    ("from_publisher", "chunk"): OF_PATCH,
    ("from_publisher", "sealed_chunk"): OF_PATCH,
    ("from_publisher", "end"): OF_PATCH,
}
# What is said of a version, which others pass over.
SAID: dict[str, Field] = {"metadata": ("metadata", {})}
METADATA: dict[tuple[str, str], dict[str, Field]] = {
    ("from_publisher", "announce"): SAID,
    ("from_publisher", "rename"): SAID,
}
CHECKING: dict[str, tuple[str, dict[str, Field]]] = {
    "check": ("from_publisher", {**OF_VERSION, "first": ("count", 0)}),
    "checked": (
        "from_worker",
        {
            **OF_VERSION,
            "first": ("count", 0),
            "sums": ("sums", []),
            "code": ("optional_name", None),
            "text": ("text", ""),
        },
    ),
}
DIRECTIONS = {"from_worker": FROM_WORKER, "from_publisher": FROM_PUBLISHER}

INTEGERS: dict[str, tuple[int, int]] = {  # by kind: the least and the greatest
    "count": (0, INTEGER_MAX),
    "positive": (1, INTEGER_MAX),
    "index": (0, 2**20 - 1),
    "fetched": (0, 64),
    "crc": (0, 2**32 - 1),
    "ping_ms": (1, 3_600_000),
    "lost_ms": (2, 36_000_000),
    "layout_bytes": (10, 100_000_008),
    "chunk_bytes": (1, 2**26),
}
RUNNING = {"epoch": 1, "version": 2, "digest": DIGEST}
SHARED = {"path": "/proc/4711/fd/12", "token": "00ff" * 8}
WHOLE = {"crc": 7, "digest": DIGEST}
PATCHID = {"encoding": "delta-1", "epoch": 1, "version": 2}
PATCH = {**PATCHID, "digest": DIGEST, "nbytes": 70_000}
SAMPLES: dict[str, object] = {
    "name": "policy",
    "optional_name": "aes-256-gcm",
    "text": "a reason \u00fcber \U0001f69a",
    "label": "my-client/1.0 \u00fcber \U0001f69a",
    "hex16": "00ff" * 4,
    "hex32": "00ff" * 8,
    "keys": [DIGEST],
    "base64": "AAECAwQFBgcICQoLDA0ODw==",
    "hex64": DIGEST,
    "digest": DIGEST,
    "shared": SHARED,
    "segment": SHARED,
    "whole": WHOLE,
    "patchid": PATCHID,
    "patches": [PATCH],
    "running": {"policy": RUNNING, "critic": None},
    "run": RUNNING,
    "versions": {"policy": 7, "critic": 0},
    "names": ["a", "b.c"],
    "boolean": True,
    "sums": [7, None],
    "metadata": {"step": "12000", "commit \u00fcber \U0001f69a": 'a\nb\u0000"\\'},
    "phase": "applying",
    "commit": "together",
    "acknowledge": "staged",
}
BAD_NAMES = ["", "a" * 129, "a b", "a/b", "a\n", "\u00fc", "a\u0000"]
BAD_HEX64: list[object] = ["00" * 31, "00" * 33, "zz" * 32, "AB" * 32, DIGEST + "\n", 0]
BAD_VALUES: dict[str, list[object]] = {
    "name": [*BAD_NAMES, 1, None, ["a"]],
    "optional_name": ["", "a b", 1],
    "text": ["x" * 4097, 1, None],
    "label": ["x" * 257, 1, None],
    "hex16": ["00" * 7, "00" * 9, "0G" * 8, "AB" * 8, 0],
    "keys": [DIGEST, [DIGEST] * 3, [1], [""], [None], None],
    "base64": ["A", "A?==", 1, None],
    "hex32": ["00" * 15, "00" * 17, "0G" * 16, "AB" * 16, 0],
    "hex64": [*BAD_HEX64, ""],
    "digest": [*BAD_HEX64, "\n", None],
    "shared": [
        SHARED["path"],
        [SHARED["path"], SHARED["token"]],
        False,
        {},
        {"path": SHARED["path"]},
        {"token": SHARED["token"]},
        {**SHARED, "path": "x" * 4097},
        {**SHARED, "path": None},
        {**SHARED, "token": "00" * 15},
        {**SHARED, "token": "AB" * 16},
    ],
    "whole": [
        DIGEST,
        True,
        {},
        {"crc": 7},
        {"digest": DIGEST},
        {**WHOLE, "crc": 2**32},
        {**WHOLE, "crc": -1},
        {**WHOLE, "crc": "7"},
        {**WHOLE, "digest": ""},
        {**WHOLE, "digest": None},
    ],
    "patchid": [
        "delta-1",
        {},
        {"epoch": 1, "version": 2},
        {**PATCHID, "encoding": "a b"},
        {**PATCHID, "epoch": -1},
        {**PATCHID, "version": 0},
        {**PATCHID, "version": None},
    ],
    "patches": [
        PATCH,
        None,
        [None],
        [PATCHID],
        [PATCH] * 9,
        [{**PATCH, "digest": ""}],
        [{**PATCH, "nbytes": 0}],
        [{**PATCH, "nbytes": INTEGER_MAX + 1}],
    ],
    "running": [
        ["policy"],
        {"a b": None},
        {"policy": 1},
        {"policy": {"epoch": 1, "version": 2}},
        {"policy": {**RUNNING, "version": 0}},
        {"policy": {**RUNNING, "epoch": -1}},
        {"policy": {**RUNNING, "digest": "00"}},
        {f"m{i}": None for i in range(65)},
    ],
    "run": [
        None,
        1,
        [1, 2, DIGEST],
        {"epoch": 1, "version": 2},
        {**RUNNING, "version": 0},
        {**RUNNING, "epoch": -1},
        {**RUNNING, "digest": "00"},
        {**RUNNING, "digest": None},
    ],
    "versions": [
        ["policy"],
        {"a b": 1},
        {"policy": None},
        {"policy": -1},
        {"policy": INTEGER_MAX + 1},
        {f"m{i}": 1 for i in range(65)},
    ],
    "names": ["a", [1], ["a b"], [f"f{i}" for i in range(65)]],
    "boolean": [0, 1, "true", None],
    "sums": [7, [-1], [2**32], ["7"], [0.5], [True], {}, None, [0] * 4097],
    "metadata": [
        "step",
        ["step"],
        None,
        {"step": 12_000},
        {"step": None},
        {"step": ["12000"]},
        {"x" * 129: ""},
        {"step": "x" * 4097},
        {f"m{i}": "" for i in range(33)},
    ],
    "phase": ["waiting", "", 1],
    "commit": ["later", "", 1, None],
    "acknowledge": ["applying", "", 1, None],
}
BAD_VALUES["segment"] = [*BAD_VALUES["shared"], None]
NAME_LARGEST = "Az09._-" + "x" * 121
EXTREMES: dict[str, dict[str, object]] = {  # by kind: what may just be, and what it is called
    "name": {"largest": NAME_LARGEST},
    "optional_name": {"largest": NAME_LARGEST, "null": None},
    "text": {"largest": "\u00e9" * 4096, "empty": ""},
    "label": {"largest": "\u00e9" * 256, "empty": ""},
    "digest": {"empty": ""},
    "keys": {"largest": [DIGEST, DIGEST[::-1]]},
    "shared": {"largest": {**SHARED, "path": "\u00e9" * 4096}, "null": None},
    "segment": {"largest": {**SHARED, "path": "\u00e9" * 4096}},
    "whole": {"null": None},
    "patchid": {"of another encoding": {**PATCHID, "encoding": NAME_LARGEST}},
    "patches": {"largest": [PATCH] * 8},
    "running": {
        "largest": {f"m{i}": RUNNING for i in range(64)},
        "not hashed": {"policy": {**RUNNING, "digest": ""}},
    },
    "run": {"not hashed": {**RUNNING, "digest": ""}},
    "versions": {"largest": {f"m{i}": INTEGER_MAX for i in range(64)}},
    "names": {"largest": [f"f{i}" for i in range(64)]},
    "metadata": {
        "largest": {f"{i:0128d}": "" for i in range(32)},
        "of the longest text": {"": "\u00e9" * 4096},
        "empty": {},
    },
    "sums": {"largest": [2**32 - 1] * 4096, "of none": [None]},
}


def sample(kind: str) -> object:
    """Return an ordinary value of a kind."""
    return INTEGERS[kind][0] + 3 if kind in INTEGERS else copy.deepcopy(SAMPLES[kind])


def extremes(kind: str) -> dict[str, object]:
    """Return what values of a kind may just be, and what each is called."""
    return {str(i): i for i in INTEGERS.get(kind, ())} | EXTREMES.get(kind, {})


def bad_values(kind: str) -> list[object]:
    """Return values that are none of a kind."""
    if kind not in INTEGERS:
        return BAD_VALUES.get(kind, [])
    least, greatest = INTEGERS[kind]
    return [least - 1, greatest + 1, least + 0.5, str(least), True, None]


def payload_of(kind: str, *, optional: bool) -> list[bytes]:
    """Return the payload frames of a message: those it must have, or those it may have as well."""
    if kind in ("chunk", "sealed_chunk"):
        return [b"\x00\x01\x02"]
    return [LAYOUT] if kind in ("announce", "sealed_message") and optional else []


def message(kind: str, fields: dict[str, Field], *, full: bool) -> Json:
    """Return a header with all fields, or with the required ones alone."""
    values: Json = {"wbp": 1, "type": kind}
    for name, (value_kind, default) in fields.items():
        if full or default is REQUIRED:
            values[name] = sample(value_kind)
    if kind == "chunk":
        values["crc"] = crc32c(payload_of(kind, optional=False)[0])
    return values


def ok(header: Json, fields: dict[str, Field], payloads: int) -> Json:
    """Return what a header must decode to: its known fields, the missing ones by default."""
    defaults = {n: d for n, (_, d) in fields.items() if d is not REQUIRED}
    known = {n: v for n, v in header.items() if n in fields}
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
    """Yield all cases."""
    for direction, types in DIRECTIONS.items():
        for kind, fields in types.items():
            yield from _valid(direction, kind, fields)
            yield from _broken(direction, kind, fields)
    yield from _headers()
    yield from _tolerated()
    yield from _numbers()
    yield from _nested()


def mapping_cases() -> Iterator[Json]:
    """Yield the cases of the feature `mapping`."""
    for kind, fields in MAPPING.items():
        yield from _valid("from_publisher", kind, fields)
        yield from _broken("from_publisher", kind, fields)


def applying_cases() -> Iterator[Json]:
    """Yield what only those say who can tell that an apply has failed half-way, or waits."""
    fields = FROM_WORKER["failed"]
    header = {**message("failed", fields, full=True), "intact": False}
    expect = ok(header, fields, 0)
    yield case("from_worker failed intact false", "from_worker", [text_of(header)], expect)
    yield from _further({("from_worker", "progress"): {"waits": ("label", "")}})


def renaming_cases() -> Iterator[Json]:
    """Yield the messages of the feature `renaming`."""
    for kind, fields in RENAMING.items():
        yield from _valid("from_publisher", kind, fields)
        yield from _broken("from_publisher", kind, fields)


def patching_cases() -> Iterator[Json]:
    """Yield the fields of the feature `delta-1`."""
    yield from _further(PATCHING)
    inside = {"zukunft": [1], **PATCHID, "Epoch": "x"}
    header = message("end", FROM_PUBLISHER["end"], full=False)
    expect = ok({**header, "patch": PATCHID}, {**FROM_PUBLISHER["end"], **OF_PATCH}, 0)
    frames = [text_of({**header, "patch": inside})]
    yield case(
        "from_publisher end patch with unknown fields inside", "from_publisher", frames, expect
    )


def metadata_cases() -> Iterator[Json]:
    """Yield the fields that say something of a version."""
    yield from _further(METADATA)


def _further(table: dict[tuple[str, str], dict[str, Field]]) -> Iterator[Json]:
    """Yield the cases of fields that not everybody knows."""
    for (direction, kind), fields in table.items():
        known = {**DIRECTIONS[direction], **SEALING, **RENAMING}[kind]
        header = message(kind, known, full=False)
        payloads = payload_of(kind, optional=False)
        for field, (value_kind, default) in fields.items():
            values = {"given": sample(value_kind)} | extremes(value_kind)
            for shown, value in values.items():
                if value == default:
                    continue
                changed = {**header, field: value}
                expect = ok(changed, {**known, field: (value_kind, REQUIRED)}, len(payloads))
                name = f"{direction} {kind} {field} {shown}"
                yield case(name, direction, [text_of(changed), *payloads], expect)
            for number, value in enumerate(bad_values(value_kind)):
                frames = [text_of({**header, field: value}), *payloads]
                name = f"{direction} {kind} bad {field} {number}"
                yield case(name, direction, frames, MALFORMED)


def checking_cases() -> Iterator[Json]:
    """Yield the messages of the feature `checking`."""
    for kind, (direction, fields) in CHECKING.items():
        yield from _valid(direction, kind, fields)
        yield from _broken(direction, kind, fields)


def sealing_cases() -> Iterator[Json]:
    """Yield the messages of those who seal."""
    for kind, fields in SEALING.items():
        yield from _valid("from_publisher", kind, fields)
        yield from _broken("from_publisher", kind, fields)


def _valid(direction: str, kind: str, fields: dict[str, Field]) -> Iterator[Json]:
    for full in (False, True):
        header = message(kind, fields, full=full)
        payloads = payload_of(kind, optional=full)
        name = f"{direction} {kind} {'full' if full else 'minimal'}"
        expect = ok(header, fields, len(payloads))
        yield case(name, direction, [text_of(header), *payloads], expect)
    header = message(kind, fields, full=True)
    payloads = payload_of(kind, optional=True)
    expect = ok(header, fields, len(payloads))
    more = {"zukunft": [1, {"a": None}], "\u00fc": 0.5, **header, "Type": "x"}
    frames = [text_of(more), *payloads]
    yield case(f"{direction} {kind} with unknown fields", direction, frames, expect)
    header = message(kind, fields, full=False)
    payloads = payload_of(kind, optional=False)
    for field, (value_kind, _) in fields.items():
        values = extremes(value_kind)
        for shown, value in values.items():
            changed = {**header, field: value}
            expect = ok(changed, fields, len(payloads))
            name = f"{direction} {kind} {field} {shown}"
            yield case(name, direction, [text_of(changed), *payloads], expect)


def _broken(direction: str, kind: str, fields: dict[str, Field]) -> Iterator[Json]:
    header = message(kind, fields, full=False)
    payloads = payload_of(kind, optional=False)
    for field, (value_kind, default) in fields.items():
        if default is REQUIRED:
            less = {n: v for n, v in header.items() if n != field}
            frames = [text_of(less), *payloads]
            yield case(f"{direction} {kind} without {field}", direction, frames, MALFORMED)
        frames_after = [LAYOUT] if value_kind == "whole" else payloads
        for number, value in enumerate(bad_values(value_kind)):
            frames = [text_of({**header, field: value}), *frames_after]
            name = f"{direction} {kind} bad {field} {number}"
            yield case(name, direction, frames, MALFORMED)
    frames = [text_of(header)[:-1], *payloads]
    yield case(f"{direction} {kind} cut short", direction, frames, MALFORMED)
    most = 1 if kind in ("announce", "chunk", "sealed_chunk", "sealed_message") else 0
    frames = [text_of(header)] + [b"abc"] * (most + 1)
    yield case(f"{direction} {kind} one payload too many", direction, frames, MALFORMED)
    if kind in ("chunk", "sealed_chunk"):
        yield case(f"{direction} {kind} without payload", direction, [text_of(header)], MALFORMED)
    if kind == "announce":
        whole = text_of({**header, "whole": WHOLE})
        yield case(f"{direction} {kind} whole without payload", direction, [whole], MALFORMED)
        frames = [whole, b"abc", b"abc"]
        yield case(f"{direction} {kind} whole, two payloads", direction, frames, MALFORMED)


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
    for direction in DIRECTIONS:
        yield case(f"header: no frames, {direction}", direction, [], MALFORMED)
    text = b'{"wbp":1,"type":"abort","model":"m","epoch":1,"version":1,"text":"\xff\xfe"}'
    yield case("header: a text that is not UTF-8", "from_publisher", [text], MALFORMED)
    welcome = text_of(message("welcome", FROM_PUBLISHER["welcome"], full=True))
    yield case("header: a welcome from a worker", "from_worker", [welcome], MALFORMED)
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


def _nested() -> Iterator[Json]:
    """Yield unknown fields inside the objects that a header holds."""
    for kind, field, value in (
        ("announce", "shared", {"zukunft": [1], **SHARED, "Path": 1}),
        ("welcome", "shared", {"zukunft": [1], **SHARED, "Path": 1}),
    ):
        yield _with_more("from_publisher", kind, {field: value}, {field: SHARED})
    whole = {"zukunft": {}, **WHOLE, "Crc": "x"}
    fields = FROM_PUBLISHER["announce"]
    header = message("announce", fields, full=False)
    read = ok({**header, "whole": WHOLE}, fields, 1)
    frames = [text_of({**header, "whole": whole}), b"\0\1\2"]
    yield case(
        "from_publisher announce whole with unknown fields inside", "from_publisher", frames, read
    )
    more = {"policy": {"zukunft": None, **RUNNING, "Digest": 1}}
    yield _with_more("from_worker", "hello", {"models": more}, {"models": {"policy": RUNNING}})


def _with_more(direction: str, kind: str, sent: Json, read: Json) -> Json:
    """Return a case whose unknown fields stand inside a value."""
    fields = DIRECTIONS[direction][kind]
    header = message(kind, fields, full=False)
    expect = ok({**header, **read}, fields, 0)
    name = f"{direction} {kind} {next(iter(sent))} with unknown fields inside"
    return case(name, direction, [text_of({**header, **sent})], expect)
