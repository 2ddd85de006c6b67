"""The cases of `ties.json`: which memory one tensor is, and what a version makes of it. (W6)"""

import json
from collections.abc import Iterator

from weightbus.tests.vectors.parts import Json

Rows = dict[str, tuple[str, list[int], int]]  # dtype, shape, and where it begins

PAIR: Rows = {"embed": ("U8", [2], 1), "head": ("U8", [2], 1)}
APART: Rows = {"embed": ("U8", [2], 0), "head": ("U8", [2], 2)}


def tie_cases() -> Iterator[Json]:
    """Yield published tensors, the memory that they go to, and what comes of it."""
    one, other, two = {"embed": [2]}, {"head": [2]}, {"embed": [2], "head": [2]}
    tied = {"head": "embed"}
    yield case("the first of two names", one, PAIR, "0102", ok="000102")
    yield case("the second of two names", other, PAIR, "0102", ok="000102")
    yield case("tied on both sides", one, PAIR, "0102", aliases=tied, ok="000102")
    yield case("two tensors with equal bytes", two, PAIR, "01020102", ok="000102")
    yield case("two tensors with other bytes", two, PAIR, "01020103", error="differ")
    three: Rows = {**PAIR, "third": ("U8", [2], 1)}
    yield case("two of three names", two, three, "01020102", ok="000102")
    yield case("two of three names, other bytes", two, three, "01020202", error="differ")
    alone: Rows = {"head": ("U8", [2], 1)}
    yield case("here by its alias alone", one, alone, "0102", aliases=tied, ok="000102")
    yield case("tied when published, apart here", one, APART, "0102", aliases=tied, ok="01020102")
    yield case("apart here, one published", one, APART, "0102", error="layout")
    more = {"embed": [2], "other": [1]}
    yield case("more is published", more, PAIR, "010203", error="layout")
    yield case("more is published, a part wanted", more, PAIR, "010203", partial=True, ok="000102")
    both = {"a": [4], "b": [4]}
    same: Rows = {"a": ("U8", [4], 0), "b": ("U8", [4], 0)}
    yield case("the very same bytes", both, same, "0102030401020304", ok="01020304")
    for name, b, published in (
        ("another shape", ("U8", [2, 2], 0), {"a": [4], "b": [2, 2]}),
        ("another dtype", ("I8", [4], 0), both),
        ("parts of each other", ("U8", [4], 2), both),
        ("one inside the other", ("U8", [2], 1), {"a": [4], "b": [2]}),
        ("the last byte", ("U8", [1], 3), {"a": [4], "b": [1]}),
    ):
        rows: Rows = {"a": ("U8", [4], 0), "b": b}
        yield case(name, published, rows, "01" * 8, kinds={"b": b[0]}, error="memory")
    beside: Rows = {"a": ("U8", [4], 0), "b": ("U8", [4], 4)}
    yield case("neighbours", both, beside, "0102030405060708", ok="0102030405060708")
    empty: Rows = {"a": ("U8", [4], 0), "b": ("U8", [0], 2)}
    yield case("nothing, inside of it", {"a": [4], "b": [0]}, empty, "01020304", ok="01020304")


def case(
    name: str,
    published: dict[str, list[int]],
    target: Rows,
    data: str,
    *,
    aliases: dict[str, str] | None = None,
    kinds: dict[str, str] | None = None,
    partial: bool = False,
    ok: str = "",
    error: str = "",
) -> Json:
    """Return a case: tensors that are published one after another, and where each of ours lies."""
    entries: dict[str, object] = {} if aliases is None else {"__metadata__": aliases}
    at = 0
    for tensor, shape in published.items():
        end = at + product(shape)
        dtype = (kinds or {}).get(tensor, "U8")
        entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    nbytes = max(begin + product(shape) for _, shape, begin in target.values())
    return {
        "name": name,
        "level": None,
        "rules": ["W6"],
        "layout": json.dumps(entries, separators=(",", ":")),
        "data": data[: 2 * at],
        "partial": partial,
        "memory": nbytes,
        "target": {
            name: {"dtype": dtype, "shape": shape, "at": begin}
            for name, (dtype, shape, begin) in target.items()
        },
        "expect": {"error": error} if error else {"ok": ok},
    }


def product(shape: list[int]) -> int:
    """Return how many elements a tensor has, which are a byte each."""
    count = 1
    for size in shape:
        count *= size
    return count
