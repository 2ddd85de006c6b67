"""`weightbus doctor`: shows problems of this host and of a publisher or relay, with advice."""

import time
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ...bus.errors import AddressError, KeysError, RefusedError
from ...bus.net import endpoints
from ...bus.trust.keys import WorkerKeys
from ..keys import worker_keys
from ..observing import diagnosis
from ..observing.connection_checks import Finding, Severity, examine, reach, room_for
from ..observing.observer import Observer
from .outcome import DONE, NOT_ACHIEVED, UsageError
from .screen import BAD, DIM, GOOD, Screen, counted, plain, table
from .status import UNREACHABLE, unread

STYLES: dict[Severity, str] = {"well": GOOD, "note": "yellow", "problem": BAD}
BY_REFUSAL = {
    "keys": "an observer's key is needed: weightbus keygen DIR --observer NAME",
    "not-allowed": "an observer's key is needed: weightbus keygen DIR --observer NAME",
    "revoked": "ask the owner of the publisher's key folder for another key",
    "limit": "close a page or a `top` somewhere",
    "malformed": "the publisher runs an earlier release, which accepts no observers: upgrade it",
    "protocol-version": "the publisher speaks another protocol: install the same release here",
}


def doctor(screen: Screen, address: str | None, timeout: float, keys: Path | None) -> int:
    """Check this host and, if given, the publisher at `address`; show the findings.

    Return the exit code.
    """
    if address is not None:
        try:
            endpoints.check(address)
        except AddressError as error:
            raise UsageError(str(error)) from None
    found, reached = examine(), True
    if address is not None:
        more, reached = _check_publisher(address, timeout, keys)
        found += more
    order: list[Severity] = ["problem", "note", "well"]
    found.sort(key=lambda finding: order.index(finding.state))
    screen.show(_rows(found))
    counts = {state: sum(f.state == state for f in found) for state in order}
    text = f"{counted(counts['problem'], 'problem')}, {counted(counts['note'], 'note')}"
    screen.say(f"{text}; {counts['well']} well", DIM)
    rows = [finding.fields() for finding in found]
    screen.emit("doctor", achieved=not counts["problem"], reachable=reached, findings=rows)
    return UNREACHABLE if not reached else NOT_ACHIEVED if counts["problem"] else DONE


def _check_publisher(address: str, timeout: float, path: Path | None) -> tuple[list[Finding], bool]:
    """Check a publisher; return the findings, and whether the publisher sent its roster."""
    keys: WorkerKeys | None = None
    found = list[Finding]()
    try:
        keys = worker_keys(path, None)
    except KeysError as error:
        advice = "make key files with weightbus keygen: one per name, readable by its owner only"
        found.append(Finding("keys", "problem", str(error), advice))
        return [*found, *reach(address, keyed=False, timeout=timeout)], False
    found += reach(address, keyed=keys is not None, timeout=timeout)
    if found[-1].state == "problem":
        return found, False
    with Observer(address, keys) as observer:
        try:
            if not observer.look(timeout):
                advice = "is it a publisher or relay, and is its process running, not stopped?"
                text = unread(observer, address, timeout)
                return [*found, Finding("publisher", "problem", text, advice)], False
        except RefusedError as error:
            advice = BY_REFUSAL.get(error.code, "its own log may say more")
            about = "keys" if error.code in ("keys", "not-allowed", "revoked") else "publisher"
            return [*found, Finding(about, "problem", str(error), advice)], False
        view, now = observer.view, time.monotonic()
        models = [row for row, _ in view.models(now).values()]
        text = f"epoch {view.epoch}, {counted(len(view.workers), 'worker')}, "
        text += counted(len(models), "model")
        found.append(Finding("publisher", "well", text))
        room = [room_for(row.name, row.nbytes) for row in models]
        found += [each for each in room if each is not None and each.state != "well"]
        return [*found, *diagnosis.diagnose(view, now, observer.ahead)], True


def _rows(found: list[Finding]) -> Table:
    rows = table("", "about", "found", "what to do")
    for each in found:
        words = (plain(each.about), plain(each.text), plain(each.advice))
        rows.add_row(Text(each.state, STYLES[each.state]), *words)
    return rows
