"""Defines the receipt of a publish: what each worker did with the version, and when."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .units import span

State = Literal["applied", "staged", "failed", "lost", "behind", "skipped", "left"]
# A worker may have different states for several models. Its common state is the first of these.
LEAST_DONE: tuple[State, ...] = (
    "failed",
    "left",
    "lost",
    "behind",
    "staged",
    "skipped",
    "applied",
)


@dataclass(frozen=True, slots=True)
class WorkerReceipt:
    """What one worker did with a version.

    Attributes:
        name: The worker's name.
        state: `applied` (the worker runs the version), `staged` (it has verified the version),
            `failed` (it will not run the version; `detail` has the reason), `lost` (it died or
            became silent), `left` (it has left, and no longer counts as one of "all"),
            `behind` (it is not done; `detail` says what it is doing), `skipped` (it runs a newer
            version).
        seconds: Seconds from the call of publish to this state; None while `behind`.
        detail: A text that explains the state, or empty. If `applied`, the text says which values
            are beyond the range of the worker's dtype.
        encoding: How the version was received, from the publisher or a relay: `raw` (whole) or
            `delta-1` (as a patch on the worker's previous version). Empty: unknown, a part, or read
            from shared memory.
        nbytes: Bytes of the received version or patch, without headers and without resent bytes.
        through: The names of the relays before the worker, the nearest to the publisher first.
    """

    __module__ = "weightbus.types"

    name: str
    state: State
    seconds: float | None
    detail: str = ""
    encoding: str = ""
    nbytes: int = 0
    through: tuple[str, ...] = ()

    @property
    def patched(self) -> bool:
        """True if the version was received as a patch."""
        return self.encoding not in ("", "raw")

    def __str__(self) -> str:
        when = "" if self.seconds is None else f" after {span(self.seconds)}"
        if self.patched:
            when += f" by {self.encoding} ({self.nbytes} bytes)"
        if self.through:
            when += f" through {' and '.join(self.through)}"
        return f"{self.name} {self.state}{when}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of one publish.

    Attributes:
        model, epoch, version: The version that was published.
        nbytes: Bytes of the version's tensors (each tied tensor once).
        seconds: Seconds from the call of publish to this receipt.
        digest: A hash of the weights (layout and checksums of all chunks, not the metadata), which
            workers' bytes must have. Empty if no worker needed it, for example if all are on this
            host.
        workers: The receipt of each worker that the publish was for, by name.
        metadata: The version's metadata, as text by name.
        detail: A text on values that did not fit the dtype in which they were published; empty if
            all values did.
    """

    __module__ = "weightbus.types"

    model: str
    epoch: int
    version: int
    nbytes: int
    seconds: float
    digest: str
    workers: Mapping[str, WorkerReceipt]
    metadata: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    detail: str = ""

    def in_state(self, *states: State) -> list[str]:
        """Return the names of the workers that are in one of these states, sorted."""
        return sorted(w.name for w in self.workers.values() if w.state in states)

    def __str__(self) -> str:
        head = f"{self.model} version {self.version} ({self.nbytes} bytes, {span(self.seconds)})"
        head += f": {self.detail}" if self.detail else ""
        workers = [str(worker) for worker in self.workers.values()]
        return "; ".join([head, *(workers or ["no worker is connected: it waits for workers"])])


class Receipts(Mapping[str, Receipt]):
    """The result of `publish_many`: the receipt of each model, by its id.

    Args:
        receipts: The receipts.

    Attributes:
        workers: By name, the common state of each worker for all models that it wants. It is
            `applied` if the worker runs all of these versions (or newer ones). Otherwise it is the
            least advanced of the states for single models.
    """

    __module__ = "weightbus.types"

    def __init__(self, receipts: Mapping[str, Receipt]) -> None:
        self._receipts = dict(receipts)
        known = [w for receipt in self._receipts.values() for w in receipt.workers.values()]
        states: dict[str, list[State]] = {worker.name: [] for worker in known}
        for worker in known:
            states[worker.name].append(worker.state)
        self.workers: Mapping[str, State] = {
            name: min(each, key=LEAST_DONE.index) for name, each in states.items()
        }

    def in_state(self, *states: State) -> list[str]:
        """Return the names of the workers that are in one of these states, sorted."""
        return sorted(name for name, state in self.workers.items() if state in states)

    def __getitem__(self, model: str) -> Receipt:
        return self._receipts[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._receipts)

    def __len__(self) -> int:
        return len(self._receipts)

    def __str__(self) -> str:
        return "\n".join(map(str, self._receipts.values()))

    def __repr__(self) -> str:
        versions = ", ".join(f"{r.model} version {r.version}" for r in self._receipts.values())
        return f"<Receipts of {versions}: {self.workers}>"
