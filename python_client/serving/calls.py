"""Calls to one server over HTTP: each has a deadline, few tries, and an answer of bounded length.

A call is made again where no answer has come, which says nothing of whether the first was heard: so
more than one try is for what leaves a server as it is when it is done twice.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, cast

from ...codecs.errors import WeightBusError

CONNECT_SECONDS = 5.0  # that a host may take to accept a connection
TRIES = 4
PAUSE_SECONDS = 0.5  # before the second try; each further one waits twice as long
ANSWER_BYTES_MAX = 256 * 1024  # of an answer: it says what was done, or lists the server's models
SAID_MAX = 600  # characters of an engine's own words; a report has room for 4096 with all else
NOT_NOW = {502, 503, 504}  # from a server that starts or ends, or what stands before it


class ServerError(WeightBusError):
    """A server has not done what it was asked to."""

    __module__ = "weightbus.vllm"


class CallError(ServerError):
    """A call has not come to what it was made for.

    Args:
        text: Which one, and why, in words.

    Attributes:
        harmless: It is as it was, since it has not heard or not begun.
    """

    def __init__(self, text: str, *, harmless: bool = False) -> None:
        super().__init__(text)
        self.harmless = harmless


class SilentError(CallError):
    """A server gives no answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def done(self) -> bool:
        """Whether it says that it did what it was asked to."""
        return self.status == 200

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The object that it is, if it is JSON's; else none."""
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self.text)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}

    @property
    def message(self) -> str:
        """The engine's own words, wherever in the answer it puts them."""
        error = self.fields.get("error")
        if isinstance(error, dict):
            error = cast("dict[str, Any]", error).get("message")
        for found in (error, *(self.fields.get(key) for key in ("message", "error_message"))):
            if found:
                return _short(str(found))
        return _short(str(self.fields.get("detail", self.text)))

    def __str__(self) -> str:
        return f"{self.status} {self.message}".rstrip()


class Server:
    """A server, by its URL.

    Args:
        url: Where it is, such as `http://gpu-1:8000`. A user and a password in it are sent, and
            shown nowhere.
        token: What it wants to be shown, if anything.
        tries, pause: How often a call is made, and how long the first wait between two is.

    Raises:
        ModuleNotFoundError: httpx is not installed; the text says what to install.
        ValueError: The URL is none.
    """

    def __init__(
        self, url: str, token: str = "", *, tries: int = TRIES, pause: float = PAUSE_SECONDS
    ) -> None:
        self._httpx = _httpx()
        parts = self._httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ValueError(f"{url!r} is no server's URL: give one such as http://gpu-1:8000")
        auth = (parts.username, parts.password) if parts.userinfo else None
        url = str(parts.copy_with(username="", password="")) if auth else url
        self.url, self._tries, self._pause = url.rstrip("/"), tries, pause
        # No proxy of the environment, nor any other host that the server names: that is not it.
        # Each call has a connection of its own: a server may close one after an error or a rest,
        # and the next call on it would be lost unheard.
        self._client = self._httpx.Client(
            limits=self._httpx.Limits(max_keepalive_connections=0),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=auth,
            trust_env=False,
            follow_redirects=False,
        )

    def get(self, path: str, seconds: float) -> Answer:
        """Ask for something."""
        return self.call("GET", path, None, seconds)

    def ready(self, path: str) -> bool:
        """Ask once, of a route that answers 503 for no."""
        try:
            return self._once("GET", path, None, time.monotonic() + CONNECT_SECONDS).status != 503
        except self._httpx.HTTPError as error:
            raise SilentError(f"{self.url} does not answer GET {path}: {error}") from None

    def post(self, path: str, body: object, seconds: float) -> Answer:
        """Have something done."""
        return self.call("POST", path, body, seconds)

    def call(self, method: str, path: str, body: object, seconds: float) -> Answer:
        """Make a call, again if no answer comes, for so many `seconds` in all.

        Raises:
            SilentError: No answer came. It is harmless if no try reached the server.
        """
        end, reached, why, tried = time.monotonic() + seconds, False, "", 0
        while tried < self._tries and (not tried or time.monotonic() < end):
            if tried:
                time.sleep(max(0.0, min(self._pause * 2 ** (tried - 1), end - time.monotonic())))
            tried += 1
            try:
                answer = self._once(method, path, body, end)
            except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
                why = f"cannot be reached ({error}), so check that it runs there"
            except self._httpx.TimeoutException:
                reached, why = True, f"gave no answer within {seconds:.3g} s"
            except self._httpx.HTTPError as error:
                reached, why = True, f"broke off ({error})"
            else:
                if answer.status not in NOT_NOW:
                    return answer
                reached, why = True, f"is not ready ({answer})"
        times = f", {tried} times" if tried > 1 else ""
        raise SilentError(f"{self.url} {why}: {method} {path}{times}", harmless=not reached)

    def _once(self, method: str, path: str, body: object, end: float) -> Answer:
        left = max(0.001, end - time.monotonic())
        limits = self._httpx.Timeout(left, connect=min(CONNECT_SECONDS, left))
        request: Callable[..., Any] = self._client.stream
        with request(method, self.url + path, json=body, timeout=limits) as response:
            got = bytearray()
            for piece in response.iter_bytes():
                got += piece
                if len(got) > ANSWER_BYTES_MAX:
                    raise CallError(
                        f"{self.url} answers {method} {path} with more than {ANSWER_BYTES_MAX} "
                        "bytes: it is no server of that kind"
                    )
                if time.monotonic() > end:
                    raise self._httpx.ReadTimeout("its answer did not end")
            return Answer(int(response.status_code), got.decode(errors="replace"))

    def close(self) -> None:
        self._client.close()


def _httpx() -> ModuleType:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"servers are called with {error.name}, which is not installed: "
            "pip install httpx (the extra weightbus[serving])",
            name=error.name,
        ) from None
    return httpx


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= SAID_MAX else f"{words[: SAID_MAX - 1]}…"
