"""What was published, and whether what workers and receipts say of it is true."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightbus.codecs.checksum import digest_of
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of
from weightbus.tests.conformance.driver import Driver, Event
from weightbus.types import Receipt

Weights = dict[str, NDArray[Any]]
Key = tuple[str, int, int]  # model, epoch, version


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a version consists of: the CRC of each tensor, and the digest of the whole.

    `metadata` is what is said of it beside.
    """

    crcs: Mapping[str, int]
    digest: str
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, weights: Weights, chunk_bytes: int, metadata: Mapping[str, str]) -> "Bytes":
        """Compute them, from the weights alone."""
        layout = state_of(weights).layout()
        parts = {s.name: weights[s.name].tobytes() for s in layout.tensors}
        whole = np.frombuffer(b"".join(parts.values()), np.uint8)
        crcs = {name: crc32c(part) for name, part in parts.items()}
        return cls(crcs, digest_of(layout.id, whole, chunk_bytes), metadata)


@dataclass
class Ledger:
    """Everything that was published in a scenario."""

    versions: dict[Key, Bytes] = field(default_factory=dict[Key, Bytes])
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    aborted: set[Key] = field(default_factory=set[Key])

    def note(self, receipt: Receipt, content: Bytes, *, aborted: bool = False) -> None:
        """A call of publish is over."""
        key = (receipt.model, receipt.epoch, receipt.version)
        self.versions[key] = content
        self.receipts.append(receipt)
        if aborted:
            self.aborted.add(key)

    def faults(self, driver: Driver) -> Iterator[str]:
        """Yield what is wrong with the events of a driver."""
        newest: dict[str, tuple[int, int]] = {}
        for event in driver.those("applied"):
            key = (event["epoch"], event["version"])
            yield from self._faults_of(event, driver)
            if key <= newest.get(event["model"], (0, 0)):
                yield f"{_shown(event)} was applied after {newest[event['model']]}"
            newest[event["model"]] = key
        for event in driver.those("torn"):
            yield f"a reader saw parts of two versions: {event}"

    def _faults_of(self, event: Event, driver: Driver) -> Iterator[str]:
        key = (event["model"], event["epoch"], event["version"])
        known = self.versions.get(key)
        if known is None:
            yield f"{_shown(event)} was applied, but never published"
            return
        if key in self.aborted:
            yield f"{_shown(event)} was applied, but was aborted"
        hashed = event["digest"] or not driver.options.shared
        if hashed and event["digest"] != known.digest:
            yield f"{_shown(event)} has digest {event['digest']!r}, not {known.digest}"
        if (said := event.get("metadata", {})) != known.metadata:
            yield f"{_shown(event)} has metadata {said}, not {known.metadata}"
        if driver.options.tensors and not driver.options.cast:
            crcs, names = event["tensors"], known.crcs.keys()
            if driver.options.partial:
                names = (driver.options.in_place or {})[event["model"]].keys()
            wrong = [n for n in names | crcs.keys() if known.crcs.get(n) != crcs.get(n)]
            if wrong:
                yield f"{_shown(event)} has other bytes in {', '.join(sorted(wrong)[:5])}"

    def false_claims(self, drivers: list[Driver]) -> Iterator[str]:
        """Yield what receipts claim that no worker of that name has told (yet)."""
        for receipt in self.receipts:
            known = self.versions[receipt.model, receipt.epoch, receipt.version]
            if receipt.metadata != known.metadata:
                yield f"the receipt has metadata {receipt.metadata}, not {known.metadata}"
            of = {"model": receipt.model, "epoch": receipt.epoch}
            for claim in receipt.workers.values():
                mine = [d for d in drivers if d.name == claim.name]
                applied = [e["version"] for d in mine for e in d.those("applied", **of)]
                match claim.state:
                    case "applied":
                        true = receipt.version in applied
                    case "skipped":
                        true = max(applied, default=0) > receipt.version
                    case "failed":
                        version = {"version": receipt.version}
                        true = any(d.those("failed", **of, **version) for d in mine)
                    case _:
                        true = True
                if not true:
                    yield f"the receipt says {claim}, {claim.name} does not: {receipt}"


def _shown(event: Event) -> str:
    return f"version {event['version']} of {event['model']}, epoch {event['epoch']},"
