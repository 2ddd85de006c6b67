"""Decides whether a worker accepts an announced version, from its sizes and its layout."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from ...codecs.errors import LayoutError, TensorsError
from ...codecs.layout import PREFIX_BYTES, Layout
from ...codecs.parts import Box
from ...codecs.protocol_limits import CHUNKS_MAX, LAYOUT_BYTES_MAX, TENSORS_MAX
from ...codecs.sealing import AES_256_GCM
from ..headers import Buffer
from ..limits import LAYOUT_BYTES_GUARANTEED, LAYOUT_MEMORY, TENSORS_UNKNOWN_MAX
from ..messages import Announce
from .keyring import Keyring

Accepts = Callable[[str, Layout], str]
Boxes = Callable[[Layout], Mapping[str, Box | None]]
Fault = tuple[str, str]  # a code of `failed`, and the reason in words

LAYOUTS_KEPT = 4  # layouts to cache, so that a model may alternate between a few of them
LAYOUTS_BYTES_KEPT = 2**22  # bytes of their headers; a parsed header takes about five times as much

# Returns the fields of an announcement that decide whether it is acceptable.
about = attrgetter(
    *("layout", "nbytes", "layout_bytes", "chunk_bytes"), *("encoding", "encryption")
)


class Expected(NamedTuple):
    """What is known about a model's versions before the first announcement."""

    nbytes: int = 0  # size of a version; 0: unknown
    layout_bytes: int = PREFIX_BYTES + LAYOUT_BYTES_MAX  # the largest acceptable layout
    keyring: Keyring | None = None  # decrypts the versions; None if they are not encrypted
    patches: bool = False  # whether patches are accepted
    boxes: Boxes | None = None  # returns the slices that the worker takes; None: it takes all


class Acceptance:
    """The known layouts of one model, and the limits of acceptable versions.

    Args:
        model: The model's name.
        accepts: Returns why a layout cannot be applied here, or an empty string if it can.
        bytes_max: The largest version to accept, in bytes.
        expected: The expected layout and size of versions. Parsing a layout takes time and memory,
            so no layout larger than expected is accepted.

    Attributes:
        usual: The layout of the last acceptable announcement, by `about(announce)`.
    """

    def __init__(
        self,
        model: str,
        accepts: Accepts,
        bytes_max: int,
        expected: Expected = Expected(),  # noqa: B008 - it cannot change
    ) -> None:
        limit = max(LAYOUT_BYTES_GUARANTEED, bytes_max // LAYOUT_MEMORY)
        self.layout_bytes_max = min(expected.layout_bytes, limit)
        size_known = expected.layout_bytes < Expected().layout_bytes
        self._tensors_max = TENSORS_MAX if size_known else TENSORS_UNKNOWN_MAX
        self._encryption = AES_256_GCM if expected.keyring is not None else None
        self._model, self._accepts, self.bytes_max = model, accepts, bytes_max
        self._takes_part = expected.boxes is not None
        # The layouts by id, each with a flag: whether `accepts` has accepted it.
        self._known: dict[str, tuple[Layout, bool]] = {}
        self.usual: dict[tuple[object, ...], Layout] = {}

    def layout(self, announce: Announce) -> Layout | None:
        """Return the layout of an announced version, if it is known."""
        known = self._known.get(announce.layout)
        return None if known is None else known[0]

    def learn(self, announce: Announce, header: Buffer) -> Fault | None:
        """Parse and cache an announcement's layout; return its fault, or None if it is valid."""
        fault = self.size_fault(announce)  # checked before the layout is parsed
        if fault is not None:
            return fault
        if len(header) != announce.layout_bytes:
            text = f"the layout has {len(header)} bytes, but {announce.layout_bytes} were announced"
            return "layout-invalid", text
        try:
            layout = Layout.parse(bytes(header), tensors_max=self._tensors_max)
        except TensorsError as error:
            return "too-large", str(error)
        except LayoutError as error:
            return "layout-invalid", str(error)
        if layout.id != announce.layout:
            text = f"the layout hashes to {layout.id}, but {announce.layout} was announced"
            return "layout-invalid", text
        # A known layout stays the same object, since layouts are compared by identity.
        self._known.setdefault(layout.id, (layout, False))
        while self._cache_full():
            del self._known[next(iter(self._known))]
            self.usual = {}
        return None

    def _cache_full(self) -> bool:
        nbytes = sum(len(layout.header) for layout, _ in self._known.values())
        count = len(self._known)
        return count > LAYOUTS_KEPT or (count > 1 and nbytes > LAYOUTS_BYTES_KEPT)

    def size_fault(self, announce: Announce) -> Fault | None:
        """Return a fault if a layout is too large for this worker, or for the version's data."""
        nbytes, limit = announce.layout_bytes, self.layout_bytes_max
        if nbytes > limit:
            text = f"a layout of {nbytes} bytes; this worker accepts at most {limit} for its model"
            cause = "do the names of its tensors differ, or is the worker's bytes_max too low?"
            return "too-large", f"{text}: {cause}"
        limit = LAYOUT_BYTES_GUARANTEED + announce.nbytes
        if nbytes > limit:
            text = f"a layout of {nbytes} bytes for {announce.nbytes} bytes of weights; at most"
            return "too-large", f"{text} {limit} are allowed"
        return None

    def doubt(self, layout_id: str) -> None:
        """Forget that a layout was accepted, so that it is checked again before its next use."""
        known = self._known.get(layout_id)
        if known is not None:
            self._known[layout_id] = known[0], False
        self.usual = {}

    def fault(self, announce: Announce) -> Fault | None:
        """Return the fault of a version; None if it is acceptable, as far as is known.

        If its layout is not known yet, only the announcement is checked.
        """
        if announce.encoding != "raw" or announce.encryption != self._encryption:  # E1
            what = f"encoding {announce.encoding!r}, encryption {announce.encryption!r}"
            return "unsupported", f"{what}; this worker accepts 'raw' and {self._encryption!r}"
        if announce.nbytes > self.bytes_max and not self._takes_part:  # `Follower` checks parts
            text = f"{announce.nbytes} bytes; this worker accepts at most {self.bytes_max}"
            return "too-large", f"{text}: raise its bytes_max if that is meant"
        if (fault := self.size_fault(announce)) is not None:
            return fault
        if announce.nbytes > CHUNKS_MAX * announce.chunk_bytes:
            text = f"{announce.nbytes} bytes in chunks of {announce.chunk_bytes}"
            return "too-many-chunks", f"{text} are more than {CHUNKS_MAX} chunks"
        known = self._known.get(announce.layout)
        if known is None:
            return None
        layout, fits = known
        if layout.nbytes != announce.nbytes:
            text = f"{announce.nbytes} bytes were announced, but the layout holds {layout.nbytes}"
            return "layout-invalid", text
        if not fits:
            problem = self._accepts(self._model, layout)
            if problem:
                return "layout-mismatch", problem
            self._known[layout.id] = layout, True
        self.usual = {about(announce): layout}
        return None
