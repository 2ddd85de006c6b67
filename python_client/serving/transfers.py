"""A trainer's transfers to served models: staged while they generate, paused only for the load.

The bus decides and tells: a version is committed once every rank has staged it, and its receipt
says what each rank made of it. The server's calls only say when: they are made once all have it.

    publish together ... all ranks staged it           they generate; nobody has changed anything
    start, update ... each rank holds it, ready        or all are told to give it up
    pause, update, finish ... all ranks acknowledged   each loads it, and says that it runs it
    resume                                             resumed whatever happened

Any call may be lost, or come twice, or late. What no answer comes to is called again: each call
does the same when it is made twice. If that does not help, `_bring_back` has each server give the
version up before it generates again, so that a call that comes later loads nothing, and has it say
what its ranks run. Where a server does not answer that either, the next transfer does it first.
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
from .rank import Join, Version
from .server import PauseMode, VllmServers

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.serving")

RESUME_SECONDS = 10.0
# Of the time that servers may stand still, what is kept for those that are to be brought back; of a
# short one a quarter.
BACK_SECONDS, BACK_PART = 10.0, 4
AGAIN_SECONDS = 0.1, 0.4, 1.6  # before a call is made again to which no answer has come
HEARD_SECONDS = 1.0  # for the ranks' own word, where a server has not answered that it has loaded
ALIVE_SECONDS = 2.0  # for an answer of a server's front end
LOOK_SECONDS = 0.25  # between two looks at who has joined
# What vLLM's workers say of a session, to `start`, `update` and `finish`.
OPEN = "while a weight update is already active"
CLOSED = "start_weight_update must be called"
ENDED = "called without a matching start_weight_update"
SESSION_WORDS = OPEN, CLOSED, ENDED
WORDS_MAX = 500  # characters of an error that are told to the ranks


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`: what reaches all ranks of all servers."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@runtime_checkable
class Pausing(Protocol):
    """A client that can also have servers stand still."""

    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...


@runtime_checkable
class Telling(Protocol):
    """A client that can also have servers say which weights they run."""

    def update_weight_version(self, new_version: str) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A client whose calls end in time."""

    def within(self, seconds: float) -> AbstractContextManager[None]: ...


@runtime_checkable
class Counting(Protocol):
    """A client that knows its ranks."""

    def ranks(self, deployment: str) -> list[str]: ...


class Transfers:
    """The transfers of one model to the servers of one client.

    Args:
        publisher: Who publishes it, and tells what became of it.
        client: What reaches the servers.
        model: The model's id on the bus.
        deployment: What the servers are called on the bus.
        ranks: How many there are, if the client cannot tell.
        timeout: Seconds until every rank has a version, while the servers generate.
        pause_timeout: Seconds that they may stand still then.
        pause: What becomes of running requests meanwhile; None: the caller pauses.

    Raises:
        ServerError: A server does not answer, or is no vLLM with the routes of a transfer.
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
        self._gathered = False  # all ranks were there since they were told to join
        self._given_up: tuple[int, int] | None = None  # a version that servers may still hold
        self._sends = Lock()
        self._stands = False  # a server may stand still since then
        self._names = self._ask_names(ranks)
        count = len(self._names) or ranks
        if count is None:
            raise ValueError(
                f"{type(client).__name__} cannot tell how many ranks its servers have: say it, "
                "world_size= of the TrainerInit"
            )
        self._count = count

    def _ask_names(self, count: int | None) -> list[str]:
        """Return what the ranks are called; none: the client cannot tell, but they are counted."""
        if not isinstance(self._client, Counting):
            return []
        try:
            return self._client.ranks(self._deployment)
        except ServerError:
            if count is None:
                raise
            return []

    def join(self, tensors: Mapping[str, Signature]) -> None:
        """Have every rank join; each tries whether it can load such tensors, as they are published.

        Raises:
            ServerError: A server does not answer, or does not run weightbus's engine.
        """
        published = self._publisher.described(tensors)
        said = Join(
            address=self._publisher.address,
            model=self._model,
            deployment=self._deployment,
            deadline=self._pause_timeout,
            tensors={name: (dtype, [*shape]) for name, (dtype, shape) in published.items()},
        )
        self._join, self._gathered = asdict(said), False
        self._have_join(time.monotonic() + self._timeout)

    def send(self, weights: object, metadata: Mapping[str, str] | None = None) -> Receipt:
        """Publish weights, and have every rank load them.

        Returns:
            The receipt, in which every rank has applied them.

        Raises:
            PublishError: A rank has not; it says which, and why. Unless it says that a model is
                broken, every rank runs the weights that it ran before.
            DeadlineError: Another thread sends, and has not come to an end.
            WorkersMissingError: A rank is not there.
            ServerError: A server does not answer.
        """
        seconds = self._timeout + self._pause_timeout
        if not self._sends.acquire(timeout=seconds):
            raise DeadlineError(f"{self._model}: another thread sends it, for {seconds:g} s by now")
        try:
            return self._send(weights, metadata)
        finally:
            self._sends.release()

    def _send(self, weights: object, metadata: Mapping[str, str] | None) -> Receipt:
        staged_by = time.monotonic() + self._timeout
        self._bring_back_late(staged_by)
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
            return future.result(ANSWER_SECONDS)  # it says who has not
        return self._swap(version, future, ranks)

    def resume(self) -> None:
        """Have servers go on that could not be resumed before; nothing if all were.

        Raises:
            ServerError: One does not.
        """
        if self._stands and isinstance(self._client, Pausing):
            self._again(self._client.resume, time.monotonic() + RESUME_SECONDS)
            self._stands = False

    # Who is there.

    def _gather(self, until: float) -> list[str]:
        """Wait until all ranks are there; those of a server that was started again join again."""
        if self._gathered and self._lacking(self._there()):
            self._have_join(until)
        while lacking := self._lacking(there := self._there()):
            left = until - time.monotonic()
            if left <= 0:
                raise WorkersMissingError(
                    f"{self._count - len(there)} of {self._count} ranks are not there after "
                    f"{self._timeout:g} s: {lacking}. There are {', '.join(there) or 'none'}. "
                    f"Check that they reach {self._publisher.address}, and what their servers log"
                )
            more, seconds = len(self._workers()) + 1, min(left, LOOK_SECONDS)
            with suppress(WorkersMissingError):
                self._publisher.wait_for_workers(more, timeout=seconds, model=self._model)
        self._gathered = True
        return there

    def _have_join(self, until: float) -> None:
        join = partial(self._client.init_weight_transfer_engine, self._join)
        self._again(join, until)

    def _workers(self) -> list[str]:
        known = self._publisher.workers().values()
        return [w.name for w in known if w.state != "lost" and self._model in w.models]

    def _there(self) -> list[str]:
        """Return which of the ranks are there: others may have joined that want the same model."""
        if self._names:
            there = {*self._workers()}
            return [name for name in self._names if name in there]
        rank = re.compile(rf"{re.escape(self._deployment)}\d*-dp\d+-rank\d+")
        return [name for name in self._workers() if rank.fullmatch(name)]

    def _lacking(self, there: list[str]) -> str:
        """Say which ranks are not there; empty: all are."""
        if self._names:
            return ", ".join(name for name in self._names if name not in there)
        return "" if len(there) >= self._count else f"some of {self._deployment}"

    # A transfer.

    def _swap(self, version: tuple[int, int], future: Future[Receipt], ranks: list[str]) -> Receipt:
        """Have what is staged everywhere loaded."""
        end = time.monotonic() + self._pause_timeout
        until = end - min(BACK_SECONDS, self._pause_timeout / BACK_PART)
        name = "{}.{}".format(*version)
        self._given_up = version  # until all ranks run it
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
            receipt = self._bring_back(error, version, future, ranks, end)
        else:
            with suppress(Exception):
                self._resume(end)
        self._given_up = None
        if self._stands:
            log.warning("all ranks run version %s, but a server may stand still", name)
        return receipt

    def _open(self, until: float, client: Client | None = None) -> None:
        """Have each rank be in a session; one that was left open will do."""
        client = self._client if client is None else client
        try:
            self._again(client.start_weight_update, until, client, own=OPEN)
        except Exception as error:
            if OPEN not in _words(error):
                raise
            log.warning("a session was left open, or was opened twice; it is used")

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
        said = asdict(Version(*version, deadline=left / 2, load=load, cancel=cancel))
        update = partial(client.update_weights, said)
        try:
            self._again(update, until, client, own=CLOSED)
        except Exception as error:
            if CLOSED not in _words(error):
                raise
            self._open(until, client)  # a call of an earlier session has ended this one
            self._again(update, until, client)

    def _pause(self, until: float) -> None:
        if self._mode is not None and isinstance(self._client, Pausing):
            self._stands = True
            self._again(partial(self._client.pause, self._mode), until)

    def _resume(self, until: float) -> None:
        if self._stands and isinstance(self._client, Pausing):
            self._again(self._client.resume, max(until, time.monotonic() + 1.0))
            self._stands = False

    def _finish(self, name: str, future: Future[Receipt], until: float) -> None:
        """Have the ranks load it. This call alone has an effect, if it is made again: none of its.

        So, where no answer comes, the ranks are asked first: what they say over the bus counts.
        """
        finish = partial(self._client.finish_weight_update, name)
        try:
            self._call(finish, until)
        except Exception as error:
            if not _unanswered(error):
                raise
            log.warning("%s", error)
            wait([future], min(HEARD_SECONDS, max(0.0, until - time.monotonic())))
            if not future.done() and time.monotonic() >= until:
                raise
            if not future.done():
                self._call(finish, until)
            self._tell(name, until)

    def _result(self, future: Future[Receipt], until: float) -> Receipt:
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except FutureTimeout as error:
            if future.done():
                raise
            raise SilentError(
                f"not all ranks have acknowledged it within {self._pause_timeout:g} s"
            ) from error

    def _tell(self, name: str, until: float, client: Client | None = None) -> None:
        """Have servers say what they run, where that was not done by `finish`."""
        client = self._client if client is None else client
        if isinstance(client, Telling):
            self._again(partial(client.update_weight_version, name), until, client)

    # Bringing servers back.

    def _bring_back(
        self,
        error: BaseException,
        version: tuple[int, int],
        future: Future[Receipt],
        ranks: list[str],
        end: float,
    ) -> Receipt:
        """Have each server give a version up that not all have loaded, and go on.

        Returns:
            The receipt, if all ranks run the version nevertheless.

        Raises:
            PublishError: A rank does not run it; why that is, and why the session failed.
            BaseException: The `error`, if it is none of the transfer's, such as Ctrl-C.
        """
        why, clients = " ".join(_words(error).split())[:WORDS_MAX], self._clients()
        halfway = time.monotonic() + max(1.0, (end - time.monotonic()) / 2)
        with ThreadPoolExecutor(len(clients), "weightbus-back") as threads:

            def each(do: Callable[[Client], None]) -> dict[int, Exception]:
                calls = [threads.submit(do, client) for client in clients]
                found = {n: c.exception() for n, c in enumerate(calls)}
                return {n: e for n, e in found.items() if isinstance(e, Exception)}

            # Once a server has answered that, the bus knows what became of each of its ranks.
            cancel = why or "its trainer has given it up"
            failed = each(lambda c: self._update(version, halfway, c, cancel=cancel))
            self._publisher.give_up(future, why)
            receipt, verdict = self._verdict(future)
            ended = max(end, time.monotonic() + 1.0)
            names, several = "{}.{}".format(*version), len(clients) > 1
            silent: dict[int, Exception] = {}

            def back(client: Client) -> None:
                number = clients.index(client)
                if number not in failed:
                    with suppress(Exception):  # it may be ended already
                        self._call(client.finish_weight_update, ended, client)
                    its = self._ranks_of(number, ranks, several=several)
                    label = _label(names, receipt, its)
                    if label:
                        self._tell(label, ended, client)
                elif not self._alive(client):
                    silent[number] = failed[number]
                    return  # it would go on before it hears the calls that it has not answered
                if self._stands and isinstance(client, Pausing):
                    self._again(client.resume, ended, client)

            stays = {**each(back), **silent}
        all_of_them: object = self._client
        if not stays and self._stands and several and isinstance(all_of_them, Pausing):
            with suppress(Exception):  # for what it notes: each goes on
                self._again(all_of_them.resume, ended)
        self._stands = self._stands and bool(stays)
        if not isinstance(error, Exception):
            raise error
        if verdict is None:
            log.warning("all ranks run version %s, although a call failed: %s", names, why)
            return receipt
        raised = verdict if error is verdict else PublishError(f"{why}; {verdict}", receipt)
        for number, stay in stays.items() if self._stands else ():
            raised.add_note(
                f"{clients[number]!r} may still be paused, POST /resume to it: {_words(stay)}"
            )
        raise raised from (None if raised is error else error)

    def _verdict(self, future: Future[Receipt]) -> tuple[Receipt, PublishError | None]:
        """Return what the bus says of a version: its word counts."""
        try:
            return future.result(ANSWER_SECONDS), None
        except PublishError as error:
            return error.receipt, error

    def _bring_back_late(self, until: float) -> None:
        """Have servers that have not answered let go of what they may hold, and go on."""
        if self._given_up is not None:
            self._open(until)
            self._update(self._given_up, until, cancel="its trainer has given it up")
            with suppress(Exception):
                self._call(self._client.finish_weight_update, until)
            self._given_up = None
        self._resume(until)

    def _clients(self) -> list[Client]:
        """Return what reaches each server alone."""
        client = self._client
        if isinstance(client, VllmServers) and len(client.servers) > 1:
            return [*client.servers]
        return [client]

    def _ranks_of(self, number: int, ranks: list[str], *, several: bool) -> list[str]:
        beginning = f"{self._deployment}{number}-dp" if several else ""
        return [name for name in ranks if name.startswith(beginning)]

    def _alive(self, client: Client) -> bool:
        """Whether a server takes calls, in whatever state its ranks are."""
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

    def _again(
        self,
        call: Callable[[], object],
        until: float,
        client: Client | None = None,
        own: str = "",
    ) -> None:
        """Make a call that does the same when it comes twice: again, where no answer comes.

        Or where that of another call has come, which vLLM has left after an error. `own` is what
        vLLM says of the session to a call of this kind.
        """
        for seconds in AGAIN_SECONDS:
            try:
                return self._call(call, until, client)
            except Exception as error:
                words = _words(error)
                of_another = any(w in words for w in SESSION_WORDS if w != own)
                if not (of_another or _unanswered(error)) or time.monotonic() + seconds >= until:
                    raise
                log.warning("%s: it is called again", _words(error))
            time.sleep(seconds)
        return self._call(call, until, client)

    def _call(self, call: Callable[[], object], until: float, client: Client | None = None) -> None:
        """Make a call, and return when it is answered, by this moment."""
        client = self._client if client is None else client
        left = max(0.001, until - time.monotonic())
        if isinstance(client, Bounded):
            with client.within(left):
                call()
        else:
            _in_time(call, left)


def _in_time(call: Callable[[], object], seconds: float) -> None:
    """Make a call in a thread, which is left to itself when the time is over."""
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


def _words(error: BaseException) -> str:
    """Return an error's words, and those of an answer that clients of vLLM's leave out."""
    answer = getattr(error, "response", None)
    more = getattr(answer, "text", "") if answer is not None else ""
    return f"{error}: {more}" if more else str(error) or type(error).__name__


def _unanswered(error: BaseException) -> bool:
    """Whether no answer has come: of a server that refuses, it has."""
    if isinstance(error.__cause__, SilentError) or isinstance(error, SilentError):
        return True
    return isinstance(error, OSError) and getattr(error, "response", None) is None


def _label(name: str, receipt: Receipt, ranks: list[str]) -> str:
    """Return what a server of these ranks is to say that it runs; empty: what it says is so."""
    known = [receipt.workers[rank] for rank in ranks if rank in receipt.workers]
    loaded = [each.state in ("applied", "skipped") for each in known]
    if known and all(loaded):
        return name
    torn = any(each.detail.endswith(NOTHING_RUNS) for each in known)
    return f"{name} in part" if torn or any(loaded) else ""


def checkpoint_name(name: str) -> str:
    """Return a name as checkpoints have it: wrappers put words of their own between."""
    return name.replace("_orig_mod.", "").removeprefix("module.")  # of compile(), of DDP


def named(pairs: "Iterable[tuple[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Return tensors by the names that checkpoints have: wrappers put words of their own between.

    Raises:
        StateError: Two tensors have one name.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        short = checkpoint_name(name)
        if short in weights:
            raise StateError(f"{name}: there is another {short}: publish each tensor once")
        weights[short] = _held(tensor.detach())
    return weights


def _held(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a tensor that may be kept: the whole model may not fit on one device of several."""
    if tensor.device.type == "cpu":
        return tensor
    from torch import distributed

    gathered = distributed.is_available() and distributed.is_initialized()
    return tensor.cpu() if gathered and distributed.get_world_size() > 1 else tensor
