"""What a scenario plays on: publishers behind the proxy, workers, and what must hold at its end."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from weightbus import Publisher, PublishError, Settings, WeightBusError
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.bus.trust.grants import Role
from weightbus.bus.trust.keys import WORKERS, generate
from weightbus.tests.client.settling import settled
from weightbus.tests.conformance.driver import WAIT_SECONDS, Driver, Fault, Options
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.ledger import Bytes, Ledger, Weights
from weightbus.tests.conformance.proxy import Proxy
from weightbus.tests.conformance.relaying import RELAY, Between
from weightbus.tests.conformance.rules import Which
from weightbus.types import Receipt

PING, LOST_AFTER = 0.2, 4.0  # seconds: the publisher's timers
CHUNK_BYTES = 4096
ANYBODY = "*"  # whom a key is for, if a scenario does not say
EPOCH = 1_000  # of the first publisher; each later one of a scenario takes the next


@dataclass(frozen=True, slots=True)
class Told:
    """A publish under way: its receipt is to come."""

    future: "Future[Receipt]"
    content: Bytes


class Watched(Publisher):
    """A publisher whose view of its workers can be waited for."""

    def wait_until(
        self, wrong: Callable[[Mapping[str, WorkerStatus]], str], patience: float
    ) -> None:
        """Wait until nothing is wrong with what `workers()` says.

        Raises:
            Fault: What was still wrong in the end.
        """
        future = self._loop.watch(
            lambda machine, now: not wrong({w.name: w for w in machine.status(now)})
        )
        try:
            future.result(patience)
        except FutureTimeout:
            future.cancel()
            raise Fault(f"after {patience:.0f} s: {wrong(self.workers())}") from None


class Stage:
    """One scenario's world.

    Args:
        command: The driver of the language.
        chance: Decides everything that is left to chance.
        folder: Where files go.
        patience: Seconds for anything that must come.
        keyed: Whether publishers and workers have keys. The proxy then sees nothing of the control
            channel but that there is something.
        publisher: The driver that publishes; None: the Python publisher, in this process.
        relayed: Whether a relay is between the publisher and the workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        chance: random.Random,
        folder: Path,
        patience: float = WAIT_SECONDS,
        *,
        keyed: bool = False,
        publisher: Sequence[str] | None = None,
        relayed: bool = False,
    ) -> None:
        self._patience, self._elsewhere = patience, publisher
        self._between = Between(patience) if relayed else None
        self.keys = folder / "keys" if keyed else None
        self._keys_of: dict[str, Path] = {}
        if self.keys is not None:
            if relayed:
                generate(self.keys, {RELAY: "relay"})
            self.make_key(ANYBODY)
        self.chance, self.ledger = chance, Ledger()
        self._changed = threading.Condition()  # of the proxy and all drivers
        self.proxy = Proxy(patience, self._changed)
        self.drivers: list[Driver] = []
        self.may_fail: set[str] = set()  # codes of `failed` that are in order
        self.may_disagree = False  # the publisher's view need not be the workers'
        self._command, self.folder = command, folder
        self._publishers: list[Watched] = []
        self._sources: list[Publisher] = []
        self._told: list[Told] = []
        self._epoch = EPOCH

    def make_key(self, name: str, role: Role = "worker") -> Path:
        """Make a key for the workers of a name, see `generate`; return their file."""
        assert self.keys is not None, "a scenario without keys"
        at = [] if self._between is None else [RELAY]
        written = generate(self.keys, {name: role}, at=at)
        self._keys_of[name] = next(file for file in written if file.parent.name == WORKERS)
        return self._keys_of[name]

    def key(self, name: str) -> Path:
        """Return the file for the workers of a name."""
        return self._keys_of[name]

    # Publishers.

    def open(self, *, epoch: int | None = None, **options: Any) -> Watched:
        """Start a publisher behind the proxy instead of any before."""
        if epoch is None:
            self._epoch += 1
        options = {
            "chunk_bytes": CHUNK_BYTES,
            "timing": Timing(ping=PING, lost_after=LOST_AFTER),
            "advertise": f"tcp://*:{self.proxy.data_port}",
            "keys": self.keys,
            **options,
        }
        options["epoch"] = self._epoch if epoch is None else epoch
        made = self._open(options) if self._between is None else self._open_above(options)
        self._publishers.append(made)
        self.chunk_bytes: int = options["chunk_bytes"]
        between = self._between
        ends = (made.address, made.data_address) if between is None else between.addresses()
        if ends[0].startswith("tcp:"):
            self.proxy.lead_to(*ends)
        return made

    def _open(self, options: dict[str, Any]) -> Watched:
        if self._elsewhere is None:
            return Watched(**settled(options))
        # It has what scenarios use.
        return cast("Watched", ProcessPublisher(self._elsewhere, folder=self.folder, **options))

    def _open_above(self, options: dict[str, Any]) -> Watched:
        """Start a publisher above the relay, which has its addresses."""
        assert self._between is not None
        below = options.pop("address", "tcp://127.0.0.1:0"), options["advertise"]
        rekey = options.get("rekey", Settings.rekey)
        options["advertise"] = f"tcp://*:{self._between.proxy.data_port}"
        made = self._open(options)
        try:
            self._between.put_below(made, options["timing"], *below, keys=self.keys, rekey=rekey)
        except BaseException:
            made.close()
            raise
        return made

    def open_source(self) -> Publisher:
        """Start a publisher that has chunks of the versions of the latest one, behind no proxy."""
        timing = Timing(ping=PING, lost_after=LOST_AFTER)
        options = {"chunk_bytes": self.chunk_bytes, "timing": timing, "keys": self.keys}
        self._sources.append(Publisher("tcp://127.0.0.1:0", **settled(options)))
        return self._sources[-1]

    @property
    def publisher(self) -> Watched:
        """The latest publisher."""
        return self._publishers[-1]

    def close_publisher(self) -> None:
        """End the latest publisher; the proxy leads nowhere until the next."""
        self.settle()
        self.publisher.close()

    def publish(self, weights: Weights, model: str = "m", **options: Any) -> Receipt:
        """Publish, wait until all that it is for have applied it, and note it.

        Raises:
            Fault: They have not.
        """
        receipt = self.outcome(weights, model, **options)
        required = options.get("require", "all")
        done = receipt.in_state("applied", "skipped", "staged")
        if len(done) < (len(receipt.workers) if required == "all" else int(str(required))):
            raise Fault(f"published, but: {receipt}")
        return receipt

    def outcome(self, weights: Weights, model: str = "m", **options: Any) -> Receipt:
        """Publish, wait for the receipt, whatever it says, and note it."""
        self.submit(weights, model, **options)
        return self.settle()[-1]

    def submit(
        self, weights: Weights, model: str = "m", source: object = None, **options: Any
    ) -> "Future[Receipt]":
        """Publish weights, from `source` if it is given, and do not wait; `settle` does."""
        content = Bytes.of(weights, self.chunk_bytes, options.get("metadata", {}))
        options = {"timeout": self._patience, **options}
        if self._elsewhere is None:  # others take them as they are
            options = settled(options)
        try:
            future = self.publisher.publish_async(model, source or weights, **options)
        except WeightBusError:  # it has no copy left: publish less often, as it says
            self.settle()
            future = self.publisher.publish_async(model, source or weights, **options)
        self._told.append(Told(future, content))
        return future

    def submit_as_one(self, models: Mapping[str, Weights]) -> None:
        """Publish versions of several models as one, and do not wait; `settle` does."""
        self.settle()
        futures = {model: Future[Receipt]() for model in models}
        for model, weights in models.items():
            content = Bytes.of(weights, self.chunk_bytes, {})
            self._told.append(Told(futures[model], content))

        def publish() -> None:
            try:
                receipts = self.publisher.publish_many(models, timeout=self._patience)
            except Exception as error:
                for future in futures.values():
                    future.set_exception(error)
            else:
                for model, future in futures.items():
                    future.set_result(receipts[model])

        threading.Thread(target=publish, daemon=True).start()

    def settle(self) -> list[Receipt]:
        """Wait for all receipts that are to come, and note them."""
        receipts: list[Receipt] = []
        for told in self._told:
            try:
                receipt, achieved = told.future.result(2 * self._patience), True
            except PublishError as error:
                receipt, achieved = error.receipt, False
            self.ledger.note(receipt, told.content, aborted=not achieved and self.aborts)
            receipts.append(receipt)
        self._told.clear()
        return receipts

    aborts = False  # whether a publish that does not achieve what it requires is aborted

    # Workers.

    def worker(
        self, name: str = "w", *, address: str | None = None, join: bool = True, **options: Any
    ) -> Driver:
        """Start a worker; with `join`, wait until it is in and pushed messages reach it."""
        if self.keys is not None:
            options = {"keys": self.key(ANYBODY), **options}
        made = Driver(
            self._command,
            address or self.proxy.address,
            name,
            Options(**options),
            self.folder,
            self._patience,
            self._changed,
        )
        self.drivers.append(made)
        if join:
            made.wait_event("joined")
            if address is None and "data" in self.proxy.reachable:
                self.wait_subscribed(name)
        return made

    def wait_joined_again(self, *workers: Driver) -> None:
        """Wait until workers have joined the latest publisher, if they do before it publishes.

        A relay that has versions takes the epoch of a later publisher with that one's first
        version.
        """
        for worker in workers if self._between is None else ():
            worker.wait_event("joined", epoch=self.publisher.epoch)

    def wait_subscribed(self, name: str) -> None:
        """Wait until the publisher knows that pushed messages reach a worker."""
        if self.keys is not None:
            self.wait_status(name, lambda status: status.road != "pulled")
            return
        self.proxy.wait_answered(lambda p: p.worker == name and p.header.get("subscribed") is True)
        if self._between is not None:  # the publisher learns of it later
            self.wait_status(name, lambda status: status.road != "pulled")

    def wait_status(self, name: str, right: Callable[[WorkerStatus], bool]) -> None:
        """Wait until the publisher's view of a worker is right."""

        def wrong(known: Mapping[str, WorkerStatus]) -> str:
            return "" if name in known and right(known[name]) else f"{name}: {known.get(name)}"

        self.publisher.wait_until(wrong, self._patience)

    def wait_forgotten(self, name: str) -> None:
        """Wait until the publisher has heard a worker's goodbye."""
        self.publisher.wait_until(
            lambda known: f"{name} is known" if name in known else "", self._patience
        )

    def which(self, *types: str, **options: Any) -> Which:
        """Return which messages a rule is about, with this scenario's chance."""
        return Which(types, chance=self.chance, **options)

    def settled(self, wrong: Callable[[], str]) -> None:
        """Wait until nothing is wrong any more with what passed the proxy and workers have told.

        Raises:
            Fault: What was still wrong in the end.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not wrong(), self._patience):
                raise Fault(f"after {self._patience:.0f} s: {wrong()}")

    # The end.

    def check(self) -> None:
        """Heal the network, and check what must hold at the end of every scenario.

        Raises:
            Fault: What does not.
        """
        self.proxy.rules = []
        self.settle()
        self.settled(lambda: next(self.ledger.false_claims(self.drivers), ""))
        if not self.may_disagree:
            self.publisher.wait_until(
                lambda seen: next(self._disagreements(seen), ""), self._patience
            )
        for driver in self.drivers:
            for fault in self.ledger.faults(driver):
                raise Fault(f"{driver.name}: {fault}")
            for event in driver.those("failed"):
                if event["code"] not in self.may_fail:
                    raise Fault(f"{driver.name} failed: {event}")

    def _disagreements(self, seen: Mapping[str, WorkerStatus]) -> Iterator[str]:
        """Yield where the publisher's view of living workers is not theirs."""
        for driver in self.drivers:
            status = seen.get(driver.name)
            if not driver.alive or status is None:
                continue
            for model in driver.options.models:
                mine, its = driver.running(model), status.running.get(model)
                if mine != its:
                    yield f"{driver.name} runs {mine} of {model}, workers() says {its}"

    def stop(self) -> None:
        """See that every worker that lives ends on SIGTERM, as it should."""
        for driver in self.drivers:
            if driver.alive:
                driver.stop()

    def close(self) -> None:
        """Leave nothing behind, whatever does not end as it should.

        Raises:
            Fault: A publisher did not.
        """
        with ExitStack() as undo:
            undo.callback(self.proxy.close)
            if self._between is not None:
                undo.callback(self._between.close)
            publishers = [*self._sources, *self._publishers]
            for close in [p.close for p in publishers] + [d.close for d in self.drivers]:
                undo.callback(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
