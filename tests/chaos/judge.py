"""What must hold of what everybody has told: no mixtures, no going back, digests that match.

A worker's bytes tell the serial under which they were published. What runs under one epoch and
version must be the same serial with everybody, and what the receipts say of it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from weightbus.tests.chaos.child import Event
from weightbus.tests.chaos.content import MODELS, Kind, expected
from weightbus.tests.conformance.driver import Driver

BUSY_SECONDS = 4.0  # by which a call ends late on a busy host
Key = tuple[str, int, int]  # model, epoch, version


@dataclass
class Judge:
    """Everything that was published in a round, and what is known of it by now.

    Attributes:
        kind: See `schedule.Plan`.
        serials: By model, what publishers said that they publish.
        known: What a version can be, as far as is known: serials.
        aborted: Versions that nobody may have applied.
        reasons: Workers that have said why they take no patch, and of which model and version.
    """

    kind: Kind
    serials: dict[str, set[int]] = field(
        default_factory=lambda: {model: set[int]() for model in MODELS}
    )
    known: dict[Key, set[int]] = field(default_factory=dict[Key, set[int]])
    aborted: set[Key] = field(default_factory=set[Key])
    reasons: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])

    def hear(self, events: Sequence[Event]) -> Iterator[str]:
        """Take what a publisher told; yield what is wrong with it."""
        for event in events:
            if event["event"] == "serial":
                self.serials[event["model"]].add(event["serial"])
            if event["event"] == "unpatched":
                self.reasons.add((event["worker"], event["model"], event["version"]))
            if event["event"] == "receipt":
                key = (event["model"], event["epoch"], event["version"])
                yield from self._narrow(key, {event["serial"]}, "a receipt")
                content = expected(key[0], event["serial"], self.kind)
                if event["digest"] not in ("", content.digest):
                    yield f"the receipt of {key} has digest {event['digest']}, not {content.digest}"
                yield from self._unexplained(event)
                if event["together"] and _never_staged(set(event["states"].values())):
                    self.aborted.add(key)

    def _narrow(self, key: Key, serials: set[int], who: str) -> Iterator[str]:
        before = self.known.get(key, serials)
        self.known[key] = before & serials
        if not self.known[key]:
            yield f"{who} has {key} as serial {sorted(serials)}, others as {sorted(before)}"

    def _unexplained(self, receipt: Event) -> Iterator[str]:
        """Yield who took all of a version for which it was offered a patch, and did not say why."""
        for name in receipt.get("offered", ()):
            told = (name, receipt["model"], receipt["version"]) in self.reasons
            if receipt["ways"].get(name) == "raw" and not told:
                yield f"{name} took all of a version, though there was a patch: {receipt}"

    def faults(self, driver: Driver) -> Iterator[str]:
        """Yield what is wrong with what a worker told."""
        newest: dict[str, tuple[int, int]] = {}
        for event in driver.those("applied"):
            model, at = event["model"], (event["epoch"], event["version"])
            yield from (f"{driver.name}: {fault}" for fault in self._of(event, driver))
            if at <= newest.get(model, (0, 0)):
                yield f"{driver.name} applied {at} of {model} after {newest[model]}"
            newest[model] = at
        if self.kind == "even":
            yield from (f"{driver.name}: a reader saw {e}" for e in driver.those("torn"))

    def claims(
        self,
        seen: Collection[tuple[str, str, int, int]],
        killed: Collection[str],
        drivers: Sequence[Driver],
    ) -> Iterator[str]:
        """Yield what an observer was told of workers that they never told themselves.

        Not of those that were killed, perhaps just before they would have told.
        """
        told = {
            (driver.name, event["model"], event["epoch"], event["version"])
            for driver in drivers
            for event in driver.those("applied")
        }
        for claim in sorted(set(seen) - told):
            if claim[0] not in killed and claim[3]:
                yield f"an observer was told of what never ran: {claim}"

    def _of(self, event: Event, driver: Driver) -> Iterator[str]:
        model = event["model"]
        key = (model, event["epoch"], event["version"])
        fits = {
            serial
            for serial in self.serials[model]
            if expected(model, serial, self.kind).crcs == event["tensors"]
        }
        if not fits:
            yield f"{key} is not a version that was published: {self._parts(event)}"
            return
        yield from self._narrow(key, fits, driver.name)
        if key in self.aborted:
            yield f"{key} was aborted, and applied"
        digest = expected(model, min(fits), self.kind).digest
        if event["digest"] != digest and (event["digest"] or not driver.options.shared):
            yield f"{key} has digest {event['digest']!r}, not {digest}"

    def _parts(self, event: Event) -> dict[str, list[int]]:
        """Return which tensor is of which serials, for a person."""
        model = event["model"]
        return {
            name: [
                s
                for s in sorted(self.serials[model])
                if expected(model, s, self.kind).crcs.get(name) == crc
            ]
            for name, crc in event["tensors"].items()
        }


def overdue(events: Sequence[Event], stopped: float) -> Iterator[str]:
    """Yield the calls of a trainer's ranks that took longer than they may.

    `stopped`: seconds for which a rank may have been stopped meanwhile.
    """
    for event in events:
        if event["event"] != "called":
            continue
        if event["seconds"] > event["limit"] + stopped + BUSY_SECONDS:
            yield f"a rank's call was late: {event}"


def _never_staged(states: set[str]) -> bool:
    """Whether a version that all were to stage first was given up; it was not if some began."""
    return "behind" in states and not states & {"applied", "failed", "skipped"}
