"""What the cases share: frames as data, and the sums of the protocol, written from its text alone.

Nothing here but the description of the protocol comes from the package: the vectors judge it like
any other implementation.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from weightbus.protocol import description

PROTOCOL: Final = description.read()
LEVELS: Final = ("index", "worker", "shared-memory")  # the pages of levels 1 to 4
LATER: Final = ("metadata", "note", "waits")  # fields that not all clients know


def own(message: description.Message) -> list[description.Field]:
    """Return the fields of a message that all who know the message know."""
    pages = LEVELS if message.page in LEVELS else (message.page,)
    return [f for f in message.fields if f.page in pages and f.name not in LATER]


def filled(name: str, fields: "Json") -> "Json":
    """Return a message or an object with the defaults of all fields that it leaves out."""
    struct = PROTOCOL.messages.get(name) or PROTOCOL.objects[name]
    known = {f.name: f.default for f in struct.fields if not f.required} | fields
    types = {f.name: f.type for f in struct.fields}
    return {key: _filled(types[key], v) if key in types else v for key, v in known.items()}


def _filled(kind: description.Type, value: Any) -> Any:
    match kind:
        case description.Object():
            return filled(kind.name, value)
        case description.Nullable():
            return value if value is None else _filled(kind.inner, value)
        case description.Array():
            return [_filled(kind.item, each) for each in value]
        case description.Map():
            return {key: _filled(kind.value, each) for key, each in value.items()}
        case _:
            return value


Json = dict[str, Any]

INTEGER_MAX = 2**53 - 1


def text_of(value: object) -> bytes:
    """Return a value as JSON, short and in UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C bit by bit: polynomial 0x1EDC6F41, reflected, all ones in and out."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def digest(layout_id: str, chunk_bytes: int, crcs: Sequence[int]) -> str:
    """Return the digest of a version."""
    packed = bytes.fromhex(layout_id) + struct.pack("<Q", chunk_bytes)
    packed += b"".join(struct.pack("<I", crc) for crc in crcs)
    return hashlib.sha256(packed).hexdigest()


def spans(nbytes: int, chunk_bytes: int) -> list[list[int]]:
    """Return begin and end of every chunk."""
    begins = range(0, nbytes, chunk_bytes)
    return [[begin, min(begin + chunk_bytes, nbytes)] for begin in begins]


def layout_header(text: bytes, *, claimed: int | None = None) -> bytes:
    """Return a layout: the length of its JSON (or what it claims to be), and the JSON."""
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


def padded(entries: Mapping[str, object]) -> bytes:
    """Return a layout as publishers write it: short JSON, padded with spaces to 8 bytes."""
    text = text_of(entries)
    return layout_header(text + b" " * (-len(text) % 8))
