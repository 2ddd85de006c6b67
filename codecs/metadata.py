"""Checks the metadata of versions: texts by name that a publisher attaches to a version.

Metadata is small, since it is part of every announcement of its version, of each worker's record of
the running version, and of answers to observers. The digest and the layout of a version do not
cover its metadata, so the same weights with different metadata have the same digest.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from .protocol_limits import METADATA_BYTES_MAX, METADATA_MAX, METADATA_NAME_MAX

FORMAT: Final = "format"  # a key of a file's own metadata, not of a version's


def checked(metadata: Mapping[str, str]) -> dict[str, str]:
    """Check metadata, and return a copy.

    Raises:
        ValueError: The metadata is not a mapping of text to text, or is too large; or a name is
            empty or too long.
    """
    is_mapping = isinstance(metadata, Mapping)  # pyright: ignore - callers may be unchecked
    given = "" if is_mapping else f"it is {metadata!r:.80}"
    for name, text in metadata.items() if is_mapping else ():
        if not (isinstance(name, str) and isinstance(text, str)):  # pyright: ignore
            given = f"{name!r:.80} has {text!r:.80}"
    if given:
        raise ValueError(f'metadata: {given}; give names and texts, such as {{"step": str(step)}}')
    if len(metadata) > METADATA_MAX:
        raise ValueError(f"metadata has {len(metadata)} entries; at most {METADATA_MAX} travel")
    for name, text in metadata.items():
        if why := _fault(name, text):
            raise ValueError(f"metadata: {why}")
    total = sum(_size(name, text) for name, text in metadata.items())
    if total > METADATA_BYTES_MAX:
        raise ValueError(
            f"metadata of {total} bytes; names and texts are at most {METADATA_BYTES_MAX} bytes "
            "of UTF-8 in all: keep what is larger in a file of your own, and say here where it lies"
        )
    return dict(metadata)


def fitting(entries: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return (entries of a file's metadata that fit, taken in order; names of the others)."""
    found, rest, left = dict[str, str](), list[str](), METADATA_BYTES_MAX
    for name, text in entries:
        if len(found) == METADATA_MAX or _fault(name, text) or _size(name, text) > left:
            rest.append(name)
            continue
        found[name] = text
        left -= _size(name, text)
    return found, rest


def _fault(name: str, text: str) -> str:
    """Return an error text if an entry is invalid, else an empty text."""
    if not 0 < len(name) <= METADATA_NAME_MAX:
        return (
            f"the name {name!r:.80} has {len(name)} characters; a name has 1 to {METADATA_NAME_MAX}"
        )
    try:
        (name + text).encode()
    except UnicodeEncodeError as error:
        return f"{name!r:.80} is not text that UTF-8 can carry: {error}"
    return f"{name!r:.80} holds a NUL; text has none" if "\0" in name + text else ""


def _size(name: str, text: str) -> int:
    return len((name + text).encode(errors="surrogatepass"))
