"""One rank of a served model: it stages what a trainer publishes, and loads it when told to.

Commands come by the server's calls, results go over the bus. A call may be lost, come twice, or
come when its caller has given it up. So each says which version it is for: one that is for an older
version than this rank knows of changes nothing, and one that comes again has no further effect.

join      joins the bus, and tries on the model whether what will be published can be loaded at all
          (what cannot is refused as soon as it is announced, and so no rank stages it)
start     nothing
update    holds the version, verified and ready. Once the server stands still: the next finish is to
          load it. Or gives it up, where the trainer cancels it
finish    loads the version that the last update is to have loaded, and acknowledges it

The answers of a server's ranks are taken in order, and an error leaves those after it for the next
call; so an error that each rank would have is raised by the last one alone. A rank that does not
have the version raises it, since none may load it then. What the bus tells, no call raises.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...bus.errors import ApplyError
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout, Signature, difference, trimmed
from ..applying import Staged
from ..loading import FunctionTarget, Pairs
from ..settings import Settings
from ..subscriber import Subscriber

log = logging.getLogger("weightbus.serving")

HEARD_SECONDS = 1.0  # that a call waits for the publisher to hear what came of a version
NO_TRAINER = (
    "no trainer has joined this server yet, so there is nothing to load: call "
    "init_weight_transfer_engine first"
)


class Loader(Protocol):
    """What loads versions into a model."""

    def rehearse(self, tensors: Mapping[str, Signature]) -> str:
        """Say why a model of these tensors cannot be loaded; nothing if it can. Changes nothing."""
        ...

    def make_ready(self, staged: Staged) -> None:
        """Do what can be done before the model stands still for a version. Changes nothing."""
        ...

    def load(self, pairs: Pairs) -> None:
        """Load a version.

        Raises:
            UnchangedError: It cannot be loaded, and nothing was changed.
        """
        ...


@dataclass(frozen=True)
class Join:
    """What a rank is told to join a trainer.

    Attributes:
        address: The trainer's publisher.
        model: The model's id there.
        deployment: The name of the server; its ranks are called `deployment-dpX-rankY`.
        deadline: Seconds that loading a version may take.
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
class Version:
    """Which version an update is of.

    Attributes:
        epoch, version: Its numbers.
        deadline: Seconds to wait until it is here, and then for the publisher's decision.
        cancel: Why it is given up after all, and each older one; empty: it is not.
        load: The server stands still, and the next `finish` is to load it. (A trainer that does not
            send this field means it.)
    """

    epoch: int
    version: int
    deadline: float = 60.0
    cancel: str = ""
    load: bool = True


class _Target(FunctionTarget):
    """A function that can say beforehand what it cannot load."""

    def __init__(self, rank: "Rank") -> None:
        super().__init__(rank.load)
        self._rank = rank

    def fault(self, layout: Layout) -> str:
        return self._rank.fault(layout)


class Rank:
    """A rank, and the session that it is in.

    Args:
        loader: What loads versions into its model.
        last: It is the rank of its server whose answers are taken last.
    """

    def __init__(self, loader: Loader, *, last: bool = True) -> None:
        self._loader, self._last = loader, last
        self._worker: Subscriber | None = None
        self._model = ""
        self._tensors: dict[str, Signature] = {}
        self._cannot = ""  # why nothing of these tensors can be loaded
        self._staged: Staged | None = None
        self._loads = False  # `finish` is to load it
        self._newest = (0, 0)  # the version that this trainer has spoken of last
        self._due: tuple[int, int] | None = None  # what this session is for, until it is loaded
        self._deadline = 0.0

    def join(self, said: Join, suffix: str) -> None:
        """Join a trainer, and leave the one before.

        Args:
            said: Which trainer, and what it will publish.
            suffix: What tells this rank from the others of the deployment.

        Raises:
            WeightBusError: There cannot be such a worker.
            ValueError: Its name or address is none.
        """
        self.leave()
        self._model, self._newest = said.model, (0, 0)
        self._tensors = {n: (dtype, tuple(shape)) for n, (dtype, shape) in said.tensors.items()}
        self._cannot = self._loader.rehearse(self._tensors) if self._tensors else ""
        self._worker = Subscriber(
            said.address,
            {said.model: _Target(self)},
            name=f"{said.deployment}-{suffix}",
            settings=Settings(apply_timeout=said.deadline),
        )
        if self._cannot:
            log.error("%s cannot load %s: %s", self._worker.name, said.model, self._cannot)

    def start(self) -> None:
        """Begin a session. Nothing is touched: what it is for is said by `update`."""

    def update(self, said: Version) -> None:
        """Hold a version, and say whether it is to be loaded; or give it up.

        Raises:
            RuntimeError: No trainer has joined, and this is the last rank.
            WeightBusError, TimeoutError: The version is not here, and the bus does not tell.
        """
        key = said.epoch, said.version
        if self._worker is None:
            log.error(NO_TRAINER)
            if self._last:
                raise RuntimeError(NO_TRAINER)
            return
        if said.cancel:
            self._give_up(key, said.cancel)
            return
        if key < self._newest:
            self._due = self._due or key
            log.warning(
                "%s: a call for version %d came late and changes nothing: version %d is the newest",
                *(self._worker.name, said.version, self._newest[1]),
            )
            return
        self._newest = self._due = key
        if self._runs(self._worker) == key:
            self._due = None
            return
        if self._staged is None or (self._staged.epoch, self._staged.version) != key:
            self._release()
            self._staged = self._hold(self._worker, key, said.deadline)
        if self._staged is not None:
            self._loads, self._deadline = said.load, said.deadline

    def finish(self) -> None:
        """Load the version, and acknowledge it; nothing if it is not to be loaded.

        Raises:
            RuntimeError: This is the last rank, and what the session is for is not loaded: no
                version may be claimed then. Once it has said so, it is silent.
        """
        staged, due, why = self._staged, self._due, ""
        if self._worker is None:
            why = NO_TRAINER
        elif staged is not None and self._loads:
            try:
                if staged.apply(self._deadline) is None:
                    why = f"{staged}: its publisher has not decided within {self._deadline:g} s"
            except WeightBusError as error:  # the bus tells it, too
                why = str(error)
            finally:
                self._release()
        elif due is not None:
            why = f"version {due[1]} of epoch {due[0]} is not loaded: no call has asked for that"
        self._due = None
        if why:
            log.error("%s", why)
            if self._last:
                raise RuntimeError(why)

    def leave(self) -> None:
        """Leave the bus; the model stays as it is."""
        self._release()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # What the subscriber asks.

    def fault(self, layout: Layout) -> str:
        """Say why a version of this layout cannot be loaded."""
        if self._cannot or not self._tensors:
            return self._cannot
        lines = difference(layout.signatures, self._tensors, remedies=False)
        return "\n".join(trimmed(lines))

    def load(self, pairs: Pairs) -> None:
        """Load a version; it is acknowledged when this returns."""
        self._loader.load(pairs)

    def _runs(self, worker: Subscriber) -> tuple[int, int] | None:
        """Return the version that runs, if this trainer has published it."""
        update = worker.update(self._model)
        return None if update is None else (update.epoch, update.version)

    def _hold(self, worker: Subscriber, key: tuple[int, int], seconds: float) -> Staged | None:
        """Wait until a version is here, and make ready; None: the bus tells why it is not."""
        try:
            staged = worker.stage(seconds, version=key, model=self._model)
        except ApplyError as error:
            log.error("%s: %s", worker.name, error)  # noqa: TRY400 - its cause is in it
            worker.flush(HEARD_SECONDS)
            if error.code == "gone":
                raise
            return None
        self._loader.make_ready(staged)
        return staged

    def _give_up(self, key: tuple[int, int], why: str) -> None:
        """Let go of a version and of older ones; the publisher has heard of this rank then."""
        if self._staged is not None and (self._staged.epoch, self._staged.version) <= key:
            log.warning("%s is given up: %s", self._staged, why)
            self._release()
        if self._due is not None and self._due <= key:
            self._due = None
        if self._worker is not None:
            self._worker.flush(HEARD_SECONDS)

    def _release(self) -> None:
        self._loads = False
        if self._staged is not None:
            self._staged.release()
            self._staged = None
