"""Serves a publisher's or relay's dashboard and metrics over HTTP."""

import asyncio
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from ...bus.deadline import ANSWER_SECONDS, result_of
from ...bus.errors import PublishError
from ...bus.net.callbacks import EventCallback
from ...bus.net.publisher_loop import PublisherLoop
from ...bus.receipt import Receipt
from .access import Http
from .relay_status import RelayStatus
from .traces import SDK, on_publish
from .view import View

if TYPE_CHECKING:
    from .web import Handler, HttpServer, Meanwhile


Count = Callable[[Receipt, PublishError | None], None]


def tell(count: Count, publish: "Future[Receipt]") -> None:
    """Call `count` with receipt and error of an ended publish, unless it has no receipt."""
    error = None if publish.cancelled() else publish.exception()
    if publish.cancelled() or not (error is None or isinstance(error, PublishError)):
        return
    count(publish.result() if error is None else error.receipt, error)


class HttpEndpoints:
    """The HTTP servers of one publisher or relay.

    The servers have no reference to the publisher or relay (`owner`), and stop when the owner is
    garbage-collected.

    Args:
        owner: The publisher or relay.
        loop: The publisher loop of the owner.
        relay: Returns the status of the relay, without a reference to the owner. None: the owner
            is a publisher.

    Attributes:
        dashboard: The URL of the dashboard; empty: the dashboard is not served.
        metrics: The URL of the metrics; empty: the metrics are not served.
    """

    def __init__(
        self,
        owner: object,
        loop: PublisherLoop,
        relay: Callable[[], RelayStatus] | None = None,
    ) -> None:
        self.dashboard = self.metrics = ""
        self._loop, self._relay = loop, relay
        self._servers: list[HttpServer] = []
        self._listener: EventCallback | None = None
        self._counts: list[Count] = []
        weakref.finalize(owner, self._stop).atexit = False

    def serve(
        self, dashboard: str | Http | None, metrics: str | Http | None, undo: Callable[[], None]
    ) -> None:
        """Serve the dashboard and the metrics, each unless it is None; call `undo` on an error.

        Raises:
            AddressError: An address is invalid, in use, or would give other hosts access.
            ModuleNotFoundError: A package is not installed; the message says what to install.
        """
        try:
            if dashboard is not None:
                self.dashboard = self._serve_dashboard(_http(dashboard))
            if metrics is not None:
                self.metrics = self._serve_metrics(_http(metrics))
        except BaseException as error:
            undo()
            if not isinstance(error, ModuleNotFoundError):
                raise
            option, needs = "dashboard=", "aiohttp (the extra weightbus[dashboard])"
            if metrics is not None:
                option = "metrics="
                needs = "aiohttp prometheus-client (the extra weightbus[metrics])"
            text = f"{option} needs {error.name}, which is not installed: pip install {needs}"
            raise ModuleNotFoundError(text, name=error.name) from None

    @property
    def counting(self) -> bool:
        """Whether publishes are counted or traced."""
        return bool(self._counts) or SDK in sys.modules

    def count(self, publish: "Future[Receipt]", started: float) -> "Future[Receipt]":
        """Count and trace a publish when it ends; return its future.

        If `counting` is False, this has no effect.
        """
        for count in self._counts:
            publish.add_done_callback(partial(tell, count))
        if SDK in sys.modules and (traced := on_publish(started)) is not None:
            publish.add_done_callback(partial(tell, traced))
        return publish

    def close(self) -> None:
        """Close the servers."""
        self._stop()
        for server in self._servers:
            server.close()

    def _stop(self) -> None:
        for server in self._servers:
            server.stop()
        if self._listener is not None:
            self._listener.end()

    def _serve(
        self, http: Http, pages: "Mapping[str, Handler]", meanwhile: "Meanwhile | None" = None
    ) -> str:
        from .web import HttpServer

        self._servers.append(HttpServer(http, pages, meanwhile))
        return self._servers[-1].address

    def _serve_dashboard(self, http: Http) -> str:
        from .dashboard import Dashboard

        page = Dashboard(_LocalObserver(self._loop).refresh)
        self._counts.append(page.count)
        pages = {"/": page.page, "/state": page.state, "/events": page.events}
        return self._serve(http, {**pages, "/history": page.history}, page.watch)

    def _serve_metrics(self, http: Http) -> str:
        # Start the server of the metrics; return its URL.
        from aiohttp import web
        from prometheus_client import CONTENT_TYPE_LATEST

        from .metrics import Metrics

        observer = _LocalObserver(self._loop)
        metrics = Metrics(observer.refresh, lambda: self._loop.known.malformed, self._relay)

        async def page(_request: web.Request) -> web.StreamResponse:
            body = await asyncio.to_thread(metrics.text)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

        address = self._serve(http, {"/metrics": page})
        self._listener = EventCallback(metrics.event)
        self._counts.append(metrics.count)
        self._loop.listen(self._listener)
        return address + "metrics"


class _LocalObserver:
    """An observer in the publisher's own process, which needs no socket."""

    def __init__(self, loop: PublisherLoop) -> None:
        self._loop, self._view = loop, View()

    def refresh(self) -> View:
        """Return the view, updated to the publisher's present state.

        Raises:
            ClosedError: The publisher is closed.
        """
        while True:
            page = result_of(self._loop.observe(self._view.question()), ANSWER_SECONDS)
            self._view.take(page, time.monotonic())
            if self._view.whole or (page.more and page.revision == page.since):
                return self._view


def _http(where: str | Http) -> Http:
    return where if isinstance(where, Http) else Http(where)
