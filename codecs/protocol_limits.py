"""The limits of the protocol for layouts, chunks and metadata.

Made by `make protocol`; do not edit.
"""

from typing import Final

INTEGER_MAX: Final = 2**53 - 1  # the greatest integer
CHUNKS_MAX: Final = 2**20  # chunks of a version
CHUNK_BYTES_MIN: Final = 1  # bytes of a chunk, at least
CHUNK_BYTES_MAX: Final = 2**26  # bytes of a chunk, at most
LAYOUT_BYTES_MAX: Final = 100_000_000  # bytes of the JSON of a layout
TENSORS_MAX: Final = 1_000_000  # tensors of a version
NAME_BYTES_MAX: Final = 4096  # bytes of a tensor's name
RANK_MAX: Final = 64  # dimensions of a tensor
METADATA_MAX: Final = 32  # entries of a version's metadata
METADATA_NAME_MAX: Final = 128  # characters of a name in metadata
METADATA_BYTES_MAX: Final = 4096  # bytes of names and texts of a version's metadata
