"""`Target`: the interface of everything that a version can be applied to."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...bus.staged import StagedVersion
from ...bus.worker.layouts import Expected
from ...codecs.layout import Layout

if TYPE_CHECKING:
    import torch

Names = Iterable[str]
Sums = list[int | None]


class Target(ABC):
    """Something that a version can be applied to. The default methods assume nothing about it.

    Attributes:
        asks_user: Whether `apply` calls the user's code, which may be slow and has a deadline.
        detail: A remark on the last `apply` for the publisher's receipt; empty: none.
        on_disk: Whether the target is a file: a disk may be slow, and readers need no lock.
    """

    asks_user = False
    on_disk = False
    detail = ""

    @property
    def devices(self) -> "frozenset[torch.device]":
        """The CUDA devices of the target's tensors, as far as they are known."""
        return frozenset()

    def from_second(self, staged: StagedVersion) -> bool:
        """Return whether `apply(staged)` would read the version's second copy, on a device."""
        del staged
        return False

    def fault(self, layout: Layout) -> str:
        """Return an error text if a `layout` does not fit the target, else an empty text."""
        del layout
        return ""

    def ahead(self, staged: StagedVersion) -> None:
        """Prepare to apply `staged` while readers still read; do not change the target."""
        del staged

    @abstractmethod
    def apply(self, staged: StagedVersion) -> None:
        """Apply a whole version, or raise an exception."""

    @abstractmethod
    def undo(self) -> bool:
        """Restore the content before the last `apply`; return whether the target then has it.

        The caller does this after `apply`, or the user's hook after it, has failed.
        """

    @abstractmethod
    def settle(self) -> None:
        """Make the last `apply` final: release the content before it."""

    def expected(self) -> Expected:
        """Return the known bounds of a version that fits the target."""
        return Expected()

    def keeps(self, key: tuple[int, int]) -> bool:
        """Return whether the user keeps using the memory of version `key` after its `apply`."""
        del key
        return False

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return contiguous bytes equal to `staged`, which was just applied; None without any."""
        return staged.own

    @abstractmethod
    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Compute checksums of the current content step by step: see `codecs.apply.summing`."""
