"""A small world: a publisher, some workers, and a network that loses or doubles a few messages.

A state of the world is one of each process and what is on its way between them. `after` tells what
can happen in it: a message arrives, is lost or doubled; time passes, and with it every timer may
end; a user takes a version, applies it or fails to; the trainer publishes; a process is killed and
starts again. Messages of one connection stay in order. One that is made anew is another, and what
was on its way on the old one is lost.

A *free* world leaves nothing out: each process has a clock of its own, that ticks before or after
anything else. In a *prompt* one clocks tick together, and they, users and trainers act only while
nothing is on its way; what is on its way for two workers arrives for the first one first. So it has
a fraction of the states, and room for more of everything: what a message meets that comes late is
left to free worlds, but for those that come again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from weightbus.tests.exploring.nodes import Nodes
from weightbus.tests.exploring.relayed import RelayedSide
from weightbus.tests.exploring.sides import MODEL, Did, Event, Key, PublisherSide, WorkerSide

DOWN = -1  # the node of a publisher that does not run
NONE: Key = (0, 0)

Queue = tuple[Any, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """How large a world is.

    Attributes:
        publishes: What the trainer publishes, in order, as (commit, wait).
        workers: How many there are.
        faults: Messages that are lost or doubled, in all.
        restarts: Processes that are killed, in all.
        failures: Applies that fail, in all.
        memory: Whether a publisher that starts again offers what was the latest, and workers
            understand `rename`.
        patched: Whether workers take patches, and publishers make them. What fails may be one, too.
        free: Whether clocks, users and trainers act while messages are on their way.
        talk: In a free world, messages of a worker on their way at which its clock stands still.
        relay: Whether the workers are at a relay.
        queue: Published messages on their way to a worker at which more are dropped; and two more
            where there are patches, since a version that is not a patch has another chunk.
    """

    publishes: tuple[tuple[str, str], ...] = (("auto", "applied"), ("auto", "applied"))
    workers: int = 2
    faults: int = 1
    restarts: int = 1
    failures: int = 0
    memory: bool = False
    patched: bool = False
    free: bool = False
    talk: int = 1
    relay: bool = False
    queue: int = 3


class Place(NamedTuple):
    """A worker, and what is on its way between it and the publisher."""

    number: int
    node: int
    incarnation: int = 0
    up: Queue = ()
    down: Queue = ()
    data: Queue = ()
    asks: Queue = ()  # subscriptions on their way
    topics: frozenset[bytes] = frozenset()  # those that the publisher knows of
    ran: frozenset[Key] = frozenset()  # all that was ever applied under its name
    refused: frozenset[Key] = frozenset()  # what its user failed to apply

    @property
    def name(self) -> str:
        """What the worker is called."""
        return f"w{self.number}"

    @property
    def identity(self) -> bytes:
        """What the publisher knows its connection by."""
        return f"{self.name}#{self.incarnation}".encode()

    @property
    def calm(self) -> bool:
        """Whether nothing is on its way."""
        return not (self.up or self.down or self.data or self.asks)


class Facts(NamedTuple):
    """What is so besides.

    Attributes:
        epoch: Of the publisher that runs, or will.
        labels: What was published, and what lies in it.
        published: How often the trainer has.
        taken: Whether it has memory for the next version, and is copying.
        settled: The latest version on disk.
        aborted: Versions that nobody may apply.
    """

    epoch: int = 1
    labels: tuple[tuple[Key, int], ...] = ()
    published: int = 0
    taken: bool = False
    settled: Key = NONE
    aborted: frozenset[Key] = frozenset()


class Used(NamedTuple):
    """How much of what a world allows has happened."""

    faults: int = 0
    restarts: int = 0
    failures: int = 0


class State(NamedTuple):
    """A state of the world, by numbers."""

    publisher: int
    places: tuple[int, ...]
    facts: int
    used: Used


class Move(NamedTuple):
    """What can happen at a place: the place after it, and what others learn of it."""

    text: str
    place: int
    tell: Event | None = None  # what reaches the publisher
    claims: tuple[Did, ...] = ()


class Table(Generic[T]):
    """Values, each kept once and known by its number."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._each: list[T] = []

    def of(self, value: T) -> int:
        """Return the number of a value."""
        number = self._numbers.setdefault(value, len(self._each))
        if number == len(self._each):
            self._each.append(value)
        return number

    def __getitem__(self, number: int) -> T:
        return self._each[number]


class World:
    """What can happen."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._queue = rules.queue + 2 * rules.patched
        self.workers = Nodes[WorkerSide](WorkerSide.act, WorkerSide.check)
        kind = RelayedSide if rules.relay else PublisherSide
        self.publishers = Nodes[PublisherSide](kind.act, kind.check)  # type: ignore[arg-type] # pyright: ignore
        self.places, self.facts = Table[Place](), Table[Facts]()
        self._moves: dict[tuple[int, str], list[Move]] = {}
        self._heard: dict[tuple[int, Did], int] = {}
        self._rosters: dict[int, list[tuple[int, Key]]] = {}

    def beginning(self) -> State:
        """Return the state in which nobody has said anything."""
        publisher = self._publisher(1)
        indexes = range(self.rules.workers)
        places = tuple(self.places.of(Place(i, self._worker(i, 0))) for i in indexes)
        return State(publisher, places, self.facts.of(Facts()), Used())

    def _publisher(self, epoch: int) -> int:
        side = PublisherSide(epoch, patched=self.rules.patched)
        return self.publishers.of(RelayedSide(epoch) if self.rules.relay else side)

    def _on_way(self, state: State) -> str:
        """Return what is on its way between a publisher and a relay."""
        side = None if state.publisher == DOWN else self.publishers[state.publisher]
        return side.on_way if isinstance(side, RelayedSide) else ""

    def _worker(self, index: int, incarnation: int) -> int:
        renaming, patched = self.rules.memory, self.rules.patched
        side = WorkerSide(f"w{index}", incarnation, renaming=renaming, patched=patched)
        return self.workers.of(side)

    # What can happen.

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what can happen, and the state after it."""
        moving = [i for i, place in enumerate(state.places) if not self.places[place].calm]
        used = state.used
        if used.faults < self.rules.faults:
            faulty = state._replace(used=used._replace(faults=used.faults + 1))
            for i in moving:
                yield from self._moved(faulty, i, "faults")
            if self.rules.relay and state.publisher != DOWN:
                yield "the relay's connection breaks", self._tell(faulty, ("cut",))
        prompt = not self.rules.free
        if way := self._on_way(state):
            yield f"the relay's connection, {way}", self._tell(state, ("carry", way))
            if prompt:
                return
        for i in moving[:1] if prompt else moving:
            yield from self._moved(state, i, "arrivals")
        if not (moving and prompt):
            yield from self._acts(state)

    def _acts(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what processes and people do of their own accord."""
        down, used = state.publisher == DOWN, state.used
        if down:
            yield "the publisher starts", self.start(state)
        elif self.publishers[state.publisher].hashing:
            yield "a version is hashed", self._tell(state, ("hashed",))
            if not self.rules.free:
                return
        if not down:
            yield from self._publishes(state)
            if used.failures < self.rules.failures and self.publishers[state.publisher].patches:
                after = state._replace(used=used._replace(failures=used.failures + 1))
                yield "its patches are withdrawn", self._tell(after, ("withdraw",))
        for i in range(len(state.places)):
            yield from self._moved(state, i, "user")
            if used.failures < self.rules.failures:
                after = state._replace(used=used._replace(failures=used.failures + 1))
                yield from self._moved(after, i, "failing user")
        yield from self._ticks(state)
        if used.restarts < self.rules.restarts:
            yield from self._deaths(state._replace(used=used._replace(restarts=used.restarts + 1)))

    def _ticks(self, state: State) -> Iterator[tuple[str, State]]:
        if not self.rules.free:
            yield "clocks tick", self.tick(state)
            return
        places = [self.places[place] for place in state.places]
        if all(len(place.data) < self._queue for place in places):
            yield "the publisher's clock ticks", self._tell(state, ("tick",))
        kind = "tick" if state.publisher != DOWN else "lonely tick"
        for i, place in enumerate(places):
            if max(len(place.up), len(place.down)) <= self.rules.talk:
                yield from self._moved(state, i, kind)

    def _publishes(self, state: State) -> Iterator[tuple[str, State]]:
        facts = self.facts[state.facts]
        if facts.published == len(self.rules.publishes):
            return
        commit, wait = self.rules.publishes[facts.published]
        reclaimable = commit == "auto" and self.publishers[state.publisher].reclaimable
        if reclaimable and not facts.taken:
            yield "the trainer takes memory", self._tell(self._but(state, taken=True), ("take",))
        if facts.taken or not reclaimable:
            count = facts.published + 1
            after = self._but(state, published=count, taken=False)
            event = ("publish", count, commit, wait)
            yield f"the trainer publishes {count}", self._tell(after, event)

    def _deaths(self, state: State) -> Iterator[tuple[str, State]]:
        if self.rules.relay and state.publisher != DOWN:
            again = self._tell(state, ("restart relay",))
            yield "the relay starts anew", again._replace(places=self._all_cut(again))
        facts = self.facts[state.facts]
        if state.publisher != DOWN:
            after = self._but(state, taken=False, epoch=facts.epoch + 1)
            yield (
                "the publisher is killed",
                after._replace(publisher=DOWN, places=self._all_cut(state)),
            )
        for i, number in enumerate(state.places):
            place = self.places[number]
            if place.incarnation == 0:
                node = self._worker(i, 1)
                cut = self._cut(place._replace(node=node, incarnation=1))
                yield f"{place.name} is killed and starts again", _put(state, i, cut)

    # What it leads to.

    def tick(self, state: State) -> State:
        """Let time pass for everybody."""
        kind = "tick" if state.publisher != DOWN else "lonely tick"
        state = self._tell(state, ("tick",))
        for i in range(len(state.places)):
            state = next(self._moved(state, i, kind))[1]
        return state

    def start(self, state: State) -> State:
        """Start a publisher where one was killed."""
        facts = self.facts[state.facts]
        state = state._replace(publisher=self._publisher(facts.epoch))
        if self.rules.memory and facts.settled != NONE:
            label = dict(facts.labels)[facts.settled]
            state = self._tell(state, ("offer", label, facts.settled))
        return state._replace(places=self._all_cut(state))

    def fairly(self, state: State) -> State:
        """Return the next state where nothing goes wrong and nobody publishes any more."""
        if way := self._on_way(state):
            return self._tell(state, ("carry", way))
        for i, place in enumerate(state.places):
            if not self.places[place].calm:
                return next(self._moved(state, i, "arrivals"))[1]
        if state.publisher == DOWN:
            return self.start(state)
        if self.publishers[state.publisher].hashing:
            return self._tell(state, ("hashed",))
        if self.facts[state.facts].taken:  # whoever has begun to publish goes on
            return next(self._publishes(state))[1]
        for i in range(len(state.places)):
            for _, after in self._moved(state, i, "user"):
                return after
        return self.tick(state)

    def _but(self, state: State, **changes: Any) -> State:
        facts = self.facts[state.facts]._replace(**changes)
        return state._replace(facts=self.facts.of(facts))

    def _moved(self, state: State, i: int, kind: str) -> Iterator[tuple[str, State]]:
        """Yield what can happen at a place."""
        place = state.places[i]
        moves = self._moves.get((place, kind))
        if moves is None:
            moves = self._moves[place, kind] = list(self._at(self.places[place], kind))
        for move in moves:
            after = _put(state, i, move.place)
            for claim in move.claims:
                self._check_claim(after, claim)
            yield move.text, after if move.tell is None else self._tell(after, move.tell, i)

    # At one place.

    def _at(self, place: Place, kind: str) -> Iterator[Move]:
        match kind:
            case "arrivals":
                for name in ("up", "down", "data", "asks"):
                    queue: Queue = getattr(place, name)
                    if queue:
                        text = f"{place.name} {name}: {_text(name, queue)}"
                        yield self._arrival(place, name, queue[1:], text)
            case "faults":
                yield from self._faults(place)
            case "user":
                yield from self._user(place)
            case "failing user":
                if self.workers[place.node].patches:
                    text = f"{place.name} has no memory to decode a patch"
                    yield self._told(place, ("decode", "there is no memory"), text)
                if self.workers[place.node].applying is not None:
                    for outcome in ("declined", "torn"):
                        yield self._told(place, ("apply", outcome), f"{place.name}: {outcome}")
            case _:
                yield self._told(place, ("tick", kind == "tick"), f"{place.name}'s clock ticks")

    def _faults(self, place: Place) -> Iterator[Move]:
        """A message is lost, or comes twice: at once, or behind all that is on its way."""
        for name in ("up", "down", "data"):
            queue: Queue = getattr(place, name)
            if queue:
                text = f"{place.name} {name}, %s: {_text(name, queue)}"
                lost = _left(place, name, queue[1:])
                yield Move(text % "LOST", self.places.of(lost))
                yield self._arrival(place, name, queue, text % "DOUBLED")
                if queue[1:]:
                    later = queue[1:] + queue[:1]
                    yield self._arrival(place, name, later, text % "AND LATER")

    def _user(self, place: Place) -> Iterator[Move]:
        side = self.workers[place.node]
        if side.patches:
            yield self._told(place, ("decode", ""), f"{place.name} decodes a patch")
        if side.applying is not None:
            yield self._told(place, ("apply", "applied"), f"{place.name}'s user applies")
        elif side.ready is not None:
            yield self._told(place, ("take",), f"{place.name}'s user takes")

    def _arrival(self, place: Place, name: str, left: Queue, text: str) -> Move:
        first = getattr(place, name)[0]
        place = _left(place, name, left)
        match name:
            case "up":
                return Move(text, self.places.of(place), ("hear", place.identity, (first,)))
            case "asks":
                topic, on = first
                topics = place.topics | {topic} if on else place.topics - {topic}
                after = self.places.of(place._replace(topics=topics))
                return Move(text, after, ("subscribed", topic) if on else None)
            case _:
                event = ("hear-published" if name == "data" else "hear", first)
                return self._told(place, event, text)

    def _told(self, place: Place, event: Event, text: str) -> Move:
        """Tell a worker of an event."""
        before = self.workers[place.node]
        if event in (("apply", "declined"), ("apply", "torn")) and before.applying is not None:
            place = place._replace(refused=place.refused | {before.applying.key})
        step = self.workers.step(place.node, event)
        place, claims = place._replace(node=step.node), list[Did]()
        for did in step.did:
            match did:
                case ("say", header):
                    place = place._replace(up=(*place.up, header))
                case ("subscribe", topic, on):
                    place = place._replace(asks=(*place.asks, (topic, on)))
                case ("redial",):
                    place = self.places[self._cut(place)]
                case ("applied", key, _):
                    place = place._replace(ran=place.ran | {key})
                    claims.append(did)
                case ("claims", *_):
                    claims.append(did)
                case _:
                    pass
        if event == ("tick", False):  # there is nobody to be told
            place = place._replace(up=(), asks=())
        return Move(text, self.places.of(place), claims=tuple(claims))

    def _all_cut(self, state: State) -> tuple[int, ...]:
        return tuple(self._cut(self.places[place]) for place in state.places)

    def _cut(self, place: Place) -> int:
        """The connections break, and are made anew: topics are asked for again."""
        topics = self.workers[place.node].topics
        node = self.workers.step(place.node, ("changed",)).node
        asks = tuple((topic, True) for topic in sorted(topics))
        empty = place._replace(node=node, up=(), down=(), data=(), asks=asks)
        return self.places.of(empty._replace(topics=frozenset()))

    # At the publisher.

    def _tell(self, state: State, event: Event, i: int = -1) -> State:
        """Tell the publisher of an event; what it greets with is for one worker."""
        if state.publisher == DOWN:
            return state
        step = self.publishers.step(state.publisher, event)
        state = state._replace(publisher=step.node)
        for did in step.did:
            match did:
                case ("tell", identity, _):
                    index = int(identity[1:2])
                    if self.places[state.places[index]].identity != identity:
                        state = self._tell(state, ("unreachable", identity))
                    else:
                        state = self._hear(state, index, did)
                case ("tell-all", *_):
                    for index in range(len(state.places)):
                        state = self._hear(state, index, did)
                case ("greet", *_):
                    state = self._hear(state, i, did)
                case _:
                    state = self._note(state, did)
        self._check_roster(state)
        return state

    def _hear(self, state: State, i: int, did: Did) -> State:
        """Put what the publisher says on its way to a worker."""
        before = state.places[i]
        after = self._heard.get((before, did))
        if after is None:
            place = self.places[before]
            match did:
                case ("tell", _, frames):
                    place = place._replace(down=(*place.down, frames))
                case ("greet", topic, header):
                    place = place._replace(data=(*place.data, (topic, header)))
                case (_, topic, frames):
                    if topic in place.topics and len(place.data) < self._queue:
                        place = place._replace(data=(*place.data, frames))
                case _:
                    raise AssertionError(did)
            after = self._heard[before, did] = self.places.of(place)
        return _put(state, i, after)

    def _note(self, state: State, did: Did) -> State:
        facts = self.facts[state.facts]
        match did:
            case ("published", key, label):
                assert key not in dict(facts.labels), f"{key} was published before"
                return self._but(state, labels=(*facts.labels, (key, label)))
            case ("settled", key):
                return self._but(state, settled=key)
            case ("resolved", key, achieved, states):
                return self._resolved(state, key, achieved, states)
            case _:
                raise AssertionError(did)

    # What must hold.

    def _check_claim(self, state: State, claim: Did) -> None:
        """What a worker has applied, or says that it runs, is what was published."""
        what, key, label = claim
        facts = self.facts[state.facts]
        assert dict(facts.labels)[key] == label, f"a worker {what} {key}, but has {label}"
        assert key not in facts.aborted, f"a worker {what} {key}, which was aborted"

    def _resolved(self, state: State, key: Key, achieved: bool, states: Did) -> State:
        """A receipt says what happened, and nothing else."""
        ran = {p.name: p.ran for p in map(self.places.__getitem__, state.places)}
        for name, what in states:
            if what == "applied":
                assert key in ran[name], f"{name} never applied {key}"
            elif what == "skipped":
                assert max(ran[name], default=NONE) > key, f"{name} runs nothing above {key}"
        facts = self.facts[state.facts]
        commit, wait = self.rules.publishes[dict(facts.labels)[key] - 1]
        if achieved and wait == "applied":
            there = [what for _, what in states if what in ("applied", "skipped", "left")]
            assert len(there) == len(states), f"{key} achieved with {states}"
        if commit == "together" and not achieved and facts.settled < key:
            assert not any(key in each for each in ran.values()), f"{key} was applied and aborted"
            return self._but(state, aborted=facts.aborted | {key})
        return state

    def _check_roster(self, state: State) -> None:
        """What the publisher believes of workers was so at some time."""
        known = self._rosters.get(state.publisher)
        if known is None:
            roster = self.publishers[state.publisher].machine.state.roster
            known = self._rosters[state.publisher] = [
                (int(peer.name[1:]), (running.epoch, running.version))
                for peer in roster
                if not peer.relay
                for running in peer.running.values()
            ]
        for i, key in known:
            assert key in self.places[state.places[i]].ran, f"w{i} never ran {key}"

    def restless(self, state: State) -> str:
        """Return what is wrong with a state in which all is calm; nothing if it is well."""
        if state.publisher == DOWN:
            return "there is no publisher"
        side = self.publishers[state.publisher]
        if side.open:
            return "a call of publish is open"
        if any(version.key != side.latest for version in side.versions):
            return f"{side.versions} are held, the latest is {side.latest}"
        found = (self._lag(self.places[place], side) for place in state.places)
        return "; ".join(filter(None, found))

    def _lag(self, place: Place, side: PublisherSide) -> str:
        worker, name = self.workers[place.node], place.name
        peer = side.machine.state.roster.by_name(name)
        if not worker.machine.in_session:
            return f"{name} is in no session ({worker.refusal})"
        if worker.runs < side.latest and side.latest not in place.refused:
            return f"{name} runs {worker.runs}, the latest is {side.latest}"
        if peer is None or peer.lost or peer.runs(MODEL) != worker.runs:
            return f"the roster does not know that {name} runs {worker.runs}"
        busy = worker.follower.versions.all("announced", "arriving", "staged", "ready", "applying")
        return f"{name} is still at {busy or worker.patches}" if busy or worker.patches else ""


def _put(state: State, i: int, place: int) -> State:
    places = state.places
    return state._replace(places=(*places[:i], place, *places[i + 1 :]))


def _left(place: Place, name: str, queue: Queue) -> Place:
    changes: dict[str, Any] = {name: queue}
    return place._replace(**changes)


def _text(name: str, queue: Queue) -> str:
    first = queue[0]
    return repr(first[1] if name == "data" else first if name == "up" else first[0])
