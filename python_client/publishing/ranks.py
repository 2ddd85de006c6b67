"""The ranks of a process group: they agree on each gather, and move tensors to rank 0.

Theory of operation: a collective call that one rank does not make leaves the others waiting, and
breaks the group. So the ranks first meet in the group's store, which only rank 0 and the rank in
question take part in, key by key, each with a deadline:

    key        written by           value
    rounds     rank 0               how many rounds there were; the last one may be open
    N/plan     rank 0               the names, dtypes, shapes and shards of its model
    N/RANK     each other rank      the round of its connections (0: none), and what differs or has
                                    failed, if anything
    N/verdict  the first to decide  "go" and the round of everyone's connections (0: make new ones);
                                    or why there is no gather
    N/end      the first to fail    why the gather was not completed
    text/HASH  rank 0               a text that several rounds have in common, by its hash

The verdict is decided once, by `compare_set`: by rank 0 when all have answered, or by any rank
whose deadline passes before. A round with a verdict is closed: a rank that comes later waits for
the next one. So after an error all ranks may simply try again.

Then each rank connects to the others by a gloo group of its own, which the next rounds use again.
A failure breaks that group, and none of the user's: the next round makes a new one. Only tensors
that torch itself must gather, as those on GPUs, go through the groups of their mesh.
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
LOOK_SECONDS = 0.5  # seconds between two looks at the verdict: the store tells of one key at a time
MARGIN_SECONDS = 2.0  # seconds for rank 0 to say first who is late, since it alone knows that
ROUNDS_KEPT = 8  # rounds whose keys stay in the store
FAULTS_SHOWN = 4  # ranks that an error names
ANSWER_SECONDS = 3.0  # seconds after a deadline for the store to answer
SILENT = (
    "rank 0 does not answer: the process that has the store of torch.distributed is stopped, or "
    "its host is not reached"
)
FIRST_BYTES = 4096  # of the first message of `Round.tell`, which is the only one of a short text
TEXTS_KEPT = 8  # texts that rounds may have in common

KINDS: dict[str, type[WeightBusError]] = {
    "state": StateError,
    "late": DeadlineError,
    "failed": WeightBusError,
}


def own_host(master: str, port: int) -> str:
    """Return the address of this host's interface that reaches the group's store.

    On the store's own host, /etc/hosts may have its name as 127.0.0.1: then return the name, by
    which other nodes reach it.

    Raises:
        AddressError: There is no way to the store.
    """
    try:
        found = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)
        # A socket at all addresses of a host has its IPv4 ones; the IPv6 ones it may lack.
        family, kind, proto, _, there = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind, proto) as probe:
            probe.connect(there)  # sends nothing
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
    """Makes calls of the store in a thread.

    A call waits for the answer without end: also while the process that has the store is stopped.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = threading.Lock()  # held by a call until its answer comes
        self._stuck = False  # whether the last call had no answer in time
        threading.Thread(
            target=_make, args=(self._calls,), name="weightbus-store", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def try_again(self) -> None:
        """Wait for an earlier call, which had no answer in time: the process may be back."""
        self._stuck = False

    def later(self, call: Callable[[], object]) -> None:
        """Make a call before the next one; an error has no effect."""
        self._calls.put(partial(_quietly, call))

    def __call__(self, call: Callable[[], T], seconds: float) -> T:
        """Return what a call returns.

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
    """The store of the ranks; its calls end soon after a deadline.

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
            f"the store of torch.distributed is lost, perhaps since rank 0 has ended: {error}"
        ) from error


@dataclass
class _Kept:
    """What ranks keep from one round to the next.

    Attributes:
        number: The round in which the connections were made; 0: there are none.
        connections: The gloo group.
        caller: Makes calls of the store.
        texts: Texts that are in the store, by hash; the last one used is last.
    """

    number: int = 0
    connections: Any = None
    caller: _Caller = field(default_factory=_Caller)
    texts: dict[str, str] = field(default_factory=dict[str, str])


# By process group, so that it ends with the group, whose store it holds; and by key of the ranks.
_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Kept]] = WeakKeyDictionary()


class Ranks:
    """The ranks of a process group, which meet in the store of torch.distributed.

    Args:
        group: The group; None: all ranks.

    Attributes:
        rank: The index of this rank in the group. Rank 0 publishes.
        members: The global rank of each.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.members = dist.get_rank(group), dist.get_process_group_ranks(group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group whose ranks publish together")
        self._until = _deadline(0.0)  # of the call
        self._key = hashlib.sha256(json.dumps(self.members).encode()).hexdigest()[:16]

    @property
    def store(self) -> Any:
        """The store, with calls that end; not kept, as `own_store`."""
        return _PatientStore(self.own_store, self.kept.caller, self._until)

    @property
    def own_store(self) -> PrefixStore:
        """The store; not kept, since it would outlive the process group, and hold its port."""
        store = distributed_c10d._get_default_store()  # noqa: SLF001  # pyright: ignore
        return PrefixStore(f"weightbus/gather/{self._key}", store)

    @property
    def kept(self) -> _Kept:
        """What is kept between rounds; not here, since it holds the store."""
        world = distributed_c10d._get_default_group()  # noqa: SLF001  # pyright: ignore
        return _KEPT.setdefault(world, {}).setdefault(self._key, _Kept())

    @store_errors()
    def share(self, text: str) -> str:
        """Put a text where other ranks can read it with `shared`, on rank 0; return its hash."""
        key, texts = hash_of(text), self.kept.texts
        if key not in texts:
            self.store.set(f"text/{key}", text)
            while len(texts) >= TEXTS_KEPT:
                self.store.delete_key(f"text/{next(iter(texts))}")
                del texts[next(iter(texts))]
        texts[key] = texts.pop(key, text)
        return key

    def shared(self, key: str) -> str:
        """Return the text with a hash, on another rank, while a round is open that names it."""
        texts = self.kept.texts
        found = texts.pop(key, None)
        texts[key] = self._get(f"text/{key}") if found is None else found
        while len(texts) > TEXTS_KEPT:
            del texts[next(iter(texts))]
        return texts[key]

    @store_errors()
    def lead(self, plan: str, timeout: float, fault: str = "") -> "Round":
        """Open a round on rank 0, and return it once all ranks have joined.

        Args:
            plan: What rank 0 will gather.
            timeout: Seconds for all ranks to join, and again for the gather.
            fault: Why rank 0 will not gather, as the text of a verdict: the others are to hear it.

        Raises:
            StateError: The models differ, or one cannot be published.
            DeadlineError: A rank has not joined in time.
        """
        until, kept = _deadline(timeout), self.kept
        self._until = until
        kept.caller.try_again()
        others, own = range(1, len(self.members)), self.own_store

        def opens() -> int:
            number = own.add("rounds", 1)
            own.set(f"{number}/plan", plan)
            return number

        def clears() -> None:
            for key in ("plan", *map(str, others), "verdict", "end", "outcome"):
                own.delete_key(f"{number - ROUNDS_KEPT}/{key}")

        number = self._ask(opens)
        kept.caller.later(clears)  # what not even a rank that was stopped reads any more
        came = {r: self._read(f"{number}/{r}", number, until) for r in others}
        answers = {r: text.partition(" ") for r, text in came.items() if text is not None}
        faults = [f"rank {r}: {text}" for r, (_, _, text) in answers.items() if text]
        if fault:
            verdict = fault
        elif faults:
            more = len(faults) - FAULTS_SHOWN
            faults[FAULTS_SHOWN:] = [f"and {more} more ranks"] if more > 0 else []
            verdict = "state the ranks do not agree, so nothing was gathered:\n" + "\n".join(faults)
        elif len(answers) < len(others):
            verdict = self._late([r for r in others if r not in answers], timeout)
        else:
            same = all(int(theirs) == kept.number for theirs, *_ in answers.values())
            verdict = f"{GO} {kept.number if same else 0}"
        verdict = self._decide(number, verdict)
        return self._entered(number, verdict, timeout, plan)

    @store_errors()
    def follow(self, answer: Callable[[str], str], timeout: float) -> "Round":
        """Join the round that rank 0 opens, on another rank; return it once all have joined.

        Args:
            answer: Returns what differs from rank 0's plan; empty: nothing.
            timeout: Seconds for all ranks to join, and again for the gather.

        Raises:
            StateError, DeadlineError: As in `lead`.
        """
        until = self._until = _deadline(timeout)
        self.kept.caller.try_again()
        number, plan = self._opened(until)
        if plan is None:
            raise DeadlineError(self._late([0], timeout).partition(" ")[2])
        answered = f"{self.kept.number} {answer(plan)}"
        self._ask(partial(self.own_store.set, f"{number}/{self.rank}", answered))
        verdict = self._read(f"{number}/verdict", number, until)
        if verdict is None:
            others = range(1, len(self.members))
            missing = [r for r in others if not self.store.check([f"{number}/{r}"])]
            verdict = self._decide(number, self._late(missing or [0], timeout))
        return self._entered(number, verdict, timeout + MARGIN_SECONDS, plan)

    def _late(self, missing: list[int], timeout: float) -> str:
        """Return the verdict of a rank that has waited for others."""
        shown = ", ".join(map(str, missing[:FAULTS_SHOWN])) + ", ..." * (
            len(missing) > FAULTS_SHOWN
        )
        return (
            f"late rank {shown} did not make this call in the {timeout:g} s that rank {self.rank} "
            "has waited: every rank of the group publishes what gather() or sharded() returned"
        )

    def _opened(self, until: Deadline) -> tuple[int, str | None]:
        """Return the number and the plan of the open round; no plan: none was opened in time."""
        own, plan, number = self.own_store, None, 0

        def finds() -> int:
            last = own.add("rounds", 0)
            return last + (not last or own.check([f"{last}/verdict"]))

        while plan is None and until.left():
            number = self._ask(finds)
            plan = self._read(f"{number}/plan", number, until)
        return number, plan

    def _entered(self, number: int, verdict: str, timeout: float, plan: str) -> "Round":
        connected, kept = self._check(verdict), self.kept
        connections = kept.connections if connected and kept.number == connected else None
        # What a failure breaks is not used again.
        kept.number, kept.connections = 0, None
        return Round(self, number, _deadline(timeout), plan, connected, connections)

    def _ask(self, call: Callable[[], T]) -> T:
        """Return what calls of the store return, some at a time: each `_ask` takes a while."""
        return self.kept.caller(call, self._until.left() + ANSWER_SECONDS)

    def _read(self, key: str, number: int, until: Deadline) -> str | None:
        """Wait for a key of a round; return None after the deadline, or if the round is closed."""
        own, seconds = self.own_store, 0.0

        def waits() -> str:
            own.wait([key], timedelta(milliseconds=math.ceil(1000 * seconds)))
            return own.get(key).decode()

        while left := until.left():
            seconds, begun = min(LOOK_SECONDS, left), time.monotonic()
            try:
                return self._ask(waits)
            except RuntimeError:
                if time.monotonic() - begun < seconds / 2:  # not late, but lost
                    raise
            if self.store.check([f"{number}/verdict"]):
                break
        return self._get(key) if self.store.check([key]) else None

    def _get(self, key: str) -> str:
        return str(self.store.get(key), "utf-8")

    def _decide(self, number: int, verdict: str) -> str:
        """Return the verdict of a round: this one, unless there is one."""
        return str(self.store.compare_set(f"{number}/verdict", "", verdict), "utf-8")

    def ended(self, number: int, why: str) -> str:
        """Return why a gather has failed, as the first rank wrote that failed; else `why`."""
        try:
            return str(self.store.compare_set(f"{number}/end", "", why), "utf-8")
        except RuntimeError:  # the process that has the store is gone, too
            return why

    @store_errors()
    def conclude(self, number: int, fault: str) -> None:
        """Set the result of a round's publish, on rank 0; `fault` has the form of a verdict."""
        self.store.set(f"{number}/outcome", fault or GO)

    @store_errors()
    def outcome(self, number: int, deadline: Deadline) -> None:
        """Wait for the result of a round's publish, on another rank.

        Raises:
            DeadlineError: There is none in time.
            WeightBusError: Rank 0 has not published, or has ended.
        """
        key, self._until = f"{number}/outcome", deadline
        try:
            self.store.wait([key], timedelta(milliseconds=math.ceil(1000 * deadline.left())))
        except RuntimeError:
            deadline.check()  # else it is not late, but lost
            raise
        self._check(self._get(key))

    @staticmethod
    def _check(verdict: str) -> int:
        """Return the round of the connections in a verdict, or raise the error that it names."""
        kind, _, text = verdict.partition(" ")
        if kind != GO:
            raise KINDS[kind](text)
        return int(text or 0)

    def wait_for_end(self, number: int) -> None:
        """Give rank 0 time to write why it has closed its connections; it may be gone."""
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"{number}/end"], timedelta(seconds=MARGIN_SECONDS))


class Round:
    """One gather that all ranks have joined. Use it in a `with` statement.

    Args:
        ranks: The ranks.
        number: The number of the round.
        until: The deadline.
        plan: What rank 0 gathers.
        connected: The round in which `connections` were made.
        connections: The gloo group of an earlier round; None: the ranks connect now.

    Attributes:
        plan: What rank 0 gathers.
        number: The number of the round.

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
        self._ranks, self._number, self._until = ranks, number, until
        self._connected, self._group = connected, connections
        if connections is None:
            self._connected = number
            self._group = self._connect()

    def _connect(self) -> Any:
        ranks, number, until = self._ranks, self._number, self._until
        size, seconds = len(ranks.members), timedelta(seconds=max(1.0, until.left()))
        store = PrefixStore(f"{number}/addresses", ranks.own_store)
        about = store, ranks.rank, size, seconds
        try:
            connections: Any = ranks.kept.caller(
                partial(dist.ProcessGroupGloo, *about), seconds.total_seconds() + ANSWER_SECONDS
            )
        except RuntimeError as error:
            raise self._failed(f"failed the ranks could not connect: {error}") from error
        return connections

    def __enter__(self) -> "Round":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            kind = "state" if isinstance(error, StateError) else "failed"
            self._ranks.ended(self._number, f"{kind} rank {self._ranks.rank}: {error}")
        else:
            kept = self._ranks.kept
            kept.number, kept.connections = self._connected, self._group
        self._group = None  # after a failure, closes the connections: no rank waits for this one
        if self._connected == self._number:
            with contextlib.suppress(RuntimeError):  # gloo leaves its addresses in the store
                self._ranks.store.delete_key(f"{self._number}/addresses/0/{self._ranks.rank}")

    def left(self) -> float:
        """Return the seconds that are left for the round."""
        return self._until.left()

    def send(self, data: torch.Tensor, what: str) -> None:
        """Send the bytes of a tensor to rank 0."""
        self._move("send", 0, data, what, self._until.left())

    def receive(self, into: torch.Tensor, member: int, what: str, left: float) -> None:
        """Receive the bytes of a contiguous tensor from a member of the group, given global rank.

        Args:
            into: The tensor.
            member: The global rank.
            what: The name of the tensor, for errors.
            left: The seconds that are left.
        """
        rank = self._ranks.members.index(member)
        self._move("recv", rank, into, what, min(left, self._until.left()))

    def end(self, what: str, left: float = math.inf) -> None:
        """Return on rank 0 once every rank has called this, on others at once."""
        word, left = torch.zeros(1, dtype=torch.uint8), min(left, self._until.left())
        others = range(1, len(self._ranks.members)) if self._ranks.rank == 0 else [0]
        for other in others:
            self._move("send" if self._ranks.rank else "recv", other, word, what, left)

    def meet(self, what: str, left: float = math.inf) -> None:
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
        """Send bytes to other ranks, and receive bytes from others, all at once.

        Args:
            out: The bytes to send, by index of the rank.
            into: Memory for what arrives, by index of the rank.
            what: What is exchanged, for errors.
            left: The seconds that are left.

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
            works.clear()  # as in `_wait`

    def tell(self, other: int, data: bytes, what: str, left: float = math.inf) -> None:
        """Send bytes of any number to another rank, which calls `hear`."""
        framed = len(data).to_bytes(8, "little") + data
        for part in (framed[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"), framed[FIRST_BYTES:]):
            if part:
                flat = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._move("send", other, flat, what, min(left, self._until.left()))

    def hear(self, other: int, what: str, left: float = math.inf) -> bytes:
        """Receive bytes from another rank, which calls `tell`."""
        flat = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._move("recv", other, flat, what, min(left, self._until.left()))
        first = flat.numpy().tobytes()
        size = 8 + int.from_bytes(first[:8], "little")
        rest = torch.empty(max(0, size - FIRST_BYTES), dtype=torch.uint8)
        if len(rest):
            self._move("recv", other, rest, what, min(left, self._until.left()))
        return (first + rest.numpy().tobytes())[8:size]

    def together(
        self, call: Callable[[], torch.Tensor], what: str, left: float = math.inf
    ) -> torch.Tensor:
        """Return what a collective call of torch returns, which all ranks begin together.

        Raises:
            DeadlineError, WeightBusError: As in `_move`; or the call has failed, so that the
                process group of the tensor's mesh cannot be used any more.
        """
        self.meet(what, left)
        try:
            return call()
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        raise self._failed(f"failed torch could not gather {what} on all ranks: {why}")

    def _move(self, call: str, other: int, data: torch.Tensor, what: str, left: float) -> None:
        """Send to or receive from another rank.

        Raises:
            DeadlineError: The other rank was not there in time.
            WeightBusError: The other rank has ended, or a rank has failed.
        """
        self._wait([self._start(call, other, data, what)], other, what, left)

    def _start(self, call: str, other: int, data: torch.Tensor, what: str) -> Any:
        """Begin to send to or receive from another rank."""
        flat = data.reshape(-1).view(torch.uint8)
        with contextlib.suppress(RuntimeError):
            return getattr(self._group, call)([flat], other, 0)
        raise self._failed(f"failed rank {other} has ended, or its connection is lost, at {what}")

    def _wait(self, works: list[Any], other: int, what: str, left: float) -> None:
        """Wait for the end of sending or receiving; errors are those of `_move`.

        An unfinished work keeps the connections open, and other ranks waiting. So it is in a list,
        from which this takes it: no frame of the error's traceback has it then.
        """
        begun = time.monotonic()
        try:
            works.pop().wait(timedelta(milliseconds=math.ceil(1000 * max(left, 0.001))))
        except RuntimeError:
            pass  # what it names would keep the group, too
        else:
            return
        if time.monotonic() - begun >= left:
            raise self._failed(f"late rank {other} did not take part in time, at {what}")
        raise self._failed(f"failed rank {other} has ended, or its connection is lost, at {what}")

    def _failed(self, why: str) -> "WeightBusError":
        """Return the error for a failure, whose cause may be another rank's."""
        if self._ranks.rank:
            self._ranks.wait_for_end(self._number)
        kind, _, text = self._ranks.ended(self._number, why).partition(" ")
        return KINDS[kind](text)


def _deadline(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds, "")
