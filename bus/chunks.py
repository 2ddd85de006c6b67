"""How bytes are cut into chunks, all of one size but the last; and which of them are here.

A worker and a publisher have the same picture of a version's bytes, `Chunks`: a worker writes it as
they arrive, a publisher reads it, and writes what it hashes. So what has arrived can be given out
from where it lies, while the rest is on its way.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.checksum import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, digest

Memory = NDArray[np.uint8]
M_co = TypeVar("M_co", covariant=True)


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


class Chunks(msgspec.Struct, Generic[M_co], eq=False):
    """Memory that is cut into chunks, and which of these are here.

    One thread owns it, so there is no lock. Python counts who refers to the memory: a publisher has
    a view of it (`lend`), and its sockets have slices of that. Whoever made the memory may write
    other bytes there once nobody has the view (`in_use`); else it lets go of the memory, which goes
    with the last of them.

    Attributes:
        plan: The chunks.
        memory: What they lie in, whatever made it.
        crcs: The CRC-32C of each that was verified, or hashed; None: of no other.
        layout: The id of the layout, which the digest is about; empty: it has none, as of a patch.
        here: How many have a CRC-32C.
        whole: All bytes are here, and are what they should be, though it may be that nobody has
            hashed them. Else a chunk is here if it has a CRC-32C.
        digest: What the whole hashes to, once that is known. It is never what somebody says alone.
        view: How a publisher has the memory, if one does.
    """

    plan: ChunkPlan
    memory: M_co
    crcs: list[int | None]
    layout: str = ""
    here: int = 0
    whole: bool = False
    digest: str = ""
    view: weakref.ref[Memory] | None = None

    def has(self, index: int) -> bool:
        """Return whether a chunk is here."""
        return self.whole or self.crcs[index] is not None

    def unhashed(self) -> Iterator[int]:
        """Yield the chunks that nobody has hashed, or verified, yet."""
        return (index for index, crc in enumerate(self.crcs) if crc is None)

    def put(self, index: int, crc: int) -> None:
        """A chunk is here, and has this CRC-32C."""
        self.here += self.crcs[index] is None
        self.crcs[index] = crc
        if self.whole and self.here == len(self.crcs):
            self.put_all(cast("list[int]", self.crcs))

    def put_all(self, crcs: list[int]) -> None:
        """All chunks are here, and have these."""
        self.crcs, self.here = [*crcs], len(crcs)
        if self.whole and self.layout and not self.digest:
            self.digest = digest(self.layout, self.plan.chunk_bytes, crcs)

    def proves(self, claim: str) -> bool:
        """Return whether all chunks are here, and hash to what is claimed: then it is whole."""
        crcs = cast("list[int]", self.crcs)
        if self.here == len(crcs) and digest(self.layout, self.plan.chunk_bytes, crcs) == claim:
            self.whole, self.digest = True, claim
        return self.whole and self.digest == claim

    def fill(self, digest: str) -> None:
        """All bytes are here, and were held against this digest, though not chunk by chunk."""
        self.whole, self.digest = True, digest

    def clear(self) -> None:
        """Nothing of it is here, since not all of it can be what it should be."""
        self.crcs, self.here = [None] * self.plan.count, 0

    def lend(self: "Chunks[Memory]") -> Memory:
        """Return a view of the memory, where nothing else is written as long as that is there."""
        view = self.view() if self.view is not None else None
        if view is None:
            view = self.memory.view()
            self.view = weakref.ref(view)
        return view

    @property
    def in_use(self) -> bool:
        """Whether a publisher has the memory, or sockets that send from it do."""
        return self.view is not None and self.view() is not None
