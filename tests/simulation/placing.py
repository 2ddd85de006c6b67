"""Places for payloads that nobody looks at but a test, which remembers what came before them."""

from collections.abc import Sequence

from weightbus.bus.headers import Buffer
from weightbus.bus.lease import Lease
from weightbus.bus.messages import Chunk
from weightbus.bus.net.zmtp import Arrived

ANY = Chunk(model="a", epoch=1, version=1, index=0, crc=0)


class Placed(Lease):
    """A place for any payload."""

    def __init__(self, frames: Sequence[Buffer], size: int) -> None:
        self.cancelled = False
        super().__init__(memoryview(bytearray(size)), ANY, self._note)
        self.frames = [bytes(frame) for frame in frames]

    def _note(self) -> None:
        self.cancelled = True


def frames_of(arrived: Arrived) -> list[bytes]:
    """Return a message as its frames, wherever its payload lies."""
    if isinstance(arrived, Placed):
        return [*arrived.frames, bytes(arrived.view) if arrived.live else b""]
    assert not isinstance(arrived, Lease)
    return [bytes(frame) for frame in arrived]
