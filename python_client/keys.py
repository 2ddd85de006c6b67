"""Reads keys from `keys=` or WEIGHTBUS_KEYS, requires them where needed, watches their folder."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from ..bus.trust.keys import (
    PUBLISHER,
    UPSTREAM,
    Allowed,
    PublisherKeys,
    RelayKeys,
    ScarceError,
    WorkerKeys,
)
from ..codecs.sealing import KEY_BYTES
from .publishing.models import PublishedModel

log = logging.getLogger("weightbus.publisher")

KEYS = "WEIGHTBUS_KEYS"  # the environment variable with the path of the keys
# bounds of the time between two checks of the key folder
CHECK_SECONDS_MIN, CHECK_SECONDS_MAX = 0.02, 1.0
ALARM_SECONDS = 60.0  # seconds between two alarms while the key folder cannot be read


def publisher_keys(given: PublisherKeys | str | Path | None) -> PublisherKeys | None:
    """Return a publisher's keys; None if neither `given` nor the environment names any.

    Raises:
        KeysError: The keys cannot be read.
    """
    if isinstance(given, PublisherKeys):
        return given
    path = _path(given)
    return PublisherKeys.read(path) if path else None


def worker_keys(given: WorkerKeys | str | Path | None, name: str | None) -> WorkerKeys | None:
    """Return a worker's keys; None if neither `given` nor the environment names any.

    If the path is a folder, `name` selects the file.

    Raises:
        KeysError: The keys cannot be read.
    """
    if isinstance(given, WorkerKeys):
        return given
    path = _path(given)
    return WorkerKeys.read(path, name) if path else None


def relay_keys(
    given: RelayKeys | str | Path | None, name: str | None, addresses: Sequence[str]
) -> RelayKeys:
    """Return a relay's keys; an empty `RelayKeys` if neither `given` nor the environment names any.

    If the path is a folder with several relays, `name` selects one.

    Raises:
        KeysError: The keys cannot be read, or they are several, but not one for each address.
    """
    if isinstance(given, RelayKeys):
        keys = given
    else:
        path = _path(given)
        keys = RelayKeys.read(path, name) if path else RelayKeys((), None)
    if len(keys.upstream) not in (0, 1, len(addresses)):
        raise KeysError(
            f"the relay has {len(keys.upstream)} keys for publishers above ({UPSTREAM} and others) "
            f"but {len(addresses)} addresses ({', '.join(addresses)}): give one address for each "
            "key, in the order of --above"
        )
    return keys


def keys_for(
    given: WorkerKeys | str | Path | Sequence[WorkerKeys | str | Path] | None,
    name: str | None,
    addresses: Sequence[str],
) -> WorkerKeys | tuple[WorkerKeys, ...] | None:
    """Return a worker's keys: one for all `addresses`, or a tuple with one for each.

    Raises:
        KeysError: The keys cannot be read, or a list has not one for each address.
    """
    if not isinstance(given, list | tuple):
        return worker_keys(given, name)  # type: ignore[arg-type] # pyright: ignore
    if len(given) != len(addresses):
        raise KeysError(
            f"keys= must be one file, or a list of {len(addresses)}, one for each of the addresses "
            f"{', '.join(addresses)}"
        )
    each = [WorkerKeys.read(one, name) if isinstance(one, str | Path) else one for one in given]
    if not all(isinstance(one, WorkerKeys) for one in each):  # pyright: ignore
        raise KeysError("keys= is a list: give a path, or keys that were read, for each address")
    return tuple(each)


def _path(given: object) -> str:
    if given is None:
        return os.environ.get(KEYS, "")
    if not isinstance(given, str | Path):
        what = type(given).__name__  # not the value, which may be a secret
        raise KeysError(f"keys= is a {what}: give a path, or keys that were read")
    return str(given)


def generate_keys(
    bind: str, *, keyed: bool | None, insecure: bool
) -> tuple[PublisherKeys | None, WorkerKeys | None]:
    """Generate keys for a publisher and for its workers, to which the caller passes them.

    Args:
        bind: The address that the publisher will bind.
        keyed: Whether to generate keys. None: generate them if other hosts can reach `bind`, unless
            the environment names keys or `insecure` is set.
        insecure: Whether other hosts may reach the publisher without keys.

    Returns:
        The publisher's keys and the workers' keys; None for both if none are generated.

    Raises:
        AddressError: The address is invalid.
    """
    exposed = not (endpoints.is_local(bind) or insecure or os.environ.get(KEYS))
    if not (exposed if keyed is None else keyed):
        return None, None
    (public, secret), (worker_public, worker_secret) = curve.keypair(), curve.keypair()
    worker = WorkerKeys("*", worker_public, worker_secret, public)
    return PublisherKeys(secret, {worker_public: Grant("*")}), worker


def new_sealer(rekey: float) -> Sealer:
    """Return a publisher's sealer, which changes the group key every `rekey` seconds.

    Raises:
        SealError: Sealing is not possible on this host.
    """
    draw = partial(secrets.token_bytes, KEY_BYTES)
    return Sealer(draw, SealedMemory().take, rekey, time.monotonic())


def check_exposure(keys: PublisherKeys | None, insecure: bool, *addresses: str | None) -> None:
    """Check that a publisher that other hosts can reach has keys, unless it is `insecure`.

    Raises:
        AddressError: Other hosts can reach an address, and there are no keys.
    """
    exposed = [a for a in addresses if a is not None and not endpoints.is_local(a)]
    if exposed and keys is None and not insecure:
        raise AddressError(
            f"other hosts can reach {exposed[0]} and would get the weights: give keys= (--keys; "
            "make them with weightbus keygen), or set insecure=True (--insecure) if you trust all "
            "hosts of the network; 127.0.0.1 needs neither"
        )


def check_both_sides(keys: RelayKeys, name: str, upstream: str, *addresses: str | None) -> None:
    """Check that a relay with keys for only one side talks only to this host on the other side.

    Without keys, a side that only this host can reach is as safe as a publisher without keys. With
    other hosts, such a side would expose what the keys of the other side protect, and the owner of
    those keys could not see it. So even `insecure` does not allow it.

    Raises:
        AddressError: Other hosts can reach the side without keys, or the publisher is on one.
    """
    make = f"make them with weightbus keygen DIR --relay {name}"
    if keys.upstream and keys.below is None:
        exposed = [a for a in addresses if a is not None and not endpoints.is_local(a)]
        if exposed:
            raise AddressError(
                f"relay {name} has a key for {upstream} and none for its own workers, so other "
                f"hosts could read at {exposed[0]} what {upstream} encrypts: put {PUBLISHER} and "
                f"allowed/ into its folder of keys ({make}), or use 127.0.0.1"
            )
    if keys.below is not None and not keys.upstream and not endpoints.is_local(upstream):
        raise AddressError(
            f"relay {name} has keys for its own workers and none for {upstream}, so its workers "
            f"would trust weights that any host on the way can change: put {UPSTREAM} into its "
            f"folder of keys ({make}), or leave keys= out"
        )


def group_keys(sealer: Sealer | None) -> Callable[[Peer], list[str]] | None:
    """Return a function that gives every worker all group keys; None if no sealer is given."""
    return None if sealer is None else lambda _peer: sealer.keys


def watch_keys(
    keys: PublisherKeys, timing: Timing, loop: PublisherLoop, revoked: Callable[[], None]
) -> None:
    """Watch a publisher's key folder in a separate thread, since reading a disk may be slow.
    Keys that were not read from a folder never change: for these, do nothing.

    Args:
        keys: The publisher's keys.
        timing: The publisher's times; the folder is checked about twice per ping interval.
        loop: The publisher's thread, which applies the changes.
        revoked: Called in the publisher's thread when a key has lost rights.
    """
    errors = _FolderErrors()
    allowed = keys.allowed(errors.add)
    if allowed is not None:
        interval = min(max(timing.ping / 2, CHECK_SECONDS_MIN), CHECK_SECONDS_MAX)
        watch = _Watch(allowed, errors, loop, revoked)
        target = partial(watch.run, interval)
        threading.Thread(target=target, name="weightbus-keys", daemon=True).start()


class _Watch:
    """Checks the key folder periodically.

    Reading the folder needs a file descriptor, so one is reserved. If other code has taken even the
    reserved descriptor, a removed file still revokes its key, as detecting a removal needs none.
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
        self._stamp: object = None  # the folder's stamp when it was last read; None: read it again
        self._granted: Mapping[str, Grant] | None = None
        self._next_alarm_at = 0.0  # no alarm is logged before this time; 0: no alarm is active

    def run(self, interval: float) -> None:
        """Check the folder every `interval` seconds, until the publisher has ended."""
        while not self._loop.over.wait(interval):
            try:
                self._check_with_spare()
            except Exception as error:  # grants stay as they are until the folder can be read
                self._alarm(
                    f"{error}. Until the folder can be read, no key changes: a key whose file is "
                    "removed stays valid. Repair the folder, or stop the publisher"
                )
            self._errors.end_check()

    def _check_with_spare(self) -> None:
        # Check the folder; without a free descriptor, use the reserved one.
        try:
            try:
                self._check()
            except ScarceError:
                with self._spare.released():
                    self._check()
        except ScarceError as error:
            remaining = self._allowed.remaining()
            if remaining != self._granted:
                self._grant(remaining)
            self._alarm(
                f"{error}. Until the folder can be read, a removed file still revokes its key, but "
                f"added and changed files have no effect: {RAISE}"
            )
        else:
            if self._next_alarm_at:
                log.warning("what keys may do: the folder can be read again")
            self._next_alarm_at = 0.0

    def _check(self) -> None:
        stamp = self._allowed.stamp()
        if stamp == self._stamp:
            return
        self._grant(self._allowed.read())
        self._stamp = stamp if self._allowed.whole else None

    def _grant(self, by_key: Mapping[str, Grant]) -> None:
        self._loop.decide(partial(_grant, by_key, self._revoked))
        self._granted = by_key

    def _alarm(self, text: str) -> None:
        now = time.monotonic()
        if now < self._next_alarm_at:
            return
        self._next_alarm_at = now + ALARM_SECONDS
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
    """Publish no more into memory that a worker with a revoked key may still have mapped."""
    for model in list(models.values()):
        model.pool.retire()


class _FolderErrors:
    """Logs an error of a key folder at the first check that finds it, not again while it lasts."""

    def __init__(self) -> None:
        self._previous, self._current = set[str](), set[str]()

    def add(self, error: Exception) -> None:
        """Log an error, unless the previous check of the folder found it, too."""
        text = str(error) or type(error).__name__
        if text not in self._previous:
            log.warning("what keys may do: %s", text)
        self._current.add(text)

    def end_check(self) -> None:
        """End a check of the folder: the next check does not log this check's errors again."""
        self._previous, self._current = self._current, set[str]()
