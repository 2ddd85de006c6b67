"""What observers are told: who is there and who runs what, in pages that fit a header.

An observer is no worker. It asks with `observe`, again and again, and each answer
holds what has changed since the one before: rows of models, rows of workers, and what happened.
Times are ages in milliseconds at the moment of the answer, so that no two clocks need agree.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from .limits import (
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
    Label,
    Message,
    Name,
    Positive,
    Refuse,
    WorkerMessage,
    decode,
)

Error = Annotated[str, msgspec.Meta(max_length=ERROR_MAX)]

Phase = Literal["", "receiving", "staged", "applying"]

PAGE_BYTES: Final = HEADER_BYTES_MAX - 1024  # of rows: the rest is for what stands around them


class Observe(Message, tag="observe", frozen=True, kw_only=True):
    """An observer asks what has changed since a revision of an epoch."""

    epoch: Count = 0
    since: Count = 0


class Published(msgspec.Struct, frozen=True):
    """How long ago a version was published."""

    version: Positive
    age_ms: Count


Ages = Annotated[list[Published], msgspec.Meta(max_length=VERSIONS_TOLD)]


class Doing(msgspec.Struct, frozen=True, omit_defaults=True):
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


class WorkerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker, and how it stands with each of its models."""

    name: Name
    state: Literal["live", "stuck", "lost"]
    road: Literal["pulled", "pushed", "shared"]
    heard_ms: Count
    models: Annotated[dict[Name, Doing], msgspec.Meta(max_length=MODELS_MAX)]
    client: Label = ""
    host: Label = ""
    pid: Count = 0


class Happened(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something became of a worker; `left` says that it is no longer there."""

    kind: Name
    worker: Name
    text: Error
    age_ms: Count


ModelRows = Annotated[list[ModelRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
WorkerRows = Annotated[list[WorkerRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)]
Events = Annotated[list[Happened], msgspec.Meta(max_length=EVENTS_TOLD)]
Row = ModelRow | WorkerRow | Happened


class Roster(Message, tag="roster", frozen=True, kw_only=True):
    """What has changed since the revision that the observer named."""

    epoch: Count
    since: Count
    revision: Count
    latest: Count
    workers: Count
    more: bool = False
    models: ModelRows = []  # noqa: RUF012 - a struct copies it
    rows: WorkerRows = []  # noqa: RUF012 - a struct copies it
    events: Events = []  # noqa: RUF012 - a struct copies it


_TO_PUBLISHER: msgspec.json.Decoder[WorkerMessage | Observe] = msgspec.json.Decoder(
    WorkerMessage | Observe
)
_TO_OBSERVER: msgspec.json.Decoder[Roster | Refuse] = msgspec.json.Decoder(Roster | Refuse)


def to_publisher(frames: Sequence[Buffer]) -> WorkerMessage | Observe:
    """Decode what a worker or an observer sent.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_PUBLISHER, frames)[0]


def to_observer(frames: Sequence[Buffer]) -> Roster | Refuse:
    """Decode what a publisher sent to an observer.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    return decode(_TO_OBSERVER, frames)[0]


def printable(text: str, most: int | None = None) -> str:
    """Return a text of somebody else's on one line, without what moves a cursor or hides letters.

    Args:
        text: The text.
        most: Characters after which it is cut off.
    """
    clean = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(clean.split())[:most]
