"""Servers that answer as SGLang and vLLM do, with real weights that they read from real files.

Routes, bodies, statuses and words are those of sglang 0.5.23 and vllm 0.33.0. Loading goes tensor
by tensor, so that a failure in the middle leaves parts of two versions, as theirs does. SGLang's
models skip names that they do not have, with success; vLLM's do not, and a load after one that has
failed at a tensor's shape fails with the same words, since vLLM keeps what was half loaded. Each
route can be told to fail, in the ways that a real server or the way to it can.
"""

import contextlib
import json
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Arrays = dict[str, NDArray[Any]]
Said = tuple[int, object]  # a status, and an object or text


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a call.

    Attributes:
        status, body: What is answered instead; status 0: nothing.
        after: It is done nevertheless, and only then goes wrong.
        hang: Nothing is answered until the server ends.
        gate: It is done (or goes wrong, with a status), and answered, once this is set.
        half: The answer ends in its middle.
        die: The server ends.
    """

    status: int = 0
    body: object = ""
    after: bool = False
    hang: bool = False
    gate: threading.Event | None = None
    half: bool = False
    die: bool = False


class FakeEngine:
    """A server of some kind, which was started with the checkpoint `home`, of these weights."""

    def __init__(
        self,
        kind: str,
        weights: Arrays,
        home: str = "org/model",
        *,
        dev: bool = True,
        lora: bool = True,
    ) -> None:
        self.kind, self.home, self.dev, self.lora = kind, home, dev, lora
        self.weights = {name: array.copy() for name, array in weights.items()}
        self.device = "cuda"
        self.left = ""  # why a load has failed that vLLM keeps half
        self.version, self.path, self.token = "default", home, ""
        self.adapters: dict[str, tuple[str, Arrays]] = {}
        self.paused, self.busy = False, False
        self.stale = False  # the cache has something of earlier weights
        self.served_broken: list[str] = []  # moments at which requests would have met a mixture
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, deque[Fault | None]] = {}
        self.called = threading.Condition()
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self._start(0)

    def _start(self, port: int) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits for 40 ms

            def do_GET(self) -> None:
                engine.answer(self, "GET")

            def do_POST(self) -> None:
                engine.answer(self, "POST")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                del format, args

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        self._thread.join(10)

    def restart(self, weights: Arrays) -> None:
        """End, and start again on the same port with what it had at first."""
        self.close()
        self.ended = threading.Event()
        self.weights = {name: array.copy() for name, array in weights.items()}
        self.version, self.path, self.paused = "default", self.home, False
        self.adapters, self.left = {}, ""
        self._start(self.port)

    def fail(self, route: str, *faults: Fault | None) -> None:
        """Have the next calls of a route go wrong, but for those that have None."""
        self.faults.setdefault(route, deque()).extend(faults)

    def wait_called(self, route: str) -> None:
        """Wait until a route is called."""
        with self.called:
            assert self.called.wait_for(lambda: route in self.routes(), 30), self.routes()

    def routes(self) -> list[str]:
        """Return what was called that changes something."""
        asked = {"/model_info", "/v1/models", "/weight_info", "/is_paused", "/ready", "/version"}
        asked.add("/server_info")
        return [route for route, _ in self.calls if route not in asked]

    # HTTP.

    def answer(self, http: BaseHTTPRequestHandler, method: str) -> None:
        parts = urlsplit(http.path)
        length = int(http.headers.get("Content-Length") or 0)
        body: dict[str, Any] = json.loads(http.rfile.read(length) or b"{}")
        body |= {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self.called:
            self.calls.append((parts.path, body))
            queue = self.faults.get(parts.path)
            fault = queue.popleft() if queue else None
            self.called.notify_all()
        if fault is not None and fault.gate is not None:
            assert fault.gate.wait(60)
            fault = fault if fault.status else None
        if fault is not None and not fault.after:
            return self._go_wrong(http, fault, (fault.status, fault.body))
        if self.token and http.headers.get("Authorization") != f"Bearer {self.token}":
            return self._say(http, (401, {"error": "Unauthorized"}))
        with self.lock:
            said = self._do(method, parts.path, body)
        if fault is not None:
            return self._go_wrong(http, fault, said)
        return self._say(http, said)

    def _go_wrong(self, http: BaseHTTPRequestHandler, fault: Fault, said: Said) -> None:
        if fault.hang:
            self.ended.wait(60)
        if fault.die:
            http.close_connection = True
            self.ended.set()
            threading.Thread(target=self.close, daemon=True).start()
            return None
        if fault.half:
            http.send_response(200)
            http.send_header("Content-Length", "1000")
            http.end_headers()
            http.wfile.write(b'{"success": tr')
            http.close_connection = True
            return None
        if not said[0]:
            http.close_connection = True
            return None
        return self._say(http, said)

    def _say(self, http: BaseHTTPRequestHandler, said: Said) -> None:
        status, what = said
        text = (what if isinstance(what, str) else json.dumps(what)).encode()
        with contextlib.suppress(OSError):  # who asked may have left
            http.send_response(status)
            http.send_header("Content-Length", str(len(text)))
            http.end_headers()
            http.wfile.write(text)

    # What it does.

    def _do(self, method: str, path: str, body: dict[str, Any]) -> Said:
        known = {**self._shared(), **(self._sglang() if self.kind == "sglang" else self._vllm())}
        found = known.get(f"{method} {path}")
        return (404, {"detail": "Not Found"}) if found is None else found(body)

    def _shared(self) -> dict[str, Callable[[dict[str, Any]], Said]]:
        return {"GET /v1/models": lambda _: (200, {"object": "list", "data": self._cards()})}

    def _cards(self) -> list[dict[str, object]]:
        root = self.home if self.kind == "vllm" else self.path  # vllm says what it began with
        cards: list[dict[str, object]] = [{"id": "policy", "root": root, "parent": None}]
        return cards + [
            {"id": name, "root": path, "parent": "policy"}
            for name, (path, _) in self.adapters.items()
        ]

    def _sglang(self) -> dict[str, Callable[[dict[str, Any]], Said]]:
        def info(_: object) -> Said:
            said = {"model_path": self.path, "weight_version": self.version}
            return 200, {**said, "tokenizer_path": self.home}

        def update(body: dict[str, Any]) -> Said:
            try:
                self._read(body["model_path"])
            except ValueError as error:
                return 400, {"success": False, "message": f"Failed to update weights: {error}."}
            except OSError as error:
                text = f"Failed to get weights iterator: {error}."
                return 400, {"success": False, "message": text}
            self.path = body["model_path"]
            if body["flush_cache"] and self.busy:
                self.stale = True
                text = "Weights were updated, but the cache was not flushed because requests are "
                return 400, {"success": False, "message": text + "still running or queued."}
            self.version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}

        def flush(body: dict[str, Any]) -> Said:
            if self.busy and not float(body.get("timeout", 0)):
                return 400, "Flush cache failed.\n"
            self.busy = self.stale = False  # it has waited for its requests
            return 200, "Cache flushed.\n"

        def named(body: dict[str, Any]) -> Said:
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}

        def pause(_: object) -> Said:
            self.paused = True
            return 200, {"status": "ok"}

        def go_on(_: object) -> Said:
            self._resumed()
            return 200, {"status": "ok"}

        return {
            "GET /model_info": info,
            "GET /ready": lambda _: (503 if self.paused else 200, ""),
            "POST /update_weights_from_disk": update,
            "POST /flush_cache": flush,
            "POST /update_weight_version": named,
            "POST /pause_generation": pause,
            "POST /continue_generation": go_on,
            **self._sglang_adapters(),
        }

    def _sglang_adapters(self) -> dict[str, Callable[[dict[str, Any]], Said]]:
        def load(body: dict[str, Any]) -> Said:
            name = body["lora_name"]
            if not self.lora:
                text = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
                return 400, {"success": False, "error_message": text}
            if name in self.adapters:
                text = f"Failed to load LoRA adapter {name} because it is already loaded"
                return 400, {"success": False, "error_message": text}
            try:
                self._read_adapter(name, body["lora_path"])
            except (OSError, ValueError) as error:
                return 400, {"success": False, "error_message": str(error)}
            return 200, {"success": True, "loaded_adapters": {name: body["lora_path"]}}

        def unload(body: dict[str, Any]) -> Said:
            name = body["lora_name"]
            if name not in self.adapters:
                text = f"LoRA with name {name} does not exist."
                return 400, {"success": False, "error_message": text}
            path, _ = self.adapters.pop(name)
            if self.busy:  # with requests that have it loaded again, from where it was
                with contextlib.suppress(ValueError):
                    self._read_adapter(name, path)
            return 200, {"success": True}

        return {"POST /load_lora_adapter": load, "POST /unload_lora_adapter": unload}

    def _vllm(self) -> dict[str, Callable[[dict[str, Any]], Said]]:
        def rpc(body: dict[str, Any]) -> Said:
            try:
                self._read(body["kwargs"]["weights_path"])
            except (KeyError, OSError, ValueError) as error:
                return 500, {"error": {"message": f"Call to collective_rpc method failed: {error}"}}
            self.stale = True
            return 200, {"results": [None, None]}

        def reset(_: object) -> Said:
            if self.busy:
                return 200, {"success": False}
            self.stale = False
            return 200, {"success": True}

        def named(body: dict[str, Any]) -> Said:
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}

        def pause(_: object) -> Said:
            self.paused = True
            return 200, {"status": "paused"}

        def resume(_: object) -> Said:
            self._resumed()
            return 200, {"status": "resumed"}

        def load(body: dict[str, Any]) -> Said:
            name = body["lora_name"]
            if name in self.adapters and not body["load_inplace"]:
                return 400, {"error": {"message": f"'{name}' has already been loaded."}}
            try:
                self._read_adapter(name, body["lora_path"])
            except OSError:
                text = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
                return 404, {"error": {"message": text, "type": "NotFoundError", "code": 404}}
            except ValueError as error:
                return 500, {"error": {"message": str(error)}}
            return 200, f"Success: LoRA adapter '{name}' added successfully."

        dev = {
            "GET /server_info": lambda _: (200, {"vllm_config": f"device_config={self.device}, "}),
            "GET /weight_info": lambda _: (200, {"weight_version": self.version}),
            "GET /is_paused": lambda _: (200, {"is_paused": self.paused}),
            "POST /collective_rpc": rpc,
            "POST /reset_prefix_cache": reset,
            "POST /update_weight_version": named,
            "POST /pause": pause,
            "POST /resume": resume,
        }
        return {
            "GET /version": lambda _: (200, {"version": "0.33.0"}),
            **(dev if self.dev else {}),
            **({"POST /v1/load_lora_adapter": load} if self.lora else {}),
        }

    def _resumed(self) -> None:
        self.paused = False
        self._serve("when it went on")

    def _serve(self, when: str) -> None:
        """Note if requests meet parts of two versions: all tensors of a version have one value."""
        values = {float(array.flat[0]) for array in self.weights.values()}
        if len(values) > 1 or self.left:
            self.served_broken.append(f"{when}: {sorted(values)}")

    def _read(self, path: str) -> None:
        if not self.paused and self.kind == "vllm":
            self.served_broken.append("loaded without a pause")
        try:
            self._take(load_file(Path(path) / "model.safetensors"))
        except ValueError as error:
            self.left = "" if self.left else str(error) if self.kind == "vllm" else ""
            raise
        finally:
            if not self.paused:  # it takes requests again at once
                self._serve("after a load")

    def _take(self, found: Arrays) -> None:
        if self.left:
            raise ValueError(self.left)
        for name, array in found.items():
            if name not in self.weights:
                if self.kind == "sglang":
                    continue  # it only warns, in its log
                raise KeyError(f"There is no module or parameter named {name!r}")
            if array.shape != self.weights[name].shape:
                raise ValueError(f"size mismatch for {name}: {[*array.shape]}")
            self.weights[name] = array

    def _read_adapter(self, name: str, path: str) -> None:
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] > 16:
            raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank 16.")
        self.adapters[name] = path, load_file(Path(path) / "adapter_model.safetensors")


@contextlib.contextmanager
def engines(kind: str, weights: Arrays, count: int = 1) -> Generator[list[FakeEngine]]:
    """Have some servers, which end with the block, and their checkpoint."""
    with tempfile.TemporaryDirectory() as home:
        save_file(weights, Path(home) / "model.safetensors")
        made = [FakeEngine(kind, weights, home) for _ in range(count)]
        try:
            yield made
        finally:
            for engine in made:
                if not engine.ended.is_set():
                    engine.close()
