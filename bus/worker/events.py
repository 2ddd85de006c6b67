"""The events of a worker's machine that are not messages: results of effects, users' actions."""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..observed import Checked
from ..staged import Copying, Patching, SharedMemory


class Granted(msgspec.Struct, frozen=True):
    """The result of `Reserve`; `buffer` is None if there is not enough memory."""

    model: str
    key: tuple[int, int] | None
    buffer: NDArray[np.uint8] | None


class Opened(msgspec.Struct, frozen=True):
    """The result of `Open`; `memory` is None if we cannot read the segment."""

    model: str
    key: tuple[int, int]
    memory: SharedMemory | None


class Copied(msgspec.Struct, frozen=True):
    """The end of a copy; `crcs` has the chunks' checksums, or is None if the copy failed.

    A copy fails if it is cancelled, or if the memory is locked or holds another version.
    """

    copying: Copying
    crcs: NDArray[np.uint32] | None

    @property
    def model(self) -> str:
        """The model."""
        return self.copying.model


class Decoded(msgspec.Struct, frozen=True):
    """The end of decoding a patch; `fault` is an error text, empty on success."""

    patching: Patching
    fault: str
    seconds: float = 0.0  # how long the decoding took

    @property
    def model(self) -> str:
        """The model."""
        return self.patching.model


Outcome = Literal["taken", "put-back", "applied", "declined", "failed", "torn", "stale", "newer"]


class Report(msgspec.Struct, frozen=True):
    """The outcome of a version that was ready.

    Attributes:
        model, key: The version.
        what: An event of `phases.py`. `declined`: the version was rejected, or did not fit, and the
            previous version still runs; `failed`: there is no memory for the version now; `torn`:
            the apply failed half-way, and no version runs; `newer`: another version is or will be
            applied in place of this one.
        text: Why the version was not applied; for an applied version, a remark to report.
        digest: The digest of the bytes, if they were hashed only during the apply.
        still: The deadline has passed, but the user's code has not returned: the version keeps its
            phase until the report of its return. (W24)
        bytes: The memory that holds the applied bytes from now on, if any does: the version's
            staging buffer, or a model that is resident.
        kept: The user continues to use the version's buffer, which must not be recycled.
        misfit: The version was rejected since the model has other names, shapes or dtypes now.
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
    """A delay of an apply; `text` says what delays the apply, and since when."""

    model: str
    key: tuple[int, int]
    text: str


class Wanted(msgspec.Struct, frozen=True):
    """The only version that the user wants; `key` is None for the latest version."""

    model: str
    key: tuple[int, int] | None


class Examined(msgspec.Struct, frozen=True):
    """The result of `Examine`: the answer to a check."""

    answer: Checked


class Flush(msgspec.Struct, frozen=True):
    """A request for `Flushed`, which reports that the publisher has received earlier messages."""

    mark: int


OfSlot = Granted | Opened | Copied | Decoded | Report | Waits | Wanted  # these have a `model`
Happening = OfSlot | Examined | Flush
