"""Encodes and decodes the headers of messages, and names the topics of a model.

    on PUB       [topic] [header] [payload]...
    on ROUTER    [identity] [header] [payload]...
    on DEALER    [header] [payload]...

A header is one JSON object, `{"wbp":1,"type":"announce",...}`; `messages.py` has the types.
"""

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final, TypeVar

import msgspec

from .errors import ProtocolError
from .messages import PAYLOADS, Announce, PublisherMessage, Welcome, WorkerMessage
from .protocol_limits import HEADER_BYTES_MAX, MODELS_MAX, TEXT_MAX
from .structs import Message

WBP: Final = 1
PAYLOAD_INDEX: Final = 2  # index of a published message's payload, after topic and header
TOKEN_BYTES: Final = 32  # hexadecimal digits of a ticket, and of an upstream token

Buffer = bytes | bytearray | memoryview

_TOKEN: Final = re.compile(rf"[0-9a-f]{{{TOKEN_BYTES}}}\Z")
_CONTROL_TOPIC: Final = re.compile(rb"([A-Za-z0-9._-]{1,128})/ctl\Z")
_M = TypeVar("_M", bound=Message)


class _ProtocolNumber(msgspec.Struct, frozen=True):
    """A header of which only the protocol number is decoded."""

    wbp: int = 0


_ENCODER = msgspec.json.Encoder()
_NUMBER: msgspec.json.Decoder[_ProtocolNumber] = msgspec.json.Decoder(_ProtocolNumber)
_FROM_WORKER: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)
_FROM_PUBLISHER: msgspec.json.Decoder[PublisherMessage] = msgspec.json.Decoder(PublisherMessage)


def encode(message: Message) -> bytes:
    """Return the header frame of a message."""
    return b'{"wbp":1,' + _ENCODER.encode(message)[1:]


def decode(
    decoder: msgspec.json.Decoder[_M], frames: Sequence[Buffer]
) -> tuple[_M, Sequence[Buffer]]:
    """Decode a message from its frames, without the topic; return (message, payload frames).

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
    """Return all topics of a model."""
    return control_topic(model), data_topic(model), patch_topic(model)


def model_of(topic: bytes) -> str | None:
    """Return the model that a control topic belongs to; None for any other topic."""
    match = _CONTROL_TOPIC.match(topic)
    return match[1].decode() if match else None
