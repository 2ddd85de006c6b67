"""Builds the fetches, reports and pings that a worker sends, and two notices. (W17)"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..effects import Effect, Notice, Send
from ..messages import Failed, Fetch, Ping, Progress, Staged
from ..units import span
from .transfer import CHECKSUMS, Transfer
from .version_store import ArrivingEntry, Received, WholeEntry


def fetches(transfer: Transfer, wanted: Iterable[tuple[int, int]]) -> list[Effect]:
    """Return the requests for these ranges of missing chunks. (W10, W11, D10)"""
    effects: list[Effect] = []
    epoch, version = transfer.key
    for interval in wanted:
        if interval == CHECKSUMS:
            model = transfer.announce.model
            fetch = Fetch(model=model, epoch=epoch, version=version, checksums=True)
            effects.append(Send(fetch))
            continue
        for first, count, ranges in transfer.requests(*interval):
            fetch = Fetch(
                model=transfer.announce.model,
                epoch=epoch,
                version=version,
                first=first,
                count=count,
                patch=transfer.patch,
                unpatched=transfer.why,
                ranges=ranges,
            )
            effects.append(Send(fetch))
    return effects


def progress(entry: Received) -> Effect:
    """Return the progress report of a version that is arriving, ready or being applied."""
    phase: Literal["receiving", "applying", "staged"] = "staged"
    chunks, patch, waits = 0, None, ""
    if isinstance(entry, ArrivingEntry):
        phase, chunks, patch = "receiving", entry.transfer.progress, entry.transfer.patch
    elif entry.phase == "applying":
        phase = "applying"
    else:
        waits = entry.blocked_by
    model, (epoch, version) = entry.announce.model, entry.key
    message = Progress(
        model=model,
        epoch=epoch,
        version=version,
        chunks=chunks,
        phase=phase,
        patch=patch,
        waits=waits,
    )
    return Send(message)


def staged(entries: Iterable[WholeEntry]) -> list[Effect]:
    """Return a `staged` report for each version whose announcement requires one. (W14)"""
    effects: list[Effect] = []
    for entry in entries:
        s = entry.staged
        if s.report_staged and not entry.deferred_outcome:  # an overdue version has failed
            report = Staged(
                model=s.model, epoch=s.epoch, version=s.version, digest=s.digest, patch=s.patch
            )
            effects.append(Send(report))
    return effects


def failed(failure: Failed, *, torn: bool) -> Effect:
    """Return the report that a version failed; `torn`: a torn apply left no version. (W24)"""
    return Send(msgspec.structs.replace(failure, intact=not torn))


def ping(now: float, *, subscribed: bool, shared: bool) -> Effect:
    """Return a ping whose token is the time in milliseconds; the pong repeats it. (W12, W18)"""
    return Send(Ping(token=int(now * 1000), subscribed=subscribed, shared=shared))


def cut_off(at: float | None, now: float) -> Effect:
    """Return the notice that the relay lost its publisher at `at`, or (None) has one again. (R3)"""
    if at is None:
        return Notice("rejoined", "there is a publisher above its relay again")
    text = (
        f"there has been no publisher above its relay for {span(now - at)}: this worker gets the "
        "versions that the relay has, and no new ones; is the publisher there? Relays join it by "
        "themselves"
    )
    return Notice("cut-off", text, warning=True)


def unheard(address: str, seconds: float) -> Effect:
    """Return the warning that no published message has arrived for `seconds`. (W33)"""
    text = (
        f"nothing published has come for {seconds:g} s, though this worker has subscribed; "
        f"everything is fetched, which is slower: is {address} let through from here, by firewalls "
        "and in containers? It is not the address of the control channel"
    )
    return Notice("unheard", text, warning=True)
