"""What can go wrong on the bus, split by who can mend it.

WeightBusError
    LayoutError, StateError     the weights themselves (codecs/errors.py)
    ProtocolError               the peer sent what the protocol forbids
    AddressError                an endpoint cannot be bound, or makes no sense
    KeysError                   keys cannot be read or made, or are of no use here
    UnknownWorkerError          a publish names a worker that has never joined
    WorkersMissingError         not enough workers joined in time
    DeadlineError               the weights were not copied in time; nothing was published
    PublishError                a publish did not reach what it required; carries the receipt
    RefusedError                the publisher will not serve this worker
    ApplyError                  a version arrived but could not be applied; the old one still runs
        TornError               it failed half-way: no version runs until another is applied
    ClosedError                 the publisher or subscriber was closed
"""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ..codecs.errors import WeightBusError

if TYPE_CHECKING:
    from .receipt import Receipt


# On a disk, in memory, or among descriptors, for now.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}

FRAMES_TOLD = 5  # of a traceback: where it was raised, and who called that
OURS = [Path(__file__).parent.parent / shelf for shelf in ("bus", "codecs", "python_client")]


class ProtocolError(WeightBusError):
    """A peer broke the protocol; its message is dropped and the session goes on.

    Args:
        text: What was seen, and what is allowed.

    Attributes:
        code: The stable machine code that a `refuse` carries.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, code: str = "malformed") -> None:
        super().__init__(text)
        self.code = code


class AddressError(WeightBusError, OSError):
    """An endpoint cannot be bound or connected to."""

    __module__ = "weightbus"


class KeysError(WeightBusError, ValueError):
    """Keys cannot be read or made, or cannot be used here."""

    __module__ = "weightbus"


class UnknownWorkerError(WeightBusError, LookupError):
    """A publish names workers that have never joined this publisher."""

    __module__ = "weightbus"


class WorkersMissingError(WeightBusError, TimeoutError):
    """Not enough workers joined in time."""

    __module__ = "weightbus"


class DeadlineError(WeightBusError, TimeoutError):
    """The weights of a publish were not copied within its timeout; nothing was published."""

    __module__ = "weightbus"


class PublishError(WeightBusError):
    """A publish did not reach what it required before its deadline; `text` names those missing.

    Attributes:
        receipt: What every worker did, and when.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, receipt: Receipt) -> None:
        super().__init__(text)
        self.receipt = receipt


class RefusedError(WeightBusError):
    """The publisher refuses to serve this worker; `text` says why.

    Attributes:
        code: The publisher's machine code, such as `name-taken`.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class ApplyError(WeightBusError):
    """A version arrived but could not be staged or applied; the worker still runs the old one.

    Args:
        text: Why, in words.

    Attributes:
        model, epoch, version: The version that was not applied.
        code: The machine code that the worker reported to the publisher.
    """

    __module__ = "weightbus"

    def __init__(self, text: str, *, model: str, epoch: int, version: int, code: str) -> None:
        super().__init__(text)
        self.model, self.epoch, self.version, self.code = model, epoch, version, code


class TornError(ApplyError):
    """An apply failed half-way, and the model holds parts of two versions: no version runs there.

    The next apply that succeeds repairs it; the worker tries this version a few times more.
    """

    __module__ = "weightbus"


def not_applied(
    model: str, epoch: int, version: int, cause: BaseException, *, intact: bool
) -> ApplyError:
    """Return the error that says why a version could not be applied, and what runs now."""
    no_room = isinstance(cause, MemoryError) or getattr(cause, "errno", None) in NO_ROOM
    begun = "" if intact else ", and no version runs until one is applied, which mends it"
    error = (ApplyError if intact else TornError)(
        f"{model} version {version} could not be applied{begun}: {cause}",
        model=model,
        epoch=epoch,
        version=version,
        code="no-memory" if no_room and intact else "apply",  # that is tried again
    )
    error.__cause__ = cause
    return error


def rejected(model: str, epoch: int, version: int, code: str, text: str) -> ApplyError:
    """Return the error that says why a version was turned down before anything was written."""
    later = ""
    if code == "layout-mismatch":
        later = ". Once names, shapes and dtypes here fit, it is taken without another publish"
    return ApplyError(
        f"{model} version {version} cannot be applied here ({code}): {text}{later}",
        model=model,
        epoch=epoch,
        version=version,
        code=code,
    )


def told_of(error: BaseException) -> str:
    """Return what an error says and, on one line, where in the user's code it came from.

    For whoever is elsewhere and has no traceback: its innermost frames, the last one last.
    """
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(shelf) for shelf in OURS)
    ]
    where = f" (at {', '.join(frames[-FRAMES_TOLD:])})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def on_one_line(error: BaseException) -> str:
    """Return what an error says for a record of the log: one line, however many tensors differ."""
    return "; ".join(line.strip() for line in str(error).splitlines())


class ClosedError(WeightBusError):
    """The publisher or subscriber was closed, or one of its threads has ended: see the cause."""

    __module__ = "weightbus"

    @classmethod
    def of(cls, what: str, cause: BaseException | None) -> ClosedError:
        """Return the error of `what` (publisher or subscriber) that has ended, and its `cause`."""
        if cause is None or isinstance(cause, ClosedError):
            return cls(f"this {what} is closed" + (f": {cause}" if cause is not None else ""))
        error = cls(f"this {what} has ended, since its thread failed: {cause!r}; make a new one")
        error.__cause__ = cause
        return error
