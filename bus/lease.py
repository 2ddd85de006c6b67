"""Defines a lease: the right of a socket to receive one payload into memory of a version.

The socket fills the memory piece by piece. The owner of the memory may end the lease at any time.
Once the memory is full, the socket hands the lease to the machine instead of the payload.
"""

from collections.abc import Callable

from ..codecs.native import crc32c
from ..codecs.sealing import Opening
from .headers import Buffer
from .messages import PublisherMessage


def _do_nothing() -> None:
    """Do nothing."""


class Lease:
    """Memory into which a payload is being received.

    Args:
        view: The memory, as large as the payload.
        message: The message that the payload belongs to, if any.
        on_cancel: Called if the payload will never be complete, or is no longer wanted.
        hashed: Whether to compute `crc`.
        opening: Decrypts a sealed payload in place; None: the payload is not encrypted.
    """

    def __init__(
        self,
        view: memoryview,
        message: PublisherMessage | None = None,
        on_cancel: Callable[[], object] = _do_nothing,
        *,
        hashed: bool = True,
        opening: Opening | None = None,
    ) -> None:
        self.view, self.message = view, message
        self.live = True  # False once the lease has ended, so the memory may be used otherwise
        self.count = 0  # bytes received
        self.crc = 0  # CRC-32C of the received bytes, computed while they are in the cache
        self._on_cancel, self._hashed, self._opening = on_cancel, hashed, opening

    def received(self, count: int) -> None:
        """Decrypt and hash the next `count` bytes, which were received into `view`."""
        begin, self.count = self.count, self.count + count
        if self._opening is not None:
            self._opening.decrypt_next(self.view[begin : self.count], self.view[begin : self.count])
        if self._hashed:
            self.crc = crc32c(self.view[begin : self.count], self.crc)

    def end(self, crc: int | None = None) -> bool:
        """End the lease; return True if the payload is complete and its `crc` or tag matches."""
        self.live = False
        if self.count != len(self.view):
            return False
        return self._opening.proves() if self._opening is not None else self.crc == crc

    @property
    def payload(self) -> Buffer:
        """The payload; empty if the lease has ended."""
        return self.view if self.live else b""

    def cancel(self) -> None:
        """End the lease and call `on_cancel`, unless the lease has ended already."""
        if self.live:
            self.live = False
            self._on_cancel()
