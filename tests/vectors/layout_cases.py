"""The cases of `layouts.json`: headers of safetensors files that are layouts, and others."""

import hashlib
from collections.abc import Iterator

from weightbus.tests.vectors.parts import (
    INTEGER_MAX,
    Json,
    layout_header,
    padded,
    text_of,
)

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def info(dtype: str, shape: list[int], begin: int, end: int) -> Json:
    """Return what a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BYTE = info("U8", [1], 0, 1)


def cases() -> Iterator[Json]:
    """Yield all cases."""
    for name, header, entries, aliases in _valid():
        yield {"name": name, "header": header, "expect": {"ok": _layout(header, entries, aliases)}}
    for name, entries, aliases, order in _ordered():
        header = padded(entries)
        layout = {**_layout(header, entries, aliases), "order": order}
        yield {"name": name, "header": header, "expect": {"ok": layout}}
    for name, header in _malformed():
        yield {"name": name, "header": header, "expect": {"error": "layout-invalid"}}


def _layout(header: bytes, entries: Json, aliases: dict[str, str]) -> Json:
    tensors = [
        {"name": name, "dtype": i["dtype"], "shape": i["shape"], "begin": b, "end": e}
        for name, i in entries.items()
        if name != "__metadata__"
        for b, e in [i["data_offsets"]]
    ]
    return {
        "id": hashlib.sha256(header).hexdigest(),
        "nbytes": max((t["end"] for t in tensors), default=0),
        "tensors": sorted(tensors, key=lambda t: (t["begin"], t["end"], t["name"])),
        "aliases": aliases,
        "metadata": entries.get("__metadata__", {}),
        "order": [t["name"] for t in sorted(tensors, key=lambda t: (t["begin"], t["end"]))],
    }


def _every_dtype() -> Json:
    entries: Json = {}
    at = 0
    for dtype, bits in WIDTHS.items():
        entries[f"a {dtype}"] = info(dtype, [4, 2], at, at + bits)
        at += bits  # eight elements
    return entries


def _valid() -> Iterator[tuple[str, bytes, Json, dict[str, str]]]:
    """Yield name, header, entries and aliases."""
    plain: dict[str, Json] = {
        "every dtype": _every_dtype(),
        "no dimensions": {"x": info("F32", [], 0, 4)},
        "64 dimensions": {"x": info("U8", [1] * 64, 0, 1)},
        "an empty tensor": {"x": info("F32", [0, 3], 0, 0), "y": info("U8", [2], 0, 2)},
        "only empty tensors": {"x": info("F32", [0], 0, 0), "y": info("F64", [2, 0], 0, 0)},
        "an empty tensor at the end": {"x": info("U8", [2], 0, 2), "y": info("F32", [0], 2, 2)},
        "names in Unicode": {"gr\u00fc\u00dfe": BYTE, "\U0001f69a": info("U8", [1], 1, 2)},
        "a name of 4096 bytes": {"x" * 4096: BYTE},
        "a name with a quote and a colon": {'a":{"b': BYTE},
        "not in the order of the data": {"b": info("U8", [1], 1, 2), "a": BYTE},
        "not aligned": {"a": BYTE, "b": info("F64", [1], 1, 9)},
        "a size of 2^53 bits less one byte": {"x": info("U8", [2**50 - 1], 0, 2**50 - 1)},
        "two four-bit elements": {"x": info("F4", [2], 0, 1)},
        "no tensors": {},
        "metadata alone": {"__metadata__": {"format": "pt"}},
    }
    for name, entries in plain.items():
        yield name, padded(entries), entries, {}
    yield "no padding", layout_header(b"{}"), {}, {}
    spread = b'{ "x" : {"shape":[1], "data_offsets":[0,1],\n"dtype":"U8"} } \n '
    yield "white space, and another order of fields", layout_header(spread), {"x": BYTE}, {}
    escaped = rb'{"\u0078":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    yield "an escape in a name", layout_header(escaped), {"x": BYTE}, {}
    texts = {
        "tied": "w",  # an alias
        "also tied": "w",  # another
        "format": "pt",  # its value names no tensor
        "w": "v",  # its key names a tensor
        "chain": "tied",  # its value names an alias, which is no tensor
    }
    entries = {"__metadata__": texts, "v": BYTE, "w": info("U8", [1], 1, 2)}
    yield "aliases", padded(entries), entries, {"tied": "w", "also tied": "w"}


def _ordered() -> Iterator[tuple[str, Json, dict[str, str], list[str]]]:
    """Yield name, entries, aliases, and the tensors in the order of the source."""
    tied = {"tied": "a", "\U0001f69a": "c", "\uffff": "c"}  # sorted otherwise by UTF-16
    tensors = {"a": BYTE, "b": info("U8", [1], 1, 2), "c": info("U8", [1], 2, 3)}
    in_file = ["a", "b", "c"]

    def entries(text: str) -> Json:
        return {"__metadata__": {**tied, "weightbus.order": text}, **tensors}

    yield "the order of the source", entries("2,0,3,4,5,1"), tied, ["c", "a", "b"]
    yield "aliases before what they stand for", entries("4,5,3,1,2,0"), tied, ["b", "c", "a"]
    no_orders = {
        "without one name": "2,0,3,4,5",
        "with one too many": "2,0,3,4,5,1,6",
        "with a name twice": "2,0,3,4,5,5",
        "beyond its names": "2,0,3,4,6,1",
        "with a space": "2, 0,3,4,5,1",
        "with a sign": "2,0,3,4,5,+1",
        "with minus zero": "2,-0,3,4,5,1",
        "with a leading zero": "02,0,3,4,5,1",
        "with a fraction": "2,0,3,4,5,1.0",
        "with an exponent": "2,0,3,4,5,1e0",
        "with a comma at its end": "2,0,3,4,5,1,",
        "in brackets": "[2,0,3,4,5,1]",
        "in other digits": "2,0,3,4,5,\u0661",
        "that is empty": "",
    }
    for what, text in no_orders.items():
        yield f"an order {what}", entries(text), tied, in_file
    alias = {"weightbus.order": "b"}
    yield "an alias called as the order", {"__metadata__": alias, **tensors}, alias, in_file
    other = {"weightbus.order": "0"}
    yield "an order that is a name", {"__metadata__": other, "0": BYTE}, other, ["0"]
    one = {"__metadata__": {"weightbus.order": "0"}, "x": BYTE}
    yield "the order of one", one, {}, ["x"]
    empty = {n: info("U8", [0], 0, 0) for n in "ab"}
    yield (
        "the order of empty tensors",
        {"__metadata__": {"weightbus.order": "1,0"}, **empty},
        {},
        ["b", "a"],
    )


def _malformed() -> Iterator[tuple[str, bytes]]:
    """Yield name and header."""
    yield from _malformed_frames()
    wrong: dict[str, Json] = {
        "a tensor too short": {"x": info("F32", [1], 0, 3)},
        "a tensor too long": {"x": info("F32", [1], 0, 5)},
        "end before begin": {"x": info("U8", [1], 1, 0)},
        "a gap at the start": {"x": info("U8", [1], 1, 2)},
        "a gap between": {"a": BYTE, "b": info("U8", [1], 2, 3)},
        "an overlap": {"a": info("U8", [2], 0, 2), "b": info("U8", [2], 1, 3)},
        "two tensors in one place": {"a": BYTE, "b": BYTE},
        "an empty tensor elsewhere": {"a": BYTE, "b": info("U8", [0], 5, 5)},
        "an unknown dtype": {"x": info("F33", [1], 0, 1)},
        "a dtype in small letters": {"x": info("u8", [1], 0, 1)},
        "half a byte": {"x": info("F4", [1], 0, 1)},
        "half a byte, rounded down": {"x": info("F4", [3], 0, 1)},
        "65 dimensions": {"x": info("U8", [1] * 65, 0, 1)},
        "a negative size": {"x": info("U8", [-1], 0, 1)},
        "two negative sizes": {"x": info("U8", [-1, -1], 0, 1)},
        "a negative offset": {"x": info("U8", [1], -1, 0)},
        "a size of 2^53": {"x": info("U8", [INTEGER_MAX + 1], 0, INTEGER_MAX + 1)},
        "a size of 2^53 bits": {"x": info("U8", [2**50], 0, 2**50)},
        "sizes whose product wraps around": {"x": info("U8", [2**32, 2**32], 0, 0)},
        "an empty tensor beyond counting": {"x": info("U8", [2**52, 2**52, 0], 0, 0)},
        "a size of 10^30": {"x": info("U8", [10**30], 0, 1)},
        "a size with a fraction": {"x": {**BYTE, "shape": [1.5]}},
        "a size in a string": {"x": {**BYTE, "shape": ["1"]}},
        "a size that is true": {"x": {**BYTE, "shape": [True]}},
        "a shape that is a number": {"x": {**BYTE, "shape": 1}},
        "an offset of 2^53": {"x": info("U8", [1], INTEGER_MAX + 1, INTEGER_MAX + 2)},
        "an offset of 2^64": {"x": info("U8", [1], 2**64, 2**64 + 1)},
        "an offset in a string": {"x": {**BYTE, "data_offsets": ["0", 1]}},
        "an offset that is null": {"x": {**BYTE, "data_offsets": [None, 1]}},
        "offsets that are an object": {"x": {**BYTE, "data_offsets": {"begin": 0, "end": 1}}},
        "a shape that is null": {"x": {**BYTE, "shape": None}},
        "a shape in a shape": {"x": {**BYTE, "shape": [[1]]}},
        "a dtype that is a number": {"x": {**BYTE, "dtype": 8}},
        "an empty dtype": {"x": info("", [1], 0, 1)},
        "a dtype with a space": {"x": info("U8 ", [1], 0, 1)},
        "a tensor inside another": {"a": info("U8", [4], 0, 4), "b": info("U8", [1], 1, 2)},
        "no dtype": {"x": {"shape": [1], "data_offsets": [0, 1]}},
        "no shape": {"x": {"dtype": "U8", "data_offsets": [0, 1]}},
        "no offsets": {"x": {"dtype": "U8", "shape": [1]}},
        "three offsets": {"x": {**BYTE, "data_offsets": [0, 1, 1]}},
        "one offset": {"x": {**BYTE, "data_offsets": [0]}},
        "an unknown field in a tensor": {"x": {**BYTE, "device": "cpu"}},
        "a tensor that is null": {"x": None},
        "an empty name": {"": BYTE},
        "a name of 4097 bytes": {"x" * 4097: BYTE},
        "an empty alias": {"__metadata__": {"": "x"}, "x": BYTE},
        "metadata that is a number": {"__metadata__": {"a": 1}},
        "metadata in metadata": {"__metadata__": {"a": {}}},
        "metadata that is a list": {"__metadata__": []},
        "metadata that is a tensor": {"__metadata__": BYTE},
    }
    for name, entries in wrong.items():
        yield name, padded(entries)


def _malformed_frames() -> Iterator[tuple[str, bytes]]:
    one = text_of({"x": BYTE})
    yield "no bytes", b""
    yield "seven bytes", b"\x02\0\0\0\0\0\0"
    yield "no JSON", layout_header(b"")
    yield "a length too small by one", layout_header(one, claimed=len(one) - 1)
    yield "a length too large by one", layout_header(one, claimed=len(one) + 1)
    yield "a length of 2^64 - 1", layout_header(one, claimed=2**64 - 1)
    yield "a length of 100,000,001", layout_header(one, claimed=100_000_001)
    yield "cut short", layout_header(one)[:-5]
    yield "bytes of the data section behind it", layout_header(one) + b"\0"
    yield "white space first", layout_header(b" " + one)
    yield "text after the object", layout_header(one + b" x")
    yield "a form feed after the object", layout_header(one + b"\f")
    yield "padded with zero bytes", layout_header(one + b"\0\0")
    yield "an array", layout_header(b"[]")
    yield "not UTF-8 in a name", layout_header(one.replace(b'"x"', b'"\xff"'))
    yield "not UTF-8 in a text", layout_header(b'{"__metadata__":{"a":"\xff"}}')
    twice = one[:-1] + b',"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    yield "a tensor twice", layout_header(twice)
    yield "a field twice", layout_header(one.replace(b'"shape":[1]', b'"shape":[9],"shape":[1]'))
    yield "metadata twice", layout_header(b'{"__metadata__":{},"__metadata__":{}}')
    yield "a key of the metadata twice", layout_header(b'{"__metadata__":{"a":"1","a":"2"}}')
    escaped = one[:-1] + rb',"\u0078":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    yield "a tensor twice, once with an escape", layout_header(escaped)
    for name, found in {
        "a trailing comma": one[:-1] + b",}",
        "a leading zero": one.replace(b"[0,1]", b"[00,1]"),
        "a plus sign": one.replace(b"[0,1]", b"[0,+1]"),
        "a hexadecimal number": one.replace(b"[0,1]", b"[0,0x1]"),
        "not a number": one.replace(b"[0,1]", b"[0,NaN]"),
        "single quotes": one.replace(b'"', b"'"),
        "an unquoted key": one.replace(b'"x"', b"x"),
        "a comment": one[:-1] + b"/**/}",
        "a text that is not closed": one[:-1] + b',"y',
        "an escape that is none": one.replace(b'"x"', b'"\\q"'),
        "a line feed in a name": one.replace(b'"x"', b'"a\nb"'),
        "a byte order mark": b"\xef\xbb\xbf" + one,
        "two objects": one + one,
        "a brace too few": one[:-1],
    }.items():
        yield name, layout_header(found)
    yield "minus zero", layout_header(one.replace(b"[0,1]", b"[-0,1]"))
    yield "nested 20000 deep", layout_header(b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}")
    yield "nested 20000 deep and not closed", layout_header(b'{"x":' * 20_000)
