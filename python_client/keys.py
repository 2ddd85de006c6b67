"""Resolves keys that users pass as `keys=` or in WEIGHTBUS_KEYS; checks where keys are required."""

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
# bounds of the time between two checks of the folder
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.02, 1.0
ALARM_SECONDS = 60.0  # seconds between two alarms while the folder cannot be read


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
    """Return a relay's keys; without any if neither `given` nor the environment names some.

    If the path is a folder with several relays, `name` selects one.

    Raises:
        KeysError: The keys cannot be read, or their number is not that of the addresses above.
    """
    if isinstance(given, RelayKeys):
        keys = given
    else:
        path = _path(given)
        keys = RelayKeys.read(path, name) if path else RelayKeys((), None)
    if len(keys.upstream) not in (0, 1, len(addresses)):
        raise KeysError(
            f"the relay has {len(keys.upstream)} keys for what is above ({UPSTREAM} and others) "
            f"and {len(addresses)} addresses ({', '.join(addresses)}): give as many addresses, in "
            "the order of --above"
        )
    return keys


def keys_for(
    given: WorkerKeys | str | Path | Sequence[WorkerKeys | str | Path] | None,
    name: str | None,
    addresses: Sequence[str],
) -> WorkerKeys | tuple[WorkerKeys, ...] | None:
    """Return the keys of a worker with these addresses: one for all, or one for each.

    Raises:
        KeysError: The keys cannot be read, or their number is wrong.
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


def handed_out(
    bind: str, *, keyed: bool | None, insecure: bool
) -> tuple[PublisherKeys | None, WorkerKeys | None]:
    """Generate keys for a publisher, and for the workers to which the starting process passes them.

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
    (public, secret), (theirs, handed) = curve.keypair(), curve.keypair()
    return PublisherKeys(secret, {theirs: Grant("*")}), WorkerKeys("*", theirs, handed, public)


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
    """Check that a relay with keys on one side has no other hosts on the side without.

    On this host alone, a side without keys is as safe as a publisher without keys. Elsewhere it
    would undo what keys promise to the other side, whose owner cannot see that; so `insecure` does
    not allow it.

    Raises:
        AddressError: Other hosts can reach the side without keys, or are on it.
    """
    make = f"make them with weightbus keygen DIR --relay {name}"
    if keys.upstream and keys.below is None:
        exposed = [a for a in addresses if a is not None and not endpoints.is_local(a)]
        if exposed:
            raise AddressError(
                f"relay {name} has a key for {upstream} and none for its own workers, so other "
                f"hosts could get at {exposed[0]} what is encrypted above: put {PUBLISHER} and "
                f"allowed/ into its folder of keys ({make}), or use 127.0.0.1"
            )
    if keys.below is not None and not keys.upstream and not endpoints.is_local(upstream):
        raise AddressError(
            f"relay {name} has keys for its own workers and none for {upstream}, so they would "
            f"trust weights that any host on the way can change: put {UPSTREAM} into its folder of "
            f"keys ({make}), or leave keys= out"
        )


def group_keys(sealer: Sealer | None) -> Callable[[Peer], list[str]] | None:
    """Return a function that returns all group keys for any worker; None if no sealer is given."""
    return None if sealer is None else lambda _peer: sealer.keys


def watch_keys(
    keys: PublisherKeys, timing: Timing, loop: PublisherLoop, revoked: Callable[[], None]
) -> None:
    """Watch a publisher's key folder, in a separate thread, since a disk may be slow.
    Keys that were not read from a folder never change.

    Args:
        keys: The publisher's keys.
        timing: The publisher's times; the folder is checked about twice per ping interval.
        loop: The publisher's thread, which applies the changes.
        revoked: Called by this thread when a key has lost rights.
    """
    errors = _FolderErrors()
    allowed = keys.allowed(errors.add)
    if allowed is not None:
        every = min(max(timing.ping / 2, LOOK_SECONDS_MIN), LOOK_SECONDS_MAX)
        watch = _Watch(allowed, errors, loop, revoked)
        target = partial(watch.run, every)
        threading.Thread(target=target, name="weightbus-keys", daemon=True).start()


class _Watch:
    """Checks the key folder periodically.

    Reading the folder needs a file descriptor, and one is reserved for that. If even the reserved
    descriptor is not available, a removed file still revokes its key: a removal is detected without
    a descriptor.
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
        self._seen: object = None  # stamp of the last read folder; None: read it all
        self._granted: Mapping[str, Grant] | None = None
        self._alarm_at = 0.0  # time before which no alarm is logged again; 0: no limit

    def run(self, every: float) -> None:
        """Check the folder every `every` seconds, until the publisher has ended."""
        while not self._loop.over.wait(every):
            try:
                self._look_somehow()
            except Exception as error:  # grants stay as they are until the folder can be read
                self._alarm(
                    f"{error}. Until it can be, nothing changes: a key whose file is removed stays "
                    "good. Mend the folder, or stop the publisher"
                )
            self._errors.next_look()

    def _look_somehow(self) -> None:
        # Check the folder; without a free descriptor, use the reserved one.
        try:
            try:
                self._look()
            except ScarceError:
                with self._spare.released():
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
    """Stop publishing into memory that a worker with a revoked key may still have mapped."""
    for model in list(models.values()):
        model.pool.retire()


class _FolderErrors:
    """Logs each error of a key folder once, not again while it persists."""

    def __init__(self) -> None:
        self._before, self._now = set[str](), set[str]()

    def add(self, error: Exception) -> None:
        """Log an error, unless the previous check of the folder had it, too."""
        text = str(error) or type(error).__name__
        if text not in self._before:
            log.warning("what keys may do: %s", text)
        self._now.add(text)

    def next_look(self) -> None:
        """End a check of the folder; the next check does not log the errors of this one again."""
        self._before, self._now = self._now, set[str]()
