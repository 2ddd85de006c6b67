"""The messages of WBP/1, and the objects in them. Made by `make protocol`; do not edit.

Decoding checks the types and bounds below, so a machine never gets a value out of bounds, and
ignores unknown fields, so that the protocol can grow. `headers.py` encodes and decodes messages;
`docs/protocol` has the meaning of each field.
"""

from typing import Annotated, Final, Literal

import msgspec

from ..codecs.protocol_limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNKS_MAX,
    INTEGER_MAX,
    LAYOUT_BYTES_MAX,
    METADATA_MAX,
    METADATA_NAME_MAX,
)
from .protocol_limits import (
    CHECK_NAMES_MAX,
    DIFFERENCES_LISTED,
    ERROR_MAX,
    EVENTS_LISTED,
    FEATURES_MAX,
    FETCH_CHUNKS_MAX,
    GROUP_KEYS_MAX,
    HEADER_BYTES_MAX,
    LABEL_MAX,
    MODELS_MAX,
    NAMED_MAX,
    PAGE_ROWS_MAX,
    PATCHES_MAX,
    RANGES_MAX,
    RELAYS_MAX,
    SOURCE_RANGES_MAX,
    SOURCES_MAX,
    TEXT_MAX,
    VERSIONS_LISTED,
)
from .structs import Message, SanitizedText

NAME_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}\Z"

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Label = Annotated[str, msgspec.Meta(max_length=LABEL_MAX)]
Error = Annotated[str, msgspec.Meta(max_length=ERROR_MAX)]
Hex16 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Hex64 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
Index = Annotated[int, msgspec.Meta(ge=0, le=CHUNKS_MAX - 1)]
Crc = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Models = Annotated[dict[Name, Count], msgspec.Meta(max_length=MODELS_MAX)]
MetadataName = Annotated[str, msgspec.Meta(max_length=METADATA_NAME_MAX)]
Metadata = Annotated[dict[MetadataName, Text], msgspec.Meta(max_length=METADATA_MAX)]
Phase = Literal["", "applying", "receiving", "staged"]
Transport = Literal["pulled", "pushed", "shared"]


class Versioned(Message, frozen=True, kw_only=True):
    """A message about one version."""

    model: Name
    epoch: Count
    version: Positive


# Objects in messages.


class Running(msgspec.Struct, frozen=True):
    """A version that a worker runs. `digest` is empty if the worker did not hash the version."""

    epoch: Count
    version: Positive
    digest: Digest


class Shared(msgspec.Struct, frozen=True):
    """A segment of shared memory: its path, and the token that the segment must contain."""

    path: Text
    token: Hex32


class PatchId(msgspec.Struct, frozen=True):
    """The id of a patch to a version: its encoding, and the base that it builds on."""

    encoding: Name
    epoch: Count
    version: Positive


class Whole(msgspec.Struct, frozen=True):
    """The checksum and digest of a version whose only chunk is sent in its announcement."""

    crc: Crc
    digest: Hex64


class Patch(PatchId, frozen=True):
    """A patch that a publisher offers: its id, the digest of its base, and its size."""

    digest: Hex64
    nbytes: Positive


class Source(msgspec.Struct, frozen=True):
    """Another publisher that has some chunks of a version, which its own publisher may lack."""

    address: Text
    chunks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=CHUNKS_MAX)]],
        msgspec.Meta(max_length=SOURCE_RANGES_MAX),
    ]


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
    patch: PatchId | None = None
    incoming_patch: PatchId | None = None


class WorkerRow(SanitizedText, frozen=True, omit_defaults=True):
    """A worker, and the state of each of its models."""

    name: Name
    state: Literal["live", "lost", "stuck"]
    road: Transport
    heard_ms: Count
    models: Annotated[dict[Name, Doing], msgspec.Meta(max_length=MODELS_MAX)]
    client: Label = ""
    host: Label = ""
    pid: Count = 0
    instance: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    relay: bool = False
    through: Annotated[list[Name], msgspec.Meta(max_length=RELAYS_MAX)] = []


class Published(msgspec.Struct, frozen=True):
    """A version, and how long ago it was published."""

    version: Positive
    age_ms: Count


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's latest version for all workers, and the ages of this and earlier versions."""

    name: Name
    version: Count
    nbytes: Count
    encoding: Name
    published: Annotated[list[Published], msgspec.Meta(max_length=VERSIONS_LISTED)] = []
    metadata: Metadata = {}


class Happened(SanitizedText, frozen=True):
    """An event of a worker. After the event `left`, the worker is no longer on the roster."""

    kind: Name
    worker: Name
    text: Error
    age_ms: Count


class Difference(SanitizedText, frozen=True):
    """A tensor that differs, with the checksums of the published and of the worker's bytes."""

    name: Error
    published: Crc
    runs: Crc


# Worker to publisher.


class Hello(Message, SanitizedText, tag="hello", frozen=True, kw_only=True):
    """Request to join. `models` has each model of the worker, with the version that it runs."""

    name: Name
    instance: Hex32
    models: Annotated[dict[Name, Running | None], msgspec.Meta(max_length=MODELS_MAX)]
    epoch: Count = 0
    age_ms: Count = 0
    features: Annotated[list[Name], msgspec.Meta(max_length=FEATURES_MAX)] = []
    client: Label = ""
    host: Label = ""
    pid: Count = 0


class Fetch(Message, SanitizedText, tag="fetch", frozen=True, kw_only=True):
    """Request `count` chunks of a version, from index `first` on; with 0, its announcement."""

    model: Name
    epoch: Count
    version: Count
    first: Index = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=FETCH_CHUNKS_MAX)] = 0
    layout: bool = False
    patch: PatchId | None = None
    unpatched: Label = ""
    ranges: Annotated[list[Count], msgspec.Meta(max_length=RANGES_MAX)] = []
    checksums: bool = False


class Applied(Versioned, tag="applied", frozen=True, kw_only=True):
    """Report that the worker runs a version. `digest` is empty if the version was not hashed."""

    digest: Digest
    note: Text = ""  # made printable where it is used, since it is mostly empty
    patch: PatchId | None = None
    decode_us: Count = 0


class Failed(Versioned, SanitizedText, tag="failed", frozen=True, kw_only=True):
    """Report that a version failed. `intact` is true if the previous version still runs."""

    code: Name
    text: Text
    intact: bool = True


class Bye(Message, tag="bye", frozen=True, kw_only=True):
    """Leave the session."""


class Progress(Versioned, SanitizedText, tag="progress", frozen=True, kw_only=True):
    """Report how many chunks of a version have arrived, and what the worker does with it."""

    chunks: Count
    phase: Literal["applying", "receiving", "staged"] = "receiving"
    waits: Label = ""
    patch: PatchId | None = None


class Staged(Versioned, tag="staged", frozen=True, kw_only=True):
    """Report that a version is complete and verified, and not applied yet."""

    digest: Hex64
    patch: PatchId | None = None


class Below(Message, tag="below", frozen=True, kw_only=True):
    """Report the workers behind a relay that changed, and those that left."""

    epoch: Count
    first: bool = False
    more: bool = False
    rows: Annotated[list[WorkerRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)] = []
    left: Annotated[list[Name], msgspec.Meta(max_length=PAGE_ROWS_MAX)] = []


# Both ways.


class Ping(Message, tag="ping", frozen=True, kw_only=True):
    """Request a pong. A worker adds whether it receives pushes and reads shared memory."""

    token: Count = 0
    subscribed: bool = False
    shared: bool = False


class Pong(Message, tag="pong", frozen=True, kw_only=True):
    """Answer a ping. A publisher adds the latest version of each of the worker's models."""

    token: Count = 0
    epoch: Count = 0
    models: Models = {}
    cut_off_ms: Count = 0


# Publisher to worker.


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """Admit a worker, and send the data endpoint, and the latest version of each model."""

    epoch: Count
    data: Text
    ping_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    lost_ms: Annotated[int, msgspec.Meta(ge=2, le=36_000_000)]
    models: Models
    age_ms: Count = 0
    features: Annotated[list[Name], msgspec.Meta(max_length=FEATURES_MAX)] = []
    shared: Shared | None = None
    keys: Annotated[list[Hex64], msgspec.Meta(max_length=GROUP_KEYS_MAX)] = []


class Announce(Versioned, tag="announce", frozen=True, kw_only=True):
    """Announce a version. The payload may be the layout or, with `whole`, all of its data."""

    layout: Hex64
    layout_bytes: Annotated[int, msgspec.Meta(ge=10, le=LAYOUT_BYTES_MAX + 8)]
    nbytes: Count
    chunk_bytes: Annotated[int, msgspec.Meta(ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)]
    commit: Literal["auto", "together"]
    acknowledge: Literal["applied", "staged"]
    encoding: Name
    encryption: Name | None = None
    whole: Whole | None = None
    shared: Shared | None = None
    hash: bool = False
    key: Hex16 | None = None
    tag: Hex32 | None = None
    keep: bool = False
    patches: Annotated[list[Patch], msgspec.Meta(max_length=PATCHES_MAX)] = []
    metadata: Metadata = {}
    workers: Annotated[list[Name], msgspec.Meta(max_length=NAMED_MAX)] = []
    sources: Annotated[list[Source], msgspec.Meta(max_length=SOURCES_MAX)] = []
    companions: Models = {}


class Chunk(Versioned, tag="chunk", frozen=True, kw_only=True):
    """One chunk of a version's data section. The payload is the chunk."""

    index: Index
    crc: Crc
    patch: PatchId | None = None


class Piece(Versioned, tag="piece", frozen=True, kw_only=True):
    """The bytes of a chunk that a worker needs. The payload is these bytes."""

    index: Index
    crc: Crc
    rest: Crc


class Checksums(Versioned, tag="checksums", frozen=True, kw_only=True):
    """The CRC of each chunk of a version. The payload has 4 bytes, little-endian, for each."""


class End(Versioned, tag="end", frozen=True, kw_only=True):
    """End the push of a version, and send its digest."""

    digest: Hex64
    patch: PatchId | None = None


class Refuse(Message, SanitizedText, tag="refuse", frozen=True, kw_only=True):
    """Refuse a worker or a message, with the reason."""

    code: Name
    text: Text
    model: Name | None = None
    epoch: Count = 0
    version: Count = 0


class Beacon(Message, tag="beacon", frozen=True, kw_only=True):
    """Repeat the number of a model's latest version (0: none yet)."""

    model: Name
    epoch: Count
    version: Count


class Commit(Versioned, tag="commit", frozen=True, kw_only=True):
    """Allow workers to apply the version that they have staged."""

    digest: Hex64


class Abort(Versioned, SanitizedText, tag="abort", frozen=True, kw_only=True):
    """Make workers drop the version that they have staged."""

    text: Text = ""


class Prepare(Message, tag="prepare", frozen=True, kw_only=True):
    """Announce the segment in which the first version of a model will be."""

    model: Name
    epoch: Count
    nbytes: Count
    shared: Shared


class SealedChunk(Versioned, tag="sealed_chunk", frozen=True, kw_only=True):
    """One encrypted chunk of a version's data section. The payload is the encrypted chunk."""

    index: Index
    key: Hex16
    tag: Hex32
    patch: PatchId | None = None


class SealedMessage(Message, tag="sealed_message", frozen=True, kw_only=True):
    """An encrypted announcement (its payload is not in `sealed`), end or beacon for all."""

    key: Hex16
    count: Positive
    sealed: Annotated[bytes, msgspec.Meta(max_length=HEADER_BYTES_MAX)]


class Rekey(Message, tag="rekey", frozen=True, kw_only=True):
    """Send the group keys. The last one encrypts messages from now on."""

    epoch: Count
    keys: Annotated[list[Hex64], msgspec.Meta(max_length=GROUP_KEYS_MAX)]


class Rename(Versioned, tag="rename", frozen=True, kw_only=True):
    """Give the running version `was` another epoch and number; the bytes are equal."""

    was: Running
    metadata: Metadata = {}


# To and from observers, and the sums of weights that an observer requests.


class Observe(Message, tag="observe", frozen=True, kw_only=True):
    """Request the changes since revision `since` of an epoch, in at most `pages` pages."""

    epoch: Count = 0
    since: Count = 0
    pages: Positive = 1


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
    models: Annotated[list[ModelRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)] = []
    rows: Annotated[list[WorkerRow], msgspec.Meta(max_length=PAGE_ROWS_MAX)] = []
    events: Annotated[list[Happened], msgspec.Meta(max_length=EVENTS_LISTED)] = []


class Check(Versioned, tag="check", frozen=True, kw_only=True):
    """Request the checksums of a worker's present weights, from tensor number `first` on."""

    first: Count = 0


class Checked(Versioned, SanitizedText, tag="checked", frozen=True, kw_only=True):
    """Answer a check: the CRC-32C of each tensor (null: not comparable), or the reason for none."""

    first: Count = 0
    sums: Annotated[list[Crc | None], msgspec.Meta(max_length=CHECK_NAMES_MAX)] = []
    code: Name | None = None
    text: Text = ""


class Verify(Message, tag="verify", frozen=True, kw_only=True):
    """Request a comparison of a worker's weights with the published weights."""

    worker: Name
    model: Name
    first: Count = 0


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
    differences: Annotated[list[Difference], msgspec.Meta(max_length=DIFFERENCES_LISTED)] = []
    code: Name | None = None
    text: Text = ""


WorkerMessage = Hello | Ping | Pong | Fetch | Applied | Failed | Bye | Progress | Staged | Below
PublisherMessage = (
    Welcome
    | Ping
    | Pong
    | Announce
    | Chunk
    | Piece
    | Checksums
    | End
    | Refuse
    | Beacon
    | Commit
    | Abort
    | Prepare
    | SealedChunk
    | SealedMessage
    | Rekey
    | Rename
)
ToPublisher = WorkerMessage | Observe | Checked | Verify
ToWorker = PublisherMessage | Check
AnyChunk = Chunk | Piece | SealedChunk

# The least and greatest number of payload frames; other types have none.
PAYLOADS: Final[dict[type[Message], tuple[int, int]]] = {
    Announce: (0, 1),
    Chunk: (1, 1),
    Piece: (1, 1),
    Checksums: (1, 1),
    SealedChunk: (1, 1),
    SealedMessage: (0, 1),
}

# Optional features.
MAPPING: Final = "mapping"  # accepts `prepare`, and maps a segment before its first version
RENAMING: Final = "renaming"  # accepts `rename`
DELTA: Final = "delta-1"  # decodes patches of this encoding
# sends `applied` on its data connection; of a publisher: `upstream.TOKEN`, the token for it
UPSTREAM: Final = "upstream"
TICKET: Final = "ticket"  # `ticket.TOKEN`, the ticket for a data connection
CHECKING: Final = "checking"  # answers `check`
RELAY: Final = "relay"  # of a worker: a relay, which sends `below`; of a publisher: accepts `below`
COMPANIONS: Final = "companions"  # applies a version and its companions as one
# of a worker: receives only a part of its versions; of a publisher: sends parts
PARTS: Final = "parts"
