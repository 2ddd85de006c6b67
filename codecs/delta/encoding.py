"""Encodes a patch: the differences between two versions of one layout, in few bytes.

A patch consists of blocks (`format.py`). Each block is encoded in the mode that needs the fewest
bytes. The *step* of an element is how far its value moved: the number of representable values from
the old one to the new one. Elements form one class or, for BF16 and F16, sixteen classes by their
exponents. With each larger exponent, a change is half as probable. So changes are evenly dense only
within a class, and gaps that are counted in elements of one class need fewer bits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from ..checksum import CHUNK_BYTES_DEFAULT, digest_of
from ..errors import PatchError
from ..layout import Layout
from ..numpy_tensors import Bytes, Memory
from . import format as fmt
from . import kernels
from .kernels import EncodedChanges
from .patch import Delta


def _do_nothing() -> None:
    """Do nothing: the default of the parameter `step`, a callback."""


def encode(
    layout: Layout,
    base: Memory,
    target: Memory,
    *,
    digests: tuple[str, str] | None = None,
    chunk_bytes: int = CHUNK_BYTES_DEFAULT,
    classes: bool = True,
    check: bool = True,
    step: Callable[[], object] = _do_nothing,
) -> bytes:
    """Return the patch that turns the data section `base` into `target`, bit for bit.

    Args:
        layout: The layout of both data sections.
        base: The data section that the receiver has.
        target: The data section that the receiver makes with the patch.
        digests: The digests of base and target for `chunk_bytes`, if they are known.
        chunk_bytes: The chunk size of the digests.
        classes: Whether steps may be coded by class. This takes fewer bytes, but the receiver must
            then read every element of the base.
        check: Whether to decode the patch, and compare the result with `target`.
        step: Called repeatedly; an exception from it aborts the encoding.

    Raises:
        PatchError: A data section does not have the layout's size, or the patch failed its check.
    """
    old, new = (section_bytes(layout, data) for data in (base, target))
    if digests is None:
        base_digest, target_digest = (digest_of(layout.id, d, chunk_bytes) for d in (old, new))
    else:
        base_digest, target_digest = digests
    header = fmt.Header(layout.id, layout.nbytes, chunk_bytes, base_digest, target_digest)
    parts = [header.pack()]
    for blocks in fmt.groups(layout):
        parts += _group(blocks, old, new, classes)
        step()
    patch = b"".join(parts)
    if check:
        Delta(layout, patch).compare(old, new, step)
    return patch


def section_bytes(layout: Layout, data: Memory) -> Bytes:
    """Return a data section as bytes; PatchError if it does not have the layout's size."""
    flat = np.frombuffer(cast("memoryview", data), np.uint8)
    if flat.size != layout.nbytes:
        raise PatchError(f"a data section of {flat.size} bytes; it must fit {layout!r}")
    return flat


def encode_block(
    block: fmt.Block, before: Bytes, after: Bytes, table: fmt.Table | None
) -> tuple[int, bytes]:
    """Return (mode, body) of a block, in the mode with the fewest bytes.

    Args:
        block: The block.
        before, after: The block's bytes in the base, and in the target.
        table: The codes of steps, with enough bits for any count (`parts.py`); None: code no steps.
    """
    body = None
    if table is not None:
        kind = block.kind if len(table) > 1 else fmt.INTEGER
        counts, gaps, steps = kernels.compare(before, after, kind)
        if not steps.size:
            return fmt.UNCHANGED, b""
        body = kernels.write(counts, gaps, steps, table, block.nbytes - 1)
        if body is not None and len(body) <= _overwrite_least(steps.size, block.width):
            return fmt.STEPS, body
    without = _overwritten(block, before, after)
    return without if body is None or len(without[1]) < len(body) else (fmt.STEPS, body)


def _group(blocks: Sequence[fmt.Block], old: Bytes, new: Bytes, classes: bool) -> list[bytes]:
    """Return the byte strings of a group of blocks, in the coding with the fewest bytes."""
    pairs = [(old[b.begin : b.end], new[b.begin : b.end]) for b in blocks]
    kind = blocks[0].kind
    ways = [fmt.PLAIN] if kind == fmt.PLAIN else [fmt.INTEGER]
    if classes and kind in (fmt.BF16, fmt.F16):
        ways.append(kind)
    group = _Group(blocks, pairs)
    return min((group.coded(way) for way in ways), key=lambda parts: sum(map(len, parts)))


class _Group:
    """Blocks that share a table. Each block's coding without steps is cached."""

    def __init__(self, blocks: Sequence[fmt.Block], pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        self._blocks, self._pairs = blocks, pairs
        self._without: dict[int, tuple[int, bytes]] = {}

    def coded(self, way: int) -> list[bytes]:
        """Return entries, table and bodies, with steps of the kind `way` (PLAIN: without steps)."""
        bodies, table = self._stepped(way) if way != fmt.PLAIN else ({}, b"")
        coded = [
            (fmt.STEPS, bodies[index]) if index in bodies else self._without_steps(index)
            for index in range(len(self._blocks))
        ]
        entries = [fmt.pack_entry(mode, len(body)) for mode, body in coded]
        return [*entries, table, *(body for _, body in coded)]

    def _stepped(self, kind: int) -> tuple[dict[int, bytes], bytes]:
        """Return the bodies of blocks that are shortest with steps, and the table of their codes.

        A block for which steps are not shortest even with a table of its own does not affect the
        table.
        """
        found = {index: kernels.compare(*pair, kind) for index, pair in enumerate(self._pairs)}
        found = {index: each for index, each in found.items() if each[1].size}
        while found:
            table, bodies = self._written(found)
            if len(bodies) == len(found):
                return bodies, fmt.pack_table(table)
            alone = {i: each for i, each in found.items() if i in bodies or self._alone(i, each)}
            keep = alone if len(alone) < len(found) else bodies
            found = {index: found[index] for index in keep}
        return {}, b""

    def _alone(self, index: int, found: EncodedChanges) -> bool:
        """Return whether a block is shortest with steps if it has a table of its own."""
        return bool(self._written({index: found})[1])

    def _written(self, found: Mapping[int, EncodedChanges]) -> tuple[fmt.Table, dict[int, bytes]]:
        """Return the table of some blocks, and the bodies of those that are shortest with steps."""
        counts, gaps, steps = zip(*found.values(), strict=True)
        table = kernels.tune(np.stack(counts), np.concatenate(gaps), np.concatenate(steps))
        bodies: dict[int, bytes] = {}
        for index, each in found.items():
            body = kernels.write(*each, table, self._blocks[index].nbytes - 1)
            if body is not None and self._is_best(index, len(body), each[1].size):
                bodies[index] = body
        return table, bodies

    def _is_best(self, index: int, nbytes: int, changes: int) -> bool:
        least = _overwrite_least(changes, self._blocks[index].width)
        return nbytes <= least or nbytes <= len(self._without_steps(index)[1])

    def _without_steps(self, index: int) -> tuple[int, bytes]:
        if index not in self._without:
            self._without[index] = _overwritten(self._blocks[index], *self._pairs[index])
        return self._without[index]


def _overwrite_least(changes: int, width: int) -> int:
    """Return the least number of bytes that overwriting `changes` elements takes."""
    return 3 + changes // 8 + changes * width


def _overwritten(block: fmt.Block, before: Bytes, after: Bytes) -> tuple[int, bytes]:
    """Return (mode, body) of a block without steps: only changed elements, or all bytes."""
    unit = f"<u{block.width}"
    changes = int(np.count_nonzero(before.view(unit) != after.view(unit)))
    if not changes:
        return fmt.UNCHANGED, b""
    if _overwrite_least(changes, block.width) < block.nbytes:
        body = kernels.write_overwrite(before, after, block.width)
        if len(body) < block.nbytes:
            return fmt.OVERWRITE, body
    return fmt.RAW, after.tobytes()
