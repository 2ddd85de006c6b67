"""Makes patches to versions of which each rank has a part: each rank encodes its own blocks.

Theory of operation: the base of a patch is the version before. For workers that fetch the base, a
rank keeps its part of it anyway until its part of the next version is ready. So a base needs no
extra memory. For each version of which workers accept patches, the ranks

1. exchange the bytes of blocks in which another rank's chunks begin (`placement.py`)
2. report to rank 0 which base they have, and propose tables for the codes of steps (`PartReport`)
3. get an order from rank 0 (`PatchOrder`), if a worker runs the base and every rank has it. A rank
   that was restarted lacks the base. All ranks lack it if the layout has changed, or if another
   rank now encodes a block
4. encode their blocks in parallel, and send rank 0 the size of the result. If a rank has failed, or
   the sum of the sizes is too large, there is no patch
5. send the encoded blocks to rank 0, which joins the parts.

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

SIZE_DIVISOR = 4  # a patch has at most a quarter of the version's size: rank 0 holds it twice
OFFER_SHARE = 0.5  # fraction of the remaining time for making parts, as in `models.py`
ACCEPTED = b"accepted"
SIZE, PART = "the size of its part of the patch", "its part of the patch"


class PatchTerms(NamedTuple):
    """Whether to make a patch, and of which kind.

    Attributes:
        candidates: The workers that may receive a patch; if empty, there is no patch and no base.
        encoding: "delta" or "auto"; with "raw", no worker is a candidate.
        bases: Chooses the kind of patch, if `encoding` is "auto".
    """

    candidates: Collection[PatchCandidate]
    encoding: Encoding
    bases: "Bases"

    @property
    def wanted(self) -> bool:
        """Whether to make a patch, if possible, and keep the version as the base of later ones."""
        return bool(self.candidates) and self.encoding != "raw"


class PartBase(NamedTuple):
    """A rank's part of a version that a patch may build on.

    Attributes:
        digest: The digest of the version.
        form: The layout's id, the chunk size, and which rank encodes which block.
        memory: The data section, in which only the bytes of this rank are valid.
    """

    digest: str
    form: tuple[str, int, bytes]
    memory: Memory


class PartReport(msgspec.Struct, frozen=True):
    """A rank's report to rank 0, which then decides on a patch.

    Attributes:
        base: The digest of the base that the rank has; empty if it has none.
        tables: The tables that the rank proposes, by kind of the elements: first for patches
            without classes, then for patches with classes.
        sums: The rank's part of the estimate of what patches cost.
    """

    base: str = ""
    tables: tuple[dict[int, Proposal], ...] = ()
    sums: list[float] = []


class PatchOrder(msgspec.Struct, frozen=True):
    """The patch that all ranks are to encode.

    Attributes:
        rows: The rows of the patch's tables, by kind of the elements.
        classes: Whether the patch's steps are coded by class.
        work: As in `OfferedPatch`.
        nbytes_max: The largest allowed size of the patch.
        seconds: The time that a rank may take to encode its blocks.
    """

    rows: dict[int, list[list[int]]]
    classes: bool
    work: float
    nbytes_max: int
    seconds: float


class PatchParts:
    """This rank's part of the patch to a version.

    Args:
        layout: The layout of the version.
        plan: The chunks of the version.
        chunks: Which rank sends which chunk.
        memory: The data section, with the chunks that this rank sends.
        rank: The index of this rank.
        ranks: How many ranks there are.

    Attributes:
        placement: Which rank encodes which block, and which bytes the ranks first exchange.
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
        """Set the base, if its form is that of the new version; return the report to rank 0."""
        if base is None or base.form != self._form:
            return PartReport()
        self._base = base
        about = self._blocks, base.memory, self._memory
        tables = tuple([propose(*about, classes=classes) for classes in (False, True)])
        return PartReport(base.digest, tables, sums(*about))

    def as_base(self, digest: str) -> PartBase:
        """Return this rank's part of the version, as the base of the next patch."""
        return PartBase(digest, self._form, self._memory)

    def decide(
        self, reports: Sequence[PartReport | None], terms: PatchTerms, seconds: float
    ) -> PatchOrder | None:
        """Return the patch that all ranks are to encode, on rank 0; None if no patch is made.

        The patch goes over the link of rank 0 to each worker, the version over the links of all
        ranks. So with many workers, a patch above a rank's mean part would arrive later.

        Args:
            reports: The reports of all ranks.
            terms: The terms of the patch.
            seconds: The time that is left for the publish.
        """
        base, nbytes = self._base, self._layout.nbytes
        candidates = self._on_base(terms.candidates)
        have = [r for r in reports if r is not None and base is not None and r.base == base.digest]
        if base is None or not candidates or len(have) < len(reports):
            return None
        way: Way | None = Way(classes=True)
        if terms.encoding == "auto":
            data, each = (base.memory, self._memory), [report.sums for report in have]
            way = terms.bases.choose_in_parts(self._layout, *data, candidates, self._blocks, each)
        if way is None:
            return None
        rows = agreed(report.tables[way.classes] for report in have)
        nbytes_max = nbytes // max(SIZE_DIVISOR, min(self._ranks, len(candidates)))
        return PatchOrder(rows, way.classes, way.work * nbytes, nbytes_max, OFFER_SHARE * seconds)

    def _on_base(self, candidates: Collection[PatchCandidate]) -> list[PatchCandidate]:
        """Return the workers that run the base."""
        digest = "" if self._base is None else self._base.digest
        return [c for c in candidates if c.running is not None and c.running.digest == digest]

    def _encode(self, model: str, order: PatchOrder, check: bool) -> bytes | None:
        """Return this rank's part; None if it is too large, or encoding fails, which is logged."""
        assert self._base is not None  # noqa: S101 - otherwise no patch is ordered
        text = f"this rank has not made its part in {order.seconds:.3g} s, half of the time left"
        deadline = Deadline(time.monotonic() + order.seconds, text)
        try:
            return encode_part(
                self._blocks,
                self._base.memory,
                self._memory,
                tables_of(order.rows),
                nbytes_max=order.nbytes_max,
                check=check,
                step=deadline.check,
            )
        except (PatchError, MemoryError, DeadlineError) as error:
            log.warning("%s: no patch from the ranks: %r", model, error)
            return None

    def send(self, model: str, order: PatchOrder, round_: "Round", *, check: bool) -> None:
        """Encode this rank's part, and send it to rank 0, if rank 0 accepts the sizes of all."""
        part = self._encode(model, order, check)
        round_.send_bytes(0, str(-1 if part is None else len(part)).encode(), SIZE)
        if round_.receive_bytes(0, SIZE) == ACCEPTED and part is not None:
            round_.send_bytes(0, part, PART)

    def collect(
        self,
        model: str,
        order: PatchOrder,
        digest: str,
        candidates: Collection[PatchCandidate],
        round_: "Round",
        left: Callable[[], float],
        *,
        check: bool,
    ) -> tuple[OfferedPatch, ...]:
        """Join the parts of all ranks, on rank 0; return the patch, once for each key of its base.

        Args:
            model: The model's id.
            order: The patch that all ranks encode.
            digest: The digest of the version.
            candidates: The workers that may receive a patch.
            round_: The round of all ranks.
            left: Returns the seconds until the deadline.
            check: Whether to decode and compare each block.
        """
        base, others = self._base, range(1, self._ranks)
        assert base is not None  # noqa: S101 - otherwise no patch is ordered
        mine = self._encode(model, order, check)
        sizes = [-1 if mine is None else len(mine)]
        sizes += [int(round_.receive_bytes(rank, SIZE, left())) for rank in others]
        accepted = min(sizes) >= 0 and sum(sizes) <= order.nbytes_max
        for rank in others:
            round_.send_bytes(rank, ACCEPTED if accepted else b"", SIZE, left())
        if not accepted or mine is None:
            return ()
        parts = [mine, *(round_.receive_bytes(rank, PART, left()) for rank in others)]
        layout, chunk_bytes = self._layout, self._plan.chunk_bytes
        header = Header(layout.id, layout.nbytes, chunk_bytes, base.digest, digest)
        owners = self.placement.owners.tolist()
        try:
            data = join(layout, header, owners, parts, tables_of(order.rows))
        except (PatchError, MemoryError) as error:
            log.warning("%s: no patch from the ranks: %r", model, error)
            return ()
        keys = Counter(each.running for each in self._on_base(candidates)).most_common(PATCHES_MAX)
        about = data, order.classes, order.work
        return tuple([OfferedPatch(DELTA, running, *about) for running, _ in keys if running])
