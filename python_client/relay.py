"""`Relay` receives versions from one publisher and gives them to workers, as they arrive.

A relay is a worker of the publisher above it, and a publisher for the workers below. Both share the
memory of a version and the record of its chunks: a chunk is sent on once its CRC-32C is right.
Versions keep the epoch, number, layout, chunks and digest that their origin gave them. A relay that
loses the publisher above serves on what it has. (R3)

If a version arrives by a patch, its chunks are passed on like those of a version, and the relay
decodes the patch into a buffer of its own. From there it serves the whole version.

With keys, the worker decrypts what arrives before it records a chunk, and the publisher encrypts
with group keys of its own. So workers at one relay cannot read what is published at another.

The worker's thread receives, and after each of its turns passes on what is new (`_PassesOn`). The
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
from .closing import InOneProcess, end_with
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

# Not UPSTREAM: `below` must not overtake `applied`, since the next patch builds on the version that
# the publisher knows to run at the relay.
FEATURES = RENAMING, RELAY, DELTA
Stream = tuple[str, bool]  # a model, and whether its versions are for named workers
FIRST_EPOCH = 1  # until a version, or the publisher above, has a later one


class Relay(InOneProcess):
    """Passes the versions of some models on to workers, while they arrive from a publisher.

    Args:
        upstream: The address of the publisher, or of another relay. It may start later. Or several
            addresses, the preferred one first, as a Subscriber has them.
        address: The address for workers, as a `Publisher` has it.
        models: The ids of the models that the relay receives and passes on.
        name: This relay's name, unique among the workers of the publisher above it. None: that of
            its key; without keys, make a name from host, process id and random digits.
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
        AddressError: An address is invalid or in use, other hosts can reach it without keys, or
            `upstream` is the relay's own address; or only one side has keys, and the other side is
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
                above, machine.place, pinned, machine.awaits, any_data_host=anywhere
            )
            undo.enter_context(contextlib.closing(sockets))
            # No object that a thread of the relay uses may refer to `self`: see `closing`.
            at = lambda: sockets.address  # noqa: E731
            passes_on = _PassesOn(machine, self._ready, self._below, at, buffers)
            reports = self._reports = _Reports(machine, self._below, sockets.wake)
            self._below.after_turns(reports.collect)
            hints = StallHints(above, machine, self._ready, keyed=ring is not None)
            self._above = WorkerLoop(
                machine,
                sockets,
                self._ready,
                hints.look,
                on_renamed=passes_on.renamed,
                shared_memory=False,
                allocate=None if buffers is None else buffers.allocate,
                after_turn=lambda: [*passes_on(), *reports.send()],
            )
            passes_on.report_by(self._above.happened)
            end_with(self, self._above, self._below)
            undo.pop_all()
        self._below.start()
        if own.below is not None:
            revoked = _no_segments if buffers is None else buffers.retire
            watch_keys(own.below, chosen.timing, self._below, revoked)
        self._above.start()
        self._status = passes_on.status
        self.shown = HttpEndpoints(self, self._below, self._status)
        self.shown.serve(dashboard, metrics, self.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Relay stays in its process, with its sockets and threads: hand over its address "
            f"({self.address!r}) for a Subscriber there, or make the Relay there"
        )

    @property
    def upstream(self) -> str:
        """The address above; of several, the one that the relay is with, or tries."""
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
        """Return the versions that the relay has, and whether the publisher above answers.

        Raises:
            ClosedError: The relay is closed, or belongs to the parent of this forked process.
        """
        self._check_usable()
        return self._status()

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> Callable[[], None]:
        """Call `callback` for each worker below, then for each change, as `Publisher.on_worker`.

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

        Workers keep their weights, and join again when a relay or a publisher has the address.
        """
        if self._inherited:  # a forked child must not close the parent's sockets
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
    """Return the ids of the models, checked, each once."""
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


class _Passed:
    """A version that was passed on.

    Args:
        offer: What is offered below.
        chunks: The chunks of the offer.
        patch: The chunks of the patch by which the version arrives; None: it arrives whole.

    Attributes:
        offer, chunks, patch: As given, but `patch` is None once the patch is given up.
        version: What the publisher's machine made of it; None: its thread has not made it yet.
        count: The number of chunks that were here when the publisher's thread was last notified.
        looks: Whether the publisher's thread is about to look which chunks are here.
        restarts: How often the version had been received from the start then.
        given_up: Whether the version was dropped below before it was whole.
        undecided: Whether workers below wait for a commit.
        before: What was passed on before and is offered again if this version is aborted; None:
            there is none, or the version is decided.
        counted: The bytes that were counted as received; all of a version that only has another
            name.
        kept: A view of the bytes, so that they are not overwritten; None: they may be.
    """

    def __init__(
        self,
        offer: VersionOffer,
        chunks: Chunks[Memory],
        patch: Chunks[Memory] | None,
        before: "_Passed | None",
    ) -> None:
        self.offer, self.chunks, self.patch = offer, chunks, patch
        # Bytes that have been counted as received; all of a version that only has another name.
        self.counted = chunks.plan.nbytes if offer.names else 0
        if before is not None and before.chunks is chunks:  # it was given up for a while
            self.counted = before.counted
        self._of_patch = 0  # those of them that are of the patch
        self.version: Version | None = None
        self.count, self.restarts = -1, chunks.restarts
        self.looks = self.given_up = False
        self.undecided = offer.terms.commit == "together"
        older: _Passed | None = before
        if before is not None and before.undecided:  # that one is aborted, or superseded
            older = before.before
        self.before: _Passed | None = older if self.undecided else None
        self.kept: Memory | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The epoch and number."""
        assert self.offer.key is not None  # noqa: S101 - a relay's offers have one
        return self.offer.key

    @property
    def arrived(self) -> int:
        """A number that changes with each chunk and each `end` that arrives."""
        patch, chunks = self.patch, self.chunks
        of_patch = 0 if patch is None else patch.here + bool(patch.digest)
        return of_patch + (chunks.plan.count + 1 if chunks.whole else chunks.here)

    def received(self) -> int:
        """Return the bytes that have arrived since the last call."""
        patch, plan, before = self.patch, self.chunks.plan, self.counted
        if patch is None:
            here = plan.nbytes if self.chunks.whole else plan.approximate_bytes(self.chunks.here)
        else:  # the version is decoded
            here, self._of_patch = 0, patch.plan.approximate_bytes(patch.here)
        # damaged chunks arrive twice, and count once
        self.counted = max(before, self._of_patch + here)
        return self.counted - before

    def has_lost_patch(self, arriving: ArrivingEntry | None) -> bool:
        """True if the worker above has given the patch up.

        `arriving`: the version at that worker, as long as it arrives.
        """
        patch = self.patch
        if patch is None:
            return False
        if arriving is not None:
            return arriving.transfer.chunks is not patch
        return self.chunks.whole and patch.here < patch.plan.count

    def give_up_patch(self, below: PublisherLoop) -> None:
        """Offer the version only whole from now on. (R9)"""
        self.patch = None
        below.decide(self._unpatch)

    def _unpatch(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        return [] if self.version is None else machine.unpatch(self.version)

    def precedes(self, entry: Received) -> bool:
        """True if a version is newer, or this one was given up: then it may be the same again."""
        return entry.key > self.key or self.given_up

    def announce(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Offer the version below, in the publisher's thread, unless that has overtaken it.

        A relay without versions takes the epoch of its publisher, and may then get another
        publisher, whose epoch is lower.
        """
        if not machine.takes(self.offer):
            return []
        self.version, effects = machine.pass_on(self.offer, now)
        return effects

    def announce_again(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Offer the version below, in the publisher's thread, if the latest one is older."""
        return self.announce(machine, now) if machine.lacks(self.offer) else []

    def keep(self) -> None:
        """Keep the bytes, also while nothing is offered that has them."""
        self.kept = self.chunks.lend()

    def keep_no_more(self) -> None:
        """Let the bytes be overwritten once nothing is offered that has them."""
        self.kept = None

    def send_more(self, below: PublisherLoop) -> None:
        """Make the publisher's thread send chunks that are new.

        One call is enough for all chunks that arrive until the publisher's thread looks.
        """
        if not self.looks:
            self.looks = True
            below.decide(self.more)

    def more(self, machine: PublisherMachine, now: float) -> list[Effect]:
        """Send chunks that are new, in the publisher's thread."""
        self.looks = False  # first: chunks that arrive from now on may be overlooked here
        return [] if self.version is None else machine.arrived(self.version, now)

    def commit(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Commit the version below, in the publisher's thread."""
        return [] if self.version is None else machine.decide(self.version, commit=True)

    def give_up(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Drop the version below, which will not be whole, in the publisher's thread."""
        return [] if self.version is None else machine.abandon(self.version)

    def abort(self, machine: PublisherMachine, _now: float) -> list[Effect]:
        """Abort the version below, in the publisher's thread."""
        why = "its publisher has aborted it"
        return [] if self.version is None else machine.decide(self.version, commit=False, why=why)


class _PassesOn:
    """Passes on what is new at the worker above, in that worker's thread, after each turn."""

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
                follower.versions.claim_by(buffers.claim)
        # By model, and whether they are for named workers: the versions that were passed on last.
        self._passed: dict[Stream, _Passed] = {}
        # The last ones that were whole and decided: their bytes are kept until the next one is, to
        # be offered again under another name, or if the next one does not arrive.
        self._whole: dict[Stream, _Passed] = {}
        self._renamed: dict[str, Renamed] = {}  # by model, the last new name of what runs
        self._epoch = FIRST_EPOCH
        self._tell: Callable[[Report], None] = _ignore
        self._received: dict[str, int] = dict.fromkeys(machine.followers, 0)
        # When the session ended, or the relay was made; None: there is a session.
        self._lost_at: float | None = clock()
        self._noted: bool | None = None  # whether observers know of a session; None: of neither
        self._cut_off = False  # whether there has been none for two pings
        self._alone = ""  # why there is no publisher above, as observers know; empty: there is one
        self._alone_at: float | None = None  # since when, as the workers below are answered

    def report_by(self, tell: Callable[[Report], None]) -> None:
        """Set the function by which the worker's machine processes a report at once.

        So `applied` is sent before a report that workers below run the same version.
        """
        self._tell = tell

    def renamed(self, renamed: Renamed) -> None:
        """Record the metadata that a version has by its new name, before it is passed on."""
        self._renamed[renamed.model] = renamed

    def __call__(self) -> list[WorkerEffect]:
        """Pass on announcements, chunks and decisions, and take versions that are ready."""
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
            pass  # the relay is refused, say: the worker's thread logs it
        terms = self._machine.session.terms
        if self._machine.in_session and terms.epoch > self._epoch:
            self._epoch = terms.epoch
            self._below.decide(lambda machine, _now: machine.follow(terms.epoch))
        self._note_session(self._clock())
        for model, follower in self._machine.followers.items():
            for named in (False, True):
                self._pass_on((model, named), follower.versions)
        for staged in ready:  # from then on, only the publisher below may have the bytes
            running = self._machine.followers[staged.model].running
            self._tell(Report(staged.model, staged.key, "taken"))
            # A version for all may arrive after a newer one for named workers.
            if running is not None and (running.epoch, running.version) > staged.key:
                self._tell(Report(staged.model, staged.key, "newer"))
            else:
                base = staged.private_bytes  # for patches that follow
                self._tell(Report(staged.model, staged.key, "applied", bytes=base))
        return []

    def status(self) -> RelayStatus:
        """Return the relay's status; for any thread.

        Raises:
            ClosedError: The relay is closed.
        """
        versions = result_of(self._below.held(), ANSWER_SECONDS)  # first: each came in a session
        lost_at = self._lost_at
        return RelayStatus(
            upstream=self._upstream(),
            joined=lost_at is None,
            lost_s=None if lost_at is None else self._clock() - lost_at,
            cut_off_s=None if self._alone_at is None else self._clock() - self._alone_at,
            epoch=self._machine.session.terms.epoch,
            versions=versions,
            received=dict(self._received),
        )

    def _note_session(self, now: float) -> None:
        """Record whether there is a session, and log if there has been none for two pings.

        A session that does not end by silence, as when a publisher forgets a worker, begins again
        sooner than that. Observers learn of the first session at once, and before of its absence.
        A relay above without a publisher is no publisher, either.
        """
        joined = self._machine.in_session
        if joined:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = now
        patience = 2 * self._machine.timing.ping
        self._cut_off = self._lost_at is not None and now - self._lost_at >= patience
        far = self._machine.session.terms.cut_off_at
        alone, at = self._alone, self._alone_at
        if self._cut_off:
            refused = "refuses it" if self._ready.refused else "does not answer"
            alone, at = f"{self._upstream()} {refused}", self._lost_at
        elif joined:
            lacks = f"the relay at {self._upstream()} has none"
            alone, at = (lacks, far) if far is not None else ("", None)
        if at != self._alone_at:
            self._alone_at = at
            self._below.decide(lambda machine, _now: machine.cut_off(at))
        starts = self._noted is None or (joined and not self._noted)
        if bool(alone) == bool(self._alone) and not starts:
            return
        self._alone, self._noted = alone, joined
        name = self._machine.identity.name
        if alone:
            text = f"relay {name} has no publisher: {alone}"
            whole = (f"{m} {p.key[1]}" for (m, named), p in self._whole.items() if not named)
            held = ", ".join(whole)
            text += f"; workers get the versions that it has ({held})" if held else ""
        elif joined:
            text = f"relay {name} has joined the publisher at {self._upstream()}"
        else:
            text = f"relay {name} has not joined the publisher at {self._upstream()} yet"
        notice = Notice(CUT_OFF if alone or not joined else REJOINED, text, name, bool(alone))
        self._below.decide(lambda _machine, _now: [notice])

    def _pass_on(self, of: Stream, versions: VersionStore) -> None:
        passed = self._passed.get(of)
        here: list[Received] = [*versions.all("staged", "ready", "applying", "running")]
        here += [] if self._falls_back(of) else versions.all("arriving")
        here = [entry for entry in here if bool(entry.announce.workers) is of[1]]
        newest = max(here, key=lambda entry: entry.key, default=None)
        if newest is not None and (passed is None or passed.precedes(newest)):
            before, passed = passed, self._begin(of, newest, passed)
            if before is not None and before is not passed:
                self._give_up(of, before, versions)
        if passed is None:
            return
        chunks = passed.chunks
        if passed.has_lost_patch(versions.find(passed.key, "arriving")):
            passed.give_up_patch(self._below)
        count = passed.arrived
        if chunks.restarts != passed.restarts:  # its bytes were not those of its digest
            passed.restarts = chunks.restarts
            self._below.rekey()  # since no key may seal a chunk twice, if the bytes differ (E3)
        if count != passed.count:
            passed.count = count
            self._received[of[0]] += passed.received()
            passed.send_more(self._below)
        has = versions.has(passed.key)
        if passed.undecided and versions.find(passed.key, "arriving", "staged") is None:
            passed.undecided = False
            self._below.decide(passed.commit if has else passed.abort)
            before, passed.before = passed.before, None
            if not has:  # an older version is still offered, or is received again
                passed.given_up = True
                self._passed[of] = before or passed
        else:
            self._give_up(of, passed, versions)
        kept = self._whole.get(of)
        whole = chunks.whole and not (passed.undecided or passed.given_up)
        whole = whole and (chunks.in_use or has)
        if whole and (kept is None or kept.key < passed.key):
            self._keep(of, passed)

    def _falls_back(self, of: Stream) -> bool:
        """True if a version that arrives is not offered, since its publisher is gone.

        Without an older version to offer, it is offered all the same.
        """
        return self._cut_off and of in self._whole

    def _give_up(self, of: Stream, passed: _Passed, versions: VersionStore) -> None:
        """Drop a version below that is not whole and, for now, will not be.

        The worker above has dropped it, or has lost its publisher. The last whole version is then
        offered again, unless a newer one is.
        """
        if passed.chunks.whole or passed.given_up:
            return
        back = self._falls_back(of)
        if versions.has(passed.key) and not back:
            return
        passed.given_up = True
        self._below.decide(passed.give_up)
        if (whole := self._whole.get(of)) is None:
            return
        offer = self._offer(of[0], whole.offer.layout, whole.chunks, whole.key, NO_TERMS)
        offer.names, offer.metadata = whole.offer.names, whole.offer.metadata
        offer.only, offer.companions = whole.offer.only, whole.offer.companions
        again = _Passed(offer, whole.chunks, None, None)
        self._keep(of, again)
        self._below.decide(again.announce_again)

    def _keep(self, of: Stream, passed: _Passed) -> None:
        """Keep the bytes of a whole version, instead of those that it replaces."""
        passed.keep()
        model, named = of
        for replaced in [of] if named else [of, (model, True)]:
            older = self._whole.get(replaced)
            if older is not None and older.key <= passed.key:
                self._whole.pop(replaced).keep_no_more()
        self._whole[of] = passed

    def _kept(self, model: str) -> list[_Passed]:
        return [self._whole[of] for of in ((model, False), (model, True)) if of in self._whole]

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

    def _begin(self, of: Stream, entry: Received, before: _Passed | None) -> _Passed | None:
        """Offer a version that has begun to arrive, or that has got another name."""
        model, _ = of
        announce, chunks = entry.announce, entry.chunks
        terms = AnnouncedTerms(announce.commit, announce.acknowledge, announce.hash)
        names = frozenset[tuple[int, int]]()
        runs = entry.running if isinstance(entry, RunningEntry) else None
        for whole in [] if chunks is not None or runs is None else self._kept(model):
            if entry.key > whole.key and runs is not None and whole.chunks.digest == runs.digest:
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
        named = self._renamed.get(model) if names else None
        same = named is not None and (named.epoch, named.version) == entry.key
        offer.names = names
        offer.metadata = named.metadata if named is not None and same else announce.metadata
        offer.only = frozenset(announce.workers) or None
        offer.companions = announce.companions
        older = before
        if older is not None and older.undecided:  # that one is aborted, or superseded
            older = older.before
        passed = self._passed[of] = _Passed(offer, chunks, patch, older)
        if before is not None and before.chunks.whole:  # workers may wait for the rest of it
            before.send_more(self._below)
        self._below.decide(passed.announce)
        return passed


class _Reports:
    """Passes reports of the workers below from the publisher's thread to the worker's thread.

    A report is for one welcome of the publisher above; another welcome begins anew.
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
        self._welcome: tuple[int, int] | None = None
        self._begun: tuple[int, int] | None = None  # the welcome of the last reports
        self._reports: BelowReports | None = None
        self._outgoing: deque[tuple[tuple[int, int], Below]] = deque()
        self._claim: EpochClaim | None = None

    def close(self) -> None:
        """Make the last reports, which the worker's thread sends at its end."""

        def last(machine: PublisherMachine, now: float) -> list[Effect]:
            self.collect(machine, now, closing=True)
            return []

        self._below.decide(last)
        with contextlib.suppress(ClosedError):
            result_of(self._below.status(), ANSWER_SECONDS)  # answered after that

    def collect(self, machine: PublisherMachine, now: float, *, closing: bool = False) -> None:
        """Make the reports that are due, in the publisher's thread."""
        if self._reports is None:
            self._reports = BelowReports(machine)
        claim = machine.state.claim
        recent = claim is not None and now - claim.heard_at < machine.state.timing.lost_after
        self._claim = claim if recent else None
        welcome = self._welcome
        if welcome is None:
            return
        if welcome != self._begun:
            self._begun = welcome
            self._reports.begin()
        pages = self._reports.due(welcome[1], now, closing=closing)
        if pages:
            self._outgoing += [(welcome, page) for page in pages]
            self._wake()

    def send(self) -> list[WorkerEffect]:
        """Return the effects that send the reports, in the worker's thread."""
        machine, welcome = self._machine, None
        if machine.in_session and machine.session.terms.relay:
            welcome = machine.welcomes, machine.session.terms.epoch
        if welcome != self._welcome:
            self._welcome = welcome
            self._below.decide(_nothing)  # a turn of the publisher's thread
        claim = self._claim
        effects = list[WorkerEffect]()
        if claim is not None and welcome is not None:
            effects += machine.outbid(claim.epoch, claim.started_by, self._clock())
        while self._outgoing:
            at, page = self._outgoing.popleft()
            if at == welcome:
                effects.append(Send(page))
        return effects


def _nothing(_machine: PublisherMachine, _now: float) -> list[Effect]:
    return []


def _no_segments() -> None:
    """Do nothing: without segments, a revoked worker has mapped none."""


def _ignore(_report: Report) -> None:
    """Do nothing: the worker's loop is not there yet."""
