"""Makes a relay's reports on its workers, for the publisher above the relay. (R4)"""

import math
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from ..messages import PARTS, Below, Doing, WorkerRow
from ..observed import PAGE_BYTES
from ..protocol_limits import PAGE_ROWS_MAX
from ..token_bucket import Rate, TokenBucket
from .machine import PublisherMachine
from .roster import Peer

REPORT_SECONDS = 0.1  # the longest that an urgent change waits for more changes
AT_ONCE = Rate(8, 16)  # how many reports are sent without waiting for more changes
COMPARED_MAX = 256  # number of workers up to which each change makes `_is_due` check all of them

Outline = tuple[object, ...]


class BelowReports:
    """Makes the messages `below` of one relay, in the thread of its publisher's machine.

    A change of the version that a worker runs or has staged is urgent. Urgent changes are sent at
    once if no worker lacks the newest version any more, else together after `REPORT_SECONDS`. Other
    changes, such as the number of chunks, are sent once per ping interval. So a version costs few
    messages, however many workers there are.

    Args:
        machine: The publisher's machine of the relay.
    """

    def __init__(self, machine: PublisherMachine) -> None:
        self._machine, self._roster = machine, machine.state.roster
        machine.observers.record_always()
        self._roster.take_departed()  # the roster records departures from now on
        self._revision = self._removals = 0  # those of the roster, at the last `_collect_changes`
        self._sent: dict[str, Outline] = {}  # by worker, the outline of its last row
        self._changed: dict[str, None] = {}  # workers whose rows have changed since their last row
        self._left: list[str] = []  # workers whose departure is not reported yet
        self._last: list[Peer] = []  # those of them that changed before they left
        self._first = True  # whether the next report has all workers
        self._urgent_at = math.inf  # when the first unreported urgent change came
        self._reported_at = -math.inf
        self._at_once = TokenBucket(AT_ONCE, 0.0)

    def begin(self) -> None:
        """Report all workers next, since the publisher above has welcomed the relay."""
        self._first = True

    def due(self, epoch: int, now: float, *, closing: bool = False) -> list[Below]:
        """Return the messages that are due.

        Args:
            epoch: The epoch of the session with the publisher above.
            now: The time.
            closing: Whether this is the last report, so that every change is due.
        """
        self._collect_changes(now)
        changed = self._first or self._changed or self._left
        if not changed or not (closing or self._is_due(now)):
            return []
        peers = [*self._roster] if self._first else map(self._roster.by_name, self._changed)
        current = self._machine.state.epoch == epoch
        rows = [self._row(peer, now, current=current) for peer in peers if peer is not None]
        # The publisher above handles the `left` of a message before its rows, so the last rows of
        # workers that left go into earlier messages.
        last = [self._row(peer, now, current=current) for peer in self._last]
        early = [Below(epoch=epoch, rows=page, more=True) for page in _pages(last)]
        pages = [Below(epoch=epoch, rows=page, more=True) for page in _pages(rows)]
        pages = pages or [Below(epoch=epoch)]
        pages[0] = replace(pages[0], left=self._left[:PAGE_ROWS_MAX])
        pages = [*early, *pages]
        pages[0] = replace(pages[0], first=self._first)
        pages[-1] = replace(pages[-1], more=False)
        for peer in self._last:
            self._sent.pop(peer.name, None)
        self._left, self._last = self._left[PAGE_ROWS_MAX:], []
        self._changed, self._first = {}, False
        self._reported_at, self._urgent_at = now, math.inf
        return pages

    def _collect_changes(self, now: float) -> None:
        """Collect what has changed on the roster."""
        roster = self._roster
        if roster.revision == self._revision and roster.removals == self._removals:
            return
        for peer in roster.changed(self._revision):
            self._changed[peer.name] = None
            if self._sent.get(peer.name) != _outline(peer):
                self._urgent_at = min(self._urgent_at, now)
        if roster.removals != self._removals:
            gone = [peer for peer in roster.take_departed() if roster.by_name(peer.name) is None]
            last = [peer for peer in gone if self._sent.get(peer.name) != _outline(peer)]
            self._last += last
            known = dict.fromkeys([*self._sent, *(peer.name for peer in last)])
            left = [name for name in known if roster.by_name(name) is None]
            self._sent |= dict.fromkeys(left, ())
            for name in left:
                del self._sent[name]
                self._changed.pop(name, None)
            self._left += left
            self._urgent_at = min(self._urgent_at, now) if left else self._urgent_at
        self._revision, self._removals = roster.revision, roster.removals

    def _is_due(self, now: float) -> bool:
        if self._first or now - self._urgent_at >= REPORT_SECONDS:
            return True
        if now - self._reported_at >= self._machine.state.timing.ping:
            return True
        if math.isinf(self._urgent_at) or len(self._roster) > COMPARED_MAX:
            return False
        return not any(map(self._lacks, self._roster)) and self._at_once.take(1, now)

    def _lacks(self, peer: Peer) -> bool:
        """True if a live worker has neither applied nor staged nor failed a newest version."""
        if peer.lost or peer.relay:
            return False
        for model in peer.hello.models:
            versions = self._machine.state.store.get(model)
            if versions is None:
                continue
            newest = versions.pending or versions.latest_for(peer.name)
            if newest is None or peer.runs(model) >= newest.key:
                continue
            failed = peer.seen.failed.get(model, (0, ""))[0] == newest.version
            if not failed and not peer.has_staged(model, newest.version):
                return True
        return False

    def _row(self, peer: Peer, now: float, *, current: bool) -> WorkerRow:
        """Return a worker's row; if the epoch is not `current`, with the running versions only."""
        self._sent[peer.name] = _outline(peer)
        row = self._machine.observers.row(peer, now)
        models = row.models
        if not current:
            models = {m: Doing(epoch=d.epoch, version=d.version) for m, d in models.items()}
        else:
            models = {m: _with_patches(peer, m, d) for m, d in models.items()}
        return replace(row, instance=peer.instance, models=models)


def _with_patches(peer: Peer, model: str, doing: Doing) -> Doing:
    """Return a model's state with the patches by which its versions arrive, if there are any.

    For a worker that receives only parts of versions, the state has no `took_us`, so that its
    version does not count as received whole.
    """
    if PARTS in peer.hello.features:
        return replace(doing, took_us=0)
    arrived = peer.seen.patches.get(model) if doing.version else None
    incoming = peer.incoming.get(model)
    arriving = incoming.patch if incoming is not None else None
    if arrived is None and arriving is None:
        return doing
    return replace(doing, patch=arrived, incoming_patch=arriving)


def _outline(peer: Peer) -> Outline:
    """Return the part of a worker's state whose change is urgent."""
    staged = [(m, i.version) for m, i in peer.incoming.items() if i.phase == "staged"]
    runs = [(m, r.epoch, r.version) for m, r in peer.running.items()]
    return peer.lost, peer.through, sorted(runs), staged, sorted(peer.seen.failed.items())


def _pages(rows: list[WorkerRow]) -> Iterator[list[WorkerRow]]:
    """Yield the rows in pages that fit into a message."""
    page, room = list[WorkerRow](), PAGE_BYTES
    for row in rows:
        nbytes = len(msgspec.json.encode(row)) + 1
        if page and (nbytes > room or len(page) >= PAGE_ROWS_MAX):
            yield page
            page, room = [], PAGE_BYTES
        page.append(row)
        room -= nbytes
    if page:
        yield page
