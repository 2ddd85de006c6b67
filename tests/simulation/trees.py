"""Simulated trees: relays between the publisher and its workers.

Chaos is the same as without relays, and worse: relays are killed and start empty, are cut off, and
get other parents, as workers do. In the end all have a parent, and everybody must run the latest
version, and the publisher must know that, and the way to each worker.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from weightbus.bus.headers import encode
from weightbus.bus.limits import BUFFERS_MAX, SNAPSHOTS_MAX
from weightbus.bus.messages import Below
from weightbus.bus.publisher import reporting
from weightbus.bus.publisher.version import Version
from weightbus.bus.structs import Message

from .conditions import Faults
from .network import Simulation
from .publishers import Publisher
from .relays import PublisherBelow, Relay
from .workers import Worker

LEVELS_MAX = 3


class Tree(Simulation):
    """One run."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.tree_rng = random.Random(f"tree of {seed}")
        self.relays: list[Relay] = []
        super().__init__(seed, trace=trace)
        rng = self.tree_rng
        levels = rng.randint(1, LEVELS_MAX)
        tiers = [*range(1, levels + 1), *(rng.randint(1, levels) for _ in range(rng.randint(0, 2)))]
        self.relays = [Relay(self, f"r{i}", tier) for i, tier in enumerate(sorted(tiers))]
        added = [f"w{i}" for i in range(len(self.workers), len(self.workers) + rng.randint(0, 3))]
        more = [Worker(self, name, name) for name in added]
        self.leaves = [*self.workers, *more]
        self.workers += [*more, *self.relays]
        for process in self.workers:
            process.at = rng.choice(self.parents(process))
        for process in (*more, *self.relays):
            process.start()

    def draw(self) -> Faults:
        """Draw a network of one publisher, whose names are each those of one process."""
        return replace(super().draw(), impostor=False, successor=False, skew=0.0)

    @property
    def sources(self) -> Sequence[Publisher]:
        """Everything that a worker can be connected to."""
        return [*self.publishers, *(relay.below for relay in self.relays)]

    def parents(self, worker: Worker) -> Sequence[Publisher]:
        """Return where the address of a worker may lead to; never to a relay behind itself."""
        below = worker.tier if isinstance(worker, Relay) else LEVELS_MAX + 1
        return [*self.publishers, *(r.below for r in self.relays if r.tier < below)]

    def last_parent(self, worker: Worker) -> Publisher:
        """Return where the address of a worker leads to in the end."""
        return self.tree_rng.choice(self.parents(worker))

    def move(self, worker: Worker, parent: Publisher) -> None:
        """Have the address of a worker lead elsewhere; a relay closes its connection for that."""
        if isinstance(worker, Relay) and parent is not worker.at:
            self.hang_up(worker)
        self.met |= {"moved"} if parent is not worker.at else set()
        super().move(worker, parent)

    def to_publisher(self, worker: Worker, message: Message) -> None:
        """Carry a message; a report is lost only if the connection breaks, as on any connection."""
        if not isinstance(message, Below):
            super().to_publisher(worker, message)
        elif self.is_cut(worker):
            self.hang_up(worker)
        else:
            who = worker.at, worker.at.identity(worker)
            self.later(0.001, self.at_publisher, [encode(message)], *who)

    def hang_up(self, worker: Worker) -> None:
        """Have the connection of a worker found closed."""
        at = worker.at
        self.later(0.0, self.unreachable, at, at.identity(worker), at.incarnation)

    def through(self, worker: Worker) -> tuple[str, ...]:
        """Return the relays between the publisher and a worker."""
        at = worker.at
        if not isinstance(at, PublisherBelow):
            return ()
        return (*self.through(next(r for r in self.relays if r.below is at)), at.name)

    def _lag(self, worker: Worker) -> list[str]:
        through, who = self.through(worker), worker.process
        roster = self.publisher.machine.state.roster
        peer = roster.by_name(worker.name)
        if peer is None or peer.instance != worker.machine.identity.instance:
            return [f"{who} is not on the roster"]
        if peer.lost or peer.through != through:
            return [f"{who} is behind {through}, on the roster {peer.phase} behind {peer.through}"]
        lagging = list[str]()
        for model, follower in worker.machine.followers.items():
            versions = self.publisher.machine.state.store.get(model)
            latest = versions.latest_for(worker.name) if versions else None
            if versions is not None and latest is not None and self._hidden(through, latest):
                latest = versions.latest
                if latest is not None:  # a later one may have its memory
                    latest = versions.find(latest.version)
            running = follower.running
            runs = (running.epoch, running.version) if running else (0, 0)
            if latest is not None and runs < latest.key and self._wants(worker, latest):
                lagging.append(f"{who} runs {runs} of {model}, latest is {latest.key}")
            if peer.runs(model) != runs:
                lagging.append(
                    f"the roster has {peer.runs(model)} of {model} for {who}, which runs {runs}"
                )
        return lagging

    def _hidden(self, through: tuple[str, ...], latest: Version) -> bool:
        """Return whether a relay has a later version than one for named workers."""
        before = [relay.machine.followers[latest.model] for relay in self.relays]
        runs = [
            f.running for relay, f in zip(self.relays, before, strict=True) if relay.name in through
        ]
        later = any((r.epoch, r.version) > latest.key for r in runs if r is not None)
        return later and latest.only is not None

    def run(self) -> "Tree":
        """Run to the end."""
        super().run()
        achieved = [receipt for _, receipt, achieved in self.invariants.receipts if achieved]
        workers = [w for receipt in achieved for w in receipt.workers.values() if w.through]
        self.met |= {f"{worker.state} behind relays" for worker in workers}
        return self

    def behind(self) -> list[str]:
        """Return who does not run the latest version, or of whom the publisher knows otherwise."""
        here = {w.name for w in self.workers}
        there = [p.name for p in self.publisher.machine.state.roster if not p.lost]
        extra = [f"{name} is on the roster, and nowhere else" for name in there if name not in here]
        return [*super().behind(), *extra]

    # What must hold.

    def check_memory(self, below: PublisherBelow) -> None:
        """A relay holds few versions, however slow its workers are."""
        held = dict[str, set[int]]()
        for version in below.versions:
            held.setdefault(version.model, set()).add(id(version.chunks))
        for model, each in held.items():
            most = SNAPSHOTS_MAX + BUFFERS_MAX
            assert len(each) <= most, f"{below.name} holds {len(each)} versions of {model}"

    def check_reports(self, relay: Relay) -> None:
        """A relay sends few reports, however much changes at its workers."""
        seconds = self.now - relay.began
        rate = reporting.AT_ONCE.per_second + 1 / reporting.REPORT_SECONDS + 1 / self.timing.ping
        most = reporting.AT_ONCE.burst + rate * seconds + relay.machine.welcomes + 1
        assert relay.said <= most, f"{relay.name} sent {relay.said} reports in {seconds:.1f} s"
