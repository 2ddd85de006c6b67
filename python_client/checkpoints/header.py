"""Reads the header of any safetensors file, with the rules of the safetensors library.

On the wire, a layout has one canonical form, which every language parses the same way
(`Layout.parse`). The library also opens other forms: a null `__metadata__`, additional keys in an
entry, an entry as an array, white space before the JSON. This module rewrites such a header in
canonical form, with the same tensors at the same positions. It rejects a header that the library
rejects. If the library opens a header that no version can have, a `LimitError` names the limit.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import msgspec

from ...codecs.errors import LayoutError, LimitError
from ...codecs.layout import ALIGNMENT, METADATA, PREFIX_BYTES, Layout
from ...codecs.protocol_limits import INTEGER_MAX, RANK_MAX

FIELDS = ("dtype", "shape", "data_offsets")  # fields of an entry, in the order of the array form
DEPTH_MAX = 127  # deepest nesting that the library's JSON parser accepts
UNSIGNED_MAX = 2**64 - 1  # largest of the library's sizes and offsets


class _Object(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, which may contain duplicate keys."""


def read_layout(header: bytes) -> Layout:
    """Return the layout in a file's header, which begins with 8 bytes that have its length.

    Raises:
        LimitError: The library opens the header, but a version cannot have it.
        LayoutError: The library rejects the header.
    """
    try:
        return Layout.parse(header)
    except LimitError:
        raise
    except LayoutError as error:
        if int.from_bytes(header[:PREFIX_BYTES], "little") != len(header) - PREFIX_BYTES:
            raise
        canonical = _canonical(header[PREFIX_BYTES:], error)
    return Layout.parse(len(canonical).to_bytes(PREFIX_BYTES, "little") + canonical)


def _canonical(text: bytes, error: LayoutError) -> bytes:
    """Return the JSON `text` of a header in the canonical form.

    Raises:
        LimitError: A key is duplicated, or a shape exceeds the limits.
        LayoutError: The library rejects the header: then raise `error`, that of the first parse.
    """
    try:
        msgspec.json.decode(text)  # stricter than `json`: rejects NaN and unpaired surrogates
        read = json.loads(text.decode(), object_pairs_hook=_Object, parse_int=_integer)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise error from None
    if not isinstance(read, _Object):
        raise error
    _known_once(read, [METADATA], error)
    rows: dict[str, object] = {}
    twice = ""
    for key, value in read:
        twice = key if key in rows else twice
        if key != METADATA:
            rows[key] = _entry(key, value, error)
        elif value is not None:
            rows[key] = _texts(value, error)
    if twice:
        raise LimitError(f"{twice!r} occurs twice in the header, but may occur only once")
    canonical = msgspec.json.encode(rows)
    return canonical + b" " * (-len(canonical) % ALIGNMENT)


def _integer(digits: str) -> int | float:
    """Return a number as the library reads it: as a float if it is negative, -0, or too large."""
    number = int(digits) if len(digits) < 40 else UNSIGNED_MAX + 1
    return number if digits[0] != "-" and number <= UNSIGNED_MAX else float(number)


def _known_once(pairs: _Object, names: Sequence[str], error: LayoutError) -> None:
    keys = [key for key, _ in pairs if key in names]
    if len(keys) != len(set(keys)):
        raise error


def _texts(value: object, error: LayoutError) -> dict[str, str]:
    if not isinstance(value, _Object) or not all(isinstance(text, str) for _, text in value):
        raise error
    texts = dict(value)
    if len(texts) != len(value):
        raise LimitError(f"a key of {METADATA!r} occurs twice, but may occur only once")
    return texts


def _entry(name: str, value: Any, error: LayoutError) -> dict[str, object]:
    """Return the entry of tensor `name` as a dict with only the `FIELDS`."""
    if isinstance(value, _Object):
        _known_once(value, FIELDS, error)
        found = dict(value)
        if any(_depth(each) + 2 > DEPTH_MAX for key, each in value if key not in FIELDS):
            raise error
    elif len(_listed(value)) == len(FIELDS):
        found = dict(zip(FIELDS, _listed(value), strict=True))
    else:
        raise error
    dtype, shape, offsets = map(found.get, FIELDS)
    if isinstance(dtype, _Object) and [each for _, each in dtype] == [None]:
        dtype = dtype[0][0]  # the library's parser also reads {"F32": null} as the variant F32
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise error
    if len(shape) > RANK_MAX or max((*shape, *offsets)) > INTEGER_MAX:
        raise LimitError(
            f"tensor {name!r} has {len(shape)} dimensions up to {max(shape, default=0)}, at bytes "
            f"{offsets[0]} to {offsets[1]}; a version has at most {RANK_MAX} dimensions and 2**53"
        )
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of integers; booleans and floats do not count as such."""
    return type(value) is list and all(type(each) is int for each in _listed(value))


def _depth(value: Any) -> int:
    """Return the nesting depth of lists and objects in a value."""
    depth, rows = -1, [[value]]
    while rows:
        depth += 1
        rows = [_listed(each) for row in rows for each in row if isinstance(each, list)]
    return depth


def _listed(value: Any) -> list[Any]:
    """Return the values of a list or an object; an empty list for any other value."""
    if isinstance(value, _Object):
        return [inner for _, inner in value]
    return cast("list[object]", value) if isinstance(value, list) else []
