"""Any frames are a message or a ProtocolError, and every message survives encoding."""

import json
import string
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import (
    Buffer,
    control_topic,
    data_topic,
    encode,
    from_publisher,
    from_worker,
    model_of,
)
from weightbus.bus.messages import (
    NAME_PATTERN,
    PAYLOADS,
    Ping,
    PublisherMessage,
    Refuse,
    WorkerMessage,
)
from weightbus.bus.protocol_limits import HEADER_BYTES_MAX
from weightbus.bus.structs import Message
from weightbus.python_client.checks import check_name

Decoder = Callable[[Sequence[bytes]], tuple[Message, Sequence[Buffer]]]

FROM_WORKER: tuple[type[Message], ...] = get_args(WorkerMessage)
FROM_PUBLISHER: tuple[type[Message], ...] = get_args(PublisherMessage)
DECODERS: list[tuple[Decoder, tuple[type[Message], ...]]] = [
    (from_worker, FROM_WORKER),
    (from_publisher, FROM_PUBLISHER),
]
BOTH = pytest.mark.parametrize(("decode", "types"), DECODERS, ids=["worker", "publisher"])
LETTERS = string.ascii_letters + string.digits + "._-"
NAMES = st.text(LETTERS, min_size=1, max_size=8) | st.text(LETTERS, min_size=120, max_size=128)
HEX32 = st.binary(min_size=16, max_size=16).map(bytes.hex)
HEX64 = st.binary(min_size=32, max_size=32).map(bytes.hex)
PATTERNS = {  # what `from_regex` would draw, in a tenth of its time
    NAME_PATTERN: NAMES,
    r"^[0-9a-f]{64}\Z": HEX64,
    r"^([0-9a-f]{64})?\Z": HEX64 | st.just(""),
    r"^([0-9a-f]{32})?\Z": HEX32 | st.just(""),
    r"^[0-9a-f]{16}\Z": st.binary(min_size=8, max_size=8).map(bytes.hex),
    r"^[0-9a-f]{32}\Z": HEX32,
}


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Return every value that a field of this type may have."""
    match kind:
        case msgspec.inspect.IntType(ge=least, le=most, lt=above):
            greatest = most if above is None else above - 1
            return st.integers(least, greatest)
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return PATTERNS[pattern]
        case msgspec.inspect.StrType(max_length=longest):
            characters = st.characters(exclude_categories=["Cs"])
            return st.text(characters, max_size=min(longest or 0, 100))
        case msgspec.inspect.BytesType():
            return st.binary(max_size=100)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case msgspec.inspect.ListType(item_type=item, max_length=longest):
            return st.lists(values(item), max_size=min(longest or 0, 5))
        case msgspec.inspect.DictType(key_type=key, value_type=value, max_length=longest):
            return st.dictionaries(values(key), values(value), max_size=min(longest or 0, 5))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([values(t) for t in types])
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            parts = {f.name: values(f.type) for f in fields if f.name != "wbp"}
            return st.builds(cls, **parts)
        case other:
            raise AssertionError(f"a field of type {other}: say here what its values are")


def any_of(types: Sequence[type[Message]]) -> st.SearchStrategy[Message]:
    return st.sampled_from(types).flatmap(lambda t: values(msgspec.inspect.type_info(t)))


def attempt(decode: Decoder, frames: Sequence[bytes]) -> None:
    """Decode; a ProtocolError is an answer, and its text must fit a refuse."""
    try:
        message, payloads = decode(frames)
    except ProtocolError as error:
        refuse = Refuse(code=error.code, text=str(error))
        from_publisher([encode(refuse)])
    else:
        low, high = PAYLOADS.get(type(message), (0, 0))
        assert low <= len(payloads) <= high


@BOTH
@given(frames=st.lists(st.binary(max_size=100), max_size=4))
def test_any_frames_are_read_or_refused(
    decode: Decoder, types: Sequence[type[Message]], frames: list[bytes]
) -> None:
    del types
    attempt(decode, frames)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@BOTH
@given(data=st.data())
def test_a_message_with_other_values_is_read_or_refused(
    decode: Decoder, types: Sequence[type[Message]], data: st.DataObject
) -> None:
    header = json.loads(encode(data.draw(any_of(types))))
    keys = st.sampled_from([*header, "surprise"])
    header |= data.draw(st.dictionaries(keys, JSON, max_size=2))
    payloads = data.draw(st.lists(st.binary(max_size=9), max_size=2))
    attempt(decode, [json.dumps(header).encode(), *payloads])


@BOTH
@given(data=st.data())
def test_a_damaged_message_is_read_or_refused(
    decode: Decoder, types: Sequence[type[Message]], data: st.DataObject
) -> None:
    header = bytearray(encode(data.draw(any_of(types))))
    for position in data.draw(st.lists(st.integers(0, len(header) - 1), max_size=3)):
        header[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    attempt(decode, [bytes(header)])
    attempt(decode, [bytes(header[:cut])])


@BOTH
@given(data=st.data())
def test_every_message_survives(
    decode: Decoder, types: Sequence[type[Message]], data: st.DataObject
) -> None:
    message = data.draw(any_of(types))
    payloads = [b"payload"] * PAYLOADS.get(type(message), (0, 0))[1]
    header = encode(message)
    decoded, rest = decode([header, *payloads])
    assert type(decoded) is type(message)
    assert decoded == msgspec.structs.replace(message, wbp=1)
    assert list(rest) == payloads
    assert header.startswith(b'{"wbp":1,"type":"')


@pytest.mark.parametrize("size", [HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1])
def test_a_header_is_at_most_64_kib(size: int) -> None:
    header = encode(Ping())
    header += b" " * (size - len(header))
    if size <= HEADER_BYTES_MAX:
        assert from_worker([header])[0] == Ping(wbp=1)
    else:
        with pytest.raises(ProtocolError, match="65537 bytes; at most 65536") as caught:
            from_worker([header])
        assert caught.value.code == "malformed"


ABORT = b'{"wbp":1,"type":"abort","model":"m","epoch":1,"version":1}'
CHUNK = b'{"wbp":1,"type":"chunk","model":"m","epoch":1,"version":1,"index":0,"crc":0}'


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([ABORT, b"x"], "abort with 1 payload frames; 0 to 0 are allowed"),
        ([CHUNK], "chunk with 0 payload frames; 1 to 1 are allowed"),
        ([CHUNK, b"x", b"y"], "chunk with 2 payload frames; 1 to 1 are allowed"),
    ],
)
def test_the_error_says_how_many_payloads_are_allowed(frames: list[bytes], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        from_publisher(frames)


@given(NAMES)
def test_topics_name_their_model(model: str) -> None:
    assert check_name(model, "model") == model
    assert model_of(control_topic(model)) == model
    assert model_of(data_topic(model)) is None


@given(st.binary(max_size=140))
def test_any_topic_names_a_model_or_none(topic: bytes) -> None:
    model = model_of(topic)
    if model is not None:
        assert control_topic(model) == topic


@pytest.mark.parametrize("name", ["", "a" * 129, "a b", "a/b", "a\n", "ü"])
def test_what_is_no_name_is_refused_with_words(name: str) -> None:
    with pytest.raises(ValueError, match=r"worker .*a name is 1 to 128 of the characters"):
        check_name(name, "worker")
