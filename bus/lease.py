"""A place that is lent to one payload, which is received there piece by piece.

Who lends it owns it, and may end that at any time; who receives fills it, and hands it back once it
is full. It then stands for its message: nobody hands the payload in a second time.
"""

from collections.abc import Callable

from ..codecs.native import crc32c
from ..codecs.sealing import Opening
from .messages import Buffer, PublisherMessage


def _nothing() -> None:
    """Nobody minds."""


class Lease:
    """Memory into which a payload is being received.

    Args:
        view: The memory.
        message: What the payload belongs to; None: it is no payload.
        on_cancel: Called when the payload will never be complete, or is of no use.
        hashed: Whether somebody will ask for `crc`.
        opening: What opens the payload, which is sealed, in its place.
    """

    def __init__(
        self,
        view: memoryview,
        message: PublisherMessage | None = None,
        on_cancel: Callable[[], object] = _nothing,
        *,
        hashed: bool = True,
        opening: Opening | None = None,
    ) -> None:
        self.view, self.message = view, message
        self.live = True  # until it ends: then the memory serves another purpose, so keep out
        self.count = 0  # bytes that are here
        self.crc = 0  # of these, computed while they are in the cache
        self._on_cancel, self._hashed, self._opening = on_cancel, hashed, opening

    def received(self, count: int) -> None:
        """Take note of so many bytes more that are in `view`."""
        begin, self.count = self.count, self.count + count
        if self._opening is not None:
            self._opening.take(self.view[begin : self.count], self.view[begin : self.count])
        if self._hashed:
            self.crc = crc32c(self.view[begin : self.count], self.crc)

    def end(self, crc: int | None = None) -> bool:
        """End it; return whether all of it is here, with this CRC-32C, or as it was sealed."""
        self.live = False
        if self.count != len(self.view):
            return False
        return self._opening.proves() if self._opening is not None else self.crc == crc

    @property
    def payload(self) -> Buffer:
        """What was received, if it is still there."""
        return self.view if self.live else b""

    def cancel(self) -> None:
        """The rest will never come, or nobody wants it."""
        if self.live:
            self.live = False
            self._on_cancel()
