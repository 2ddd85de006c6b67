"""What happens to the demo: crashes of either side, a network cut, and how it recovers.

Nothing here waits for time to pass: each step waits until the logs say that it has been taken.
"""

import socket
import tempfile
from collections.abc import Callable, Iterable
from time import monotonic

import numpy as np

import weightbus
from weightbus.tests.compose.fleet import HOST, RUST_TRAINER, Fleet
from weightbus.tests.compose.ledger import Key, Ledger, ledger
from weightbus.tests.compose.waiting import wait_for

TRAINER = "trainer"
WORKERS = "cpp", "go", "node", "python", "rust"
OF_RUST = "-of-rust"  # how the services of the second trainer's workers end
BEHIND = {
    "relay-1": ("node-1", "python-1", "rust-1"),
    "relay-2": ("cpp-2", "go-2", "python-2"),
}
UNTOUCHED = "python"  # shows that what happens to the others costs it nothing
SECONDS = 90.0  # for any step; all of them are far faster, unless something is broken
ENOUGH = 3  # versions of each epoch that all workers must have in common


class Story:
    """What happens to one trainer and its workers.

    Attributes:
        trainer: The name of its service.
        workers: The names of theirs.
        recovery: By what happened and worker, after how many seconds it was back.
    """

    def __init__(self, trainer: str, fleet: Fleet, say: Callable[[str], None]) -> None:
        self.trainer, self._fleet, self._say = trainer, fleet, say
        self._ending = OF_RUST if trainer == RUST_TRAINER else ""
        self._untouched = UNTOUCHED + self._ending
        self.workers = [name + self._ending for name in WORKERS]
        self._others = [name for name in self.workers if name != self._untouched]
        self.recovery: dict[str, dict[str, float]] = {}

    def tell(self) -> Ledger:
        """Run it from the beginning to the end.

        Returns:
            What was published, and what every worker applied.

        Raises:
            AssertionError: Something came out that may not; it says what.
            MissedError: Something did not come in time.
        """
        self._say(f"{self.trainer}: waiting for its workers to apply, and for the health checks")
        self._wait(lambda: self._common() >= ENOUGH, "the same versions at every worker")
        self._wait_for_health("healthy", [self.trainer, *self.workers])
        if self.trainer == TRAINER:  # whose ports are published
            self._a_guest_joins()
        self._workers_crash()
        self._workers_are_cut_off()
        self._trainer_crashes()
        self._wait(lambda: self._common() >= ENOUGH, "the same versions at every worker")
        read = self._read()
        assert len(read.epochs()) == 2, f"one restart makes two epochs, not {read.epochs()}"
        return read

    def _a_guest_joins(self) -> None:
        """A worker in no container: over the published ports, with a key that was made just now."""
        self._say("a worker of this host joins, and leaves")
        line = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as keys:
            keys.write(self._fleet.new_key("guest"))
            keys.flush()
            with weightbus.Subscriber(
                f"tcp://{HOST}:5555", {"line": line}, keys=keys.name
            ) as guest:
                guest.start()
                self._wait(lambda: self._published(guest.update("line")), "what was published")
        with socket.create_connection((HOST, 5556), timeout=SECONDS) as data:
            assert data.recv(1) == b"\xff", "what is pushed has a port of its own: ZMTP's greeting"

    def _workers_crash(self) -> None:
        self._say(f"killing {', '.join(self._others)}")
        starts = {name: self._fleet.state(name).restarts for name in self._others}
        for name in self._others:
            self._fleet.crash(name)
        newest = self._newest()
        self._time_recovery(
            "crash",
            self._others,
            lambda name: (
                self._fleet.state(name).restarts > starts[name] and self._latest(name) > newest
            ),
        )

    def _workers_are_cut_off(self) -> None:
        self._say(f"cutting {', '.join(self._others)} off the network")
        starts = {name: self._fleet.state(name).restarts for name in self.workers}
        for name in self._others:
            self._fleet.cut_off(name)
        self._wait(lambda: self._lost() == set(self._others), "lost, says the trainer")
        self._wait_for_health("unhealthy", self._others)
        cut = {name: self._latest(name) for name in self._others}
        left = self._untouched
        before = self._latest(left)
        self._wait(lambda: self._latest(left)[1] >= before[1] + ENOUGH, "the one left goes on")
        self._wait_for_health("healthy", [self.trainer, left])
        assert cut == {name: self._latest(name) for name in self._others}, "cut off, yet it applied"
        self._say("connecting them again")
        for name in self._others:
            self._fleet.reconnect(name)
        newest = self._newest()
        self._time_recovery("cut", self._others, lambda name: self._latest(name) > newest)
        again = {name: self._fleet.state(name).restarts for name in self.workers}
        assert again == starts, f"started again instead of joining again: {starts}, then {again}"
        self._wait_for_health("healthy", self.workers)

    def _trainer_crashes(self) -> None:
        self._say(f"killing {self.trainer}")
        epoch = self._newest()[0]  # one that starts quickly is there before the call returns
        self._fleet.crash(self.trainer)
        self._time_recovery("restart", self.workers, lambda name: self._latest(name)[0] > epoch)
        self._wait(lambda: self._newest()[0] > epoch, "a new epoch, says the trainer")
        first = min(key for key in self._read().published.values() if key[0] > epoch)
        assert first[1] == 1, f"a new epoch starts with version 1, not {first[1]}"

    def _time_recovery(self, what: str, names: Iterable[str], back: Callable[[str], bool]) -> None:
        """Wait until all are back, and note when each of them was."""
        started, away = monotonic(), set(names)
        seconds = self.recovery.setdefault(what, {})

        def all_back() -> bool:
            for name in sorted(away):
                if back(name):
                    seconds[name] = monotonic() - started
                    away.remove(name)
            return not away

        self._wait(all_back, f"back after {what}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, SECONDS)

    def _wait_for_health(self, health: str, names: Iterable[str]) -> None:
        left = set(names)

        def look() -> bool:
            left.difference_update(
                [name for name in left if self._fleet.state(name).health == health]
            )
            return not left

        self._wait(look, f"{health}: {', '.join(sorted(left))}")

    def _read(self) -> Ledger:
        # Workers first: so the trainer's log is the longer one.
        rows = {name: self._fleet.rows(name) for name in self.workers}
        return ledger(self._fleet.rows(self.trainer), rows)

    def _common(self) -> int:
        """Return how many versions of the newest epoch every worker has applied."""
        read = self._read()
        return len(read.by_all(read.epochs()[-1])) if read.published else 0

    def _published(self, update: weightbus.types.Update | None) -> bool:
        return update is not None and update.digest in self._read().published

    def _newest(self) -> Key:
        return max(self._read().published.values())

    def _latest(self, name: str) -> Key:
        return max(self._read().applied[name], default=(0, 0))

    def _lost(self) -> set[str]:
        """Return the services of the workers that the trainer's latest line calls lost."""
        return {name + self._ending for name in self._fleet.rows(self.trainer)[-1]["lost"]}


class RelaysStory(Story):
    """What happens to workers behind two relays, of which one is cut off from the trainer."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        super().__init__(TRAINER, fleet, say)
        self.workers = sorted(name for names in BEHIND.values() for name in names)

    def tell(self) -> Ledger:
        """Run it; see `Story.tell`."""
        self._say("relays: waiting for their workers to apply, and for the health checks")
        self._wait(lambda: self._common() >= ENOUGH, "the same versions at every worker")
        self._wait_for_health("healthy", [*BEHIND, *self.workers])
        through = {name: [relay] for relay, names in BEHIND.items() for name in names}
        self._wait(lambda: self._fleet.rows(TRAINER)[-1]["through"] == through, "each by its relay")
        self._a_relay_is_cut_off()
        self._wait(lambda: self._fleet.rows(TRAINER)[-1]["through"] == through, "as before")
        return self._read()

    def _a_relay_is_cut_off(self) -> None:
        (relay, theirs), (_, others) = BEHIND.items()
        services = [*BEHIND, *self.workers]
        starts = {name: self._fleet.state(name).restarts for name in services}
        self._say(f"cutting {relay} off the trainer's network")
        self._fleet.cut_off(relay)
        self._wait(lambda: self._lost() == {relay, *theirs}, "lost, says the trainer")
        cut, before = {name: self._latest(name) for name in theirs}, self._newest()
        later = (before[0], before[1] + ENOUGH)
        self._wait(lambda: all(self._latest(o) >= later for o in others), "the others go on")
        assert cut == {name: self._latest(name) for name in theirs}, "cut off, yet it applied"
        assert self._fleet.state(relay).health == "healthy", "it has a version for who joins"
        self._say("connecting it again")
        self._fleet.reconnect(relay)
        newest = self._newest()
        self._time_recovery("cut of relay", theirs, lambda name: self._latest(name) > newest)
        again = {name: self._fleet.state(name).restarts for name in services}
        assert again == starts, f"started again instead of joining again: {starts}, then {again}"
