"""Makes SGLang and vLLM servers pause, load weights and resume, through their HTTP routes.

This follows the sources of sglang 0.5.23 and vllm 0.28.0 and 0.33.0. Each call must be idempotent,
since `calls.Server` may make it twice.

sglang  /update_weights_from_disk waits until running requests end, and holds new requests back;
        during a pause it loads at once. It answers {"success", "message"}, with status 400 for a
        failure. If the message of a failure begins with "Weights were updated", only the flush of
        the cache failed. After a failed load, the server's "rollback" does not restore the old
        weights: it reads the new files again. The server skips names that its model lacks, and
        reports success. The server cannot replace an adapter. So the bridge first unloads it, and
        then loads the new version. The unload call waits until the requests that use the adapter
        have ended. A request between the two calls makes the server load the adapter again from the
        old path. So that path is a link, which the bridge points to the new version beforehand.
vllm    /collective_rpc calls `reload_weights` on each rank; the server must not generate meanwhile.
        The answer is a list, or 500 with the exception's text. Needs VLLM_SERVER_DEV_MODE=1. If a
        load fails half-way, the server keeps the partly loaded weights. The next load may fail with
        the same error. Or it may seem to succeed, and then the load after it fails (seen in 0.32).
        A new adapter is loaded before the old adapter of the same name is removed. The prefix cache
        identifies adapters by path (before 0.33 by name), so a new version needs a new path.
"""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, cast
from zlib import crc32

from .calls import CallError, HttpAnswer, Server

ANSWER_SECONDS = 10.0  # seconds for fast calls, such as status and resume
INFO_SECONDS = 60.0  # seconds for /server_info, which the server first has to collect
FLUSH_SECONDS = 30.0  # seconds for a flush of the cache, between two steps of the engine
FLUSH_PAUSE_SECONDS = 0.2  # seconds between two tries to flush the cache
UNPAUSED = "none"  # the pause mode in which the load itself waits for running requests
BROKEN = "broken"  # the version label of a server that must be restarted
UPDATED = "Weights were updated"  # start of sglang's message if only the flush of the cache failed
DENIED = {401, 403}  # statuses
NO_ROUTE = {404, 405}  # statuses


@dataclass(frozen=True)
class EngineSettings:
    """The settings that apply to all servers.

    Attributes:
        pause: The pause mode: what happens to running requests. None: the engine's first mode.
        seconds: The longest time that a server may take to load a version.
        folder: The folder with a folder per version, and with marker files and links that outlive
            this process.
        server_path: The path by which servers reach `folder`.
    """

    pause: str | None
    seconds: float
    folder: Path
    server_path: str


@dataclass(frozen=True)
class ServedWeights:
    """Weights for a server to load.

    Attributes:
        folder: The path of the weights on the server.
        version: The version label that the server reports after the load; unused for an adapter.
        adapter: The name of the adapter; empty for the model's own weights.
    """

    folder: str
    version: str = ""
    adapter: str = ""


class Engine(ABC):
    """A server that can load weights."""

    kind: ClassVar[str]  # the engine's name, the value of --kind
    pauses: ClassVar[tuple[str, ...]]  # the pause modes, the default first
    last_resort: ClassVar[str]  # the pause mode for a server that may have parts of two versions
    resume_route: ClassVar[str]  # the route that ends a pause

    def __init__(self, server: Server, settings: EngineSettings) -> None:
        self._server, self._settings = server, settings
        self._pause = self.pauses[0] if settings.pause is None else settings.pause
        # Two marker files, from which another process that uses this folder also knows: `_mark`
        # exists while a bridge has paused the server, `_part` while the server is `partial`.
        self._mark = settings.folder / f".paused-{crc32(self.url.encode()):08x}"
        self._part = settings.folder / f".partial-{crc32(self.url.encode()):08x}"

    @property
    def url(self) -> str:
        return self._server.url

    # State of the server.

    @abstractmethod
    def version(self) -> str:
        """Return the version label that the server reports.

        Raises:
            CallError: The server does not answer, or is of another kind.
        """

    @abstractmethod
    def loaded_from(self) -> str:
        """Return the path or name from which the server read its current weights."""

    @abstractmethod
    def checkpoint(self) -> str:
        """Return the folder or the name of the checkpoint that the server was started with."""

    @abstractmethod
    def check_reload(self, derived: str) -> None:
        """Check that a reload also updates the copies that the server makes of some weights.

        `derived` names the kind of weights that are copied; see `ServedCheckpoint.derived`.

        Raises:
            CallError: A reload does not update the copies, so the server would mix old and new
                weights.
        """

    @property
    def partial(self) -> bool:
        """Whether the server may have parts of two versions, so it must not answer requests."""
        return self._part.exists()

    def adapter(self, name: str) -> str | None:
        """Return the path from which the server read an adapter; None if it lacks the adapter.

        Raises:
            CallError: The model itself has that name.
        """
        root, parent = self._listed_models().get(name, (None, "none"))
        if not parent:
            text = f"{self.url} calls its own model {name!r}: give another name with --lora"
            raise CallError(text, harmless=True)
        return root

    def _listed_models(self) -> dict[str, tuple[str, str]]:
        """Return (path, base model) by name of the model, without a base, and of each adapter."""
        answer = self._checked(self._server.get("/v1/models", ANSWER_SECONDS), "/v1/models")
        found: dict[str, tuple[str, str]] = {}
        with contextlib.suppress(AttributeError, TypeError):  # the answer has another structure
            for card in cast("list[dict[str, Any]]", answer.fields.get("data")):
                found[str(card.get("id"))] = str(card.get("root")), str(card.get("parent") or "")
        return found

    # Loading.

    def load(self, weights: ServedWeights) -> None:
        """Load weights on the server.

        If the load fails half-way, the server is `partial`: `resume` does nothing until another
        load succeeds.

        Raises:
            CallError: The load failed; the message has the server's text. The error is `harmless`
                if the server is unchanged.
        """
        if weights.adapter:
            self._load_adapter(weights.adapter, weights.folder)
            return
        was_whole = not self.partial
        # Written before the call, since this process may be killed during the call.
        _create_marker(self._part, f"{self.url} was not asked to load")
        try:
            self._load(weights.folder, weights.version)
        except CallError as error:
            if error.harmless and was_whole:
                self._part.unlink(missing_ok=True)
            raise
        self._part.unlink(missing_ok=True)

    @abstractmethod
    def _load(self, folder: str, version: str) -> None: ...  # load the model's own weights

    @abstractmethod
    def _load_adapter(self, name: str, folder: str) -> None: ...  # load or replace an adapter

    # Pauses.

    @abstractmethod
    def _paused(self) -> bool:
        """Return whether any client has paused the server."""

    @abstractmethod
    def _request_pause(self, mode: str) -> HttpAnswer: ...  # make the call that pauses

    def pause(self) -> None:
        """Pause the server until `resume`; do nothing if another client has paused it.

        Raises:
            CallError: The server does not confirm the pause; its weights are unchanged.
        """
        if self._pause != UNPAUSED:
            self._pause_in(self._pause)

    def _pause_in(self, mode: str) -> None:
        try:
            if self._paused() and not self._mark.exists():
                return
            # Written before the call, since this process may be killed during the call.
            _create_marker(self._mark, f"{self.url} was not asked to pause")
            self._checked(self._request_pause(mode), "its pause")
        except CallError as error:  # harmless, since a pause does not change weights
            raise CallError(str(error), harmless=True) from None

    def hold(self) -> None:
        """Pause a server that may have parts of two versions.

        Raises:
            CallError: The server does not confirm the pause, so it may answer requests.
        """
        if self._pause != UNPAUSED:
            return  # the server was paused before the load
        try:
            self._pause_in(self.last_resort)
        except CallError as error:
            raise CallError(f"{error}: it may ANSWER with parts of two versions") from None

    def resume(self) -> None:
        """End a pause that this or an earlier bridge began, unless the server is `partial`.

        Raises:
            CallError: The server does not confirm that it has resumed.
        """
        if self.partial or not self._mark.exists():
            return
        try:
            answer = self._server.post(self.resume_route, {}, ANSWER_SECONDS)
            why = "" if answer.succeeded else f"{self.url} answers {answer}"
        except CallError as error:
            why = str(error)
        if why:
            raise CallError(
                f"{self.url} may still be paused: {why}. The call is repeated every few seconds; "
                f"by hand: curl -X POST {self.url}{self.resume_route} "
                "-H 'Content-Type: application/json' -d '{}'"
            )
        self._mark.unlink(missing_ok=True)

    # Answers.

    def _checked(self, answer: HttpAnswer, what: str) -> HttpAnswer:
        """Return the answer if it reports success. `what` names the call in error texts.

        Raises:
            CallError: The answer reports a failure.
        """
        if answer.succeeded:
            return answer
        if answer.status in DENIED:
            advice = "; give its key with --token, or in WEIGHTBUS_SERVER_TOKEN"
        elif answer.status in NO_ROUTE and answer.message in ("Not Found", "Method Not Allowed"):
            advice = f"; {self._missing_route_advice(what)}"
        else:
            raise CallError(f"{self.url} refuses {what}: {answer}")
        raise CallError(f"{self.url} refuses {what}: {answer}{advice}", harmless=True)

    @abstractmethod
    def _missing_route_advice(self, what: str) -> str:
        """Return advice for an error text: why the server lacks the route of the call `what`."""

    def _kind_advice(self, path: str, kind: str) -> str:
        """Return advice for a server that may be of `kind`, whose servers have the route `path`."""
        if self._has_route(path):
            return f"it is a server of {kind}, by its {path}: --kind {kind}"
        return f"it is not a server of {self.kind}: check its URL and --kind"

    def _has_route(self, path: str) -> bool:
        with contextlib.suppress(CallError):
            return self._server.get(path, ANSWER_SECONDS).succeeded
        return False


class Sglang(Engine):
    kind = "sglang"
    pauses = ("retract", "abort", "in_place", UNPAUSED)
    last_resort = "abort"
    resume_route = "/continue_generation"

    def version(self) -> str:
        """Return the version label of the last load, or of the server's start."""
        return str(self._info().get("weight_version"))

    def loaded_from(self) -> str:
        """Return the server's model path: the path of the version that it loaded last."""
        return str(self._info().get("model_path"))

    def checkpoint(self) -> str:
        """Return the path of the checkpoint with which the server started.

        A load by this bridge changes the server's model path, but not its tokenizer path. So after
        such a load, the result is the tokenizer path.
        """
        info = self._info()
        path = str(info.get("model_path"))
        ours = PurePosixPath(path).parent == PurePosixPath(self._settings.server_path)
        return str(info.get("tokenizer_path") or path) if ours else path

    def check_reload(self, derived: str) -> None:
        """Accept every server: SGLang loads into the parameters that it computes with."""

    def _info(self) -> dict[str, Any]:
        return self._checked(self._server.get("/model_info", ANSWER_SECONDS), "/model_info").fields

    def _paused(self) -> bool:
        """Return whether the server accepts no requests; SGLang does not report pauses."""
        return not self._server.is_ready("/ready")

    def _request_pause(self, mode: str) -> HttpAnswer:
        return self._server.post("/pause_generation", {"mode": mode}, self._settings.seconds)

    def _load(self, folder: str, version: str) -> None:
        route = "/update_weights_from_disk"
        flush = self._pause != "in_place"  # in that mode, running requests still need the cache
        body = {"model_path": folder, "weight_version": version, "flush_cache": flush}
        answer = self._server.post(route, body, self._settings.seconds)
        if not answer.succeeded and answer.message.startswith(UPDATED):
            flush_cache = f"/flush_cache?timeout={FLUSH_SECONDS:g}"
            seconds = FLUSH_SECONDS + ANSWER_SECONDS
            self._checked(self._server.post(flush_cache, {}, seconds), flush_cache)
            body = {"new_version": version, "abort_all_requests": False}
            answer = self._server.post("/update_weight_version", body, ANSWER_SECONDS)
        self._succeeded(answer, route)

    def adapter(self, name: str) -> str | None:
        """Return an adapter's path; if that is this bridge's link, the link's target."""
        path, link = super().adapter(name), self._link
        ours = path is not None and PurePosixPath(path).name == link.name and link.is_symlink()
        return os.readlink(link) if ours else path

    @property
    def _link(self) -> Path:
        return self._settings.folder / f".adapter-{crc32(self.url.encode()):08x}"

    def _load_adapter(self, name: str, folder: str) -> None:
        new = self._link.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder)
        new.replace(self._link)
        # Unload even an adapter that the server does not list: some ranks may have it.
        seconds = self._settings.seconds
        answer = self._server.post("/unload_lora_adapter", {"lora_name": name}, seconds)
        if "does not exist" not in answer.message:
            self._succeeded(answer, "/unload_lora_adapter")
        body = {"lora_name": name, "lora_path": f"{self._settings.server_path}/{self._link.name}"}
        answer = self._server.post("/load_lora_adapter", body, seconds)
        # A request between the two calls may have made the server load the adapter.
        if "already loaded" not in answer.message:
            self._succeeded(answer, "/load_lora_adapter")

    def _succeeded(self, answer: HttpAnswer, route: str) -> None:
        if self._checked(answer, route).fields.get("success") is not True:
            raise CallError(f"{self.url} refuses {route}: {answer}")

    def _missing_route_advice(self, what: str) -> str:
        del what
        return self._kind_advice("/version", "vllm")


class Vllm(Engine):
    kind = "vllm"
    pauses = ("keep", "wait", "abort")
    last_resort = "keep"
    resume_route = "/resume"

    def version(self) -> str:
        """Return the version label that the last load set; `default` before the first load."""
        return str(self._get("/weight_info").get("weight_version"))

    def loaded_from(self) -> str:
        """Return the path or the name of the server's model, which loads do not change."""
        return next((root for root, parent in self._listed_models().values() if not parent), "")

    def checkpoint(self) -> str:
        """Return the path or the name of the server's model."""
        return self.loaded_from()

    def check_reload(self, derived: str) -> None:
        """Reject a server on a CPU, whose layers compute with packed copies of the weights."""
        config = str(self._server.get("/server_info", INFO_SECONDS).fields.get("vllm_config"))
        if "device_config=cpu" in config:
            raise CallError(
                f"{self.url} runs on a CPU, where vLLM's own reload does not update its packed "
                f"copies of a model's {derived}, so that it would answer with a mix of old and new "
                "weights: serve the model with weightbus's engine (weightbus[vllm]), which "
                "updates the copies",
                harmless=True,
            )

    def _get(self, path: str) -> dict[str, Any]:
        return self._checked(self._server.get(path, ANSWER_SECONDS), path).fields

    def _paused(self) -> bool:
        return self._get("/is_paused").get("is_paused") is True

    def _request_pause(self, mode: str) -> HttpAnswer:
        return self._server.post(f"/pause?mode={mode}", None, self._settings.seconds)

    def hold(self) -> None:
        """Pause the server until it is restarted, and set its label to `BROKEN`."""
        super().hold()
        with contextlib.suppress(CallError):  # without the label, the next load is only tried
            route = "/update_weight_version"
            self._server.post(route, {"new_version": BROKEN}, ANSWER_SECONDS)

    def _load(self, folder: str, version: str) -> None:
        if self.version() == BROKEN:
            raise CallError(
                f"{self.url} keeps what it has half loaded, and another load may not repair that: "
                "restart it, and it gets the last version again"
            )
        self._rpc("reload_weights", weights_path=folder)
        end = time.monotonic() + FLUSH_SECONDS
        while not self._flushed():
            if time.monotonic() > end:
                raise CallError(
                    f"{self.url} has the new weights, but its prefix cache still has results of "
                    f"the old ones after {FLUSH_SECONDS:g} s"
                )
            time.sleep(FLUSH_PAUSE_SECONDS)
        route = "/update_weight_version"
        answer = self._server.post(route, {"new_version": version}, ANSWER_SECONDS)
        self._checked(answer, route)

    def _rpc(self, method: str, **named: str) -> None:
        seconds = self._settings.seconds
        body = {"method": method, "kwargs": named, "timeout": seconds}
        answer = self._server.post("/collective_rpc", body, seconds + ANSWER_SECONDS)
        self._checked(answer, f"/collective_rpc {method}")
        if "results" not in answer.fields:
            raise CallError(f"{self.url} answers without the results of {method}: {answer}")

    def _flushed(self) -> bool:
        """Empty the prefix cache and restart running requests; return whether this succeeded."""
        route = "/reset_prefix_cache"
        path = f"{route}?reset_running_requests=true"
        answer = self._checked(self._server.post(path, None, FLUSH_SECONDS), route)
        return answer.fields.get("success") is True

    def _load_adapter(self, name: str, folder: str) -> None:
        route = "/v1/load_lora_adapter"
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        self._checked(self._server.post(route, body, self._settings.seconds), route)

    def _missing_route_advice(self, what: str) -> str:
        advice = "start it with VLLM_SERVER_DEV_MODE=1, without which it has no such route"
        if "lora" in what:
            advice = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        return advice if self._has_route("/version") else self._kind_advice("/model_info", "sglang")


def _create_marker(mark: Path, what: str) -> None:
    """Create a marker file that outlives this process.

    Raises:
        CallError: The file cannot be created; the message is `what` and the reason.
    """
    try:
        mark.touch()
    except OSError as error:
        raise CallError(f"{what}: {error}", harmless=True) from None


ENGINES: dict[str, type[Engine]] = {each.kind: each for each in (Sglang, Vllm)}
