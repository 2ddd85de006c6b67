"""The messages between observers and publishers: the roster's changes, in pages.

An observer is not a worker. An observer sends `observe` repeatedly, and each answer has the changes
since the previous answer: rows of models, rows of workers, and events. A page fits a header. Times
are sent as ages in milliseconds, so that clocks need not agree.

    observer              publisher              worker
    verify(worker) ──────> check ───────────────> sums its present weights
    verified <──────────── compares <──────────── checked
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final, Literal

import msgspec

from .limits import (
    CHECK_NAMES_MAX,
    DIFFERENCES_TOLD,
    ERROR_MAX,
    EVENTS_TOLD,
    HEADER_BYTES_MAX,
    MODELS_MAX,
    PAGE_ROWS_MAX,
    VERSIONS_TOLD,
)
from .messages import (
    Buffer,
    Count,
    Crc,
    Label,
    Message,
    Metadata,
    Name,
    Positive,
    PublisherMessage,
    Refuse,
    SanitizedText,
    Text,
    WorkerMessage,
    decode,
)

CHECKING: Final = "checking"  # the feature of a worker that answers `check`

Error = Annotated[str, msgspec.Meta(max_length=ERROR_MAX)]

Phase = Literal["", "receiving", "staged", "applying"]
Transport = Literal["pulled", "pushed", "shared"]

PAGE_BYTES: Final = HEADER_BYTES_MAX - 1024  # bytes of rows: the rest is for other fields


class Observe(Message, tag="observe", frozen=True, kw_only=True):
    """Request the changes since revision `since` of an epoch, in at most `pages` pages."""

    epoch: Count = 0
    since: Count = 0
    pages: Positive = 1


class Published(msgspec.Struct, frozen=True):
    """A version, and how long ago it was published."""

    version: Positive
    age_ms: Count


Ages = Annotated[list[Published], msgspec.Meta(max_length=VERSIONS_TOLD)]


class Doing(SanitizedText, frozen=True, omit_defaults=True):
    """The state of a model at a worker: which versions run, arrive, or have failed."""

    epoch: Count = 0
    version: Count = 0
    newest: Count = 0
    took_us: Count = 0
    incoming: Count = 0
    phase: Phase = ""
    chunks: Count = 0
    count: Count = 0
    idle_ms: Count = 0
    failed: Count = 0
    error: Error = ""


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's latest version for all workers, and the ages of this and earlier versions."""

    name: Name
    version: Count
    nbytes: Count
    encoding: Name
    published: Ages = []
    metadata: Metadata = {}


class WorkerRow(SanitizedText, frozen=True, omit_defaults=True):
    """A worker, and the state of each of its models."""

    name: Name
    state: Literal["live", "stuck", "lost"]
    road: Transport
    heard_ms: Count
    models: Annotated[dict[Name, Doing], msgspec.Meta(max_length=MODELS_MAX)]
    client: Label = ""
    host: Label = ""
    pid: Count = 0


class Happened(SanitizedText, frozen=True, omit_defaults=True):
    """An event of a worker. After the event `left`, the worker is no longer on the roster."""

    kind: Name
    worker: Name
    text: Error
    age_ms: Count


ModelRows = Annotated[list[ModelRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
WorkerRows = Annotated[list[WorkerRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
Events = Annotated[list[Happened], msgspec.Meta(max_length=EVENTS_TOLD)]
Row = ModelRow | WorkerRow | Happened


class RosterPage(Message, tag="roster", frozen=True, kw_only=True):
    """The changes since the revision `since`, up to the revision `revision`."""

    epoch: Count
    since: Count
    revision: Count
    latest: Count
    workers: Count
    more: bool = False
    follows: bool = False
    time_ms: Count = 0
    models: ModelRows = []  # noqa: RUF012 - a struct copies it
    rows: WorkerRows = []  # noqa: RUF012 - a struct copies it
    events: Events = []  # noqa: RUF012 - a struct copies it


class Check(Message, tag="check", frozen=True, kw_only=True):
    """Request the checksums of a worker's present weights, from tensor number `first` on."""

    model: Name
    epoch: Count
    version: Positive
    first: Count = 0


Sums = Annotated[list[Crc | None], msgspec.Meta(max_length=CHECK_NAMES_MAX)]


class Checked(Message, SanitizedText, tag="checked", frozen=True, kw_only=True):
    """Answer a check: the CRC-32C of each tensor (null: not comparable), or the reason for none."""

    model: Name
    epoch: Count
    version: Positive
    first: Count = 0
    sums: Sums = []  # noqa: RUF012 - a struct copies it
    code: Name | None = None
    text: Text = ""


class Verify(Message, tag="verify", frozen=True, kw_only=True):
    """Request a comparison of a worker's weights with the published weights."""

    worker: Name
    model: Name
    first: Count = 0


class Difference(SanitizedText, frozen=True):
    """A tensor that differs, with the checksums of the published and of the worker's bytes."""

    name: Error
    published: Crc
    runs: Crc


Differences = Annotated[list[Difference], msgspec.Meta(max_length=DIFFERENCES_TOLD)]


class Verified(Message, SanitizedText, tag="verified", frozen=True, kw_only=True):
    """Answer a verify: how many tensors were compared, and which of them differ."""

    worker: Name
    model: Name
    epoch: Count = 0
    version: Count = 0
    first: Count = 0
    count: Count = 0
    names: Count = 0
    unlike: Count = 0
    differing: Count = 0
    differences: Differences = []  # noqa: RUF012 - a struct copies it
    code: Name | None = None
    text: Text = ""


ToPublisher = WorkerMessage | Checked | Observe | Verify
ToWorker = PublisherMessage | Check
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


# Decodes messages to a worker like `messages.from_publisher`, and also `check`.
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
