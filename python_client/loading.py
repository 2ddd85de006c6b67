"""Targets that are functions: an engine loads a version by itself, from where the bus has it."""

import atexit
import ctypes
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..bus.memory.pages import address_of
from ..bus.staged import OverwrittenError, StagedVersion
from ..codecs.errors import WeightBusError
from ..codecs.layout import Layout
from ..codecs.numpy_tensors import Array
from ..codecs.section import Section
from .target import Names, Sums, Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.subscriber")


class UnchangedError(WeightBusError):
    """Raise this in a target function that has changed nothing yet.

    The previous version then still runs. After any other exception no version runs, because only
    the function knows what it has changed.
    """

    __module__ = "weightbus"


class UnreadableTargetError(WeightBusError):
    """What a target holds cannot be read back."""


# Versions that somebody goes on using. Their segments stay locked, whoever forgets to release them:
# in the publisher's memory another version would take their place.
_HELD: set[ExitStack] = set()
HELD_WARN = 4


def _release(hold: ExitStack) -> None:
    _HELD.discard(hold)
    hold.close()


@atexit.register
def _release_all() -> None:
    while _HELD:  # while what it takes to unlock them is still there
        _HELD.pop().close()


class Named:
    """What users are told of a staged version before it is applied."""

    def __init__(self, staged: StagedVersion) -> None:
        self.model, (self.epoch, self.version) = staged.model, staged.key
        self.nbytes, self.digest = staged.layout.nbytes, staged.digest
        self.metadata = dict(staged.metadata)


class Pairs(Named):
    """The tensors of a `staged` version, for a target function, until it returns.

    Iterating yields (name, torch tensor) pairs; `arrays()` yields the same with numpy arrays. A
    tied tensor appears once under each of its names. All are views of the bus's memory, without a
    copy. Do not write to them: a numpy array raises, but a write to a torch tensor in the
    publisher's memory ends the process. Do not keep them after the function has returned, unless
    you called `keep()`: the memory will hold another version.

    Attributes:
        model, epoch, version: The version to load.
        nbytes: Bytes of its tensors.
        digest: The digest of its bytes; empty if it is read from shared memory.
        metadata: The publisher's metadata, as text by name.
    """

    __module__ = "weightbus.types"

    def __init__(self, staged: StagedVersion) -> None:
        super().__init__(staged)
        self._layout = staged.layout
        # What numpy and torch make of this holds it, so that it tells whether anything is kept.
        lent = (ctypes.c_uint8 * self.nbytes).from_address(address_of(staged.data))
        vars(lent)["owner"] = staged.data
        data = np.frombuffer(memoryview(lent), np.uint8)
        data.flags.writeable = False
        self._viewed = weakref.ref(lent)
        self._section: Section | None = Section(self._layout, data)
        self._staged: StagedVersion | None = staged
        self.kept = False

    def __len__(self) -> int:
        return len(self._layout.names())

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        for name in self._layout.names():
            yield name, self._lent().tensors[self._layout.by_name(name).name]

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, read-only numpy array) pairs."""
        for name in self._layout.names():
            yield name, self._lent().arrays[self._layout.by_name(name).name]

    def keep(self) -> Callable[[], None]:
        """Keep the tensors as they are after the function has returned, until you release them.

        For an engine that runs on them where they lie. The bus needs other memory for the next
        version then: with each version that is kept, one more of its size.

        Returns:
            A function that releases them, from any thread. Call it once nothing uses them.

        Raises:
            RuntimeError: The function has returned, or has called this before.
        """
        self._lent()
        if self.kept:
            raise RuntimeError(f"{self.model} version {self.version} cannot be kept twice")
        assert self._staged is not None  # noqa: S101 - it goes with the tensors
        hold = ExitStack()
        hold.enter_context(suppress(OverwrittenError))  # what was read since is not for us to say
        hold.enter_context(self._staged.reading())
        self.kept = True
        _HELD.add(hold)
        if len(_HELD) == HELD_WARN:
            log.warning(
                "%s version %d is the %dth version in this process that is kept and not released: "
                "call what `keep()` returned once nothing uses the tensors",
                *(self.model, self.version, HELD_WARN),
            )
        return partial(_release, hold)

    def _lent(self) -> Section:
        if self._section is None:
            raise RuntimeError(
                f"{self.model} version {self.version}: the function that was to load it has "
                "returned, and its tensors are no longer there; load them all before"
            )
        return self._section

    def end(self) -> bool:
        """Nothing can be had here any more; return whether somebody has views without `keep`."""
        self._section = self._staged = None
        return not self.kept and self._viewed() is not None


class FunctionTarget(Target):
    """A function that loads versions.

    Args:
        load: It; called with `Pairs`.
    """

    asks_user = True

    def __init__(self, load: Callable[[Pairs], object]) -> None:
        self._load = load
        self._unchanged = False  # by the last apply
        self._kept: tuple[int, int] | None = None  # the version that it has kept last
        self._warned = False

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Nobody but the function knows where they went.

        Raises:
            UnreadableTargetError: Always.
        """
        del layout, names, sums
        raise UnreadableTargetError(
            "the target is a function, so the weights that it has loaded cannot be read back"
        )

    def apply(self, staged: StagedVersion) -> None:
        """Have the function load a version."""
        pairs, self._unchanged = Pairs(staged), False
        try:
            _check_done(self._load(pairs))
        except UnchangedError:
            self._unchanged = True
            raise
        finally:
            viewed = pairs.end()
            if pairs.kept:
                self._kept = staged.key
        if viewed and not self._warned:
            self._warned = True
            log.warning(
                "%s: the function that loads it has kept views of its tensors, which will change: "
                "copy what is to stay, or call `keep()` first",
                staged.model,
            )

    def keeps(self, key: tuple[int, int]) -> bool:
        """Return whether the function has said so."""
        return key == self._kept

    def undo(self) -> bool:
        """Say whether the function has changed nothing: that is its own word."""
        return self._unchanged

    def settle(self) -> None:
        """Nothing is kept."""


def _check_done(returned: object) -> None:
    """Check that the function has done its work, and not left it for later."""
    if inspect.isawaitable(returned) or inspect.isgenerator(returned):
        close = getattr(returned, "close", None)
        if close is not None:
            close()
        raise TypeError(
            f"the function that loads versions has returned a {type(returned).__name__}, which "
            "nobody runs: have it load them before it returns"
        )
