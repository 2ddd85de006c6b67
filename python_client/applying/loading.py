"""Applies versions by calling a user's function, which loads them from the bus's memory."""

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

    The previous version then still runs. After any other exception no version runs, since only the
    function knows what it has changed.
    """

    __module__ = "weightbus"


class UnreadableTargetError(WeightBusError):
    """The content of a target cannot be read back."""


# For each version that `Pairs.keep` keeps, a stack that unlocks its segment. Kept here, since the
# publisher would reuse the memory if the user dropped the release function.
_KEPT: set[ExitStack] = set()
KEPT_WARN = 4  # the log warns once so many versions are kept


def _release(hold: ExitStack) -> None:
    _KEPT.discard(hold)
    hold.close()


@atexit.register
def _release_all() -> None:
    while _KEPT:  # unlock while the modules that this needs still exist
        _KEPT.pop().close()


class VersionInfo:
    """The attributes of a staged version that users see before it is applied."""

    def __init__(self, staged: StagedVersion) -> None:
        self.model, (self.epoch, self.version) = staged.model, staged.key
        self.nbytes, self.digest = staged.layout.nbytes, staged.digest
        self.metadata = dict(staged.metadata)


class Pairs(VersionInfo):
    """The tensors of a version for a target function, valid until that function returns.

    Iterating yields (name, torch tensor) pairs; `arrays()` yields (name, numpy array) pairs. A tied
    tensor appears once under each of its names. All are views of the bus's memory, not copies. Do
    not write to them: a numpy array raises, but a write to a torch tensor in the publisher's memory
    crashes the process. Do not use them after the function has returned, unless you called
    `keep()`: the memory is then used for another version.

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
        # Every numpy and torch view refers to `exposed`, so `_viewed` detects views that remain.
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
            yield name, self._valid_section().tensors[self._layout.by_name(name).name]

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, read-only numpy array) pairs."""
        for name in self._layout.names():
            yield name, self._valid_section().arrays[self._layout.by_name(name).name]

    def keep(self) -> Callable[[], None]:
        """Keep the tensors valid after the target function returns, until you release them.

        This is for an engine that runs directly on these tensors. For each version that is kept,
        the bus then needs one more buffer of the version's size.

        Returns:
            A function that releases the tensors. Call it, in any thread, once nothing uses them.

        Raises:
            RuntimeError: The target function has returned, or `keep` was called before.
        """
        self._valid_section()
        if self.kept:
            raise RuntimeError(f"{self.model} version {self.version} cannot be kept twice")
        assert self._staged is not None  # noqa: S101 - set as long as `_section` is
        hold = ExitStack()
        # an OverwrittenError is raised at the release: too late to act on it
        hold.enter_context(suppress(OverwrittenError))
        hold.enter_context(self._staged.reading())
        self.kept = True
        _KEPT.add(hold)
        if len(_KEPT) == KEPT_WARN:
            log.warning(
                "%s version %d is the %dth version in this process that is kept and not released: "
                "call the function that `keep()` returned once nothing uses the tensors",
                *(self.model, self.version, KEPT_WARN),
            )
        return partial(_release, hold)

    def _valid_section(self) -> Section:
        if self._section is None:
            raise RuntimeError(
                f"{self.model} version {self.version}: its tensors are not valid any more, since "
                "the function that loads it has returned; load all tensors before it returns"
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

    calls_user = True

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
                "%s: the function that loads it has kept views of its tensors, whose memory will "
                "be overwritten: copy the tensors, or call `keep()` first",
                staged.model,
            )

    def has_kept(self, key: tuple[int, int]) -> bool:
        """Return whether the function called `keep()` for this version."""
        return key == self._kept

    def undo(self) -> bool:
        """Return whether the function raised UnchangedError: then the old weights are intact."""
        return self._unchanged

    def settle(self) -> None:
        """Do nothing: there is no old content to release."""


def _check_done(returned: object) -> None:
    """Check that the function did not return a coroutine or a generator, which loads nothing.

    Raises:
        TypeError: It did.
    """
    if inspect.isawaitable(returned) or inspect.isgenerator(returned):
        close = getattr(returned, "close", None)
        if close is not None:
            close()
        raise TypeError(
            f"the function that loads versions has returned a {type(returned).__name__}, which "
            "nothing runs: load the version before the function returns"
        )
