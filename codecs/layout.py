"""Defines a layout: the tensors of a version and their positions, as a safetensors header.

Theory of operation: the bytes of a version are those of a safetensors file without its header. The
layout is that header:

    0        8                      8+n
    ├────────┼───────────────────────┼──────────────────────────────┤
    │ n, u64 │ JSON, padded with     │ data section: the tensors,   │
    │ little │ spaces to 8 bytes     │ row-major, without gaps      │
    └────────┴───────────────────────┴──────────────────────────────┘
      └────── Layout.header ────────┘ └─────── Layout.nbytes ───────┘

Only `Layout.parse` makes layouts, and it checks everything, since the bytes may come from an
untrusted peer. `Layout.plan` writes a header, and parses it like any other.

Tied tensors are sent once. Their other names are in `__metadata__` as `name: kept name`, as
`safetensors.torch.save_model` writes them. An entry of `__metadata__` is an alias if and only if
its value names a tensor and its key does not. All other entries are plain text about the file.

A file has its tensors sorted by dtype and name. The user's model (the *source*) has its own order,
on which a function that loads (name, tensor) pairs may rely. If the two orders differ, the entry
`ORDER` of `__metadata__` gives the source's order: for each name of the source, the name's index in
the file's order (the tensors, then the aliases, sorted).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, cast

import msgspec

from .dtypes import DTYPES, RANK, castable
from .errors import LayoutError, LimitError, TensorsError
from .protocol_limits import (
    INTEGER_MAX,
    LAYOUT_BYTES_MAX,
    NAME_BYTES_MAX,
    RANK_MAX,
    TENSORS_MAX,
)
from .words import printable

DIFFERENCE_LINES_MAX: Final = 20  # lines of an error text
NAME_SHOWN: Final = 256  # characters of a name in an error text

METADATA: Final = "__metadata__"
ORDER: Final = "weightbus.order"
PREFIX_BYTES: Final = 8  # bytes of the header's length, which comes before the JSON
ALIGNMENT: Final = 8  # bytes of the widest element; the data section begins at a multiple of this

Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Signature = tuple[str, tuple[int, ...]]  # a tensor's dtype name and shape
# True: both sides must have the same names. "target": the version must have all names of the
# target. False: names may differ.
Strict = bool | Literal["target"]


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor, and its bytes in the data section, from `begin` to `end`.

    The garbage collector does not track these objects, since there may be a million of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """A valid layout. Two layouts are equal if their headers are equal, byte for byte."""

    header: bytes  # with its length prefix
    tensors: tuple[TensorSpec, ...] = field(compare=False, repr=False)
    aliases: Mapping[str, str] = field(compare=False, repr=False)  # by alias, the tensor's name
    metadata: Mapping[str, str] = field(compare=False, repr=False)
    nbytes: int = field(compare=False)  # bytes of the data section
    id: str = field(compare=False)  # SHA-256 of the header, in hex
    _by_name: Mapping[str, TensorSpec] = field(compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Layout {self.id[:12]}: {len(self.tensors)} tensors, {self.nbytes} bytes>"

    def names(self) -> tuple[str, ...]:
        """Return all names, aliases included, in the order of the source."""
        return self._names

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @cached_property
    def sorted_names(self) -> tuple[str, ...]:
        """All names, aliases included, sorted by their UTF-8."""
        return tuple(sorted(self._by_name))

    def by_name(self, name: str) -> TensorSpec:
        """Return the tensor with this name or alias; raise KeyError if there is none."""
        return self._by_name[name]

    @cached_property
    def signatures(self) -> Mapping[str, Signature]:
        """The dtype and shape of every name, aliases included."""
        return {name: (spec.dtype, spec.shape) for name, spec in self._by_name.items()}

    @cached_property
    def own_signatures(self) -> Mapping[str, Signature]:
        """The dtype and shape of every tensor, aliases excluded."""
        return {spec.name: (spec.dtype, spec.shape) for spec in self.tensors}

    @cached_property
    def aligned(self) -> bool:
        """Whether every tensor begins at a multiple of its element size, as `plan` places them."""
        return all(not spec.begin * 8 % DTYPES[spec.dtype].bits for spec in self.tensors)

    def for_file(self, texts: Mapping[str, str], *, untied: bool = False) -> "Layout":
        """Return the layout of a file with the same tensors in the same order, and more metadata.

        Args:
            texts: Entries to add to `metadata`; existing entries and ties stay. An entry whose
                value is a tensor's name is left out, since its key would be an alias.
            untied: Give every alias its own tensor, right after the tensor that it names.
        """
        kept = {key: text for key, text in self.metadata.items() if key not in self.aliases}
        names = {spec.name: [spec.name] for spec in self.tensors}
        for alias, name in self.aliases.items():
            names[name] += [alias] if untied else []
        rows = [
            (name, spec.dtype, spec.shape) for spec in self.tensors for name in names[spec.name]
        ]
        aliases = {} if untied else dict(self.aliases)
        metadata = {
            key: text for key, text in (dict(texts) | kept).items() if text not in self._by_name
        }
        order = _order(rows, aliases, self.names()) if ORDER in self.metadata else ""
        return Layout.parse(_encode(rows, metadata | aliases, order))

    def renamed(self, names: Mapping[str, str]) -> "Layout":
        """Return the layout of the same tensors at the same positions, under other names.

        Args:
            names: The new name of each name, including aliases; all new names are different. An
                entry of `metadata` is dropped if its key or its value is one of the new names,
                since it could be read as an alias.

        Raises:
            LayoutError: A name is invalid.
        """
        rows = [(names[spec.name], spec.dtype, spec.shape) for spec in self.tensors]
        aliases = {names[alias]: names[name] for alias, name in self.aliases.items()}
        taken = {*names.values()}
        kept = {
            key: text
            for key, text in self.metadata.items()
            if key not in self.aliases and not {key, text} & taken
        }
        in_order = [names[name] for name in self.names()]
        order = _order(rows, aliases, in_order) if ORDER in self.metadata else ""
        return Layout.parse(_encode(rows, kept | aliases, order))

    def cut(self, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]) -> "Layout":
        """Return the layout of slices of some of the tensors, in the same order.

        Args:
            shapes: The shape of each slice, by the tensor's name.
            aliases: The aliases of the result; each names a tensor in `shapes`.

        Raises:
            LayoutError: A slice does not fill whole bytes.
        """
        rows = [
            (spec.name, spec.dtype, shapes[spec.name])
            for spec in self.tensors
            if spec.name in shapes
        ]
        kept = {
            key: text
            for key, text in self.metadata.items()
            if key not in self.aliases and text not in shapes
        }
        in_order = [name for name in self.names() if name in shapes or name in aliases]
        order = _order(rows, aliases, in_order) if ORDER in self.metadata else ""
        return Layout.parse(_encode(rows, kept | dict(aliases), order))

    @staticmethod
    def plan(
        entries: Iterable[tuple[str, str, tuple[int, ...]]],
        aliases: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        names: Sequence[str] = (),
    ) -> "Layout":
        """Return the layout of some tensors; equal arguments give equal bytes.

        The data is in safetensors' own order (dtype, widest first, then name). So the header equals
        the one that safetensors itself writes, and every tensor is aligned to its element.

        Args:
            entries: The tensors as (name, dtype, shape).
            aliases: For each further name of a tied tensor, the tensor's name in `entries`.
            metadata: Texts about the tensors, by key.
            names: All names, including aliases, in the order of the source; empty: the file's
                order.

        Raises:
            LayoutError: A name, dtype, shape, alias or metadata entry is invalid.
        """
        texts = dict(metadata or {})
        for alias, kept in sorted((aliases or {}).items()):
            if texts.setdefault(alias, kept) != kept:
                raise LayoutError(f"{alias!r} is an alias and a key of the metadata; rename one")
        rows = list(entries)
        for name, dtype, _ in rows:
            _check_dtype(name, dtype)
        rows.sort(key=lambda row: (-RANK[row[1]], row[0]))
        order = _order(rows, aliases or {}, names) if names else ""
        layout = Layout.parse(_encode(rows, texts, order))
        if layout.aliases != (aliases or {}):
            odd = sorted(set(layout.aliases.items()) ^ set((aliases or {}).items()))[0]
            raise LayoutError(
                f"{odd[0]!r}: {odd[1]!r} is not a clean alias: it must be declared as one, its key "
                "must not name a tensor, and its value must"
            )
        return layout

    @staticmethod
    def parse(
        header: bytes | bytearray | memoryview, *, tensors_max: int = TENSORS_MAX
    ) -> "Layout":
        """Parse a safetensors header, including its length prefix.

        Args:
            header: The bytes, which may come from an untrusted peer.
            tensors_max: The largest number of tensors, since each takes some microseconds.

        Raises:
            LayoutError: The header is invalid; the text says what is wrong, where, and what is
                allowed. No other exception is raised.
        """
        header = bytes(header)
        infos, metadata = _decode(header, tensors_max)
        tensors = _place(infos)
        by_name = {spec.name: spec for spec in tensors}
        aliases = {
            name: kept
            for name, kept in sorted(metadata.items())
            if kept in by_name and name not in by_name
        }
        for alias in aliases:
            _check_name(alias)
        by_name.update({alias: by_name[kept] for alias, kept in aliases.items()})
        if ORDER in metadata and ORDER not in aliases:
            by_name = _reordered(by_name, metadata[ORDER])
        return Layout(
            header=header,
            tensors=tensors,
            aliases=MappingProxyType(aliases),
            metadata=MappingProxyType(metadata),
            nbytes=tensors[-1].end if tensors else 0,
            id=hashlib.sha256(header).hexdigest(),
            _by_name=MappingProxyType(by_name),
        )


class _Info(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tensor's entry in the JSON of a header."""

    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=RANK_MAX)]
    data_offsets: tuple[Count, Count]


_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INFO = msgspec.json.Decoder(_Info)
_TEXTS = msgspec.json.Decoder(dict[str, str])
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SAME = {name: name for name in DTYPES}  # one string object per dtype, for a million tensors
BLOCK_BYTES: Final = 2**16  # bytes of a header that are scanned at once


_Rows = list[tuple[str, str, tuple[int, ...]]]


def _order(rows: _Rows, aliases: Iterable[str], names: Sequence[str]) -> str:
    """Return the text for `ORDER`; empty if `names` are in the file's order.

    The text is also empty if it equals a name, since its key would then be an alias.
    """
    places = {name: at for at, name in enumerate([*(row[0] for row in rows), *sorted(aliases)])}
    order = [places[name] for name in names]
    text = "" if order == [*range(len(places))] else ",".join(map(str, order))
    return "" if text in places else text


def _reordered(by_name: dict[str, TensorSpec], text: str) -> dict[str, TensorSpec]:
    """Return the tensors in the order that `text` gives; unchanged if the text is invalid."""
    in_file = {str(at): each for at, each in enumerate(by_name.items())}
    ordered = [in_file.pop(place, None) for place in text.split(",", len(by_name))]
    return by_name if in_file or None in ordered else dict(cast("list[Any]", ordered))


def _encode(rows: _Rows, texts: Mapping[str, str], order: str = "") -> bytes:
    """Return the header of tensors that are already in file order."""
    texts = {key: text for key, text in texts.items() if key != ORDER} | (
        {ORDER: order} if order else {}
    )
    entries: dict[str, object] = {METADATA: dict(sorted(texts.items()))} if texts else {}
    begin = 0
    for name, dtype, shape in rows:
        if name == METADATA:
            raise LayoutError(f"a tensor cannot be called {METADATA!r}: safetensors reserves it")
        if name in entries:
            raise LayoutError(f"two tensors are called {name!r}; each name may occur once")
        end = begin + _tensor_bytes(name, dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    try:
        text = msgspec.json.encode(entries)
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
        raise LayoutError(f"names, metadata or shapes are not plain JSON values: {error}") from None
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _decode(header: bytes, tensors_max: int) -> tuple[dict[str, _Info], dict[str, str]]:
    """Decode a header into its typed entries and its metadata."""
    size = int.from_bytes(header[:PREFIX_BYTES], "little")
    if len(header) != PREFIX_BYTES + size or size > LAYOUT_BYTES_MAX:  # L1
        raise LayoutError(
            f"a header of {len(header)} bytes says that it holds {size} bytes of JSON; it must be "
            f"{PREFIX_BYTES} bytes longer than that, and JSON is at most {LAYOUT_BYTES_MAX} bytes"
        )
    text = header[PREFIX_BYTES:]
    if text[:1] != b"{":  # L2
        raise LayoutError(f"the header must begin with '{{', not with {text[:1]!r}")
    name = METADATA
    try:
        raw = _ENTRIES.decode(text)
        keys = len(raw)
        metadata = _TEXTS.decode(raw.pop(METADATA, b"{}"))
        if len(raw) > tensors_max:  # L4
            raise TensorsError(f"{len(raw)} tensors; at most {tensors_max} are allowed")
        infos: dict[str, _Info] = {}
        for name, value in raw.items():
            infos[name] = _INFO.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"no safetensors header, at or after {name[:40]!r}: {error}") from None
    _check_spelling(text, keys + len(infos) * len(_Info.__struct_fields__) + len(metadata))
    return infos, metadata


def _check_spelling(text: bytes, keys: int) -> None:
    """Refuse JSON that readers interpret differently: a duplicate key, and minus zero.

    Two readers could read such bytes as two different models. The decoder silently keeps the last
    of two equal keys. But outside of strings a JSON text has one colon for each key, and `keys` is
    the number of decoded keys.
    """
    colons = signs = 0
    for bare in _outside_of_strings(text):
        colons += bare.count(b":")
        signs += bare.count(b"-")
    if colons != keys:  # L3
        raise LayoutError("a key occurs twice in the header; each may occur once")
    if signs:  # L5
        raise LayoutError("a number in the header has a sign; sizes and offsets have none")


def _outside_of_strings(text: bytes) -> Iterator[bytes]:
    """Yield the parts of a JSON text outside of strings, block by block, since it may be large."""
    at, inside = 0, False
    while at < len(text):
        end = at + BLOCK_BYTES
        block = text[at:end]
        # if the block ends between a backslash and the escaped byte, add that byte
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block += text[end : end + 1]
        at += len(block)
        pieces = _ESCAPE.sub(b"", block).split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0


def _place(infos: Mapping[str, _Info]) -> tuple[TensorSpec, ...]:
    """Return the tensors, sorted by position; raise if they do not cover the data without gaps."""
    specs = sorted(
        (
            TensorSpec(name, _SAME.get(info.dtype, info.dtype), info.shape, *info.data_offsets)
            for name, info in infos.items()
        ),
        key=lambda spec: (spec.begin, spec.end),
    )
    at = 0
    for spec in specs:
        _check_name(spec.name)
        _check_dtype(spec.name, spec.dtype)
        nbytes = _tensor_bytes(spec.name, spec.dtype, spec.shape)
        if spec.begin != at or spec.nbytes != nbytes:  # L7, L8
            raise LayoutError(
                f"tensor {spec.name!r} ({spec.dtype} {list(spec.shape)}, {nbytes} bytes) claims "
                f"bytes {spec.begin} to {spec.end}; it must own {at} to {at + nbytes}, since "
                "tensors lie end to end"
            )
        at = spec.end
    return tuple(specs)


def _check_name(name: str) -> None:
    size = len(name.encode())
    if not 0 < size <= NAME_BYTES_MAX:  # L4
        raise LimitError(
            f"the name {name[:40]!r}… has {size} bytes; a name has 1 to {NAME_BYTES_MAX}"
        )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in DTYPES:  # L5
        raise LayoutError(
            f"tensor {name!r} has dtype {dtype[:40]!r}; safetensors knows {', '.join(DTYPES)}"
        )


def _tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; refuse shapes beyond the range of other readers."""
    elements = extent = 1
    for size in shape:
        elements *= size
        # An empty tensor has no bytes, but numpy and torch still multiply its other dimensions.
        extent *= max(size, 1)
        if not 0 <= size <= INTEGER_MAX or extent * DTYPES[dtype].bits > INTEGER_MAX:  # L5, L6
            raise LimitError(f"tensor {name!r} has a shape that is negative or beyond 2**53 bits")
    bits = elements * DTYPES[dtype].bits
    if len(shape) > RANK_MAX or bits % 8:  # L5, L7
        raise LayoutError(
            f"tensor {name!r} ({dtype}, {len(shape)} dimensions, {bits} bits) must have at most "
            f"{RANK_MAX} dimensions and fill whole bytes"
        )
    return bits // 8


def difference(
    expected: Mapping[str, Signature],
    got: Mapping[str, Signature],
    *,
    cast: bool = False,
    strict: Strict = True,
    remedies: bool = True,
) -> list[str]:
    """Return error lines that say how a target (`got`) differs from the version (`expected`).

    Args:
        expected, got: The dtype and shape of each tensor, by name.
        cast: Whether dtypes may differ (see `castable`).
        strict: True: names must be equal. False: names that only one side has are ignored.
            "target": names that only the version has are ignored.
        remedies: Whether the lines name options of a subscriber that would accept a difference.

    Returns:
        The lines; no lines if the version can be applied to the target.
    """
    lines: list[str] = []
    for name in sorted(expected.keys() | got.keys()):
        shown = printable(name, NAME_SHOWN)
        if name not in got:
            if strict is True:
                lines.append(f"{shown}: published as {_show(expected[name])}, not in the target")
        elif name not in expected:
            if strict:
                lines.append(f"{shown}: {_show(got[name])} in the target, not published")
        else:
            (dtype, shape), (own_dtype, own_shape) = expected[name], got[name]
            if shape != own_shape:
                lines.append(f"{shown}: shape {list(shape)} published, {list(own_shape)} here")
            if dtype != own_dtype and not (cast and castable(dtype, own_dtype)):
                advised = remedies and castable(dtype, own_dtype)
                remedy = " (cast=True converts it)" if advised else ""
                lines.append(f"{shown}: dtype {dtype} published, {own_dtype} here{remedy}")
    return lines


def _show(signature: Signature) -> str:
    return f"{signature[0]} {list(signature[1])}"


def trimmed(lines: list[str], limit: int = DIFFERENCE_LINES_MAX) -> list[str]:
    """Return at most `limit` lines. If lines are left out, the last line says how many."""
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 1], f"... and {len(lines) - limit + 1} more"]
