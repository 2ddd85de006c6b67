"""One published version: a layout, the bytes, and what they hash to.

The bytes belong to an arena that is used again. So a version gives its chunks out only while it is
alive; `retire()` ends that, and says whether a chunk given out before is still in somebody's hands
(a socket that has not sent it yet), in which case the arena must not be overwritten. Whoever may
have to wait with a chunk refers to it weakly: it is kept here, for as long as the version lives.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...codecs.checksum import digest
from ...codecs.chunks import ChunkPlan
from ...codecs.layout import Layout
from ...codecs.native import crc32c
from ..messages import Buffer, Running, Shared

Role = Literal["latest", "targeted", "pending", "old"]


class Retired(Exception):  # noqa: N818 - not an error: the version was superseded and its memory reused
    """The version's bytes are gone."""


class Version:
    """A version of a model as its publisher holds it.

    Args:
        model: Its name.
        layout: Where each tensor lies.
        data: The data section, `layout.nbytes` bytes; must not change until `retire()`.
        chunk_bytes: Bytes of a chunk (the last may be shorter).
        shared: Where workers on this host find the data, if they can.
        copied: Give out copies of chunks, so that nobody can hold on to the memory.
        on_number: Called whenever the version is numbered. It must not hold us.
        on_release: Called, in any thread, when the version is retired and in nobody's hands.

    Attributes:
        epoch, version: Its number, which the machine gives when it is published.
        names: The (epoch, version) under which the same bytes were published before.
        receivers: Names of the workers that are still at it.
        role: Why it is kept: it is the latest for all, or for some, or not yet committed.
    """

    def __init__(
        self,
        model: str,
        layout: Layout,
        data: NDArray[np.uint8],
        chunk_bytes: int,
        *,
        copied: bool = False,
        shared: Shared | None = None,
        on_number: "Callable[[Version], None] | None" = None,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.epoch, self.version = model, 0, 0
        self.layout = layout
        self.shared = shared
        self.plan = ChunkPlan(layout.nbytes, chunk_bytes)
        # A view of our own: sockets that send from it keep it alive, and only it.
        self._owner: NDArray[np.uint8] | None = data.view()
        self._in_hands = weakref.ref(self._owner, lambda _: on_release() if on_release else None)
        self._lent: dict[int, memoryview] = {}  # chunks that were given out
        self._copied, self._on_number = copied, on_number
        self._crcs: list[int | None] = [None] * self.plan.count
        self._digest: str | None = None
        self.names: frozenset[tuple[int, int]] = frozenset()
        self.receivers: set[str] = set()
        self._held: NDArray[np.uint8] | None = None
        self.role: Role = "pending"

    def number(self, epoch: int, version: int) -> None:
        """Give the version its number, or another; who is told where it is may read it now."""
        self.epoch, self.version = epoch, version
        if self._on_number is not None:
            self._on_number(self)

    @property
    def key(self) -> tuple[int, int]:
        """The order of versions: epoch, then version."""
        return self.epoch, self.version

    @property
    def alive(self) -> bool:
        """Whether the bytes can still be given out."""
        return self._owner is not None

    def chunk(self, index: int) -> tuple[int, Buffer]:
        """Return a chunk's CRC-32C and its bytes.

        Raises:
            Retired: The version's memory is used for another.
        """
        payload = self._payload(index)
        crc = self._crc(index, payload)
        if self._copied:
            return crc, bytes(payload)
        lent = self._lent.setdefault(index, payload)
        if self._owner is None:  # it was retired this very moment, in another thread
            self._lent.clear()
            raise Retired
        return crc, lent

    def _payload(self, index: int) -> memoryview:
        owner = self._owner
        if owner is None:
            raise Retired
        begin, end = self.plan.span(index)
        return owner.data[begin:end]

    def _crc(self, index: int, payload: memoryview) -> int:
        crc = self._crcs[index]
        if crc is None:
            crc = self._crcs[index] = crc32c(payload)
        return crc

    def digest(self) -> str:
        """Return the digest of the whole; computes the CRCs that are still missing.

        Raises:
            Retired: The version's memory is used for another and the digest was never computed.
        """
        if self._digest is None:
            crcs = [
                self._crc(i, self._payload(i)) if crc is None else crc
                for i, crc in enumerate(self._crcs)
            ]
            self._digest = digest(self.layout.id, self.plan.chunk_bytes, crcs)
        return self._digest

    def is_known_as(self, running: Running) -> bool:
        """Return whether a worker runs these very bytes, which were published before."""
        if running.digest and self.names:
            return running.digest == self._digest
        return (running.epoch, running.version) in self.names

    def restored(self, digest: str, names: Iterable[tuple[int, int]]) -> None:
        """The bytes were published before, under these names, and hash to this."""
        self._digest, self.names = digest, frozenset(names)

    @property
    def known_digest(self) -> str:
        """The digest if somebody has needed it before, else nothing."""
        return self._digest or ""

    def hold(self) -> NDArray[np.uint8] | None:
        """Return the bytes, which nobody overwrites until `let_go`; None if it is too late.

        One thread at a time may hold them. The publisher takes other memory meanwhile.
        """
        self._held = self._owner
        return self._held

    def let_go(self) -> None:
        """The bytes may be overwritten as far as the holder is concerned."""
        self._held = None

    @property
    def held(self) -> bool:
        """Whether somebody holds the bytes."""
        return self._held is not None

    def retire(self) -> None:
        """Give out no more chunks."""
        self._owner = self._on_number = None
        self._lent.clear()

    @property
    def in_hands(self) -> bool:
        """Whether bytes given out before are still held by somebody."""
        return self._in_hands() is not None
