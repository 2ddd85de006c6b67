"""A stand-in for a vLLM server: its routes, its executor and its sessions, before ranks of ours.

Written after vLLM 0.28.0 and 0.33.0: entrypoints/rl/online/api_router.py, the flags of Worker in
v1/worker/gpu_worker.py, and MultiprocExecutor.collective_rpc. That one takes the answers of the
ranks in order, and leaves those that come after an error: the next call gets them in its stead.
`tests/serving/vllm/` checks that the flags here are those of the real Worker.
"""

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

VERSION = "0.33.0"


class Engine(Protocol):
    """What a rank has of weightbus: the methods of vLLM's WeightTransferEngine."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any: ...
    def init_transfer_engine(self, init_info: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...


class Worker:
    """A rank, with the session flag of vLLM's Worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.active = engine, False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. Call "
                "finish_weight_update first."
            )
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.engine.finish_weight_update()
        self.active = False


class Rank(Protocol):
    """Where calls of a rank go, and its answers come from, in order."""

    def send(self, method: str, kwargs: dict[str, Any]) -> None: ...
    def answer(self) -> str:
        """Return what was wrong, or nothing; EOFError if the rank is dead."""
        ...


class Local:
    """A rank in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.answers = worker, list[str]()

    def send(self, method: str, kwargs: dict[str, Any]) -> None:
        try:
            getattr(self.worker, method)(**kwargs)
        except Exception as error:
            self.answers.append(f"{error}")
        else:
            self.answers.append("")

    def answer(self) -> str:
        return self.answers.pop(0)


class Executor:
    """Calls all ranks, and takes their answers as vLLM does.

    Attributes:
        behind: Some answer was left, which the next call gets in the stead of its own.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks, self._lock, self.dead = ranks, threading.Lock(), False
        self.behind = False

    def call(self, method: str, **kwargs: Any) -> None:
        with self._lock:
            if self.dead:
                raise RuntimeError("Executor failed.")
            try:
                for rank in self.ranks:
                    rank.send(method, kwargs)
                for rank in self.ranks:
                    if wrong := rank.answer():
                        self.behind |= rank is not self.ranks[-1]
                        raise RuntimeError(f"Worker failed with error '{wrong}', please check the")
            except (EOFError, OSError) as error:
                self.dead = True
                raise RuntimeError("EngineCore encountered an issue.") from error


class Server:
    """The HTTP server of a stand-in; `url` is where it is.

    Args:
        ranks: Its ranks.
        dev: Whether it has the routes of VLLM_SERVER_DEV_MODE=1.
        vllm: Whether it is like vLLM at all.

    Attributes:
        calls: What was called, in order.
        begun, ended: How many calls were; whoever called may have given up before the end.
    """

    def __init__(self, ranks: Sequence[Rank] = (), *, dev: bool = True, vllm: bool = True) -> None:
        self.executor, self.paused, self.version = Executor(ranks), False, "default"
        self.calls: list[str] = []
        self.begun = self.ended = 0
        counting = threading.Lock()
        routes: dict[str, Callable[[dict[str, Any], dict[str, list[str]]], Any]] = {}
        if vllm:
            routes["GET /version"] = lambda *_: {"version": VERSION}
        if vllm and dev:
            routes.update(self._routes())
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                parts = urlsplit(self.path)
                name = f"{self.command} {parts.path}"
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null") or {}
                route, status = routes.get(name), 200
                with counting:
                    outer.begun += 1
                try:
                    if route is None:
                        status, said = 404, dict[str, Any](detail="Not Found")
                    else:
                        said = route(body, parse_qs(parts.query)) or {"message": "done"}
                except Exception as error:
                    status = 400 if isinstance(error, ValueError) else 500
                    said = {"error": {"message": str(error), "code": status}}
                with counting:
                    outer.ended += 1
                sent = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_GET = do_POST = do  # noqa: N815 - so they are called

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def _routes(self) -> dict[str, Any]:
        def call(name: str, *keys: str) -> Any:
            def route(body: dict[str, Any], _query: object) -> None:
                self.calls.append(name)
                self.executor.call(name, **{key: body[key] for key in keys})

            return route

        def pause(_: object, query: dict[str, list[str]]) -> dict[str, str]:
            self.calls.append(f"pause {query.get('mode', ['abort'])[0]}")
            self.paused = True
            return {"status": "paused"}

        def resume(*_: object) -> dict[str, str]:
            self.calls.append("resume")
            self.paused = False
            return {"status": "resumed"}

        def finish(body: dict[str, Any], query: object) -> None:
            call("finish_weight_update")(body, query)
            self.version = body.get("weight_version") or self.version

        def say(body: dict[str, Any], _: object) -> dict[str, object]:
            self.calls.append("update_weight_version")
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}

        return {
            "GET /get_world_size": lambda *_: {"world_size": len(self.executor.ranks)},
            "GET /weight_info": lambda *_: {"weight_version": self.version},
            "GET /is_paused": lambda *_: {"is_paused": self.paused},
            "POST /pause": pause,
            "POST /resume": resume,
            "POST /init_weight_transfer_engine": call("init_weight_transfer_engine", "init_info"),
            "POST /start_weight_update": call("start_weight_update"),
            "POST /update_weights": call("update_weights", "update_info"),
            "POST /finish_weight_update": finish,
            "POST /update_weight_version": say,
        }

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
