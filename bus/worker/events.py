"""The events of a worker's machine besides messages: results of effects, and users' actions."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..messages import Checked
from ..staged import Copying, Patching, SharedMemory, SourceFetch


class Granted(msgspec.Struct, frozen=True):
    """The result of `Reserve`; `buffer` is None if there is not enough memory."""

    model: str
    key: tuple[int, int] | None
    buffer: NDArray[np.uint8] | None


class Opened(msgspec.Struct, frozen=True):
    """The result of `Open`; `memory` is None if this process cannot read the segment."""

    model: str
    key: tuple[int, int]
    memory: SharedMemory | None


class Copied(msgspec.Struct, frozen=True):
    """The end of a copy; `crcs` has the checksum of each chunk, or is None if the copy failed.

    A copy fails if it is cancelled, or if the memory is locked or holds another version.
    """

    copying: Copying
    crcs: NDArray[np.uint32] | None

    @property
    def model(self) -> str:
        """The model's name."""
        return self.copying.model


class Decoded(msgspec.Struct, frozen=True):
    """The end of decoding a patch; `fault` is an error text, empty on success."""

    patching: Patching
    fault: str
    seconds: float = 0.0  # how long the decoding took

    @property
    def model(self) -> str:
        """The model's name."""
        return self.patching.model


class SourceFetched(msgspec.Struct, frozen=True):
    """Chunks that a `FetchFromSources` has fetched since the last such event.

    Attributes:
        job: The job that has fetched them.
        chunks: Index and CRC-32C of each new chunk.
        over: Whether the job has ended.
        faults: Why chunks are missing, with a text for each source that failed.
    """

    job: SourceFetch
    chunks: Sequence[tuple[int, int]]
    over: bool = False
    faults: Sequence[str] = ()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.job.announce.model


Outcome = Literal["taken", "put-back", "applied", "declined", "failed", "torn", "stale", "newer"]


class Report(msgspec.Struct, frozen=True):
    """The outcome of a version that was ready.

    Attributes:
        model, key: The model's name, and the version's (epoch, version).
        what: An event of `tables.py`. `declined`: the version was rejected or did not fit, and the
            previous version still runs. `failed`: there is no memory for the version now. `torn`:
            the apply failed half-way, and no version runs. `newer`: another version is or will be
            applied instead of this one.
        text: Why the version was not applied; for an applied version, a remark to report.
        digest: The digest of the bytes, if they were not hashed before the apply; otherwise empty.
        still: Whether the deadline has passed but the user's code has not returned. If so, the
            version keeps its phase until another report says that the code has returned. (W24)
        bytes: The memory that has the applied bytes from now on: the version's staging buffer, or
            the memory of the model. None: no such memory is known.
        kept: Whether the user still uses the version's buffer, so that it must not be reused.
        misfit: Whether the version was rejected because the model now has other names, shapes or
            dtypes.
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
    """A delay of an apply; `text` says what the apply waits for, and since when."""

    model: str
    key: tuple[int, int]
    text: str


class Wanted(msgspec.Struct, frozen=True):
    """The user wants only the version `key`. If `key` is None: the user wants the latest again."""

    model: str
    key: tuple[int, int] | None


class Examined(msgspec.Struct, frozen=True):
    """The result of `Examine`: the answer to a publisher's check of the weights."""

    answer: Checked


class Flush(msgspec.Struct, frozen=True):
    """A request for a `Flushed` effect, once the publisher has received all earlier messages."""

    mark: int


class Probed(msgspec.Struct, frozen=True):
    """The result of `Probe`: whether a publisher answers at the probed address."""

    reached: bool


OfModel = (  # the events that have a `model`
    Granted | Opened | Copied | Decoded | SourceFetched | Report | Waits | Wanted
)
LoopEvent = OfModel | Examined | Flush | Probed
