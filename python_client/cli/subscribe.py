"""`weightbus subscribe`: the versions of a model, into a safetensors file."""

import time
from dataclasses import dataclass
from pathlib import Path

from ...bus.errors import AddressError, ApplyError
from ...bus.net import endpoints
from ...bus.units import span
from ...codecs.errors import WeightBusError
from ..applying import Update
from ..checks import check_name
from ..file_target import FileTarget
from ..subscriber import Subscriber
from .outcome import DONE, Stopped, UsageError
from .screen import DIM, Screen, counted, said_of, size

LOOK_SECONDS = 0.2  # between two looks at whether the publisher is there
ONCE_SECONDS = 300.0  # what --once waits for a version unless told otherwise


class NothingCameError(WeightBusError, TimeoutError):
    """No version came in time."""


@dataclass(frozen=True)
class SubscribeOptions:
    """What the command line asks for."""

    address: str
    model: str
    out: Path
    once: bool
    timeout: float | None
    name: str | None
    keys: Path | None = None
    untied: bool = False

    def target(self) -> FileTarget:
        """Return where versions go, or refuse what can never work.

        Raises:
            UsageError: It says what, and what to write instead.
        """
        try:
            check_name(self.model, "model")
            if self.name is not None:
                check_name(self.name, "worker")
            endpoints.check(self.address)
        except (ValueError, AddressError) as error:
            raise UsageError(str(error)) from None
        try:
            return FileTarget(self.out, untied=self.untied)
        except OSError as error:
            raise UsageError(f"--out: {error}") from None

    @property
    def patience(self) -> float | None:
        """Seconds to wait for a version; None: until stopped."""
        return ONCE_SECONDS if self.once and self.timeout is None else self.timeout


def subscribe(screen: Screen, request: SubscribeOptions) -> int:
    """Write one version, or every version until stopped."""
    targets = {request.model: request.target()}
    with Subscriber(request.address, targets, name=request.name, keys=request.keys) as subscriber:
        screen.say(f"{subscriber.name} for {request.model} of {request.address}", DIM)
        if request.once:
            _show(screen, request, _receive(screen, request, subscriber))
        else:
            _receive_all(screen, request, subscriber)
    return DONE


def _receive_all(screen: Screen, request: SubscribeOptions, subscriber: Subscriber) -> None:
    written = 0
    try:
        while True:
            try:
                update = _receive(screen, request, subscriber)
            except ApplyError as error:  # the file is as it was; the next version may fit
                screen.error(str(error))
                continue
            written += 1  # before it is told: a signal may come right after
            _show(screen, request, update)
    except Stopped as stopped:
        screen.say(f"stopped by {stopped.signal.name} after {counted(written, 'version')}", DIM)
        screen.emit("stopped", signal=stopped.signal.name, written=written)


def _receive(screen: Screen, request: SubscribeOptions, subscriber: Subscriber) -> Update:
    """Wait for a version and write it.

    Raises:
        NothingCameError: None came in time.
        ApplyError: It could not be written.
        RefusedError: The publisher refuses this worker.
    """
    patience = request.patience
    deadline = None if patience is None else time.monotonic() + patience
    with screen.waiting("") as waiting:
        unknown = ""
        while deadline is None or time.monotonic() < deadline:
            try:
                there = subscriber.wait_joined(0)
                what = f"a version of {request.model}" if there else "a publisher"
                waiting.say(f"waiting for {what} at {request.address}")
                update = subscriber.receive(LOOK_SECONDS)
            except AddressError as error:  # its host may come yet
                if not unknown:
                    unknown = str(error)
                    screen.warn(unknown)
                time.sleep(LOOK_SECONDS)
                continue
            if update is not None:
                return update
    try:
        there = subscriber.wait_joined(0)
    except AddressError as error:
        raise NothingCameError(str(error)) from None
    if there:
        text = f"no version of {request.model!r} came from {request.address}"
    else:
        text = f"no publisher answered at {request.address}"
    raise NothingCameError(
        f"{text} within {request.patience:g} s; check that it is being published there, and allow "
        "more time with --timeout if it is"
    )


def _show(screen: Screen, request: SubscribeOptions, update: Update) -> None:
    screen.say(
        f"{time.strftime('%H:%M:%S')}  {update.model} version {update.version}  "
        f"{size(update.nbytes)}  written in {span(update.seconds)} to {request.out}"
        + (f"  {said_of(update.metadata)}" if update.metadata else "")
    )
    screen.emit(
        "update",
        achieved=True,
        model=update.model,
        epoch=update.epoch,
        version=update.version,
        nbytes=update.nbytes,
        digest=update.digest,
        metadata=dict(update.metadata),
        seconds=round(update.seconds, 6),
        path=str(request.out),
    )
