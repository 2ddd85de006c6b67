"""Decides whether a worker accepts an announced version, whose layout must be valid and fit."""

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

LAYOUTS_KEPT = 4  # layouts to keep, so that a model that alternates between them sends none again
LAYOUTS_BYTES_KEPT = 2**22  # of their headers; a parsed header takes about five times as much

# The fields of an announcement that a fault depends on.
about = attrgetter(
    *("layout", "nbytes", "layout_bytes", "chunk_bytes"), *("encoding", "encryption")
)


class Expected(NamedTuple):
    """What is known of the versions of a model before the first announcement."""

    nbytes: int = 0  # 0: unknown
    layout_bytes: int = PREFIX_BYTES + LAYOUT_BYTES_MAX  # the most bytes of a layout
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
        room = max(LAYOUT_BYTES_GUARANTEED, bytes_max // LAYOUT_MEMORY)
        self.layout_bytes_max = min(expected.layout_bytes, room)
        known = expected.layout_bytes < Expected().layout_bytes
        self._tensors_max = TENSORS_MAX if known else TENSORS_UNKNOWN_MAX
        self._encryption = AES_256_GCM if expected.keyring is not None else None
        self._model, self._accepts, self.bytes_max = model, accepts, bytes_max
        self._part = expected.boxes is not None
        # The layouts by id, each with whether it was found to fit here.
        self._known: dict[str, tuple[Layout, bool]] = {}
        self.usual: dict[tuple[object, ...], Layout] = {}

    def layout(self, announce: Announce) -> Layout | None:
        """Return the layout of an announced version, if it is known."""
        known = self._known.get(announce.layout)
        return None if known is None else known[0]

    def learn(self, announce: Announce, header: Buffer) -> Fault | None:
        """Parse and keep the layout of an announcement; return its fault, None if it has none."""
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
        self._known.setdefault(layout.id, (layout, False))  # layouts are compared by identity
        while self._too_many():
            del self._known[next(iter(self._known))]
            self.usual = {}
        return None

    def _too_many(self) -> bool:
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
        """Forget that a layout fits, so that it is checked again before its next use."""
        known = self._known.get(layout_id)
        if known is not None:
            self._known[layout_id] = known[0], False
        self.usual = {}

    def fault(self, announce: Announce) -> Fault | None:
        """Return the fault of a version, as far as is known; None if it is acceptable."""
        if announce.encoding != "raw" or announce.encryption != self._encryption:  # E1
            what = f"encoding {announce.encoding!r}, encryption {announce.encryption!r}"
            return "unsupported", f"{what}; this worker takes 'raw' and {self._encryption!r}"
        if announce.nbytes > self.bytes_max and not self._part:  # of a part, `Follower` knows
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
