"""Lets the ranks of a process group agree on each publish, and exchange bytes with deadlines.

Theory of operation: if one rank does not make a collective call, the other ranks wait in it, and
the group breaks. So the ranks first agree through the keys of the group's store: each call of the
store has a deadline, and involves no other rank. Rank 0 opens *rounds*; N is the number of a round.

    key        written by           value
    rounds     rank 0               the number of rounds so far; the last one may be open
    N/plan     rank 0               the names, dtypes, shapes and shards of its model
    N/RANK     each other rank      the round in which it made its connections (0: it has none), and
                                    how its model differs from the plan, or what has failed
    N/verdict  the first to decide  "go" and the round in which all ranks made their connections (0:
                                    they make new ones), or why nothing is published
    N/end      the first to fail    why the round failed after the verdict
    N/outcome  rank 0               "go" if it has published, else why not
    text/HASH  rank 0               a text that several rounds use, by its hash

The verdict is set once, by `compare_set`: by rank 0 when all ranks have answered, or by any rank
whose deadline passes before. A round with a verdict is closed: a rank that comes later waits for
the next round. So after an error, all ranks may simply try again.

Then each rank connects to the others in a separate gloo group, which later rounds reuse. A failure
breaks only this group, not the user's, and the next round makes a new group. Only tensors that
torch itself must gather, such as those on GPUs, go through the groups of their mesh.
"""

import contextlib
import hashlib
import json
import math
import socket
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from ...bus.deadline import Deadline
from ...bus.errors import AddressError, DeadlineError
from ...bus.net.endpoints import is_loopback
from ...codecs.errors import StateError, WeightBusError
from .placement import hash_of

T = TypeVar("T")

GO = "go"
CHECK_SECONDS = 0.5  # seconds between two checks of the verdict: the store waits for only one key
MARGIN_SECONDS = 2.0  # how much longer other ranks wait: only rank 0 knows which rank is late
ROUNDS_KEPT = 8  # rounds whose keys stay in the store
FAULTS_SHOWN = 4  # ranks that an error names
ANSWER_SECONDS = 3.0  # seconds after a deadline for the store to answer
SILENT = (
    "rank 0 does not answer: the process that has the store of torch.distributed is stopped, or "
    "its host cannot be reached"
)
FIRST_BYTES = 4096  # size of the first message of `Round.send_bytes`; longer data needs a second
TEXTS_KEPT = 8  # shared texts that stay in the store

KINDS: dict[str, type[WeightBusError]] = {
    "state": StateError,
    "late": DeadlineError,
    "failed": WeightBusError,
}


def own_host(master: str, port: int) -> str:
    """Return the address of this host's interface from which it reaches the group's store.

    On the store's own host, /etc/hosts may map its name to 127.0.0.1: then return the name, with
    which other nodes reach it.

    Raises:
        AddressError: No interface reaches the store.
    """
    try:
        found = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)
        # Prefer IPv4: a socket bound to all addresses may not include those of IPv6.
        family, kind, proto, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # a datagram socket: sends nothing
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"no interface of this host is known to reach MASTER_ADDR={master}: {error}; give an "
            "address of this host that other nodes reach"
        ) from error
    if is_loopback(host) and not is_loopback(master):
        return master
    return host


class StoreSilentError(RuntimeError):
    """The process that has the store does not answer."""


class _Caller:
    """Makes calls of the store in a thread, so that they can time out.

    The call itself waits for an answer forever, even if the process that has the store is stopped.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = threading.Lock()  # held by a call until its answer arrives
        self._stuck = False  # whether the last call had no answer in time
        threading.Thread(
            target=_make, args=(self._calls,), name="weightbus-store", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def try_again(self) -> None:
        """Let the next call wait for an unanswered earlier one: the process may be back."""
        self._stuck = False

    def later(self, call: Callable[[], object]) -> None:
        """Queue a call, and do not wait for it. An error in it is ignored."""
        self._calls.put(partial(_quietly, call))

    def __call__(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call and return its result.

        Raises:
            StoreSilentError: There is no answer in time.
        """
        if not self._free.acquire(timeout=0.0 if self._stuck else seconds):
            raise StoreSilentError(SILENT)
        done, free = Future[T](), self._free

        def answer() -> None:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
            finally:
                free.release()

        self._calls.put(answer)
        finished, _ = wait([done], seconds)
        self._stuck = not finished
        if not finished:
            raise StoreSilentError(SILENT)
        return done.result()


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the next call of the store fails, too
        call()


def _make(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


class _PatientStore:
    """The store of the ranks, with methods that end soon after a deadline.

    Args:
        store: The store.
        caller: Makes the calls.
        until: The deadline.
    """

    def __init__(self, store: PrefixStore, caller: _Caller, until: Deadline) -> None:
        self._store, self._caller, self._until = store, caller, until

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        seconds = self._until.left() + ANSWER_SECONDS
        return lambda *about: self._caller(partial(method, *about), seconds)


@contextlib.contextmanager
def store_errors() -> Generator[None]:
    """Raise the errors of the store as errors of this package."""
    try:
        yield
    except StoreSilentError as error:
        raise DeadlineError(str(error)) from None
    except RuntimeError as error:  # stores raise several kinds
        raise WeightBusError(
            f"the store of torch.distributed is lost, perhaps because rank 0 has ended: {error}"
        ) from error


@dataclass
class _GroupState:
    """The state that a rank keeps from one round to the next.

    Attributes:
        number: The round in which the connections were made; 0: there are none.
        connections: The gloo group.
        caller: Makes calls of the store.
        texts: Texts that are in the store, by hash, in the order of their last use.
    """

    number: int = 0
    connections: Any = None
    caller: _Caller = field(default_factory=_Caller)
    texts: dict[str, str] = field(default_factory=dict[str, str])


# By process group, so that the state is freed with the group; and by the key of the ranks.
_STATES: WeakKeyDictionary[dist.ProcessGroup, dict[str, _GroupState]] = WeakKeyDictionary()


class Ranks:
    """The ranks of a process group, which meet in the store of torch.distributed.

    Args:
        group: The group; None: all ranks.

    Attributes:
        rank: The index of this rank in the group. Rank 0 publishes.
        members: The global rank of each rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.members = dist.get_rank(group), dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group whose ranks publish together")
        self._until = _deadline(0.0)  # the deadline of the present call
        self._key = hashlib.sha256(json.dumps(self.members).encode()).hexdigest()[:16]

    @property
    def store(self) -> Any:
        """The store, with methods that time out; made anew like `own_store`."""
        return _PatientStore(self.own_store, self.state.caller, self._until)

    @property
    def own_store(self) -> PrefixStore:
        """The store; not an attribute, which would outlive the process group and hold its port."""
        store = distributed_c10d._get_default_store()  # noqa: SLF001  # pyright: ignore
        return PrefixStore(f"weightbus/gather/{self._key}", store)

    @property
    def state(self) -> _GroupState:
        """The state between rounds; not an attribute, since it refers to the store."""
        world = distributed_c10d._get_default_group()  # noqa: SLF001  # pyright: ignore
        return _STATES.setdefault(world, {}).setdefault(self._key, _GroupState())

    @store_errors()
    def share(self, text: str) -> str:
        """Put a text into the store, on rank 0; return its hash, with which other ranks read it."""
        key, texts = hash_of(text), self.state.texts
        if key not in texts:
            self.store.set(f"text/{key}", text)
            while len(texts) >= TEXTS_KEPT:
                self.store.delete_key(f"text/{next(iter(texts))}")
                del texts[next(iter(texts))]
        texts[key] = texts.pop(key, text)
        return key

    def read_shared(self, key: str) -> str:
        """Return the text with this hash, which rank 0 wrote for the round. For other ranks."""
        texts = self.state.texts
        found = texts.pop(key, None)
        texts[key] = self._get(f"text/{key}") if found is None else found
        while len(texts) > TEXTS_KEPT:
            del texts[next(iter(texts))]
        return texts[key]

    @store_errors()
    def lead(self, plan: str, timeout: float, fault: str = "") -> "Round":
        """Open a round on rank 0, and return it once all ranks have joined.

        Args:
            plan: The plan of rank 0, with which the other ranks compare their model.
            timeout: Seconds for all ranks to join, and again for the exchange.
            fault: Why rank 0 will not publish, as a verdict for the other ranks; empty if it will.

        Raises:
            StateError: The models differ, or one cannot be published.
            DeadlineError: A rank has not joined in time.
            WeightBusError: The store is lost, or the ranks cannot connect.
        """
        until, state = _deadline(timeout), self.state
        self._until = until
        state.caller.try_again()
        others, own = range(1, len(self.members)), self.own_store

        def open_round() -> int:
            number = own.add("rounds", 1)
            own.set(f"{number}/plan", plan)
            return number

        def delete_old() -> None:
            for key in ("plan", *map(str, others), "verdict", "end", "outcome"):
                own.delete_key(f"{number - ROUNDS_KEPT}/{key}")

        number = self._call_store(open_round)
        state.caller.later(delete_old)  # not even a rank that was stopped reads these keys now
        texts = {r: self._read(f"{number}/{r}", number, until) for r in others}
        answers = {r: text.partition(" ") for r, text in texts.items() if text is not None}
        faults = [f"rank {r}: {text}" for r, (_, _, text) in answers.items() if text]
        if fault:
            verdict = fault
        elif faults:
            more = len(faults) - FAULTS_SHOWN
            faults[FAULTS_SHOWN:] = [f"and {more} more ranks"] if more > 0 else []
            verdict = "state the ranks do not agree, so nothing was gathered:\n" + "\n".join(faults)
        elif len(answers) < len(others):
            verdict = self._late_verdict([r for r in others if r not in answers], timeout)
        else:
            same = all(int(theirs) == state.number for theirs, *_ in answers.values())
            verdict = f"{GO} {state.number if same else 0}"
        verdict = self._decide(number, verdict)
        return self._enter(number, verdict, timeout, plan)

    @store_errors()
    def follow(self, answer: Callable[[str], str], timeout: float) -> "Round":
        """Join the round that rank 0 opens, on another rank; return it once all have joined.

        Args:
            answer: Returns how this rank differs from rank 0's plan; empty if not.
            timeout: Seconds for all ranks to join, and again for the exchange.

        Raises:
            StateError, DeadlineError, WeightBusError: As in `lead`.
        """
        until = self._until = _deadline(timeout)
        self.state.caller.try_again()
        number, plan = self._wait_for_round(until)
        if plan is None:
            raise DeadlineError(self._late_verdict([0], timeout).partition(" ")[2])
        text = f"{self.state.number} {answer(plan)}"
        self._call_store(partial(self.own_store.set, f"{number}/{self.rank}", text))
        verdict = self._read(f"{number}/verdict", number, until)
        if verdict is None:
            others = range(1, len(self.members))
            missing = [r for r in others if not self.store.check([f"{number}/{r}"])]
            verdict = self._decide(number, self._late_verdict(missing or [0], timeout))
        return self._enter(number, verdict, timeout + MARGIN_SECONDS, plan)

    def _late_verdict(self, missing: list[int], timeout: float) -> str:
        """Return the verdict of a rank that has waited too long for the missing ranks."""
        shown = ", ".join(map(str, missing[:FAULTS_SHOWN])) + ", ..." * (
            len(missing) > FAULTS_SHOWN
        )
        return (
            f"late rank {shown} did not make this call in the {timeout:g} s that rank {self.rank} "
            "has waited: every rank of the group must publish the result of gather() or sharded()"
        )

    def _wait_for_round(self, until: Deadline) -> tuple[int, str | None]:
        """Wait until a round is open; return its number and plan; no plan: not opened in time."""
        own, plan, number = self.own_store, None, 0

        def find_open() -> int:
            last = own.add("rounds", 0)
            return last + (not last or own.check([f"{last}/verdict"]))

        while plan is None and until.left():
            number = self._call_store(find_open)
            plan = self._read(f"{number}/plan", number, until)
        return number, plan

    def _enter(self, number: int, verdict: str, timeout: float, plan: str) -> "Round":
        connected, state = self._check(verdict), self.state
        connections = state.connections if connected and state.number == connected else None
        # Only a round that succeeds puts the connections back: a failure breaks them.
        state.number, state.connections = 0, None
        return Round(self, number, _deadline(timeout), plan, connected, connections)

    def _call_store(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which makes several calls of the store in one turn."""
        return self.state.caller(call, self._until.left() + ANSWER_SECONDS)

    def _read(self, key: str, number: int, until: Deadline) -> str | None:
        """Wait for a key of a round; return None after the deadline, or if the round is closed."""
        own, seconds = self.own_store, 0.0

        def wait_and_get() -> str:
            own.wait([key], timedelta(milliseconds=math.ceil(1000 * seconds)))
            return own.get(key).decode()

        while left := until.left():
            seconds, started = min(CHECK_SECONDS, left), time.monotonic()
            try:
                return self._call_store(wait_and_get)
            except RuntimeError:
                if time.monotonic() - started < seconds / 2:  # no timeout: the store is lost
                    raise
            if self.store.check([f"{number}/verdict"]):
                break
        return self._get(key) if self.store.check([key]) else None

    def _get(self, key: str) -> str:
        return str(self.store.get(key), "utf-8")

    def _decide(self, number: int, verdict: str) -> str:
        """Set the verdict of a round unless it has one; return the verdict that it has."""
        return str(self.store.compare_set(f"{number}/verdict", "", verdict), "utf-8")

    def record_failure(self, number: int, why: str) -> str:
        """Write why a round has failed, unless another rank did; return the text that is there."""
        try:
            return str(self.store.compare_set(f"{number}/end", "", why), "utf-8")
        except RuntimeError:  # the process that has the store is gone, too
            return why

    @store_errors()
    def set_outcome(self, number: int, fault: str) -> None:
        """Set a round's outcome, on rank 0: why nothing was published, as a verdict, or empty."""
        self.store.set(f"{number}/outcome", fault or GO)

    @store_errors()
    def wait_for_outcome(self, number: int, deadline: Deadline) -> None:
        """Wait for the outcome of a round's publish, on another rank.

        Raises:
            DeadlineError, StateError, WeightBusError: Rank 0 has not published (in time).
        """
        key, self._until = f"{number}/outcome", deadline
        try:
            self.store.wait([key], timedelta(milliseconds=math.ceil(1000 * deadline.left())))
        except RuntimeError:
            deadline.check()  # if this does not raise, the store is lost
            raise
        self._check(self._get(key))

    @staticmethod
    def _check(verdict: str) -> int:
        """Return the round of the connections that a verdict names, or raise its error."""
        kind, _, text = verdict.partition(" ")
        if kind != GO:
            raise KINDS[kind](text)
        return int(text or 0)

    def wait_for_failure(self, number: int) -> None:
        """Wait a moment for rank 0, unless it is gone, to write why it closed its connections."""
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"{number}/end"], timedelta(seconds=MARGIN_SECONDS))


class Round:
    """One exchange of bytes, which all ranks have joined. Use it in a `with` statement.

    Args:
        ranks: The ranks.
        number: The number of the round.
        until: The deadline.
        plan: The plan of rank 0.
        connected: The round in which `connections` were made.
        connections: The gloo group of an earlier round; None: the ranks connect now.

    Attributes:
        plan, number: As given.

    Raises:
        WeightBusError: The ranks cannot connect to each other.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        until: Deadline,
        plan: str,
        connected: int,
        connections: Any,
    ) -> None:
        self.plan, self.number = plan, number
        self._ranks, self._until = ranks, until
        self._connected, self._group = connected, connections
        if connections is None:
            self._connected = number
            self._group = self._connect()

    def _connect(self) -> Any:
        ranks, number, until = self._ranks, self.number, self._until
        size, seconds = len(ranks.members), timedelta(seconds=max(1.0, until.left()))
        store = PrefixStore(f"{number}/addresses", ranks.own_store)
        about = store, ranks.rank, size, seconds
        try:
            connections: Any = ranks.state.caller(
                partial(dist.ProcessGroupGloo, *about), seconds.total_seconds() + ANSWER_SECONDS
            )
        except RuntimeError as error:
            raise self._failure(f"failed the ranks could not connect: {error}") from error
        return connections

    def __enter__(self) -> "Round":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            kind = "state" if isinstance(error, StateError) else "failed"
            self._ranks.record_failure(self.number, f"{kind} rank {self._ranks.rank}: {error}")
        else:
            state = self._ranks.state
            state.number, state.connections = self._connected, self._group
        self._group = None  # after a failure, this closes the connections, so that no rank waits
        if self._connected == self.number:
            with contextlib.suppress(RuntimeError):  # gloo leaves its addresses in the store
                self._ranks.store.delete_key(f"{self.number}/addresses/0/{self._ranks.rank}")

    def left(self) -> float:
        """Return the seconds until the deadline of the round."""
        return self._until.left()

    def send(self, data: torch.Tensor, what: str) -> None:
        """Send the bytes of a tensor to rank 0."""
        self._move("send", 0, data, what, self._until.left())

    def receive(self, into: torch.Tensor, member: int, what: str, left: float) -> None:
        """Receive the bytes of a contiguous tensor from another rank.

        Args:
            into: The tensor.
            member: The global rank that sends.
            what: The name of the tensor, for errors.
            left: Seconds to wait.
        """
        rank = self._ranks.members.index(member)
        self._move("recv", rank, into, what, min(left, self._until.left()))

    def end(self, what: str, left: float = math.inf) -> None:
        """Return on rank 0 once every rank has called this, on other ranks at once."""
        word, left = torch.zeros(1, dtype=torch.uint8), min(left, self._until.left())
        others = range(1, len(self._ranks.members)) if self._ranks.rank == 0 else [0]
        for other in others:
            self._move("send" if self._ranks.rank else "recv", other, word, what, left)

    def barrier(self, what: str, left: float = math.inf) -> None:
        """Return once every rank has called this. `what` is for errors."""
        word, left = torch.zeros(1, dtype=torch.uint8), min(left, self._until.left())
        others = range(1, len(self._ranks.members)) if self._ranks.rank == 0 else [0]
        for call in ("recv", "send") if self._ranks.rank == 0 else ("send", "recv"):
            for other in others:
                self._move(call, other, word, what, left)

    def exchange(
        self,
        out: Mapping[int, torch.Tensor],
        into: Mapping[int, torch.Tensor],
        what: str,
        left: float = math.inf,
    ) -> None:
        """Send bytes to other ranks and receive bytes from other ranks, all at the same time.

        Args:
            out: The bytes to send, by index of the rank.
            into: Memory for what arrives, by index of the rank.
            what: What is exchanged, for errors.
            left: Seconds to wait.

        Raises:
            DeadlineError, WeightBusError: As in `_move`.
        """
        until = time.monotonic() + min(left, self._until.left())
        works = [(r, [self._start("recv", r, data, what)]) for r, data in into.items()]
        works += [(r, [self._start("send", r, data, what)]) for r, data in out.items()]
        works.reverse()
        try:
            while works:
                rank, work = works.pop()
                self._wait(work, rank, what, until - time.monotonic())
        finally:
            works.clear()  # an unfinished work keeps the connections open: see `_wait`

    def send_bytes(self, other: int, data: bytes, what: str, left: float = math.inf) -> None:
        """Send any number of bytes to another rank, which calls `receive_bytes`."""
        framed = len(data).to_bytes(8, "little") + data
        for part in (framed[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"), framed[FIRST_BYTES:]):
            if part:
                flat = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._move("send", other, flat, what, min(left, self._until.left()))

    def receive_bytes(self, other: int, what: str, left: float = math.inf) -> bytes:
        """Receive bytes from another rank, which calls `send_bytes`."""
        flat = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._move("recv", other, flat, what, min(left, self._until.left()))
        first = flat.numpy().tobytes()
        size = 8 + int.from_bytes(first[:8], "little")
        rest = torch.empty(max(0, size - FIRST_BYTES), dtype=torch.uint8)
        if len(rest):
            self._move("recv", other, rest, what, min(left, self._until.left()))
        return (first + rest.numpy().tobytes())[8:size]

    def collective(
        self, call: Callable[[], torch.Tensor], what: str, left: float = math.inf
    ) -> torch.Tensor:
        """Make a collective call of torch on all ranks at the same time; return its result.

        Raises:
            DeadlineError, WeightBusError: As in `_move`, or since the call has failed: then the
                process group of the tensor's mesh cannot be used any more.
        """
        self.barrier(what, left)
        try:
            return call()
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        raise self._failure(f"failed torch could not gather {what} on all ranks: {why}")

    def _move(self, call: str, other: int, data: torch.Tensor, what: str, left: float) -> None:
        """Send to or receive from another rank.

        Raises:
            DeadlineError: The other rank did not take part in time.
            WeightBusError: The other rank has ended, or a rank has failed.
        """
        self._wait([self._start(call, other, data, what)], other, what, left)

    def _start(self, call: str, other: int, data: torch.Tensor, what: str) -> Any:
        """Begin to send to or receive from another rank."""
        flat = data.reshape(-1).view(torch.uint8)
        with contextlib.suppress(RuntimeError):
            return getattr(self._group, call)([flat], other, 0)
        raise self._failure(f"failed rank {other} has ended, or its connection is lost, at {what}")

    def _wait(self, works: list[Any], other: int, what: str, left: float) -> None:
        """Wait until bytes are sent or received; raise the errors of `_move`.

        A reference to an unfinished work keeps the connections open, and other ranks waiting. So
        this method pops the work from a list: no frame in the error's traceback refers to it.
        """
        started = time.monotonic()
        try:
            works.pop().wait(timedelta(milliseconds=math.ceil(1000 * max(left, 0.001))))
        except RuntimeError:
            pass  # not chained to the error below, since its traceback refers to the group, too
        else:
            return
        if time.monotonic() - started >= left:
            raise self._failure(f"late rank {other} did not take part in time, at {what}")
        raise self._failure(f"failed rank {other} has ended, or its connection is lost, at {what}")

    def _failure(self, why: str) -> "WeightBusError":
        """Return the error of a failed round: the failure that a rank recorded first, or `why`."""
        if self._ranks.rank:
            self._ranks.wait_for_failure(self.number)
        kind, _, text = self._ranks.record_failure(self.number, why).partition(" ")
        return KINDS[kind](text)


def _deadline(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds, "")
