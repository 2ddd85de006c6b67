"""The page on which people look at a bus, live by server-sent events."""

import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files

import msgspec
from aiohttp import web

from ...bus.observed import Observe
from ...codecs.errors import WeightBusError
from ...codecs.words import printable
from .view import View
from .web import HEADERS, STOPPING

LOOK_SECONDS = 0.5  # between two looks at what has changed
STILL_SECONDS = 5.0  # after which a stream on which nothing changes says that it is there
STREAMS_MAX = 32  # browsers at once: each costs memory, and a message for each change


class Dashboard:
    """The page, and the stream that feeds it.

    Args:
        refresh: Brings the view up to date; called in any thread, once at a time.
    """

    def __init__(self, refresh: Callable[[], View]) -> None:
        self._refresh, self._lock = refresh, asyncio.Lock()
        self._view, self._looked_at = View(), float("-inf")
        self._state, self._asked, self._made_at = b"", Observe(), float("-inf")
        self._streams = 0
        self._page = files(__package__ or "").joinpath("page.html").read_bytes()

    async def page(self, _request: web.Request) -> web.StreamResponse:
        """Answer with the page: one file that asks for nothing but the stream."""
        script = re.search(rb"<script>(.*?)</script>", self._page, re.DOTALL)
        assert script is not None  # noqa: S101 - it is our own
        digest = base64.b64encode(hashlib.sha256(script[1]).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**HEADERS, "Content-Security-Policy": policy}
        return web.Response(
            body=self._page, content_type="text/html", charset="utf-8", headers=headers
        )

    async def state(self, _request: web.Request) -> web.StreamResponse:
        """Answer with how things stand, once, for programs."""
        _, state = await self._current(anew=True)
        return web.Response(body=state, content_type="application/json", headers=HEADERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Tell a browser how things stand, whenever that has changed."""
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
            pass  # the publisher is closed, or the browser is
        finally:
            self._streams -= 1
        return response

    async def _stream(self, response: web.StreamResponse, stopping: asyncio.Event) -> None:
        told, told_at = None, 0.0
        while not stopping.is_set():
            asked, state = await self._current(anew=told is None)
            now = time.monotonic()
            if asked != told:
                await response.write(b"data: " + state + b"\n\n")
                told, told_at = asked, now
            elif now - told_at >= STILL_SECONDS:
                await response.write(b": still here\n\n")
                told_at = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK_SECONDS)

    async def _current(self, *, anew: bool) -> tuple[Observe, bytes]:
        """Return up to where is known how things stand, and how.

        All who look on within a while share one look. In it are ages, which those who saw it come
        go on counting by themselves; `anew`: for whoever did not, they are those of now.
        """
        async with self._lock:
            if time.monotonic() - self._looked_at >= LOOK_SECONDS / 2:
                self._view = await asyncio.to_thread(self._refresh)
                self._looked_at = time.monotonic()
            asked, now = self._view.question(), time.monotonic()
            if asked != self._asked or (anew and now - self._made_at >= LOOK_SECONDS / 2):
                self._asked, self._made_at, self._state = asked, now, json_of(self._view, now)
            return asked, self._state


def json_of(view: View, now: float) -> bytes:
    """Return what the page shows, as it is told."""
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
    workers = [asdict(s) for s in view.standings(now)]
    state = {"epoch": view.epoch, "models": models, "workers": workers, "events": events}
    return msgspec.json.encode(state)
