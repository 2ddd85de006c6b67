"""Transfers versions from a trainer to vLLM servers, which pause only for the load.

Versions and results go over the bus: a version is committed when every rank has staged it, and the
receipt has the result of each rank. HTTP calls to the servers only control when ranks load it:

    calls                   until                       meanwhile
    publish_async           all ranks have staged it    servers generate with the old version
    start, update           all ranks have prepared it  the same
    pause, update, finish   all ranks acknowledge it    each rank loads it
    resume                                              also called after an error

Any call may be lost, or arrive twice or late. A call without an answer is repeated: all calls are
idempotent except `finish` (see `_finish`). If a transfer fails, `_roll_back` makes each server
release the version before the server generates again, so that a late call loads nothing.
`_roll_back` also sets each server's version label to the version that its ranks run. If a server
does not answer these calls either, the next transfer begins with them.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...bus.deadline import ANSWER_SECONDS
from ...bus.errors import DeadlineError, PublishError, WorkersMissingError
from ...bus.publisher.calls import NOTHING_RUNS
from ...bus.receipt import Receipt
from ...codecs.errors import StateError
from ...codecs.layout import Signature
from ..publisher import Publisher
from .calls import ServerError, SilentError
from .rank import NO_TRAINER, Join, RankVersion
from .server import PauseMode, VllmServers

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.serving")

RESUME_SECONDS = 10.0  # seconds for a resume
# How much of the pause timeout is reserved for `_roll_back`: these seconds, or a fourth of the
# timeout if that is less.
ROLL_BACK_SECONDS, ROLL_BACK_PART = 10.0, 4
RETRY_SECONDS = 0.1, 0.4, 1.6  # pauses before the retries of a call without an answer
REPORT_SECONDS = 1.0  # longest wait for the reports of ranks whose server does not answer, or fails
ALIVE_SECONDS = 2.0  # seconds in which a live server's front end answers
LOOK_SECONDS = 0.25  # seconds between two checks whether all ranks have joined
# Parts of vLLM's error texts about a session, as raised by `start`, `update` and `finish`.
OPEN = "while a weight update is already active"
CLOSED = "start_weight_update must be called"
ENDED = "called without a matching start_weight_update"
SESSION_ERRORS = OPEN, CLOSED, ENDED
CANCELLED = "its trainer has cancelled it"
ERROR_TEXT_MAX = 500  # characters of an error text that is sent to the ranks


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`: calls all ranks of all servers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@runtime_checkable
class Pausing(Protocol):
    """A client that can also pause servers."""

    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...


@runtime_checkable
class Labelling(Protocol):
    """A client that can also set the version label of servers."""

    def update_weight_version(self, new_version: str) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A client whose calls can be given a time limit."""

    def within(self, seconds: float) -> AbstractContextManager[None]: ...


@runtime_checkable
class Counting(Protocol):
    """A client that knows the names of its ranks."""

    def ranks(self, deployment: str) -> list[str]: ...


class Transfers:
    """Transfers the versions of one model to the servers of one client.

    Args:
        publisher: Publishes the versions.
        client: Calls the servers.
        model: The model's id on the bus.
        deployment: The name of the servers on the bus.
        ranks: The number of ranks, needed if the client does not know it.
        timeout: Seconds within which every rank must stage a version, while the servers generate.
        pause_timeout: The longest pause, in seconds.
        pause: The mode of `VllmServer.pause`; None: this object does not pause the servers.

    Raises:
        ServerError: A server does not answer, or lacks the routes of a transfer.
    """

    def __init__(
        self,
        publisher: Publisher,
        client: Client,
        *,
        model: str,
        deployment: str,
        ranks: int | None = None,
        timeout: float = 300.0,
        pause_timeout: float = 60.0,
        pause: PauseMode | None = "keep",
    ) -> None:
        self._publisher, self._client = publisher, client
        self._model, self._deployment = model, deployment
        self._timeout, self._pause_timeout = timeout, pause_timeout
        self._mode: PauseMode | None = pause if isinstance(client, Pausing) else None
        self._join: dict[str, Any] = {}
        self._gathered = False  # whether all ranks were connected after the last join call
        # (epoch, version) that servers may still have staged after a failed transfer
        self._unreleased: tuple[int, int] | None = None
        self._sends = Lock()
        self._maybe_paused = False  # whether a server may still be paused
        self._names = self._ask_names(ranks)
        count = len(self._names) or ranks
        if count is None:
            raise ValueError(
                f"{type(client).__name__} does not know how many ranks its servers have: give "
                "world_size= in the TrainerInit"
            )
        self._count = count

    def _ask_names(self, count: int | None) -> list[str]:
        """Return the names of the ranks; empty if they are not known.

        Raises:
            ServerError: A server does not answer, and `count`, the number of ranks, is None.
        """
        if not isinstance(self._client, Counting):
            return []
        try:
            return self._client.ranks(self._deployment)
        except ServerError:
            if count is None:
                raise
            return []

    def join(self, tensors: Mapping[str, Signature]) -> None:
        """Make every rank join, and check whether it can load tensors with these signatures.

        Raises:
            ServerError: A server does not answer, or does not run weightbus's engine.
        """
        published = self._publisher.described(tensors)
        join = Join(
            address=self._publisher.address,
            model=self._model,
            deployment=self._deployment,
            deadline=self._pause_timeout,
            tensors={name: (dtype, [*shape]) for name, (dtype, shape) in published.items()},
        )
        self._join, self._gathered = asdict(join), False
        self._make_join(time.monotonic() + self._timeout)

    def send(self, weights: object, metadata: Mapping[str, str] | None = None) -> Receipt:
        """Publish weights, and load them on every rank.

        Returns:
            The receipt, in which every rank has applied the weights.
        Raises:
            PublishError: Some ranks have not applied the weights; the message names them with the
                reasons. Unless it reports a broken model, they run their previous weights.
            DeadlineError: Another thread is still sending.
            WorkersMissingError: Some ranks are not connected.
            ServerError: A server does not answer.
        """
        seconds = self._timeout + self._pause_timeout
        if not self._sends.acquire(timeout=seconds):
            raise DeadlineError(f"{self._model}: another thread has been sending it {seconds:g} s")
        try:
            return self._send(weights, metadata)
        finally:
            self._sends.release()

    def _send(self, weights: object, metadata: Mapping[str, str] | None) -> Receipt:
        # Publish and load weights; see `send`. Only one thread runs this at a time.
        staged_by = time.monotonic() + self._timeout
        self._roll_back_late(staged_by)
        ranks = self._gather(staged_by)
        future = self._publisher.publish_async(
            self._model,
            weights,
            commit="together",
            require=ranks,
            timeout=self._timeout + self._pause_timeout,
            metadata=metadata,
        )
        version = self._publisher.wait_for_commit(future, max(0.0, staged_by - time.monotonic()))
        if version is None:
            self._publisher.give_up(future, f"not all ranks have it within {self._timeout:g} s")
            return future.result(ANSWER_SECONDS)  # raises an error that names the ranks without it
        return self._swap(version, future, ranks)

    def resume(self) -> None:
        """Resume servers that may still be paused after a transfer; do nothing if none is.

        Raises:
            ServerError: A server does not resume.
        """
        if self._maybe_paused and isinstance(self._client, Pausing):
            self._retry(self._client.resume, time.monotonic() + RESUME_SECONDS)
            self._maybe_paused = False

    # The connected ranks.

    def _gather(self, until: float) -> list[str]:
        """Wait until all ranks are connected, and return their names.

        If ranks that had joined are missing, their server was restarted: make all ranks join again.
        """
        if self._gathered and self._lacking(self._connected()):
            self._make_join(until)
        while lacking := self._lacking(connected := self._connected()):
            left = until - time.monotonic()
            if left <= 0:
                raise WorkersMissingError(
                    f"{self._count - len(connected)} of {self._count} ranks are missing after "
                    f"{self._timeout:g} s: {lacking}. Connected: {', '.join(connected) or 'none'}. "
                    f"Check that they reach {self._publisher.address}, and read their servers' logs"
                )
            more, seconds = len(self._workers()) + 1, min(left, LOOK_SECONDS)
            with suppress(WorkersMissingError):
                self._publisher.wait_for_workers(more, timeout=seconds, model=self._model)
        self._gathered = True
        return connected

    def _make_join(self, until: float) -> None:
        join = partial(self._client.init_weight_transfer_engine, self._join)
        self._retry(join, until)

    def _workers(self) -> list[str]:
        known = self._publisher.workers().values()
        return [w.name for w in known if w.state != "lost" and self._model in w.models]

    def _connected(self) -> list[str]:
        """Return the names of the connected ranks, but not of other workers of the same model."""
        if self._names:
            connected = {*self._workers()}
            return [name for name in self._names if name in connected]
        rank = re.compile(rf"{re.escape(self._deployment)}\d*-dp\d+-rank\d+")
        return [name for name in self._workers() if rank.fullmatch(name)]

    def _lacking(self, connected: list[str]) -> str:
        """Return a text with the names of ranks that are not `connected`; "" if all are."""
        if self._names:
            return ", ".join(name for name in self._names if name not in connected)
        return "" if len(connected) >= self._count else f"some of {self._deployment}"

    # A transfer.

    def _swap(self, version: tuple[int, int], future: Future[Receipt], ranks: list[str]) -> Receipt:
        """Load a version that all ranks have staged; return the receipt, the result of `future`."""
        end = time.monotonic() + self._pause_timeout
        until = end - min(ROLL_BACK_SECONDS, self._pause_timeout / ROLL_BACK_PART)
        name = "{}.{}".format(*version)
        self._unreleased = version  # reset at the end, when all ranks run this version
        try:
            self._open(until)
            self._update(version, until)
            if future.done():
                future.result()
            self._pause(until)
            self._update(version, until, load=True)
            self._finish(name, future, until)
            receipt = self._result(future, until)
        except BaseException as error:
            receipt = self._roll_back(error, version, future, ranks, end)
        else:
            with suppress(Exception):
                self._resume(end)
        self._unreleased = None
        if self._maybe_paused:
            log.warning("all ranks run version %s, but a server may still be paused", name)
        return receipt

    def _open(self, until: float, client: Client | None = None) -> None:
        """Begin a session on each rank, or use a session that is still open."""
        client = self._client if client is None else client
        try:
            self._retry(client.start_weight_update, until, client, own=OPEN)
        except Exception as error:
            if OPEN not in _text(error):
                raise
            log.warning("the servers have an open session, of this or an earlier call; it is used")

    def _update(
        self,
        version: tuple[int, int],
        until: float,
        client: Client | None = None,
        *,
        load: bool = False,
        cancel: str = "",
    ) -> None:
        client = self._client if client is None else client
        left = max(0.0, until - time.monotonic())
        info = asdict(RankVersion(*version, deadline=left / 2, load=load, cancel=cancel))
        update = partial(client.update_weights, info)
        try:
            self._retry(update, until, client, own=CLOSED)
        except Exception as error:
            if CLOSED not in _text(error):
                raise
            self._open(until, client)  # a late call of an earlier transfer has ended this session
            self._retry(update, until, client)

    def _pause(self, until: float) -> None:
        if self._mode is not None and isinstance(self._client, Pausing):
            self._maybe_paused = True
            self._retry(partial(self._client.pause, self._mode), until)

    def _resume(self, until: float) -> None:
        if self._maybe_paused and isinstance(self._client, Pausing):
            self._retry(self._client.resume, max(until, time.monotonic() + 1.0))
            self._maybe_paused = False

    def _finish(self, name: str, future: Future[Receipt], until: float) -> None:
        """Make the ranks load the version.

        A repeated `finish` fails, since the first one ends the session. So if no answer comes, wait
        for the ranks' reports over the bus, and repeat the call only if the reports do not arrive.
        """
        finish = partial(self._client.finish_weight_update, name)
        try:
            self._call(finish, until)
        except Exception as error:
            if not _unanswered(error):
                raise
            log.warning("%s", error)
            wait([future], min(REPORT_SECONDS, max(0.0, until - time.monotonic())))
            if not future.done() and time.monotonic() >= until:
                raise
            if not future.done():
                self._call(finish, until)
            self._set_label(name, until)

    def _result(self, future: Future[Receipt], until: float) -> Receipt:
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except FutureTimeout as error:
            if future.done():
                raise
            raise SilentError(
                f"not all ranks have acknowledged the version within {self._pause_timeout:g} s"
            ) from error

    def _set_label(self, name: str, until: float, client: Client | None = None) -> None:
        """Set the servers' version label, which `finish` sets only if it succeeds."""
        client = self._client if client is None else client
        if isinstance(client, Labelling):
            self._retry(partial(client.update_weight_version, name), until, client)

    # After a failure.

    def _roll_back(
        self,
        error: BaseException,
        version: tuple[int, int],
        future: Future[Receipt],
        ranks: list[str],
        end: float,
    ) -> Receipt:
        """Make each server release a version that some ranks have not loaded, and resume it.

        Returns:
            The receipt, if all ranks run the version despite the `error`.

        Raises:
            PublishError: Some ranks do not run the version; the message has the reasons.
            BaseException: `error`, if it is not an Exception but, for example, a KeyboardInterrupt.
        """
        why, clients = " ".join(_text(error).split())[:ERROR_TEXT_MAX], self._clients()
        halfway = time.monotonic() + max(1.0, (end - time.monotonic()) / 2)
        with ThreadPoolExecutor(len(clients), "weightbus-back") as threads:

            def each(do: Callable[[Client], None]) -> dict[int, Exception]:
                calls = [threads.submit(do, client) for client in clients]
                found = {n: c.exception() for n, c in enumerate(calls)}
                return {n: e for n, e in found.items() if isinstance(e, Exception)}

            # When a server has answered, the publisher has the results of all ranks of that server.
            cancel = why or CANCELLED
            failed = each(lambda c: self._update(version, halfway, c, cancel=cancel))
            if failed:  # if the ranks have ended too, the publisher is about to find out
                wait([future], min(REPORT_SECONDS, max(0.0, halfway - time.monotonic())))
            self._publisher.give_up(future, why)
            receipt, verdict = self._verdict(future)
            ended = max(end, time.monotonic() + 1.0)
            name, several = "{}.{}".format(*version), len(clients) > 1
            silent: dict[int, Exception] = {}

            def finish(client: Client) -> None:
                index = clients.index(client)
                if index not in failed:
                    with suppress(Exception):  # the session may have ended already
                        self._call(client.finish_weight_update, ended, client)
                    server_ranks = self._ranks_of(index, ranks, several=several)
                    label = _label(name, receipt, server_ranks)
                    if label:
                        self._set_label(label, ended, client)
                elif not self._alive(client):
                    silent[index] = failed[index]
                    return  # do not resume: a delayed call would load while the server generates
                if self._maybe_paused and isinstance(client, Pausing):
                    self._retry(client.resume, ended, client)

            unresumed = {**each(finish), **silent}
        whole: object = self._client
        if not unresumed and self._maybe_paused and several and isinstance(whole, Pausing):
            # Each server is resumed already; this call updates the state of the common client.
            with suppress(Exception):
                self._retry(whole.resume, ended)
        self._maybe_paused = self._maybe_paused and bool(unresumed)
        if not isinstance(error, Exception):
            raise error
        if verdict is None:
            log.warning("all ranks run version %s, although a call failed: %s", name, why)
            return receipt
        raised = verdict if error is verdict else PublishError(f"{why}; {verdict}", receipt)
        for index, failure in unresumed.items() if self._maybe_paused else ():
            raised.add_note(
                f"{clients[index]!r} may still be paused, POST /resume to it: {_text(failure)}"
            )
        raise raised from (None if raised is error else error)

    def _verdict(self, future: Future[Receipt]) -> tuple[Receipt, PublishError | None]:
        """Return a version's receipt, and its PublishError; None if the publish succeeded."""
        try:
            return future.result(ANSWER_SECONDS), None
        except PublishError as error:
            return error.receipt, error

    def _roll_back_late(self, until: float) -> None:
        """Make servers that did not answer `_roll_back` release the version; resume all servers."""
        if self._unreleased is not None:
            for client in self._clients():
                self._open(until, client)
                try:
                    self._update(self._unreleased, until, client, cancel=CANCELLED)
                except Exception as error:
                    if NO_TRAINER not in _text(error):
                        raise
                    continue  # the server was restarted, so it has not staged the version
                with suppress(Exception):
                    self._call(client.finish_weight_update, until, client)
            self._unreleased = None
        self._resume(until)

    def _clients(self) -> list[Client]:
        """Return one client per server; only the common client if its servers are not known."""
        client = self._client
        if isinstance(client, VllmServers) and len(client.servers) > 1:
            return [*client.servers]
        return [client]

    def _ranks_of(self, server: int, ranks: list[str], *, several: bool) -> list[str]:
        prefix = f"{self._deployment}{server}-dp" if several else ""
        return [name for name in ranks if name.startswith(prefix)]

    def _alive(self, client: Client) -> bool:
        """Return whether a server's front end answers, even if the server's ranks are stuck."""
        ask: Callable[[], object] | None = None
        if isinstance(client, Counting):
            ask = partial(client.ranks, self._deployment)
        else:
            ask = getattr(client, "world_size", None)
        try:
            if ask is not None:
                self._call(ask, time.monotonic() + ALIVE_SECONDS, client)
        except Exception:
            return False
        return True

    # Calls.

    def _retry(
        self,
        call: Callable[[], object],
        until: float,
        client: Client | None = None,
        own: str = "",
    ) -> None:
        """Make an idempotent call, and retry it if no answer comes, or an answer to another call.

        After an error, vLLM may return the answer to a previous call: an error about the session.
        `own` is the only such error text that this call itself can cause.
        """
        for seconds in RETRY_SECONDS:
            try:
                return self._call(call, until, client)
            except Exception as error:
                text = _text(error)
                of_another = any(part in text for part in SESSION_ERRORS if part != own)
                if not (of_another or _unanswered(error)) or time.monotonic() + seconds >= until:
                    raise
                log.warning("%s: the call is repeated", text)
            time.sleep(seconds)
        return self._call(call, until, client)

    def _call(self, call: Callable[[], object], until: float, client: Client | None = None) -> None:
        """Make a call, and wait for the answer; raise SilentError at the time `until`."""
        client = self._client if client is None else client
        left = max(0.001, until - time.monotonic())
        if isinstance(client, Bounded):
            with client.within(left):
                call()
        else:
            _call_within(call, left)


def _call_within(call: Callable[[], object], seconds: float) -> None:
    """Make a call in a thread, which is abandoned after `seconds`.

    Raises:
        SilentError: The call did not return in time.
    """
    done: Future[None] = Future()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=work, name="weightbus-call", daemon=True).start()
    try:
        done.result(seconds)
    except FutureTimeout as error:
        if done.done():
            raise
        raise SilentError(f"a call of the client gave no answer within {seconds:.3g} s") from error


def _text(error: BaseException) -> str:
    """Return an error's text with the text of its HTTP answer, which vLLM's clients leave out."""
    answer = getattr(error, "response", None)
    more = getattr(answer, "text", "") if answer is not None else ""
    return f"{error}: {more}" if more else str(error) or type(error).__name__


def _unanswered(error: BaseException) -> bool:
    """Return whether a call failed because no answer came. An HTTP error is an answer."""
    if isinstance(error.__cause__, SilentError) or isinstance(error, SilentError):
        return True
    return isinstance(error, OSError) and getattr(error, "response", None) is None


def _label(name: str, receipt: Receipt, ranks: list[str]) -> str:
    """Return the version label for the server of these ranks; empty to keep its label."""
    known = [receipt.workers[rank] for rank in ranks if rank in receipt.workers]
    loaded = [each.state in ("applied", "skipped") for each in known]
    if known and all(loaded):
        return name
    torn = any(each.detail.endswith(NOTHING_RUNS) for each in known)
    return f"{name} in part" if torn or any(loaded) else ""


def checkpoint_name(name: str) -> str:
    """Return a parameter's name in checkpoints, without the prefixes of torch.compile and DDP."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def named(pairs: "Iterable[tuple[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Return tensors by their name in checkpoints.

    Raises:
        StateError: Two tensors have the same name.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        short = checkpoint_name(name)
        if short in weights:
            raise StateError(f"{name}: there is another {short}: publish each tensor once")
        weights[short] = _offloaded(tensor.detach())
    return weights


def _offloaded(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor; with several ranks, move it to the CPU: a GPU may be too small for all."""
    if tensor.device.type == "cpu":
        return tensor
    from torch import distributed

    gathered = distributed.is_available() and distributed.is_initialized()
    return tensor.cpu() if gathered and distributed.get_world_size() > 1 else tensor
