"""Computes what proves that bytes are intact: a CRC-32C of each chunk, a digest of a version."""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, cast

from .native import crc32c

if TYPE_CHECKING:
    from hashlib import sha256

    from typing_extensions import Buffer

    from .numpy_tensors import Memory
else:  # Python's own SHA-256, since OpenSSL's setup takes longer than hashing so few bytes
    try:
        from _sha2 import sha256
    except ImportError:  # before Python 3.12
        try:
            from _sha256 import sha256
        except ImportError:  # Python was built without it
            from hashlib import sha256

CHUNK_BYTES_DEFAULT: Final = 1 << 20  # larger chunks were not faster over loopback


def digest(layout_id: str, chunk_bytes: int, crcs: Sequence[int]) -> str:
    """Return the digest of a version: the SHA-256, in lowercase hex, of these bytes in this order:

        the layout id, as 32 raw bytes
        the size of a chunk, u64 little-endian
        the CRC-32C of every chunk, each u32 little-endian, in order

    The digest covers the layout, every chunk and the chunks' order. It needs no second pass over
    the data, since each chunk's CRC-32C is known already. Every language has CRC-32C and SHA-256.
    """
    packed = struct.pack(f"<{len(crcs)}I", *crcs)
    return sha256(_before(layout_id, chunk_bytes) + packed).hexdigest()


@lru_cache(maxsize=64)
def _before(layout_id: str, chunk_bytes: int) -> bytes:
    """Return the bytes before the checksums, which all versions of a layout share."""
    return bytes.fromhex(layout_id) + chunk_bytes.to_bytes(8, "little")


def digest_of(layout_id: str, data: "Memory", chunk_bytes: int) -> str:
    """Return the digest of a whole data section."""
    return digest(layout_id, chunk_bytes, list(crcs_of(data, chunk_bytes)))


def crcs_of(data: "Memory", chunk_bytes: int) -> Iterator[int]:
    """Yield the CRC-32C of each chunk of a data section."""
    view = memoryview(cast("Buffer", data)).cast("B")
    for begin in range(0, len(view), chunk_bytes):
        yield crc32c(view[begin : begin + chunk_bytes])
