"""Whom a publisher does not reach, and why: who is not there, and what somebody has overlooked.

Those that left in order and those that were refused are kept so that a publish to nobody can say
whom it does not reach; a publisher knows nothing else of them, and the oldest go first.

Names that are misspelt, and workers that never apply, fail nothing: everybody waits, and nobody
says for what. So it is said here, once, and with it what is probably meant.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ..effects import Notice, Send
from ..limits import ABSENT_MAX, ABSENT_SECONDS, CROWDED_SECONDS
from ..messages import Refuse
from .effects import Effect
from .roster import Peer
from .state import Absence, PublisherState

LOOKS = 6  # until something is said
LIKE = 0.8  # from where two names are alike, to `difflib`: `polcy` is at 0.91, `policy_old` at 0.75
NAMES_MAX = 16  # compared at one look: workers can bring any number of them
NAMED = 3  # of many workers, in one line
# What counts names, as in `actor_1` and `actor_2`, or `actor-a` and `actor-b`: these are meant.
_COUNTS = re.compile(r"[._-]?\d+|[._-][A-Za-z]\b")


def note(
    state: PublisherState, name: str, models: Collection[str], code: str, text: str, now: float
) -> bool:
    """Remember why a worker is not there; return whether that is news.

    A worker that is refused asks again and again, and anybody can ask under any number of names: a
    name is news once in a while, and so are only so many names.
    """
    absent = state.absent
    before = absent.get(name)
    if before is None and len(absent) >= ABSENT_MAX:
        oldest = next(iter(absent))
        if now - absent[oldest].at < ABSENT_SECONDS:
            return False
        del absent[oldest]
    if before is not None and before.code == code and now - before.at < ABSENT_SECONDS:
        return False
    absent.pop(name, None)
    absent[name] = Absence(frozenset(models), code, text, now)
    return True


def unknown(state: PublisherState, names: Collection[str]) -> str:
    """Say which of some names no worker has had; empty if each has joined, or has left since."""
    known = {peer.name for peer in state.roster}
    strange = [n for n in names if n not in known and not has_left(state, n)]
    if not strange:
        return ""
    return (
        f"no worker named {', '.join(sorted(strange))} has joined; known are "
        f"{', '.join(sorted(known)) or 'none'}: check the name, or wait_for_workers() first"
    )


def has_left(state: PublisherState, name: str) -> bool:
    """Tell whether a worker of that name has left in order, as far as that is remembered."""
    absence = state.absent.get(name)
    return absence is not None and absence.code == "left"


def crowd(state: PublisherState, text: str, now: float) -> list[Effect]:
    """Remember who was turned away unheard, if anybody was; say so once in a while."""
    news = bool(text) and now - state.crowded_at >= CROWDED_SECONDS
    state.stale |= text != state.crowded
    state.crowded, state.crowded_at = text, now if news else state.crowded_at
    return [Notice("crowded", text, warning=True)] if news else []


def reasons(state: PublisherState, model: str) -> list[str]:
    """Say of every worker that wanted a model why it is not there; and who might have."""
    known = [absence.text for absence in state.absent.values() if model in absence.models]
    return [*known, state.crowded] if state.crowded else known


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


def overlooked(state: PublisherState, now: float) -> list[Effect]:
    """Look for what lasts too long, if it is time."""
    if now < state.hints_at:
        return []
    state.hints_at = now + state.timing.hint_after / LOOKS
    return [*_who_misspells(state, now), *_who_takes_nothing(state, now)]


def _who_misspells(state: PublisherState, now: float) -> Iterator[Effect]:
    """Find models that workers want and nobody publishes, and others that are called alike."""
    published = [model for model, versions in state.store.items() if versions.any]
    if not published:
        return
    found = _live(state, lambda p: [m for m in p.hello.models if m not in published])
    meant = {m: meant_by(m, published) for m in state.misspelt.news(found, NAMES_MAX)}
    alike = {m: found[m] for m, other in meant.items() if other}
    for model, peers in state.misspelt.lasting(alike, now - state.timing.hint_after, now):
        others = [p for p in peers if meant[model] not in p.hello.models]
        if not others:
            continue  # who wants both knows them apart
        text = (
            f"{_names(others, 'wants', 'want')} {model!r}, of which nothing is published: is "
            f"{meant[model]!r} meant?"
        )
        if meant[model] not in state.told:
            yield Notice("misspelt", text, others[0].name, warning=True)
        refuse = Refuse(code="no-model", text=text, model=model)  # P25
        yield from (Send(refuse, to=peer.identity) for peer in others)


def _who_takes_nothing(state: PublisherState, now: float) -> Iterator[Effect]:
    """Find workers that have a version and have never applied any."""
    found = _live(state, lambda p: [m for m in p.incoming if _waits(state, p, m)])
    for model, peers in state.untaken.lasting(found, now - state.timing.hint_after, now):
        version = peers[0].incoming[model].version
        text = (
            f"{_names(peers, 'has', 'have')} version {version} of {model}, and nothing there "
            "applies it: is start() called, or receive() where weights may change?"
        )
        yield Notice("untaken", text, peers[0].name, warning=True)


def _waits(state: PublisherState, peer: Peer, model: str) -> bool:
    """Return whether a worker has a version that its user has to apply, for the first time."""
    incoming, versions = peer.incoming[model], state.store.get(model)
    pending = versions.pending if versions is not None else None
    waits = pending is not None and pending.version == incoming.version  # for its commit
    return incoming.phase == "staged" and not waits and peer.runs(model) == (0, 0)


def _live(state: PublisherState, models: Callable[[Peer], list[str]]) -> dict[str, list[Peer]]:
    """Return, by model, the workers that are there and of which it is so."""
    found: dict[str, list[Peer]] = {}
    for peer in state.roster:
        for model in () if peer.lost else models(peer):
            found.setdefault(model, []).append(peer)
    return found


def _names(peers: list[Peer], one: str, many: str) -> str:
    names = sorted(peer.name for peer in peers)
    if len(names) == 1:
        return f"worker {names[0]} {one}"
    shown = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    return f"{len(names)} workers ({shown}) {many}"
