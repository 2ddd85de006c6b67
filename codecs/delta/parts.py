"""Makes a patch with several encoders (ranks), each of which encodes the blocks that it has.

Each block is encoded by itself, but the blocks of a group share a table. If the blocks of a group
are at several encoders, none can tune the table on all of them. So a patch in parts has one table
for each kind of elements. The table is tuned on samples of all encoders (`propose`, `agreed`). It
fits every block: its counts have the bits that a full block needs, at a cost of 76 bytes per block.

A part is the patch's data for the blocks of one encoder: the entry and the body of each, in order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ..errors import PatchError
from ..layout import Layout
from ..numpy_tensors import Bytes
from . import format as fmt
from . import kernels
from .encoding import encode_block
from .patch import BlockPatch

SAMPLED = 8  # blocks of a kind that an encoder compares to tune a table
# The row of a class of which no sample has changes.
RARE = [fmt.WIDTH_MAX, 10, fmt.WIDTH_MAX, 4, 2]

Tables = Mapping[int, fmt.Table]  # by the kind of the elements


class Proposal(msgspec.Struct, frozen=True):
    """A table that one encoder has tuned on a sample of its blocks.

    Attributes:
        counts: The changes in the sample, by class.
        rows: The rows of the table, by class.
    """

    counts: list[int]
    rows: list[list[int]]


def blocks_of(layout: Layout) -> list[fmt.Block]:
    """Return the blocks of a layout, in order."""
    return [block for blocks in fmt.groups(layout) for block in blocks]


def propose(
    blocks: Sequence[fmt.Block], old: Bytes, new: Bytes, *, classes: bool = True
) -> dict[int, Proposal]:
    """Return a table for each kind that can have steps, from a sample of some blocks.

    Args:
        blocks: The blocks of one encoder.
        old: The data section of the base; only the bytes of these blocks are used.
        new: The data section of the target; likewise.
        classes: Whether steps may be coded by class.
    """
    found = dict[int, Proposal]()
    for kind in sorted({block.kind for block in blocks} - {fmt.PLAIN}):
        some = [block for block in blocks if block.kind == kind]
        some = some[:: -(-len(some) // SAMPLED)]
        way = kind if classes else fmt.INTEGER
        changes = [kernels.compare(old[b.begin : b.end], new[b.begin : b.end], way) for b in some]
        counts, gaps, steps = zip(*changes, strict=True)
        by_block = np.stack(counts)
        table = kernels.tune(by_block, np.concatenate(gaps), np.concatenate(steps))
        found[kind] = Proposal([int(each) for each in by_block.sum(0)], table.tolist())
    return found


def agreed(proposals: Iterable[Mapping[int, Proposal]]) -> dict[int, list[list[int]]]:
    """Return the rows of a patch's tables: for each class, the row of the largest sample."""
    most, rows = dict[int, list[int]](), dict[int, list[list[int]]]()
    for kind, proposal in (item for each in proposals for item in each.items()):
        mine = most.setdefault(kind, [0] * len(proposal.counts))
        made = rows.setdefault(kind, [RARE] * len(proposal.counts))
        for index, (count, row) in enumerate(zip(proposal.counts, proposal.rows, strict=True)):
            if count > mine[index]:
                mine[index], made[index] = count, _for_any_block(row)
    return rows


def _for_any_block(row: Sequence[int]) -> list[int]:
    """Return a row whose counts have enough bits for any block."""
    _, gap, large, large_gap, size = row
    return [fmt.WIDTH_MAX, gap, fmt.EVERY if large == fmt.EVERY else fmt.WIDTH_MAX, large_gap, size]


def tables_of(rows: Mapping[int, Sequence[Sequence[int]]]) -> Tables:
    """Return the tables with the rows that `agreed` returned."""
    return {kind: np.array(each, np.uint8) for kind, each in rows.items()}


def encode_part(
    blocks: Sequence[fmt.Block],
    old: Bytes,
    new: Bytes,
    tables: Tables,
    *,
    nbytes_max: int,
    check: bool = True,
    step: Callable[[], object] = lambda: None,
) -> bytes | None:
    """Return the part of a patch for some blocks; None if it has more than `nbytes_max` bytes.

    Args:
        blocks, old, new: As in `propose`.
        tables: The tables of the patch.
        nbytes_max: The most bytes of the part.
        check: Whether to decode each block, and compare the result with the target.
        step: Called after each block; an exception from it aborts the encoding.

    Raises:
        PatchError: A block failed its check.
    """
    part = bytearray()
    for block in blocks:
        before, after = old[block.begin : block.end], new[block.begin : block.end]
        table = tables.get(block.kind)
        mode, body = encode_block(block, before, after, table)
        if check:
            _check(BlockPatch(block, mode, np.frombuffer(body, np.uint8), table), old, after)
        part += fmt.pack_entry(mode, len(body))
        part += body
        if len(part) > nbytes_max:
            return None
        step()
    return bytes(part)


def _check(patch: BlockPatch, old: Bytes, after: Bytes) -> None:
    block, made = patch.block, old[patch.block.begin : patch.block.end]
    if patch.mode != fmt.UNCHANGED:
        made = made.copy()
        patch.put(patch.decode(old), made)
    unit = f"<u{block.width}"
    if not np.array_equal(made.view(unit), after.view(unit)):
        raise PatchError(f"the block at byte {block.begin} is not that of the target")


def join(
    layout: Layout,
    header: fmt.Header,
    owners: Sequence[int],
    parts: Sequence[bytes],
    tables: Tables,
) -> bytes:
    """Return the patch that consists of these parts.

    Args:
        layout: The layout of base and target.
        header: The header of the patch.
        owners: For each block, the index of its part.
        parts: The parts, one of each encoder.
        tables: The tables of the patch.

    Raises:
        PatchError: A part is malformed, or has other blocks.
    """
    views, at = [memoryview(part) for part in parts], [0] * len(parts)
    joined: list[bytes | memoryview] = [header.pack()]
    owner = iter(owners)
    for blocks in fmt.groups(layout):
        entries, bodies, table = list[bytes](), list[memoryview](), b""
        for block in blocks:
            which = next(owner)
            mode, nbytes, begin = fmt.parse_entry(views[which], at[which], block)
            at[which] = begin + nbytes
            entries.append(fmt.pack_entry(mode, nbytes))
            bodies.append(views[which][begin : begin + nbytes])
            if mode == fmt.STEPS:
                table = fmt.pack_table(tables[block.kind])
        joined += entries
        joined.append(table)
        joined += bodies
    if at != [len(view) for view in views]:
        raise PatchError("its parts do not have the bytes of all blocks, and nothing else")
    return b"".join(joined)
