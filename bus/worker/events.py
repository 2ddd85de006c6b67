"""What a worker's machine is told that is no message: how its effects ended, and what users do."""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..observed import Checked
from ..staged import Copying, Patching, SharedMemory


class Granted(msgspec.Struct, frozen=True):
    """There is memory, as `Reserve` asked for; or there is none."""

    model: str
    key: tuple[int, int] | None
    buffer: NDArray[np.uint8] | None


class Opened(msgspec.Struct, frozen=True):
    """Shared memory is open, as `Open` asked for; None: it is not of this host."""

    model: str
    key: tuple[int, int]
    memory: SharedMemory | None


class Copied(msgspec.Struct, frozen=True):
    """A copy has ended, with the checksum of each chunk; None: it is of no use.

    The memory was locked, or held another version before or after the copy, or nobody wanted it.
    """

    copying: Copying
    crcs: NDArray[np.uint32] | None

    @property
    def model(self) -> str:
        """Of which model."""
        return self.copying.model


class Decoded(msgspec.Struct, frozen=True):
    """A patch was decoded, in so many seconds; or is of no use, and why."""

    patching: Patching
    fault: str
    seconds: float = 0.0

    @property
    def model(self) -> str:
        """Of which model."""
        return self.patching.model


Outcome = Literal["taken", "put-back", "applied", "declined", "failed", "torn", "stale", "newer"]


class Report(msgspec.Struct, frozen=True):
    """What became of a version that was ready: an event of `phases.py`.

    Attributes:
        model, key: Which one.
        what: `declined`: it was turned down, or did not fit, and what ran before still runs;
            `failed`: there was no room for it, which there may be later; `torn`: it failed
            half-way, and nothing runs; `newer`: another is or will be applied in its place.
        text: Why, where it was not applied; else what is to be said of it.
        digest: What the bytes hash to, if they were hashed only when they were applied.
        still: The user's part has no time left, and has not returned: the version stays where it
            is until it has, which another report says. (W24)
        bytes: Where the bytes of what was applied lie from now on, if they do anywhere: in its
            staging buffer, or in a model that is resident.
        kept: The user goes on using its staging buffer, which is to serve nothing else.
        misfit: It was turned down since the model has other names, shapes or dtypes by now.
    """

    model: str
    key: tuple[int, int]
    what: Outcome
    text: str = ""
    digest: str = ""
    still: bool = False
    bytes: NDArray[np.uint8] | None = None
    kept: bool = False
    misfit: bool = False


class Waits(msgspec.Struct, frozen=True):
    """A version cannot be applied yet, and this is who is in the way, since when."""

    model: str
    key: tuple[int, int]
    text: str


class Wanted(msgspec.Struct, frozen=True):
    """The user wants this version of a model, and no other until it says so; None: the latest."""

    model: str
    key: tuple[int, int] | None


class Examined(msgspec.Struct, frozen=True):
    """The weights have been looked at, as `Examine` asked for, and this is to be said of them."""

    answer: Checked


class Flush(msgspec.Struct, frozen=True):
    """The user waits until the publisher has heard what was said before: then `Flushed` says so."""

    mark: int


OfSlot = Granted | Opened | Copied | Decoded | Report | Waits | Wanted  # it has a `model`
Happening = OfSlot | Examined | Flush
