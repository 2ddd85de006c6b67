"""Serves the dashboard page, and updates it live by server-sent events."""

import asyncio
import base64
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import msgspec
from aiohttp import web

from ...bus.errors import PublishError
from ...bus.event_log import RateLimitedWarning
from ...bus.messages import Observe
from ...bus.receipt import Receipt
from ...codecs.errors import WeightBusError
from ...codecs.words import printable
from .diagnosis import Trouble, troubles
from .history import MOMENT_SECONDS, MOMENTS_MAX, History, Moment
from .view import Standing, View
from .web import HEADERS, STOPPING

log = logging.getLogger("weightbus.dashboard")

CHECK_SECONDS = 0.5  # seconds between two checks for changes
KEEP_ALIVE_SECONDS = 5.0  # seconds between keep-alives on a stream without changes
STREAMS_MAX = 32  # the most browsers at a time
SAMPLE_SECONDS = MOMENT_SECONDS / 2  # seconds between two samples for the history
SAMPLE_SHARE = 0.02  # the largest fraction of one core that sampling may take


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state that the page shows, as JSON, with a change number."""

    number: int = 0  # increases with each change
    # The next request of the view, as a cheap test for changes: it differs if the view has changed.
    request: Observe = field(default_factory=Observe)
    troubles: tuple[Trouble, ...] = ()
    state: bytes = b""  # the state, as JSON
    created_at: float = float("-inf")  # on the monotonic clock


class Dashboard:
    """The dashboard page, and the stream of server-sent events that updates it.

    Args:
        refresh: Returns an up-to-date view. It may be called in any thread, but only in one at a
            time.
    """

    def __init__(self, refresh: Callable[[], View]) -> None:
        self._refresh, self._lock = refresh, asyncio.Lock()
        self._view, self._refreshed_at = View(), float("-inf")
        self._history, self._sample_at = History(), float("-inf")
        self._snapshot = _Snapshot()
        self._streams = 0  # number of connected browsers
        self._failures = RateLimitedWarning(log, "a sample is missing in the page's history: %s")
        folder = files(__package__ or "")
        self._page, self._policy = page_of(
            *(folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
        )

    async def page(self, _request: web.Request) -> web.StreamResponse:
        """Answer with the page: a single file, which requests nothing else but the stream."""
        headers = {**HEADERS, "Content-Security-Policy": self._policy}
        return web.Response(
            body=self._page, content_type="text/html", charset="utf-8", headers=headers
        )

    async def state(self, _request: web.Request) -> web.StreamResponse:
        """Answer once with the current state, for programs."""
        snapshot = await self._current(fresh=True)
        return web.Response(body=snapshot.state, content_type="application/json", headers=HEADERS)

    async def history(self, _request: web.Request) -> web.StreamResponse:
        """Answer once with the history, for programs."""
        _, body = history_of(self._history, -1, time.monotonic())
        return web.Response(body=body, content_type="application/json", headers=HEADERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send a browser the state now and at each change, until one side closes."""
        if self._streams >= STREAMS_MAX:
            text = f"{STREAMS_MAX} browsers show this page already: close one of them"
            return web.Response(status=503, text=text, headers=HEADERS)
        headers = {**HEADERS, "Content-Type": "text/event-stream"}
        response = web.StreamResponse(headers=headers)
        self._streams += 1
        try:
            await response.prepare(request)
            await self._stream(response, request.app[STOPPING])
        except (WeightBusError, ConnectionError):
            pass  # the publisher or the browser has closed
        finally:
            self._streams -= 1
        return response

    def count(self, receipt: Receipt, error: PublishError | None) -> None:
        """Add an ended publish to the history."""
        self._history.published(receipt, str(error or ""), time.monotonic())

    async def watch(self, stopping: asyncio.Event) -> None:
        """Sample periodically into the history, even without browsers, until `stopping` is set."""
        with contextlib.suppress(WeightBusError):  # the publisher is closed
            while not stopping.is_set():
                async with self._lock:
                    try:
                        await asyncio.to_thread(self._sample)
                    except WeightBusError:
                        raise
                    except Exception as error:  # only this sample is lost
                        self._failures.warn(f"{type(error).__name__}: {error}", time.monotonic())
                pause = max(SAMPLE_SECONDS, self._sample_at - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause)

    async def _stream(self, response: web.StreamResponse, stopping: asyncio.Event) -> None:
        # Send the state and the history at each change.
        sent, sent_at, since = -1, 0.0, -1
        while not stopping.is_set():
            snapshot = await self._current(fresh=sent < 0)
            now = time.monotonic()
            # Send the history before the state, so that the page draws only once.
            if self._history.changes != since:
                since, moments = history_of(self._history, since, now)
                await response.write(b"event: history\ndata: " + moments + b"\n\n")
                sent_at = now
            if snapshot.number != sent:
                await response.write(b"data: " + snapshot.state + b"\n\n")
                sent, sent_at = snapshot.number, now
            elif now - sent_at >= KEEP_ALIVE_SECONDS:
                await response.write(b": still here\n\n")
                sent_at = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), CHECK_SECONDS)

    async def _current(self, *, fresh: bool) -> _Snapshot:
        """Return the current state, which all streams share.

        The state contains ages, which a page increases by itself. So a new page (`fresh`) needs
        ages that are up to date.
        """
        async with self._lock:
            return await asyncio.to_thread(self._take_snapshot, fresh=fresh)

    def _update_view(self) -> float:
        """Update the view, unless it was just updated; return the monotonic time."""
        if time.monotonic() - self._refreshed_at >= CHECK_SECONDS / 2:
            self._view = self._refresh()
            self._refreshed_at = time.monotonic()
        return time.monotonic()

    def _sample(self) -> list[Standing]:
        """Add the states of all workers to the history, and return these states."""
        now = self._update_view()
        standings = self._view.standings(now)
        self._history.looked(self._view, standings, now)
        after = time.monotonic()
        self._sample_at = after + max(SAMPLE_SECONDS / 2, (after - now) / SAMPLE_SHARE)
        return standings

    def _take_snapshot(self, *, fresh: bool) -> _Snapshot:
        """Return the current state, with a new number if it differs from the last state."""
        now, before = self._update_view(), self._snapshot
        outdated = fresh and now - before.created_at >= CHECK_SECONDS / 2
        sample_due = now >= self._sample_at
        request = self._view.question()
        if not (outdated or sample_due or request != before.request):
            return before
        standings = self._sample() if sample_due else self._view.standings(now)
        found = (*troubles(self._view, standings, now), *_shortfalls(self._history, now))
        differs = (request, found) != (before.request, before.troubles)
        if differs or outdated:
            state = json_of(self._view, standings, found, now)
            self._snapshot = _Snapshot(before.number + differs, request, found, state, now)
        return self._snapshot


def page_of(page: str, style: str, script: str) -> tuple[bytes, str]:
    """Return the page as one file, and a content security policy that allows only its code."""
    whole = page.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return whole.encode(), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shortfalls(history: History, now: float) -> list[Trouble]:
    """Return a problem for each model whose publishes recently reached too few workers."""
    minutes = MOMENTS_MAX * MOMENT_SECONDS / 60
    return [
        Trouble(
            "note",
            f"{count} {'publish' if count == 1 else 'publishes'} of {last.model} fell short in "
            f"the last {minutes:.0f} minutes",
            f"the last one: {last.text}",
            model=last.model,
        )
        for last, count in history.short(now)
    ]


def json_of(
    view: View, standings: Sequence[Standing], found: Sequence[Trouble], now: float
) -> bytes:
    """Return the state for the page, as JSON."""
    models = [
        {
            "name": n,
            "version": m.version,
            "nbytes": m.nbytes,
            "encoding": m.encoding,
            "age_s": age,
            "metadata": {printable(name): printable(text) for name, text in m.metadata.items()},
        }
        for n, (m, age) in view.models(now).items()
    ]
    events = [
        {"kind": e.kind, "worker": e.worker, "text": e.text, "age_s": now - at}
        for e, at in view.events
    ]
    state = {
        "epoch": view.epoch,
        "troubles": found,
        "models": models,
        "workers": standings,
        "events": events,
    }
    return msgspec.json.encode(state)


def history_of(history: History, since: int, now: float) -> tuple[int, bytes]:
    """Return the history's change count, and JSON of the moments that changed after `since`."""
    changes, models = history.moments(since, now)
    content = {
        "since": since,  # -1: the whole history
        "now": now / MOMENT_SECONDS,
        "moment_s": MOMENT_SECONDS,
        "moments": MOMENTS_MAX,
        "fields": Moment.__struct_fields__,
        "models": models,
    }
    return changes, msgspec.json.encode(content)
