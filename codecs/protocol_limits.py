"""The limits of the protocol for layouts, chunks and metadata.

Made by `make protocol`; do not edit.
"""

from typing import Final

INTEGER_MAX: Final = 2**53 - 1  # the greatest integer
CHUNKS_MAX: Final = 2**20  # chunks of a version
CHUNK_BYTES_MIN: Final = 1  # bytes of a chunk, at least
CHUNK_BYTES_MAX: Final = 2**26  # bytes of a chunk, at most
LAYOUT_BYTES_MAX: Final = 100_000_000
TENSORS_MAX: Final = 1_000_000
NAME_BYTES_MAX: Final = 4096
RANK_MAX: Final = 64
METADATA_MAX: Final = 32
METADATA_NAME_MAX: Final = 128
METADATA_BYTES_MAX: Final = 4096
