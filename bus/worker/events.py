"""The events of a worker's machine that are not messages: results of effects, users' actions."""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..observed import Checked
from ..staged import Copying, Patching, SharedMemory


class Granted(msgspec.Struct, frozen=True):
    """The memory that `Reserve` requested; None: there is none."""

    model: str
    key: tuple[int, int] | None
    buffer: NDArray[np.uint8] | None


class Opened(msgspec.Struct, frozen=True):
    """The shared memory that `Open` requested; None: it is of another host."""

    model: str
    key: tuple[int, int]
    memory: SharedMemory | None


class Copied(msgspec.Struct, frozen=True):
    """A copy has ended, with the checksum of each chunk; None: it failed.

    The memory was locked, held another version before or after the copy, or the copy was cancelled.
    """

    copying: Copying
    crcs: NDArray[np.uint32] | None

    @property
    def model(self) -> str:
        """The model."""
        return self.copying.model


class Decoded(msgspec.Struct, frozen=True):
    """A patch was decoded, which took `seconds`; or could not be, for the reason in `fault`."""

    patching: Patching
    fault: str
    seconds: float = 0.0

    @property
    def model(self) -> str:
        """The model."""
        return self.patching.model


Outcome = Literal["taken", "put-back", "applied", "declined", "failed", "torn", "stale", "newer"]


class Report(msgspec.Struct, frozen=True):
    """The outcome of a version that was ready: an event of `phases.py`.

    Attributes:
        model, key: The version.
        what: `declined`: it was rejected, or did not fit, and the version before still runs;
            `failed`: there was no room for it, which there may be later; `torn`: it failed
            half-way, and no version runs; `newer`: another version is or will be applied in its
            place.
        text: Why it was not applied; if it was, a remark to report.
        digest: The digest of the bytes, if they were hashed only during the apply.
        still: The deadline has passed, and the user's code has not returned: the version stays
            where it is until another report says that it has. (W24)
        bytes: The memory that holds the applied bytes from now on, if any does: its staging buffer,
            or a model that is resident.
        kept: The user continues to use its staging buffer, which must not be recycled.
        misfit: It was rejected since the model has other names, shapes or dtypes now.
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
    """What delays the apply of a version, and since when."""

    model: str
    key: tuple[int, int]
    text: str


class Wanted(msgspec.Struct, frozen=True):
    """The user wants only this version of a model, until the next such event; None: the latest."""

    model: str
    key: tuple[int, int] | None


class Examined(msgspec.Struct, frozen=True):
    """The result of `Examine`."""

    answer: Checked


class Flush(msgspec.Struct, frozen=True):
    """The user waits until the publisher has received earlier messages; `Flushed` answers it."""

    mark: int


OfSlot = Granted | Opened | Copied | Decoded | Report | Waits | Wanted  # these have a `model`
Happening = OfSlot | Examined | Flush
