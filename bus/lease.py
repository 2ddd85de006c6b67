"""A lease of memory to the receiver of one payload, which fills it piece by piece.

The owner of the memory may end the lease at any time. The receiver fills the memory and, once it is
full, hands the lease to the machine in place of the payload.
"""

from collections.abc import Callable

from ..codecs.native import crc32c
from ..codecs.sealing import Opening
from .messages import Buffer, PublisherMessage


def _nothing() -> None:
    """Do nothing."""


class Lease:
    """Memory into which a payload is being received.

    Args:
        view: The memory.
        message: The message that the payload belongs to; None: it belongs to none.
        on_cancel: Called when the payload will never be complete, or is not wanted.
        hashed: Whether `crc` is needed.
        opening: Decrypts a sealed payload in place; None: it is not sealed.
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
        self.live = True  # False once it ended: the memory may then be used otherwise
        self.count = 0  # bytes received
        self.crc = 0  # of these, computed while they are in the cache
        self._on_cancel, self._hashed, self._opening = on_cancel, hashed, opening

    def received(self, count: int) -> None:
        """Note that the next `count` bytes are in `view`; hash and decrypt them."""
        begin, self.count = self.count, self.count + count
        if self._opening is not None:
            self._opening.take(self.view[begin : self.count], self.view[begin : self.count])
        if self._hashed:
            self.crc = crc32c(self.view[begin : self.count], self.crc)

    def end(self, crc: int | None = None) -> bool:
        """End the lease; return True if the payload is complete and its CRC-32C or tag matches."""
        self.live = False
        if self.count != len(self.view):
            return False
        return self._opening.proves() if self._opening is not None else self.crc == crc

    @property
    def payload(self) -> Buffer:
        """The payload; empty if the lease has ended."""
        return self.view if self.live else b""

    def cancel(self) -> None:
        """End the lease, because the payload will not be complete or is not wanted."""
        if self.live:
            self.live = False
            self._on_cancel()
