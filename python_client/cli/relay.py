"""`weightbus relay`: receives models' versions from a publisher, and serves them to workers."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...bus.errors import AddressError, RefusedError
from ...bus.net import endpoints
from ...bus.publisher.status import HeldVersion
from ..checks import check_name
from ..observing.relay_status import RelayStatus
from ..relay import Relay
from .outcome import DONE, Stopped, UsageError
from .publish import PageOptions, logged, show_event, show_pages
from .screen import DIM, Screen, counted, metadata_text, size

POLL_SECONDS = 0.2  # seconds between two checks of the relay


@dataclass(frozen=True)
class RelayOptions:
    """The options of the command `relay`; see its help text.

    Attributes:
        upstream: The addresses of the publisher or relay above, separated by commas.
    """

    upstream: str
    bind: str
    models: Sequence[str]
    name: str | None
    keys: Path | None
    insecure: bool
    pages: PageOptions

    @property
    def addresses(self) -> list[str]:
        """The addresses in `upstream`, as a list."""
        return re.split(r",(?=\w+://)", self.upstream)

    def check(self) -> None:
        """Reject options that can never work.

        Raises:
            UsageError: An option is invalid; the message says what to write instead.
        """
        try:
            for model in self.models:
                check_name(model, "model")
            if self.name is not None:
                check_name(self.name, "relay")
            endpoints.check_all(self.addresses)
            endpoints.check(self.bind)
        except (ValueError, AddressError) as error:
            raise UsageError(str(error)) from None

    def open(self) -> Relay:
        """Return a new relay, which listens at `bind`.

        Raises:
            UsageError: An address of a page is invalid.
            AddressError: The relay cannot listen.
            KeysError: The keys cannot be read.
        """
        given = self.addresses, self.bind, self.models
        make = partial(Relay, *given, name=self.name, keys=self.keys, insecure=self.insecure)
        return self.pages.opened(make, "relay", self.bind)


def relay(screen: Screen, options: RelayOptions) -> int:
    """Pass versions on until stopped; return the exit code."""
    options.check()
    passed = 0
    try:
        with logged(screen), options.open() as opened:
            screen.say(
                f"{', '.join(options.models)} of {opened.upstream} at {opened.address}", "bold"
            )
            show_pages(screen, opened.shown)
            screen.emit(
                "listening",
                name=opened.name,
                models=list(options.models),
                upstream=opened.upstream,
                address=opened.address,
                data_address=opened.data_address,
                dashboard=opened.shown.dashboard,
                metrics=opened.shown.metrics,
            )
            opened.on_worker(lambda event: show_event(screen, event))
            display = _Display(screen, opened)
            while True:
                for version in display.update():
                    passed += 1  # counted before it is shown, since a signal may interrupt that
                    display.show(*version)
                time.sleep(POLL_SECONDS)
    except Stopped as stopped:
        screen.say(f"stopped by {stopped.signal.name} after {counted(passed, 'version')}", DIM)
        screen.emit("stopped", signal=stopped.signal.name, passed=passed)
        return DONE


class _Display:
    """Shows the changes of a relay at each `update`."""

    def __init__(self, screen: Screen, watched: Relay) -> None:
        self._screen, self._relay = screen, watched
        self._joined = self._was_joined = False
        self._warned = ""
        self._shown: dict[str, tuple[int, int]] = {}

    def update(self) -> list[tuple[str, HeldVersion]]:
        """Show changes of the session; return the versions that are whole since the last call.

        Raises:
            RefusedError: The publisher refuses the relay, and has never accepted it.
            ClosedError: A thread of the relay has failed.
        """
        try:
            self._relay.wait_joined(0)
        except (RefusedError, AddressError) as error:
            # A relay that has joined before serves the versions that it has, and keeps trying.
            if isinstance(error, RefusedError) and not self._was_joined:
                raise
            if str(error) != self._warned:
                self._screen.warn(str(error))
            self._warned = str(error)
        status = self._relay.status()
        if status.joined != self._joined:
            self._show_session(status)
        return self._newly_whole(status)

    def _newly_whole(self, status: RelayStatus) -> list[tuple[str, HeldVersion]]:
        found = list[tuple[str, HeldVersion]]()
        for model, held in status.versions.items():
            for version in held:
                key = version.epoch, version.version
                if version.whole and key > self._shown.get(model, (0, 0)):
                    self._shown[model] = key
                    found.append((model, version))
        return found

    def _show_session(self, status: RelayStatus) -> None:
        self._joined = status.joined
        self._was_joined = self._was_joined or status.joined
        if status.joined:
            self._warned = ""
            when = time.strftime("%H:%M:%S")
            self._screen.note(f"{when}  joined {status.upstream}, epoch {status.epoch}")
        self._screen.emit(
            "upstream", joined=status.joined, address=status.upstream, epoch=status.epoch
        )

    def show(self, model: str, version: HeldVersion) -> None:
        """Show a version that is whole."""
        self._screen.say(
            f"{time.strftime('%H:%M:%S')}  {model} version {version.version}  "
            f"{size(version.nbytes)}"
            + (f"  {metadata_text(version.metadata)}" if version.metadata else "")
        )
        self._screen.emit(
            "version",
            model=model,
            epoch=version.epoch,
            version=version.version,
            nbytes=version.nbytes,
            digest=version.digest,
            metadata=dict(version.metadata),
        )
