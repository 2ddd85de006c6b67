"""Whom a publisher does not reach, and why: who is not there, and what somebody has overlooked.

Those that left in order and those that were refused are kept so that a publish to nobody can say
whom it does not reach; a publisher knows nothing else of them, and the oldest go first.

Names that are misspelt, and workers that never apply, fail nothing: everybody waits, and nobody
says for what. So it is said here, once, and with it what is probably meant.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..effects import Notice, Send
from ..limits import ABSENT_MAX, ABSENT_SECONDS, CROWDED_SECONDS, Timing
from ..messages import Refuse
from .effects import Effect
from .roster import Peer, Roster
from .store import Store

LOOKS = 6  # until something is said
LIKE = 0.8  # from where two names are alike, to `difflib`: `polcy` is at 0.91, `policy_old` at 0.75
NAMES_MAX = 16  # compared at one look: workers can bring any number of them
NAMED = 3  # of many workers, in one line
# What counts names, as in `actor_1` and `actor_2`, or `actor-a` and `actor-b`: these are meant.
_COUNTS = re.compile(r"[._-]?\d+|[._-][A-Za-z]\b")


@dataclass(frozen=True, slots=True)
class Absence:
    """One worker that is not there."""

    models: frozenset[str]
    code: str
    text: str
    at: float


class Absent:
    """The workers that have left one publisher, or that it refuses.

    Attributes:
        crowded: Whom it has turned away unheard, for want of descriptors; empty: nobody.
    """

    def __init__(self) -> None:
        self._known: dict[str, Absence] = {}  # by name, the oldest first
        self.crowded, self._crowded_at = "", float("-inf")

    def note(self, name: str, models: Collection[str], code: str, text: str, now: float) -> bool:
        """Remember why a worker is not there; return whether that is news.

        A worker that is refused asks again and again, and anybody can ask under any number of
        names: a name is news once in a while, and so are only so many names.
        """
        before = self._known.get(name)
        if before is None and len(self._known) >= ABSENT_MAX:
            oldest = next(iter(self._known))
            if now - self._known[oldest].at < ABSENT_SECONDS:
                return False
            del self._known[oldest]
        if before is not None and before.code == code and now - before.at < ABSENT_SECONDS:
            return False
        self._known.pop(name, None)
        self._known[name] = Absence(frozenset(models), code, text, now)
        return True

    def forget(self, name: str) -> None:
        """A worker is there."""
        self._known.pop(name, None)

    def crowd(self, text: str, now: float) -> bool:
        """Remember who was turned away unheard, if anybody was; return whether that is news."""
        news = bool(text) and now - self._crowded_at >= CROWDED_SECONDS
        self.crowded, self._crowded_at = text, now if news else self._crowded_at
        return news

    def of(self, model: str) -> list[str]:
        """Say of every worker that wanted a model why it is not there; and who might have."""
        known = [absence.text for absence in self._known.values() if model in absence.models]
        return [*known, self.crowded] if self.crowded else known


def meant_by(name: str, names: Iterable[str]) -> str:
    """Return which of some names is probably meant by one that is none of them; empty: none is."""
    plain = _COUNTS.sub("", name)
    first = name[0].lower()  # few are wrong there: `encoder` is no `decoder`
    others = [n for n in names if _COUNTS.sub("", n) != plain and n[0].lower() == first]
    return next(iter(difflib.get_close_matches(name, others, 1, LIKE)), "")


def others_want(model: str, wanted: Sequence[str]) -> str:
    """Say what those want who are there and do not want this model."""
    shown = ", ".join(map(repr, wanted[:NAMED])) + (", ..." if len(wanted) > NAMED else "")
    meant = meant_by(model, wanted)
    question = f" (is {meant!r} meant?)" if meant else ""
    return f"no worker wants {model!r}, and those that are there want {shown}{question}"


class Oversights:
    """What one publisher finds overlooked.

    Args:
        roster, store: Its workers and versions.
        timing: How long it waits.
        told: Models of which it was said what workers want in their place.
    """

    def __init__(self, roster: Roster, store: Store, timing: Timing, told: Collection[str]) -> None:
        self._roster, self._store, self._timing = roster, store, timing
        self._told = told
        self._due = 0.0
        self._misspelt, self._untaken = _Lasting(), _Lasting()  # by model

    def tick(self, now: float) -> list[Effect]:
        """Look for what lasts too long, if it is time."""
        if now < self._due:
            return []
        self._due = now + self._timing.hint_after / LOOKS
        return [*self._who_misspells(now), *self._who_takes_nothing(now)]

    def _who_misspells(self, now: float) -> Iterator[Effect]:
        """Find models that workers want and nobody publishes, and others that are called alike."""
        published = [versions.model for versions in self._store if versions.any]
        if not published:
            return
        found = self._live(lambda p: [m for m in p.hello.models if m not in published])
        meant = {m: meant_by(m, published) for m in self._misspelt.news(found, NAMES_MAX)}
        alike = {m: found[m] for m, other in meant.items() if other}
        for model, peers in self._misspelt.lasting(alike, now - self._timing.hint_after, now):
            others = [p for p in peers if meant[model] not in p.hello.models]
            if not others:
                continue  # who wants both knows them apart
            text = (
                f"{_names(others, 'wants', 'want')} {model!r}, of which nothing is published: is "
                f"{meant[model]!r} meant?"
            )
            if meant[model] not in self._told:
                yield Notice("misspelt", text, others[0].name, warning=True)
            refuse = Refuse(code="no-model", text=text, model=model)  # P25
            yield from (Send(refuse, to=peer.identity) for peer in others)

    def _who_takes_nothing(self, now: float) -> Iterator[Effect]:
        """Find workers that have a version and have never applied any."""
        found = self._live(lambda p: [m for m in p.incoming if self._waits(p, m)])
        for model, peers in self._untaken.lasting(found, now - self._timing.hint_after, now):
            version = peers[0].incoming[model].version
            text = (
                f"{_names(peers, 'has', 'have')} version {version} of {model}, and nothing there "
                "applies it: is start() called, or receive() where weights may change?"
            )
            yield Notice("untaken", text, peers[0].name, warning=True)

    def _waits(self, peer: Peer, model: str) -> bool:
        """Return whether a worker has a version that its user has to apply, for the first time."""
        incoming, versions = peer.incoming[model], self._store.get(model)
        pending = versions.pending if versions is not None else None
        waits = pending is not None and pending.version == incoming.version  # for its commit
        return incoming.phase == "staged" and not waits and peer.runs(model) == (0, 0)

    def _live(self, models: Callable[[Peer], list[str]]) -> dict[str, list[Peer]]:
        """Return, by model, the workers that are there and of which it is so."""
        found: dict[str, list[Peer]] = {}
        for peer in self._roster:
            for model in () if peer.lost else models(peer):
                found.setdefault(model, []).append(peer)
        return found


class _Lasting:
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


def _names(peers: list[Peer], one: str, many: str) -> str:
    names = sorted(peer.name for peer in peers)
    if len(names) == 1:
        return f"worker {names[0]} {one}"
    shown = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    return f"{len(names)} workers ({shown}) {many}"
