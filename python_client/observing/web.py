"""Serves HTTP pages in a separate thread; `access.py` has the rules of access."""

import asyncio
import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import cast

from aiohttp import web

from ...bus.errors import AddressError, ClosedError
from ...bus.net.inheritance import close_in_children, keep_in_children
from ...bus.net.threads import new_selector
from .access import Http
from .connections import IDLE_SECONDS, Connections, listening

START_SECONDS = 10.0  # seconds to wait for the start, and for the end, of the thread
STOP_SECONDS = 2.0  # seconds that running requests have when the server stops
COOKIE = "weightbus"  # the port is added, since browsers send a host's cookies to all of its ports
STOPPING = web.AppKey("stopping", asyncio.Event)  # set when streaming pages must end
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Meanwhile = Callable[[asyncio.Event], Coroutine[None, None, None]]


class HttpServer:
    """An HTTP server with its own thread and event loop.

    Args:
        http: The address, and the rules of access.
        pages: The handlers of GET requests, by path.
        meanwhile: A coroutine function that runs beside the handlers. Its argument is an event; the
            coroutine ends once the event is set.

    Attributes:
        address: The URL of the root page.

    Raises:
        AddressError: The address cannot be bound, for instance since it is in use.
        ClosedError: The thread did not start in time.
    """

    def __init__(
        self, http: Http, pages: Mapping[str, Handler], meanwhile: Meanwhile | None = None
    ) -> None:
        self._http, self._meanwhile = http, meanwhile
        self._selector = new_selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._connections: Connections | None = None
        self._listeners: list[socket.socket] = []
        self.address = ""
        application = web.Application(middlewares=[self._guard])
        application[STOPPING] = self._stop
        application.add_routes([web.get(path, page) for path, page in pages.items()])
        self._thread = threading.Thread(
            target=self._run, args=(application,), name="weightbus-http", daemon=True
        )
        close_in_children(self)
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            self.close()
            raise ClosedError(f"the page at {http.address} did not start in {START_SECONDS:g} s")
        if self._error is not None:
            raise AddressError(f"cannot serve at {http.address}: {self._error}")

    def stop(self) -> None:
        """Begin to stop serving, without waiting for the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Stop serving, and wait for the thread."""
        self.stop()
        self._thread.join(START_SECONDS)

    def close_in_child(self) -> None:
        """Close the sockets and the selector that a forked child has inherited.

        Their descriptor numbers then refer to the null device. The old objects may close these
        numbers later, which must not close another file of the child.
        """
        null = os.open(os.devnull, os.O_RDWR)
        numbers = {key.fd for key in self._selector.get_map().values()}
        numbers.update(listener.fileno() for listener in self._listeners)
        for number in (*numbers, self._selector.fileno()):
            os.dup2(null, number, inheritable=False)
        os.close(null)

    def _run(self, application: web.Application) -> None:
        try:
            self._loop.run_until_complete(self._serve(application))
        finally:
            self._ready.set()
            keep_in_children(self)
            self._loop.close()

    async def _serve(self, application: web.Application) -> None:
        # Serve until `stop`.
        runner = web.AppRunner(
            application,
            access_log=None,
            shutdown_timeout=STOP_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
        )
        await runner.setup()
        meanwhile: asyncio.Task[None] | None = None
        try:
            self._listeners = listening(self._http.host, self._http.port)
            host = f"[{self._http.host}]" if ":" in self._http.host else self._http.host
            self.address = f"http://{host}:{self._listeners[0].getsockname()[1]}/"
            make = cast("web.Server", runner.server)  # not None after `setup()`
            self._connections = Connections(self._listeners, make, self.address)
            if self._meanwhile is not None:
                meanwhile = asyncio.create_task(self._meanwhile(self._stop))
            self._ready.set()
            await self._stop.wait()
        except OSError as error:
            self._error = error
        finally:
            if meanwhile is not None:
                meanwhile.cancel()
                await asyncio.wait([meanwhile])
            if self._connections is not None:
                self._connections.close()
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Pass a request on if it has access.
        # A foreign page cannot send the token in a header. So if a request has the token in its
        # header, its host name need not be known.
        if not (self._http.knows(request.host) or _bears(self._http, request)):
            text = "this host is not known by that name: use its IP address, or Http(hosts=...)"
            return _refusal(421, text)
        if not lets_in(self._http, request):
            text = "a token is needed: add ?token=... once, or send Authorization: Bearer ..."
            return _refusal(401, text)
        if self._connections is not None:
            self._connections.prove(request.transport)
        # Redirect to a URL without the token, which becomes a cookie.
        if self._http.token is not None and "token" in request.query:
            redirect = web.Response(status=303, headers={**HEADERS, "Location": request.path})
            redirect.set_cookie(
                _cookie_name(request), self._http.token, httponly=True, samesite="Strict"
            )
            return redirect
        return await handler(request)


def _refusal(status: int, text: str) -> web.Response:
    """Return the answer to a request that has no access. Its connection is closed afterwards."""
    refusal = web.Response(status=status, text=text, headers=HEADERS)
    refusal.force_close()
    return refusal


def lets_in(http: Http, request: web.Request) -> bool:
    """Return whether a request has the token, or needs none."""
    if http.token is None:
        return True
    given = (request.query.get("token", ""), _cookie(request))
    return _bears(http, request) or any(_same(each, http.token) for each in given)


def _bears(http: Http, request: web.Request) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return http.token is not None and _same(given, http.token)


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _cookie_name(request: web.Request) -> str:
    """Return the name of the page's cookie, with the port that the browser uses."""
    port = request.host.rpartition(":")[2]  # perhaps the port of a tunnel
    return f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() else COOKIE


def _cookie(request: web.Request) -> str:
    try:
        found = SimpleCookie(request.headers.get("Cookie", "")).get(_cookie_name(request))
    except CookieError:
        return ""
    return found.value if found is not None else ""
