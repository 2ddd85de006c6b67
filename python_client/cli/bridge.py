"""`weightbus bridge`: makes inference servers load the versions of a model from a folder."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...codecs.errors import WeightBusError
from ..serving.calls import Server
from ..serving.engines import ENGINES, Engine, EngineSettings
from ..serving.served_target import ServedTarget
from .outcome import UsageError
from .screen import DIM, Screen
from .subscribe import POLL_SECONDS, SubscribeOptions, follow


class AbsentError(WeightBusError, TimeoutError):
    """Some servers did not answer in time when the command started."""


@dataclass(frozen=True)
class BridgeOptions:
    """The options for servers on the command line.

    Attributes:
        urls, kind, token: The servers' URLs, their kind, and their API key (None: no key).
        folder: The folder that versions are written to.
        server_path: The path of the folder on the servers; None: the same path.
        like: A checkpoint folder, or None. Versions must have the tensor names of the checkpoint,
            and its other files are copied.
        adapter: The adapter's name on the servers; None: versions are whole models.
        pause: The pause mode, for running requests; None: the default of the kind.
        seconds: The time limit for a server to answer at the start, and to load a version.
        unchecked: Whether versions are loaded even if nothing shows that they fit the server.
    """

    urls: Sequence[str]
    kind: str
    folder: Path
    server_path: str | None
    like: Path | None
    adapter: str | None
    pause: str | None
    seconds: float
    token: str | None = field(repr=False)
    unchecked: bool

    @property
    def settings(self) -> EngineSettings:
        """The settings for all servers."""
        path = self.server_path
        path = str(self.folder.absolute()) if path is None else path.rstrip("/")
        return EngineSettings(self.pause, self.seconds, self.folder, path)

    def engines(self, undo: ExitStack) -> list[Engine]:
        """Return an engine for each server; closing `undo` closes the connections.

        Raises:
            UsageError: An option is invalid.
        """
        kind = ENGINES.get(self.kind)
        if kind is None:
            raise UsageError(f"--kind {self.kind}: give {' or '.join(ENGINES)}")
        if self.pause is not None and self.pause not in kind.pauses:
            modes = ", ".join(kind.pauses)
            raise UsageError(f"--pause {self.pause}: a {self.kind} server has {modes}")
        if len(set(self.urls)) < len(self.urls):
            raise UsageError("--server: give each server once")
        try:
            servers = [Server(url, self.token or "") for url in self.urls]
        except ValueError as error:
            raise UsageError(f"--server: {error}") from None
        except ModuleNotFoundError as error:
            raise WeightBusError(str(error)) from None
        for server in servers:
            undo.callback(server.close)
        return [kind(server, self.settings) for server in servers]

    def target(self, engines: Sequence[Engine]) -> ServedTarget:
        """Return the target that makes the servers (`engines`) load each version.

        Raises:
            UsageError: The folder or `like` cannot be used, or the adapter's name is empty.
        """
        if self.adapter == "":
            raise UsageError("--lora: give the name of the adapter in requests")
        adapter = self.adapter or ""
        try:
            options: dict[str, Any] = {"like": self.like, "unchecked": self.unchecked}
            return ServedTarget(engines, self.settings, adapter=adapter, **options)
        except OSError as error:
            raise UsageError(f"--folder {self.folder}, --like {self.like}: {error}") from None
        except WeightBusError as error:
            raise UsageError(f"--like: {error}") from None


def bridge(screen: Screen, wanted: SubscribeOptions, served: BridgeOptions) -> int:
    """Load one version on the servers, or every version until stopped; return the exit code."""
    wanted.check()
    with ExitStack() as undo:
        engines = served.engines(undo)
        target = served.target(engines)
        undo.callback(target.close)
        _wait_for_servers(screen, served, target)
        outcome = f"loaded by {', '.join(served.urls)}"
        fields = {"servers": list(served.urls), "path": str(served.folder)}
        return follow(screen, wanted, target, outcome, _ServerCheck(screen, target), **fields)


def _wait_for_servers(screen: Screen, served: BridgeOptions, target: ServedTarget) -> None:
    """Wait until all servers answer, and resume those that an earlier bridge left paused.

    Raises:
        AbsentError: Some servers do not answer in time.
    """
    end = time.monotonic() + served.seconds
    with screen.waiting(f"waiting for {', '.join(served.urls)}"):
        while missing := target.check_servers():
            if time.monotonic() > end:
                raise AbsentError(f"{missing}; within {served.seconds:g} s (--load-timeout)")
            time.sleep(POLL_SECONDS)
    screen.say(f"{', '.join(served.urls)}: {served.kind} answers", DIM)


class _ServerCheck:
    """Checks the servers each time it is called, and warns of each new problem."""

    def __init__(self, screen: Screen, target: ServedTarget) -> None:
        self._screen, self._target = screen, target
        self._last: list[str] = []

    def __call__(self) -> None:
        found = self._target.sync()
        if found is None:
            return
        for text in found:
            if text not in self._last:
                self._screen.warn(text)
        self._last = found
