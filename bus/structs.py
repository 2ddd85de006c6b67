"""Base classes of the messages, and of structs with texts that are shown to people."""

from functools import cache
from typing import cast

import msgspec

from ..codecs.words import printable


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
                line = text.replace(":\n", ": ").replace("\n", "; ")  # as of a list of differences
                msgspec.structs.force_setattr(self, name, printable(line, most))


@cache
def _text_fields(kind: type[SanitizedText]) -> tuple[tuple[str, int], ...]:
    """Return (name, greatest length in characters) of each text field of a struct."""
    described = cast("msgspec.inspect.StructType", msgspec.inspect.type_info(kind))
    return tuple(
        (field.name, text.max_length)
        for field in described.fields
        if isinstance(text := field.type, msgspec.inspect.StrType) and text.max_length
    )
