"""A relay between the publisher and the workers of a scenario.

    worker ── proxy (rules) ── relay ── another proxy ── publisher

The relay stays while publishers come and go: the proxy above it leads to the publisher of now. The
relay reports the workers behind it to a publisher that takes `below`. For the Rust core, which does
not, `Behind` puts into receipts what the relay has of the workers.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from weightbus import PublishError, Relay, Settings
from weightbus.bus.limits import Timing
from weightbus.bus.net.callbacks import EventCallback, WorkerEvent
from weightbus.bus.publisher import calls
from weightbus.bus.publisher.effects import Effect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import Publication, PublishTerms
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.receipt import State
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.ledger import Weights
from weightbus.tests.conformance.proxy import Proxy
from weightbus.types import Receipt

RELAY = "relay"  # its name
WITH_KEYS = "keys-"  # so the names of scenarios with keys begin
MODELS = ("m", "policy", "critic.v2")  # all that scenarios publish
ANSWER_SECONDS = 10.0
Key = tuple[str, int, int]  # model, epoch, version

# What is not played behind a relay, with keys or without: patterns of the names of scenarios, and
# why.
LACKS: Mapping[str, str] = {
    "patched*": "a relay does not pass patches on",
    "cast-target": "a relay does not report which values a worker's dtype cannot hold",
    "stale-publisher": "the relay turns a publisher of a lower epoch away itself",
    "publisher-restart-while-receiving": "a relay sends what it has when the publisher is gone",
    "no-mixture": "a relay's workers need keys if the relay has some, whatever the publisher has",
}
# And where the Rust core publishes.
CORE_LACKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("together-*", "targeted", "metadata-renamed"),
        "the core does not know the workers behind a relay",
    ),
    "partial-target": "the core does not have workers verify what they copy from a relay's memory",
}


def lacking(scenario: str, publisher: str = "python") -> str:
    """Return why a scenario is not played behind a relay of a publisher; nothing if it is."""
    lacks = {**LACKS, **(CORE_LACKS if publisher == "rust" else {})}
    plain = scenario.removeprefix(WITH_KEYS)
    return next((why for name, why in lacks.items() if fnmatch.fnmatch(plain, name)), "")


class Above(Protocol):
    """The publisher above a relay, in this process or in another one."""

    @property
    def address(self) -> str: ...

    @property
    def data_address(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def publish_async(self, model: str, weights: Weights, **options: Any) -> "Future[Receipt]": ...

    def wait_until(
        self, wrong: Callable[[Mapping[str, WorkerStatus]], str], patience: float
    ) -> None: ...

    def close(self) -> None: ...


class Reported(Relay):
    """A relay that keeps what became of each version at the workers, as a publisher's calls do."""

    def __init__(self, upstream: str, address: str, models: Iterable[str], **options: Any) -> None:
        super().__init__(upstream, address, models, **options)
        self.loop = self._below
        self._calls: dict[Key, Publication] = {}
        machine = self.loop._machine  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        pass_on = machine.pass_on

        def opening(offered: VersionOffer, now: float) -> tuple[Version, list[Effect]]:
            version, effects = pass_on(offered, now)
            return version, effects + self._open(machine, version, now)

        machine.pass_on = opening  # type: ignore[method-assign]

    def _open(self, machine: PublisherMachine, version: Version, now: float) -> list[Effect]:
        """Open a call of a version that was just passed on; it asks workers for nothing more."""
        state = machine.state
        terms = PublishTerms(
            wait="staged" if version.terms.acknowledge == "staged" else "applied",
            timeout=float("inf"),
            hash=version.terms.hash,
        )
        peers = state.roster.targets(version.model, None, now)
        names = [peer.name for peer in peers if not peer.lost]
        call = Publication(len(self._calls) + 1, version, terms, now, names)
        call.announced = version.terms
        self._calls[version.model, *version.key] = call
        state.open(call)
        return calls.settle(state, call, now)

    def call(self, key: Key) -> Publication | None:
        """Return the call of a version, in the relay's thread; None: it was not passed on."""
        return self._calls.get(key)

    def newest(self, model: str) -> tuple[int, int]:
        """Return the epoch and number of the newest version that was passed on."""
        return max((key[1:] for key in self._calls if key[0] == model), default=(0, 0))


class Behind:
    """A publisher without `below` and the relay below it, with what scenarios use of a publisher.

    Args:
        above: The publisher.
        relay: The relay.
    """

    def __init__(self, above: Above, relay: Reported) -> None:
        self._above, self._relay = above, relay
        self.epoch = above.epoch

    def publish_async(self, model: str, weights: Weights, **options: Any) -> "Future[Receipt]":
        """Publish; the receipt has the workers behind the relay in the relay's place."""
        answer: Future[Receipt] = Future()
        settings: Settings = options.get("settings") or Settings()
        wait, needed = options.get("wait", settings.wait), options.get("require", "all")
        states: tuple[State, ...] = ("applied", "skipped")
        states += ("staged",) if wait == "staged" else ()
        deadline = self._now() + options["timeout"]

        def published(future: "Future[Receipt]") -> None:
            error = future.exception()
            if error is not None and not isinstance(error, PublishError):
                answer.set_exception(error)
                return
            receipt = error.receipt if error is not None else future.result()
            over = _Over(self._relay, receipt, deadline)
            self._relay.loop.watch(over).add_done_callback(partial(resolve, over=over))

        def resolve(future: "Future[None]", over: _Over) -> None:
            if (error := future.exception()) is not None:
                answer.set_exception(error)
                return
            receipt = over.receipt
            done = len(receipt.in_state(*states))
            wanted = len(receipt.workers) if needed == "all" else int(needed)
            if done >= wanted:
                answer.set_result(receipt)
            else:
                answer.set_exception(PublishError(f"{done} of {wanted} workers", receipt))

        self._above.publish_async(model, weights, **options).add_done_callback(published)
        return answer

    def _now(self) -> float:
        """Return the time of the relay's machine."""
        times = list[float]()

        def noted(_machine: object, now: float) -> bool:
            times.append(now)
            return True

        self._relay.loop.watch(noted).result(ANSWER_SECONDS)
        return times[0]

    def workers(self) -> dict[str, WorkerStatus]:
        """Return the workers behind the relay, as the relay knows them."""
        return {w.name: w for w in self._relay.loop.status().result(ANSWER_SECONDS)}

    def wait_until(
        self, wrong: Callable[[Mapping[str, WorkerStatus]], str], patience: float
    ) -> None:
        """Wait until nothing is wrong with what `workers()` returns.

        Raises:
            Fault: What was still wrong in the end.
        """
        future = self._relay.loop.watch(
            lambda machine, now: not wrong({w.name: w for w in machine.status(now)})
        )
        try:
            future.result(patience)
        except TimeoutError:
            future.cancel()
            raise Fault(f"after {patience:.0f} s: {wrong(self.workers())}") from None

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> None:
        """Call `callback` for each change of a worker behind the relay."""
        self._relay.loop.listen(EventCallback(callback)).result(ANSWER_SECONDS)

    def close(self) -> None:
        """End the publisher; the relay stays."""
        self._above.close()


class _Over:
    """Whether a version is over at the workers behind a relay; `receipt` has how, once it is."""

    def __init__(self, relay: Reported, receipt: Receipt, deadline: float) -> None:
        self._relay, self.receipt, self._deadline = relay, receipt, deadline

    def __call__(self, _machine: PublisherMachine, now: float) -> bool:
        """Look, in the relay's thread."""
        receipt, model = self.receipt, self.receipt.model
        call = self._relay.call((model, receipt.epoch, receipt.version))
        if call is None and self._relay.newest(model) > (receipt.epoch, receipt.version):
            # Overtaken on the way to the relay, which has passed a newer version on.
            call = self._relay.call((model, *self._relay.newest(model)))
        if call is None:
            self.receipt = replace(receipt, workers={})
            return now >= self._deadline
        if not call.resolved and now < self._deadline:
            return False
        resolved = call.resolved
        workers = dict(call.resolve(now, call.version.chunks.digest).workers)
        call.resolved = resolved
        if call.version.key != (receipt.epoch, receipt.version):
            workers = {
                name: replace(w, state="skipped" if w.state == "applied" else w.state)
                for name, w in workers.items()
            }
        self.receipt = replace(receipt, workers=workers)
        return True


class Between:
    """The relay of a scenario, and the proxy above it.

    Args:
        patience: Seconds for anything that must come.
        reports: Whether publishers take the relay's reports of the workers behind it.

    Attributes:
        proxy: Above the relay, with no rules.
        relay: The relay, once there was a publisher.
    """

    def __init__(self, patience: float, *, reports: bool) -> None:
        self._patience, self._reports = patience, reports
        self.proxy = Proxy(patience)
        self.relay: Relay | None = None

    def put_below(
        self,
        above: Above,
        timing: Timing,
        address: str,
        advertise: str | None,
        *,
        keys: Path | None,
        rekey: float,
    ) -> Above | Behind:
        """Return a publisher with the relay below it, once the relay receives from it.

        Args:
            above: The publisher, which advertises the proxy's data port.
            timing: The times of the publisher, and of the relay.
            address: The address for workers.
            advertise: The data address that workers receive.
            keys: The folder of all keys, if there are any.
            rekey: The lifetime of a group key.
        """
        self.proxy.lead_to(above.address, above.data_address)
        if self.relay is None:
            settings = Settings(
                ping=timing.ping, lost_after=timing.lost_after, advertise=advertise, rekey=rekey
            )
            kind = Relay if self._reports else Reported
            at = self.proxy.address, address, MODELS
            self.relay = kind(*at, name=RELAY, keys=keys, settings=settings)

        def wrong(known: Mapping[str, WorkerStatus]) -> str:
            return "" if RELAY in known else "the relay has not joined"

        above.wait_until(wrong, self._patience)
        return Behind(above, self.relay) if isinstance(self.relay, Reported) else above

    def addresses(self) -> tuple[str, str]:
        """Return the control address and the data address of the relay."""
        assert self.relay is not None
        return self.relay.address, self.relay.data_address

    def close(self) -> None:
        """End the relay and the proxy."""
        if self.relay is not None:
            self.relay.close()
        self.proxy.close()
