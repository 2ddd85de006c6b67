"""`weightbus subscribe`: writes the versions of a model to a safetensors file."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...bus.errors import AddressError, ApplyError
from ...bus.net import endpoints
from ...bus.units import span
from ...codecs.errors import WeightBusError
from ..applying.applier import Update
from ..applying.target import Target
from ..checks import check_name
from ..files.file_target import FileTarget
from ..subscriber import Subscriber
from .outcome import DONE, Stopped, UsageError
from .screen import DIM, Screen, counted, metadata_text, size

POLL_SECONDS = 0.2  # seconds between two checks of the connection
ONCE_SECONDS = 300.0  # seconds that --once waits for a version by default


class NothingCameError(WeightBusError, TimeoutError):
    """No version arrived in time."""


@dataclass(frozen=True)
class SubscribeOptions:
    """The options of the commands that receive versions."""

    addresses: tuple[str, ...]
    model: str
    once: bool
    timeout: float | None
    name: str | None
    keys: Path | tuple[Path, ...] | None

    @classmethod
    def of(
        cls,
        addresses: str,
        model: str,
        once: bool,
        timeout: float | None,
        name: str | None,
        keys: Path | None,
    ) -> "SubscribeOptions":
        """Return the options; `addresses` and `keys` may be several, separated by commas."""
        each = tuple(re.split(r",(?=\w+://)", addresses))
        files = keys if keys is None or len(each) == 1 else _files(str(keys))
        return cls(each, model, once, timeout, name, files)

    def check(self) -> None:
        """Reject options that can never work.

        Raises:
            UsageError: An option is invalid; the message says what to write instead.
        """
        try:
            check_name(self.model, "model")
            if self.name is not None:
                check_name(self.name, "worker")
            endpoints.check_all(self.addresses)
        except (ValueError, AddressError) as error:
            raise UsageError(str(error)) from None

    @property
    def address(self) -> str:
        """The addresses as one text, separated by commas."""
        return ",".join(self.addresses)

    @property
    def patience(self) -> float | None:
        """Seconds to wait for a version; None: no limit."""
        return ONCE_SECONDS if self.once and self.timeout is None else self.timeout


def _files(keys: str) -> Path | tuple[Path, ...]:
    return tuple(map(Path, keys.split(","))) if "," in keys else Path(keys)


def subscribe(screen: Screen, wanted: SubscribeOptions, out: Path, *, untied: bool) -> int:
    """Write one version to `out`, or every version until stopped; return the exit code."""
    wanted.check()
    try:
        target = FileTarget(out, untied=untied)
    except OSError as error:
        raise UsageError(f"--out: {error}") from None
    return follow(screen, wanted, target, f"written to {out}", path=str(out))


def follow(
    screen: Screen,
    wanted: SubscribeOptions,
    target: Target,
    outcome: str,
    check: Callable[[], object] = bool,
    **fields: object,
) -> int:
    """Apply one version, or every version until stopped; return the exit code.

    For each version, show the text `outcome` and emit the JSON `fields`. While no version arrives,
    call `check` repeatedly.
    """
    targets = {wanted.model: target}
    with Subscriber(wanted.addresses, targets, name=wanted.name, keys=wanted.keys) as subscriber:
        screen.say(f"{subscriber.name} for {wanted.model} of {wanted.address}", DIM)
        receive = partial(_receive, screen, wanted, subscriber, check)
        show = partial(_show, screen, outcome, fields)
        if wanted.once:
            show(receive())
        else:
            _receive_all(screen, receive, show)
    return DONE


def _receive_all(
    screen: Screen, receive: Callable[[], Update], show: Callable[[Update], None]
) -> None:
    # Apply every version until stopped, and show it.
    written = 0
    try:
        while True:
            try:
                update = receive()
            except ApplyError as error:  # the target is unchanged, and the next version may fit
                screen.error(str(error))
                continue
            written += 1  # counted before `show`, since a signal may interrupt that
            show(update)
    except Stopped as stopped:
        screen.say(f"stopped by {stopped.signal.name} after {counted(written, 'version')}", DIM)
        screen.emit("stopped", signal=stopped.signal.name, written=written)


def _receive(
    screen: Screen, wanted: SubscribeOptions, subscriber: Subscriber, check: Callable[[], object]
) -> Update:
    """Wait for a version and apply it; return what was applied.

    Raises:
        NothingCameError: No version arrived in time.
        ApplyError: The version could not be applied.
        RefusedError: The publisher refuses this worker.
    """
    patience = wanted.patience
    deadline = None if patience is None else time.monotonic() + patience
    with screen.waiting("") as waiting:
        unknown = ""
        while deadline is None or time.monotonic() < deadline:
            try:
                joined = subscriber.wait_joined(0)
                what = f"a version of {wanted.model}" if joined else "a publisher"
                waiting.say(f"waiting for {what} at {wanted.address}")
                update = subscriber.receive(POLL_SECONDS)
            except AddressError as error:  # the host's name may become resolvable later
                if not unknown:
                    unknown = str(error)
                    screen.warn(unknown)
                time.sleep(POLL_SECONDS)
                continue
            if update is not None:
                return update
            check()
    try:
        joined = subscriber.wait_joined(0)
    except AddressError as error:
        raise NothingCameError(str(error)) from None
    if joined:
        text = f"no version of {wanted.model!r} came from {wanted.address}"
    else:
        text = f"no publisher answered at {wanted.address}"
    raise NothingCameError(
        f"{text} within {wanted.patience:g} s; check that it is being published there, and allow "
        "more time with --timeout if it is"
    )


def _show(screen: Screen, outcome: str, fields: Mapping[str, object], update: Update) -> None:
    # Show an applied version.
    screen.say(
        f"{time.strftime('%H:%M:%S')}  {update.model} version {update.version}  "
        f"{size(update.nbytes)}  {outcome} in {span(update.seconds)}"
        + (f"  {metadata_text(update.metadata)}" if update.metadata else "")
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
        **fields,
    )
