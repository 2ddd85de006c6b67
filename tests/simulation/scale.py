"""How many messages reach a publisher with many workers behind relays, and with few direct ones.

    python tests/simulation/scale.py        10,000 workers behind 100 relays on three levels

The publisher's machines, of the origin and of every relay, and the reports of the relays are the
package's own. The rest is simpler than in `network.py`: a worker here only reports. It says hello,
pings, and reports that it has applied a version within a second; so does the upper side of a relay.
No bytes are carried, and nothing is lost.
"""

import argparse
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from weightbus.bus.effects import Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import RELAY, Applied, Hello, Ping, Welcome
from weightbus.bus.publisher.effects import Effect, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.reporting import BelowReports
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import VersionOffer
from weightbus.bus.structs import Message
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

EPOCH, TICK, CHUNK = 7, 0.1, 16
LAYOUT = Layout.plan([("w", "U8", (3 * CHUNK,))])
LEVELS = (10, 30, 60)  # relays on each level
JOINING = 5.0  # seconds in which all join
MOST = 1.5  # times the messages of direct workers
DIRECT = 100


class Node:
    """A publisher's machine: the origin's, or that of a relay."""

    def __init__(self, run: "Run", name: str, above: "Node | None") -> None:
        self.run, self.name, self.above = run, name, above
        state = PublisherState(EPOCH, "tcp://d:1", run.timing, origin=above is None)
        self.machine = PublisherMachine(state)
        self.heard = self.rows = self.nbytes = 0
        self.reports = None if above is None else BelowReports(self.machine)
        self.joined = False
        run.every(TICK, self.tick)

    def tick(self) -> None:
        self.perform(self.machine.tick(self.run.now))
        self.report()

    def hear(self, name: str, message: Message) -> None:
        frame = encode(message)
        self.heard += 1
        self.nbytes += len(frame)
        self.perform(self.machine.receive(name.encode(), [frame], self.run.now))
        self.report()

    def perform(self, effects: list[Effect]) -> None:
        for effect in perform(self.machine, effects, self.run.now):
            match effect:
                case Send(Welcome(), _, to):
                    self.run.welcomed(to.decode())
                case Resolve(_, receipt, achieved):
                    self.run.resolved(len(receipt.workers), achieved)
                case _:
                    pass

    def report(self) -> None:
        if self.reports is not None and self.above is not None and self.joined:
            for page in self.reports.due(EPOCH, self.run.now):
                self.run.after(0.001, self.above.hear, self.name, page)

    def offer(self, number: int, data: bytes) -> None:
        """Offer a version that the relay has received."""
        offer = offer_of(data)
        offer.key = EPOCH, number
        self.perform(self.machine.pass_on(offer, self.run.now)[1])


def offer_of(data: bytes) -> VersionOffer:
    """Return an offer of a version."""
    offer = VersionOffer.of("a", LAYOUT, CHUNK, PlainSnapshot(np.frombuffer(data, np.uint8)))
    hash_all(offer)
    return offer


class Run:
    """One run.

    Args:
        seed: Which.
        workers: How many there are, behind the relays of the last level, or of the origin.
        levels: How many relays there are on each level.
    """

    def __init__(self, seed: int, workers: int, levels: Sequence[int] = ()) -> None:
        self.rng, self.now, self.timing = random.Random(seed), 0.0, Timing()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self.receipts: list[tuple[int, bool]] = []
        self.origin = Node(self, "origin", None)
        self.relays: dict[str, Node] = {}
        level = [self.origin]
        for depth, count in enumerate(levels):
            level = [Node(self, f"r{depth}.{i}", level[i % len(level)]) for i in range(count)]
            self.relays |= {node.name: node for node in level}
        self.places = {f"w{i}": level[i % len(level)] for i in range(workers)}
        self.places |= {r.name: r.above for r in self.relays.values() if r.above is not None}
        for name, at in self.places.items():
            features = [RELAY] if name in self.relays else []
            instance = f"{self.rng.getrandbits(128):032x}"
            hello = Hello(name=name, instance=instance, models={"a": None}, features=features)
            self.after(self.rng.random() * JOINING / 2, at.hear, name, hello)
            start = JOINING / 2 + self.rng.random() * self.timing.ping
            self.after(start, self.ping, name, at)

    def after(self, delay: float, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), act, args))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.after(seconds, again)

        self.after(self.rng.random() * seconds, again)

    def ping(self, name: str, at: Node) -> None:
        at.hear(name, Ping(token=1, subscribed=True))
        self.after(self.timing.ping, self.ping, name, at)

    def welcomed(self, name: str) -> None:
        if name in self.relays:
            self.relays[name].joined = True

    def resolved(self, workers: int, achieved: bool) -> None:
        self.receipts.append((workers, achieved))

    def run_until(self, end: float) -> None:
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, act, args = heapq.heappop(self._agenda)
            act(*args)
        self.now = end

    def publish(self, number: int) -> None:
        """Publish a version, which all have applied within a second."""
        data = self.rng.randbytes(LAYOUT.nbytes)
        terms = PublishTerms(timeout=30.0)
        call, effects = self.origin.machine.publish(
            number, offer_of(data), terms, self.now, self.now
        )
        self.origin.perform(effects)
        digest = call.version.chunks.digest
        applied = Applied(model="a", epoch=EPOCH, version=number, digest=digest)
        for relay in self.relays.values():
            self.after(0.01, relay.offer, number, data)
        for name, at in self.places.items():
            self.after(0.02 + self.rng.random(), at.hear, name, applied)

    def run(self, versions: int) -> float:
        """Run to the end; return the messages that reached the origin each second."""
        self.run_until(JOINING)
        before = self.origin.heard
        for number in range(1, versions + 1):
            self.publish(number)
            self.run_until(self.now + 2.0)
        return (self.origin.heard - before) / (self.now - JOINING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the messages a second; return 1 if they are too many."""
    parser = argparse.ArgumentParser(description="Count the messages at a publisher.")
    parser.add_argument("--workers", type=int, default=10_000, help="behind the relays")
    parser.add_argument("--versions", type=int, default=3, help="one every two seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    direct = Run(options.seed, DIRECT).run(options.versions)
    tree = Run(options.seed, options.workers, LEVELS)
    through = tree.run(options.versions)
    known = [peer for peer in tree.origin.machine.state.roster if not peer.relay]
    right = all(peer.runs("a") == (EPOCH, options.versions) for peer in known)
    complete = tree.receipts == [(options.workers, True)] * options.versions
    ratio = through / direct
    relays = " + ".join(map(str, LEVELS))
    print(f"{DIRECT} direct workers: {direct:.0f} messages/s at the publisher")
    print(f"{options.workers} workers behind {relays} relays: {through:.0f}, {ratio:.2f} times")
    print(f"{len(known)} workers on the roster; receipts (workers, achieved): {tree.receipts}")
    print(f"{tree.origin.nbytes / 1e6:.1f} MB in all, {time.monotonic() - begun:.0f} s")
    fine = right and complete and len(known) == options.workers and ratio <= MOST
    print("fine" if fine else "NOT fine")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
