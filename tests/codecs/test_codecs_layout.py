"""Any bytes are a layout or a LayoutError, and what we accept, safetensors accepts."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from weightbus.codecs.dtypes import DTYPES
from weightbus.codecs.errors import LayoutError
from weightbus.codecs.layout import DIFFERENCE_LINES_MAX, Layout, difference, trimmed
from weightbus.codecs.protocol_limits import NAME_BYTES_MAX, RANK_MAX

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
WHOLE_BYTES = sorted(name for name, row in DTYPES.items() if row.bits >= 8)
ENTRIES = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(WHOLE_BYTES), SHAPES),
    max_size=8,
)


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def header(value: Any) -> bytes:
    return framed(json.dumps(value).encode())


def rows(entries: dict[str, tuple[str, tuple[int, ...]]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype, shape) for name, (dtype, shape) in entries.items()]


@given(ENTRIES, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_and_safetensors_reads_it(
    entries: dict[str, tuple[str, tuple[int, ...]]], random: Any
) -> None:
    shuffled = rows(entries)
    random.shuffle(shuffled)
    layout = Layout.plan(shuffled)
    assert layout == Layout.plan(rows(entries))
    assert layout == Layout.parse(layout.header)
    assert len(layout.header) % 8 == 0
    assert layout.aligned
    assert layout.signatures == entries
    read = dict(deserialize(layout.header + bytes(layout.nbytes)))
    assert {n: (v["dtype"], tuple(v["shape"])) for n, v in read.items()} == entries


@given(ENTRIES.filter(bool), st.dictionaries(NAMES, st.integers(0, 100), max_size=4), NAMES)
def test_aliases_travel_in_the_metadata(
    entries: dict[str, tuple[str, tuple[int, ...]]], wanted: dict[str, int], text: str
) -> None:
    names = sorted(entries)
    aliases = {
        alias: names[number % len(names)]
        for alias, number in wanted.items()
        if alias not in entries and alias != "__metadata__"
    }
    note = {"": text} if text not in entries else {}
    layout = Layout.parse(Layout.plan(rows(entries), aliases, note).header)
    assert dict(layout.aliases) == aliases
    assert dict(layout.metadata) == {**aliases, **note}
    assert set(layout.names()) == {*entries, *aliases}
    for alias, kept in aliases.items():
        assert layout.by_name(alias) is layout.by_name(kept)


def accepted(data: bytes) -> Layout | None:
    try:
        return Layout.parse(data)
    except LayoutError:
        return None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_layout_or_a_layout_error(data: bytes) -> None:
    accepted(data)
    accepted(framed(data))
    accepted(framed(b"{" + data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
NEAR_INFOS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F33", ""]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 8, -1, 2**53, 2**64, 1.0]), max_size=3),
        "data_offsets": st.lists(st.sampled_from([0, 1, 2, 4, 8, 12, 16, -4, 2**64]), max_size=3),
    }
)


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "__metadata__", "é", ""]),
        NEAR_INFOS | JSON | st.just(F32),
        max_size=4,
    )
)
@example({"a": F32, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})
@example({"a": {"dtype": "F32", "shape": [2**52, 2**52, 0], "data_offsets": [0, 0]}})
def test_what_we_accept_safetensors_accepts(value: Any) -> None:
    data = header(value)
    layout = accepted(data)
    if layout is not None:
        read = dict(deserialize(data + bytes(layout.nbytes)))
        own = {spec.name: (spec.dtype, list(spec.shape)) for spec in layout.tensors}
        assert own == {name: (v["dtype"], v["shape"]) for name, v in read.items()}


@given(ENTRIES.filter(bool), st.data())
def test_a_damaged_header_is_a_layout_or_a_layout_error(
    entries: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    damaged = bytearray(Layout.plan(rows(entries)).header)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    layout = accepted(bytes(damaged))
    if layout is not None:
        assert layout.nbytes == sum(spec.nbytes for spec in layout.tensors)


def info(**changes: Any) -> dict[str, Any]:
    return {"a": {**F32, **changes}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "a header of 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "a header of 7 bytes"),
        (framed(b"{}") + b" ", "says that it holds 2 bytes"),
        (b"\xff" * 8, "at most 100000000 bytes"),
        (framed(b" {}"), "must begin with '{'"),
        (framed(b"[]"), "must begin with '{'"),
        (framed(b'{"a":' * 50_000), "no safetensors header"),
        (framed(b'{"a":' + b"[" * 100_000), "no safetensors header"),
        (framed(b'{"\xff":{}}'), "no safetensors header"),
        (framed(b'{"\\ud800":{}}'), "no safetensors header"),
        (header(info(shape=[10**400])), "no safetensors header"),
        (header(info(shape=[1.0])), "no safetensors header"),
        (header(info(shape=[-1])), "no safetensors header"),
        (header(info(shape=[1] * (RANK_MAX + 1))), "no safetensors header"),
        (header(info(extra=1)), "no safetensors header"),
        (header({"__metadata__": {"a": 1}}), "no safetensors header"),
        (header({"__metadata__": None}), "no safetensors header"),
        (header({"a": None}), "at or after 'a'"),
        (header(info(dtype="F33")), "safetensors knows BOOL"),
        (header(info(shape=[2])), "must own 0 to 8"),
        (header(info(data_offsets=[4, 8])), "must own 0 to 4"),
        (header(info(data_offsets=[4, 0])), "must own 0 to 4"),
        (header(info(shape=[2**53 - 1])), "beyond 2\\*\\*53 bits"),
        (header(info(shape=[2**40, 2**40, 0], data_offsets=[0, 0])), "beyond 2\\*\\*53 bits"),
        (header(info(dtype="F4", shape=[3], data_offsets=[0, 1])), "fill whole bytes"),
        (header({"a": F32, "b": F32}), "'b'.* must own 4 to 8"),
        (header({"": F32}), "has 0 bytes"),
        (header({"a" * (NAME_BYTES_MAX + 1): F32}), "has 4097 bytes"),
        (header({"__metadata__": {"": "a"}, "a": F32}), "has 0 bytes"),
        (framed(b'{"__metadata__":{"x":"1","x":"2"}}'), "occurs twice"),
        (framed(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "has a sign"),
    ],
)
def test_malformed_headers_say_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.parse(data)


def test_colons_quotes_and_signs_inside_of_strings_are_only_text() -> None:
    layout = Layout.plan([('a:"-\\', "F32", (1,))], metadata={'\\":-': '"\\\\":'})
    assert layout.names() == ('a:"-\\',)


def test_tensors_of_others_may_lie_in_any_order() -> None:
    data = header(
        {
            "late": {"dtype": "F32", "shape": [], "data_offsets": [1, 5]},
            "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [1, 1]},
            "early": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        }
    )
    layout = Layout.parse(memoryview(data))
    assert [spec.name for spec in layout.tensors] == ["early", "none", "late"]
    assert not layout.aligned
    assert layout.nbytes == 5


@pytest.mark.parametrize(
    ("entries", "aliases", "metadata", "words"),
    [
        ([("a", "F33", ())], {}, {}, "safetensors knows"),
        ([("a", "F32", (-1,))], {}, {}, "negative"),
        ([("a", "F32", ()), ("a", "F32", ())], {}, {}, "two tensors are called 'a'"),
        ([("__metadata__", "F32", ())], {}, {}, "reserves"),
        ([("\ud800", "F32", ())], {}, {}, "not plain JSON"),
        ([("", "F32", ())], {}, {}, "0 bytes"),
        ([("a", "F32", ())], {"b": "c"}, {}, "not a clean alias"),
        ([("a", "F32", ())], {"a": "a"}, {}, "not a clean alias"),
        ([("a", "F32", ())], {}, {"author": "a"}, "not a clean alias"),
        ([("a", "F32", ())], {"b": "a"}, {"b": "text"}, "rename one"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    entries: Any, aliases: dict[str, str], metadata: dict[str, str], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.plan(entries, aliases, metadata)


def test_a_difference_names_every_tensor_and_each_reason() -> None:
    published = {"a": ("F32", (1,)), "b": ("F32", (2,)), "c": ("F32", ()), "d": ("I64", ())}
    own = {"b": ("BF16", (3,)), "c": ("BF16", ()), "d": ("I32", ()), "e": ("U8", (4,))}
    assert difference(published, own) == [
        "a: published as F32 [1], not in the target",
        "b: shape [2] published, [3] here",
        "b: dtype F32 published, BF16 here (cast=True converts it)",
        "c: dtype F32 published, BF16 here (cast=True converts it)",
        "d: dtype I64 published, I32 here",
        "e: U8 [4] in the target, not published",
    ]
    assert difference(published, own, cast=True, strict=False) == [
        "b: shape [2] published, [3] here",
        "d: dtype I64 published, I32 here",
    ]
    assert difference(published, own, cast=True, strict="target") == [
        "b: shape [2] published, [3] here",
        "d: dtype I64 published, I32 here",
        "e: U8 [4] in the target, not published",
    ]
    assert difference(published, published) == []


def test_long_differences_are_trimmed_and_counted() -> None:
    lines = [str(n) for n in range(DIFFERENCE_LINES_MAX + 1)]
    assert trimmed(lines[:-1]) == lines[:-1]
    assert trimmed(lines) == [*lines[: DIFFERENCE_LINES_MAX - 1], "... and 2 more"]
