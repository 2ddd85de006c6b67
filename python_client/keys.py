"""Keys as users give them: what `keys=` and the environment mean, and where keys must be."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ..bus.effects import Notice
from ..bus.errors import AddressError, KeysError
from ..bus.limits import Timing
from ..bus.memory.snapshots import SealedMemory
from ..bus.net import endpoints
from ..bus.net.descriptors import RAISE
from ..bus.net.publisher_loop import PublisherLoop
from ..bus.publisher.effects import DropRevoked, Effect
from ..bus.publisher.machine import PublisherMachine
from ..bus.publisher.roster import Peer
from ..bus.sealer import Sealer
from ..bus.spare import Spare
from ..bus.trust import curve
from ..bus.trust.grants import Grant
from ..bus.trust.keys import Allowed, PublisherKeys, ScarceError, WorkerKeys
from ..codecs.sealing import KEY_BYTES
from .models import PublishedModel

log = logging.getLogger("weightbus.publisher")

KEYS = "WEIGHTBUS_KEYS"  # of the environment, where no keys are given: a path, or empty
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.02, 1.0  # between two looks at the folder of keys
ALARM_SECONDS = 60.0  # between two alarms while the folder cannot be read


def publisher_keys(given: PublisherKeys | str | Path | None) -> PublisherKeys | None:
    """Return a publisher's keys; None: it has none.

    Raises:
        KeysError: They cannot be read.
    """
    if isinstance(given, PublisherKeys):
        return given
    path = _path(given)
    return PublisherKeys.read(path) if path else None


def worker_keys(given: WorkerKeys | str | Path | None, name: str | None) -> WorkerKeys | None:
    """Return the keys of a worker, of this name if it has one; None: it has none.

    Raises:
        KeysError: They cannot be read.
    """
    if isinstance(given, WorkerKeys):
        return given
    path = _path(given)
    return WorkerKeys.read(path, name) if path else None


def _path(given: object) -> str:
    if given is None:
        return os.environ.get(KEYS, "")
    if not isinstance(given, str | Path):
        what = type(given).__name__  # and no more: it may hold a secret
        raise KeysError(f"keys= is a {what}: give a path, or keys that were read")
    return str(given)


def handed_out(
    bind: str, *, keyed: bool | None, insecure: bool
) -> tuple[PublisherKeys | None, WorkerKeys | None]:
    """Draw keys of a publisher, and of workers that are told theirs by whoever starts them.

    Args:
        bind: Where the publisher will listen.
        keyed: Whether there are to be any; None: if other hosts can reach that address, and the
            environment names none.
        insecure: Whether they may reach it without.

    Raises:
        AddressError: The address makes no sense.
    """
    exposed = not (endpoints.is_local(bind) or insecure or os.environ.get(KEYS))
    if not (exposed if keyed is None else keyed):
        return None, None
    (public, secret), (theirs, handed) = curve.keypair(), curve.keypair()
    return PublisherKeys(secret, {theirs: Grant("*")}), WorkerKeys("*", theirs, handed, public)


def new_sealer(rekey: float) -> Sealer:
    """Return what seals all that a publisher publishes, with another group key every so often.

    Raises:
        SealError: Nothing can be sealed here.
    """
    draw = partial(secrets.token_bytes, KEY_BYTES)
    return Sealer(draw, SealedMemory().take, rekey, time.monotonic())


def check_exposure(keys: PublisherKeys | None, insecure: bool, *addresses: str | None) -> None:
    """Check that nobody on a network is let in by mistake.

    Raises:
        AddressError: An address can be reached from other hosts, and there are no keys.
    """
    exposed = [a for a in addresses if a is not None and not endpoints.is_local(a)]
    if exposed and keys is None and not insecure:
        raise AddressError(
            f"{exposed[0]} can be reached from other hosts, and whoever reaches it would get the "
            "weights: give keys= (--keys; make them with weightbus keygen), or say insecure=True "
            "(--insecure) on a network whose every member you trust; 127.0.0.1 needs neither"
        )


def group_keys(sealer: Sealer | None) -> Callable[[Peer], list[str]] | None:
    """Return what says which group keys a worker gets: whoever joins has a key that may have it."""
    return None if sealer is None else lambda _peer: sealer.keys


def watch_keys(
    keys: PublisherKeys, timing: Timing, loop: PublisherLoop, revoked: Callable[[], None]
) -> None:
    """Look at a publisher's folder of keys in a thread of its own: a disk may take its time.

    A change counts within one ping interval. The thread ends with the publisher's. `revoked` is
    called there once what a key may do was taken away. Without a folder nothing ever changes.
    """
    errors = _FolderErrors()
    allowed = keys.allowed(errors.add)
    if allowed is not None:
        every = min(max(timing.ping / 2, LOOK_SECONDS_MIN), LOOK_SECONDS_MAX)
        watch = _Watch(allowed, errors, loop, revoked)
        target = partial(watch.run, every)
        threading.Thread(target=target, name="weightbus-keys", daemon=True).start()


class _Watch:
    """Looks at the folder again and again.

    A look needs a descriptor, and one is kept for it. If that is not to be had either, a file's
    removal still counts, as it is seen without one.
    """

    def __init__(
        self,
        allowed: Allowed,
        errors: "_FolderErrors",
        loop: PublisherLoop,
        revoked: Callable[[], None],
    ) -> None:
        self._allowed, self._errors, self._loop = allowed, errors, loop
        self._revoked, self._spare = revoked, Spare()
        self._seen: object = None  # it is read anew at first: what was read may be older
        self._granted: Mapping[str, Grant] | None = None
        self._alarm_at = 0.0  # when the next alarm may be; 0: none was since the last good look

    def run(self, every: float) -> None:
        """Look every so many seconds, until the publisher has ended."""
        while not self._loop.over.wait(every):
            try:
                self._look_somehow()
            except Exception as error:  # what was granted stays so until this can be read
                self._alarm(
                    f"{error}. Until it can be, nothing changes: a key whose file is removed stays "
                    "good. Mend the folder, or stop the publisher"
                )
            self._errors.next_look()

    def _look_somehow(self) -> None:
        try:
            try:
                self._look()
            except ScarceError:
                with self._spare.lent():
                    self._look()
        except ScarceError as error:
            left = self._allowed.remaining()
            if left != self._granted:
                self._grant(left)
            self._alarm(
                f"{error}. Until it can be, a removed file revokes its key as ever, but added and "
                f"changed files do not count: {RAISE}"
            )
        else:
            if self._alarm_at:
                log.warning("what keys may do: the folder can be read again")
            self._alarm_at = 0.0

    def _look(self) -> None:
        stamp = self._allowed.stamp()
        if stamp == self._seen:
            return
        self._grant(self._allowed.read())
        self._seen = stamp if self._allowed.whole else None

    def _grant(self, by_key: Mapping[str, Grant]) -> None:
        self._loop.decide(partial(_grant, by_key, self._revoked))
        self._granted = by_key

    def _alarm(self, text: str) -> None:
        now = time.monotonic()
        if now < self._alarm_at:
            return
        self._alarm_at = now + ALARM_SECONDS
        log.error("what keys may do: %s", text)
        notice = Notice("keys", f"what keys may do: {text}", warning=True)
        self._loop.decide(partial(_show, notice))


def _show(notice: Notice, machine: PublisherMachine, now: float) -> list[Effect]:
    machine.observers.happened(notice, now)
    return []


def _grant(
    by_key: Mapping[str, Grant],
    revoked: Callable[[], None],
    machine: PublisherMachine,
    now: float,
) -> list[Effect]:
    effects = machine.grant(by_key, now)
    if any(isinstance(effect, DropRevoked) for effect in effects):
        revoked()
    return effects


def retire(models: Mapping[str, PublishedModel]) -> None:
    """Publish nothing more where somebody may read whose key was revoked."""
    for model in list(models.values()):
        model.pool.retire()


class _FolderErrors:
    """Errors of a key folder: each is logged once for as long as look after look finds it."""

    def __init__(self) -> None:
        self._before, self._now = set[str](), set[str]()

    def add(self, error: Exception) -> None:
        """Log an error, unless the look before found it as well."""
        text = str(error) or type(error).__name__
        if text not in self._before:
            log.warning("what keys may do: %s", text)
        self._now.add(text)

    def next_look(self) -> None:
        """End a look."""
        self._before, self._now = self._now, set[str]()
