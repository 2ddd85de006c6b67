"""The cases of `chunks.json`, `checksums.json` and `versions.json`: cutting, summing, the whole."""

import hashlib
import struct
from collections.abc import Iterator

from weightbus.tests.vectors.layout_cases import info
from weightbus.tests.vectors.parts import Json, crc32c, digest, padded, spans, text_of


def chunk_cases() -> Iterator[Json]:
    """Yield data sections and how they are cut."""
    for nbytes, chunk_bytes in [
        (0, 1),
        (0, 2**20),
        (1, 1),
        (1, 2**20),
        (10, 5),
        (11, 5),
        (9, 10),
        (10, 10),
        (2**20, 2**20),
        (2**20 + 1, 2**20),
        (3 * 2**26 - 1, 2**26),
    ]:
        cut = spans(nbytes, chunk_bytes)
        yield {
            "nbytes": nbytes,
            "chunk_bytes": chunk_bytes,
            "expect": {"ok": {"count": len(cut), "spans": cut}},
        }
    for nbytes, chunk_bytes in [(10, 0), (10, 2**26 + 1), (10, -1)]:
        expect = {"error": "chunk-bytes"}
        yield {"nbytes": nbytes, "chunk_bytes": chunk_bytes, "expect": expect}


def crc_cases() -> Iterator[Json]:
    """Yield bytes and their CRC-32C."""
    for name, data in {
        "the check value": b"123456789",
        "nothing": b"",
        "a zero byte": b"\0",
        "32 zero bytes (RFC 3720)": bytes(32),
        "32 bytes of ones (RFC 3720)": b"\xff" * 32,
        "0 to 31 (RFC 3720)": bytes(range(32)),
        "31 to 0 (RFC 3720)": bytes(range(31, -1, -1)),
        "300 bytes": bytes(i * 7 % 256 for i in range(300)),
    }.items():
        yield {"name": name, "hex": data.hex(), "crc": crc32c(data)}


def digest_cases() -> Iterator[Json]:
    """Yield the parts of digests."""
    ids = [hashlib.sha256(text).hexdigest() for text in (b"a layout", b"another layout")]
    for layout_id, chunk_bytes, crcs in [
        (ids[0], 7, [1, 2]),
        (ids[0], 7, [2, 1]),
        (ids[0], 8, [1, 2]),
        (ids[1], 7, [1, 2]),
        (ids[0], 2**20, []),
        (ids[0], 1, [0, 2**32 - 1, 0]),
    ]:
        parts: Json = {"layout": layout_id, "chunk_bytes": chunk_bytes, "crcs": crcs}
        yield {**parts, "digest": digest(layout_id, chunk_bytes, crcs)}


def _mixed() -> tuple[bytes, bytes]:
    floats = struct.pack("<6f", 1.0, -2.5, 0.0, float("inf"), 1e-40, 3.0)
    halves = struct.pack("<3H", 0x3F80, 0xC020, 0x7FC1)  # 1.0, -2.5 and a NaN in bfloat16
    step = struct.pack("<q", 12_345_678_901)
    entries: Json = {
        "__metadata__": {"decoder.weight": "encoder.weight"},
        "step": info("I64", [], 0, 8),
        "encoder.weight": info("F32", [2, 3], 8, 32),
        "empty": info("F32", [0, 3], 32, 32),
        "gr\u00f6\u00dfe": info("BF16", [3], 32, 38),
        "mask": info("BOOL", [2], 38, 40),
    }
    return padded(entries), step + floats + halves + b"\1\0"


def version_cases() -> Iterator[Json]:
    """Yield whole versions: the file, how it is cut, every header, and the digest."""
    small = padded({"w": info("U8", [10], 0, 10)})
    for name, (header, data), chunk_bytes in [
        ("example", (small, bytes(range(10))), 4),
        ("mixed", _mixed(), 16),
        ("mixed in one chunk", _mixed(), 2**20),
        ("empty", (padded({"w": info("F32", [0], 0, 0)}), b""), 2**20),
    ]:
        yield _version(name, header, data, chunk_bytes)


def _version(name: str, header: bytes, data: bytes, chunk_bytes: int) -> Json:
    layout_id = hashlib.sha256(header).hexdigest()
    cut = spans(len(data), chunk_bytes)
    crcs = [crc32c(data[begin:end]) for begin, end in cut]
    whole = digest(layout_id, chunk_bytes, crcs)
    number: Json = {"model": "policy", "epoch": 7, "version": 3}
    announce: Json = {
        "wbp": 1,
        "type": "announce",
        **number,
        "layout": layout_id,
        "layout_bytes": len(header),
        "nbytes": len(data),
        "chunk_bytes": chunk_bytes,
        "commit": "auto",
        "acknowledge": "applied",
        "encoding": "raw",
    }
    chunks: list[Json] = [
        {"wbp": 1, "type": "chunk", **number, "index": index, "crc": crc}
        for index, crc in enumerate(crcs)
    ]
    end: Json = {"wbp": 1, "type": "end", **number, "digest": whole}
    return {
        "name": name,
        "file": header + data,
        "file_sha256": hashlib.sha256(header + data).hexdigest(),
        "layout_bytes": len(header),
        "layout": layout_id,
        "chunk_bytes": chunk_bytes,
        "chunks": [{"begin": b, "end": e, "crc": c} for (b, e), c in zip(cut, crcs, strict=True)],
        "digest": whole,
        "announce": text_of(announce).decode(),
        "chunk_headers": [text_of(chunk).decode() for chunk in chunks],
        "end": text_of(end).decode(),
    }
