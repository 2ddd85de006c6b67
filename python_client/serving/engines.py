"""What servers of each kind are asked: their routes, what they take, and how they answer.

Read in sglang 0.5.23 and vllm 0.28.0 and 0.33.0. Every call may be made twice (`calls.Server`).

sglang  /update_weights_from_disk waits until running requests have ended, and holds new ones back;
        in a pause it loads at once. It answers {"success", "message"}, with 400 where it has
        failed; "Weights were updated, ..." means that only the cache was not flushed. What it calls
        a rollback reads the new files. Names that its model does not have it skips, with success.
        An adapter can only be unloaded, which waits for the requests that use it, and loaded. A
        request that comes in between has it loaded again from the path that it had: so that path
        is a link, which leads to the new version by then.
vllm    /collective_rpc has each rank call `reload_weights`; the server must not generate meanwhile.
        Its answer is a list, or 500 with the exception's words. With VLLM_SERVER_DEV_MODE=1 only.
        After a failure in the middle it keeps what was half loaded, and a load that follows may
        fail with the same words, or seem to repair it and fail at the next (seen in 0.32).
        An adapter is loaded before the one of its name is removed. The prefix cache knows adapters
        by their path (before 0.33 by their name), so a new version needs a new path.
"""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, cast
from zlib import crc32

from .calls import Answer, CallError, Server

ANSWER_SECONDS = 10.0  # for what takes no time: whoever is asked how things stand, or to go on
INFO_SECONDS = 60.0  # for all that it knows of itself and its host, at first
FLUSH_SECONDS = 30.0  # for a cache, which is flushed between two steps
FLUSH_PAUSE_SECONDS = 0.2  # between two tries to flush it
UNPAUSED = "none"  # the mode of a server that waits for its requests by itself
BROKEN = "broken"  # what a server says it runs that must be started again
UPDATED = "Weights were updated"  # how sglang begins to say that only its cache was not flushed
DENIED = {401, 403}
LACKING = {404, 405}


@dataclass(frozen=True)
class How:
    """How servers are to be treated.

    Attributes:
        pause: What becomes of running requests: a mode of the engine's; None: the first of them.
        seconds: That a server may take to load a version.
        folder: Where versions are, and what has to outlive us: who is paused, and links.
        seen: What servers call it.
    """

    pause: str | None
    seconds: float
    folder: Path
    seen: str


@dataclass(frozen=True)
class Weights:
    """What a server is to run.

    Attributes:
        folder: Where it lies, as the server sees that.
        version: What the server is to say that it runs; of no use with an adapter.
        adapter: The name of the adapter that it is; empty: the model's own weights.
    """

    folder: str
    version: str = ""
    adapter: str = ""


class Engine(ABC):
    """A server of some kind."""

    kind: ClassVar[str]
    pauses: ClassVar[tuple[str, ...]]  # the modes there are, the default first
    last_resort: ClassVar[str]  # the one for a server that must not answer
    go_on: ClassVar[str]  # the route that ends a pause

    def __init__(self, server: Server, how: How) -> None:
        self._server, self._how = server, how
        self._pause = self.pauses[0] if how.pause is None else how.pause
        # Both outlive us: whoever comes next with this folder knows what we have left behind.
        self._mark = how.folder / f".paused-{crc32(self.url.encode()):08x}"
        self._part = how.folder / f".partial-{crc32(self.url.encode()):08x}"

    @property
    def url(self) -> str:
        return self._server.url

    # What it runs.

    @abstractmethod
    def version(self) -> str:
        """Return which weights it says it runs.

        Raises:
            CallError: It does not answer, or is of another kind.
        """

    @abstractmethod
    def home(self) -> str:
        """Return where its weights were read from, as it calls that."""

    @abstractmethod
    def checkpoint(self) -> str:
        """Return the folder or the name of the checkpoint that it was started with."""

    @abstractmethod
    def check_reload(self, derived: str) -> None:
        """Check that its reload makes anew what it has derived from such weights.

        Raises:
            CallError: It does not, so it would answer as neither the old nor the new weights.
        """

    @property
    def partial(self) -> bool:
        """Whether it may hold parts of two versions, and so must not answer."""
        return self._part.exists()

    def adapter(self, name: str) -> str | None:
        """Return where an adapter was read from; None if there is none of this name.

        Raises:
            CallError: The model itself has that name.
        """
        root, parent = self._cards().get(name, (None, "none"))
        if not parent:
            text = f"{self.url} calls its own model {name!r}: give another name with --lora"
            raise CallError(text, harmless=True)
        return root

    def _cards(self) -> dict[str, tuple[str, str]]:
        """Return the models that it lists: where each lies, and its base if it is an adapter."""
        answer = self._checked(self._server.get("/v1/models", ANSWER_SECONDS), "/v1/models")
        found: dict[str, tuple[str, str]] = {}
        with contextlib.suppress(AttributeError, TypeError):  # it has another form, so no models
            for card in cast("list[dict[str, Any]]", answer.fields.get("data")):
                found[str(card.get("id"))] = str(card.get("root")), str(card.get("parent") or "")
        return found

    # What it is to run.

    def load(self, weights: Weights) -> None:
        """Have it load weights. Until it has all of them it does not go on, whoever asks us.

        Raises:
            CallError: It has not, in its own words. It is harmless if it has changed nothing.
        """
        if weights.adapter:
            self._load_adapter(weights.adapter, weights.folder)
            return
        was_whole = not self.partial
        _write(self._part, f"{self.url} does not begin to load")  # first: we may be killed
        try:
            self._load(weights.folder, weights.version)
        except CallError as error:
            if error.harmless and was_whole:
                self._part.unlink(missing_ok=True)
            raise
        self._part.unlink(missing_ok=True)

    @abstractmethod
    def _load(self, folder: str, version: str) -> None: ...

    @abstractmethod
    def _load_adapter(self, name: str, folder: str) -> None: ...

    # Pauses.

    @abstractmethod
    def _paused(self) -> bool:
        """Return whether somebody else has paused it, who will have it go on."""

    @abstractmethod
    def _stop(self, mode: str) -> Answer: ...

    def pause(self) -> None:
        """Have it answer nothing until it is resumed; unless somebody else has paused it.

        Raises:
            CallError: It does not say that it does; it changes nothing.
        """
        if self._pause != UNPAUSED:
            self._stand_still(self._pause)

    def _stand_still(self, mode: str) -> None:
        try:
            if self._paused() and not self._mark.exists():
                return
            _write(self._mark, f"{self.url} is not paused")  # first: we may be killed
            self._checked(self._stop(mode), "its pause")
        except CallError as error:  # its weights are as they were
            raise CallError(str(error), harmless=True) from None

    def hold(self) -> None:
        """Have it answer nothing, since it may hold parts of two versions.

        Raises:
            CallError: It may answer.
        """
        if self._pause != UNPAUSED:
            return  # it was paused before it began to load
        try:
            self._stand_still(self.last_resort)
        except CallError as error:
            raise CallError(f"{error}: it may ANSWER with parts of two versions") from None

    def resume(self) -> None:
        """Have it go on, if we or a bridge before us paused it; not with parts of two versions.

        Raises:
            CallError: It does not say that it does.
        """
        if self.partial or not self._mark.exists():
            return
        try:
            answer = self._server.post(self.go_on, {}, ANSWER_SECONDS)
            why = "" if answer.done else f"{self.url} answers {answer}"
        except CallError as error:
            why = str(error)
        if why:
            raise CallError(
                f"{self.url} may still be paused: {why}. This is tried again every few seconds; by "
                f"hand: curl -X POST {self.url}{self.go_on} -H 'Content-Type: application/json' "
                "-d '{}'"
            )
        self._mark.unlink(missing_ok=True)

    # Answers.

    def _checked(self, answer: Answer, what: str) -> Answer:
        """Return an answer that says that it is done.

        Raises:
            CallError: It says something else.
        """
        if answer.done:
            return answer
        if answer.status in DENIED:
            advice = "; give its key with --token, or in WEIGHTBUS_SERVER_TOKEN"
        elif answer.status in LACKING and answer.message in ("Not Found", "Method Not Allowed"):
            advice = f"; {self._lacking(what)}"
        else:
            raise CallError(f"{self.url} refuses {what}: {answer}")
        raise CallError(f"{self.url} refuses {what}: {answer}{advice}", harmless=True)

    @abstractmethod
    def _lacking(self, what: str) -> str:
        """Say what to do about a route that is not there."""

    def _other(self, path: str, kind: str) -> str:
        """Say that it is of another kind, if it has the route that this is known by."""
        if self._has(path):
            return f"it is a server of {kind}, by its {path}: --kind {kind}"
        return f"it is no server of {self.kind}: check its URL and --kind"

    def _has(self, path: str) -> bool:
        with contextlib.suppress(CallError):
            return self._server.get(path, ANSWER_SECONDS).done
        return False


class Sglang(Engine):
    kind = "sglang"
    pauses = ("retract", "abort", "in_place", UNPAUSED)
    last_resort = "abort"
    go_on = "/continue_generation"

    def version(self) -> str:
        """Return what it was told with the weights that it runs, or at its start."""
        return str(self._info().get("weight_version"))

    def home(self) -> str:
        """Return the path of its model, which is that of the last version that it has loaded."""
        return str(self._info().get("model_path"))

    def checkpoint(self) -> str:
        """Return the path of its model; once that is one of ours, of its tokenizer, which stays."""
        info = self._info()
        path = str(info.get("model_path"))
        ours = PurePosixPath(path).parent == PurePosixPath(self._how.seen)
        return str(info.get("tokenizer_path") or path) if ours else path

    def check_reload(self, derived: str) -> None:
        """Let all pass: what it loads it loads into the parameters that it computes by."""

    def _info(self) -> dict[str, Any]:
        return self._checked(self._server.get("/model_info", ANSWER_SECONDS), "/model_info").fields

    def _paused(self) -> bool:
        """It does not say more than that it takes no requests."""
        return not self._server.ready("/ready")

    def _stop(self, mode: str) -> Answer:
        return self._server.post("/pause_generation", {"mode": mode}, self._how.seconds)

    def _load(self, folder: str, version: str) -> None:
        route = "/update_weights_from_disk"
        flush = self._pause != "in_place"  # whose requests go on with what they have in the cache
        body = {"model_path": folder, "weight_version": version, "flush_cache": flush}
        answer = self._server.post(route, body, self._how.seconds)
        if not answer.done and answer.message.startswith(UPDATED):
            flush_cache = f"/flush_cache?timeout={FLUSH_SECONDS:g}"
            seconds = FLUSH_SECONDS + ANSWER_SECONDS
            self._checked(self._server.post(flush_cache, {}, seconds), flush_cache)
            body = {"new_version": version, "abort_all_requests": False}
            answer = self._server.post("/update_weight_version", body, ANSWER_SECONDS)
        self._succeeded(answer, route)

    def adapter(self, name: str) -> str | None:
        """Return where an adapter was read from: where our link leads, if it was that."""
        path, link = super().adapter(name), self._link
        ours = path is not None and PurePosixPath(path).name == link.name and link.is_symlink()
        return os.readlink(link) if ours else path

    @property
    def _link(self) -> Path:
        return self._how.folder / f".adapter-{crc32(self.url.encode()):08x}"

    def _load_adapter(self, name: str, folder: str) -> None:
        new = self._link.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder)
        new.replace(self._link)
        # Listed or not: there may be one that was loaded or unloaded by some ranks only.
        answer = self._server.post("/unload_lora_adapter", {"lora_name": name}, self._how.seconds)
        if "does not exist" not in answer.message:
            self._succeeded(answer, "/unload_lora_adapter")
        body = {"lora_name": name, "lora_path": f"{self._how.seen}/{self._link.name}"}
        answer = self._server.post("/load_lora_adapter", body, self._how.seconds)
        if "already loaded" not in answer.message:  # for a request that came in between
            self._succeeded(answer, "/load_lora_adapter")

    def _succeeded(self, answer: Answer, route: str) -> None:
        if self._checked(answer, route).fields.get("success") is not True:
            raise CallError(f"{self.url} refuses {route}: {answer}")

    def _lacking(self, what: str) -> str:
        del what
        return self._other("/version", "vllm")


class Vllm(Engine):
    kind = "vllm"
    pauses = ("keep", "wait", "abort")
    last_resort = "keep"
    go_on = "/resume"

    def version(self) -> str:
        """Return what it was told of the weights that it runs; `default` after its start."""
        return str(self._get("/weight_info").get("weight_version"))

    def home(self) -> str:
        """Return the path or the name of its model."""
        return next((root for root, parent in self._cards().values() if not parent), "")

    def checkpoint(self) -> str:
        """Return the same: it says what it was started with, whatever it has loaded since."""
        return self.home()

    def check_reload(self, derived: str) -> None:
        """Refuse a server on a processor, whose layers compute by packed copies of these."""
        said = str(self._server.get("/server_info", INFO_SECONDS).fields.get("vllm_config"))
        if "device_config=cpu" in said:
            raise CallError(
                f"{self.url} runs on a processor, where vLLM's own reload leaves packed copies of "
                f"a model's {derived} as they were, so that it would answer as neither the old "
                "weights nor the new ones: serve it with weightbus's engine (weightbus[vllm]), "
                "which packs them anew",
                harmless=True,
            )

    def _get(self, path: str) -> dict[str, Any]:
        return self._checked(self._server.get(path, ANSWER_SECONDS), path).fields

    def _paused(self) -> bool:
        return self._get("/is_paused").get("is_paused") is True

    def _stop(self, mode: str) -> Answer:
        return self._server.post(f"/pause?mode={mode}", None, self._how.seconds)

    def hold(self) -> None:
        """Have it answer nothing before it is started again; and say that it is broken."""
        super().hold()
        with contextlib.suppress(CallError):  # then it is tried whether a load repairs it
            route = "/update_weight_version"
            self._server.post(route, {"new_version": BROKEN}, ANSWER_SECONDS)

    def _load(self, folder: str, version: str) -> None:
        if self.version() == BROKEN:
            raise CallError(
                f"{self.url} keeps what it has half loaded, so that no load repairs it for certain:"
                " restart it, and it gets the last version again"
            )
        self._rpc("reload_weights", weights_path=folder)
        end = time.monotonic() + FLUSH_SECONDS
        while not self._flushed():
            if time.monotonic() > end:
                raise CallError(
                    f"{self.url} has the new weights, but does not let go of what its prefix cache "
                    f"has of the old ones, in {FLUSH_SECONDS:g} s"
                )
            time.sleep(FLUSH_PAUSE_SECONDS)
        route = "/update_weight_version"
        answer = self._server.post(route, {"new_version": version}, ANSWER_SECONDS)
        self._checked(answer, route)

    def _rpc(self, method: str, **named: str) -> None:
        seconds = self._how.seconds
        body = {"method": method, "kwargs": named, "timeout": seconds}
        answer = self._server.post("/collective_rpc", body, seconds + ANSWER_SECONDS)
        self._checked(answer, f"/collective_rpc {method}")
        if "results" not in answer.fields:
            raise CallError(f"{self.url} does not say what {method} has come to: {answer}")

    def _flushed(self) -> bool:
        """Have requests that run begin again with the new weights, and forget all of the old."""
        route = "/reset_prefix_cache"
        path = f"{route}?reset_running_requests=true"
        answer = self._checked(self._server.post(path, None, FLUSH_SECONDS), route)
        return answer.fields.get("success") is True

    def _load_adapter(self, name: str, folder: str) -> None:
        route = "/v1/load_lora_adapter"
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        self._checked(self._server.post(route, body, self._how.seconds), route)

    def _lacking(self, what: str) -> str:
        known = "start it with VLLM_SERVER_DEV_MODE=1, without which it has no such route"
        if "lora" in what:
            known = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        return known if self._has("/version") else self._other("/model_info", "sglang")


def _write(mark: Path, what: str) -> None:
    """Make a file that outlives us.

    Raises:
        CallError: It cannot be made, so nothing is asked of the server.
    """
    try:
        mark.touch()
    except OSError as error:
        raise CallError(f"{what}: {error}", harmless=True) from None


ENGINES: dict[str, type[Engine]] = {each.kind: each for each in (Sglang, Vllm)}
