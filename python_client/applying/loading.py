"""Targets that are functions: an engine loads versions directly from the bus's memory."""

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

from ...bus.memory.pages import address_of
from ...bus.staged import OverwrittenError, StagedVersion
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Array
from ...codecs.section import Section
from .target import Names, Sums, Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.subscriber")


class UnchangedError(WeightBusError):
    """Raise this in a target function that has not changed any weights.

    The previous version then still runs. After any other exception no version runs, because only
    the function knows what it has changed.
    """

    __module__ = "weightbus"


class UnreadableTargetError(WeightBusError):
    """The content of a target cannot be read back."""


# What `Pairs.keep` keeps. These references keep the versions' segments locked even if the user
# drops the release function; otherwise the publisher would reuse the memory.
_HELD: set[ExitStack] = set()
HELD_WARN = 4  # number of kept versions from which on the log warns


def _release(hold: ExitStack) -> None:
    _HELD.discard(hold)
    hold.close()


@atexit.register
def _release_all() -> None:
    while _HELD:  # unlock while the modules that this needs still exist
        _HELD.pop().close()


class VersionInfo:
    """The public attributes of a staged version, before it is applied."""

    def __init__(self, staged: StagedVersion) -> None:
        self.model, (self.epoch, self.version) = staged.model, staged.key
        self.nbytes, self.digest = staged.layout.nbytes, staged.digest
        self.metadata = dict(staged.metadata)


class Pairs(VersionInfo):
    """The tensors of a version for a target function, valid until that function returns.

    Iterating yields (name, torch tensor) pairs; `arrays()` yields the same with numpy arrays. A
    tied tensor appears once under each of its names. All are views of the bus's memory, without a
    copy. Do not write to them: a numpy array raises, but a write to a torch tensor in the
    publisher's memory crashes the process. Do not use them after the function has returned, unless
    you called `keep()`: the memory will hold another version.

    Args:
        staged: The version in the bus's memory.

    Attributes:
        model, epoch, version: The version to load.
        nbytes: Bytes of its tensors.
        digest: The digest of its bytes; empty if the version is read from shared memory.
        metadata: The publisher's metadata, as text by name.
    """

    __module__ = "weightbus.types"

    def __init__(self, staged: StagedVersion) -> None:
        super().__init__(staged)
        self._layout = staged.layout
        # Every numpy and torch view refers to `lent`, so `_viewed` can detect views that remain.
        exposed = (ctypes.c_uint8 * self.nbytes).from_address(address_of(staged.data))
        vars(exposed)["owner"] = staged.data
        data = np.frombuffer(memoryview(exposed), np.uint8)
        data.flags.writeable = False
        self._viewed = weakref.ref(exposed)
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
        """Keep the tensors valid after the target function returns, until you release them.

        This is for an engine that runs directly on these tensors. The bus then needs other memory
        for the next version: one more buffer of its size for each version that is kept.

        Returns:
            A function that releases the tensors. Call it in any thread once nothing uses them.

        Raises:
            RuntimeError: The target function has returned, or `keep` was called before.
        """
        self._lent()
        if self.kept:
            raise RuntimeError(f"{self.model} version {self.version} cannot be kept twice")
        assert self._staged is not None  # noqa: S101 - set as long as the tensors are
        hold = ExitStack()
        # OverwrittenError is raised at the release, too late to act on
        hold.enter_context(suppress(OverwrittenError))
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
        """Make the tensors invalid; return whether views remain that `keep` does not cover."""
        self._section = self._staged = None
        return not self.kept and self._viewed() is not None


class FunctionTarget(Target):
    """A target that calls a function to load each version.

    Args:
        load: The function; it takes a `Pairs`.
    """

    asks_user = True

    def __init__(self, load: Callable[[Pairs], object]) -> None:
        self._load = load
        self._unchanged = False  # whether the last apply raised UnchangedError
        # (epoch, version) of the last version that `load` kept
        self._kept: tuple[int, int] | None = None
        self._warned = False

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Raise an error: only the function knows where it put the weights.

        Raises:
            UnreadableTargetError: Always.
        """
        del layout, names, sums
        raise UnreadableTargetError(
            "the target is a function, so the weights that it has loaded cannot be read back"
        )

    def apply(self, staged: StagedVersion) -> None:
        """Call the function with a version."""
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
        """Return whether the function called `keep()` for this version."""
        return key == self._kept

    def undo(self) -> bool:
        """Return whether the function raised UnchangedError: then the old weights are intact."""
        return self._unchanged

    def settle(self) -> None:
        """Do nothing: there is no old content to release."""


def _check_done(returned: object) -> None:
    """Raise TypeError if the function returned a coroutine or a generator.

    Raises:
        TypeError: The function returned an object that nothing runs, so nothing was loaded.
    """
    if inspect.isawaitable(returned) or inspect.isgenerator(returned):
        close = getattr(returned, "close", None)
        if close is not None:
            close()
        raise TypeError(
            f"the function that loads versions has returned a {type(returned).__name__}, which "
            "nothing runs: have it load them before it returns"
        )
