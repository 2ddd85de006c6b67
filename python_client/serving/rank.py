"""One rank of a served model: it stages what a trainer publishes, and loads it when told to.

Commands come by the server's calls, results go over the bus. So no phase of a session raises: vLLM
keeps a session flag in each rank, and the answers of its ranks in order, and both come apart when
one rank raises and another does not. What a rank cannot do it tells the publisher, which tells the
trainer; the others are then told to give the version up, before anybody has loaded it.

join      joins the bus, and tries on the model whether what will be published can be loaded at all
          (what cannot is refused as soon as it is announced, and so no rank stages it)
start     nothing
update    waits until the version is here, verified, and makes ready; or gives it up
finish    loads it, and acknowledges it
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...bus.errors import ApplyError
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout, Signature, difference, trimmed
from ..applying import Staged
from ..loading import FunctionTarget, Pairs, UnchangedError
from ..settings import Settings
from ..subscriber import Subscriber

log = logging.getLogger("weightbus.serving")

DECLINE_SECONDS = 1.0  # for what is waited for before a call that is to give up is answered


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
        cancel: Why it is given up after all; empty: it is not.
    """

    epoch: int
    version: int
    deadline: float = 60.0
    cancel: str = ""


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
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._worker: Subscriber | None = None
        self._model = ""
        self._tensors: dict[str, Signature] = {}
        self._cannot = ""  # why nothing of these tensors can be loaded
        self._declined = ""  # why the staged version is not to be loaded
        self._staged: Staged | None = None
        self._deadline = 0.0

    def join(self, said: Join, suffix: str) -> None:
        """Join a trainer, and leave the one before.

        Raises:
            WeightBusError: There cannot be such a worker.
            ValueError: Its name or address is none.
        """
        self.leave()
        self._model = said.model
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
        """Begin a session: nothing is touched, and what a session before has left is let go."""
        self._release()

    def update(self, said: Version) -> None:
        """Wait until a version is here; or give it up.

        Raises:
            TimeoutError: It is not here, and so nothing can be said of it over the bus.
        """
        self._release()
        if self._worker is None:
            log.error("no trainer has joined this server yet: init_weight_transfer_engine first")
            return
        self._deadline = said.deadline
        seconds, key = DECLINE_SECONDS if said.cancel else said.deadline, (said.epoch, said.version)
        try:
            self._staged = self._worker.stage(seconds, version=key, model=self._model)
        except (WeightBusError, RuntimeError) as error:
            log.error("%s: %s", self._worker.name, error)  # noqa: TRY400 - its cause is in it
            self._be_heard()
            return
        if said.cancel:
            self._decline(self._staged, f"given up: {said.cancel}")
        else:
            self._loader.make_ready(self._staged)

    def finish(self) -> None:
        """Load the version, and acknowledge it; nothing if it is not here, or was given up."""
        staged = self._staged
        if staged is None:
            return
        try:
            if staged.apply(self._deadline) is None:
                log.error("%s: its publisher has not decided within %g s", staged, self._deadline)
        except WeightBusError as error:  # it was told over the bus
            log.error("%s", error)  # noqa: TRY400 - its cause is in it
        finally:
            self._release()

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
        return "\n".join(trimmed(difference(layout.signatures, self._tensors)))

    def load(self, pairs: Pairs) -> None:
        """Load a version; it is acknowledged when this returns."""
        if self._declined:
            raise UnchangedError(self._declined)
        self._loader.load(pairs)

    def _decline(self, staged: Staged, why: str) -> None:
        """Tell the publisher that a version will not be loaded."""
        self._declined = why
        try:
            staged.apply(DECLINE_SECONDS)
        except ApplyError as error:
            log.warning("%s", error)
        finally:
            self._release()
        self._be_heard()

    def _be_heard(self) -> None:
        """Have the trainer hear on the bus what went wrong, before our call is answered."""
        if self._worker is not None:
            self._worker.flush(DECLINE_SECONDS)

    def _release(self) -> None:
        self._declined = ""
        if self._staged is not None:
            self._staged.release()
            self._staged = None
