"""The messages of WBP/1, and how they are encoded.

    on PUB       [topic] [header] [payload]...
    on ROUTER    [identity] [header] [payload]...
    on DEALER    [header] [payload]...

A header is one JSON object, `{"wbp":1,"type":"announce",...}`. The annotations below are the types
and bounds of the fields. Decoding checks these, so a machine never gets a value out of bounds.
Unknown fields are ignored, so that the protocol can grow. `docs/protocol` has each field's meaning.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Annotated, Final, Literal, TypeVar, cast

import msgspec

from ..codecs.checksum import CHUNK_BYTES_MAX
from ..codecs.layout import HEADER_BYTES_MAX as LAYOUT_BYTES_MAX
from ..codecs.layout import PREFIX_BYTES
from ..codecs.words import printable
from .errors import ProtocolError
from .limits import (
    CHUNKS_MAX,
    FEATURES_MAX,
    FETCH_CHUNKS_MAX,
    GROUP_KEYS_MAX,
    HEADER_BYTES_MAX,
    INTEGER_MAX,
    LABEL_MAX,
    METADATA_MAX,
    METADATA_NAME_MAX,
    MODELS_MAX,
    PATCHES_MAX,
    TEXT_MAX,
    Timing,
)

WBP: Final = 1
NAME_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}\Z"

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Hex64 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Hex16 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=CHUNKS_MAX)]
Crc = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Models = Annotated[dict[Name, Count], msgspec.Meta(max_length=MODELS_MAX)]  # version by model
Features = Annotated[list[Name], msgspec.Meta(max_length=FEATURES_MAX)]
Keys = Annotated[list[Hex64], msgspec.Meta(max_length=GROUP_KEYS_MAX)]
Sealed = Annotated[bytes, msgspec.Meta(max_length=HEADER_BYTES_MAX)]
Label = Annotated[str, msgspec.Meta(max_length=LABEL_MAX)]
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=METADATA_NAME_MAX)],
        Text,
    ],
    msgspec.Meta(max_length=METADATA_MAX),
]

Buffer = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A message. `wbp` is the number of the protocol; 0 if the received header has none."""

    wbp: int = 0


class SanitizedText(msgspec.Struct, frozen=True):
    """A struct with texts from a peer, made safe for terminals, logs and web pages.

    Each text is made printable, and cut to its greatest length, when a struct is made or decoded.
    Names have a pattern instead, and strings for programs, such as paths, are not changed.
    """

    def __post_init__(self) -> None:
        for name, most in _text_fields(type(self)):
            text: str = getattr(self, name)
            if not text.isprintable() or len(text) > most:
                lines = text.replace(":\n", ": ").replace("\n", "; ")  # a list of differences
                msgspec.structs.force_setattr(self, name, printable(lines, most))


@cache
def _text_fields(kind: type[SanitizedText]) -> tuple[tuple[str, int], ...]:
    """Return (name, greatest length in characters) of each text field of a struct."""
    described = cast("msgspec.inspect.StructType", msgspec.inspect.type_info(kind))
    return tuple(
        (field.name, text.max_length)
        for field in described.fields
        if isinstance(text := field.type, msgspec.inspect.StrType) and text.max_length
    )


class Versioned(Message, frozen=True, kw_only=True):
    """A message about one version."""

    model: Name
    epoch: Count
    version: Positive


class Shared(msgspec.Struct, frozen=True):
    """A segment of shared memory: its path, and the token that the segment must contain."""

    path: Text
    token: Hex32


class Whole(msgspec.Struct, frozen=True):
    """Checksum and digest of a version whose only chunk is sent in its announcement."""

    crc: Crc
    digest: Hex64


class Number(msgspec.Struct, frozen=True):
    """A header of which only the protocol number is decoded."""

    wbp: int = 0


class Running(msgspec.Struct, frozen=True):
    """A version that a worker runs. `digest` is empty if the worker did not hash the version."""

    epoch: Count
    version: Positive
    digest: Digest


class PatchId(msgspec.Struct, frozen=True):
    """The id of a patch to a version: its encoding, and the base that it builds on."""

    encoding: Name
    epoch: Count
    version: Positive


class Patch(PatchId, frozen=True):
    """A patch that a publisher offers: its id, the digest of its base, and its size."""

    digest: Hex64
    nbytes: Positive


Patches = Annotated[list[Patch], msgspec.Meta(max_length=PATCHES_MAX)]

# Worker to publisher.


class Hello(Message, SanitizedText, tag="hello", frozen=True, kw_only=True):
    """Request to join. `models` has each model of the worker, with the version that it runs."""

    name: Name
    instance: Hex32
    models: Annotated[dict[Name, Running | None], msgspec.Meta(max_length=MODELS_MAX)]
    epoch: Count = 0
    age_ms: Count = 0
    features: Features = []
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


class Progress(Versioned, SanitizedText, tag="progress", frozen=True, kw_only=True):
    """Report how many chunks of a version have arrived, and what the worker does with it."""

    chunks: Count
    phase: Literal["receiving", "staged", "applying"] = "receiving"
    patch: PatchId | None = None
    waits: Label = ""


class Staged(Versioned, tag="staged", frozen=True, kw_only=True):
    """Report that a version is complete and verified, and not applied yet."""

    digest: Hex64
    patch: PatchId | None = None


class Applied(Versioned, tag="applied", frozen=True, kw_only=True):
    """Report that the worker runs a version. `digest` is empty if the version was not hashed."""

    digest: Digest
    patch: PatchId | None = None
    decode_us: Count = 0
    note: Text = ""  # made printable where it is used, since it is mostly empty


class Failed(Versioned, SanitizedText, tag="failed", frozen=True, kw_only=True):
    """Report that a version failed. `intact` is true if the previous version still runs."""

    code: Name
    text: Text
    intact: bool = True


class Bye(Message, tag="bye", frozen=True, kw_only=True):
    """Leave the session."""


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


# Publisher to worker.


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """Admit a worker, and send the data endpoint, and the latest version of each model."""

    epoch: Count
    data: Text
    ping_ms: Annotated[int, msgspec.Meta(ge=1, le=1000 * Timing.PING_MAX)]
    lost_ms: Annotated[int, msgspec.Meta(ge=2, le=1000 * Timing.LOST_MAX)]
    models: Models
    shared: Shared | None = None
    age_ms: Count = 0
    features: Features = []
    keys: Keys = []


class Rekey(Message, tag="rekey", frozen=True, kw_only=True):
    """Send the group keys. The last one encrypts messages from now on."""

    epoch: Count
    keys: Keys


class Prepare(Message, tag="prepare", frozen=True, kw_only=True):
    """Announce the segment in which the first version of a model will be."""

    model: Name
    epoch: Count
    nbytes: Count
    shared: Shared


class Rename(Versioned, tag="rename", frozen=True, kw_only=True):
    """Give the running version `was` another epoch and number; the bytes are equal."""

    was: Running
    metadata: Metadata = {}


class Announce(Versioned, tag="announce", frozen=True, kw_only=True):
    """Announce a version. The payload may be the layout or, with `whole`, all of its data."""

    layout: Hex64
    layout_bytes: Annotated[int, msgspec.Meta(ge=10, le=LAYOUT_BYTES_MAX + PREFIX_BYTES)]
    nbytes: Count
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES_MAX)]
    commit: Literal["auto", "together"]
    acknowledge: Literal["applied", "staged"]
    encoding: Name
    encryption: Name | None = None
    key: Hex16 | None = None
    tag: Hex32 | None = None
    shared: Shared | None = None
    hash: bool = False
    whole: Whole | None = None
    keep: bool = False
    patches: Patches = []
    metadata: Metadata = {}


class Chunk(Versioned, tag="chunk", frozen=True, kw_only=True):
    """One chunk of a version's data section. The payload is the chunk."""

    index: Index
    crc: Crc
    patch: PatchId | None = None


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
    sealed: Sealed


class End(Versioned, tag="end", frozen=True, kw_only=True):
    """End the push of a version, and send its digest."""

    digest: Hex64
    patch: PatchId | None = None


class Commit(Versioned, tag="commit", frozen=True, kw_only=True):
    """Allow workers to apply the version that they have staged."""

    digest: Hex64


class Abort(Versioned, SanitizedText, tag="abort", frozen=True, kw_only=True):
    """Make workers drop the version that they have staged."""

    text: Text = ""


class Beacon(Message, tag="beacon", frozen=True, kw_only=True):
    """Repeat the number of a model's latest version (0: none yet)."""

    model: Name
    epoch: Count
    version: Count


class Refuse(Message, SanitizedText, tag="refuse", frozen=True, kw_only=True):
    """Refuse a worker or a message, with the reason."""

    code: Name
    text: Text
    model: Name | None = None
    epoch: Count = 0
    version: Count = 0


WorkerMessage = Hello | Fetch | Progress | Staged | Applied | Failed | Bye | Ping | Pong
AnyChunk = Chunk | SealedChunk
OfVersion = Announce | Chunk | SealedChunk | SealedMessage | End | Commit | Abort | Beacon
PublisherMessage = Welcome | Prepare | Rename | Rekey | OfVersion | Refuse | Ping | Pong

PAYLOAD: Final = 2  # index of a published message's payload, after topic and header
MAPPING: Final = "mapping"  # the feature of a worker that takes `prepare`
RENAMING: Final = "renaming"  # the feature of a worker that takes `rename`
DELTA: Final = "delta-1"  # the feature of a worker that decodes patches of this encoding
UPSTREAM: Final = "upstream"  # the feature of a worker that sends `applied` on its data connection
TICKET: Final = "ticket"  # the feature of a publisher with keys: a ticket for a data connection
TOKEN_BYTES: Final = 32  # hexadecimal digits of a ticket, and of an upstream token

# The least and greatest number of payload frames after a header; other types have none.
PAYLOADS: Final[dict[type[Message], tuple[int, int]]] = {
    Announce: (0, 1),
    SealedMessage: (0, 1),
    Chunk: (1, 1),
    SealedChunk: (1, 1),
}

_TOKEN: Final = re.compile(rf"[0-9a-f]{{{TOKEN_BYTES}}}\Z")
_CONTROL_TOPIC: Final = re.compile(rb"([A-Za-z0-9._-]{1,128})/ctl\Z")
_M = TypeVar("_M", bound=Message)

_ENCODER = msgspec.json.Encoder()
_NUMBER: msgspec.json.Decoder[Number] = msgspec.json.Decoder(Number)
_FROM_WORKER: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)
_FROM_PUBLISHER: msgspec.json.Decoder[PublisherMessage] = msgspec.json.Decoder(PublisherMessage)


def encode(message: Message) -> bytes:
    """Return the header frame of a message."""
    return b'{"wbp":1,' + _ENCODER.encode(message)[1:]


def decode(
    decoder: msgspec.json.Decoder[_M], frames: Sequence[Buffer]
) -> tuple[_M, Sequence[Buffer]]:
    """Decode a message from its frames (no topic); return the message and the payload frames.

    Raises:
        ProtocolError: The frames break the protocol.
    """
    if not frames:
        raise ProtocolError("a message without frames; at least a header frame is needed")
    if len(frames[0]) > HEADER_BYTES_MAX:
        raise ProtocolError(
            f"a header of {len(frames[0])} bytes; at most {HEADER_BYTES_MAX} are allowed"
        )
    try:
        message = decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _check_number(frames[0])  # a header with another number may not decode as WBP/1
        raise ProtocolError(f"not a header of WBP/1: {error}"[:TEXT_MAX]) from None
    if message.wbp != WBP:
        _check_number(frames[0])
    low, high = PAYLOADS.get(type(message), (0, 0))
    if isinstance(message, Announce) and message.whole is not None:
        low = high
    if not low <= len(frames) - 1 <= high:
        raise ProtocolError(
            f"{type(message).__name__.lower()} with {len(frames) - 1} payload frames; "
            f"{low} to {high} are allowed"
        )
    return message, frames[1:]


from_worker = partial(decode, _FROM_WORKER)
from_publisher = partial(decode, _FROM_PUBLISHER)


def _check_number(header: Buffer) -> None:
    """Raise a ProtocolError with `protocol-version` if the header has another protocol number."""
    try:
        number = _NUMBER.decode(header).wbp
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if number != WBP:
        raise ProtocolError(
            f"protocol number {number}; this side speaks {WBP}", code="protocol-version"
        )


@lru_cache(maxsize=2 * MODELS_MAX)
def control_topic(model: str) -> bytes:
    """Return the topic of a model's small messages, such as announcements."""
    return f"{model}/ctl".encode()


@lru_cache(maxsize=2 * MODELS_MAX)
def data_topic(model: str) -> bytes:
    """Return the topic of a model's chunks."""
    return f"{model}/dat".encode()


def token_of(welcome: Welcome, feature: str) -> str:
    """Return the 32 digits of a welcome's feature `upstream` or `ticket`; empty if it has none."""
    named = (each.removeprefix(f"{feature}.") for each in welcome.features if "." in each)
    return next((token for token in named if _TOKEN.match(token)), "")


@lru_cache(maxsize=2 * MODELS_MAX)
def patch_topic(model: str) -> bytes:
    """Return the topic of the chunks and ends of a model's patches."""
    return f"{model}/dlt".encode()


@lru_cache(maxsize=2 * MODELS_MAX)
def topics_of(model: str) -> tuple[bytes, ...]:
    return control_topic(model), data_topic(model), patch_topic(model)


def model_of(topic: bytes) -> str | None:
    """Return the model that a control topic belongs to; None for any other topic."""
    match = _CONTROL_TOPIC.match(topic)
    return match[1].decode() if match else None
