"""`Target` is the base class of everything that a version can be applied to."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...bus.staged import StagedVersion
from ...bus.worker.layouts import Boxes, Expected
from ...codecs.layout import Layout

if TYPE_CHECKING:
    import torch

Names = Iterable[str]
Sums = list[int | None]


class Target(ABC):
    """An object that versions can be applied to, such as a model in memory or a file.

    Attributes:
        calls_user: Whether `apply` calls the user's code, which may be slow and has a deadline.
        detail: A remark on the last `apply` for the publisher's receipt; may be empty.
        boxes: Returns which slices of a layout's tensors the target needs; None: it needs all.
        on_disk: Whether the target is a file: a disk may be slow, and readers need no lock.
    """

    calls_user = False
    on_disk = False
    detail = ""
    boxes: Boxes | None = None

    def take_part(self, boxes: Boxes) -> None:
        """Restrict the target to these slices of each version."""
        self.boxes = boxes

    @property
    def devices(self) -> "frozenset[torch.device]":
        """The CUDA devices of the target's tensors, as far as known."""
        return frozenset()

    def from_second(self, staged: StagedVersion) -> bool:
        """Return whether `apply(staged)` will read the publisher's second copy, on a device."""
        del staged
        return False

    def fault(self, layout: Layout) -> str:
        """Return an error text if versions of this layout do not fit the target, else ""."""
        del layout
        return ""

    def prepare(self, staged: StagedVersion) -> None:
        """Prepare to apply `staged`, while readers still read: do not change the target."""
        del staged

    @abstractmethod
    def apply(self, staged: StagedVersion) -> None:
        """Apply a whole version, or raise an exception."""

    @abstractmethod
    def undo(self) -> bool:
        """Undo the last `apply`; return whether the target has its previous content again.

        Called if `apply`, or the user's hook after it, has failed.
        """

    @abstractmethod
    def settle(self) -> None:
        """Make the last `apply` final: release the previous content."""

    def expected(self) -> Expected:
        """Return upper bounds on the size of a version that fits the target."""
        return Expected()

    def has_kept(self, key: tuple[int, int]) -> bool:
        """Return whether the user still uses the memory of version `key` after its `apply`."""
        del key
        return False

    def applied_bytes(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return memory that has the bytes of `staged`, just applied; None if there is none."""
        return staged.private_bytes

    @abstractmethod
    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Compute checksums of the current content, in steps: see `codecs.apply.summing`."""
