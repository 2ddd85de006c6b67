"""What the cases share: frames as data, and the sums of the protocol, written from its text alone.

Nothing here comes from the package: the vectors judge it like any other implementation.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

# Fields of messages that those who seal nothing need not know, and their defaults.
SEALING: dict[str, object] = {"keys": [], "key": None, "tag": None}
PATCHING: dict[str, object] = {
    "patch": None,
    "unpatched": "",
    "decode_us": 0,
    "keep": False,
    "patches": [],
}
WAITING: dict[str, object] = {"waits": ""}
METADATA: dict[str, object] = {"metadata": {}}
NOTED: dict[str, object] = {"note": ""}
OF_FEATURES = SEALING | PATCHING | WAITING | METADATA | NOTED

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
