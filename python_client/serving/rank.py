"""Runs one rank of an inference server: stages a trainer's versions, and loads them on command.

The server passes the trainer's commands on as calls; the rank reports results over the bus. A call
may be lost, arrive twice, or arrive after the trainer has cancelled it. So each update names its
version: an update to an older version than the newest known version changes nothing, and a
repeated update has no further effect.

join      join the bus, and check with the model whether it can load the published tensors at all.
          If it cannot, each version is rejected when it is announced, so no rank stages it. If the
          model's loaders read only slices of the tensors, the rank receives only these slices
start     do nothing
update    stage the version; if the trainer cancels the version, release it. Once the server is
          paused, the trainer sends a second update, with `load`: this update marks the version
finish    load the version that the last update marked, and acknowledge it

vLLM reads the answers of its ranks in order. After an error it leaves the remaining answers to the
next call, so only the last rank raises an error that all ranks have. A rank that cannot receive the
version always raises an error, since no rank may load the version then. Other errors of a version
are reported over the bus, and calls do not raise them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ...bus.errors import ApplyError
from ...codecs.errors import LayoutError, WeightBusError
from ...codecs.layout import Layout, Signature, difference, trimmed
from ...codecs.parts import Box
from ..applying.applier import Staged
from ..applying.loading import FunctionTarget, Pairs
from ..settings import Settings
from ..subscriber import Subscriber

if TYPE_CHECKING:
    from .recorder import Tensors
    from .recording import Recording

log = logging.getLogger("weightbus.serving")

PART_MAX = 0.9  # a rank that needs more than this part of a version's bits receives it whole

REPORT_SECONDS = 1.0  # longest wait until the publisher has a version's result
NO_TRAINER = (
    "no trainer has joined this server yet, so there is nothing to load: call "
    "init_weight_transfer_engine first"
)


class Loader(Protocol):
    """Loads versions into a model."""

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        """Return why tensors with these dtypes and shapes cannot be loaded, or "" if they can.

        Do not change the model.
        """
        ...

    def record(self, tensors: Mapping[str, Signature]) -> "Recording":
        """Return which part of each of these tensors the model's loaders read.

        Do not change the model. Called with tensors that `rehearse` has accepted.
        """
        ...

    def make_ready(self, staged: Staged) -> None:
        """Prepare a version for `load`, before the server pauses. Do not change the model."""
        ...

    def load(self, pairs: "Tensors") -> None:
        """Load a version from (name, tensor) pairs.

        Raises:
            UnchangedError: The version cannot be loaded, and the model is unchanged.
        """
        ...


@dataclass(frozen=True)
class Join:
    """The arguments with which a rank joins a trainer.

    Attributes:
        address: The address of the trainer's publisher.
        model: The model's id on the bus.
        deployment: The server's name on the bus. Its ranks are named `deployment-dpX-rankY`.
        deadline: The most seconds that loading a version may take.
        tensors: Dtype and shape of each tensor that will be published, by name.
    """

    address: str
    model: str = "policy"
    deployment: str = "vllm"
    deadline: float = 60.0
    tensors: dict[str, tuple[str, list[int]]] = field(
        default_factory=dict[str, tuple[str, list[int]]]
    )


@dataclass(frozen=True)
class RankVersion:
    """The arguments of an update.

    Attributes:
        epoch, version: The numbers of the version.
        deadline: Seconds to wait for the version, and later for the publisher to commit it.
        cancel: Why the trainer cancels this and all older versions; empty if it does not.
        load: Whether the server is paused, so that the next `finish` loads the version. (The
            default is for trainers that do not send this field.)
    """

    epoch: int
    version: int
    deadline: float = 60.0
    cancel: str = ""
    load: bool = True


class _RankTarget(FunctionTarget):
    """A target that loads through a rank, and rejects layouts that the rank cannot load."""

    def __init__(self, rank: "Rank") -> None:
        super().__init__(rank.load)
        self._rank = rank
        if rank.takes_part:
            self.take_part(rank.boxes)

    def fault(self, layout: Layout) -> str:
        return "" if self._rank.takes_part else self._rank.fault(layout)  # `boxes` checks a part


class Rank:
    """One rank of a server, and its current session.

    Args:
        loader: Loads versions into the rank's model.
        last: Whether this is the server's last rank, whose answers vLLM reads last.
        parts: Whether to receive only the slices that the model's loaders read; useful if the
            server has several ranks. Finding the slices of thousands of tensors takes seconds.
    """

    def __init__(self, loader: Loader, *, last: bool = True, parts: bool = False) -> None:
        self._loader, self._last, self._parts = loader, last, parts
        self._worker: Subscriber | None = None
        self._model = ""
        self._tensors: dict[str, Signature] = {}
        self._recording: Recording | None = None  # None: versions are received whole
        self._misfit = ""  # why the trainer's tensors cannot be loaded; empty if they can
        self._staged: Staged | None = None
        self._marked = False  # whether the next `finish` loads `_staged`
        self._newest = (0, 0)  # (epoch, version) of the newest version in an update of this trainer
        # (epoch, version) of the session's version; None once it is loaded or cancelled.
        self._due: tuple[int, int] | None = None
        self._deadline = 0.0

    def join(self, call: Join, suffix: str) -> None:
        """Join a trainer, and leave the previous one.

        Args:
            call: The trainer's address and names, and the tensors that it will publish.
            suffix: Identifies this rank within the deployment.

        Raises:
            WeightBusError: The worker cannot be created.
            ValueError: The name or the address is invalid.
        """
        self.leave()
        self._model, self._newest = call.model, (0, 0)
        self._tensors = {n: (dtype, tuple(shape)) for n, (dtype, shape) in call.tensors.items()}
        self._misfit = self._loader.rehearse(self._tensors) if self._tensors else ""
        slices = self._parts and self._tensors and not self._misfit
        self._recording = self._record() if slices else None
        self._worker = Subscriber(
            call.address,
            {call.model: _RankTarget(self)},
            name=f"{call.deployment}-{suffix}",
            settings=Settings(apply_timeout=call.deadline),
        )
        if self._misfit:
            log.error("%s cannot load %s: %s", self._worker.name, call.model, self._misfit)

    def start(self) -> None:
        """Do nothing: the session's version is not known before `update`."""

    def update(self, call: RankVersion) -> None:
        """Stage a version, and record whether `finish` loads it; release a cancelled version.

        Args:
            call: The version, and whether to load or cancel it.

        Raises:
            RuntimeError: This rank has joined no trainer, and is the last rank.
            WeightBusError, TimeoutError: The version did not arrive. Only the call reports this
                error; the bus does not.
        """
        key = call.epoch, call.version
        if self._worker is None:
            log.error(NO_TRAINER)
            if self._last:
                raise RuntimeError(NO_TRAINER)
            return
        if call.cancel:
            self._cancel(key, call.cancel)
            return
        if key < self._newest:
            self._due = self._due or key
            log.warning(
                "%s: a call for version %d came late and changes nothing: version %d is the newest",
                *(self._worker.name, call.version, self._newest[1]),
            )
            return
        self._newest = self._due = key
        if self._running(self._worker) == key:
            self._due = None
            return
        if self._staged is None or (self._staged.epoch, self._staged.version) != key:
            self._release()
            self._staged = self._stage(self._worker, key, call.deadline)
        if self._staged is not None:
            self._marked, self._deadline = call.load, call.deadline

    def finish(self) -> None:
        """Load the staged version and acknowledge it, if the last update marked it.

        Raises:
            RuntimeError: The session's version is not loaded, so the server must not set its
                version label. Only the last rank raises this error, and only once per session.
        """
        staged, due, why = self._staged, self._due, ""
        if self._worker is None:
            why = NO_TRAINER
        elif staged is not None and self._marked:
            try:
                if staged.apply(self._deadline) is None:
                    why = f"{staged}: its publisher has not decided within {self._deadline:g} s"
            except WeightBusError as error:  # the bus reports this error too
                why = str(error)
            finally:
                self._release()
        elif due is not None:
            why = f"version {due[1]} of epoch {due[0]} is not loaded: no update has marked it"
        self._due = None
        if why:
            log.error("%s", why)
            if self._last:
                raise RuntimeError(why)

    def leave(self) -> None:
        """Leave the bus. The model is unchanged."""
        self._release()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _record(self) -> "Recording | None":
        """Return which part of the tensors this rank needs; None if (nearly) all of them."""
        recording = self._loader.record(self._tensors)
        needed, total = recording.bits
        if recording.why_whole:
            log.warning("%s is received whole: %s", self._model, recording.why_whole)
        return recording if needed <= PART_MAX * total and not recording.why_whole else None

    # Called by the subscriber.

    @property
    def takes_part(self) -> bool:
        """Whether this rank receives only the slices that its model's loaders read."""
        return self._recording is not None

    def boxes(self, layout: Layout) -> Mapping[str, Box | None]:
        """Return the slices that this rank needs of a version with this layout.

        Raises:
            LayoutError: The version cannot be loaded.
        """
        if fault := self.fault(layout):
            raise LayoutError(fault)
        return {} if self._recording is None else {**self._recording.part}

    def fault(self, layout: Layout) -> str:
        """Return why a version with this layout cannot be loaded, or "" if it can."""
        if self._misfit or not self._tensors:
            return self._misfit
        lines = difference(layout.signatures, self._tensors, remedies=False)
        return "\n".join(trimmed(lines))

    def load(self, pairs: Pairs) -> None:
        """Load a version. The subscriber acknowledges the version afterwards."""
        self._loader.load(pairs if self._recording is None else self._recording.pairs(pairs))

    def _running(self, worker: Subscriber) -> tuple[int, int] | None:
        """Return (epoch, version) that the model runs; None if none of this trainer."""
        update = worker.update(self._model)
        return None if update is None else (update.epoch, update.version)

    def _stage(self, worker: Subscriber, key: tuple[int, int], seconds: float) -> Staged | None:
        """Stage and prepare a version; return None after a failure that the bus has reported."""
        try:
            staged = worker.stage(seconds, version=key, model=self._model)
        except ApplyError as error:
            log.error("%s: %s", worker.name, error)  # noqa: TRY400 - the text has the cause
            worker.flush(REPORT_SECONDS)
            if error.code == "gone":
                raise
            return None
        self._loader.make_ready(staged)
        return staged

    def _cancel(self, key: tuple[int, int], why: str) -> None:
        """Release version `key` and older ones; wait until the publisher has their results."""
        if self._staged is not None and (self._staged.epoch, self._staged.version) <= key:
            log.warning("%s is cancelled by the trainer: %s", self._staged, why)
            self._release()
        if self._due is not None and self._due <= key:
            self._due = None
        if self._worker is not None:
            self._worker.flush(REPORT_SECONDS)

    def _release(self) -> None:
        self._marked = False
        if self._staged is not None:
            self._staged.release()
            self._staged = None
