"""Makes HTTP calls to one server, with a deadline, retries, and a limit on the answer's length.

A call without an answer is repeated, although the server may have received the first call. So
allow more than one try only for idempotent calls.
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

CONNECT_SECONDS = 5.0  # seconds in which a server must accept a connection
TRIES = 4
PAUSE_SECONDS = 0.5  # pause before the second try; doubled before each further try
ANSWER_BYTES_MAX = 256 * 1024  # largest answer: a status, or the list of the server's models
ERROR_SHOWN = 600  # characters shown of a server's error text; a report on the bus has at most 4096
UNREADY = {502, 503, 504}  # statuses of a server or proxy that is starting or stopping


class ServerError(WeightBusError):
    """A call to a server failed."""

    __module__ = "weightbus.vllm"


class CallError(ServerError):
    """A call failed.

    Args:
        text: The error message: which call failed, and why.

    Attributes:
        harmless: Whether the server is unchanged, since the call did not reach it or changed
            nothing.
    """

    def __init__(self, text: str, *, harmless: bool = False) -> None:
        super().__init__(text)
        self.harmless = harmless


class SilentError(CallError):
    """A server did not answer."""


# The status and the text of a server's answer.
@dataclass(frozen=True)
class HttpAnswer:
    status: int
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether the status is 200."""
        return self.status == 200

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of the answer's JSON object; empty if the answer is not such an object."""
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self.text)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}

    @property
    def message(self) -> str:
        """The error message from the answer's fields, or else the answer's text; shortened."""
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
        url: The URL, such as `http://gpu-1:8000`. A user and a password in it are
            sent, but never shown.
        token: The bearer token; empty if there is none.
        tries: The most tries of a call.
        pause: Seconds before the second try; doubled before each further try.

    Raises:
        ModuleNotFoundError: httpx is not installed; the message says what to install.
        ValueError: The URL is invalid.
    """

    def __init__(
        self, url: str, token: str = "", *, tries: int = TRIES, pause: float = PAUSE_SECONDS
    ) -> None:
        self._httpx = _httpx()
        parts = self._httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ValueError(f"{url!r} is not a server's URL: give one such as http://gpu-1:8000")
        auth = (parts.username, parts.password) if parts.userinfo else None
        url = str(parts.copy_with(username="", password="")) if auth else url
        self.url, self._tries, self._pause = url.rstrip("/"), tries, pause
        # Proxies of the environment and redirects would lead to another host. Each call has a new
        # connection, since a server may close an idle connection just as the next call is sent.
        self._client = self._httpx.Client(
            limits=self._httpx.Limits(max_keepalive_connections=0),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=auth,
            trust_env=False,
            follow_redirects=False,
        )

    def get(self, path: str, seconds: float) -> HttpAnswer:
        """Make a GET call; see `call`."""
        return self.call("GET", path, None, seconds)

    def is_ready(self, path: str) -> bool:
        """Return False if the route `path` answers 503. Makes one try; may raise SilentError."""
        try:
            return self._once("GET", path, None, time.monotonic() + CONNECT_SECONDS).status != 503
        except self._httpx.HTTPError as error:
            raise SilentError(f"{self.url} does not answer GET {path}: {error}") from None

    def post(self, path: str, body: object, seconds: float) -> HttpAnswer:
        """Make a POST call; see `call`."""
        return self.call("POST", path, body, seconds)

    def call(self, method: str, path: str, body: object, seconds: float) -> HttpAnswer:
        """Make a call, repeat it if no answer comes, and return the answer, within `seconds`.

        Raises:
            SilentError: No answer came. The error is `harmless` if no try reached the server.
            CallError: The answer is too long.
        """
        end, reached, why, tries = time.monotonic() + seconds, False, "", 0
        while tries < self._tries and (not tries or time.monotonic() < end):
            if tries:
                time.sleep(max(0.0, min(self._pause * 2 ** (tries - 1), end - time.monotonic())))
            tries += 1
            try:
                answer = self._once(method, path, body, end)
            except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
                why = f"cannot be reached ({error}): check that the server runs at this URL"
            except self._httpx.TimeoutException:
                reached, why = True, f"gave no answer within {seconds:.3g} s"
            except self._httpx.HTTPError as error:
                reached, why = True, f"broke off ({error})"
            else:
                if answer.status not in UNREADY:
                    return answer
                reached, why = True, f"is not ready ({answer})"
        times = f", {tries} times" if tries > 1 else ""
        raise SilentError(f"{self.url} {why}: {method} {path}{times}", harmless=not reached)

    def _once(self, method: str, path: str, body: object, end: float) -> HttpAnswer:
        # Make a call once, and return the answer; `end`: the deadline, on the monotonic clock.
        left = max(0.001, end - time.monotonic())
        limits = self._httpx.Timeout(left, connect=min(CONNECT_SECONDS, left))
        request: Callable[..., Any] = self._client.stream
        with request(method, self.url + path, json=body, timeout=limits) as response:
            received = bytearray()
            for piece in response.iter_bytes():
                received += piece
                if len(received) > ANSWER_BYTES_MAX:
                    raise CallError(
                        f"{self.url} answers {method} {path} with more than {ANSWER_BYTES_MAX} "
                        "bytes: check that the URL is that of an inference server"
                    )
                if time.monotonic() > end:
                    raise self._httpx.ReadTimeout("its answer did not end")
            return HttpAnswer(int(response.status_code), received.decode(errors="replace"))

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
    return words if len(words) <= ERROR_SHOWN else f"{words[: ERROR_SHOWN - 1]}…"
