"""Checks a received patch, and applies it to its base as a whole or not at all.

All faults except a wrong result are found before a byte is written: `Delta` checks everything that
does not need the base, and `apply` first decodes every block against the base. Decoded changes are
kept until they are written, up to a limit; the others are decoded a second time.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..checksum import CHUNK_BYTES_DEFAULT, crcs_of, digest
from ..errors import PatchError
from ..layout import Layout
from ..numpy_tensors import Bytes, Memory
from . import format as fmt
from . import kernels

KEPT: Final = 8  # decoded changes are kept up to 1/8 of the data section's size

Elements = NDArray[np.uint16] | Bytes
Change = tuple[kernels.Positions | None, Elements]


@dataclass(frozen=True, slots=True)
class BlockPatch:
    """One block of a patch."""

    block: fmt.Block
    mode: int
    body: Bytes
    table: fmt.Table | None  # the table of its group; None if no block of the group has steps

    def decode(self, base: Bytes) -> Change:
        """Return (changed positions, new elements), or (None, all bytes of the block).

        Raises:
            PatchError: The body is malformed, or `base` is not the base of the patch.
        """
        block = self.block
        try:
            if self.mode == fmt.STEPS and self.table is not None:
                old = base[block.begin : block.end]
                return kernels.read(self.body, self.table, old, block.kind)
            if self.mode == fmt.OVERWRITE:
                return kernels.read_overwrite(self.body, block.width, block.elements)
        except PatchError as error:
            raise PatchError(f"the block at byte {block.begin}: {error}") from None
        return None, self.body

    def put(self, change: Change, block: Bytes) -> None:
        """Write a decoded change into the bytes of the block."""
        at, elements = change
        if at is None:
            block[:] = elements
        else:
            unit = f"<u{self.block.width}"
            block.view(unit)[at] = elements.view(unit).ravel()


class Delta:
    """A patch for a layout.

    Attributes:
        header: The patch's header.
        parts: The patch's part for each block that changes.

    Raises:
        PatchError: The patch is malformed, or for another layout.
    """

    def __init__(self, layout: Layout, data: Memory) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.header = fmt.Header.parse(view)
        if (self.header.layout_id, self.header.nbytes) != (layout.id, layout.nbytes):
            raise PatchError(
                f"a patch for the layout {self.header.layout_id[:12]} of {self.header.nbytes} "
                f"bytes; here is {layout!r}"
            )
        self._layout = layout
        self.parts: list[BlockPatch] = []
        at = fmt.HEADER.size
        for blocks in fmt.groups(layout):
            at = self._parse_group(blocks, view, at)
        if at != len(view):
            raise PatchError(f"{len(view) - at} bytes follow behind the last block")

    def _parse_group(self, blocks: list[fmt.Block], view: memoryview, at: int) -> int:
        """Parse a group at a position; return its end position."""
        entries: list[tuple[int, int]] = []
        for block in blocks:
            mode, nbytes, at = fmt.parse_entry(view, at, block)
            entries.append((mode, nbytes))
        table = None
        if any(mode == fmt.STEPS for mode, _ in entries):
            table, at = fmt.parse_table(view, at, blocks[0].kind)
        for block, (mode, nbytes) in zip(blocks, entries, strict=True):
            if nbytes > len(view) - at:
                raise PatchError(f"the patch ends in the body of the block at byte {block.begin}")
            if mode != fmt.UNCHANGED:
                body = np.frombuffer(view[at : at + nbytes], np.uint8)
                self.parts.append(BlockPatch(block, mode, body, table))
            at += nbytes
        return at

    def apply(
        self, base: Bytes, out: Bytes | None = None, *, base_digest: str | None = None
    ) -> Bytes:
        """Return the target's data section. Nothing is written unless all blocks can be decoded.

        Args:
            base: The base's data section.
            out: The memory to write to, which may be `base` itself; None: allocate it.
            base_digest: The digest of `base`; None: compute it.

        Raises:
            PatchError: `base` is not the patch's base, or a block is malformed; `out` is unchanged.
                Or the result is not the target; then `out` must not be used.
        """
        out = np.empty_like(base) if out is None else out
        for _ in self.steps(base, out, base_digest=base_digest):
            pass
        return out

    def steps(self, base: Bytes, out: Bytes, *, base_digest: str | None = None) -> Generator[None]:
        """Do the work of `apply`; yield after each block or chunk, so that the caller can stop."""
        wanted = self.header
        found = base_digest or (yield from self._digesting(base))
        if found != wanted.base:
            raise PatchError(f"the patch is for the base {wanted.base[:12]}, not {found[:12]}")
        room = base.size // KEPT
        changes: list[Change | None] = []  # None: too large to keep
        for part in self.parts:
            at, elements = change = part.decode(base)
            taken = 0 if at is None else at.nbytes + elements.nbytes
            room -= taken
            changes.append(change if room >= 0 or not taken else None)
            yield
        if out.ctypes.data != base.ctypes.data:
            for begin in range(0, base.size, CHUNK_BYTES_DEFAULT):
                end = begin + CHUNK_BYTES_DEFAULT
                out[begin:end] = base[begin:end]
                yield
        for part, change_ in zip(self.parts, changes, strict=True):
            part.put(change_ or part.decode(out), out[part.block.begin : part.block.end])
            yield
        made = yield from self._digesting(out)
        if made != wanted.target:
            raise PatchError(f"the patch leads to {made[:12]}, and says {wanted.target[:12]}")

    def _digesting(self, data: Bytes) -> Generator[None, None, str]:
        """Return the digest of a data section; yield after each hashed chunk."""
        chunk_bytes, crcs = self.header.chunk_bytes, list[int]()
        for crc in crcs_of(data, chunk_bytes):
            crcs.append(crc)
            yield
        return digest(self._layout.id, chunk_bytes, crcs)

    def compare(
        self, base: Bytes, target: Bytes, step: Callable[[], object] = lambda: None
    ) -> None:
        """Raise PatchError unless the patch turns `base` into `target`.

        `step` is called after each block; an exception from it aborts the check.
        """
        changed = {part.block.begin: part for part in self.parts}
        for block in (block for blocks in fmt.groups(self._layout) for block in blocks):
            made, wanted = (data[block.begin : block.end] for data in (base, target))
            if part := changed.get(block.begin):
                made = made.copy()
                part.put(part.decode(base), made)
            unit = f"<u{block.width}"
            if not np.array_equal(made.view(unit), wanted.view(unit)):
                raise PatchError(f"the block at byte {block.begin} is not that of the target")
            step()
