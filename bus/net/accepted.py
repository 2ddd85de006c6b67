"""Control connections as the kernel sees them: what came on each, whatever libzmq makes of it.

libzmq takes bytes before we see messages. It answers ZMTP's pings by itself, reads ahead, and
collects the frames of a message for as long as more come. So what the kernel says came on a
connection is held against the messages that we had of it: the rest is *unseen*, and is memory or
time that libzmq spends on a peer. A worker has next to none; whoever has more is hung up on.

The kernel counts for TCP alone, and only Linux tells. Elsewhere, and over ipc, which is a matter
among users of one host, messages alone are counted.

A descriptor that libzmq has named may be another connection's by now. So whatever is done to one is
done to a duplicate, after a look at whose it is. If it is another of this socket, that worker comes
back.

libzmq says as well which ones are closed, and the kernel whether a worker of this host has ended
with its connection, which then need not be waited for.
"""

import contextlib
import ctypes
import itertools
import logging
import math
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ..allowance import Allowance, Rate
from ..complaints import Complaints
from ..limits import HOSTS_MAX, NEWCOMERS, UNSEEN, UNSEEN_ALL, UNSEEN_SMALL
from . import endpoints
from .descriptors import Crowd, spent
from .processes import Process, connected_by, inode_of, process_with

log = logging.getLogger("weightbus.publisher")

LOOK_SECONDS, FLOODED_SECONDS = 0.05, 0.01  # between two looks; and while much is unseen
IDLE_SECONDS = 0.1  # where nothing is counted
NEW_SECONDS = 1.0  # after somebody came
LOOKS = 64  # connections at one look, those with much unseen aside; 2 microseconds each
PROOF_SECONDS = 0.05  # in which whoever said something and floods nobody is a newcomer
QUIET_SECONDS = 3.0  # without a hang-up, after which memory goes back to the system
DROPPED_KEPT = 4096  # connections that were hung up on, and may have left something to be read
RECEIVED = slice(128, 136)  # of Linux's `struct tcp_info`: tcpi_bytes_received (since 4.1)
SCRATCH_BYTES = 2**16
FINDS = Rate(64, 200)  # searches for processes: 0.2 ms each, or some ms where one has many files
FIND_SECONDS = 0.02  # until the next ones, where there were many
ENDING_SECONDS, AGAIN_SECONDS = 1.0, 0.01  # that a process may be there after its connections
_ATTACH_FILTER = 26  # Linux's SO_ATTACH_FILTER, which Python does not name
_NOTHING_PASSES = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF's "ret #0"
_FILTER = struct.pack("HP", 1, ctypes.addressof(_NOTHING_PASSES))  # a `struct sock_fprog`


_CHANCE_BYTES = 256
_chance, _drawing = ctypes.create_string_buffer(_CHANCE_BYTES), threading.Lock()


@contextlib.contextmanager
def unguessable_identities() -> Generator[None]:
    """Have a ROUTER that is made meanwhile begin anywhere with the identities that it gives out.

    libzmq counts them up from the C library's `rand`, which nobody seeds: in each fresh process the
    first would be the same. Peers can choose identities. One that has the next makes libzmq (4.3.5)
    abort the process; one that has a worker's, of which it is rid, is taken for that worker.

    Others draw from `rand` as well, and want to go on where they were.
    """
    libc = ctypes.CDLL(None)
    libc.initstate.restype, libc.setstate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    with _drawing:
        before = libc.initstate(0, _chance, ctypes.c_size_t(_CHANCE_BYTES))
        try:
            libc.srand(ctypes.c_uint(secrets.randbits(32)))
            yield
        finally:
            libc.setstate(before)


@dataclass(slots=True)
class _Connection:
    """One of them.

    Attributes:
        unseen: Bytes that are in no message that we had.
        came: Bytes that had come when it was looked at last.
        seen: Bytes of its messages since.
        said: Whether there was any.
        over: Whether it was hung up on; what is left of it is dropped.
        identity: What the ROUTER calls it; empty until it has said anything.
        process: The worker's, at the other end, if it is known.
    """

    unseen: Allowance
    came: int = 0
    seen: int = 0
    said: bool = False
    over: bool = False
    identity: bytes = b""
    process: Process | None = None


class Accepted:
    """The connections of a ROUTER.

    Args:
        counts: Whether the kernel counts what comes on them.
        crowd: Is told of those that there is no descriptor for.

    Attributes:
        look_at, find_at: When `look` has something to do.
        gone: Those that are closed, of which nobody was told yet: `take_closed` tells it.
        ending_at: When it has something to tell besides.
    """

    def __init__(self, crowd: Crowd, *, counts: bool) -> None:
        self._crowd = crowd
        self._name: str | int | None = None  # of this side of every connection: a path, or a port
        self._each: dict[int, _Connection] = {}  # by descriptor, of which there are only so many
        self._large: dict[int, float] = {}  # unseen bytes of those that have many
        self._dropped: dict[bytes, int] = {}  # identity and descriptor: peers can choose the former
        self._hosts: dict[str, Allowance] = {}  # where newcomers came from a moment ago
        self._newcomers: dict[int, tuple[Allowance, float]] = {}  # of whose, and until when
        self._followed: dict[int, int] = {}  # whose processes are to be found, by what they say
        self._finds, self.find_at = Allowance(FINDS, 0.0), math.inf
        self.gone: list[_Connection] = []
        self._ending: list[tuple[_Connection, float, str]] = []  # of which, and until when to look
        self.ending_at = math.inf
        self.look_at = self._trim_at = math.inf
        self._alert_until = 0.0
        self._complaints = Complaints(log, "hung up on a control connection: %s")
        self._scratch = bytearray(SCRATCH_BYTES)
        self._nothing = socket.socket(socket.AF_UNIX)
        self._spare = self._nothing.dup()  # of another, while that is looked at
        self._spare.setblocking(False)
        self._counts = counts and hasattr(socket, "TCP_INFO")
        self._turns: Iterator[int] = iter(())

    def belong_to(self, endpoint: str) -> None:
        """Say where the ROUTER is bound, and with that whose connections are its own."""
        path = endpoints.ipc_path(endpoint)
        if path is None:
            self._name = endpoints.host_and_port(endpoint)[1]
        else:
            self._name = endpoints.ipc_name(path)

    def close(self) -> None:
        """Close what is ours; calling it twice is fine."""
        self._nothing.close()
        self._spare.close()

    def accept(self, descriptor: int, now: float) -> None:
        """Take note of a new one; close it if it is one too many.

        libzmq spins once there is none left. And each that is hung up on costs time until its last
        message: so each host may have a few newcomers, and one more now and then. If all came at
        once, everybody else would wait for them. Who behaves is soon none, and makes room.
        """
        each = self._each[descriptor] = _Connection(Allowance(UNSEEN, now))
        if self._counts:
            self._large[descriptor] = 0.0  # so that it is looked at soon
        self._alert_until = now + NEW_SECONDS
        self.look_at = min(self.look_at, now + FLOODED_SECONDS)
        crowded = spent(descriptor)
        if crowded:
            self._crowd.note(descriptor, self._host(descriptor), now)
        if crowded or not self._may_come(descriptor, now):
            each.over = True
            self._shut_down(descriptor)

    def _may_come(self, descriptor: int, now: float) -> bool:
        host = self._host(descriptor)
        if host not in self._hosts:
            if len(self._hosts) >= HOSTS_MAX:
                self._hosts = {h: each for h, each in self._hosts.items() if not each.rested(now)}
            if len(self._hosts) >= HOSTS_MAX:
                return False
            self._hosts[host] = Allowance(NEWCOMERS, now)
        if not self._hosts[host].take(1, now):
            return False
        self._newcomers[descriptor] = self._hosts[host], now + PROOF_SECONDS
        return True

    def closed(self, descriptor: int) -> None:
        """Take note that one is closed; of its messages some may not have been taken yet."""
        self._followed.pop(descriptor, None)
        each = self._each.pop(descriptor, None)
        if each is not None and each.identity:
            self.gone.append(each)

    def take_closed(self, now: float) -> list[tuple[bytes, str]]:
        """Return the identities of those that were closed, and whose process has ended, in words.

        A process is there a moment longer than its connections: it is named again once it is not.
        """
        told: list[tuple[bytes, str]] = []
        closed = [(each, now + ENDING_SECONDS, "closed") for each in self.gone]
        before, self.gone, self._ending = self._ending, [], []
        for each, until, news in closed + before:
            process = each.process
            if process is not None and process.ended:
                told.append((each.identity, f"its process, {process.pid}, has ended"))
                continue
            if news:
                told.append((each.identity, ""))
            if process is not None and now < until:
                self._ending.append((each, until, ""))
        self.ending_at = now + AGAIN_SECONDS if self._ending else math.inf
        return told

    def follow(self, descriptor: int, pid: int) -> None:
        """Say whose a connection is: a worker's, which says that its process is `pid`."""
        each = self._each.get(descriptor)
        if each is None or each.over:
            return
        if isinstance(self._name, int):
            self._followed[descriptor] = pid
            self.find_at = 0.0  # at once, before it can end
            return
        with self._duplicate(descriptor) as connection:
            each.process = connected_by(connection)

    def _find(self, now: float) -> None:
        """Find the processes of some workers of this host."""
        while self._followed and self._finds.take(1, now):
            descriptor = next(iter(self._followed))
            pid = self._followed.pop(descriptor)
            with self._duplicate(descriptor) as connection:
                inode = inode_of(connection)
            if inode is not None:
                self._each[descriptor].process = process_with(pid, inode)
        self.find_at = now + FIND_SECONDS if self._followed else math.inf

    @contextlib.contextmanager
    def _duplicate(self, descriptor: int) -> Generator[socket.socket]:
        """Have the spare be a connection, if that is one of ours; else it is none at all."""
        try:
            with contextlib.suppress(OSError):
                os.dup2(descriptor, self._spare.fileno(), inheritable=False)
                if _local_name(self._spare) != self._name:  # it is another's by now
                    self._let_go()
            yield self._spare
        finally:
            self._let_go()

    def has(self, descriptor: int) -> bool:
        """Return whether there is such a connection. (One that was hung up on may be another.)"""
        each = self._each.get(descriptor)
        return each is not None and not each.over

    def saw(self, descriptor: int, identity: bytes, nbytes: int) -> bool:
        """Take note of a message; return False if its connection was hung up on."""
        each = self._each.get(descriptor)
        if each is None:
            return True
        each.seen, each.said, each.identity = each.seen + nbytes, True, identity
        if each.over:
            self.drop(identity, descriptor)
        return not each.over

    def drop(self, identity: bytes, descriptor: int) -> None:
        """Say that nothing of a connection is of use any more: thousands of messages may come."""
        self._dropped[identity] = descriptor
        if len(self._dropped) > DROPPED_KEPT:
            del self._dropped[next(iter(self._dropped))]

    def dropped(self, identity: bytes, descriptor: int) -> bool:
        """Return whether that was said. It is told at little cost, since others wait meanwhile."""
        found = self._dropped.get(identity)
        if found is None or found == descriptor:
            return found is not None
        del self._dropped[identity]  # it is another's by now
        return False

    def hang_up(self, descriptor: int, now: float, reason: str = "") -> None:
        """Close a connection. libzmq has no call for that, but closes what it finds shut down."""
        if descriptor in self._each:
            self._each[descriptor].over = True
        self._large.pop(descriptor, None)
        peer = self._shut_down(descriptor)
        if reason:
            self._complaints.warn(f"{peer} had {reason}", now)
        self._trim_at = now + QUIET_SECONDS
        self.look_at = min(self.look_at, self._trim_at)

    def look(self, now: float, *, drained: bool) -> None:
        """Hang up on whoever has too much unseen, and on the largest if all have together.

        The latter only where all messages are taken (`drained`): who waits for us is no flood.
        """
        if now >= self.find_at:
            self._find(now)
        if now < self.look_at:
            return
        if self._counts:
            for descriptor in self._next().union(self._large):
                self._look_at_one(descriptor, now)
            self._let_go()
            if drained:
                self._hang_up_on_the_largest(now)
        self._let_newcomers_be(now)
        if now >= self._trim_at:
            self._trim_at = math.inf
            give_memory_back()
        alert = self._large or now < self._alert_until
        often = FLOODED_SECONDS if alert else LOOK_SECONDS
        some = self._each or self._newcomers
        self.look_at = now + (often if self._counts else IDLE_SECONDS) if some else self._trim_at

    def _let_newcomers_be(self, now: float) -> None:
        """Make room for others in the place of those that have shown to be no flood."""
        for descriptor, (allowance, until) in list(self._newcomers.items()):
            due = now >= until and self.has(descriptor) and self._each[descriptor].said
            if due and self._counts:
                self._look_at_one(descriptor, now)
            if due or not self.has(descriptor):
                del self._newcomers[descriptor]
            if due and self.has(descriptor) and descriptor not in self._large:
                allowance.give_back(1)
        self._let_go()

    def _next(self) -> set[int]:
        """Return those whose turn it is."""
        found = set(itertools.islice(self._turns, LOOKS))
        if len(found) < LOOKS:
            self._turns = iter(list(self._each))
        return found

    def _look_at_one(self, descriptor: int, now: float) -> None:
        each, came = self._each.get(descriptor), self._came(descriptor)
        self._large.pop(descriptor, None)
        if each is None or each.over:
            return
        if came < each.came:  # it is closed, or another one's by now
            self.closed(descriptor)
            return
        unseen = came - each.came - each.seen
        each.came, each.seen = came, 0
        if not each.unseen.take(unseen, now):
            self.hang_up(descriptor, now, f"more than {UNSEEN.burst} bytes in no message")
        elif each.unseen.spent > UNSEEN_SMALL:
            self._large[descriptor] = each.unseen.spent

    def _hang_up_on_the_largest(self, now: float) -> None:
        left = sum(self._large.values())
        for descriptor, unseen in sorted(self._large.items(), key=lambda item: -item[1]):
            if left <= UNSEEN_ALL:
                break
            left -= unseen
            self.hang_up(descriptor, now, f"{unseen:.0f} bytes in no message, more than others")

    def _came(self, descriptor: int) -> int:
        """Return how many bytes came on a connection; -1 if it is none any more."""
        try:
            os.dup2(descriptor, self._spare.fileno(), inheritable=False)
            told = self._spare.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
        except OSError:
            return -1
        return int.from_bytes(told[RECEIVED], sys.byteorder)

    def _host(self, descriptor: int) -> str:
        """Return where a connection comes from; over ipc, or if it is gone, that is one place."""
        try:
            os.dup2(descriptor, self._spare.fileno(), inheritable=False)
            peer: tuple[str, int] | str | bytes = self._spare.getpeername()
        except OSError:
            return ""
        finally:
            self._let_go()
        return peer[0] if isinstance(peer, tuple) else ""

    def _shut_down(self, descriptor: int) -> str:
        """Shut a connection down, and drop what libzmq has not read of it; return whose it was."""
        peer = "one that is gone"
        with contextlib.suppress(OSError):
            os.dup2(descriptor, self._spare.fileno(), inheritable=False)
            if _local_name(self._spare) == self._name:
                peer = str(self._spare.getpeername())
                self._end()
        self._let_go()
        return peer

    def _end(self) -> None:
        """Have libzmq find the end of what comes; it hangs up there, once it has come to it.

        All at once is what it must not find: it aborts the process if a connection breaks that it
        does not read for now, and a ping of ZeroMQ's is in what it has read ahead.
        """
        how = socket.SHUT_RD
        if self._counts:  # over ipc nothing comes any more as it is
            try:
                self._spare.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _FILTER)
            except OSError:  # not everywhere
                how = socket.SHUT_RDWR
            # Or the kernel would wait for answers, which do not pass.
            self._spare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._spare.shutdown(how)
        while self._spare.recv_into(self._scratch, 0, socket.MSG_TRUNC):
            pass

    def _let_go(self) -> None:
        os.dup2(self._nothing.fileno(), self._spare.fileno(), inheritable=False)


def _local_name(connection: socket.socket) -> str | int:
    name: tuple[str, int] | str | bytes = connection.getsockname()
    return name[1] if isinstance(name, tuple) else os.fsdecode(name)


def give_memory_back() -> None:
    """Have the C library give freed memory to the system: most of what a flood took is kept by it.

    It keeps what libzmq's thread took and others freed, in as many pieces as there were messages.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
