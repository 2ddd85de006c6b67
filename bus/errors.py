"""The exceptions of the bus.

WeightBusError
    LayoutError, StateError     the weights themselves (codecs/errors.py)
    ProtocolError               a peer broke the protocol
    AddressError                an endpoint is invalid, or cannot be bound
    KeysError                   keys cannot be read, made or used
    UnknownWorkerError          a publish names a worker that has never joined
    WorkersMissingError         not enough workers joined in time
    DeadlineError               the weights were not copied in time; nothing was published
    PublishError                a publish did not meet its requirement; `receipt` says why
    RefusedError                the publisher does not serve this worker
    ApplyError                  a version could not be applied; the previous one still runs
        TornError               an apply failed half-way; no version runs until the next is applied
    ClosedError                 the publisher or subscriber was closed
"""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ..codecs.errors import WeightBusError

if TYPE_CHECKING:
    from .receipt import Receipt, Receipts


# The `errno` of errors that mean that disk, memory or descriptors are exhausted.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}

FRAMES_SHOWN = 5  # innermost frames of a traceback that a report contains
PACKAGE_FOLDERS = [
    Path(__file__).parent.parent / shelf for shelf in ("bus", "codecs", "python_client")
]


class ProtocolError(WeightBusError):
    """A peer broke the protocol. Its message is dropped, and the session continues.

    Args:
        text: The error text: what was received, and what is allowed.

    Attributes:
        code: The code of the `refuse` message that the peer gets.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, code: str = "malformed") -> None:
        super().__init__(text)
        self.code = code


class AddressError(WeightBusError, OSError):
    """An endpoint cannot be bound or connected to."""

    __module__ = "weightbus"


class KeysError(WeightBusError, ValueError):
    """Keys cannot be read, made or used."""

    __module__ = "weightbus"


class UnknownWorkerError(WeightBusError, LookupError):
    """A call of publish names workers that have never joined this publisher."""

    __module__ = "weightbus"


class WorkersMissingError(WeightBusError, TimeoutError):
    """Not enough workers joined in time."""

    __module__ = "weightbus"


class DeadlineError(WeightBusError, TimeoutError):
    """The weights of a publish were not copied within its timeout; nothing was published."""

    __module__ = "weightbus"


class PublishError(WeightBusError):
    """A publish did not reach the required workers in time; the text names the missing workers.

    Attributes:
        receipt: The receipt: what every worker did with the version, and when.
        receipts: After `publish_many`: the receipts of all models, of which `receipt` is the first.
            After other calls: None.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, receipt: Receipt, receipts: Receipts | None = None) -> None:
        super().__init__(text)
        self.receipt, self.receipts = receipt, receipts


class RefusedError(WeightBusError):
    """The publisher refuses to serve this worker; the text says why.

    Attributes:
        code: The publisher's code, such as `name-taken`.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class ApplyError(WeightBusError):
    """A version could not be staged or applied; the worker still runs the previous version.

    Args:
        text: The reason.

    Attributes:
        model, epoch, version: The version that was not applied.
        code: The code that the worker reported to the publisher.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, *, model: str, epoch: int, version: int, code: str) -> None:
        super().__init__(text)
        self.model, self.epoch, self.version, self.code = model, epoch, version, code


class TornError(ApplyError):
    """An apply failed half-way, and the model has parts of two versions: no version runs.

    The next successful apply repairs the model; the worker retries this version a few times.
    """

    __module__ = "weightbus"


def not_applied(
    model: str, epoch: int, version: int, cause: BaseException, *, intact: bool
) -> ApplyError:
    """Return the error for a version that could not be applied because of `cause`.

    `intact`: True if the model still has the previous version; False if it has parts of both.
    """
    no_room = isinstance(cause, MemoryError) or getattr(cause, "errno", None) in NO_ROOM
    begun = "" if intact else ", and no version runs until the next one is applied"
    error = (ApplyError if intact else TornError)(
        f"{model} version {version} could not be applied{begun}: {cause}",
        model=model,
        epoch=epoch,
        version=version,
        code="no-memory" if no_room and intact else "apply",  # the worker retries `no-memory`
    )
    error.__cause__ = cause
    return error


def rejected(model: str, epoch: int, version: int, code: str, text: str) -> ApplyError:
    """Return the error for a version that was rejected before any of its bytes was applied."""
    later = ""
    if code == "layout-mismatch":
        later = ". Once names, shapes and dtypes here fit, it is applied without another publish"
    return ApplyError(
        f"{model} version {version} cannot be applied here ({code}): {text}{later}",
        model=model,
        epoch=epoch,
        version=version,
        code=code,
    )


def summary_of(error: BaseException) -> str:
    """Return an error's type and text, with the error's innermost frames in the user's code.

    The text is for another process, where there is no traceback. The innermost frame is last.
    """
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(shelf) for shelf in PACKAGE_FOLDERS)
    ]
    where = f" (at {', '.join(frames[-FRAMES_SHOWN:])})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def on_one_line(error: BaseException) -> str:
    """Return an error's text on one line, for the log."""
    return "; ".join(line.strip() for line in str(error).splitlines())


class ClosedError(WeightBusError):
    """The publisher or subscriber was closed, or one of its threads failed (`__cause__`)."""

    __module__ = "weightbus"

    @classmethod
    def of(cls, what: str, cause: BaseException | None) -> ClosedError:
        """Return the error for a closed `what` (`publisher` or `subscriber`), with its `cause`."""
        if cause is None or isinstance(cause, ClosedError):
            return cls(f"this {what} is closed" + (f": {cause}" if cause is not None else ""))
        error = cls(f"this {what} has ended, since its thread failed: {cause!r}; make a new one")
        error.__cause__ = cause
        return error
