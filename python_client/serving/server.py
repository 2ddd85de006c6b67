"""vLLM servers, as a trainer sees them: the routes of a weight transfer, of a pause, of a version.

They exist only where the server runs with VLLM_SERVER_DEV_MODE=1, and need no key. Read in vLLM
0.28.0 to 0.33.0. No call is made twice: a transfer has sessions, and a pause is counted by nobody.
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
ANSWER_SECONDS = 60.0  # for what waits for no weights
SERVERS_MAX = 256  # each is called by a thread of its own

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
        url: Such as `http://gpu-1:8000`.
        timeout: Seconds for calls that do not take one.

    Raises:
        ModuleNotFoundError: httpx is not installed.
        ValueError: The URL is none.
    """

    def __init__(self, url: str, timeout: float = ANSWER_SECONDS) -> None:
        self._server = Server(url, tries=1)
        self.url = self._server.url
        self._timeout = checks.seconds(timeout, "timeout", positive=True)

    def world_size(self, *, include_dp: bool = True) -> int:
        """Return of how many ranks it is; without `include_dp`, each of its replicas."""
        said = self._get(f"/get_world_size?include_dp={str(include_dp).lower()}").get("world_size")
        if not isinstance(said, int) or said < 1:
            raise ServerError(f"{self.url} says world_size={said!r}: it is no vLLM server")
        return said

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Have every rank join, with the `init_info` of the engine that it runs."""
        try:
            self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)})
        except ServerError as error:
            said = str(error)
            if "Invalid init_info for" in said or "not configured" in said:
                raise ServerError(f"{said}: {OTHER_ENGINE}") from error
            raise

    def start_weight_update(self) -> None:
        """Begin a session."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Tell the ranks which version it is, in the `update_info` of their engine."""
        given = update_info if isinstance(update_info, list) else dict(update_info)
        self._post("/update_weights", {"update_info": given})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the ranks load it and end the session; it says `weight_version` from then on."""
        said = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", said)

    def update_weight_version(self, new_version: str) -> None:
        """Say that it runs `new_version` from now on."""
        self._post("/update_weight_version", {"new_version": new_version})

    def weight_version(self) -> str:
        """Return which weights it says it runs; at first `default`."""
        return str(self._get("/weight_info").get("weight_version", ""))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Have it generate nothing.

        Args:
            mode: What becomes of running requests: with `keep`, they go on once it resumes.
        """
        self._post(f"/pause?mode={checks.choice(mode, 'mode', ('keep', 'wait', 'abort'))}")

    def resume(self) -> None:
        """Have it generate again."""
        self._post("/resume")

    def is_paused(self) -> bool:
        """Return whether it is paused."""
        return bool(self._get("/is_paused").get("is_paused"))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Give each call in this block at most so many `seconds`."""
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
        begun = time.monotonic()
        answer = self._server.call(method, path, body, self._timeout)
        if answer.done and answer.fields:
            return answer.fields
        if answer.status in (200, 404, 405):
            raise ServerError(f"{self.url} has no {method} {path}: {self._what_it_is()}")
        raise ServerError(
            f"{self.url} has answered {method} {path} with {answer.status} after "
            f"{time.monotonic() - begun:.1f} s: {answer.message}"
        )

    def _what_it_is(self) -> str:
        answer = self._server.get("/version", min(self._timeout, CONNECT_SECONDS))
        version = answer.fields.get("version") if answer.done else None
        if version is None:
            return "it is no vLLM server; check the address"
        return f"it is vLLM {version} without the routes of a weight transfer; {START}"

    def __repr__(self) -> str:
        return f"<VllmServer {self.url}>"


class VllmServers:
    """Some vLLM servers that get the same weights: each call goes to all of them at once.

    It is a `VLLMWeightSyncClient` of vLLM's, so any trainer engine of vLLM's can use it.

    Args:
        urls: One URL or several; each server runs an engine of its own.
        timeout: Seconds for each call.

    Attributes:
        paused_s: Seconds that they stood still, the last time.

    Raises:
        ModuleNotFoundError, ValueError: As of `VllmServer`.
    """

    def __init__(self, urls: str | Iterable[str], timeout: float = ANSWER_SECONDS) -> None:
        given = [urls] if isinstance(urls, str) else [*urls]
        checks.whole(len(given), "urls (how many)", 1, SERVERS_MAX)
        self.servers = [VllmServer(url, timeout) for url in given]
        self.paused_s, self._since = 0.0, 0.0  # when they were paused; 0: they are not
        self._threads = ThreadPoolExecutor(len(given), "weightbus-servers")

    def ranks(self, deployment: str) -> list[str]:
        """Return the names of the workers that their ranks will be, in such a `deployment`."""
        sizes = self._all(lambda s: (s.world_size(), s.world_size(include_dp=False)))
        return [
            f"{name}-dp{rank // size}-rank{rank % size}"
            for name, (whole, size) in zip(self._names(deployment), sizes, strict=True)
            for rank in range(whole)
        ]

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Have every rank of every server join; `init_info` names the deployment of them all."""
        names = iter(self._names(str(init_info.get("deployment", ""))))
        each = {s.url: {**init_info, "deployment": next(names)} for s in self.servers}
        self._all(lambda s: s.init_weight_transfer_engine(each[s.url]))

    def start_weight_update(self) -> None:
        """Begin a session on each."""
        self._all(VllmServer.start_weight_update)

    def update_weights(self, update_info: Mapping[str, object] | list[dict[str, Any]]) -> None:
        """Tell each which version it is, in the `update_info` of their engine."""
        self._all(lambda s: s.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have each load it and end the session; it says `weight_version` from then on."""
        self._all(lambda s: s.finish_weight_update(weight_version))

    def update_weight_version(self, new_version: str) -> None:
        """Have each say that it runs `new_version`."""
        self._all(lambda s: s.update_weight_version(new_version))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Have none of them generate; `mode` says what becomes of running requests."""
        self._since = time.monotonic()
        self._all(lambda s: s.pause(mode))

    def resume(self) -> None:
        """Have all of them generate again."""
        self._all(VllmServer.resume)
        self.paused_s, self._since = time.monotonic() - self._since, 0.0

    def resume_late(self) -> None:
        """Resume what could not be resumed before; nothing if all were."""
        if self._since:
            self.resume()

    def weight_versions(self) -> dict[str, str]:
        """Return which weights each says it runs, by URL."""
        said = self._all(VllmServer.weight_version)
        return {s.url: version for s, version in zip(self.servers, said, strict=True)}

    @contextmanager
    def paused(self, mode: PauseMode = "keep") -> Generator[None]:
        """Return a block in which they do not generate, and resume after it whatever happens.

        Args:
            mode: As of `pause`.
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
        """Give each call in this block at most so many `seconds`."""
        with ExitStack() as restore:
            for server in self.servers:
                restore.enter_context(server.within(seconds))
            yield

    def _names(self, deployment: str) -> list[str]:
        several = len(self.servers) > 1
        return [f"{deployment}{i}" if several else deployment for i in range(len(self.servers))]

    def _all(self, call: Callable[[VllmServer], T]) -> list[T]:
        """Call all of them at once, and wait for each: what one of them does not, others may."""
        calls = [self._threads.submit(call, server) for server in self.servers]
        failed = [error for c in calls if (error := c.exception()) is not None]
        if failed:
            raise ServerError("; ".join(map(str, failed))) from failed[0]
        return [c.result() for c in calls]

    def __repr__(self) -> str:
        return f"<VllmServers {', '.join(s.url for s in self.servers)}>"
