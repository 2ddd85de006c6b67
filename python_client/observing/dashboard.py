"""The dashboard page, updated live by server-sent events."""

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

LOOK_SECONDS = 0.5  # seconds between two checks for changes
STILL_SECONDS = 5.0  # seconds between keep-alives on a stream without changes
STREAMS_MAX = 32  # most browsers at a time
KEEP_SECONDS = MOMENT_SECONDS / 2  # seconds between two samples for the history
KEEP_SHARE = 0.02  # largest fraction of one core that sampling may take


@dataclass(frozen=True, slots=True)
class _Picture:
    """The state that the page shows, as JSON with a number."""

    number: int = 0  # increases with each change
    # the view's next request; it differs if the view has changed
    asked: Observe = field(default_factory=Observe)
    troubles: tuple[Trouble, ...] = ()
    state: bytes = b""  # the state, as JSON
    made_at: float = float("-inf")  # when it was made, on the monotonic clock


class Dashboard:
    """The dashboard page, and the stream of server-sent events that updates it.

    Args:
        refresh: Returns an up-to-date view. Any thread may call it, but only one at a time.
    """

    def __init__(self, refresh: Callable[[], View]) -> None:
        self._refresh, self._lock = refresh, asyncio.Lock()
        self._view, self._looked_at = View(), float("-inf")
        self._history, self._keep_at = History(), float("-inf")
        self._picture = _Picture()
        self._streams = 0
        self._failures = RateLimitedWarning(log, "the page's history lacks a moment: %s")
        folder = files(__package__ or "")
        self._page, self._policy = page_of(
            *(folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
        )

    async def page(self, _request: web.Request) -> web.StreamResponse:
        """Answer with the page: a single file, which requests nothing except the stream."""
        headers = {**HEADERS, "Content-Security-Policy": self._policy}
        return web.Response(
            body=self._page, content_type="text/html", charset="utf-8", headers=headers
        )

    async def state(self, _request: web.Request) -> web.StreamResponse:
        """Answer once with the current state, for programs."""
        picture = await self._current(anew=True)
        return web.Response(body=picture.state, content_type="application/json", headers=HEADERS)

    async def history(self, _request: web.Request) -> web.StreamResponse:
        """Answer once with the history, for programs."""
        _, body = history_of(self._history, -1, time.monotonic())
        return web.Response(body=body, content_type="application/json", headers=HEADERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send a browser the state now and at each change, until one side closes."""
        if self._streams >= STREAMS_MAX:
            text = f"{STREAMS_MAX} browsers look on already: close one of them"
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
        """Record a publish that has ended in the history."""
        self._history.published(receipt, str(error or ""), time.monotonic())

    async def watch(self, stopping: asyncio.Event) -> None:
        """Sample periodically into the history, even without browsers, until `stopping` is set."""
        with contextlib.suppress(WeightBusError):  # the publisher is closed
            while not stopping.is_set():
                async with self._lock:
                    try:
                        await asyncio.to_thread(self._keep)
                    except WeightBusError:
                        raise
                    except Exception as error:  # only this sample is lost
                        self._failures.warn(f"{type(error).__name__}: {error}", time.monotonic())
                pause = max(KEEP_SECONDS, self._keep_at - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause)

    async def _stream(self, response: web.StreamResponse, stopping: asyncio.Event) -> None:
        # Send the state and the history at each change.
        sent, sent_at, since = -1, 0.0, -1
        while not stopping.is_set():
            picture = await self._current(anew=sent < 0)
            now = time.monotonic()
            # The history goes before the state, so that the page draws only once.
            if self._history.changes != since:
                since, moments = history_of(self._history, since, now)
                await response.write(b"event: history\ndata: " + moments + b"\n\n")
                sent_at = now
            if picture.number != sent:
                await response.write(b"data: " + picture.state + b"\n\n")
                sent, sent_at = picture.number, now
            elif now - sent_at >= STILL_SECONDS:
                await response.write(b": still here\n\n")
                sent_at = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK_SECONDS)

    async def _current(self, *, anew: bool) -> _Picture:
        """Return the current state, which all streams share.

        The state contains ages, from which a page counts on. So for a new page (`anew`) the ages
        must be up to date.
        """
        async with self._lock:
            return await asyncio.to_thread(self._draw, anew=anew)

    def _look(self) -> float:
        """Update the view, unless it was just updated; return the monotonic time."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS / 2:
            self._view = self._refresh()
            self._looked_at = time.monotonic()
        return time.monotonic()

    def _keep(self) -> list[Standing]:
        """Add the states of all workers to the history, and return them."""
        now = self._look()
        standings = self._view.standings(now)
        self._history.looked(self._view, standings, now)
        after = time.monotonic()
        self._keep_at = after + max(KEEP_SECONDS / 2, (after - now) / KEEP_SHARE)
        return standings

    def _draw(self, *, anew: bool) -> _Picture:
        """Return the current state, with a new number if it differs from the last state."""
        now, before = self._look(), self._picture
        old = anew and now - before.made_at >= LOOK_SECONDS / 2
        due = now >= self._keep_at
        asked = self._view.question()
        if not (old or due or asked != before.asked):
            return before
        standings = self._keep() if due else self._view.standings(now)
        found = (*troubles(self._view, standings, now), *_shortfalls(self._history, now))
        differs = (asked, found) != (before.asked, before.troubles)
        if differs or old:
            state = json_of(self._view, standings, found, now)
            self._picture = _Picture(before.number + differs, asked, found, state, now)
        return self._picture


def page_of(page: str, style: str, script: str) -> tuple[bytes, str]:
    """Return the page in one piece, and its content security policy: only its own code runs."""
    whole = page.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return whole.encode(), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shortfalls(history: History, now: float) -> list[Trouble]:
    """Return a problem for each model of which publishes recently reached too few workers."""
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
