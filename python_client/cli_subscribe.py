"""`weightbus subscribe`: the versions of a model, into a safetensors file."""

import time
from dataclasses import dataclass
from pathlib import Path

from ..bus import endpoints
from ..bus.errors import AddressError, ApplyError
from ..bus.messages import check_name
from .cli_outcome import DONE, NOT_ACHIEVED, Stopped, UsageError
from .cli_screen import DIM, Screen, Waiting, counted, size
from .subscriber import Subscriber, Update

LOOK_SECONDS = 0.2  # between two looks at whether the publisher is there
ONCE_SECONDS = 300.0  # what --once waits for a version unless told otherwise


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    address: str
    model: str
    out: Path
    once: bool
    timeout: float | None
    name: str | None

    def check(self) -> None:
        """Refuse what can never work.

        Raises:
            UsageError: It says what, and what to write instead.
        """
        if self.out.is_dir():
            raise UsageError(f"{self.out} is a folder; give the file to write")
        if not self.out.parent.is_dir():
            raise UsageError(f"{self.out}: there is no folder {self.out.parent}; make it first")
        try:
            check_name(self.model, "model")
            if self.name is not None:
                check_name(self.name, "worker")
            endpoints.check(self.address)
        except (ValueError, AddressError) as error:
            raise UsageError(str(error)) from None

    @property
    def patience(self) -> float | None:
        """Seconds to wait for a version; None: until stopped."""
        return ONCE_SECONDS if self.once and self.timeout is None else self.timeout


def subscribe(screen: Screen, request: Request) -> int:
    """Write one version, or every version until stopped."""
    request.check()
    targets = {request.model: request.out}
    with Subscriber(request.address, targets, name=request.name) as subscriber:
        screen.say(f"{subscriber.name} for {request.model} of {request.address}", DIM)
        if request.once:
            return _receive(screen, request, subscriber)
        return _receive_all(screen, request, subscriber)


def _receive_all(screen: Screen, request: Request, subscriber: Subscriber) -> int:
    written = 0
    try:
        while True:
            try:
                code = _receive(screen, request, subscriber)
            except ApplyError as error:  # the file is as it was; the next version may fit
                screen.error(str(error))
                continue
            if code != DONE:
                return code
            written += 1
    except Stopped as stopped:
        screen.say(f"stopped by {stopped.signal.name} after {counted(written, 'version')}", DIM)
        screen.emit("stopped", signal=stopped.signal.name, written=written)
        return DONE


def _receive(screen: Screen, request: Request, subscriber: Subscriber) -> int:
    """Wait for a version and show it; NOT_ACHIEVED if none comes in time."""
    with screen.waiting("") as waiting:
        update = _wait(waiting, request, subscriber)
    if update is not None:
        _show(screen, request, update)
        return DONE
    if subscriber.wait_joined(0):
        text = f"the publisher at {request.address} published no version of {request.model!r}"
    else:
        text = f"no publisher answered at {request.address}"
    text += f" within {request.patience:g} s; check that weightbus publish runs there for it"
    screen.error(text)
    screen.emit("error", achieved=False, error="Timeout", text=text)
    return NOT_ACHIEVED


def _wait(waiting: Waiting, request: Request, subscriber: Subscriber) -> Update | None:
    patience = request.patience
    deadline = None if patience is None else time.monotonic() + patience
    update = None
    while update is None:
        left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return None
        there = subscriber.wait_joined(0)
        waiting.say(
            f"waiting for a version of {request.model}"
            if there
            else f"waiting for a publisher at {request.address}"
        )
        update = subscriber.receive(min(LOOK_SECONDS, left))
    return update


def _show(screen: Screen, request: Request, update: Update) -> None:
    screen.say(
        f"{time.strftime('%H:%M:%S')}  {update.model} version {update.version}  "
        f"{size(update.nbytes)}  written in {update.seconds:.2f} s to {request.out}"
    )
    screen.emit(
        "update",
        achieved=True,
        model=update.model,
        epoch=update.epoch,
        version=update.version,
        nbytes=update.nbytes,
        digest=update.digest,
        seconds=round(update.seconds, 6),
        path=str(request.out),
    )
