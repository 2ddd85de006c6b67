"""`Relay` receives versions from a publisher and passes each chunk on to workers as it arrives.

A relay is a worker of the publisher above it, and a publisher for the workers below. Both sides
share the memory of a version and the record of its chunks: a chunk is sent once its CRC-32C is
verified. Versions keep the epoch, number, layout, chunks and digest that their origin gave them. A
relay that loses the publisher above continues to serve the versions that it has. (R3)

If a version arrives as a patch, the relay passes on the patch's chunks in the same way, and decodes
the patch into a buffer of its own. From this buffer it serves the whole version.

With keys, the worker side decrypts a chunk before it records the chunk, and the publisher side
encrypts it with its own group keys. So workers of one relay cannot read what another relay sends.

The worker's thread receives, and after each of its turns passes on what is new (`_Forwarder`). The
publisher's thread sends. The publisher's thread only reads the record of chunks, except that it
adds missing checksums.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from ..bus.chunks import Chunks, Memory
from ..bus.deadline import ANSWER_SECONDS, result_of
from ..bus.effects import Effect as WorkerEffect
from ..bus.effects import Notice, Renamed, Send
from ..bus.errors import AddressError, ApplyError, ClosedError
from ..bus.memory.segment import probe
from ..bus.memory.shared_buffers import SharedBuffers
from ..bus.messages import DELTA, RELAY, RENAMING, Below
from ..bus.net import endpoints
from ..bus.net.callbacks import WorkerEvent
from ..bus.net.control import WorkerSockets
from ..bus.net.endpoints import check_all
from ..bus.net.publisher_loop import PublisherLoop
from ..bus.net.ready_queue import ReadyQueue
from ..bus.net.worker_loop import WorkerLoop
from ..bus.protocol_limits import MODELS_MAX
from ..bus.publisher.effects import Effect
from ..bus.publisher.machine import PublisherMachine
from ..bus.publisher.reporting import BelowReports
from ..bus.publisher.state import EpochClaim
from ..bus.publisher.status import WorkerStatus
from ..bus.publisher.version import (
    NO_TERMS,
    AnnouncedTerms,
    OfferedPatch,
    Version,
    VersionOffer,
)
from ..bus.staged import StagedVersion
from ..bus.trust.keys import RelayKeys
from ..bus.worker.events import Report
from ..bus.worker.keyring import Keyring
from ..bus.worker.machine import WorkerMachine
from ..bus.worker.version_store import ArrivingEntry, Received, RunningEntry, VersionStore
from ..codecs.errors import WeightBusError
from ..codecs.layout import Layout
from . import checks
from .applying.awaiting import in_thread
from .checks import check_name
from .closing import InOneProcess, stop_with
from .keys import check_both_sides, check_exposure, relay_keys, watch_keys
from .observing.access import Http
from .observing.diagnosis import CUT_OFF, REJOINED
from .observing.http_endpoints import HttpEndpoints
from .observing.relay_status import RelayStatus
from .observing.stall_hints import StallHints
from .publishing.events import call_for_events
from .publishing.opening import open_loop
from .settings import Settings, settings_of
from .subscriber import default_name, identity_of

# Without UPSTREAM, which sends `applied` on another connection than `below`: `below` must not
# arrive before `applied`, as the next patch builds on the version that the relay reported running.
FEATURES = RENAMING, RELAY, DELTA
Stream = tuple[str, bool]  # a model, and whether its versions are for named workers
FIRST_EPOCH = 1  # the epoch until a version, or the publisher above, has a later one


class Relay(InOneProcess):
    """Passes versions of some models on to workers, while the versions arrive from a publisher.

    Args:
        upstream: The address of the publisher, or of another relay, which may start later. Or a
            list of addresses, the preferred one first, as for a Subscriber.
        address: The address to which workers connect, as for a `Publisher`.
        models: The ids of the models that the relay receives and passes on.
        name: This relay's name, unique among the workers of the publisher above it. None: the name
            in its key; without keys, make a name from host, process id and random digits.
        keys: The relay's folder of `weightbus keygen --relay`, the folder that has it (then `name`
            selects it), or its contents: the relay connects only to the publisher whose key is in
            it, and only workers with a key in its `allowed` can join. For several addresses above,
            the folder may have a file for each. None: use the folder in
            WEIGHTBUS_KEYS; if that is not set, use no keys.
        insecure: Without keys, allow an address that other hosts can reach.
        dashboard, metrics: Where to serve a live page of the workers below, and metrics, as a
            `Publisher` does.
        settings: Rarely needed options: times, sockets, memory.

    Raises:
        AddressError: An address is invalid or in use, other hosts can reach it without keys,
            `upstream` is the relay's own address, or only one side has keys and the other side is
            not on this host.
        KeysError: The keys cannot be read.
        OSError: Too few file descriptors are left for sockets; the text names `ulimit -n`.
        ValueError: A name is invalid, or there are no models.

    Workers and further relays connect to `relay.address` as to a publisher. A version keeps the
    epoch, number, digest and metadata that its publisher gave it. If the publisher above ends, the
    relay serves the versions that it has, and joins again when a publisher answers. A relay can be
    closed and dropped like a Publisher. In a forked process, make a new Relay.
    """

    __module__ = "weightbus"

    def __init__(
        self,
        upstream: str | Sequence[str],
        address: str,
        models: Iterable[str],
        *,
        name: str | None = None,
        keys: RelayKeys | str | Path | None = None,
        insecure: bool = False,
        dashboard: str | Http | None = None,
        metrics: str | Http | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Bind the sockets, and start. `help(weightbus.Relay)` describes the parameters."""
        chosen = settings_of("Relay", settings)
        ids, above = _ids(models), check_all(upstream)
        own = relay_keys(keys, name, above)
        self.name = check_name(default_name(own.pinned) if name is None else name, "relay")
        check_exposure(own.below, insecure, address, chosen.data)
        for each in above:
            check_both_sides(own, self.name, each, address, chosen.data)
            _check_above(self.name, each, address)
        identity = identity_of(self.name, *FEATURES)
        ring = Keyring() if own.upstream else None
        machine = WorkerMachine(
            identity, ids, lambda _m, _l: "", chosen.bytes_max, chosen.timing, None, ring, above
        )
        self._ready = ReadyQueue("relay")
        # a small shared segment; freed with its last reference
        self._probe = probe() if chosen.shared_memory else None
        shared = None if self._probe is None else self._probe.shared
        buffers = self._buffers = None if self._probe is None else SharedBuffers()
        with contextlib.ExitStack() as undo:
            self._below = open_loop(
                address, chosen, own.below, FIRST_EPOCH, shared=shared, above=identity
            )
            undo.callback(self._below.close)
            self.address, self.data_address = self._below.address, self._below.data_address
            pinned, anywhere = own.pinned, chosen.any_data_host
            sockets = self._sockets = WorkerSockets(
                above, machine.place, pinned, machine.in_flight_max, any_data_host=anywhere
            )
            undo.enter_context(contextlib.closing(sockets))
            # No object that a thread of the relay uses may refer to `self`: see `closing`.
            at = lambda: sockets.address  # noqa: E731
            forwarder = _Forwarder(machine, self._ready, self._below, at, buffers)
            reports = self._reports = _Reports(machine, self._below, sockets.wake)
            self._below.after_turns(reports.collect)
            hints = StallHints(above, machine, self._ready, keyed=ring is not None)
            self._above = WorkerLoop(
                machine,
                sockets,
                self._ready,
                hints.look,
                on_renamed=forwarder.renamed,
                shared_memory=False,
                allocate=None if buffers is None else buffers.allocate,
                after_turn=lambda: [*forwarder(), *reports.send()],
            )
            forwarder.report_by(self._above.happened)
            stop_with(self, self._above, self._below)
            undo.pop_all()
        self._below.start()
        if own.below is not None:
            revoked = _no_segments if buffers is None else buffers.retire
            watch_keys(own.below, chosen.timing, self._below, revoked)
        self._above.start()
        self._status = forwarder.status
        self.shown = HttpEndpoints(self, self._below, self._status)
        self.shown.serve(dashboard, metrics, self.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Relay stays in its process, with its sockets and threads: hand over its address "
            f"({self.address!r}) for a Subscriber there, or make the Relay there"
        )

    @property
    def upstream(self) -> str:
        """The address above that the relay is connected to, or is trying to connect to."""
        return self._sockets.address

    def __repr__(self) -> str:
        return f"<Relay {self.name} of {self.upstream} at {self.address}>"

    def wait_joined(self, timeout: float) -> bool:
        """Wait until the publisher above accepts this relay; return whether it did in time.

        Args:
            timeout: Seconds to wait.

        Raises:
            RefusedError: The publisher refuses this relay, such as for a name that is taken.
            AddressError: The publisher's host name has no address; the relay tries again.
            ClosedError: The relay is closed, or belongs to the parent of this forked process.
        """
        self._check_process()
        return self._ready.wait_joined(checks.seconds(timeout, "timeout"))

    def workers(self) -> dict[str, WorkerStatus]:
        """Return the status of every worker below by name, lost workers included.

        Raises:
            ClosedError: The relay is closed, or belongs to the parent of this forked process.
        """
        self._check_usable()
        return {w.name: w for w in result_of(self._below.status(), ANSWER_SECONDS)}

    def status(self) -> RelayStatus:
        """Return which versions the relay has, and whether the publisher above answers.

        Raises:
            ClosedError: The relay is closed, or belongs to the parent of this forked process.
        """
        self._check_usable()
        return self._status()

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> Callable[[], None]:
        """Call `callback` for each worker below and each change, as `Publisher.on_worker` does.

        Args:
            callback: A function that takes a `WorkerEvent`.

        Returns:
            A function that ends the calls.

        Raises:
            ClosedError: The relay is closed, or belongs to the parent of this forked process.
            TypeError: The callback is a coroutine function.
        """
        self._check_usable()
        return call_for_events(self._below, callback)

    def close(self) -> None:
        """Leave the publisher, end the sessions of the workers, and close the sockets; idempotent.

        Workers keep their weights, and join again when a relay or publisher listens there again.
        """
        if self._is_forked_copy:  # a forked child must not close the parent's sockets
            return
        self.shown.close()
        self._reports.close()
        self._above.close()
        self._below.close()

    async def close_awaitable(self) -> None:
        """Close from a coroutine: a thread does the work, so the event loop is not blocked."""
        await in_thread(self.close, "weightbus-close")

    def _check_usable(self) -> None:
        self._check_process()
        self._ready.check_open()
        self._below.check()


def _ids(models: Iterable[str]) -> list[str]:
    """Check the ids of the models; return each id once."""
    given = [] if isinstance(models, str) else list(models)
    ids = list(dict.fromkeys(check_name(model, "model") for model in given))
    if not 1 <= len(ids) <= MODELS_MAX:
        shown = repr(models)[:100]
        raise ValueError(
            f'models={shown}: give a list of 1 to {MODELS_MAX} ids of models, such as ["policy"]'
        )
    return ids


def _check_above(name: str, upstream: str, address: str) -> None:
    """Raise AddressError if a relay would be its own publisher."""
    if endpoints.leads_to(upstream, address):
        raise AddressError(
            f"relay {name} would be its own publisher: upstream={upstream!r} is its own address "
            f"({address}); give the address of the publisher above it"
        )


class _PassedVersion:
    """A version that the relay passes on.

    Args:
        offer: What the publisher side offers.
        chunks: The chunks of the offer.
        patch: The chunks of the patch as which the version arrives; None: it arrives whole.
        before: The version of the same stream that was passed on before; None: there is none.

    Attributes:
        offer, chunks, patch: As given, but `patch` is None once the patch is dropped.
        version: The version in the publisher's machine; None: it is not added (yet).
        notified: The value of `arrived` when the publisher's thread was last notified.
        send_pending: Whether a call of `send_new` is queued for the publisher's thread.
        restarts: The restarts of `chunks` when this was last checked.
        given_up: Whether the publisher side dropped the version before it was whole.
        undecided: Whether workers below wait for a commit.
        before: The version that is offered again if this one is aborted; None if there is none, or
            if this version is decided.
        counted: The bytes counted as received; all bytes, if the version only got another name.
        view: A view of the bytes, which keeps them from being overwritten; None if they may be.
    """

    def __init__(
        self,
        offer: VersionOffer,
        chunks: Chunks[Memory],
        patch: Chunks[Memory] | None,
        before: "_PassedVersion | None",
    ) -> None:
        self.offer, self.chunks, self.patch = offer, chunks, patch
        self.counted = chunks.plan.nbytes if offer.names else 0
        if before is not None and before.chunks is chunks:  # it was given up for a while
            self.counted = before.counted
        self._patch_bytes = 0  # bytes of the patch that were counted
        self.version: Version | None = None
        self.notified, self.restarts = -1, chunks.restarts
        self.send_pending = self.given_up = False
        self.undecided = offer.terms.commit == "together"
        older: _PassedVersion | None = before
        if before is not None and before.undecided:  # `before` is aborted, or superseded
            older = before.before
        self.before: _PassedVersion | None = older if self.undecided else None
        self.view: Memory | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The epoch and number."""
        assert self.offer.key is not None  # noqa: S101 - a relay's offers have a key
        return self.offer.key

    @property
    def arrived(self) -> int:
        """A number that changes with each chunk and each `end` that arrives."""
        patch, chunks = self.patch, self.chunks
        of_patch = 0 if patch is None else patch.here + bool(patch.digest)
        return of_patch + (chunks.plan.count + 1 if chunks.whole else chunks.here)

    def count_received(self) -> int:
        """Return the number of bytes that have arrived since the last call."""
        patch, plan, before = self.patch, self.chunks.plan, self.counted
        if patch is None:
            arrived = plan.nbytes if self.chunks.whole else plan.approximate_bytes(self.chunks.here)
        else:  # the version's own chunks are decoded from the patch, and do not arrive
            arrived, self._patch_bytes = 0, patch.plan.approximate_bytes(patch.here)
        # a chunk that arrives again after damage counts once
        self.counted = max(before, self._patch_bytes + arrived)
        return self.counted - before

    def has_lost_patch(self, arriving: ArrivingEntry | None) -> bool:
        """Return whether the relay's worker side has dropped the patch.

        `arriving`: the worker side's entry of this version; None: it does not arrive any more.
        """
        patch = self.patch
        if patch is None:
            return False
        if arriving is not None:
            return arriving.transfer.chunks is not patch
        return self.chunks.whole and patch.here < patch.plan.count

    def give_up_patch(self, below: PublisherLoop) -> None:
        """Drop the patch: from now on, the version is offered only whole. (R9)"""
        self.patch = None
        below.decide(self._unpatch)

    def _unpatch(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        return [] if self.version is None else machine.unpatch(self.version)

    def precedes(self, entry: Received) -> bool:
        """True if `entry` is newer; or this version was given up, and may arrive once more."""
        return entry.key > self.key or self.given_up

    def announce(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Offer the version below, in the publisher's thread, if its epoch and number are new.

        The epoch may be old: a relay without versions adopts the epoch of its publisher, and may
        then get another publisher, whose epoch is lower.
        """
        if not machine.takes(self.offer):
            return []
        self.version, effects = machine.pass_on(self.offer, now)
        return effects

    def announce_again(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Offer the version below again, in the publisher's thread, if it has no newer version."""
        return self.announce(machine, now) if machine.lacks(self.offer) else []

    def keep(self) -> None:
        """Prevent that the bytes are overwritten, even while no version with them is offered."""
        self.view = self.chunks.lend()

    def release(self) -> None:
        """Allow that the bytes are overwritten, once no version with them is offered."""
        self.view = None

    def request_send(self, below: PublisherLoop) -> None:
        """Make the publisher's thread send the new chunks.

        One queued call sends all chunks that arrive before it runs.
        """
        if not self.send_pending:
            self.send_pending = True
            below.decide(self.send_new)

    def send_new(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Send the new chunks, in the publisher's thread."""
        self.send_pending = False  # first, as a chunk that arrives from now on needs another call
        return [] if self.version is None else machine.arrived(self.version, now)

    def commit(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Commit the version below, in the publisher's thread."""
        return [] if self.version is None else machine.decide(self.version, commit=True)

    def give_up(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Drop the version, which will not arrive whole, in the publisher's thread."""
        return [] if self.version is None else machine.abandon(self.version)

    def abort(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Abort the version below, in the publisher's thread."""
        why = "its publisher has aborted it"
        return [] if self.version is None else machine.decide(self.version, commit=False, why=why)


class _Forwarder:
    """Passes on new versions and chunks, in the worker's thread, after each of its turns."""

    def __init__(
        self,
        machine: WorkerMachine,
        ready: ReadyQueue,
        below: PublisherLoop,
        upstream: Callable[[], str],
        buffers: SharedBuffers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._ready, self._below = machine, ready, below
        self._clock = clock
        self._upstream, self._buffers = upstream, buffers
        if buffers is not None:
            for follower in machine.followers.values():
                follower.versions.set_claim(buffers.claim)
        # The version of each stream that was passed on last.
        self._passed: dict[Stream, _PassedVersion] = {}
        # The last whole and decided version of each stream. Its bytes are kept until the next such
        # version: it may be offered again, under a new name or if the next one does not arrive.
        self._whole: dict[Stream, _PassedVersion] = {}
        self._renamed: dict[str, Renamed] = {}  # by model, the running version's last new name
        self._epoch = FIRST_EPOCH
        self._report: Callable[[Report], None] = _ignore
        self._received: dict[str, int] = dict.fromkeys(machine.followers, 0)
        # When the session ended, or the relay was made; None: there is a session.
        self._lost_at: float | None = clock()
        self._notified: bool | None = None  # whether the last notice was of a session; None: none
        self._cut_off = False  # whether there has been no session for two pings
        self._cut_off_why = ""  # why the last notice had no publisher; empty: it had one
        self._cut_off_at: float | None = None  # since when, in answers to the workers below

    def report_by(self, report: Callable[[Report], None]) -> None:
        """Set the function with which the worker's machine processes a report at once.

        So `applied` is sent before a report that workers below run the same version.
        """
        self._report = report

    def renamed(self, renamed: Renamed) -> None:
        """Record a version's new name and its metadata, before the version is passed on."""
        self._renamed[renamed.model] = renamed

    def __call__(self) -> list[WorkerEffect]:
        """Pass on announcements, chunks and decisions; report ready versions as applied."""
        ready = list[StagedVersion]()
        try:
            while self._ready.filled and isinstance(staged := self._ready.take(0.0), StagedVersion):
                ready += (staged, *staged.others)
        except ApplyError as error:
            name = self._machine.identity.name
            notice = Notice(
                "rejected", f"relay {name} cannot pass it on: {error}", name, warning=True
            )
            self._below.decide(lambda _machine, _now: [notice])
        except WeightBusError:
            pass  # for instance, the relay is refused: the worker's thread logs this
        terms = self._machine.session.terms
        if self._machine.in_session and terms.epoch > self._epoch:
            self._epoch = terms.epoch
            self._below.decide(lambda machine, _now: machine.follow(terms.epoch))
        self._notify_of_session(self._clock())
        for model, follower in self._machine.followers.items():
            for named in (False, True):
                self._pass_on((model, named), follower.versions)
        for staged in ready:  # after these reports, only the publisher side may hold the bytes
            running = self._machine.followers[staged.model].running
            self._report(Report(staged.model, staged.key, "taken"))
            # A version for all may arrive after a newer one for named workers.
            if running is not None and (running.epoch, running.version) > staged.key:
                self._report(Report(staged.model, staged.key, "newer"))
            else:
                base = staged.private_bytes  # the base of later patches
                self._report(Report(staged.model, staged.key, "applied", bytes=base))
        return []

    def status(self) -> RelayStatus:
        """Return the relay's status. Any thread may call this.

        Raises:
            ClosedError: The relay is closed.
        """
        versions = result_of(self._below.held(), ANSWER_SECONDS)  # first: each came in a session
        lost_at = self._lost_at
        return RelayStatus(
            upstream=self._upstream(),
            joined=lost_at is None,
            lost_s=None if lost_at is None else self._clock() - lost_at,
            cut_off_s=None if self._cut_off_at is None else self._clock() - self._cut_off_at,
            epoch=self._machine.session.terms.epoch,
            versions=versions,
            received=dict(self._received),
        )

    def _notify_of_session(self, now: float) -> None:
        """Notify observers if there is a session again, or has been none for two pings.

        Within two pings, a session that ended for another reason than silence, as when a publisher
        forgot the worker, has begun again. Until the first session, which is notified at once,
        observers see that there is none. A relay above that has no publisher counts as none.
        """
        joined = self._machine.in_session
        if joined:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now
        delay = 2 * self._machine.timing.ping
        self._cut_off = self._lost_at is not None and now - self._lost_at >= delay
        above_cut_off_at = self._machine.session.terms.cut_off_at
        why, at = self._cut_off_why, self._cut_off_at
        if self._cut_off:
            refused = "refuses it" if self._ready.refused else "does not answer"
            why, at = f"{self._upstream()} {refused}", self._lost_at
        elif joined:
            no_publisher = f"the relay at {self._upstream()} has none"
            why, at = (
                (no_publisher, above_cut_off_at) if above_cut_off_at is not None else ("", None)
            )
        if at != self._cut_off_at:
            self._cut_off_at = at
            self._below.decide(lambda machine, _now: machine.cut_off(at))
        is_first = self._notified is None or (joined and not self._notified)
        if bool(why) == bool(self._cut_off_why) and not is_first:
            return
        self._cut_off_why, self._notified = why, joined
        name = self._machine.identity.name
        if why:
            text = f"relay {name} has no publisher: {why}"
            whole = (f"{m} {p.key[1]}" for (m, named), p in self._whole.items() if not named)
            versions = ", ".join(whole)
            text += f"; workers get the versions that it has ({versions})" if versions else ""
        elif joined:
            text = f"relay {name} has joined the publisher at {self._upstream()}"
        else:
            text = f"relay {name} has not joined the publisher at {self._upstream()} yet"
        notice = Notice(CUT_OFF if why or not joined else REJOINED, text, name, bool(why))
        self._below.decide(lambda _machine, _now: [notice])

    def _pass_on(self, stream: Stream, versions: VersionStore) -> None:
        """Pass on the newest version of a stream, with its new chunks and its decision."""
        passed = self._passed.get(stream)
        entries: list[Received] = [*versions.all("staged", "ready", "applying", "running")]
        entries += [] if self._falls_back(stream) else versions.all("arriving")
        entries = [entry for entry in entries if bool(entry.announce.workers) is stream[1]]
        newest = max(entries, key=lambda entry: entry.key, default=None)
        if newest is not None and (passed is None or passed.precedes(newest)):
            before, passed = passed, self._begin(stream, newest, passed)
            if before is not None and before is not passed:
                self._give_up(stream, before, versions)
        if passed is None:
            return
        chunks = passed.chunks
        if passed.has_lost_patch(versions.find(passed.key, "arriving")):
            passed.give_up_patch(self._below)
        arrived = passed.arrived
        if chunks.restarts != passed.restarts:  # the received bytes did not match the digest
            passed.restarts = chunks.restarts
            self._below.rekey()  # since no key may seal a chunk twice, if the bytes differ (E3)
        if arrived != passed.notified:
            passed.notified = arrived
            self._received[stream[0]] += passed.count_received()
            passed.request_send(self._below)
        has = versions.has(passed.key)
        if passed.undecided and versions.find(passed.key, "arriving", "staged") is None:
            passed.undecided = False
            self._below.decide(passed.commit if has else passed.abort)
            before, passed.before = passed.before, None
            if not has:  # an older version is still offered, or is received again
                passed.given_up = True
                self._passed[stream] = before or passed
        else:
            self._give_up(stream, passed, versions)
        last = self._whole.get(stream)
        whole = chunks.whole and not (passed.undecided or passed.given_up)
        whole = whole and (chunks.in_use or has)
        if whole and (last is None or last.key < passed.key):
            self._keep(stream, passed)

    def _falls_back(self, stream: Stream) -> bool:
        """True if the publisher is gone, and the last whole version replaces an arriving one."""
        return self._cut_off and stream in self._whole

    def _give_up(self, stream: Stream, passed: _PassedVersion, versions: VersionStore) -> None:
        """Withdraw `passed` if it is not whole, and is dropped above or its publisher is gone.

        The last whole version is then offered again, unless a newer version is offered.
        """
        if passed.chunks.whole or passed.given_up:
            return
        if versions.has(passed.key) and not self._falls_back(stream):
            return
        passed.given_up = True
        self._below.decide(passed.give_up)
        if (whole := self._whole.get(stream)) is None:
            return
        offer = self._offer(stream[0], whole.offer.layout, whole.chunks, whole.key, NO_TERMS)
        offer.names, offer.metadata = whole.offer.names, whole.offer.metadata
        offer.only, offer.companions = whole.offer.only, whole.offer.companions
        again = _PassedVersion(offer, whole.chunks, None, None)
        self._keep(stream, again)
        self._below.decide(again.announce_again)

    def _keep(self, stream: Stream, passed: _PassedVersion) -> None:
        """Keep the bytes of a whole version; release those of the versions that it replaces."""
        passed.keep()
        model, named = stream
        for replaced in [stream] if named else [stream, (model, True)]:
            older = self._whole.get(replaced)
            if older is not None and older.key <= passed.key:
                self._whole.pop(replaced).release()
        self._whole[stream] = passed

    def _whole_of(self, model: str) -> list[_PassedVersion]:
        return [self._whole[s] for s in ((model, False), (model, True)) if s in self._whole]

    def _offer(
        self,
        model: str,
        layout: Layout,
        chunks: Chunks[Memory],
        key: tuple[int, int],
        terms: AnnouncedTerms,
    ) -> VersionOffer:
        buffers = self._buffers
        segment = None if buffers is None else buffers.segment_of(chunks.memory)
        return VersionOffer.received(model, layout, chunks, key, terms, segment)

    def _begin(
        self, stream: Stream, entry: Received, before: _PassedVersion | None
    ) -> _PassedVersion | None:
        """Offer a version that has begun to arrive or has a new name; return it, else `before`."""
        model, _ = stream
        announce, chunks = entry.announce, entry.chunks
        terms = AnnouncedTerms(announce.commit, announce.acknowledge, announce.hash)
        names = frozenset[tuple[int, int]]()
        running = entry.running if isinstance(entry, RunningEntry) else None
        for whole in [] if chunks is not None or running is None else self._whole_of(model):
            if entry.key > whole.key and running and whole.chunks.digest == running.digest:
                terms, names = NO_TERMS, frozenset({*whole.offer.names, whole.key})  # renamed
                chunks = whole.chunks
        if chunks is None:
            return before
        offer = self._offer(model, entry.layout, chunks, entry.key, terms)
        patch: Chunks[Memory] | None = None
        if isinstance(entry, ArrivingEntry) and entry.transfer.offered is not None:
            patch = entry.transfer.chunks
            offer.patches = (OfferedPatch.received(entry.transfer.offered, patch),)
        offer.keep = announce.keep
        renamed = self._renamed.get(model) if names else None
        same = renamed is not None and (renamed.epoch, renamed.version) == entry.key
        offer.names = names
        offer.metadata = renamed.metadata if renamed is not None and same else announce.metadata
        offer.only = frozenset(announce.workers) or None
        offer.companions = announce.companions
        older = before
        if older is not None and older.undecided:  # `older` is aborted, or superseded
            older = older.before
        passed = self._passed[stream] = _PassedVersion(offer, chunks, patch, older)
        if before is not None and before.chunks.whole:  # workers may wait for its last chunks
            before.request_send(self._below)
        self._below.decide(passed.announce)
        return passed


class _Reports:
    """Passes reports of the workers below from the publisher's thread to the worker's thread.

    Reports are for one session with the publisher above. In a new session, they begin anew.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        below: PublisherLoop,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._below, self._wake, self._clock = machine, below, wake, clock
        # (number of the welcome, epoch) of the session above; None: no reports are wanted
        self._session: tuple[int, int] | None = None
        self._reported_session: tuple[int, int] | None = None  # the session of the last reports
        self._reports: BelowReports | None = None
        self._outgoing: deque[tuple[tuple[int, int], Below]] = deque()
        self._claim: EpochClaim | None = None

    def close(self) -> None:
        """Make the last reports, which the worker's thread sends before it ends."""

        def last(machine: PublisherMachine, now: float) -> list[Effect]:
            self.collect(machine, now, closing=True)
            return []

        self._below.decide(last)
        with contextlib.suppress(ClosedError):
            result_of(self._below.status(), ANSWER_SECONDS)  # answered after `last` has run

    def collect(self, machine: PublisherMachine, now: float, *, closing: bool = False) -> None:
        """Make the reports that are due, in the publisher's thread."""
        if self._reports is None:
            self._reports = BelowReports(machine)
        claim = machine.state.claim
        recent = claim is not None and now - claim.heard_at < machine.state.timing.lost_after
        self._claim = claim if recent else None
        session = self._session
        if session is None:
            return
        if session != self._reported_session:
            self._reported_session = session
            self._reports.begin()
        pages = self._reports.due(session[1], now, closing=closing)
        if pages:
            self._outgoing += [(session, page) for page in pages]
            self._wake()

    def send(self) -> list[WorkerEffect]:
        """Return the effects that send the reports, in the worker's thread."""
        machine, session = self._machine, None
        if machine.in_session and machine.session.terms.relay:
            session = machine.welcomes, machine.session.terms.epoch
        if session != self._session:
            self._session = session
            self._below.decide(_nothing)  # makes the publisher's thread call `collect`
        claim = self._claim
        effects = list[WorkerEffect]()
        if claim is not None and session is not None:
            effects += machine.outbid(claim.epoch, claim.started_by, self._clock())
        while self._outgoing:
            of, page = self._outgoing.popleft()
            if of == session:
                effects.append(Send(page))
        return effects


def _nothing(_machine: PublisherMachine, _now: float) -> list[Effect]:
    return []


def _no_segments() -> None:
    """Do nothing: without shared segments, a revoked worker has none mapped."""


def _ignore(_report: Report) -> None:
    """Do nothing: the worker's loop is not made yet."""
