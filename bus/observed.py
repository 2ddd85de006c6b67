"""Decodes the messages between observers and publishers, with the roster's changes in pages.

An observer is not a worker. An observer sends `observe` repeatedly, and each answer, a *page*, has
changes since the previous answer: rows of models, rows of workers, and events. A page fits into a
header. Times are sent as ages in milliseconds, so that clocks need not agree.

    observer              publisher              worker
    verify(worker) ──────> check ───────────────> computes checksums of its weights
    verified <──────────── compares <──────────── checked
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from .headers import Buffer, decode
from .messages import (
    Check,
    Checked,
    Happened,
    ModelRow,
    Refuse,
    RosterPage,
    ToPublisher,
    ToWorker,
    Verified,
    WorkerRow,
)
from .protocol_limits import HEADER_BYTES_MAX

PAGE_BYTES: Final = HEADER_BYTES_MAX - 1024  # bytes of rows in a header, which has other fields too

Row = ModelRow | WorkerRow | Happened

_TO_PUBLISHER: msgspec.json.Decoder[ToPublisher] = msgspec.json.Decoder(ToPublisher)
_TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
_TO_OBSERVER: msgspec.json.Decoder[RosterPage | Verified | Refuse] = msgspec.json.Decoder(
    RosterPage | Verified | Refuse
)


def to_publisher(frames: Sequence[Buffer]) -> ToPublisher:
    """Decode a message from a worker or an observer.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_PUBLISHER, frames)[0]


# Decodes messages to a worker, like `headers.from_publisher`, but including `check`.
to_worker = partial(decode, _TO_WORKER)


def to_observer(frames: Sequence[Buffer]) -> RosterPage | Verified | Refuse:
    """Decode a message from a publisher to an observer.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_OBSERVER, frames)[0]


def unchecked(check: Check, code: str, text: str) -> Checked:
    """Return a worker's answer that it has no checksums, with the reason."""
    return Checked(
        model=check.model,
        epoch=check.epoch,
        version=check.version,
        first=check.first,
        code=code,
        text=text,
    )
