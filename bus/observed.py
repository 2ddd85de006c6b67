"""What observers are told: who is there and who runs what, in pages that fit a header.

An observer is no worker. It asks with `observe`, again and again, and each answer
holds what has changed since the one before: rows of models, rows of workers, and what happened.
Times are ages in milliseconds at the moment of the answer, so that no two clocks need agree.

    observer              publisher              worker
    verify(worker) ──────> check ───────────────> sums what its weights are now
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
    Text,
    Worded,
    WorkerMessage,
    decode,
)

CHECKING: Final = "checking"  # the feature of a worker that takes `check`

Error = Annotated[str, msgspec.Meta(max_length=ERROR_MAX)]

Phase = Literal["", "receiving", "staged", "applying"]
Road = Literal["pulled", "pushed", "shared"]

PAGE_BYTES: Final = HEADER_BYTES_MAX - 1024  # of rows: the rest is for what stands around them


class Observe(Message, tag="observe", frozen=True, kw_only=True):
    """An observer asks what has changed since a revision of an epoch."""

    epoch: Count = 0
    since: Count = 0
    pages: Positive = 1


class Published(msgspec.Struct, frozen=True):
    """How long ago a version was published."""

    version: Positive
    age_ms: Count


Ages = Annotated[list[Published], msgspec.Meta(max_length=VERSIONS_TOLD)]


class Doing(Worded, frozen=True, omit_defaults=True):
    """How a worker stands with a model: what runs, what is on its way, what went wrong."""

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
    """A model, its latest version for all, and when it and some before it were published."""

    name: Name
    version: Count
    nbytes: Count
    encoding: Name
    published: Ages = []
    metadata: Metadata = {}


class WorkerRow(Worded, frozen=True, omit_defaults=True):
    """A worker, and how it stands with each of its models."""

    name: Name
    state: Literal["live", "stuck", "lost"]
    road: Road
    heard_ms: Count
    models: Annotated[dict[Name, Doing], msgspec.Meta(max_length=MODELS_MAX)]
    client: Label = ""
    host: Label = ""
    pid: Count = 0


class Happened(Worded, frozen=True, omit_defaults=True):
    """Something became of a worker; `left` says that it is no longer there."""

    kind: Name
    worker: Name
    text: Error
    age_ms: Count


ModelRows = Annotated[list[ModelRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
WorkerRows = Annotated[list[WorkerRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
Events = Annotated[list[Happened], msgspec.Meta(max_length=EVENTS_TOLD)]
Row = ModelRow | WorkerRow | Happened


class RosterPage(Message, tag="roster", frozen=True, kw_only=True):
    """What has changed since the revision that the observer named."""

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
    """Say what the weights are by now of the version that you run, from a name on."""

    model: Name
    epoch: Count
    version: Positive
    first: Count = 0


Sums = Annotated[list[Crc | None], msgspec.Meta(max_length=CHECK_NAMES_MAX)]


class Checked(Message, Worded, tag="checked", frozen=True, kw_only=True):
    """The CRC-32C of each of some tensors, or why there are none; null: it cannot be compared."""

    model: Name
    epoch: Count
    version: Positive
    first: Count = 0
    sums: Sums = []  # noqa: RUF012 - a struct copies it
    code: Name | None = None
    text: Text = ""


class Verify(Message, tag="verify", frozen=True, kw_only=True):
    """An observer asks whether a worker's weights are those that were published."""

    worker: Name
    model: Name
    first: Count = 0


class Difference(Worded, frozen=True):
    """A tensor that is another at a worker than it was published."""

    name: Error
    published: Crc
    runs: Crc


Differences = Annotated[list[Difference], msgspec.Meta(max_length=DIFFERENCES_TOLD)]


class Verified(Message, Worded, tag="verified", frozen=True, kw_only=True):
    """What of a worker's weights differs from what was published, as far as was looked."""

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
    """Decode what a worker or an observer sent.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_PUBLISHER, frames)[0]


# Decodes what a publisher sent to a worker that can be verified, like `messages.from_publisher`.
to_worker = partial(decode, _TO_WORKER)


def to_observer(frames: Sequence[Buffer]) -> RosterPage | Verified | Refuse:
    """Decode what a publisher sent to an observer.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_OBSERVER, frames)[0]


def unchecked(check: Check, code: str, text: str) -> Checked:
    """Return a worker's word of why it has no sums of its weights."""
    return Checked(
        model=check.model,
        epoch=check.epoch,
        version=check.version,
        first=check.first,
        code=code,
        text=text,
    )
