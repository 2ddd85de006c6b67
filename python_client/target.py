"""What a version can be applied to: what each kind of target says and does."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..bus.staged import StagedVersion
from ..bus.worker.layouts import Expected
from ..codecs.layout import Layout

if TYPE_CHECKING:
    import torch

Names = Iterable[str]
Sums = list[int | None]


class Target(ABC):
    """What a version can be applied to; as it stands here, one of which nothing is known before.

    Attributes:
        asks_user: Applying calls the user's code, which has a deadline and may take its time.
        detail: What is to be said of the last `apply` in the publisher's receipt.
        on_disk: It is a file: a disk may take its time, and there are no readers to keep out.
    """

    asks_user = False
    on_disk = False
    detail = ""

    @property
    def devices(self) -> "frozenset[torch.device]":
        """The CUDA devices that its tensors are on, as far as that was seen."""
        return frozenset()

    def from_second(self, staged: StagedVersion) -> bool:
        """Whether it copies from the second copy of the bytes, if `staged` is applied next."""
        del staged
        return False

    def fault(self, layout: Layout) -> str:
        """Say why a `layout` cannot be applied here; nothing if it can. Changes nothing."""
        del layout
        return ""

    def ahead(self, staged: StagedVersion) -> None:
        """Do what can be done before `staged` is applied, while readers go on; change nothing."""
        del staged

    @abstractmethod
    def apply(self, staged: StagedVersion) -> None:
        """Apply a version: all of it, or an exception."""

    @abstractmethod
    def undo(self) -> bool:
        """Have what was there before the last `apply` in place again; say whether it is.

        It is called after that has failed, or the user's part of it.
        """

    @abstractmethod
    def settle(self) -> None:
        """The last `apply` stands: let go of what was there before."""

    def expected(self) -> Expected:
        """Say what is known of versions that fit."""
        return Expected()

    def keeps(self, key: tuple[int, int]) -> bool:
        """Whether the user goes on using the memory of a version (its `key`) after its `apply`."""
        del key
        return False

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return where the bytes of `staged`, just applied, lie from now on, in one piece."""
        return staged.own

    @abstractmethod
    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what is there by now, a little at a time: see `codecs.apply.summing`."""
