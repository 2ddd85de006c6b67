"""Patches to versions of which each rank has a part: each rank encodes its own blocks.

Theory of operation: the base of a patch is the version before. A rank keeps its part of that anyway
until its part of the next one is ready, for workers that fetch it; so a base takes no memory of its
own. For each version of which workers take patches, the ranks

1. also exchange the bytes of the patch's blocks that several of them have (`placement.py`), a
   fraction of a block wherever another rank's chunks begin
2. report to rank 0 which base they have, and propose tables for the codes of steps (`PartReport`)
3. get an order from rank 0 (`PatchOrder`), if a worker runs the base and every rank has it. A rank
   that has been started again does not have it; nor has any once the layout, or the place of a
   block, has changed
4. encode their blocks, side by side, and tell rank 0 the size of what they made. If a rank has
   failed, or all sizes together are too large, there is no patch
5. send that to rank 0, which joins the parts.

Whatever happens, the version can be sent whole.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...bus.chunks import ChunkPlan, Memory
from ...bus.deadline import Deadline
from ...bus.errors import DeadlineError
from ...bus.messages import DELTA
from ...bus.protocol_limits import PATCHES_MAX
from ...bus.publisher.roster import PatchCandidate
from ...bus.publisher.version import OfferedPatch
from ...codecs.delta.format import Header
from ...codecs.delta.parts import (
    Proposal,
    agreed,
    blocks_of,
    encode_part,
    join,
    propose,
    tables_of,
)
from ...codecs.delta.worth import Way, sums
from ...codecs.errors import PatchError
from ...codecs.layout import Layout
from ..settings import Encoding
from .placement import Placement, placement_of_blocks

if TYPE_CHECKING:
    from .models import Bases
    from .ranks import Round

log = logging.getLogger("weightbus.publisher")

SHARE_MAX = 4  # a patch has at most a quarter of the version, since rank 0 holds it twice
OFFER_SHARE = 0.5  # fraction of the remaining time for making parts, as in `models.py`
TAKEN = b"taken"
SIZE, PART = "the size of its part of the patch", "its part of the patch"


class PatchTerms(NamedTuple):
    """What rank 0 knows of the workers that may receive a patch.

    Attributes:
        candidates: These workers; none: the version has no patch, and is no base of one.
        encoding: "delta" or "auto"; "raw": as without candidates.
        bases: Chooses the kind of patch, if `encoding` is "auto".
    """

    candidates: Collection[PatchCandidate]
    encoding: Encoding
    bases: "Bases"

    @property
    def wanted(self) -> bool:
        """Whether the version has a patch if it can, and is the base of later ones."""
        return bool(self.candidates) and self.encoding != "raw"


class PartBase(NamedTuple):
    """A rank's part of a version that a patch may build on.

    Attributes:
        digest: The digest of the version.
        form: The layout's id, the chunk size, and which rank encodes which block.
        memory: The data section; only the bytes of this rank are there.
    """

    digest: str
    form: tuple[str, int, bytes]
    memory: Memory


class PartReport(msgspec.Struct, frozen=True):
    """What rank 0 gets to know of another rank, to decide on a patch.

    Attributes:
        base: The digest of the base that the rank has; empty: it has none.
        tables: The tables that it proposes, by the kind of the elements: for patches without
            classes, and with classes.
        sums: Its part of the estimate of what patches cost.
    """

    base: str = ""
    tables: tuple[dict[int, Proposal], ...] = ()
    sums: list[float] = []


class PatchOrder(msgspec.Struct, frozen=True):
    """The patch that all ranks are to encode.

    Attributes:
        rows: The rows of its tables, by the kind of the elements.
        classes: Whether its steps are coded by class.
        work: As in `OfferedPatch`.
        nbytes_max: The most bytes of the patch.
        seconds: The time that a rank may take.
    """

    rows: dict[int, list[list[int]]]
    classes: bool
    work: float
    nbytes_max: int
    seconds: float


class PatchParts:
    """The patch to a version, as one rank takes part in it.

    Args:
        layout: The layout of the version.
        plan: The chunks of the version.
        chunks: Which rank has which chunk.
        memory: The data section, with the chunks that this rank sends.
        rank: The index of this rank.
        ranks: How many ranks there are.

    Attributes:
        placement: Which rank encodes which block, and what they have to exchange before.
    """

    def __init__(
        self,
        layout: Layout,
        plan: ChunkPlan,
        chunks: Placement,
        memory: Memory,
        rank: int,
        ranks: int,
    ) -> None:
        self._layout, self._plan, self._memory, self._ranks = layout, plan, memory, ranks
        blocks = blocks_of(layout)
        self.placement = placement_of_blocks(chunks, plan, [block.begin for block in blocks], ranks)
        self._blocks = [blocks[index] for index in self.placement.of(rank)]
        self._form = layout.id, plan.chunk_bytes, self.placement.owners.tobytes()
        self._base: PartBase | None = None

    def build_on(self, base: PartBase | None) -> PartReport:
        """Take this as the base, if it can be one; return the report to rank 0."""
        if base is None or base.form != self._form:
            return PartReport()
        self._base = base
        about = self._blocks, base.memory, self._memory
        tables = tuple([propose(*about, classes=classes) for classes in (False, True)])
        return PartReport(base.digest, tables, sums(*about))

    def as_base(self, digest: str) -> PartBase:
        """Return this rank's part of the version, as the base of the next patch."""
        return PartBase(digest, self._form, self._memory)

    def wanted(
        self, reports: Sequence[PartReport | None], terms: PatchTerms, seconds: float
    ) -> PatchOrder | None:
        """Return the patch that all ranks are to encode, on rank 0; None: there is none.

        The patch goes over the link of rank 0 to each worker, the version over the links of all
        ranks. So with many workers, a patch above a rank's mean part would arrive later.

        Args:
            reports: Those of all ranks.
            terms: What is known of the workers.
            seconds: The time that is left for the publish.
        """
        base, nbytes, takers = self._base, self._layout.nbytes, self._takers(terms.candidates)
        have = [r for r in reports if r is not None and base is not None and r.base == base.digest]
        if base is None or not takers or len(have) < len(reports):
            return None
        way: Way | None = Way(classes=True)
        if terms.encoding == "auto":
            data, each = (base.memory, self._memory), [report.sums for report in have]
            way = terms.bases.chosen_in_parts(self._layout, *data, takers, self._blocks, each)
        if way is None:
            return None
        rows = agreed(report.tables[way.classes] for report in have)
        most = nbytes // max(SHARE_MAX, min(self._ranks, len(takers)))
        return PatchOrder(rows, way.classes, way.work * nbytes, most, OFFER_SHARE * seconds)

    def _takers(self, candidates: Collection[PatchCandidate]) -> list[PatchCandidate]:
        """Return the workers that run the base."""
        digest = "" if self._base is None else self._base.digest
        return [c for c in candidates if c.running is not None and c.running.digest == digest]

    def _made(self, model: str, wanted: PatchOrder, check: bool) -> bytes | None:
        """Return this rank's part; None if it is too large, or encoding fails, which is logged."""
        assert self._base is not None  # noqa: S101 - otherwise no patch is wanted
        text = f"this rank has not made its part in {wanted.seconds:.3g} s, half of the time left"
        deadline = Deadline(time.monotonic() + wanted.seconds, text)
        try:
            return encode_part(
                self._blocks,
                self._base.memory,
                self._memory,
                tables_of(wanted.rows),
                nbytes_max=wanted.nbytes_max,
                check=check,
                step=deadline.check,
            )
        except (PatchError, MemoryError, DeadlineError) as error:
            log.warning("%s: no patch from the ranks: %r", model, error)
            return None

    def send(self, model: str, wanted: PatchOrder, round_: "Round", *, check: bool) -> None:
        """Encode this rank's part, and send it to rank 0, if that takes it."""
        part = self._made(model, wanted, check)
        round_.tell(0, str(-1 if part is None else len(part)).encode(), SIZE)
        if round_.hear(0, SIZE) == TAKEN and part is not None:
            round_.tell(0, part, PART)

    def offered(
        self,
        model: str,
        wanted: PatchOrder,
        digest: str,
        candidates: Collection[PatchCandidate],
        round_: "Round",
        left: Callable[[], float],
        *,
        check: bool,
    ) -> tuple[OfferedPatch, ...]:
        """Return the patch that the parts of all ranks make, on rank 0; by each name of its base.

        Args:
            model: The model's id.
            wanted: What all ranks encode.
            digest: The digest of the version.
            candidates: As in `wanted`.
            round_: The round of all ranks.
            left: Returns the seconds that are left.
            check: Whether to decode and compare each block.
        """
        base, others = self._base, range(1, self._ranks)
        assert base is not None  # noqa: S101 - otherwise no patch is wanted
        mine = self._made(model, wanted, check)
        sizes = [-1 if mine is None else len(mine)]
        sizes += [int(round_.hear(rank, SIZE, left())) for rank in others]
        taken = min(sizes) >= 0 and sum(sizes) <= wanted.nbytes_max
        for rank in others:
            round_.tell(rank, TAKEN if taken else b"", SIZE, left())
        if not taken or mine is None:
            return ()
        parts = [mine, *(round_.hear(rank, PART, left()) for rank in others)]
        layout, chunk_bytes = self._layout, self._plan.chunk_bytes
        header = Header(layout.id, layout.nbytes, chunk_bytes, base.digest, digest)
        owners = self.placement.owners.tolist()
        try:
            data = join(layout, header, owners, parts, tables_of(wanted.rows))
        except (PatchError, MemoryError) as error:
            log.warning("%s: no patch from the ranks: %r", model, error)
            return ()
        runs = Counter(each.running for each in self._takers(candidates)).most_common(PATCHES_MAX)
        about = data, wanted.classes, wanted.work
        return tuple([OfferedPatch(DELTA, running, *about) for running, _ in runs if running])
