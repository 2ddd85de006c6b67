"""Calls vLLM servers for trainers: weight transfer, pause, and version label.

This follows the sources of vLLM 0.28.0 to 0.33.0. A server has these routes only if it runs with
VLLM_SERVER_DEV_MODE=1; they need no authentication. No call is retried here, since a transfer is a
session.
"""

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar

from .. import checks
from .calls import CONNECT_SECONDS, Server, ServerError

T = TypeVar("T")

PauseMode = Literal["keep", "wait", "abort"]
ANSWER_SECONDS = 60.0  # seconds for calls that do not wait for weights
SERVERS_MAX = 256  # each server has its own thread

START = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment, as in "
    "`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config "
    '\'{"backend": "weightbus"}\'`'
)
OTHER_ENGINE = (
    "it does not run weightbus's engine: install weightbus[vllm] where it runs, start it with "
    '--weight-transfer-config \'{"backend": "weightbus"}\', and name weightbus in VLLM_PLUGINS if '
    "that is set there"
)


class VllmServer:
    """One vLLM server, by its URL.

    Args:
        url: The URL, such as `http://gpu-1:8000`.
        timeout: Seconds for each call.

    Raises:
        ModuleNotFoundError: httpx is not installed.
        ValueError: The URL is invalid.
    """

    def __init__(self, url: str, timeout: float = ANSWER_SECONDS) -> None:
        self._server = Server(url, tries=1)
        self.url = self._server.url
        self._timeout = checks.seconds(timeout, "timeout", positive=True)

    def world_size(self, *, include_dp: bool = True) -> int:
        """Return the number of ranks; without `include_dp`, that of one data-parallel replica."""
        size = self._get(f"/get_world_size?include_dp={str(include_dp).lower()}").get("world_size")
        if not isinstance(size, int) or size < 1:
            raise ServerError(f"{self.url} says world_size={size!r}: it is not a vLLM server")
        return size

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Make each rank join the trainer. The ranks' engine defines the keys of `init_info`."""
        try:
            self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)})
        except ServerError as error:
            text = str(error)
            if "Invalid init_info for" in text or "not configured" in text:
                raise ServerError(f"{text}: {OTHER_ENGINE}") from error
            raise

    def start_weight_update(self) -> None:
        """Begin a session, in which one version is transferred."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Make each rank get a version. The ranks' engine defines the keys of `update_info`."""
        given = update_info if isinstance(update_info, list) else dict(update_info)
        self._post("/update_weights", {"update_info": given})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load the version on all ranks, end the session, and set the label `weight_version`."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body)

    def update_weight_version(self, new_version: str) -> None:
        """Set the version label of the server to `new_version`."""
        self._post("/update_weight_version", {"new_version": new_version})

    def weight_version(self) -> str:
        """Return the version label of the server; `default` before any label is set."""
        return str(self._get("/weight_info").get("weight_version", ""))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause generation.

        Args:
            mode: What happens to running requests. `keep`: they continue after `resume`. `wait`:
                the pause begins when they have ended. `abort`: they are aborted.
        """
        self._post(f"/pause?mode={checks.choice(mode, 'mode', ('keep', 'wait', 'abort'))}")

    def resume(self) -> None:
        """Resume generation."""
        self._post("/resume")

    def is_paused(self) -> bool:
        """Return whether generation is paused."""
        return bool(self._get("/is_paused").get("is_paused"))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Return a context manager during which each call is limited to `seconds`."""
        before, self._timeout = self._timeout, max(0.001, seconds)
        try:
            yield
        finally:
            self._timeout = before

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None)

    def _post(self, path: str, body: object = None) -> dict[str, Any]:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: object) -> dict[str, Any]:
        start = time.monotonic()
        answer = self._server.call(method, path, body, self._timeout)
        if answer.succeeded and answer.fields:
            return answer.fields
        if answer.status in (200, 404, 405):
            raise ServerError(f"{self.url} has no {method} {path}: {self._route_advice()}")
        raise ServerError(
            f"{self.url} has answered {method} {path} with {answer.status} after "
            f"{time.monotonic() - start:.1f} s: {answer.message}"
        )

    def _route_advice(self) -> str:
        answer = self._server.get("/version", min(self._timeout, CONNECT_SECONDS))
        version = answer.fields.get("version") if answer.succeeded else None
        if version is None:
            return "it is not a vLLM server; check the address"
        return f"it is vLLM {version} without the routes of a weight transfer; {START}"

    def __repr__(self) -> str:
        return f"<VllmServer {self.url}>"


class VllmServers:
    """Several vLLM servers that get the same weights; each call goes to all of them concurrently.

    This implements vLLM's `VLLMWeightSyncClient`, so each of vLLM's trainer engines can use it.

    Args:
        urls: One URL or several; each server runs its own engine.
        timeout: Seconds for each call.

    Attributes:
        paused_s: The duration of the last pause, in seconds.

    Raises:
        ModuleNotFoundError, ValueError: As in `VllmServer`.
    """

    def __init__(self, urls: str | Iterable[str], timeout: float = ANSWER_SECONDS) -> None:
        given = [urls] if isinstance(urls, str) else [*urls]
        checks.whole(len(given), "urls (how many)", 1, SERVERS_MAX)
        self.servers = [VllmServer(url, timeout) for url in given]
        self.paused_s, self._since = 0.0, 0.0  # `_since`: when the pause began; 0: not paused
        self._threads = ThreadPoolExecutor(len(given), "weightbus-servers")

    def ranks(self, deployment: str) -> list[str]:
        """Return the worker name of each rank of each server.

        `deployment` is the name of a single server; with several servers, the name of a server is
        `deployment` and the server's index.
        """
        sizes = self._all(lambda s: (s.world_size(), s.world_size(include_dp=False)))
        return [
            f"{name}-dp{rank // size}-rank{rank % size}"
            for name, (whole, size) in zip(self._names(deployment), sizes, strict=True)
            for rank in range(whole)
        ]

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Make each rank of each server join.

        If there are several servers, each server gets the deployment's name of `init_info` with
        the server's index.
        """
        names = iter(self._names(str(init_info.get("deployment", ""))))
        info_by_url = {s.url: {**init_info, "deployment": next(names)} for s in self.servers}
        self._all(lambda s: s.init_weight_transfer_engine(info_by_url[s.url]))

    def start_weight_update(self) -> None:
        """Begin a session on each server."""
        self._all(VllmServer.start_weight_update)

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Make each rank get a version. The ranks' engine defines the keys of `update_info`."""
        self._all(lambda s: s.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load the version on each server, end the session, and set the label `weight_version`."""
        self._all(lambda s: s.finish_weight_update(weight_version))

    def update_weight_version(self, new_version: str) -> None:
        """Set the version label of each server to `new_version`."""
        self._all(lambda s: s.update_weight_version(new_version))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause generation on all servers; `mode` is that of `VllmServer.pause`."""
        self._since = time.monotonic()
        self._all(lambda s: s.pause(mode))

    def resume(self) -> None:
        """Resume generation on all servers."""
        self._all(VllmServer.resume)
        self.paused_s, self._since = time.monotonic() - self._since, 0.0

    def resume_late(self) -> None:
        """Resume all servers, unless they have been resumed since the last pause."""
        if self._since:
            self.resume()

    def weight_versions(self) -> dict[str, str]:
        """Return the version label of each server, by URL."""
        versions = self._all(VllmServer.weight_version)
        return {s.url: version for s, version in zip(self.servers, versions, strict=True)}

    @contextmanager
    def paused(self, mode: PauseMode = "keep") -> Generator[None]:
        """Return a context manager that pauses generation, and resumes it even after an error.

        Args:
            mode: As in `pause`.
        """
        try:
            self.pause(mode)
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.close()

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Return a context manager during which each call is limited to `seconds`."""
        with ExitStack() as restore:
            for server in self.servers:
                restore.enter_context(server.within(seconds))
            yield

    def _names(self, deployment: str) -> list[str]:
        several = len(self.servers) > 1
        return [f"{deployment}{i}" if several else deployment for i in range(len(self.servers))]

    def _all(self, call: Callable[[VllmServer], T]) -> list[T]:
        """Make a call to all servers concurrently; return the results, in the order of the servers.

        Raises:
            ServerError: Some calls failed; the message has all errors.
        """
        calls = [self._threads.submit(call, server) for server in self.servers]
        failed = [error for c in calls if (error := c.exception()) is not None]
        if failed:
            raise ServerError("; ".join(map(str, failed))) from failed[0]
        return [c.result() for c in calls]

    def __repr__(self) -> str:
        return f"<VllmServers {', '.join(s.url for s in self.servers)}>"
