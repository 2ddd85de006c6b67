"""Explains why a publisher does not reach workers: they left, were refused, or are misconfigured.

The publisher remembers workers that left or were refused, up to a bound, so that the warning about
a publish without recipients can name these workers and the reasons.

A misspelt model name, or a worker that never applies, raises no error: publisher and worker just
wait. This module logs each such mistake once, with advice.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ..effects import Notice, Send
from ..messages import Refuse
from .effects import Effect
from .roster import Peer
from .state import PublisherState

# Least `difflib` ratio of a typo to the right name: `polcy` has 0.91 to `policy`.
MIN_SIMILARITY = 0.8
NAMES_MAX = 16  # models compared in one check, since workers can name any number of models
NAMES_LISTED = 3  # names of workers or models listed in one log line
# Counters: `actor_1` and `actor_2`, or `actor-a` and `actor-b`, are not typos of each other.
_COUNTERS = re.compile(r"[._-]?\d+|[._-][A-Za-z]\b")


def unknown_names_text(state: PublisherState, names: Collection[str]) -> str:
    """Return an error text with the names that no worker has ever had; "" if there are none."""
    known = {peer.name for peer in state.roster}
    unknown_names = [n for n in names if n not in known and not has_left(state, n)]
    if not unknown_names:
        return ""
    return (
        f"no worker named {', '.join(sorted(unknown_names))} has joined; known are "
        f"{', '.join(sorted(known)) or 'none'}: check the name, or wait_for_workers() first"
    )


def has_left(state: PublisherState, name: str) -> bool:
    """True if a worker with this name has left, and its record is still kept."""
    absence = state.absent.get(name)
    return absence is not None and absence.code == "left"


def reasons(state: PublisherState, model: str) -> list[str]:
    """Return texts that say why workers of a model are absent and connections were rejected."""
    known = [absence.text for absence in state.absent.values() if model in absence.models]
    return [*known, state.rejections] if state.rejections else known


def likely_meant(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that `name` is probably a typo of; "" if there is none."""
    plain = _COUNTERS.sub("", name)
    first = name[0].lower()  # a typo is rarely in the first letter: `encoder` is no `decoder`
    others = [n for n in names if _COUNTERS.sub("", n) != plain and n[0].lower() == first]
    return next(iter(difflib.get_close_matches(name, others, 1, MIN_SIMILARITY)), "")


def wanted_models_text(model: str, wanted: Sequence[str]) -> str:
    """Return a text: no worker wants `model`, and live workers want the models `wanted`."""
    shown = ", ".join(map(repr, wanted[:NAMES_LISTED])) + (
        ", ..." if len(wanted) > NAMES_LISTED else ""
    )
    meant = likely_meant(model, wanted)
    question = f" (is {meant!r} meant?)" if meant else ""
    return f"no worker wants {model!r}, and those that are there want {shown}{question}"


def hints(state: PublisherState, now: float) -> list[Effect]:
    """Return warnings of likely mistakes that have lasted for `hint_after`, if a check is due."""
    if not state.hints_due(now):
        return []
    return [*_likely_typos(state, now), *_report_never_applied(state, now)]


def _likely_typos(state: PublisherState, now: float) -> Iterator[Effect]:
    """Yield warnings, and refusals to workers, about wanted models whose names look like typos."""
    published = [model for model, versions in state.store.items() if versions.any]
    if not published:
        return
    found = _live_by_model(state, lambda p: [m for m in p.hello.models if m not in published])
    meant = {
        m: likely_meant(m, published) for m in state.suspected_typos.unreported(found, NAMES_MAX)
    }
    alike = {m: found[m] for m, other in meant.items() if other}
    for model, peers in state.suspected_typos.held_since(alike, now - state.timing.hint_after, now):
        others = [p for p in peers if meant[model] not in p.hello.models]
        if not others:
            continue  # a worker that wants both has made no typo
        text = (
            f"{_subject(others, 'wants', 'want')} {model!r}, of which nothing is published: is "
            f"{meant[model]!r} meant?"
        )
        if meant[model] not in state.hinted:
            yield Notice("misspelt", text, others[0].name, warning=True)
        refuse = Refuse(code="no-model", text=text, model=model)  # P25
        yield from (Send(refuse, to=peer.identity) for peer in others)


def _report_never_applied(state: PublisherState, now: float) -> Iterator[Effect]:
    """Yield warnings about workers that have staged a version, and have never applied one."""
    found = _live_by_model(state, lambda p: [m for m in p.incoming if _awaits_user(state, p, m)])
    for model, peers in state.never_applied.held_since(found, now - state.timing.hint_after, now):
        version = peers[0].incoming[model].version
        text = (
            f"{_subject(peers, 'has', 'have')} version {version} of {model}, and nothing there "
            "applies it: is start() called, or receive() where weights may change?"
        )
        yield Notice("untaken", text, peers[0].name, warning=True)


def _awaits_user(state: PublisherState, peer: Peer, model: str) -> bool:
    """True if a worker's first version is staged, and waits only for the user to apply it."""
    incoming, versions = peer.incoming[model], state.store.get(model)
    pending = versions.pending if versions is not None else None
    awaits_commit = pending is not None and pending.version == incoming.version
    return incoming.phase == "staged" and not awaits_commit and peer.runs(model) == (0, 0)


def _live_by_model(
    state: PublisherState, models: Callable[[Peer], list[str]]
) -> dict[str, list[Peer]]:
    """Group the live workers with sessions here by model. `models` returns a worker's models."""
    found: dict[str, list[Peer]] = {}
    for peer in state.roster.sessions():
        for model in () if peer.lost else models(peer):
            found.setdefault(model, []).append(peer)
    return found


def _subject(peers: list[Peer], one: str, many: str) -> str:
    """Return the workers' names, and the verb: `one` for one worker, `many` for several."""
    names = sorted(peer.name for peer in peers)
    if len(names) == 1:
        return f"worker {names[0]} {one}"
    shown = ", ".join(names[:NAMES_LISTED]) + (", ..." if len(names) > NAMES_LISTED else "")
    return f"{len(names)} workers ({shown}) {many}"
