"""Divides bytes into chunks of one size (the last may be smaller), and records which have arrived.

In a relay, the worker and the publisher share one record (`Chunks`): the worker updates the record
as chunks arrive, and the publisher reads it and adds checksums. So a relay can send chunks from a
staging buffer while other chunks are still arriving.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.checksum import CHUNK_BYTES_DEFAULT, digest
from ..codecs.protocol_limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN

Memory = NDArray[np.uint8]
M_co = TypeVar("M_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The chunks of `nbytes` bytes, numbered from 0; 0 bytes have no chunks.

    Attributes:
        nbytes: Bytes of the data section.
        chunk_bytes: Bytes of each chunk; the last may be smaller.
        count: The number of chunks.
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
        """Return (begin, end) of a chunk in the data section, in bytes."""
        if not 0 <= index < self.count:
            raise IndexError(f"chunk {index} of {self.count}: chunks are numbered from 0")
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.nbytes)

    def approximate_bytes(self, chunks: int) -> int:
        """Return about how many bytes this number of chunks has."""
        return min(chunks * self.chunk_bytes, self.nbytes)


# Plans are cached, since the versions of a model have equal plans.
plan_of = lru_cache(maxsize=64)(ChunkPlan)


class Chunks(msgspec.Struct, Generic[M_co], eq=False):
    """Memory that is divided into chunks, and a record of which chunks have arrived.

    Only one thread at a time writes the record, so there is no lock: the worker's thread until all
    bytes are correct, then the publisher's thread, which adds missing checksums. References protect
    the memory: a publisher has a view of the memory (`lend`), and the publisher's sockets have
    slices of that view. The memory's owner may overwrite the memory once no view exists (`in_use`).
    If the owner drops its reference instead, the memory is freed together with the last view.

    Attributes:
        plan: The sizes and number of the chunks.
        memory: The memory, as an object of the type that its owner uses.
        crcs: The CRC-32C of each chunk; None: the chunk was not verified or hashed yet.
        layout: The id of the layout, which the digest covers; empty: the chunks of a patch.
        here: The number of chunks that have a CRC-32C.
        whole: True if all bytes have arrived and are correct, even if some chunks are not hashed.
            If False, only chunks with a CRC-32C have arrived.
        digest: The digest; empty until it is computed or verified. For a patch that a relay
            receives: the digest that the patch's `end` names, of the version it leads to.
        view: A weak reference to the publisher's view; None: no view was made so far.
        sums: The CRC-32C of every chunk, including chunks that have not arrived. Empty: only the
            checksums in `crcs` are known.
        restarts: How often `clear` was called; after each call, different bytes may arrive.
    """

    plan: ChunkPlan
    memory: M_co
    crcs: list[int | None]
    layout: str = ""
    here: int = 0
    whole: bool = False
    digest: str = ""
    view: weakref.ref[Memory] | None = None
    restarts: int = 0
    sums: Sequence[int] = ()

    @property
    def checksums(self) -> list[int] | None:
        """The CRC-32C of every chunk; None: some are not known."""
        if self.sums:
            return [*self.sums]
        return cast("list[int]", self.crcs) if self.here == self.plan.count else None

    def has(self, index: int) -> bool:
        """True if the chunk with this index has arrived."""
        return self.whole or self.crcs[index] is not None

    def unhashed(self) -> Iterator[int]:
        """Yield the indexes of the chunks without a CRC-32C."""
        return (index for index, crc in enumerate(self.crcs) if crc is None)

    def put(self, index: int, crc: int) -> None:
        """Record that the chunk with this index has arrived and has this CRC-32C."""
        self.here += self.crcs[index] is None
        self.crcs[index] = crc
        if self.whole and self.here == len(self.crcs):
            self.put_all(cast("list[int]", self.crcs))

    def set_checksums(self, sums: Sequence[int]) -> None:
        """Record the CRC-32C of every chunk, before the chunks arrive."""
        self.sums = sums

    def put_all(self, crcs: list[int]) -> None:
        """Record that all chunks have arrived and have these CRC-32Cs."""
        self.crcs, self.here = [*crcs], len(crcs)
        if self.whole and self.layout and not self.digest:
            self.digest = digest(self.layout, self.plan.chunk_bytes, crcs)

    def proves(self, claim: str) -> bool:
        """Return True if all bytes have arrived and have the digest `claim`; if so, set `whole`."""
        crcs = cast("list[int]", self.crcs)
        if self.here == len(crcs) and digest(self.layout, self.plan.chunk_bytes, crcs) == claim:
            self.whole, self.digest = True, claim
        return self.whole and self.digest == claim

    def drop(self, index: int) -> None:
        """Record that the chunk with this index is wrong, and has not arrived."""
        self.here -= self.crcs[index] is not None
        self.crcs[index] = None

    def fill(self, digest: str) -> None:
        """Record that all bytes have arrived and have this digest, without checksums of chunks."""
        self.whole, self.digest = True, digest

    def set_end_digest(self, digest: str) -> None:
        """Record the digest that the `end` of this patch names, of the version it leads to."""
        self.digest = digest

    def clear(self) -> None:
        """Record that no chunk has arrived, because some of the bytes must be wrong."""
        self.crcs, self.here = [None] * self.plan.count, 0
        self.restarts += 1

    def lend(self: "Chunks[Memory]") -> Memory:
        """Return a view of the memory. While it exists, the owner does not overwrite the memory."""
        view = self.view() if self.view is not None else None
        if view is None:
            view = self.memory.view()
            self.view = weakref.ref(view)
        return view

    @property
    def in_use(self) -> bool:
        """True while a publisher, or a socket that sends the bytes, refers to the memory."""
        return self.view is not None and self.view() is not None
