"""What a publisher knows: one record, which nobody but its machine reads.

What is done with a message, a call or the passing of time is a function that takes this record
first, and returns effects. It stands in a module named after it.
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
    """One worker that is not there."""

    models: frozenset[str]
    code: str
    text: str
    at: float


class Lasting:
    """What is so for some models at some workers, and since when; told once for each model."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, set[str]]] = {}
        self._told: set[str] = set()

    def news(self, found: Iterable[str], most: int) -> list[str]:
        """Return so many models that were not told yet; none once too many were."""
        if len(self._told) >= ABSENT_MAX:
            return []
        return [model for model in found if model not in self._told][:most]

    def lasting(
        self, found: dict[str, list[Peer]], since: float, now: float
    ) -> list[tuple[str, list[Peer]]]:
        """Take what is so now; return for whom it was at each look since then."""
        kept, told = self._since, list[tuple[str, list[Peer]]]()
        self._since = {}
        for model in self.news(found, ABSENT_MAX):
            names = {peer.name for peer in found[model]}
            began, before = kept.get(model, (now, names))
            names &= before
            if not names:
                continue  # others than before: it passes by itself
            self._since[model] = began, names
            if began <= since:
                self._told.add(model)
                told.append((model, [peer for peer in found[model] if peer.name in names]))
        return told


@dataclass(slots=True, eq=False)
class PublisherState:
    """What one publisher knows.

    Attributes:
        epoch: Its incarnation; workers refuse a lower one than they have applied from.
        data_endpoint: Where PUB is, as workers are told.
        timing: How long it waits.
        shared: A segment by which workers find out that they are on the same host.
        age: Says for how many seconds it has been running, by a clock that never stops; with it the
            epoch may be raised where that is sound. None: the epoch is final.
        secret: Draws 32 hexadecimal digits that nobody can guess; with it workers that can may say
            `applied` on their data connection. Where there are keys, it draws tickets for that.
        keys: Says which group keys a worker is told, where its connection is encrypted; None: what
            is published goes in the clear.
        grants: What each key may do; None: there are no keys, and everybody may do everything.
        clock: Tells the seconds since 1970, to observers as well; None: they are not told.
        recorded: Says whether an epoch may be taken by now, since whoever comes after this one
            will know of it; it must not wait. None: at any time.
        queue: How many chunks wait for one subscriber before it loses more.
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

    roster: Roster = field(init=False)  # who is there
    store: dict[str, Versions] = field(init=False, default_factory=dict[str, Versions])  # by model
    calls: dict[int, Publication] = field(init=False, default_factory=dict[int, Publication])
    pushes: dict[bytes, Push] = field(init=False, default_factory=dict[bytes, Push])  # by topic
    # By model, where its first version will lie, until that is published.
    prepared: dict[str, Prepare] = field(init=False, default_factory=dict[str, Prepare])
    malformed: int = field(init=False, default=0)  # messages that broke the protocol
    stale: bool = field(init=False, default=True)  # `PublisherView` says something else than this
    renewed_at: float = field(init=False, default=-math.inf)  # when it last took another epoch
    renewal_pause: float = field(init=False)  # seconds from then until it may take yet another
    _first_epoch: int = field(init=False)  # which it began with
    beacon_at: float = field(init=False, default=0.0)  # when the next ones are due
    # Who has left, or is refused, by name, the oldest first; and whom it has turned away unheard.
    absent: dict[str, Absence] = field(init=False, default_factory=dict[str, Absence])
    crowded: str = field(init=False, default="")
    crowded_at: float = field(init=False, default=-math.inf)  # when that was said last
    unheard: set[str] = field(init=False, default_factory=set[str])  # models that reach nobody
    told: set[str] = field(init=False, default_factory=set[str])  # and what others want
    hints_at: float = field(init=False, default=0.0)  # when to look next for what is overlooked
    misspelt: Lasting = field(init=False, default_factory=Lasting)
    untaken: Lasting = field(init=False, default_factory=Lasting)

    def __post_init__(self) -> None:
        self.roster = Roster(self.timing.lost_after)
        self.renewal_pause, self._first_epoch = self.timing.lost_after, self.epoch

    def started_ms(self) -> float:
        """Return when this publisher started, in milliseconds since 1970, by its clock of now.

        That clock may have been set since. Without one it is the epoch that it began with.
        """
        if self.clock is None or self.age is None:
            return self._first_epoch
        return 1000 * (self.clock() - self.age())

    def versions(self, model: str) -> Versions:
        """Return the versions of a model that has been published, or is about to be."""
        versions = self.store.get(model)
        if versions is None:
            versions = self.store[model] = Versions(model)
        return versions
