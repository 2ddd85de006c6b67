"""The state of a publisher: one record, which only its machine reads.

The functions that handle messages, calls and time take this record as their first argument and
return effects. Each is in the module of its subject (`machine.py` has the list).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..limits import ABSENT_MAX, PUSH_CHUNKS, Timing
from ..messages import Prepare, Shared
from ..trust.grants import Grants
from .publication import Publication
from .push import Push
from .roster import Peer, Roster
from .store import Versions


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker that left or was refused, and why."""

    models: frozenset[str]
    code: str
    text: str
    at: float


class PersistentCondition:
    """A condition that holds for models at workers, and since when; reported once per model."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, set[str]]] = {}
        self._reported: set[str] = set()

    def unreported(self, found: Iterable[str], most: int) -> list[str]:
        """Return at most `most` models that were not reported yet; none after `ABSENT_MAX`."""
        if len(self._reported) >= ABSENT_MAX:
            return []
        return [model for model in found if model not in self._reported][:most]

    def held_since(
        self, found: dict[str, list[Peer]], since: float, now: float
    ) -> list[tuple[str, list[Peer]]]:
        """Record where the condition holds now, in `found`; return where it held since `since`."""
        kept, due = self._since, list[tuple[str, list[Peer]]]()
        self._since = {}
        for model in self.unreported(found, ABSENT_MAX):
            names = {peer.name for peer in found[model]}
            began, before = kept.get(model, (now, names))
            names &= before
            if not names:
                continue  # no worker is the same as before: the condition ends by itself
            self._since[model] = began, names
            if began <= since:
                self._reported.add(model)
                due.append((model, [peer for peer in found[model] if peer.name in names]))
        return due


@dataclass(slots=True, eq=False)
class PublisherState:
    """The state of one publisher.

    Attributes:
        epoch: Its incarnation; workers refuse one lower than they have applied from.
        data_endpoint: The endpoint of the data socket, as sent to workers.
        timing: Its intervals and timeouts.
        shared: A segment by which workers detect that they are on the same host.
        age: Returns the seconds since the publisher started, by a clock that never stops; with it
            the publisher may take a later epoch. None: the epoch is final.
        secret: Draws 32 unguessable hexadecimal digits, for upstream tokens; with keys, for
            tickets.
        keys: Returns the group keys for a worker on an encrypted connection; None: published
            messages are not encrypted.
        grants: The permissions of each key; None: there are no keys, and peers may do everything.
        clock: Returns the seconds since 1970, also sent to observers; None: unknown.
        recorded: Returns whether an epoch is recorded for later publishers, and so may be taken;
            must not block. None: any epoch may be taken.
        queue: Number of chunks queued for one subscriber before further ones are dropped.
    """

    epoch: int
    data_endpoint: str
    timing: Timing = field(default_factory=Timing)
    shared: Shared | None = None
    age: Callable[[], float] | None = None
    secret: Callable[[], str] | None = None
    keys: Callable[[Peer], list[str]] | None = None
    grants: Grants | None = None
    clock: Callable[[], float] | None = None
    recorded: Callable[[int], bool] | None = None
    queue: int = PUSH_CHUNKS

    roster: Roster = field(init=False)
    store: dict[str, Versions] = field(init=False, default_factory=dict[str, Versions])  # by model
    calls: dict[int, Publication] = field(init=False, default_factory=dict[int, Publication])
    pushes: dict[bytes, Push] = field(init=False, default_factory=dict[bytes, Push])  # by topic
    # By model, where its first version will be in memory, until that is published.
    prepared: dict[str, Prepare] = field(init=False, default_factory=dict[str, Prepare])
    malformed: int = field(init=False, default=0)  # messages that broke the protocol
    view_outdated: bool = field(init=False, default=True)  # the last `PublisherView` is outdated
    renewed_at: float = field(init=False, default=-math.inf)  # when it last took a later epoch
    renewal_pause: float = field(init=False)  # seconds from then until it may take another
    _first_epoch: int = field(init=False)  # the epoch that it started with
    beacon_at: float = field(init=False, default=0.0)  # when the next beacons are due
    # Workers that left or were refused, by name, oldest first.
    absent: dict[str, Absence] = field(init=False, default_factory=dict[str, Absence])
    rejections: str = field(init=False, default="")  # why connections were rejected, if any were
    rejections_logged_at: float = field(init=False, default=-math.inf)  # when that was last logged
    # Models that were published to no worker; and those logged with the models workers want.
    unreached_models: set[str] = field(init=False, default_factory=set[str])
    hinted: set[str] = field(init=False, default_factory=set[str])
    hints_at: float = field(init=False, default=0.0)  # when to check next for likely mistakes
    suspected_typos: PersistentCondition = field(init=False, default_factory=PersistentCondition)
    never_applied: PersistentCondition = field(init=False, default_factory=PersistentCondition)

    def __post_init__(self) -> None:
        self.roster = Roster(self.timing.lost_after)
        self.renewal_pause, self._first_epoch = self.timing.lost_after, self.epoch

    def started_ms(self) -> float:
        """Return when this publisher started, in milliseconds since 1970.

        It uses the clock's present time, as the clock may have been set since. Without a clock it
        is the first epoch.
        """
        if self.clock is None or self.age is None:
            return self._first_epoch
        return 1000 * (self.clock() - self.age())

    def versions(self, model: str) -> Versions:
        """Return the versions of a model; create an empty store for a new model."""
        versions = self.store.get(model)
        if versions is None:
            versions = self.store[model] = Versions(model)
        return versions
