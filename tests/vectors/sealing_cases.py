"""The cases of `sealing.json`: group keys and what comes of them, and every way to forge."""

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from weightbus.tests.vectors.parts import Json, crc32c

GROUP = bytes(range(32, 64))
OTHER_GROUP = bytes(range(64, 96))
CHUNK, LAYOUT, MESSAGE = 1, 2, 3
TAG = 16
SUBJECT: Json = {
    "model": "policy",
    "epoch": 1795253000123,
    "version": 42,
    "encoding": "raw",
    "base": [0, 0],
    "nbytes": 40,
    "chunk_bytes": 16,
}
DATA = bytes(range(100, 140))
LAYOUT_JSON = b'{"w":{"dtype":"U8","shape":[40],"data_offsets":[0,40]}} '
LAYOUT_BYTES = struct.pack("<Q", len(LAYOUT_JSON)) + LAYOUT_JSON


def derived(group: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, b"weightbus 1", info).derive(group)


def text(string: str) -> bytes:
    return bytes([len(string.encode())]) + string.encode()


def names(of: Json) -> bytes:
    numbers = struct.pack("<4Q", of["epoch"], of["version"], *of["base"])
    return text(of["model"]) + text(of["encoding"]) + numbers


def version_key(group: bytes, of: Json) -> bytes:
    return derived(group, b"version" + names(of))


def nonce(purpose: int, index: int) -> bytes:
    return struct.pack("<IQ", purpose, index)


def associated(of: Json, purpose: int, index: int, size: int) -> bytes:
    sizes = struct.pack("<I4Q", purpose, index, size, of["nbytes"], of["chunk_bytes"])
    return names(of) + sizes


def key_id(group: bytes) -> str:
    return derived(group, b"id", 8).hex()


def plain_of(purpose: int, index: int) -> bytes:
    return LAYOUT_BYTES if purpose == LAYOUT else DATA[16 * index : 16 * index + 16]


def sealed_with(group: bytes, of: Json, purpose: int, index: int) -> bytes:
    """Return a payload, sealed, and the tag behind it."""
    plain = plain_of(purpose, index)
    data = associated(of, purpose, index, len(plain))
    return AESGCM(version_key(group, of)).encrypt(nonce(purpose, index), plain, data)


def key_cases() -> Iterator[Json]:
    for name, group in (("a group key", GROUP), ("another", OTHER_GROUP), ("zeros", bytes(32))):
        ok = {"id": key_id(group), "messages": derived(group, b"messages").hex()}
        yield {"name": name, "group": group.hex(), "expect": {"ok": ok}}


def version_cases() -> Iterator[Json]:
    changes: dict[str, Json] = {
        "a version": {},
        "the next one": {"version": 43},
        "of another epoch": {"epoch": 1795253000124},
        "of another model": {"model": "policx"},
        "in another encoding": {"encoding": "delta-1", "base": [1795253000123, 41]},
        "on another base": {"encoding": "delta-1", "base": [1795253000123, 40]},
        "of the longest name and the largest numbers": {
            "model": "m" * 128,
            "epoch": 2**53 - 1,
            "version": 2**53 - 1,
        },
        "names run into one another": {"model": "policyraw", "encoding": "x"},
    }
    for name, change in changes.items():
        of = {**SUBJECT, **change}
        ok = {"names": names(of).hex(), "key": version_key(GROUP, of).hex()}
        yield {"name": name, "group": GROUP.hex(), "version": of, "expect": {"ok": ok}}


def payload_cases() -> Iterator[Json]:
    """Yield payloads as they should be, and forged ones: `at` is what the receiver knows."""
    sound = [(CHUNK, 0), (CHUNK, 1), (CHUNK, 2), (LAYOUT, 0)]
    for purpose, index in sound:
        what = "layout" if purpose == LAYOUT else f"chunk {index}"
        yield _payload(what, sealed_with(GROUP, SUBJECT, purpose, index), purpose, index, ok=True)
    whole = sealed_with(GROUP, SUBJECT, CHUNK, 0)
    moved: dict[str, tuple[bytes, int, int]] = {
        "a chunk at another index": (whole, CHUNK, 1),
        "a chunk for a layout": (whole, LAYOUT, 0),
        "a layout for a chunk": (sealed_with(GROUP, SUBJECT, LAYOUT, 0), CHUNK, 0),
        "under another group key": (sealed_with(OTHER_GROUP, SUBJECT, CHUNK, 0), CHUNK, 0),
        "not sealed at all": (DATA[:16] + bytes(TAG), CHUNK, 0),
        "truncated": (whole[:15] + whole[16:], CHUNK, 0),
        "longer": (whole[:16] + b"\0" + whole[16:], CHUNK, 0),
        "of nothing": (whole[16:], CHUNK, 0),
    }
    for name, (sealed, purpose, index) in moved.items():
        yield _payload(name, sealed, purpose, index)
    changes: dict[str, Json] = {
        "the version before": {"version": 41},
        "the version after": {"version": 43},
        "another epoch": {"epoch": 1795253000124},
        "another model": {"model": "critic"},
        "another encoding": {"encoding": "delta-1"},
        "another base": {"base": [1795253000123, 41]},
        "another size of the data section": {"nbytes": 41},
        "another size of a chunk": {"chunk_bytes": 17},
    }
    for name, change in changes.items():
        sealed = sealed_with(GROUP, {**SUBJECT, **change}, CHUNK, 0)
        yield _payload(f"a chunk of {name}", sealed, CHUNK, 0)
    for bit in (0, 77, 127, 128, 200, 255):  # from 128 on it is of the tag
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        yield _payload(f"bit {bit} is flipped", bytes(flipped), CHUNK, 0)


def _payload(name: str, sealed: bytes, purpose: int, index: int, *, ok: bool = False) -> Json:
    plain = plain_of(purpose, index)
    right: Json = {"plain": plain.hex(), "crc": crc32c(plain)}
    right["nonce"] = nonce(purpose, index).hex()
    right["associated"] = associated(SUBJECT, purpose, index, len(plain)).hex()
    return {
        "name": name,
        "group": GROUP.hex(),
        "version": SUBJECT,
        "purpose": purpose,
        "index": index,
        "sealed": sealed[:-TAG].hex(),
        "tag": sealed[-TAG:].hex(),
        "expect": {"ok": right} if ok else {"error": "sealed"},
    }


BEACON: Json = {
    "wbp": 1,
    "type": "beacon",
    "model": "policy",
    "epoch": 1795253000123,
    "version": 42,
}
ANNOUNCE: Json = {
    "wbp": 1,
    "type": "announce",
    "model": "policy",
    "epoch": 1795253000123,
    "version": 42,
    "layout": "ab" * 32,
    "layout_bytes": 64,
    "nbytes": 40,
    "chunk_bytes": 16,
    "commit": "auto",
    "acknowledge": "applied",
    "encoding": "raw",
    "encryption": "aes-256-gcm",
    "key": key_id(GROUP),
}
END: Json = {**BEACON, "type": "end", "digest": "cd" * 32}


def dumped(header: Json) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def boxed(
    header: bytes, count: int, group: bytes = GROUP, told: Json | None = None, flip: int = -1
) -> str:
    """Return the header of a sealed message; `told` says otherwise what can be read of it."""
    data = struct.pack("<I2Q", MESSAGE, count, len(header))
    key = derived(group, b"messages")
    sealed = bytearray(AESGCM(key).encrypt(nonce(MESSAGE, count), header, data))
    if flip >= 0:
        sealed[flip // 8] ^= 1 << flip % 8
    outer: Json = {"wbp": 1, "type": "sealed_message", "key": key_id(group), "count": count}
    return dumped({**outer, "sealed": _base64(bytes(sealed)), **(told or {})}).decode()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def message_cases() -> Iterator[Json]:
    """Yield what is published, message by message, to one who has the group key, and what of it
    counts: the header in it, or null."""
    beacon, announce, end = dumped(BEACON), dumped(ANNOUNCE), dumped(END)
    stories: dict[str, list[tuple[str, Any]]] = {
        "in order": [
            (boxed(announce, 1), ANNOUNCE),
            (boxed(end, 2), END),
            (boxed(beacon, 9), BEACON),
        ],
        "a replay": [
            (boxed(beacon, 5), BEACON),
            (boxed(beacon, 5), None),
            (boxed(beacon, 6), BEACON),
        ],
        "an older one": [(boxed(end, 7), END), (boxed(announce, 6), None), (boxed(end, 8), END)],
        "what is forged does not count up": [
            (boxed(beacon, 900, flip=3), None),
            (boxed(beacon, 1), BEACON),
        ],
        "the last bit of the tag": [
            (boxed(beacon, 1, flip=8 * (len(beacon) + TAG) - 1), None),
        ],
        "counted otherwise than sealed": [(boxed(beacon, 1, told={"count": 2}), None)],
        "another group key": [(boxed(beacon, 1, OTHER_GROUP), None)],
        "another group key under this one's id": [
            (boxed(beacon, 1, OTHER_GROUP, told={"key": key_id(GROUP)}), None)
        ],
        "shorter than a tag": [(boxed(beacon, 1, told={"sealed": _base64(bytes(15))}), None)],
        "nothing but a tag": [(boxed(b"", 1), None)],
        "no header": [(boxed(b"[]", 1), None), (boxed(beacon, 2), BEACON)],
        "what is never published so": [(boxed(dumped({"wbp": 1, "type": "ping"}), 1), None)],
        "in the clear": [(announce.decode(), None), (end.decode(), None), (beacon.decode(), None)],
        "a refusal in the clear": [
            (dumped({"wbp": 1, "type": "refuse", "code": "limit", "text": "no"}).decode(), None)
        ],
    }
    for name, said in stories.items():
        steps = [{"header": header, "counts": counts} for header, counts in said]
        yield {"name": name, "keys": [GROUP.hex()], "messages": steps}


def cases() -> dict[str, list[Json]]:
    """Return the tables: none is of a level, since keys are no level's."""
    tables = {
        "keys": (key_cases(), ["E2"]),
        "versions": (version_cases(), ["E2"]),
        "payloads": (payload_cases(), ["E3", "E4"]),
        "messages": (message_cases(), ["E5"]),
    }
    return {
        table: [{**case, "level": None, "rules": rules} for case in some]
        for table, (some, rules) in tables.items()
    }
