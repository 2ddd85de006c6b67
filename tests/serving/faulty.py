"""A proxy before a server: it loses calls, doubles them, holds them back, or answers by itself.

It is what goes wrong between a trainer and a server: a proxy's limit of seconds, a network, a front
end that hangs. The server behind it may be a stand-in or a real one.
"""

import contextlib
import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "lost",
    "unanswered",
    "doubled",
    "refused",
    "spoilt",
    "hung",
    "late",
    "late at start",
    "late at pause",
    "late at finish",
]
FAULTS: dict[Fault, str] = {
    "lost": "the connection is closed, and the server never hears of the call",
    "unanswered": "the server does it, and the connection is closed instead of the answer",
    "doubled": "the server gets the call twice; the second answer is the caller's",
    "refused": "500 without the server, and the connection is closed",
    "spoilt": "the server does it; 500 instead of its answer, and the connection is closed",
    "hung": "no answer for as long as the caller waits; the server gets the call after that",
    "late": "the connection is closed; the server gets the call once the transfer is over",
    "late at start": "the same, when the next transfer has begun",
    "late at pause": "the same, when all ranks hold the version of the next transfer",
    "late at finish": "the same, when they are about to load it",
}
BEHIND_SECONDS = 120.0


class Proxy:
    """A proxy before `behind`, a URL; its own is `url`.

    Attributes:
        hit: How many calls it has spoilt.
    """

    def __init__(self, behind: str) -> None:
        self._host = urlsplit(behind).netloc
        self._path, self._fault, self._skip = "", "", 0
        self._give_at = ""
        self._lock, self._late = threading.Lock(), list[Callable[[], object]]()
        self.hit = 0
        self._over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                outer.pass_on(self, self.rfile.read(length))

            do_GET = do_POST = do  # noqa: N815 - so they are called

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def spoil(self, path: str, fault: Fault, skip: int = 0) -> None:
        """Spoil one call of a path, after so many that go through."""
        self._path, self._fault, self._skip = path, fault, skip
        self._over.clear()

    def give_late_at(self, path: str) -> None:
        """Give the server what was held back before the next call of a path."""
        self._give_at = path

    def give_late(self) -> int:
        """Give the server what was held back; return how many calls that were."""
        self._over.set()
        with self._lock:
            late, self._late = self._late, []
        for call in late:
            call()
        return len(late)

    def pass_on(self, caller: BaseHTTPRequestHandler, body: bytes) -> None:
        """Take a call."""
        with self._lock:
            mine = urlsplit(caller.path).path == self._path
            self._skip -= mine
            mine = mine and self._skip < 0
            gives = urlsplit(caller.path).path == self._give_at
            fault = self._fault if mine else ""
            if mine:
                self._path, self.hit = "", self.hit + 1
        if gives:
            self._give_at = ""
            self.give_late()

        def call() -> tuple[int, bytes]:
            return self._call(caller.command, caller.path, body)

        status, said = 500, b'{"error": {"message": "the proxy has no answer"}}'
        if fault in ("", "unanswered", "doubled", "spoilt"):
            answer = call()
            if fault == "doubled":
                answer = call()
            if fault in ("", "doubled"):
                status, said = answer
        if fault == "hung" or fault.startswith("late"):
            with self._lock:
                self._late.append(call)
        if fault == "hung":
            self._over.wait(BEHIND_SECONDS)
        if fault not in ("", "doubled", "refused", "spoilt"):
            caller.close_connection = True
            return
        with contextlib.suppress(OSError):
            caller.send_response(status)
            caller.send_header("Content-Type", "application/json")
            caller.send_header("Content-Length", str(len(said)))
            if fault:
                caller.send_header("Connection", "close")
            caller.end_headers()
            caller.wfile.write(said)

    def _call(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=BEHIND_SECONDS)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            return 502, str(error).encode()
        finally:
            connection.close()

    def close(self) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
