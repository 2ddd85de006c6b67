"""Finds problems of a bus in its publisher's roster, such as failed workers, and gives advice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...bus.units import span
from .connection_checks import Finding, Severity
from .view import Standing, View

CLOCK_SECONDS = 2.0  # accepted difference of clocks, in seconds; epochs are ordered by clocks
EVENTS_SECONDS = 60.0  # seconds for which a refusal is reported
WORKERS_SHOWN = 20  # the most workers listed one by one
TROUBLES_SHOWN = 8  # the most problems shown, so that the workers below them stay visible
NAMED = 3  # the most workers named in one problem
START_ONE = "start one: a Subscriber in a program of yours, or weightbus subscribe"
BEHIND_SECONDS = 5.0  # seconds that a worker may be behind without a report, as it is applying

CUT_OFF, REJOINED = "cut-off", "rejoined"  # events of a relay: it lost its publisher; it has one
FIND_PUBLISHER = "is that publisher there? The relay joins by itself as soon as one answers"

REFUSED = "the log of the refused process has the same reason"
BY_CODE = {
    "layout-mismatch": (
        "publisher and worker have different models: compare how they are made; strict=False lets "
        "a worker's model lack tensors, cast=True lets it have other dtypes"
    ),
    "layout-invalid": "its bytes were damaged in transit, or its publisher runs another release",
    "unsupported": "the worker's client does not support this: upgrade the client",
    "too-large": "the version is larger than the worker accepts: raise its bytes_max=",
    "too-many-chunks": "publish in larger chunks: chunk_bytes=",
    "no-memory": "free memory there, or space on its disk; the worker tries again by itself",
    "digest-mismatch": "bytes are damaged again and again: check proxies and network cards",
    "apply": "the user's code in the worker has failed: the worker's log has the traceback",
}


def diagnose(view: View, now: float, ahead: float | None) -> Iterator[Finding]:
    """Yield findings about a bus, from the publisher's roster.

    Args:
        view: The view of the roster.
        now: The time on the monotonic clock.
        ahead: Seconds that the publisher's clock is ahead of the local one; None: unknown.
    """
    yield from _clock(ahead)
    if alone := cut_off_text(view):
        yield Finding("relay", "problem", alone, FIND_PUBLISHER)
    count = len(view.workers)
    if not count:
        text, advice = "no worker is connected", START_ONE
        yield Finding("workers", "note", text, advice)
    bad = [s for s in view.standings(now) if s.verdict != "current"]
    yield from (_of_worker(standing) for standing in bad[:WORKERS_SHOWN])
    if len(bad) > WORKERS_SHOWN:
        text = f"{len(bad) - WORKERS_SHOWN} more workers are not up to date"
        yield Finding("workers", "problem", text, "`weightbus top` shows all of them")
    if count and not bad:
        yield Finding("workers", "well", f"all {count} run the newest versions")
    for event, at in view.events:
        if event.kind == "refused" and now - at < EVENTS_SECONDS:
            yield Finding("refused", "problem", event.text, REFUSED)


def cut_off_text(view: View) -> str:
    """Return the event's text if the observed relay has lost its publisher, else ""."""
    changes = (event for event, _ in reversed(view.events) if event.kind in (CUT_OFF, REJOINED))
    last = next(changes, None)
    return last.text if last is not None and last.kind == CUT_OFF else ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One line about a problem, with all workers that have it.

    Attributes:
        state: `problem`; or `note` for a problem that may resolve itself.
        text: The problem and its workers. It has no ages, so it changes only with the problem.
        advice: What to do; empty if there is nothing to do.
        verdict, model: A filter of the page's rows, for the workers with this problem.
    """

    state: Severity
    text: str
    advice: str = ""
    verdict: str = ""
    model: str = ""


def troubles(view: View, standings: Sequence[Standing], now: float) -> list[Trouble]:
    """Return the problems of a bus, the worst first.

    Args:
        view: The view of the roster.
        standings: The state of each worker with each of its models, the worst first.
        now: The time on the monotonic clock.
    """
    lost = cut_off_text(view)
    found = [Trouble("problem", lost, FIND_PUBLISHER)] if lost else list[Trouble]()
    found += [_trouble(group) for group in _groups(standings)]
    refused = {e.text for e, at in view.events if e.kind == "refused" and now - at < EVENTS_SECONDS}
    found += (Trouble("problem", text, REFUSED) for text in sorted(refused))
    if not standings:
        found.append(Trouble("note", "no worker is connected", START_ONE))
    else:
        subscribed = {s.model for s in standings}
        found += (
            Trouble("note", f"no worker subscribes to {name}", "do workers use another model id?")
            for name in view.models(now)
            if name not in subscribed
        )
    if len(found) > TROUBLES_SHOWN:
        more = len(found) - TROUBLES_SHOWN + 1
        found[TROUBLES_SHOWN - 1 :] = [Trouble("problem", f"and {more} more things are wrong")]
    return found


def _groups(standings: Sequence[Standing]) -> list[list[Standing]]:
    """Return the workers' states, grouped by problem. A lost worker is counted only once."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    lost = set[str]()
    key: tuple[str, str, str]
    for s in standings:
        match s.verdict:
            case "current":
                continue
            case "behind" if (s.lag_s or 0.0) < BEHIND_SECONDS:
                continue
            case "lost" if s.worker in lost:
                continue
            case "lost":
                lost.add(s.worker)
                key = s.verdict, "", ""
            case _:
                key = s.verdict, s.model, s.error.partition(":")[0]
        groups.setdefault(key, []).append(s)
    return [*groups.values()]


def _trouble(group: Sequence[Standing]) -> Trouble:
    # Return the problem of a group of workers.
    first, advice = group[0], _of_worker(group[0]).advice
    named = ", ".join(s.worker for s in group[:NAMED])
    who = named if len(group) <= NAMED else f"{named} and {len(group) - NAMED:,} more"
    are = "is" if len(group) == 1 else "are"
    match first.verdict:
        case "lost":
            return Trouble("problem", f"{who} {are} lost", advice, "lost")
        case "failed":
            return Trouble("problem", f"{who} failed {first.model}: {first.error}", advice,
                           "failed", first.model)  # fmt: skip
        case verdict:
            doing = first.phase.partition(",")[0].rpartition(" ")[0]
            text = f"{who} {are} {verdict} with {first.model}" + (f", {doing}" if doing else "")
            state: Severity = "problem" if verdict == "stuck" else "note"
            return Trouble(state, text, advice, verdict, first.model)


def _clock(ahead: float | None) -> Iterator[Finding]:
    # Yield a finding if the clocks of publisher and observer differ.
    if ahead is None:
        return
    if abs(ahead) <= CLOCK_SECONDS:
        yield Finding("clock", "well", "the clocks here and there agree")
        return
    word = "ahead of" if ahead > 0 else "behind"
    text = f"the clock there is {abs(ahead):.0f} s {word} the one here"
    advice = (
        "synchronize both with a time server (timedatectl set-ntp true): workers may reject a "
        "publisher as outdated if the clock of its host is behind"
    )
    yield Finding("clock", "problem", text, advice)


def _of_worker(s: Standing) -> Finding:
    # Return the finding for a worker's state with one model.
    who = f"{s.worker} ({s.host or 'host unknown'}, process {s.pid}) "
    who += f"failed {s.model}" if s.verdict == "failed" else f"is {s.verdict} with {s.model}"
    runs = f"it runs {s.version or 'none'}, the newest is {s.newest}"
    match s.verdict:
        case "failed":
            code = s.error.partition(":")[0]
            return Finding("layout" if code.startswith("layout") else "worker", "problem",
                           f"{who}: {s.error}", BY_CODE.get(code, "its log says more"))  # fmt: skip
        case "lost":
            text = f"{who}: {s.error or f'nothing was heard of it for {span(s.silent_s)}'}"
            advice = "do its process and its host run? A stopped process continues with SIGCONT"
            return Finding("worker", "problem", text, advice)
        case "stuck" if s.phase.startswith("applying"):
            advice = (
                "the user's code there does not return (on_commit, a loader): its stack says where"
            )
        case "stuck" | "behind" if s.phase.startswith("staged"):
            advice = "the version is staged: the user's code must call receive(), or end reading()"
        case "stuck":
            advice = (
                "no chunks arrive: do firewalls allow the data port (by default the next port)?"
            )
        case _:
            advice = "it is catching up; `weightbus top` shows its progress"
    state: Severity = "problem" if s.verdict == "stuck" else "note"
    return Finding("worker", state, f"{who}: {runs}" + (f", {s.phase}" if s.phase else ""), advice)
