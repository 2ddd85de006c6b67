"""`weightbus status`: reports to scripts, by its exit code, whether all workers are up to date.

0     all workers run the newest versions, or are behind for less time than an apply may take
1     some workers are lost, stuck, failed, or behind for longer; or too few are connected; or a
      relay has no publisher
2     nothing answers, or the publisher refuses observers, or its roster is too large to be read in
      time

`weightbus status --ready`, for the probes of an orchestrator, only tests whether the publisher or
relay can serve workers. Its exit code is 0 if so, else 1.
"""

import time
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ...bus.errors import AddressError, RefusedError
from ...bus.units import span
from ..keys import worker_keys
from ..observing.diagnosis import BEHIND_SECONDS, cut_off_text
from ..observing.observer import Observer
from ..observing.view import Standing, View
from .outcome import DONE, NOT_ACHIEVED, UsageError
from .screen import BAD, DIM, GOOD, Screen, counted, metadata_text, plain, size, table

UNREACHABLE = 2
ROWS_SHOWN = 200  # the most rows of a table, since drawing a row takes milliseconds
STYLES = {"current": GOOD, "behind": "yellow", "stuck": BAD, "failed": BAD, "lost": BAD}


def status(
    screen: Screen,
    address: str,
    expect: int,
    timeout: float,
    keys: Path | None = None,
    within: float = BEHIND_SECONDS,
) -> int:
    """Show whether all workers run the newest versions; return the exit code."""
    with observer_of(address, keys) as observer:
        if why := _unreadable(observer, address, timeout):
            screen.error(why)
            reachable = observer.heard_at is not None
            screen.emit("status", achieved=False, reachable=reachable, text=why, workers=[])
            return UNREACHABLE
        view, now = observer.view, time.monotonic()
    standings = view.standings(now)
    text = shortfall(view, standings, expect, within)
    screen.say(text or _well(view, standings), BAD if text else GOOD)
    show(screen, standings)
    models = show_models(screen, view, now)
    rows = [fields(standing) for standing in standings]
    about = {"models": models, "workers": rows}
    screen.emit("status", achieved=not text, reachable=True, text=text, **about)
    return NOT_ACHIEVED if text else DONE


def ready(screen: Screen, address: str, timeout: float, keys: Path | None = None) -> int:
    """Show whether the publisher or relay is ready for workers; return the exit code, 0 or 1.

    A publisher is ready if it answers. A relay also needs a session with the publisher above, or a
    version. Otherwise a worker that connects to the relay would wait, although its next address may
    have versions.
    """
    with observer_of(address, keys) as observer:
        why = _unreadable(observer, address, timeout)
        reachable = observer.heard_at is not None
        if not why and not observer.view.models(time.monotonic()):
            why = cut_off_text(observer.view)
    if why:
        screen.error(why)
    else:
        screen.say(f"{address} is ready", GOOD)
    screen.emit("ready", achieved=not why, reachable=reachable, text=why)
    return NOT_ACHIEVED if why else DONE


def observer_of(address: str, keys: Path | None) -> Observer:
    """Return an observer of the publisher or relay at `address`.

    Raises:
        KeysError: The keys cannot be read.
        UsageError: The address is invalid.
    """
    try:
        return Observer(address, worker_keys(keys, None))
    except AddressError as error:
        raise UsageError(str(error)) from None


def _unreadable(observer: Observer, address: str, timeout: float) -> str:
    """Read the roster; return an error message if that fails, else ""."""
    try:
        return "" if observer.look(timeout) else unread(observer, address, timeout)
    except RefusedError as error:
        return str(error)


def unread(observer: Observer, address: str, timeout: float) -> str:
    """Return the error message for an observer that could not read the roster in time."""
    if observer.heard_at is not None:
        return (
            f"{address} answers, but its roster could not be read within "
            f"{timeout:g} s: too many workers change at once; try again, or with more --timeout"
        )
    return (
        f"no publisher or relay answered at {address} within {timeout:g} s: check the address, and "
        "that the process runs; an older weightbus does not answer observers"
    )


def _well(view: View, standings: list[Standing]) -> str:
    workers = counted(len(view.workers), "worker")
    late = len({s.worker for s in standings if s.verdict == "behind"})
    return f"all are up to date: {workers}" + (f", {late} of them applying" if late else "")


def shortfall(
    view: View, standings: list[Standing], expect: int, within: float = BEHIND_SECONDS
) -> str:
    """Return an error message that names the workers that are not up to date; "" if all are.

    Between a publish and its last apply some workers are always behind, so being behind for less
    than `within` seconds is accepted. The time counts from the publish of the first version that a
    worker lacks. So a worker that never applies is reported, however often versions are published.
    The message also says if fewer than `expect` workers are connected, and if the observed process
    is a relay that has no publisher.
    """
    bad = [
        f"{s.worker} failed {s.model}"
        if s.verdict == "failed"
        else f"{s.worker} is {s.verdict} with {s.model}"
        for s in standings
        if s.verdict != "current" and not _in_time(s, within)
    ]
    live = sum(row.state != "lost" and not row.relay for row in view.workers.values())
    if live < expect:
        bad.insert(0, f"{live} of {counted(expect, 'worker')} are connected")
    if alone := cut_off_text(view):
        bad.insert(0, alone)
    return "; ".join(bad[:10]) + (f"; and {len(bad) - 10} more" if len(bad) > 10 else "")


def _in_time(standing: Standing, within: float) -> bool:
    lag = standing.lag_s  # None: unknown
    return standing.verdict == "behind" and lag is not None and lag < within


def show(screen: Screen, standings: list[Standing]) -> None:
    """Show a table of the first `ROWS_SHOWN` states of workers."""
    if standings:
        screen.show(rows_of(standings[:ROWS_SHOWN]))
    if len(standings) > ROWS_SHOWN:
        screen.say(f"{len(standings) - ROWS_SHOWN:,} more rows: --json has all of them", DIM)


def show_models(screen: Screen, view: View, now: float) -> dict[str, dict[str, object]]:
    """Show the metadata of each model's latest version; return the models for JSON."""
    models: dict[str, dict[str, object]] = {}
    for name, (row, age) in view.models(now).items():
        if row.metadata:
            screen.say(f"{name} {row.version}: {metadata_text(row.metadata)}", DIM)
        models[name] = {
            "version": row.version,
            "nbytes": row.nbytes,
            "age_s": age and round(age, 3),
            "metadata": row.metadata,
        }
    return models


def rows_of(standings: list[Standing]) -> Table:
    """Return a table with a row for each worker's state with one model."""
    rows = table(
        "worker", "model", "state", "version", "behind", "doing", "rate", "language", "host",
        "road", "encoding", "error", right=("version", "behind", "rate"),
    )  # fmt: skip
    for s in standings:
        behind = f"{s.lag}" + ("" if s.lag_s is None else f", {span(s.lag_s)}") if s.lag else ""
        rate = f"{size(round(s.rate))}/s" if s.rate else ""
        words = (s.worker, s.model, Text(s.verdict, STYLES[s.verdict]), str(s.version or "none"))
        cells = (behind, _doing(s), rate, s.language, s.host, s.way, s.encoding, s.error)
        rows.add_row(*(w if isinstance(w, Text) else plain(w) for w in (*words, *cells)))
    return rows


def _doing(s: Standing) -> str:
    """Return the cell `doing`: a worker's phase, the seconds of its last apply, or its silence."""
    if s.verdict == "lost":
        return f"silent {span(s.silent_s)}"
    took = f"applied in {span(s.took_s)}" if s.verdict == "current" and s.took_s else ""
    return s.phase or took


def fields(standing: Standing) -> dict[str, object]:
    """Return a worker's state with one model as a dict, for JSON."""
    found = asdict(standing)
    found["rate"] = round(standing.rate)
    found["silent_s"] = round(standing.silent_s, 3)
    found["lag_s"] = None if standing.lag_s is None else round(standing.lag_s, 3)
    return found
