"""A relay process, on a simulated network: what `Relay` couples, without its threads.

The worker above and the publisher below are those of any other process here. What passes versions
on and reports the workers below is the package's own code, with its own queue between the threads:
the publisher's thread does what the worker's thread wants done a while later.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from weightbus.bus.effects import Effect, Notice, Send
from weightbus.bus.headers import TOKEN_BYTES
from weightbus.bus.limits import STAGING_BYTES_MAX
from weightbus.bus.messages import DELTA, Below, Hello
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.net.ready_queue import ReadyQueue
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import Version
from weightbus.bus.staged import Patching, StagedVersion
from weightbus.bus.worker.events import Report
from weightbus.bus.worker.keyring import Keyring
from weightbus.python_client.relay import (
    FEATURES,
    FIRST_EPOCH,
    _Forwarder,  # pyright: ignore[reportPrivateUsage]
    _Reports,  # pyright: ignore[reportPrivateUsage]
)

from .publishers import Publisher
from .watching import Watched
from .workers import Worker

if TYPE_CHECKING:
    from .trees import Tree

Decision = Callable[[PublisherMachine, float], list[PublisherEffect]]


class PublisherBelow(Publisher):
    """The publisher of a relay: it publishes nothing, and passes on what the relay receives."""

    def __init__(self, sim: "Tree", name: str) -> None:
        super().__init__(sim, name)
        self.tree = sim

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.started, sim = True, self.sim.now, self.tree
        self.sealer = sealer = sim.sealer()
        self.machine = PublisherMachine(
            PublisherState(
                FIRST_EPOCH,
                self.endpoint,
                sim.timing,
                secret=lambda: sim.tree_rng.randbytes(TOKEN_BYTES // 2).hex(),
                keys=None if sealer is None else lambda _: sealer.keys,
                origin=False,
            )
        )
        self.known = self.machine.view()
        self.listened, self.pools, self.bases, self.before = {}, {}, {}, {}
        self.copying, self.open, self.peers = set(), {}, {}
        self.promised, self.unreached_models = {}, {}
        self.work: deque[Decision] = deque()
        self.reports: _Reports | None = None  # set by the worker above
        sim.every_tick(self.incarnation, self, self.tick)

    def decide(self, how: Decision) -> None:
        """Do as `PublisherLoop`: have something done in the publisher's thread."""
        self.work.append(how)
        pause = self.tree.tree_rng.choice([0.0, 0.0, 0.002, 0.05]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.do_work, self.incarnation)

    def do_work(self, incarnation: int) -> None:
        if not self.alive or incarnation != self.incarnation:
            return
        for model in self.machine.state.store if self.work else ():
            self.discharge(model)  # another version may replace the latest
        while self.work:
            self.perform(self.work.popleft()(self.machine, self.sim.now))
        self.pump()

    def pump(self) -> None:
        """End a turn."""
        super().pump()
        if self.reports is not None:
            self.reports.collect(self.machine, self.sim.now)
        self.tree.check_memory(self)

    def listen(self, notice: Notice) -> None:
        super().listen(notice)
        self.machine.observers.happened(notice, self.sim.now)

    def told(self, send: Send) -> None:
        super().told(send)
        kind = type(send.message).__name__.lower()
        self.sim.met |= {f"{kind} below"} if kind in ("commit", "abort") else set()

    @property
    def versions(self) -> list[Version]:
        """The versions that it has."""
        return [v for versions in self.machine.state.store.values() for v in versions]


class Relay(Worker):
    """A relay process: this is its worker, which gets versions from the publisher above.

    Attributes:
        below: Its publisher.
        tier: Its place in the tree: addresses lead only to relays of lower tiers, and the origin.
    """

    def __init__(self, sim: "Tree", name: str, tier: int) -> None:
        super().__init__(sim, name, name)
        self.tree, self.tier, self.below = sim, tier, PublisherBelow(sim, name)
        self.picky, self.local, self.bytes_max = False, False, STAGING_BYTES_MAX

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.cut_until, sim = True, 0.0, self.tree
        instance = f"{sim.tree_rng.getrandbits(128):032x}"
        features = [feature for feature in FEATURES if sim.patched or feature != DELTA]
        identity = Hello(name=self.name, instance=instance, models={}, features=features)
        self.machine = Watched(
            identity,
            ["a", "b"],
            self.objection,
            self.bytes_max,
            sim.timing,
            keyring=Keyring() if sim.sealed else None,
        )
        self.topics, self.views, self.contents, self.names = set(), {}, {}, {}
        self.renamed = set()
        self.connected, self.receiving, self.refusal, self.written = "", False, "", 0
        self.ready, self.kept, self.only, self.applying = {}, [], {}, set()
        self.queue = ReadyQueue()
        self.whole: dict[tuple[str, tuple[int, int]], StagedVersion] = {}
        self.began, self.said, self.welcomes = sim.now, 0, 0
        self.below.start()
        loop = cast("PublisherLoop", self.below)  # as far as a relay knows it
        about = self.machine, self.queue, loop, lambda: self.at.endpoint
        clock = lambda: sim.now  # noqa: E731
        self.passes_on = _Forwarder(*about, clock=clock)
        self.below.reports = self.reports = _Reports(self.machine, loop, self.wake, clock)
        self.passes_on.report_by(lambda report: self.do(self.reported(report)))
        sim.every_tick(self.incarnation, self, self.tick)

    def wake(self) -> None:
        """Have a turn soon, in the worker's thread."""
        self.sim.later(0.0, self.woken, self.incarnation)

    def woken(self, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            self.perform([])

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what the machine wants, and what follows a turn of the worker's thread."""
        self.do(effects)
        self.do([*self.passes_on(), *self.reports.send()])

    def do(self, effects: Sequence[Effect]) -> None:
        """Do what the machine wants, without what follows."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Below):
                self.said += 1
        super().perform(effects)
        self.tree.check_reports(self)

    def hand_over(self, each: Sequence[StagedVersion]) -> None:
        """Do as `WorkerLoop`: put versions that are ready where `Relay` takes them."""
        self.whole |= {(one.model, one.key): one for one in each}
        for older in self.queue.put(*each):
            self.do(self.machine.happened(Report(older.model, older.key, "newer"), self.sim.now))

    def reported(self, report: Report) -> list[Effect]:
        """Take the report of a version that the relay has whole."""
        if report.what == "applied":
            staged = self.whole.pop((report.model, report.key))
            running = self.machine.followers[report.model].running
            before = (running.epoch, running.version) if running else (0, 0)
            data = staged.data.tobytes()
            self.sim.invariants.on_apply(self.name, before, staged, data)
            self.contents[staged.model] = data
            self.names[staged.model] = (staged.model, *staged.key)
            self.written = max(self.written, staged.epoch)
        return self.machine.happened(report, self.sim.now)

    def decoded(self, job: Patching, fault: str) -> None:
        super().decoded(job, fault)
        self.sim.met |= {"patched relay"} if job.live and not fault else set()

    def want(self) -> None:
        """Want what comes: a relay has no user."""

    def die(self) -> None:
        """End without a word, and the publisher below with it."""
        self.sim.met.add("relay killed")
        super().die()
        self.below.alive = False
