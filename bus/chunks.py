"""How a version's data section is cut into chunks: all of one size, but the last."""

from dataclasses import dataclass, field
from functools import lru_cache

from ..codecs.checksum import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of `nbytes` bytes, numbered from 0; no bytes, no chunks.

    Attributes:
        nbytes: Of the data section.
        chunk_bytes: Of each chunk but the last, which may be smaller.
        count: How many chunks there are.
    """

    nbytes: int
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    count: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        whole = type(self.chunk_bytes) is int
        if not whole or not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ValueError(
                f"chunks of {self.chunk_bytes!r} bytes; {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX} are "
                "allowed"
            )
        if self.nbytes < 0:
            raise ValueError(f"{self.nbytes} bytes cannot be cut into chunks; 0 or more can")
        object.__setattr__(self, "count", -(-self.nbytes // self.chunk_bytes))  # it is frozen

    def span(self, index: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of the data section that a chunk holds."""
        if not 0 <= index < self.count:
            raise IndexError(f"chunk {index} of {self.count}: chunks are numbered from 0")
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.nbytes)

    def of(self, chunks: int) -> int:
        """Return about how many bytes so many chunks have."""
        return min(chunks * self.chunk_bytes, self.nbytes)


# Versions of a model are cut alike: what a plan says is worked out once.
plan_of = lru_cache(maxsize=64)(ChunkPlan)
