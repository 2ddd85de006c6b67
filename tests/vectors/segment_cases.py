"""The cases of `segments.json`: memory that a worker on the publisher's host maps."""

import struct
from collections.abc import Iterator

from weightbus.tests.vectors.parts import INTEGER_MAX, Json

MAGIC = b"WBPSHM1\0"
DRAWN = "00112233445566778899aabbccddeeff"  # the token of every segment here
DATA = bytes(range(10))
EXAMPLE: Json = {"model": "policy", "epoch": 7, "version": 3}
LARGEST: Json = {"model": "Az09._-" + "x" * 121, "epoch": INTEGER_MAX, "version": INTEGER_MAX}
UNSTAMPED = bytes(152)


def stamp(model: str, epoch: int, version: int) -> bytes:
    """Return what tells which version lies in a segment."""
    name = model.encode()
    return struct.pack("<QQQ", epoch, version, len(name)) + name.ljust(128, b"\0")


def segment(stamped: bytes, data: bytes, magic: bytes = MAGIC) -> bytes:
    """Return all bytes of a segment: a header of 4096, and the data section."""
    return (magic + bytes.fromhex(DRAWN) + stamped).ljust(4096, b"\0") + data


def segment_cases() -> Iterator[Json]:
    """Yield segments, what was announced of them, and what a worker that maps them finds."""
    example, found = segment(stamp(**EXAMPLE), DATA), {"ok": {"data": DATA.hex()}}
    yield _case("example", example, EXAMPLE, found)
    yield _case("largest", segment(stamp(**LARGEST), DATA), LARGEST, found)
    yield _case("of no bytes", segment(stamp(**EXAMPLE), b""), EXAMPLE, {"ok": {"data": ""}}, 0)
    yield _case("probe", segment(UNSTAMPED, b""), None, {"ok": {"data": ""}}, 0)
    stale: Json = {"error": "stale"}
    others: dict[str, Json] = {
        "another version": {"version": 4},
        "another epoch": {"epoch": 8},
        "another model": {"model": "critic"},
        "a longer model": {"model": "policy2"},
        "a shorter model": {"model": "polic"},
    }
    for name, other in others.items():
        yield _case(name, example, {**EXAMPLE, **other}, stale, file="example")
    yield _case("being filled", segment(UNSTAMPED, DATA[:5] + bytes(5)), EXAMPLE, stale)
    foreign: Json = {"error": "segment"}
    for nbytes in (0, 9, 11):
        name = f"announced with {nbytes} bytes"
        yield _case(name, example, EXAMPLE, foreign, nbytes, file="example")
    yield _case("another token", example, EXAMPLE, foreign, token="f" * 32, file="example")
    other_magic = segment(stamp(**EXAMPLE), DATA, b"WBPSHM2\0")
    yield _case("another magic", other_magic, EXAMPLE, foreign)


def _case(
    name: str,
    data: bytes,
    version: Json | None,
    expect: Json,
    nbytes: int = len(DATA),
    *,
    token: str = DRAWN,
    file: str | None = None,
) -> Json:
    """Return one case; `file` names the bytes after another case that has the same."""
    return {
        "name": name,
        "rules": ["S4"] if version is None or expect == {"error": "segment"} else ["S4", "S5"],
        "file": (f"segment {file or name}", data),
        "token": token,
        "nbytes": nbytes,
        "version": version,
        "expect": expect,
    }
