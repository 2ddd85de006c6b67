"""The state machine of a worker: takes messages, events and the time, and returns effects.

It has no sockets, threads or clocks. `session.py` has the worker's session. In a session, each
message about a model goes to the follower of that model (`follower.py`). Outside a session, the
worker keeps its staged and running versions and keeps sending hello, so it rejoins a restarted
publisher by itself.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from ...codecs.protocol_limits import INTEGER_MAX
from ...codecs.sealing import AES_256_GCM
from ..effects import (
    Connect,
    Effect,
    Examine,
    Flushed,
    Joined,
    Notice,
    Open,
    Prefault,
    Probe,
    Ready,
    Redial,
    Refused,
    Send,
    Subscribe,
)
from ..epochs import Ages
from ..errors import ProtocolError
from ..headers import Buffer, control_topic, from_publisher, token_of
from ..lease import Lease
from ..limits import CHECKS, STAGING_BYTES_MAX, Timing
from ..messages import (
    DELTA,
    PARTS,
    RELAY,
    TICKET,
    Abort,
    Announce,
    AnyChunk,
    Beacon,
    Bye,
    Check,
    Checksums,
    Chunk,
    Commit,
    End,
    Hello,
    Piece,
    Ping,
    Pong,
    Prepare,
    Refuse,
    Rekey,
    Rename,
    SealedChunk,
    SealedMessage,
    Welcome,
)
from ..observed import to_worker, unchecked
from ..protocol_limits import RENEWAL_PAUSES, WHOLE_BYTES_MAX
from ..staged import SharedMemory, SourceFetch
from ..token_bucket import TokenBucket
from . import reports
from .addresses import Addresses, Fault
from .companions import Companions
from .events import Examined, Flush, LoopEvent, Opened, Probed, Report, Wanted
from .follower import Follower, applied
from .keyring import Keyring
from .layouts import Accepts, Expected
from .session import Session
from .tables import TURNED_AWAY
from .transfer import lease_for
from .version_store import VersionStore

FLUSHING = 2**52  # a ping's token of at least this marks a flush; a smaller token is the time

# The messages about one model, and the messages about the session.
OfModel = (Abort | Announce | Beacon | Checksums | Chunk | Commit | End) | (
    Piece | Prepare | Rename | SealedChunk
)
OfSession = Check | Ping | Pong | Refuse | Rekey | Welcome


class WorkerMachine:
    """The state machine of one worker.

    Args:
        identity: The worker's hello, without models.
        models: The models that the worker subscribes to.
        accepts: Returns why a layout cannot be applied, or an empty string if it can.
        bytes_max: The largest version to stage, in bytes.
        expected: By model, the expected size and layout of its versions, where known.
        timing: The timeouts and intervals. The worker pings more often if a welcome requires that.
        keyring: Decrypts versions with the keys that arrive on the control connection; None if
            versions are not encrypted.
        addresses: The publisher's control addresses, in order of preference. They appear in texts;
            effects refer to them by index.

    Attributes:
        addresses: The addresses, and which of them the worker uses.
        session: The session with the publisher, or the attempts to begin one.
        malformed: The number of messages dropped because they violate the protocol.
    """

    def __init__(
        self,
        identity: Hello,
        models: Iterable[str],
        accepts: Accepts,
        bytes_max: int = STAGING_BYTES_MAX,
        timing: Timing | None = None,
        expected: Mapping[str, Expected] | None = None,
        keyring: Keyring | None = None,
        addresses: Sequence[str] = ("",),
    ) -> None:
        self.identity = identity
        patches = DELTA in identity.features
        given = {m: (expected or {}).get(m, Expected()) for m in models}
        complete = {m: e._replace(keyring=keyring, patches=patches) for m, e in given.items()}
        self.timing, self._keyring = timing or Timing(), keyring
        stores = {model: VersionStore() for model in complete}
        self._companions = Companions(stores)
        self.followers = {
            m: Follower(m, accepts, bytes_max, self.timing, e, self._companions, stores[m])
            for m, e in complete.items()
        }
        self._bytes_max = bytes_max
        self.addresses = Addresses(addresses, self.timing)
        self.session = Session(self.timing)
        self.welcomes = 0  # number of welcomes received
        self.malformed = 0
        self._whole = bytearray(WHOLE_BYTES_MAX)  # receives the data of one small version
        self._ages = Ages()
        # The epoch of the last hello by `outbid`, its time, and the pause before it is repeated.
        self._outbids = 0, 0.0, 0.0
        self._checks = TokenBucket(CHECKS, 0.0)

    # Incoming messages.

    def receive(self, frames: Sequence[Buffer], now: float) -> list[Effect]:
        """Process a control message. A malformed message is dropped, and raises no error."""
        return self._receive(frames, now, pushed=False)

    def receive_published(self, arrived: Sequence[Buffer] | Lease, now: float) -> list[Effect]:
        """Process a published message: its frames with the topic, or the lease of its payload."""
        effects: list[Effect] = []
        inside = self.session.phase == "inside"
        if inside and not self.session.terms.subscribed:  # the message proves the subscription
            self.session.subscribed()  # W18
            effects.append(self._ping(now))
        if not isinstance(arrived, Lease):
            return effects + (self._receive(arrived[1:], now, pushed=True) if inside else [])
        if inside and isinstance(message := arrived.message, OfModel):
            effects += self._process_of_model(message, arrived, now, pushed=True)
        if arrived.live:
            arrived.cancel()  # nothing has used the payload: its message is no longer needed
        return effects

    def place(self, frames: Sequence[Buffer], size: int) -> Lease | None:
        """Return a lease of the memory for a published message's payload, or None.

        `frames` are the topic and the header. Once the payload is complete, pass the lease to
        `receive_published`. If it will not be complete, cancel the lease. None means that the
        payload is not needed: discard it, and pass the message with an empty payload.
        """
        try:
            header, _ = from_publisher([frames[1], b""])
        except ProtocolError:
            return None
        if self.session.phase != "inside":
            return None
        keyring = self._keyring
        message = header if keyring is None else keyring.published(header, [b""], counts=False)
        if not isinstance(message, (Announce, Chunk, SealedChunk)):
            return None
        follower = self.followers.get(message.model)
        if follower is None or message.epoch != self.session.terms.epoch:
            return None
        if isinstance(message, Chunk | SealedChunk):
            return follower.place(message, size)
        fits = message.whole is not None and size == message.nbytes and not follower.takes_part
        if keyring is None and fits:
            leased = follower.versions.lend(message) if size <= WHOLE_BYTES_MAX else None
            if leased is not None:
                return leased
        if message.whole is None and not follower.wants_layout(message):
            return None
        lease = lease_for(message, size, self._whole)
        if lease is not None and keyring is not None:
            keyring.count(header)  # without a lease, the message counts when it is received
        return lease

    def in_flight_max(self) -> int:
        """Return the most requested bytes that may be in flight on the control connection."""
        return sum(follower.in_flight_max for follower in self.followers.values())

    def _receive(self, frames: Sequence[Buffer], now: float, *, pushed: bool) -> list[Effect]:
        try:
            message, payloads = to_worker(frames)
        except ProtocolError:
            self.malformed += 1  # W21
            return []
        if isinstance(message, Check):  # checks are not answered when published (W35, E1)
            return [] if pushed else self._process(message, now, pushed=False)
        keyring = self._keyring if pushed else None
        plain = message if keyring is None else keyring.published(message, payloads)
        if isinstance(plain, OfModel):
            payload = payloads[0] if payloads else None
            return self._process_of_model(plain, payload, now, pushed=pushed)
        return self._process(plain, now, pushed=pushed)

    def _process(
        self, message: OfSession | SealedMessage | None, now: float, *, pushed: bool
    ) -> list[Effect]:
        """Process a well-formed message that concerns no model. (W3)"""
        session = self.session
        if not pushed:
            session.answered(now)
        match message:
            case None | SealedMessage():  # not authentic, or sealed with an unknown key
                return []
            case Welcome():
                return [] if pushed else self._welcome(message, now)
            case Ping():
                return [Send(Pong(token=message.token))]  # W18
            case Refuse():
                if self.in_session:
                    session.heard(now, pushed=pushed)
                return self._refuse(message, now)
            case _ if session.phase != "inside":
                return []
            case _ if message.epoch != session.terms.epoch:
                # The publisher restarted, or its welcome was damaged: the answer to a hello shows
                # which epoch is right.
                return self._hello_if_due(now)
            case Rekey():
                session.heard(now, pushed=pushed)
                if self._keyring is not None:
                    self._keyring.add(message.keys, now + self.timing.lost_after)  # E6
                return []
            case Check():
                session.heard(now, pushed=pushed)
                return self._check(message, now)
            case Pong(token=token) if token >= FLUSHING:
                session.heard(now, pushed=pushed)
                return [Flushed(token - FLUSHING)]
            case Pong():
                session.heard(now, pushed=pushed)
                for each in self.followers.values():
                    each.planner.answered(message.token / 1000)
                at = now - message.cut_off_ms / 1000 if message.cut_off_ms else None
                notice = [reports.cut_off(at, now)] if session.cut_off(at) else list[Effect]()
                return notice + self._hear_of(message.epoch, message.models, now)

    def _ignores(self, chunk: AnyChunk, *, pushed: bool) -> bool:
        """True if a chunk must not change any state, since it is not authenticated."""
        follower, encrypted = self.followers.get(chunk.model), self._keyring is not None
        arriving = follower is not None and follower.versions.find(
            (chunk.epoch, chunk.version), "arriving"
        )
        unfit = isinstance(chunk, SealedChunk) != encrypted  # E1
        return unfit or (pushed and encrypted and not arriving)  # E4

    def _process_of_model(
        self,
        message: OfModel,
        payload: Buffer | Lease | None,
        now: float,
        *,
        pushed: bool,
    ) -> list[Effect]:
        """Process a well-formed message that concerns one model. (W3)"""
        session, inside = self.session, self.session.phase == "inside"
        ignored = foreign = not inside or message.epoch != session.terms.epoch
        match message:
            case SealedChunk() if not foreign:
                ignored = self._ignores(message, pushed=pushed)
            case Chunk() | Piece() if not foreign and self._keyring is not None:
                ignored = self._ignores(message, pushed=pushed)
            case _:
                pass
        if ignored:
            if not pushed:
                session.answered(now)
            # The publisher restarted, or its welcome was damaged: the answer to a hello shows which
            # epoch is right.
            return self._hello_if_due(now) if inside and foreign else []
        session.heard(now, pushed=pushed)
        follower = self.followers.get(message.model)
        if follower is None:
            return []
        match message:
            case Chunk() | SealedChunk() | Piece():
                return follower.chunk(message, payload or b"", now, pushed=pushed)
            case Checksums():
                data = payload.payload if isinstance(payload, Lease) else payload
                return follower.checksums(message, data or b"", now)
            case Announce():
                if message.workers and RELAY not in self.identity.features:
                    message = replace(message, workers=[])  # only relays use these names
                data = payload.payload if isinstance(payload, Lease) else payload
                if data is not None and self._keyring is not None:
                    sealed = message.encryption == AES_256_GCM  # else it is `unsupported` (E1)
                    data = self._keyring.payload(message, data) if sealed else None
                    if sealed and data is None:
                        return []  # the layout is requested again later (E4)
                return follower.announced(message, data, now, pushed=pushed)
            case End():
                return follower.end(message, now)
            case Commit():
                return follower.committed(message)
            case Abort():
                return follower.aborted(message, now)
            case Beacon():
                return follower.planner.hear_of(message.epoch, message.version, now)
            case Rename():
                return follower.renamed(message, now)
            case Prepare():  # map now, so that the first version does not wait for it (S11)
                wanted = session.terms.shared and message.nbytes <= self._bytes_max
                return [Prefault(message.shared, message.nbytes)] if wanted else []

    def _check(self, check: Check, now: float) -> list[Effect]:
        """Examine the current weights, unless checks arrive too often."""  # W35
        if self._checks.take(1, now):
            return [Examine(check)]
        text = "this worker was checked too often: check again in a moment"
        return [Send(unchecked(check, "busy", text))]

    def _hear_of(self, epoch: int, models: dict[str, int], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for model, version in models.items():
            if model in self.followers:
                effects += self.followers[model].planner.hear_of(epoch, version, now)
        return effects

    def _refuse(self, refuse: Refuse, now: float) -> list[Effect]:
        # Handle the publisher's refusal of a hello or of a request.
        match refuse.code:
            case "unknown-worker":
                self.session.change("unknown")  # W20
                return self._hello_if_due(now)
            case "gone" | "range" if self.in_session and refuse.model in self.followers:
                return self.followers[refuse.model].gone(refuse.epoch, refuse.version, now)
            case "no-patch" if self.in_session and refuse.model in self.followers:
                return self.followers[refuse.model].patches.refused(refuse, now)
            case code if code in TURNED_AWAY:
                return self._turned_away(Fault(code, refuse.text), now)
            case _:
                return [Notice(refuse.code, refuse.text, warning=True)]

    # Joining.

    @property
    def in_session(self) -> bool:
        """True while the worker has a session."""
        return self.session.phase == "inside"

    @property
    def applied_epoch(self) -> int:
        """The latest epoch of an applied version; a publisher of an older epoch is rejected."""
        return max((follower.epoch for follower in self.followers.values()), default=0)

    def _hello_if_due(self, now: float) -> list[Effect]:
        return self._hello(now) if self.session.may_say_hello(now) else []

    def _hello(self, now: float) -> list[Effect]:
        self.session.sent_hello(now)
        epoch, running = self.applied_epoch, {m: s.running for m, s in self.followers.items()}
        age_ms = self._ages.of(epoch, now)
        return [Send(replace(self.identity, models=running, epoch=epoch, age_ms=age_ms))]

    def hello_for(self, job: SourceFetch) -> Hello:
        """Return the hello that this worker sends to a source of a version. (N1, T5)"""
        features = [] if job.cut is None else [PARTS]
        return replace(self.identity, models={job.announce.model: None}, features=features)

    def outbid(self, epoch: int, started_by: float, now: float) -> list[Effect]:
        """Return a hello with `epoch`, a later epoch that workers behind this relay have reported.

        The publisher may then change to a later epoch. The hello is repeated after ever longer
        pauses. No effects are returned if `epoch` is not later, if a hello is not due, or without a
        session.
        """  # R10
        if not self.in_session or epoch <= self.session.terms.epoch:
            return []
        last, at, pause = self._outbids
        if epoch == last and now - at < pause:
            return []
        shortest, longest = self.timing.lost_after, RENEWAL_PAUSES * self.timing.lost_after
        pause = min(2 * pause, longest) if epoch == last else shortest
        self._outbids = epoch, now, pause
        age_ms = min(INTEGER_MAX, max(0, round((now - started_by) * 1000)))
        running = {model: follower.running for model, follower in self.followers.items()}
        self.session.sent_hello(now)
        return [Send(replace(self.identity, models=running, epoch=epoch, age_ms=age_ms))]

    def _welcome(self, welcome: Welcome, now: float) -> list[Effect]:
        if welcome.epoch < self.applied_epoch:  # W2
            text = (
                f"the publisher is of epoch {welcome.epoch}, but this worker runs weights of the "
                f"later epoch {self.applied_epoch}: connect it to the newer publisher"
            )
            if self.addresses.several:
                return self._change_over(Fault("stale-epoch", text), now)
            return [Refused("stale-epoch", text)]
        self.welcomes += 1
        self._ages.record(welcome.epoch, welcome.age_ms, self.applied_epoch, now)
        self.session.welcomed(now)
        if self.in_session and welcome.epoch == self.session.terms.epoch:
            self.session.welcomed_again(welcome)
            if self._keyring is not None:
                self._keyring.add(welcome.keys, now + self.timing.lost_after)
            ticket = token_of(welcome, TICKET)
            dial = [Connect(self.session.terms.data, ticket)] if ticket else []
            return dial + self._hear_of(welcome.epoch, welcome.models, now)  # W29
        if welcome.shared is None:
            return self._enter(welcome, None, now)
        self.session.change("located", welcome)
        return [Open("", (welcome.epoch, 0), welcome.shared, 0)]

    def _enter(self, welcome: Welcome, memory: SharedMemory | None, now: float) -> list[Effect]:
        """Begin the session; `memory`: the publisher's; None: it cannot be read. (W28, S2)"""
        shared, before = memory is not None, self.session.terms.data
        self.session.begin(welcome, now, shared=shared)
        self.addresses.welcomed(now)
        if self._keyring is not None:
            self._keyring.begin(welcome.keys, now + self.timing.lost_after)
        effects: list[Effect] = [Joined(welcome.epoch)]
        if (ticket := token_of(welcome, TICKET)) or welcome.data != before:  # K7
            effects.append(Connect(welcome.data, ticket))
        if shared:  # before the publisher pushes or hashes anything for this worker
            effects.append(self._ping(now))
        for model, follower in self.followers.items():
            effects.append(Subscribe(control_topic(model), on=True))
            pieces = self.session.terms.parts and PARTS in self.identity.features
            pushed = follower.versions.mode == "following" and not (shared or pieces)
            effects.append(Subscribe(follower.patches.topic, on=pushed))
            latest = welcome.models.get(model, 0)
            effects += follower.reconnected(
                welcome.epoch, latest, now, shared=shared, pieces=pieces
            )
        return effects

    def _turned_away(self, fault: Fault, now: float) -> list[Effect]:
        """End the session, since the publisher refuses the worker; try another address if any."""
        if self.addresses.several:
            return self._change_over(fault, now)
        self.session.change("refused")
        return [Refused(fault.code, fault.text)]

    def _change_over(self, fault: Fault, now: float) -> list[Effect]:
        """Change to the next address. After the last one, report the refusals, if any."""
        addresses, effects = self.addresses, list[Effect]()
        before, first_round = addresses.name, addresses.in_first_round
        pause = addresses.leave(fault, self.session.hello_at, now)
        if first_round:  # later rounds would fill the log
            text = f"from {before} to {addresses.name}, since {fault.text}"
            effects.append(Notice("changed over", text))
        if pause and (refusal := addresses.refusal()) is not None:
            effects.append(Refused(refusal.code, refusal.text))
        return [*effects, self._dial(pause)]

    def _dial(self, pause: float = 0.0) -> Effect:
        """Start without a session at the address to which the worker has changed."""
        self.session = Session(self.timing, self.addresses.hello_at)
        return Redial(self.addresses.index, pause, same=False)

    def _return(self, now: float) -> list[Effect]:
        """Leave the current publisher and return to the first address, which answers again."""
        effects, before = self.close(), self.addresses.name
        self.addresses.go_back(self.session.hello_at, now)
        text = f"from {before} to {self.addresses.name}, which answers again"
        return [*effects, Notice("changed over", text), self._dial()]

    def _reconnect(self, now: float) -> list[Effect]:
        if self.addresses.several:
            return self._change_over(Fault("", "its publisher is silent"), now)
        text = "the publisher is silent: the weights stay in use, and this worker joins it again"
        lost: list[Effect] = (
            [Notice("lost", text, warning=True)] if self.session.change("silent") else []
        )
        self.session.redialled()
        return [*lost, Redial()]

    def handshake_refused(self, why: str, now: float) -> list[Effect]:
        """Report that a handshake failed for a wrong key, once per dial."""  # K5
        if self.addresses.several or self.session.handshake_failed(now):
            return self._turned_away(Fault("keys", why), now)
        return []

    def without_ticket(self, now: float) -> list[Effect]:
        """Return a hello, if it is due: the welcome has a ticket for a data connection."""  # K7
        return self._hello_if_due(now) if self.in_session else []

    def changed(self, now: float) -> None:
        """Record that the control connection opened, closed, or tries to connect."""
        self.session.changed(now)

    def disconnected(self, now: float) -> list[Effect]:
        """Change to the next address, as the control connection closed or cannot be opened.

        If there is only one address, this has no effect, as libzmq opens the connection again.
        """
        if not self.addresses.several:
            return []
        return self._change_over(Fault("", "its connection closed or cannot be opened"), now)

    def connected(self, now: float) -> list[Effect]:
        """Return a hello, if it is due, since the control connection is open."""
        return self._hello_if_due(now) if self.session.phase == "outside" else []

    def close(self) -> list[Effect]:
        """Return the last messages: reports of the running versions, and then a goodbye.

        The reports are repeated, if some were sent on the data connection: those may arrive after
        the goodbye, and would be ignored. The goodbye is sent outside a session, too, since a hello
        may have arrived at the publisher.
        """
        running = [(m, s.running) for m, s in self.followers.items()]
        repeat = bool(self.session.terms.upstream)
        last = [applied(model, runs) for model, runs in running if runs is not None and repeat]
        return [*last, Send(Bye())]  # W22, W34

    # Events that are not messages.

    def happened(self, event: LoopEvent, now: float) -> list[Effect]:
        """Process the result of an effect, or the outcome of a version that was ready."""
        if isinstance(event, Examined):
            return [Send(event.answer)] if self.in_session else []
        if isinstance(event, Probed):
            go_back = self.addresses.probed(now, reached=event.reached)
            return self._return(now) if go_back and self.in_session else []
        if isinstance(event, Flush):  # the publisher processes earlier messages before this ping
            terms = self.session.terms
            fields = {"subscribed": terms.subscribed, "shared": terms.shared}
            return [Send(Ping(token=FLUSHING + event.mark, **fields))] if self.in_session else []
        follower = self.followers.get(event.model)
        if follower is None:  # the event is about the publisher's probe segment
            welcome = self.session.waiting
            if not isinstance(event, Opened) or welcome is None or event.key[0] != welcome.epoch:
                return []
            return self._enter(welcome, event.memory, now)
        effects = follower.happened(event, now)
        if isinstance(event, Wanted) and not self.in_session:
            return [effect for effect in effects if not isinstance(effect, Send)]
        return effects

    def broken(self, why: str, now: float, event: LoopEvent | None = None) -> list[Effect]:
        """Recover from an exception that interrupted the handling of a message, event or tick.

        Complete versions stay. Everything else may be inconsistent: it is dropped, as after a
        temporary failure, and the session ends.
        """
        effects: list[Effect] = []
        for model, follower in self.followers.items():
            report = event if isinstance(event, Report) and event.model == model else None
            effects += follower.broken(why, now, report)
        self._companions.complete()
        ready = [e.staged for f in self.followers.values() for e in f.versions.all("ready")]
        effects += [Ready(ready[0], tuple(ready[1:]))] if ready else []
        self.session.change("unknown")
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Perform what is due at `now`."""
        key_missing = self._keyring is not None and self._keyring.lacks(now)  # drops expired keys
        if self.session.redial_due(now):
            return self._reconnect(now)
        if not self.in_session:
            return []
        effects: list[Effect] = [Probe(0)] if self.addresses.probe_due(now) else []
        if self.session.unheard(now):  # W33
            effects.append(reports.unheard(self.session.terms.data, self.timing.lost_after))
        # The applied epoch is later if an overdue apply of a later epoch has succeeded. (W3)
        behind = self.applied_epoch > self.session.terms.epoch
        if key_missing or behind:
            effects += self._hello_if_due(now)  # the welcome contains the missing key (E6)
        for follower in self.followers.values():
            effects += follower.tick(now)
        if self.session.ping_due(now):
            effects.append(self._ping(now))
            for follower in self.followers.values():
                effects += follower.repeat()
        return effects

    def _ping(self, now: float) -> Effect:
        terms = self.session.terms
        return reports.ping(now, subscribed=terms.subscribed, shared=terms.shared)
