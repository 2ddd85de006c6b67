"""What proves that bytes arrived: a CRC-32C for each chunk, one digest for the whole.

The package `crc32c` and not `google-crc32c`: both run at the same speed (29 GB/s on 1 MiB, 95 ns
on 256 B), but the latter takes `bytes` only, which costs a copy of every chunk, and holds the GIL.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .numpy_tensors import Memory

    def crc32c(data: Memory, value: int = 0) -> int:
        """Return the CRC-32C (Castagnoli) of a contiguous buffer, going on from `value`.

        Nothing is copied; from 32 KiB on, other threads run meanwhile.
        """
        raise NotImplementedError

else:
    crc32c = _crc32c  # unwrapped, since it is called for every piece of every chunk


def digest(layout_id: str, chunk_bytes: int, crcs: Sequence[int]) -> str:
    """Return the digest of a version: lowercase hex SHA-256 over these bytes, in this order:

        the layout id, as 32 raw bytes
        the size of a chunk, u64 little-endian
        the CRC-32C of every chunk, each u32 little-endian, in order

    It binds the layout, the order, and every chunk. It costs no second pass over the data, since
    each chunk's CRC is known by then, and any language has the parts.
    """
    packed = struct.pack(f"<Q{len(crcs)}I", chunk_bytes, *crcs)
    return hashlib.sha256(bytes.fromhex(layout_id) + packed).hexdigest()


def digest_of(layout_id: str, data: "Memory", chunk_bytes: int) -> str:
    """Return the digest of a whole data section."""
    view = memoryview(cast("Buffer", data)).cast("B")
    parts = (view[i : i + chunk_bytes] for i in range(0, len(view), chunk_bytes))
    return digest(layout_id, chunk_bytes, [crc32c(part) for part in parts])
